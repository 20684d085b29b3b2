"""Object stores as a :class:`Store`: lists, conditional writes, and range reads.

A listing gives size and version (ETag) of each object, which later reads expect: an object that was replaced meanwhile
is refused. Each answer names its version, so no further request is needed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError, NotSupportedError, PreconditionError

from ..errors import CheckpointError, UnsupportedError
from .clients import ABSENT, connect, convert_errors, make_os_error
from .interface import CHANGED, ChangedError, ReadableFile, ReadStream, Store, explain_failure
from .memory import drop_front, take_front
from .paths import FOLDER, Entry, find_root_url, normalize
from .threads import map_threads

_PIECE = 256 << 10
"""Bytes that are copied to their destination at once, while a cache holds them."""

_PART, _PARTS, _MOST_PARTS = 8 << 20, 4, 10_000
"""Bytes of a part of an upload, parts of one object in flight, and the most parts that S3 takes."""

_uploads = threading.BoundedSemaphore(10)
"""Limit of files that are uploaded at once: parts of all of them are in memory."""

_LOOKS = 3
"""Attempts of a conditional write while other processes write the object."""

_SMALL = 1 << 30
"""Limit of bytes of a small file: the manifest of a million tensors."""

_HEAD, _BLOCK = 64 << 10, 1 << 10
"""Bytes of a header that are read at once, at both ends of a file, and of the blocks that are kept."""

_AHEAD = 16
"""Requests of one rank in flight while it reads headers."""

_known: dict[str, Entry] = {}
"""Size and version of each object, by URL, from the last listing."""


def make_version(e_tag: str | None, changed: datetime | None) -> str:
    """Return an object's version: its ETag or time of change; may be empty."""
    seconds = changed.timestamp() if changed else 0.0
    return (e_tag or "").strip('"') or (repr(seconds) if seconds else "")


def _make_entry(meta: Mapping[str, Any]) -> Entry:
    version = make_version(meta["e_tag"], meta["last_modified"])
    return Entry(int(meta["size"]), meta["last_modified"].timestamp(), version)


class ObjectStore(Store):
    """S3, Google Cloud and Azure storage. A folder is a prefix that has objects."""

    def list_folder(self, folder: str) -> dict[str, Entry]:
        client, prefix = connect(folder)
        with convert_errors(folder):
            listing = obstore.list_with_delimiter(client, prefix or None)
        objects = {_name(meta["path"]): _make_entry(meta) for meta in listing["objects"] if meta["path"] != prefix}
        entries = objects | {_name(path): Entry(FOLDER, 0.0) for path in listing["common_prefixes"]}
        if prefix and not entries:
            raise FileNotFoundError(ABSENT)
        self.note_listed(folder, entries)
        return entries

    def list_tree(self, folder: str) -> dict[str, Entry]:
        client, prefix = connect(folder)
        with convert_errors(folder):
            listing = [meta for page in obstore.list(client, prefix or None, chunk_size=1000) for meta in page]
        inside = {meta["path"][len(prefix) :].lstrip("/"): _make_entry(meta) for meta in listing}
        above = {name.rpartition("/")[0] for name in inside}  # objects of such names are markers of folders
        entries = {name: entry for name, entry in inside.items() if name and not (name in above and not entry.size)}
        if prefix and not listing:
            raise FileNotFoundError(ABSENT)
        self.note_listed(folder, entries)
        return entries

    def note_listed(self, folder: str, entries: Mapping[str, Entry]) -> None:
        folder = normalize(folder)
        _known.update({f"{folder}/{name}": entry for name, entry in entries.items() if not entry.is_folder})

    def find_entry(self, url: str) -> Entry | None:
        client, key = connect(url)
        with suppress(FileNotFoundError), convert_errors(url):
            if key:
                entry = _make_entry(obstore.head(client, key))
                _known[normalize(url)] = entry
                return entry
        return Entry(FOLDER, 0.0) if self.is_folder(url) else None

    def is_folder(self, url: str) -> bool:
        client, prefix = connect(url)
        with suppress(FileNotFoundError), convert_errors(url):
            pages = obstore.list(client, prefix or None, chunk_size=2)
            return any(meta["path"] != prefix for page in pages for meta in page) or not prefix
        return False

    def read_small(self, url: str, most: int | None = None) -> bytes:
        return _read_front(url, most)[0]

    def write_small(self, url: str, data: bytes) -> None:
        client, key = connect(url, writing=True)
        with convert_errors(url):
            obstore.put(client, key, data, use_multipart=False)

    def exchange_small(self, url: str, data: bytes, before: bytes | None) -> bool:
        """Write under a condition; if the answer is lost, the next read shows the result."""
        client, key = connect(url, writing=True)
        for _ in range(_LOOKS):
            now, mode = None, "create"
            with suppress(FileNotFoundError):
                now, mode = _read_front(url, None)
            if now == data or now != before:
                return now == data
            if _put_if_unchanged(client, key, data, mode, url):
                return True
        return False

    def remove(self, url: str) -> None:
        client, key = connect(url, writing=True)
        with suppress(FileNotFoundError), convert_errors(url):
            obstore.delete(client, key)

    def put_file(self, url: str, source: str) -> None:
        """Upload a file, in parts if large; an abort after a failure deletes the parts."""
        client, key = connect(url, writing=True)
        size = os.stat(source).st_size
        part = max(_PART, -(-size // _MOST_PARTS))
        with convert_errors(url):
            with _uploads:
                sent = obstore.put(client, key, Path(source), chunk_size=part, max_concurrency=_PARTS)
            arrived = obstore.head(client, key)
        tags = {(meta["e_tag"] or "").strip('"') for meta in (sent, arrived)} - {""}
        if arrived["size"] != size or len(tags) > 1:
            raise OSError(f"{arrived['size']} bytes arrived of {size}, or another file replaced them; write it again")

    def open_stream(self, url: str) -> ReadStream:
        return RemoteStream(RemoteFile(url, _known.get(normalize(url)) or self.find_entry(url)))

    def open_stored(self, url: str, advice: int = os.POSIX_FADV_NORMAL, *, size: int | None = None) -> ReadableFile:
        try:
            entry = _known.get(normalize(url))
            return RemoteFile(url, entry or (self.find_entry(url) if size is None else Entry(size, 0.0)))
        except OSError as error:
            raise explain_failure(url, "opened", error) from error


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _put_if_unchanged(client: Any, key: str, data: bytes, mode: Any, url: str) -> bool:
    """Write under obstore's ``mode``, if supported; False if its condition fails."""
    try:
        obstore.put(client, key, data, mode=mode)
    except (AlreadyExistsError, PreconditionError):
        return False
    except (GenericError, NotSupportedError) as error:
        if "409 Conflict" in str(error):
            return False
        if isinstance(error, GenericError) and "501 Not Implemented" not in str(error):
            raise make_os_error(error, url) from error
        ObjectStore().write_small(url, data)  # the store has no conditional writes
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no bucket {find_root_url(url)}; check its name and the endpoint") from error
    return True


def _read_front(url: str, most: int | None) -> tuple[bytes, Any]:
    """Read the first bytes of an object. Memory is taken only for bytes that arrive.

    Returns:
        The bytes, and the condition of a write that expects this version (obstore's ``UpdateVersion``).
    """
    client, key = connect(url)
    limit, data = _SMALL if most is None else most, bytearray()
    with convert_errors(url):
        answer = obstore.get(client, key)
        for piece in answer.stream(_PIECE):
            data += piece
            if len(data) > limit:
                break
    if most is None and len(data) > limit:
        raise OSError(f"{url}: is no small file, it has more than {limit} bytes")
    version = {name: answer.meta[name] for name in ("e_tag", "version")}
    return bytes(data[:limit]), {name: value for name, value in version.items() if value is not None}


class RemoteFile(ReadableFile):
    """An object read by ranges, in the version of its entry or of the first answer."""

    def __init__(self, url: str, entry: Entry | None) -> None:
        self.path, self._lock = normalize(url), threading.Lock()
        self._client, self._key = connect(url)
        if entry is None:
            raise FileNotFoundError(ABSENT)
        if entry.is_folder:
            raise IsADirectoryError("is a folder")
        self.size, self._version = entry.size, entry.version

    def read(self, views: list[memoryview], offset: int) -> None:
        try:
            self.fill(views, offset)
        except ChangedError as error:
            advice = "something writes to it. Load again when that has ended, or another tag."
            raise CheckpointError(f"{error}: {advice}", path=self.path) from error
        except OSError as error:
            raise explain_failure(self.path, f"read at byte {offset}", error) from error

    def read_some(self, views: list[memoryview], offset: int) -> int:
        nbytes = min(sum(view.nbytes for view in views), max(self.size - offset, 0))
        self.read(take_front(views, nbytes), offset)
        return nbytes

    def fill(self, views: list[memoryview], offset: int) -> None:
        """Fill ``views`` by one request, consuming the list; raise OSError on failure."""
        end = offset + sum(view.nbytes for view in views)
        if end > self.size:
            raise ChangedError(f"ends at byte {self.size}")
        if end == offset:
            return
        answer = self._request(offset, end)
        with convert_errors(self.path):
            for piece in answer.stream(_PIECE):  # obstore continues an answer that is cut, if it has an ETag
                data = memoryview(piece)
                while data.nbytes:
                    count = min(views[0].nbytes, data.nbytes)
                    views[0][:count] = data[:count]
                    drop_front(views, count)
                    data = data[count:]
            if views:
                raise OSError(f"the answer ended before byte {end}")

    def _request(self, low: int, high: int) -> Any:
        """Request bytes [low, high), and check the version of the answer."""
        with convert_errors(self.path):
            try:
                answer = obstore.get(self._client, self._key, options={"range": (low, high)})
            except NotSupportedError as error:
                text = "the server answers with the whole file where a part is asked for."
                raise UnsupportedError(text, path=self.path) from error
        if answer.range != (low, high):
            raise OSError(f"bytes {answer.range} came where {(low, high)} were asked for")
        now = _make_entry(answer.meta)
        with self._lock:
            self._version = self._version or now.version
            if now.size != self.size or (now.version or self._version) != self._version:
                raise ChangedError(CHANGED)
        return answer


class RemoteStream(ReadStream):
    """A stream over an object that reads few, large ranges and caches their blocks."""

    is_remote = True

    def __init__(self, file: RemoteFile) -> None:
        super().__init__(file.size)
        self._file = file
        self._blocks: dict[int, bytes] = {}  # by number; each begins at a multiple of `_BLOCK`

    def read_at(self, nbytes: int, offset: int) -> bytes:
        low, high = min(offset, self.size), min(offset + nbytes, self.size)
        if low < high and not self._blocks:
            self.read_ahead([(0, _HEAD), (max(self.size - _HEAD + _BLOCK, 0), _HEAD)])  # a header lies at both ends
        numbers = range(low // _BLOCK, -(-high // _BLOCK))
        if missing := [number for number in numbers if number not in self._blocks]:
            begin = missing[0] * _BLOCK
            self.read_ahead([(begin, max(high - begin, _HEAD))])
        start = numbers.start * _BLOCK
        return b"".join(self._blocks[number] for number in numbers)[low - start : high - start]

    def read_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Request the missing blocks of small ranges concurrently, neighbours together."""
        spans = [(offset // _BLOCK, -(-min(offset + nbytes, self.size) // _BLOCK)) for offset, nbytes in ranges]
        wanted = {number for span in spans for number in range(*span)} - self._blocks.keys()
        runs: list[tuple[int, int]] = []
        for number in sorted(wanted):
            if runs and (number == runs[-1][1] or (number + 1 - runs[-1][0]) * _BLOCK <= _HEAD):
                runs[-1] = runs[-1][0], number + 1
            else:
                runs.append((number, number + 1))
        map_threads(self._fetch, runs, _AHEAD)

    def _fetch(self, run: tuple[int, int]) -> None:
        low, high = run[0] * _BLOCK, min(run[1] * _BLOCK, self.size)
        data = bytearray(high - low)
        self._file.fill([memoryview(data)], low)
        self._blocks.update({number: bytes(data[number * _BLOCK - low :][:_BLOCK]) for number in range(*run)})
