"""A folder as Google's and Azure's stores serve it: the few calls that reading takes."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"


class StandIn(http.server.BaseHTTPRequestHandler):
    """One bucket, whose objects are the files below a folder.

    Attributes:
        asked: (path, query, headers) of the requests for an object's bytes.
        refusing: whether what is asked for by a signed address, or with a token, is refused.
    """

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str, dict[str, str]]]
    refusing = False

    def __init__(self, *args: Any, root: Path) -> None:
        self.root = root
        super().__init__(*args)

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_object(self, key: str, **headers: str) -> None:
        file, url = self.root / key, urlsplit(self.path)
        if not file.is_file():
            return self.send(404, b"", x_ms_error_code="BlobNotFound")
        data = file.read_bytes()
        if self.command == "GET":
            self.asked.append((key, url.query, dict(self.headers)))
        told = {"ETag": tag(file), "Last_Modified": changed(file), "Accept_Ranges": "bytes", **headers}
        span = self.headers.get("Range") or self.headers.get("x-ms-range")
        if span is None:
            return self.send(200, data, **told)
        low, high = (int(part) for part in span.removeprefix("bytes=").split("-"))
        part = data[low : high + 1]
        return self.send(206, part, Content_Range=f"bytes {low}-{low + len(part) - 1}/{len(data)}", **told)

    def list_folder(self, prefix: str, delimiter: str) -> tuple[dict[str, Path], list[str]]:
        """Objects by key, and folders."""
        objects, folders = {}, set()
        for file in sorted(path for path in self.root.rglob("*") if path.is_file()):
            key = file.relative_to(self.root).as_posix()
            if key.startswith(prefix):
                inside, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                if found:
                    folders.add(f"{prefix}{inside}/")
                else:
                    objects[key] = file
        return objects, sorted(folders)


def tag(file: Path) -> str:
    return f'"{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"'


def changed(file: Path) -> str:
    return formatdate(file.stat().st_mtime, usegmt=True)


class Google(StandIn):
    """Its JSON API; ETags of that one are others than those of a download, generations are the same."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        kind, _, key = url.path.partition(f"/b/{BUCKET}/o")
        key = unquote(key.lstrip("/"))
        if kind.startswith("/download"):
            self._send_data(key)
        elif key:
            self._send_info(key)
        else:
            objects, folders = self.list_folder(query.get("prefix", ""), query.get("delimiter", ""))
            self._send_json({"items": [_describe(*each) for each in objects.items()], "prefixes": folders})

    def _send_data(self, key: str) -> None:
        if self.refusing and self.headers.get("User-Agent", "").startswith("deepspeed_ucp"):
            self.send(401, b"")
        else:
            self.send_object(key, x_goog_generation=_generation(self.root / key))

    def _send_info(self, key: str) -> None:
        if (self.root / key).is_file():
            self._send_json(_describe(key, self.root / key))
        else:
            self.send(404, b'{"error": {"code": 404, "message": "No such object"}}')

    def _send_json(self, told: Any) -> None:
        self.send(200, json.dumps(told).encode(), Content_Type="application/json")


def _generation(file: Path) -> str:
    return str(file.stat().st_mtime_ns) if file.is_file() else ""


def _describe(key: str, file: Path) -> dict[str, str]:
    told = {"name": key, "bucket": BUCKET, "size": str(file.stat().st_size), "etag": f"C{tag(file)[1:5]}="}
    return {**told, "generation": _generation(file), "updated": "2026-01-01T00:00:00.000Z"}


class Azure(StandIn):
    """Its blobs."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        key = unquote(url.path).partition(f"/{BUCKET}")[2].lstrip("/")
        if query.get("comp") == "list":
            self._list(query)
        elif not key:
            self.send(200, b"", ETag='"0"', Last_Modified=changed(self.root))
        elif self.refusing and "sig" in query:
            self.send(403, b"")
        else:
            self.send_object(key, x_ms_blob_type="BlockBlob")

    def _list(self, query: dict[str, str]) -> None:
        objects, folders = self.list_folder(query.get("prefix", ""), query.get("delimiter", ""))
        told = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Content-Length>{file.stat().st_size}</Content-Length>"
            f"<Etag>{escape(tag(file)[1:-1])}</Etag><Last-Modified>{changed(file)}</Last-Modified>"
            "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            for key, file in objects.items()
        )
        told += "".join(f"<BlobPrefix><Name>{escape(each)}</Name></BlobPrefix>" for each in folders)
        told = f'<EnumerationResults ContainerName="{BUCKET}"><Blobs>{told}</Blobs><NextMarker/></EnumerationResults>'
        self.send(200, f'<?xml version="1.0" encoding="utf-8"?>{told}'.encode(), Content_Type="application/xml")


@contextmanager
def serve(root: Path, kind: type[StandIn]) -> Iterator[tuple[str, type[StandIn]]]:
    """The server's address, and what it was asked for."""
    handler = type("Serving", (kind,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, root=root))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
