"""The file systems behind URLs: anything that fsspec serves, and what is known of the files in them.

They belong to one process: their event loop does not survive a fork.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from typing import Any, TypeVar

from ..errors import ConfigError, UnsupportedError, suggest
from .memory import pause_collection
from .paths import FOLDER, Entry, find_store, is_chained, normalize
from .presign import forget_refusals
from .retry import attempt

T = TypeVar("T")
Es = TypeVar("Es", bound=Mapping[str, Entry])

_CONNECTIONS = 64

_UPLOADS = 10
"""Files that are written at once, of all of which parts are in memory.

More wait for each other anyway: a client has ten connections.
"""

_LONGEST_REQUEST = 300.0
"""Seconds that a file system may take for an answer, as aiohttp has it: some would wait for each next byte anew."""

READ_ONLY = "cannot be written to; such URLs are read only. Write elsewhere."

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
        raise UnsupportedError(READ_ONLY, path=url)
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
            raise UnsupportedError(f"{error}{advice}", path=url) from error
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
        raise UnsupportedError(f"{scheme}:// is unknown; {advice}.", path=url) from error


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


def limit_uploads() -> AbstractContextManager[bool]:
    """Around the writing of a file, of which few are written at once."""
    return _process.uploads


def is_s3(system: Any) -> bool:
    """Whether a file system is s3fs's."""
    return hasattr(system, "call_s3") or hasattr(system, "_call_s3")


def make_entry(info: Mapping[str, Any]) -> Entry:
    """What fsspec tells of a file or a folder, under names that each store has of its own."""
    if info.get("type") == "directory" or str(info.get("mimetype")).startswith("text/html"):  # an index page
        return Entry(FOLDER, 0.0)
    changed = next((info[key] for key in _CHANGES if info.get(key)), 0.0)
    seconds = _to_seconds(changed)
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "") or _make_version(changed, seconds)
    return Entry(int(info.get("size") or 0), seconds, version)


def _make_version(changed: Any, seconds: float) -> str:
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


def descends(system: Any) -> bool:
    """Whether a file system finds files in fsspec's way, which passes over folders that cannot be listed."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    kind = type(system)
    own = getattr(kind, "_find", AsyncFileSystem._find) is not AsyncFileSystem._find
    return not own and kind.find is AbstractFileSystem.find


def note(folder: str, entries: Es) -> Es:
    """Keep what a listing of a folder told; ``folder`` is normal. The same entries."""
    _process.known.update({f"{folder}/{name}": entry for name, entry in entries.items() if entry.size != FOLDER})
    return entries


def find_entry(url: str) -> Entry | None:
    """What a URL leads to now, which is kept as what a listing tells; None where that is nothing."""
    try:
        entry = look_up(url)
    except FileNotFoundError:
        return None
    if entry.size != FOLDER:
        _process.known[normalize(url)] = entry
    return entry


def look_up(url: str) -> Entry:
    """What a URL leads to now.

    Raises:
        OSError: nothing, or it cannot be told.
    """
    system, path = connect(url)
    return make_entry(attempt(lambda: ask(system, "info", path), url))


def find_known(url: str) -> Entry | None:
    """What the last listing told of a file; ``url`` is normal."""
    return _process.known.get(url)
