"""The stores behind URLs: anything that fsspec serves, whose folders are listed and written to.

A store's file systems belong to one process: their event loop does not survive a fork. What a listing told of a file
(size, version) serves until the next listing, so that no file costs a request before its bytes are asked for.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from ..errors import ConfigError, UnsupportedError, suggest
from .http import read_front
from .memory import pause_collection
from .paths import FOLDER, Entry, find_store, is_chained, normalize
from .presign import Access, forget_refusals
from .retry import attempt

T = TypeVar("T")
Es = TypeVar("Es", bound=Mapping[str, Entry])

_CONNECTIONS = 64

_PART, _PARTS, _UPLOADS = 8 << 20, 4, 10
"""Bytes of a part of an upload to S3, the parts of a file that are under way at once, and the files: all are in memory.

More files wait for each other anyway: a client has ten connections.
"""

_MOST_PARTS = 10_000
"""Of a file, in S3."""

_SMALL = 1 << 30
"""Bytes of what is read as a small file at most: of a manifest of a million tensors."""

_LONGEST_REQUEST = 300.0
"""Seconds that a file system may take for an answer, as aiohttp has it: some would wait for each next byte anew."""

_READ_ONLY = "cannot be written to; such URLs are read only. Write elsewhere."

_EXTRAS = {"s3": ("s3", "s3a"), "gcs": ("gs", "gcs"), "abfs": ("abfs", "abfss", "az")}
"""The package's extras, and the schemes that each is for."""

_CHANGES = ("LastModified", "last_modified", "updated", "mtime", "timeModified", "created")
_VERSIONS = ("generation", "ETag", "etag", "md5Hash", "content_md5")


class _Process:
    """What one process knows of stores.

    Attributes:
        systems: fsspec's file systems by scheme and what a URL tells of its server, those that are written to apart.
        known: what the last listing told of a file, by URL.
        options: for file systems that are made.
        uploads: room for files that are written at once.
    """

    def __init__(self) -> None:
        self.known: dict[str, Entry] = {}
        self.options: dict[str, Any] = {}
        self.leave()

    def leave(self) -> None:
        """Forget what a forked process cannot use."""
        self.systems: dict[tuple[str, bool, frozenset[tuple[str, Any]]], Any] = {}
        self.lock, self.uploads = threading.Lock(), threading.BoundedSemaphore(_UPLOADS)


_process = _Process()
os.register_at_fork(after_in_child=_process.leave)


def set_options(options: Mapping[str, Any]) -> None:
    """Options for the file systems of all URLs, as fsspec takes them (``endpoint_url``, ``anon``, ``token``…)."""
    with _process.lock:  # one that is being made has the options before
        if dict(options) != _process.options:
            _process.options, _process.systems = dict(options), {}
            forget_refusals()


def begin(url: str) -> None:
    """Have made in the background what reading a URL takes: libraries are imported, a client is made.

    What fails there is told where the URL is read.
    """

    def work() -> None:
        with suppress(Exception), pause_collection():
            system, _ = connect(url)
            if is_s3(system):
                run_request(system, system.set_session)

    threading.Thread(target=work, name="ucp-store").start()


def connect(url: str, *, writing: bool = False) -> tuple[Any, str]:
    """The file system behind a URL, and the URL's path in it.

    Args:
        writing: it is to repeat by itself what fails of a large file's parts.

    Raises:
        UnsupportedError: the library for it is not installed, or there is none; it is read only.
        ConfigError: the URL is chained, or contradicts the options; the library does not take them.
        OSError: its server, which some libraries call at once, does not answer.
    """
    scheme = url.partition("://")[0]
    if is_chained(url):
        inner = url.rpartition("::")[2]
        raise ConfigError(f"{url}: layers in front of a store are not read; give the store's own URL ({inner}).")
    if writing and scheme in ("http", "https"):
        raise UnsupportedError(f"{url}: {_READ_ONLY}")
    with _process.lock, pause_collection():  # a fifth of what the imports take
        try:
            kind = _find_kind(url)
            server = _find_server(kind, url)
            key = scheme, writing, frozenset(server.items())
            if key not in _process.systems:
                _check_options(kind, url)
                _process.systems[key] = attempt(lambda: _open_system(kind, server, writing), url)
        except ImportError as error:
            extra = next((extra for extra, schemes in _EXTRAS.items() if scheme in schemes), None)
            advice = f"; pip install 'deepspeed_ucp[{extra}]' installs what reads such URLs." if extra else "."
            raise UnsupportedError(f"{url}: {error}{advice}") from error
        system = _process.systems[key]
    return system, str(system._strip_protocol(normalize(url)))


def _find_kind(url: str) -> Any:
    """The class of a URL's file system."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        return fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        advice = "there are s3, gs, abfs, http, https, and others that fsspec knows"
        raise UnsupportedError(f"{url}: {scheme}:// is unknown; {advice}.") from error


def _find_server(kind: Any, url: str) -> dict[str, Any]:
    """What a URL tells of its server or account (``host``, ``port``, ``account_name``), as options.

    Raises:
        ConfigError: the user's options tell something else.
    """
    server: dict[str, Any] = kind._get_kwargs_from_urls(find_store(url))
    for name, value in server.items():
        if str(_process.options.get(name, value)) != str(value):
            raise ConfigError(f"{url}: names another {name} than `storage_options`; say it in one of the two places.")
    return server


def _check_options(kind: Any, url: str) -> None:
    """Find misspelt options: libraries hand on what they do not know, or pass it over.

    Raises:
        ConfigError: an option is none that the file system names, and much like one of these.
    """
    makers = [vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each) and each is not object]
    known = {name for make in makers for name in inspect.signature(make).parameters}
    for name in _process.options.keys() - known:
        if near := suggest(name, known, cutoff=0.8):
            raise ConfigError(f"{url}: `storage_options`: {kind.__name__} has no {name!r}; {near}")


def _open_system(kind: Any, server: Mapping[str, Any], writing: bool) -> Any:
    options = {"use_listings_cache": False, "skip_instance_cache": True, **server, **_process.options}
    own = is_s3(kind) and not writing  # requests are repeated here, and each library beneath would multiply that
    if own:
        config = {"max_pool_connections": _CONNECTIONS, "retries": {"max_attempts": 0}}
        options["config_kwargs"] = {**config, **options.get("config_kwargs", {})}
    system = kind(**options)
    if own:
        system.retries = 1
    return system


def is_s3(system: Any) -> bool:
    """Whether a file system is s3fs's."""
    return hasattr(system, "call_s3") or hasattr(system, "_call_s3")


def _make_entry(info: Mapping[str, Any]) -> Entry:
    if info.get("type") == "directory" or str(info.get("mimetype")).startswith("text/html"):  # an index page
        return Entry(FOLDER, 0.0)
    changed = next((info[key] for key in _CHANGES if info.get(key)), 0.0)
    seconds = _to_seconds(changed)
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "") or _tell_time(changed, seconds)
    return Entry(int(info.get("size") or 0), seconds, version)


def _tell_time(changed: Any, seconds: float) -> str:
    """A time as a version: the same whether a listing or a look at the file tells it, in a form of its own each."""
    return repr(seconds) if seconds else str(changed or "")


def _to_seconds(changed: Any) -> float:
    if isinstance(changed, str):
        try:
            changed = datetime.fromisoformat(changed.replace("Z", "+00:00"))
        except ValueError:
            return 0.0
    return float(changed.timestamp()) if isinstance(changed, datetime) else float(changed)


def run_request(system: Any, request: Callable[[], Awaitable[T]]) -> T:
    """Carry a request of an asynchronous file system out."""
    from fsspec.asyn import sync

    result: T = sync(system.loop, request)
    return result


def ask(system: Any, method: str, path: str, **options: Any) -> Any:
    """Call a method of a file system, which may not take for ever.

    Raises:
        TimeoutError: it has taken too long.
    """
    limit = {"timeout": _LONGEST_REQUEST} if getattr(system, "async_impl", False) else {}
    return getattr(system, method)(path, **options, **limit)


def list_folder(folder: str) -> dict[str, Entry]:
    """As :func:`.store.list_folder`: one request for each thousand of names.

    Raises:
        OSError: it cannot be listed.
    """
    folder = normalize(folder)
    system, path = connect(folder)
    return note(folder, {name: _complete(system, info) for name, info in _list(system, path, folder).items()})


def _list(system: Any, path: str, folder: str) -> dict[str, Mapping[str, Any]]:
    """What a file system tells of what lies in a folder, by name; an index page may have a link to itself."""
    infos = attempt(lambda: ask(system, "ls", path, detail=True), folder)
    named = {str(info["name"]).rstrip("/").rpartition("/")[2]: info for info in infos if not _is_marker(info, path)}
    return {name: info for name, info in named.items() if name not in ("", ".", "..")}


def list_tree(folder: str) -> dict[str, Entry]:
    """As :func:`.store.list_tree`.

    Raises:
        OSError: one cannot be listed.
    """
    folder = normalize(folder)
    system, path = connect(folder)
    if _descends(system):
        return note(folder, {name: _complete(system, info) for name, info in _descend(system, path, folder)})
    infos = attempt(lambda: ask(system, "find", path, detail=True), folder)
    inside = {name[len(path) :].strip("/"): info for name, info in infos.items() if not _is_marker(info, path)}
    return note(folder, {name: _complete(system, info) for name, info in inside.items() if name})


def _descends(system: Any) -> bool:
    """Whether a file system finds files in fsspec's way, which passes over folders that cannot be listed."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    kind = type(system)
    own = getattr(kind, "_find", AsyncFileSystem._find) is not AsyncFileSystem._find
    return not own and kind.find is AbstractFileSystem.find


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
    return _make_entry(info)


def note(folder: str, entries: Es) -> Es:
    """Keep what a listing of a folder told; ``folder`` is normal. The same entries."""
    _process.known.update({f"{folder}/{name}": entry for name, entry in entries.items() if entry.size != FOLDER})
    return entries


def find_entry(url: str) -> Entry | None:
    """As :func:`.store.find_entry`."""
    try:
        entry = look_up(url)
    except FileNotFoundError:
        return None
    if entry.size != FOLDER:
        _process.known[normalize(url)] = entry
    return entry


def is_folder(url: str) -> bool:
    """As :func:`.store.is_folder`: of S3's one request, as a folder is nothing but the files in it."""
    system, path = connect(url)
    if not is_s3(system):
        found = find_entry(url)
        return found is not None and found.is_folder
    with suppress(FileNotFoundError):
        infos = attempt(lambda: ask(system, "ls", path, detail=True), url)
        return any(info["type"] == "directory" or not _is_marker(info, path) for info in infos)
    return False


def look_up(url: str) -> Entry:
    """What a URL leads to now.

    Raises:
        OSError: nothing, or it cannot be told.
    """
    system, path = connect(url)
    return _make_entry(attempt(lambda: ask(system, "info", path), url))


def find_known(url: str) -> Entry | None:
    """What the last listing told of a file; ``url`` is normal."""
    return _process.known.get(url)


def read_small(url: str, most: int | None = None) -> bytes:
    """A small file's bytes, or the first ``most`` of them, as they are now.

    Raises:
        OSError: it cannot be read.
    """
    system, path = connect(url)
    access, limit = Access(system, path), _SMALL if most is None else most

    def ask_system() -> bytes:
        is_larger = (ask(system, "info", path).get("size") or 0) > limit
        front = {"start": 0, "end": limit} if is_larger else {}
        return bytes(ask(system, "cat_file", path, **front))[:limit]

    return attempt(lambda: access.use(lambda link: read_front(link, limit), ask_system), url)


def put_file(path: str, url: str) -> None:
    """Write a local file, in parts where it is large, and make sure that all of it has arrived.

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
            with _process.uploads:
                system.put_file(path, there, **options)
        except FileNotFoundError as error:
            if _find_code(error) != "NoSuchUpload":
                raise
            if find_entry(url) in (None, before):  # else the answer alone was lost to the request that ended it
                raise ConnectionError("parts of it are not there any more") from error
        held = find_entry(url)
        if held is None or held.size != size:
            raise EOFError(f"{held.size if held else 0} bytes arrived of {size}")

    _write(work, url)


def _find_code(error: FileNotFoundError) -> str:
    """What S3 calls an error."""
    answer = getattr(error.__cause__, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, Mapping) else ""


def put_bytes(url: str, data: bytes) -> None:
    """Write a small file; where a file system has folders, its folder is made.

    Raises:
        OSError: it cannot be written.
    """
    system, there = connect(url, writing=True)

    def work() -> None:
        if _descends(system):  # `put_file` does so of itself
            system.makedirs(system._parent(there), exist_ok=True)
        system.pipe_file(there, data)

    _write(work, url)


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
        raise UnsupportedError(f"{url}: {_READ_ONLY}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no bucket {find_store(url)}; check its name and the endpoint") from error
