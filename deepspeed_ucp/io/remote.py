"""Files behind URLs: anything that fsspec serves. Each request is tried again by itself, here and nowhere else.

A store's file systems belong to one process: their event loop does not survive a fork. What a listing told of a file
(size, version) serves until the next listing, so that no file costs a request before its bytes are asked for; a file
that has another version when it is read is refused.
"""

from __future__ import annotations

import io
import logging
import os
import random
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, TypeVar

from ..errors import CheckpointError, UnsupportedError
from .memory import Scratch, drop_front
from .store import FOLDER, Entry, normalize
from .threads import run_threads

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")

ATTEMPTS = 8
"""How often a request is made that gets no further."""

_PAUSE, _LONGEST_PAUSE = 0.2, 20.0
"""Seconds: the longest pause behind the first failure, which doubles with each, and the longest of all."""

_HEAD = _TAIL = 64 << 10
"""Bytes of a header that are asked for at once, at the beginning of a file and at its end."""

_CONNECTIONS = 64
_AHEAD = 16
"""Requests of one rank that are under way at once while headers are read."""

_TRANSIENT = {408, 425, 429}
"""Of the HTTP statuses from 400 to 499; all from 500 on are."""

_HINTS = {
    401: "check the credentials",
    403: "check the credentials, and that they may read and list here",
    404: "it is not there, or was removed",
}

_CLIENTS = {"aiohttp", "azure", "botocore", "aiobotocore", "google", "gcsfs", "requests", "urllib3"}
"""Libraries whose errors are those of requests."""

_LASTING = re.compile(r"Credential|Validation|ParamV|ProfileNotFound|NoRegion|InvalidURL|NotSupported")
"""In the names of those libraries' errors: what no second attempt mends."""

_CHANGES = ("LastModified", "last_modified", "updated", "mtime", "timeModified", "created")
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "content_md5", *_CHANGES)


class _Process:
    """What one process knows of stores.

    Attributes:
        systems: fsspec's file systems by scheme, those that are written to apart.
        known: what the last listing told of a file, by URL.
        options: for file systems that are made.
    """

    def __init__(self) -> None:
        self.systems: dict[tuple[str, bool], Any] = {}
        self.known: dict[str, Entry] = {}
        self.options: dict[str, Any] = {}
        self.lock = threading.Lock()

    def leave(self) -> None:
        """Forget what a forked process cannot use."""
        self.systems, self.lock = {}, threading.Lock()


_process = _Process()
os.register_at_fork(after_in_child=_process.leave)


class ChangedError(OSError):
    """A file is not the one any more whose header was read."""


def set_options(options: Mapping[str, Any]) -> None:
    """Options for the file systems of all URLs, as fsspec takes them (``endpoint_url``, ``anon``, ``token``…)."""
    if dict(options) != _process.options:
        _process.options, _process.systems = dict(options), {}


def connect(url: str, *, writing: bool = False) -> tuple[Any, str]:
    """The file system behind a URL, and the URL's path in it.

    Args:
        writing: it is to repeat by itself what fails of a large file's parts.

    Raises:
        UnsupportedError: the library for it is not installed, or there is none.
    """
    import fsspec

    scheme = url.partition("://")[0]
    key = scheme, writing
    with _process.lock:
        if key not in _process.systems:
            try:
                _process.systems[key] = _open_system(fsspec, *key)
            except (ImportError, ValueError) as error:
                advice = "pip install 'deepspeed_ucp[s3]' (or [gcs], [abfs]) installs what reads such URLs"
                raise UnsupportedError(f"{url}: {error}; {advice}.") from error
        system = _process.systems[key]
    return system, str(system._strip_protocol(normalize(url)))


def _open_system(fsspec: Any, scheme: str, writing: bool) -> Any:
    kind = fsspec.get_filesystem_class(scheme)
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True, **_process.options}
    own = _is_s3(kind) and not writing  # requests are repeated here, and each library beneath would multiply that
    if own:
        config = {"max_pool_connections": _CONNECTIONS, "retries": {"max_attempts": 0}}
        options["config_kwargs"] = {**config, **options.get("config_kwargs", {})}
    system = fsspec.filesystem(scheme, **options)
    if own:
        system.retries = 1
    return system


def _is_s3(system: Any) -> bool:
    return hasattr(system, "call_s3") or hasattr(system, "_call_s3")


def attempt(work: Callable[[], T], what: str, left: Callable[[], int] = lambda: 0) -> T:
    """Carry a request out, again and again where what failed may pass.

    Args:
        work: the request.
        what: the URL, for messages.
        left: bytes that have not come yet; attempts are counted anew where there are fewer.

    Raises:
        OSError: it failed for good; says why and what to do.
    """
    count, before = 0, -1
    while True:
        try:
            return work()
        except Exception as error:
            lasting = explain(error)
            if lasting is not None:
                raise lasting from error
            count, before = count + 1 if left() == before else 1, left()
            if count == ATTEMPTS:
                told = f"failed {ATTEMPTS} times, at last with {_describe(error)}"
                raise OSError(f"{told}; try again when the store answers") from error
            _pause(count, what, error)


def _pause(count: int, what: str, error: Exception) -> None:
    """Exponential backoff with full jitter, so that thousands of ranks do not come back at once."""
    pause = random.uniform(0, min(_PAUSE * 2 ** (count - 1), _LONGEST_PAUSE))
    logger.debug("%s: trying again in %.1f s after %s", what, pause, _describe(error))
    time.sleep(pause)


def explain(error: BaseException) -> OSError | None:
    """The error to raise for one that another attempt meets again; None for one that may pass.

    Raises:
        BaseException: ``error``, where it is none of a request's.
    """
    status = _find_status(error)
    if status is not None and (status >= 500 or status in _TRANSIENT):
        return None
    if isinstance(error, ChangedError) or status == 412:
        return error if isinstance(error, ChangedError) else ChangedError("has changed since its header was read")
    if isinstance(error, FileNotFoundError) or status == 404:
        return FileNotFoundError(_HINTS[404])
    if isinstance(error, PermissionError) or status in (401, 403):
        return PermissionError(f"{_describe(error)}: {_HINTS.get(status or 403, '')}")
    if isinstance(error, (IsADirectoryError, NotADirectoryError)) or _is_refusal(error, status):
        return error if isinstance(error, OSError) else OSError(_describe(error))
    if isinstance(error, (OSError, EOFError, TimeoutError)) or type(error).__module__.split(".")[0] in _CLIENTS:
        return None
    raise error


def _is_refusal(error: BaseException, status: int | None) -> bool:
    if status is not None:
        return 400 <= status < 500
    return type(error).__module__.split(".")[0] in _CLIENTS and _LASTING.search(type(error).__name__) is not None


def _find_status(error: BaseException) -> int | None:
    """The HTTP status that an error is about; botocore's, of which s3fs makes others, keeps it in the answer."""
    answers = [getattr(each, "response", None) for each in (error, error.__cause__)]
    told = [each.get("ResponseMetadata", {}).get("HTTPStatusCode") for each in answers if isinstance(each, Mapping)]
    told += [getattr(error, name, None) for name in ("status", "status_code", "code")]
    return next((status for status in told if isinstance(status, int) and 300 <= status < 600), None)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _make_entry(info: Mapping[str, Any]) -> Entry:
    if info.get("type") == "directory" or str(info.get("mimetype")).startswith("text/html"):  # an index page
        return Entry(FOLDER, 0.0)
    changed = next((info[key] for key in _CHANGES if info.get(key)), 0.0)
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return Entry(int(info.get("size") or 0), _to_seconds(changed), version)


def _to_seconds(changed: Any) -> float:
    if isinstance(changed, str):
        try:
            changed = datetime.fromisoformat(changed.replace("Z", "+00:00"))
        except ValueError:
            return 0.0
    return float(changed.timestamp()) if isinstance(changed, datetime) else float(changed)


