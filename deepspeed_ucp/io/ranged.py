"""Reading of files behind URLs by ranges of bytes: states straight to their places, headers by few requests.

What has come stays: an attempt goes on where the last one stopped. A file that has another version than the one that
was listed is refused: by the answer itself where that tells the version, else by a look at it behind the last answer.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import NoReturn

from ..errors import CheckpointError, UnsupportedError
from .http import get, read_span
from .interface import Stored
from .memory import drop_front, take_front
from .opened import Positioned, explain_failure
from .paths import FOLDER, Entry, normalize
from .presign import Access, Link
from .remote import ask, connect, find_entry, find_known, look_up
from .retry import CHANGED, HINTS, ChangedError, attempt
from .threads import run_threads

_HEAD = _TAIL = 64 << 10
"""Bytes of a header that are asked for at once, at the beginning of a file and at its end."""

_AHEAD = 16
"""Requests of one rank that are under way at once while headers are read."""

_PIECE = 2 << 20
"""Bytes that a file system is asked for at once: it has them in memory of its own until they are copied."""

_SPAN = re.compile(r"bytes\s+(\d+)-\d+/(\d+|\*)", re.IGNORECASE)
"""Which bytes an answer has: the first one's offset, and the bytes of the file."""


class _Ranges:
    """Ranges of one file, of the version that the last listing told, or else the first answer.

    Args:
        size: in bytes; asked for where it is not known.

    Raises:
        OSError: it cannot be found.
    """

    def __init__(self, url: str, size: int | None = None) -> None:
        self.url = normalize(url)
        self.system, self.path = connect(url)
        self._access = Access(self.system, self.path)
        entry = find_known(self.url) or (find_entry(self.url) if size is None else Entry(size, 0.0))
        if entry is None:
            raise FileNotFoundError(HINTS[404])
        if entry.size == FOLDER:
            raise IsADirectoryError("is a folder")
        self.entry = entry
        self._unsure = False  # whether bytes have come whose version nobody told

    def fill(self, views: list[memoryview], offset: int) -> None:
        """Fill memory from byte ``offset`` on; the list is used up. An attempt goes on where the last one stopped.

        Raises:
            OSError: it cannot be read, or has changed.
        """

        def left() -> int:
            return sum(view.nbytes for view in views)

        end = offset + left()

        def work() -> None:
            if views:
                self._fetch(views, end - left())

        attempt(work, self.url, left)

    def _fetch(self, views: list[memoryview], offset: int) -> None:
        """One request; what came is taken from the views, also where it fails in the end."""
        nbytes = sum(view.nbytes for view in views)
        if offset + nbytes > self.entry.size:
            raise ChangedError(f"ends at byte {self.entry.size}")
        self._access.use(
            lambda link: self._get(link, views, offset, nbytes),
            lambda: self._ask_system(views, offset, nbytes),
        )

    def _get(self, link: Link, views: list[memoryview], offset: int, nbytes: int) -> None:
        with get(link, {"Range": f"bytes={offset}-{offset + nbytes - 1}"}) as answer:
            if answer.status == 200 and (offset or answer.length != nbytes):
                self._refuse_whole()
            span = _SPAN.match(answer.headers.get("Content-Range", ""))
            if span and int(span[1]) != offset:  # of a cache in between
                raise OSError(f"bytes from {span[1]} on came where those from {offset} on were asked for")
            self._check(int(span[2]) if span and span[2] != "*" else None, answer.headers.get(link.version))
            read_span(answer, views)

    def _check(self, size: int | None, version: str | None) -> None:
        """Hold what is told of the file now against what was listed."""
        if size is not None and size != self.entry.size:
            raise ChangedError(CHANGED)
        if version and not self.entry.version:
            self.entry = replace(self.entry, version=version)
        elif version and version.strip('"') != self.entry.version.strip('"'):
            raise ChangedError(CHANGED)

    def _ask_system(self, views: list[memoryview], offset: int, nbytes: int) -> None:
        for low in range(offset, offset + nbytes, _PIECE):
            self._ask_piece(views, low, min(_PIECE, offset + nbytes - low))

    def _ask_piece(self, views: list[memoryview], offset: int, nbytes: int) -> None:
        data = memoryview(ask(self.system, "cat_file", self.path, start=offset, end=offset + nbytes))
        if data.nbytes > nbytes:
            self._refuse_whole()
        self._unsure = True
        _take(views, data)
        if data.nbytes < nbytes:
            self._compare()
            raise EOFError(f"{data.nbytes} bytes came of {nbytes}")

    def _refuse_whole(self) -> NoReturn:
        raise UnsupportedError("the server answers with the whole file where a part is asked for.", path=self.url)

    def confirm(self) -> None:
        """Make sure that all that has come is of the version that was listed; no thread may be reading.

        No version comes back once it was replaced: what the file is now it was when it was read.

        Raises:
            ChangedError: it is another one now.
            OSError: it is not there any more, or cannot be told.
        """
        if self._unsure:
            self._compare()
            self._unsure = False

    def _compare(self) -> None:
        now = look_up(self.url)
        self._check(now.size, now.version)


def _take(views: list[memoryview], data: memoryview) -> None:
    """Copy bytes to the front of the views, which they are taken from."""
    while data.nbytes:
        count = min(views[0].nbytes, data.nbytes)
        views[0][:count] = data[:count]
        drop_front(views, count)
        data = data[count:]


class RemoteFile(Stored):
    """A file behind a URL that is read by ranges, straight to their places.

    Args:
        size: in bytes; asked for where it is not known.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, url: str, size: int | None = None) -> None:
        self.path = url
        try:
            self._ranges = _Ranges(url, size)
        except OSError as error:
            raise explain_failure(url, "opened", error) from error

    def read(self, views: list[memoryview], offset: int) -> None:
        """One request, unless it fails."""
        with self._explain(f"read at byte {offset}"):
            self._ranges.fill(views, offset)

    def confirm(self) -> None:
        """A request, where the file system has read of it."""
        with self._explain("looked at again"):
            self._ranges.confirm()

    @contextmanager
    def _explain(self, work: str) -> Iterator[None]:
        try:
            yield
        except ChangedError as error:
            raise CheckpointError(
                f"{error}: something writes to it. Load again when that has ended, or another tag.", path=self.path
            ) from error
        except OSError as error:
            raise explain_failure(self.path, work, error) from error

    def read_some(self, views: list[memoryview], offset: int) -> int:
        """All of it, but at the end of the file."""
        nbytes = min(sum(view.nbytes for view in views), max(self._ranges.entry.size - offset, 0))
        self.read(take_front(views, nbytes), offset)
        return nbytes


class RemoteStream(Positioned):
    """A file behind a URL whose header is read: few requests, whose blocks are kept until it is closed.

    As a context manager it makes sure in the end that all of them are of one version.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, url: str) -> None:
        self._ranges = _Ranges(url)
        super().__init__(self._ranges.entry.size)
        self._lock = threading.Lock()
        self._blocks: list[tuple[int, bytes]] = []
        """(offset, bytes), by offset; they do not overlap."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self._ranges.confirm()

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Bytes from ``offset`` on; fewer where the file ends before."""
        low, high = min(offset, self.size), min(offset + nbytes, self.size)
        if low < high:
            if not self._blocks:  # a header lies at both ends
                self.read_ahead([(0, _HEAD), (max(self.size - _TAIL, 0), _TAIL)])
            for gap in self._find_gaps(low, high):
                self._fetch(*self._widen(*gap))
        return b"".join(data[max(low - at, 0) : high - at] for at, data in self._overlapping(low, high))

    def read_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read small pieces before they are asked for, several at once; of neighbours one request."""
        wanted = sorted((offset, min(offset + nbytes, self.size)) for offset, nbytes in ranges)
        gaps = _join(chain.from_iterable(self._find_gaps(*each) for each in wanted))

        def work(turn: Iterator[tuple[int, int]]) -> None:
            for low, high in turn:
                self._fetch(low, high)

        if gaps:
            run_threads([gap for each in gaps for gap in self._find_gaps(*each)], work, _AHEAD)

    def _fetch(self, low: int, high: int) -> None:
        data = bytearray(high - low)
        self._ranges.fill([memoryview(data)], low)
        with self._lock:
            self._blocks.append((low, bytes(data)))
            self._blocks.sort()

    def _widen(self, low: int, high: int) -> tuple[int, int]:
        """A gap with what will be asked for next, as far as it is not kept: the end of the file, or what follows."""
        before = max((at + len(data) for at, data in self._blocks if at < low), default=0)
        behind = min((at for at, _ in self._blocks if at >= high), default=self.size)
        tail = max(self.size - _TAIL, 0)
        return max(tail, before) if low >= tail else low, min(max(high, low + _HEAD), behind)

    def _overlapping(self, low: int, high: int) -> list[tuple[int, bytes]]:
        first = max(bisect_right(self._blocks, low, key=lambda block: block[0]) - 1, 0)
        return [(at, data) for at, data in self._blocks[first:] if at < high and at + len(data) > low]

    def _find_gaps(self, low: int, high: int) -> list[tuple[int, int]]:
        """What of [low, high) is not kept."""
        gaps = []
        for at, data in self._overlapping(low, high):
            if at > low:
                gaps.append((low, at))
            low = max(low, at + len(data))
        return [*gaps, (low, high)] if low < high else gaps


def _join(gaps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that do not overlap: those that do are joined, and those that one request had better serve."""
    joined: list[tuple[int, int]] = []
    for low, high in gaps:
        if joined and (low < joined[-1][1] or high - joined[-1][0] <= _HEAD):
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined
