"""Uploads to the S3 server of the tests by plain HTTP: the floor of ours."""

from __future__ import annotations

import http.client
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.message import Message
from pathlib import Path

BUCKET = "bucket"
PART, FILES, PARTS = 8 << 20, 4, 4  # as the writer uploads: so many files at once, and parts of each
IN_FLIGHT = FILES * PARTS


@contextmanager
def serve_store(*, wanted: bool) -> Iterator[int]:
    """The port of the tests' S3 server, in a process of its own; 0 without."""
    if not wanted or not importlib.util.find_spec("moto"):
        yield 0
        return
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            port = int((process.stdout or sys.stdin.buffer).readline())
            empty_store(port)
            yield port
        finally:
            process.kill()


_SERVER = """
import sys
from tests.stores.server import serve
with serve() as server:
    print(server.port, flush=True)
    sys.stdin.read()  # until whoever has started it ends
"""


def empty_store(port: int) -> None:
    """Have a server that holds nothing but an empty bucket."""
    ask_store(port, "POST", "/moto-api/reset")
    ask_store(port, "PUT", f"/{BUCKET}")


def ask_store(port: int, method: str, path: str, body: bytes = b"") -> tuple[Message, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        told = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{method} {path}: {answer.status} {told[:1000]!r}")
    return answer.headers, told


def put_pieces(port: int, files: Sequence[Path]) -> None:
    """Each piece of the files is an object, which nothing has to put together."""

    def put(piece: tuple[Path, int]) -> None:
        file, start = piece
        ask_store(port, "PUT", f"/{BUCKET}/{file.name}/{start}", _read(file, start))

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(put, [(file, start) for file in files for start in _list_starts(file)]))


def put_parts(port: int, files: Sequence[Path]) -> None:
    """The pieces of each file become one object again."""

    def put(file: Path) -> None:
        url = f"/{BUCKET}/{file.name}"
        told = ask_store(port, "POST", f"{url}?uploads")[1].decode()
        upload = told.partition("<UploadId>")[2].partition("<")[0]

        def put_part(number: int, start: int) -> str:
            sent = ask_store(port, "PUT", f"{url}?partNumber={number}&uploadId={upload}", _read(file, start))
            return f"<Part><PartNumber>{number}</PartNumber><ETag>{sent[0]['ETag']}</ETag></Part>"

        with ThreadPoolExecutor(PARTS) as pool:
            parts = "".join(pool.map(put_part, itertools.count(1), _list_starts(file)))
        done = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>"
        ask_store(port, "POST", f"{url}?uploadId={upload}", done.encode())

    with ThreadPoolExecutor(FILES) as pool:
        list(pool.map(put, files))


def _list_starts(file: Path) -> range:
    return range(0, max(file.stat().st_size, 1), PART)


def _read(file: Path, start: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read(PART)