def list_folder(folder: str) -> dict[str, Entry]:
    """As :func:`.store.list_folder`: one request for each thousand of names.

    Raises:
        OSError: it cannot be listed.
    """
    folder = normalize(folder)
    system, path = connect(folder)
    infos = attempt(lambda: system.ls(path, detail=True), folder)
    named = {str(info["name"]).rstrip("/").rpartition("/")[2]: info for info in infos if not _is_marker(info, path)}
    return _note(folder, {name: _complete(system, info) for name, info in named.items() if name})


def list_tree(folder: str) -> dict[str, Entry]:
    """As :func:`.store.list_tree`.

    Raises:
        OSError: one cannot be listed.
    """
    folder = normalize(folder)
    system, path = connect(folder)
    infos = attempt(lambda: system.find(path, detail=True), folder)
    inside = {name[len(path) :].strip("/"): info for name, info in infos.items() if not _is_marker(info, path)}
    return _note(folder, {name: _complete(system, info) for name, info in inside.items() if name})


def _is_marker(info: Mapping[str, Any], path: str) -> bool:
    """Whether an object stands for the folder itself, as some tools leave them."""
    return str(info["name"]).rstrip("/") == path.rstrip("/")


def _complete(system: Any, info: Mapping[str, Any]) -> Entry:
    """An index page of the web tells names alone."""
    if info.get("size") is None and info.get("type") != "directory":
        info = attempt(lambda: system.info(info["name"]), str(info["name"]))
    return _make_entry(info)


def _note(folder: str, entries: dict[str, Entry]) -> dict[str, Entry]:
    _process.known.update({f"{folder}/{name}": entry for name, entry in entries.items() if entry.size != FOLDER})
    return entries


def find_entry(url: str) -> Entry | None:
    """As :func:`.store.find_entry`."""
    system, path = connect(url)
    try:
        entry = _make_entry(attempt(lambda: system.info(path), url))
    except FileNotFoundError:
        return None
    if entry.size != FOLDER:
        _process.known[normalize(url)] = entry
    return entry


def read_small(url: str) -> bytes:
    """A small file's bytes, as they are now.

    Raises:
        OSError: it cannot be read.
    """
    system, path = connect(url)
    return bytes(attempt(lambda: system.cat_file(path), url))


def put_file(path: str, url: str) -> None:
    """Write a local file, in parts where it is large, and make sure that all of it has arrived.

    Raises:
        OSError: it cannot be written.
    """
    system, there = connect(url, writing=True)
    size = os.stat(path).st_size

    def work() -> None:
        system.put_file(path, there)
        held = int(system.info(there)["size"])
        if held != size:
            raise EOFError(f"{held} bytes arrived of {size}")

    _write(work, url)


def put_bytes(url: str, data: bytes) -> None:
    """Write a small file.

    Raises:
        OSError: it cannot be written.
    """
    system, there = connect(url, writing=True)
    _write(lambda: system.pipe_file(there, data), url)


def remove(urls: Sequence[str]) -> None:
    """Remove files; those that are not there are passed over.

    Raises:
        OSError: one cannot be removed.
    """
    for url in urls:
        system, there = connect(url, writing=True)
        with suppress(FileNotFoundError):
            _write(partial(system.rm_file, there), url)


def _write(work: Callable[[], None], url: str) -> None:
    try:
        attempt(work, url)
    except NotImplementedError as error:
        raise UnsupportedError(f"{url}: cannot be written to; such URLs are read only. Write elsewhere.") from error


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
        entry = _process.known.get(self.url) or (find_entry(self.url) if size is None else Entry(size, 0.0))
        if entry is None:
            raise FileNotFoundError(_HINTS[404])
        if entry.size == FOLDER:
            raise IsADirectoryError("is a folder")
        self.entry = entry

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
        if _is_s3(self.system):
            _fetch_s3(self, views, offset, nbytes)
            return
        data = memoryview(self.system.cat_file(self.path, start=offset, end=offset + nbytes))
        if data.nbytes > nbytes:
            raise UnsupportedError(f"{self.url}: the server answers with the whole file where a part is asked for.")
        _take(views, data)
        if data.nbytes < nbytes:
            self.compare()
            raise EOFError(f"{data.nbytes} bytes came of {nbytes}")

    def compare(self) -> None:
        """Hold the file's version against that which was listed.

        Raises:
            ChangedError: it is another one.
        """
        now = _make_entry(attempt(lambda: self.system.info(self.path), self.url))
        if (now.size, now.version) != (self.entry.size, self.entry.version):
            raise ChangedError("has changed since its header was read")


def _take(views: list[memoryview], data: memoryview) -> None:
    """Copy bytes to the front of the views, which they are taken from."""
    while data.nbytes:
        count = min(views[0].nbytes, data.nbytes)
        views[0][:count] = data[:count]
        drop_front(views, count)
        data = data[count:]


def _fetch_s3(ranges: _Ranges, views: list[memoryview], offset: int, nbytes: int) -> None:
    """The bytes as they come, of the version that was listed and no other."""
    from fsspec.asyn import sync

    async def fetch() -> None:
        system, version = ranges.system, ranges.entry.version
        bucket, key, _ = system.split_path(ranges.path)
        condition = {"IfMatch": version} if version.startswith('"') else {}
        told = {"Range": f"bytes={offset}-{offset + nbytes - 1}", **condition}
        answer = await system._call_s3("get_object", Bucket=bucket, Key=key, **told)
        if not version:
            ranges.entry = replace(ranges.entry, version=answer["ETag"])
        async with answer["Body"] as body:
            while data := await body.read(_PIECE):
                _take(views, memoryview(data))
        if views:
            raise EOFError(f"{sum(view.nbytes for view in views)} bytes of {nbytes} did not come")

    sync(ranges.system.loop, fetch)


_PIECE = 1 << 20
"""Bytes that are taken of an answer at once."""


class RemoteFile:
    """A file behind a URL that is read by ranges, as :class:`.store.Stored`.

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
            raise CheckpointError(f"{url}: cannot be opened ({error}).") from error

    def fetch(self, offset: int, nbytes: int, scratch: Scratch) -> memoryview | None:
        """As :meth:`.store.Stored.fetch`: what comes over a network is read to its place."""
        return None

    def read(self, views: list[memoryview], offset: int) -> None:
        """As :meth:`.store.Stored.read`: one request, unless it fails."""
        try:
            self._ranges.fill(views, offset)
        except ChangedError as error:
            raise CheckpointError(
                f"{self.path}: {error}: something writes to it. Load again when that has ended, or another tag."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read at byte {offset} ({error}).") from error

    def read_some(self, views: list[memoryview], offset: int) -> int:
        """As :meth:`.store.Stored.read_some`; all of it, but at the end of the file."""
        nbytes = min(sum(view.nbytes for view in views), max(self._ranges.entry.size - offset, 0))
        self.read(list(_cut(views, nbytes)), offset)
        return nbytes

    def close(self) -> None:
        """Nothing is held open."""

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cut(views: Iterable[memoryview], nbytes: int) -> Iterator[memoryview]:
    """The first ``nbytes`` of memory."""
    for view in views:
        if nbytes > 0:
            yield view[:nbytes]
        nbytes -= view.nbytes


class RemoteStream(io.RawIOBase):
    """A file behind a URL whose header is read: few requests, whose blocks are kept until it is closed.

    Attributes:
        size: of the file.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, url: str) -> None:
        self._ranges = _Ranges(url)
        self.size = self._ranges.entry.size
        self._at, self._lock = 0, threading.Lock()
        self._blocks: list[tuple[int, bytes]] = []
        """(offset, bytes), by offset; they do not overlap."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self.read_at(len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Bytes from ``offset`` on; fewer where the file ends before."""
        low, high = min(offset, self.size), min(offset + nbytes, self.size)
        if low < high:
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
    """Ranges, those that one request had better serve joined."""
    joined: list[tuple[int, int]] = []
    for low, high in gaps:
        if joined and high - joined[-1][0] <= _HEAD:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined
