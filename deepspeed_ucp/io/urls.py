"""What lies behind URLs, whose folders are listed and written to.

What a listing told of a file (size, version) serves until the next listing, so that no file costs a request before its
bytes are asked for.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

from ..errors import UnsupportedError
from .http import read_front
from .interface import Store
from .paths import Entry, find_store, normalize
from .presign import Access
from .ranged import RemoteFile, RemoteStream
from .remote import READ_ONLY, ask, connect, descends, find_entry, is_s3, limit_uploads, make_entry, note
from .retry import attempt, find_status

_PART, _PARTS = 8 << 20, 4
"""Bytes of a part of an upload to S3, and the parts of a file that are under way at once: all are in memory."""

_MOST_PARTS = 10_000
"""Of a file, in S3."""

_LOOKS = 3
"""At what is to be exchanged, until another's writes count as in the way."""

_SMALL = 1 << 30
"""Bytes of what is read as a small file at most: of a manifest of a million tensors."""


class UrlStore(Store):
    """Whatever fsspec serves, every request to which is tried again."""

    def list_folder(self, folder: str) -> dict[str, Entry]:
        """One request for each thousand of names."""
        folder = normalize(folder)
        system, path = connect(folder)
        return note(folder, {name: _complete(system, info) for name, info in _list(system, path, folder).items()})

    def list_tree(self, folder: str) -> dict[str, Entry]:
        folder = normalize(folder)
        system, path = connect(folder)
        if descends(system):
            return note(folder, {name: _complete(system, info) for name, info in _descend(system, path, folder)})
        infos = attempt(lambda: ask(system, "find", path, detail=True), folder)
        inside = {name[len(path) :].strip("/"): info for name, info in infos.items() if not _is_marker(info, path)}
        return note(folder, {name: _complete(system, info) for name, info in inside.items() if name})

    def note_listed(self, folder: str, entries: Mapping[str, Entry]) -> None:
        note(normalize(folder), entries)

    def find_entry(self, url: str) -> Entry | None:
        return find_entry(url)

    def is_folder(self, url: str) -> bool:
        """Of S3's one request, as a folder is nothing but the files in it."""
        system, path = connect(url)
        if not is_s3(system):
            return super().is_folder(url)
        with suppress(FileNotFoundError):
            infos = attempt(lambda: ask(system, "ls", path, detail=True), url)
            return any(info["type"] == "directory" or not _is_marker(info, path) for info in infos)
        return False

    def read_small(self, url: str, most: int | None = None) -> bytes:
        """As they are now, whatever a listing has told."""
        system, path = connect(url)
        access, limit = Access(system, path), _SMALL if most is None else most

        def ask_system() -> bytes:
            is_larger = (ask(system, "info", path).get("size") or 0) > limit
            front = {"start": 0, "end": limit} if is_larger else {}
            return bytes(ask(system, "cat_file", path, **front))[:limit]

        return attempt(lambda: access.use(lambda link: read_front(link, limit), ask_system), url)

    def write_small(self, url: str, data: bytes) -> None:
        """Where a file system has folders, its folder is made."""
        system, there = connect(url, writing=True)

        def work() -> None:
            if descends(system):  # `put_file` does so of itself
                system.makedirs(system._parent(there), exist_ok=True)
            system.pipe_file(there, data)

        _write(work, url)

    def exchange_small(self, url: str, data: bytes, before: bytes | None) -> bool:
        """By a condition of the store's, where it has them; its word counts for what came between."""
        system, there = connect(url, writing=True)
        for _ in range(_LOOKS):
            entry = find_entry(url)
            now = None if entry is None else self.read_small(url)
            if now == data or now != before:
                return now == data
            condition = _find_condition(system, entry)
            if not condition:
                break
            with suppress(_TakenError):  # or the answer was lost to the request that wrote it: the next look tells
                _write(partial(_write_where, partial(system.pipe_file, there, data), condition), url)
                return True
        else:
            return False
        self.write_small(url, data)
        return True

    def remove(self, url: str) -> None:
        system, there = connect(url, writing=True)
        with suppress(FileNotFoundError):
            _write(partial(system.rm_file, there), url)

    def open_regular(self, url: str) -> BinaryIO:
        return RemoteStream(url)  # type: ignore[return-value]

    def open_stored(self, url: str, advice: int = os.POSIX_FADV_NORMAL, *, size: int | None = None) -> RemoteFile:
        return RemoteFile(url, size)


def _list(system: Any, path: str, folder: str) -> dict[str, Mapping[str, Any]]:
    """What a file system tells of what lies in a folder, by name; an index page may have a link to itself."""
    infos = attempt(lambda: ask(system, "ls", path, detail=True), folder)
    named = {str(info["name"]).rstrip("/").rpartition("/")[2]: info for info in infos if not _is_marker(info, path)}
    return {name: info for name, info in named.items() if name not in ("", ".", "..")}


def _descend(system: Any, path: str, folder: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, info in _list(system, path, folder).items():
        if info.get("type") == "directory":
            below = _descend(system, str(info["name"]), f"{folder}/{name}")
            yield from ((f"{name}/{each}", found) for each, found in below)
        else:
            yield name, info


def _is_marker(info: Mapping[str, Any], path: str) -> bool:
    """Whether an object stands for the folder itself, as some tools leave them."""
    return str(info["name"]).rstrip("/") == path.rstrip("/")


def _complete(system: Any, info: Mapping[str, Any]) -> Entry:
    """An index page of the web tells names alone; a link to what is not there is as one in a local folder."""
    if info.get("size") is None and info.get("type") != "directory":
        try:
            info = attempt(lambda: ask(system, "info", info["name"]), str(info["name"]))
        except FileNotFoundError:
            return Entry(0, 0.0)
    return make_entry(info)


class _TakenError(Exception):
    """The object exists already, or has changed since it was looked at."""


def _find_condition(system: Any, entry: Entry | None) -> dict[str, str]:
    """Return the options of a write that fails if the object has changed; empty if the library has none."""
    if entry is not None:
        return {"IfMatch": entry.version} if is_s3(system) and entry.version else {}
    write = getattr(system, "_pipe_file", system.pipe_file)
    return {"mode": "create"} if "mode" in inspect.signature(write).parameters else {}


def _write_where(write: Callable[..., Any], condition: Mapping[str, str]) -> None:
    """Write under a condition, and without where a store says that it knows none.

    Raises:
        _TakenError: it does not hold, or another's write is under way.
    """
    try:
        write(**condition)
    except (OSError, NotImplementedError) as error:
        status = find_status(error)
        if condition and (isinstance(error, FileExistsError) or status in (409, 412)):
            raise _TakenError from error
        if not condition or status not in (400, 501):
            raise
        write()


def abort_uploads(folder: str, prefixes: Iterable[str]) -> None:
    """Abort multipart uploads of processes that have ended: their parts cost until then, and cannot be completed.

    Args:
        prefixes: what the paths of files that no process writes begin with, relative to the folder.

    Raises:
        OSError: it cannot be listed, or given up.
    """
    system, there = connect(folder, writing=True)
    if not is_s3(system):  # others forget such of themselves
        return
    bucket, key, _ = system.split_path(there)
    told = attempt(lambda: system.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/"), folder)
    for upload in told.get("Uploads", []):
        if upload["Key"].removeprefix(f"{key}/").startswith(tuple(prefixes)):
            attempt(partial(system.abort_mpu, bucket, upload["Key"], upload["UploadId"]), folder)


def put_file(path: str, url: str) -> None:
    """Upload a local file, in parts if it is large, and check that all of it has arrived.

    Raises:
        FileNotFoundError: there is no such bucket.
        OSError: it cannot be written.
    """
    system, there = connect(url, writing=True)
    size = os.stat(path).st_size
    part = max(_PART, -(-size // _MOST_PARTS))
    options = {"chunksize": part, "max_concurrency": _PARTS} if is_s3(system) else {}
    before = find_entry(url) if options and size >= 2 * part else None

    def work() -> None:
        try:
            with limit_uploads():
                system.put_file(path, there, **options)
        except FileNotFoundError as error:
            if _find_code(error) != "NoSuchUpload":
                raise
            if find_entry(url) in (None, before):  # else the answer alone was lost to the request that ended it
                raise ConnectionError("parts of it are not there any more") from error
        arrived = find_entry(url)
        if arrived is None or arrived.size != size:
            raise EOFError(f"{arrived.size if arrived else 0} bytes arrived of {size}")

    _write(work, url)


def _find_code(error: FileNotFoundError) -> str:
    """What S3 calls an error."""
    answer = getattr(error.__cause__, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, Mapping) else ""


def _write(work: Callable[[], None], url: str) -> None:
    try:
        attempt(work, url)
    except NotImplementedError as error:
        raise UnsupportedError(READ_ONLY, path=url) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no bucket {find_store(url)}; check its name and the endpoint") from error
