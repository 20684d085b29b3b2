"""Google's and Azure's object stores, as far as obstore asks them: objects in memory, listings, conditional writes."""

from __future__ import annotations

import hashlib
import http.server
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
_CHANGED = "Fri, 02 Jan 2026 03:04:05 GMT"


class StandIn(http.server.BaseHTTPRequestHandler):
    """One bucket.

    Attributes:
        objects: content and generation, by key.
    """

    protocol_version = "HTTP/1.1"
    objects: dict[str, tuple[bytes, int]]
    generations: Iterator[int]

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def describe(self, key: str) -> dict[str, str]:
        data, generation = self.objects[key]
        tag = f'"{hashlib.sha256(b"%d" % generation + data).hexdigest()[:16]}"'
        return {"ETag": tag, "Last_Modified": _CHANGED, "x_goog_generation": str(generation)}

    def split(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        path = unquote(url.path).partition(f"/{BUCKET}")[2].lstrip("/")
        return path, {name: values[0] for name, values in parse_qs(url.query).items()}

    def do_GET(self) -> None:
        key, query = self.split()
        if not key:
            prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
            found = sorted(name for name in self.objects if name.startswith(prefix))
            cut = {name: name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "") for name in found}
            folders = sorted({f"{prefix}{front}/" for front, slash, _ in cut.values() if slash})
            files = [name for name in found if not cut[name][1]]
            return self.answer(200, self.list_objects(files, folders).encode(), Content_Type="application/xml")
        if key not in self.objects:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        data, headers, span = self.objects[key][0], self.describe(key), self.headers.get("Range")
        if span is None:
            return self.answer(200, data, **headers)
        low, high = (int(part) for part in span.removeprefix("bytes=").split("-"))
        part = data[low : high + 1]
        told = f"bytes {low}-{low + len(part) - 1}/{len(data)}"
        return self.answer(206, part, Content_Range=told, **headers)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        key, _ = self.split()
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.may_write(key):
            return self.answer(412)
        self.objects[key] = data, next(self.generations)
        return self.answer(201, **self.describe(key))

    def do_DELETE(self) -> None:
        self.answer(202 if self.objects.pop(self.split()[0], None) else 404)

    def may_write(self, key: str) -> bool:
        raise NotImplementedError

    def list_objects(self, files: list[str], folders: list[str]) -> str:
        raise NotImplementedError


class Google(StandIn):
    """Its XML API."""

    def may_write(self, key: str) -> bool:
        wanted = self.headers.get("x-goog-if-generation-match")
        return wanted is None or int(wanted) == self.objects.get(key, (b"", 0))[1]

    def list_objects(self, files: list[str], folders: list[str]) -> str:
        told = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
            f"<ETag>{escape(self.describe(key)['ETag'])}</ETag><Size>{len(self.objects[key][0])}</Size></Contents>"
            for key in files
        )
        told += "".join(f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders)
        return f"<ListBucketResult><Name>{BUCKET}</Name><IsTruncated>false</IsTruncated>{told}</ListBucketResult>"


class Azure(StandIn):
    """Its blobs; a listing has ETags without quotation marks."""

    def may_write(self, key: str) -> bool:
        tag = self.describe(key)["ETag"] if key in self.objects else None
        if self.headers.get("If-None-Match") == "*" and tag:
            return False
        return self.headers.get("If-Match") in (None, tag)

    def do_POST(self) -> None:
        """Delete several blobs: a multipart message of requests, answered by one of answers."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        answers = ""
        for number, line in enumerate(line for line in body.splitlines() if line.startswith("DELETE ")):
            key = unquote(urlsplit(line.split()[1]).path).partition(f"/{BUCKET}/")[2]
            status = "202 Accepted" if self.objects.pop(key, None) else "404 The specified blob does not exist."
            answers += f"--batch\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
            answers += f"HTTP/1.1 {status}\r\nx-ms-request-id: 1\r\n\r\n"
        self.answer(202, f"{answers}--batch--".encode(), Content_Type="multipart/mixed; boundary=batch")

    def list_objects(self, files: list[str], folders: list[str]) -> str:
        told = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{_CHANGED}</Last-Modified>"
            f"<Etag>{escape(self.describe(key)['ETag'][1:-1])}</Etag>"
            f"<Content-Length>{len(self.objects[key][0])}</Content-Length><Content-Type>text/plain</Content-Type>"
            "</Properties></Blob>"
            for key in files
        )
        told += "".join(f"<BlobPrefix><Name>{escape(each)}</Name></BlobPrefix>" for each in folders)
        return f'<EnumerationResults ContainerName="{BUCKET}"><Blobs>{told}</Blobs><NextMarker/></EnumerationResults>'


@contextmanager
def serve(kind: type[StandIn]) -> Iterator[str]:
    """The server's address."""
    handler = type("Serving", (kind,), {"objects": {}, "generations": itertools.count(1)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
