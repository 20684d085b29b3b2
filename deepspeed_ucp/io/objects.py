"""Object stores as a :class:`Store`: lists, conditional writes, uploads, and reads by byte ranges.

A listing gives size and version (ETag) of each object, which later reads expect: an object that was replaced meanwhile
is refused. Each answer names its version, so no further request is needed.
"""

from __future__ import annotations

import os
import random
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError, NotSupportedError, PreconditionError

from ..errors import CheckpointError, UnsupportedError
from .clients import ABSENT, connect, describe, explain
from .interface import Store
from .memory import drop_front, take_front
from .opened import CHANGED, ChangedError, Positioned, Stored, explain_failure
from .paths import FOLDER, Entry, find_store, normalize
from .threads import run_threads

ATTEMPTS, PAUSE = 8, 0.2
"""Reads in a row that are cut before their first piece until a read fails, and seconds of the first pause."""

_PIECE = 256 << 10
"""Bytes that are copied to their destination at once, while a cache holds them. A read that is cut continues there."""

_PART, _PARTS, _MOST_PARTS = 8 << 20, 4, 10_000
"""Bytes of a part of an upload, parts of one object in flight, and the most parts that S3 takes."""

_uploads = threading.BoundedSemaphore(10)
"""Limit of files that are uploaded at once: parts of all of them are in memory."""

_LOOKS = 3
"""Attempts of a conditional write while other processes write the object."""

_SMALL = 1 << 30
"""Limit of bytes of a small file: the manifest of a million tensors."""

_HEAD = _TAIL = 64 << 10
"""Bytes of a header that are read at once, at both ends of a file."""

_AHEAD = 16
"""Requests of one rank in flight while it reads headers."""

_known: dict[str, Entry] = {}
"""Size and version of each object, by URL, from the last listing."""


def make_version(e_tag: str | None, changed: datetime | None) -> str:
    """Return an identifier of an object's content: its ETag, or the time of its last change; may be empty."""
    seconds = changed.timestamp() if changed else 0.0
    return (e_tag or "").strip('"') or (repr(seconds) if seconds else "")


def _make_entry(meta: Mapping[str, Any]) -> Entry:
    version = make_version(meta["e_tag"], meta["last_modified"])
    return Entry(int(meta["size"]), meta["last_modified"].timestamp(), version)


def note(folder: str, entries: Mapping[str, Entry]) -> None:
    """Record the entries of a listing for later reads."""
    folder = normalize(folder)
    _known.update({f"{folder}/{name}": entry for name, entry in entries.items() if not entry.is_folder})


def find_known(url: str) -> Entry | None:
    """Return an object's entry from the last listing."""
    return _known.get(normalize(url))


class ObjectStore(Store):
    """S3, Google Cloud Storage and Azure Blob Storage. A folder is a prefix of names: it exists if it has objects."""

    def list_folder(self, folder: str) -> dict[str, Entry]:
        client, prefix = connect(folder)
        with explain(folder):
            listing = obstore.list_with_delimiter(client, prefix or None)
        objects = {_name(meta["path"]): _make_entry(meta) for meta in listing["objects"] if meta["path"] != prefix}
        entries = {
            **objects,
            **{_name(prefix_below): Entry(FOLDER, 0.0) for prefix_below in listing["common_prefixes"]},
        }
        if prefix and not entries:
            raise FileNotFoundError(ABSENT)
        note(folder, entries)
        return entries

    def list_tree(self, folder: str) -> dict[str, Entry]:
        client, prefix = connect(folder)
        with explain(folder):
            listing = [meta for page in obstore.list(client, prefix or None, chunk_size=1000) for meta in page]
        inside = {meta["path"][len(prefix) :].lstrip("/"): _make_entry(meta) for meta in listing}
        above = {name.rpartition("/")[0] for name in inside}  # objects of such names are markers of folders
        entries = {name: entry for name, entry in inside.items() if name and not (name in above and not entry.size)}
        if prefix and not listing:
            raise FileNotFoundError(ABSENT)
        note(folder, entries)
        return entries

    def note_listed(self, folder: str, entries: Mapping[str, Entry]) -> None:
        note(folder, entries)

    def find_entry(self, url: str) -> Entry | None:
        client, key = connect(url)
        with suppress(FileNotFoundError), explain(url):
            if key:
                entry = _make_entry(obstore.head(client, key))
                _known[normalize(url)] = entry
                return entry
        return Entry(FOLDER, 0.0) if self.is_folder(url) else None

    def is_folder(self, url: str) -> bool:
        client, prefix = connect(url)
        with suppress(FileNotFoundError), explain(url):
            pages = obstore.list(client, prefix or None, chunk_size=2)
            return any(meta["path"] != prefix for page in pages for meta in page) or not prefix
        return False

    def read_small(self, url: str, most: int | None = None) -> bytes:
        return _read_front(url, most)[0]

    def write_small(self, url: str, data: bytes) -> None:
        client, key = connect(url, writing=True)
        with explain(url):
            obstore.put(client, key, data, use_multipart=False)

    def exchange_small(self, url: str, data: bytes, before: bytes | None) -> bool:
        """Write under a condition. If the answer is lost, the next read shows if it was done."""
        client, key = connect(url, writing=True)
        for _ in range(_LOOKS):
            now, mode = None, "create"
            with suppress(FileNotFoundError):
                now, mode = _read_front(url, None)
            if now == data or now != before:
                return now == data
            if _put_where(client, key, data, mode, url):
                return True
        return False

    def remove(self, url: str) -> None:
        client, key = connect(url, writing=True)
        with suppress(FileNotFoundError), explain(url):
            obstore.delete(client, key)

    def put_file(self, path: str, url: str) -> None:
        """Upload in parts if the file is large. A failed upload is aborted, which deletes its parts."""
        client, key = connect(url, writing=True)
        size = os.stat(path).st_size
        part = max(_PART, -(-size // _MOST_PARTS))
        with explain(url):
            with _uploads:
                sent = obstore.put(client, key, Path(path), chunk_size=part, max_concurrency=_PARTS)
            arrived = obstore.head(client, key)
        tags = {(meta["e_tag"] or "").strip('"') for meta in (sent, arrived)} - {""}
        if arrived["size"] != size or len(tags) > 1:
            raise OSError(f"{arrived['size']} bytes arrived of {size}, or another file replaced them; write it again")

    def open_regular(self, url: str) -> BinaryIO:
        return RemoteStream(_Ranges(url, self.find_entry))  # type: ignore[return-value]

    def open_stored(self, url: str, advice: int = os.POSIX_FADV_NORMAL, *, size: int | None = None) -> Stored:
        try:
            known = self.find_entry if size is None else lambda _url: Entry(size, 0.0)
            return RemoteFile(_Ranges(url, known))
        except OSError as error:
            raise explain_failure(url, "opened", error) from error


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _put_where(client: Any, key: str, data: bytes, mode: Any, url: str) -> bool:
    """Write an object under a condition. A store that has no conditional writes gets a plain one.

    Returns:
        False if the condition does not hold.
    """
    try:
        obstore.put(client, key, data, mode=mode)
    except (AlreadyExistsError, PreconditionError):
        return False
    except (GenericError, NotSupportedError) as error:
        if "409 Conflict" in str(error):
            return False
        if isinstance(error, GenericError) and "501 Not Implemented" not in str(error):
            raise describe(error, url) from error
        ObjectStore().write_small(url, data)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no bucket {find_store(url)}; check its name and the endpoint") from error
    return True


def _read_front(url: str, most: int | None) -> tuple[bytes, Any]:
    """Read the first bytes of an object. Memory is taken only for bytes that arrive.

    Returns:
        The bytes, and the condition of a write that expects this version (obstore's ``UpdateVersion``).
    """
    client, key = connect(url)
    limit, failures = _SMALL if most is None else most, 0
    while True:
        with explain(url):
            answer = obstore.get(client, key)
        meta, data = answer.meta, bytearray()
        try:
            for piece in answer.stream(_PIECE):
                data += piece
                if len(data) >= limit:
                    break
        except GenericError as error:
            failures = _pause(failures, error, url)
        else:
            version = {"e_tag": meta["e_tag"], "version": meta["version"]}
            return bytes(data[:limit]), {name: value for name, value in version.items() if value is not None}


def _pause(failures: int, error: Exception, url: str) -> int:
    """Wait after a read that was cut; return the number of failures in a row.

    Raises:
        OSError: there were too many.
    """
    if failures + 1 == ATTEMPTS:
        raise describe(error, url) from error
    time.sleep(random.uniform(0, PAUSE * 2**failures))
    return failures + 1


class _Ranges:
    """Byte ranges of one object, in the version that the last listing or else the first answer names.

    Args:
        find: returns the entry of a URL that no listing has named.

    Raises:
        OSError: it cannot be found.
    """

    def __init__(self, url: str, find: Callable[[str], Entry | None]) -> None:
        self.url, self._lock = normalize(url), threading.Lock()
        self.client, self.key = connect(url)
        entry = find_known(url) or find(url)
        if entry is None:
            raise FileNotFoundError(ABSENT)
        if entry.is_folder:
            raise IsADirectoryError("is a folder")
        self.size, self._version = entry.size, entry.version

    def fill(self, views: list[memoryview], offset: int) -> None:
        """Fill memory from byte ``offset`` on; the list is consumed. A read that is cut continues where it stopped.

        Raises:
            OSError: it cannot be read, or has changed.
        """
        end, failures = offset + sum(view.nbytes for view in views), 0
        if end > self.size:
            raise ChangedError(f"ends at byte {self.size}")
        while left := sum(view.nbytes for view in views):
            answer = self._get(end - left, end)
            try:
                for piece in answer.stream(_PIECE):
                    _take(views, memoryview(piece))
            except GenericError as error:
                is_stuck = sum(view.nbytes for view in views) == left
                failures = _pause(failures if is_stuck else 0, error, self.url)

    def _get(self, low: int, high: int) -> Any:
        with explain(self.url):
            try:
                answer = obstore.get(self.client, self.key, options={"range": (low, high)})
            except NotSupportedError as error:
                text = "the server answers with the whole file where a part is asked for."
                raise UnsupportedError(text, path=self.url) from error
        if answer.range != (low, high):
            raise OSError(f"bytes {answer.range} came where {(low, high)} were asked for")
        self._check(_make_entry(answer.meta))
        return answer

    def _check(self, now: Entry) -> None:
        with self._lock:
            self._version = self._version or now.version
            if now.size != self.size or (now.version or self._version) != self._version:
                raise ChangedError(CHANGED)


def _take(views: list[memoryview], data: memoryview) -> None:
    """Copy bytes to the front of the views and drop the filled part."""
    while data.nbytes:
        count = min(views[0].nbytes, data.nbytes)
        views[0][:count] = data[:count]
        drop_front(views, count)
        data = data[count:]


class RemoteFile(Stored):
    """An object that is read by ranges, straight to their destinations."""

    def __init__(self, ranges: _Ranges) -> None:
        self.path, self._ranges = ranges.url, ranges

    def read(self, views: list[memoryview], offset: int) -> None:
        """One request, unless it is cut."""
        with self._explain(f"read at byte {offset}"):
            self._ranges.fill(views, offset)

    @contextmanager
    def _explain(self, work: str) -> Iterator[None]:
        try:
            yield
        except ChangedError as error:
            advice = "something writes to it. Load again when that has ended, or another tag."
            raise CheckpointError(f"{error}: {advice}", path=self.path) from error
        except OSError as error:
            raise explain_failure(self.path, work, error) from error

    def read_some(self, views: list[memoryview], offset: int) -> int:
        nbytes = min(sum(view.nbytes for view in views), max(self._ranges.size - offset, 0))
        self.read(take_front(views, nbytes), offset)
        return nbytes


class RemoteStream(Positioned):
    """An object whose header is read: a few requests, whose blocks are kept until it is closed."""

    def __init__(self, ranges: _Ranges) -> None:
        super().__init__(ranges.size)
        self._ranges, self._lock = ranges, threading.Lock()
        self._blocks: list[tuple[int, bytes]] = []
        """(offset, bytes), by offset; they do not overlap."""

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Return bytes from ``offset`` on; fewer if the file ends before."""
        low, high = min(offset, self.size), min(offset + nbytes, self.size)
        if low < high:
            if not self._blocks:  # a header lies at both ends
                self.read_ahead([(0, _HEAD), (max(self.size - _TAIL, 0), _TAIL)])
            for gap in self._find_gaps(low, high):
                self._fetch(*self._widen(*gap))
        return b"".join(data[max(low - at, 0) : high - at] for at, data in self._overlapping(low, high))

    def read_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read small ranges (offset, bytes) before they are needed, several at once; neighbours in one request."""
        wanted = sorted((offset, min(offset + nbytes, self.size)) for offset, nbytes in ranges)
        gaps = _join(chain.from_iterable(self._find_gaps(*span) for span in wanted))

        def work(turn: Iterator[tuple[int, int]]) -> None:
            for low, high in turn:
                self._fetch(low, high)

        if gaps:
            run_threads([gap for joined in gaps for gap in self._find_gaps(*joined)], work, _AHEAD)

    def _fetch(self, low: int, high: int) -> None:
        data = bytearray(high - low)
        self._ranges.fill([memoryview(data)], low)
        with self._lock:
            self._blocks.append((low, bytes(data)))
            self._blocks.sort()

    def _widen(self, low: int, high: int) -> tuple[int, int]:
        """Extend a gap to the end of the file or by the bytes that follow, unless these are kept already."""
        before = max((at + len(data) for at, data in self._blocks if at < low), default=0)
        behind = min((at for at, _ in self._blocks if at >= high), default=self.size)
        tail = max(self.size - _TAIL, 0)
        return max(tail, before) if low >= tail else low, min(max(high, low + _HEAD), behind)

    def _overlapping(self, low: int, high: int) -> list[tuple[int, bytes]]:
        first = max(bisect_right(self._blocks, low, key=lambda block: block[0]) - 1, 0)
        return [(at, data) for at, data in self._blocks[first:] if at < high and at + len(data) > low]

    def _find_gaps(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return the parts of [low, high) that are not kept."""
        gaps = []
        for at, data in self._overlapping(low, high):
            if at > low:
                gaps.append((low, at))
            low = max(low, at + len(data))
        return [*gaps, (low, high)] if low < high else gaps


def _join(gaps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join sorted ranges that overlap, or that one request serves better."""
    joined: list[tuple[int, int]] = []
    for low, high in gaps:
        if joined and (low < joined[-1][1] or high - joined[-1][0] <= _HEAD):
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined
