"""A journal: what one node has finished, a line each, to be gone on with after a crash."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterator
from typing import Any

from .disk import explain_full
from .jsonfile import parse_json


class Journal:
    """One node's finished work, a line each; a line that a crash has torn is ignored."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        with explain_full(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._write(b"\n")  # an earlier attempt's last line may be torn

    def append(self, entry: dict[str, Any]) -> None:
        """Note that something is written; thread-safe.

        Raises:
            DiskFullError: there is no room.
        """
        text = json.dumps(entry, separators=(",", ":")).encode()
        with explain_full(self.path):
            self._write(b"%08x %s\n" % (zlib.crc32(text), text))

    def _write(self, line: bytes) -> None:
        with self._lock:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: str) -> Iterator[dict[str, Any]]:
    """The whole entries of a journal, in order."""
    with open(path, "rb") as stream:
        for line in stream:
            crc, _, text = line.rstrip(b"\n").partition(b" ")
            if crc == b"%08x" % zlib.crc32(text):
                yield parse_json(text, path)
