"""Where plain HTTP reads what lies behind URLs: an address and headers, for each file and for a while.

An `http(s)://` URL is its own address. Of S3 and Azure the file system signs one, of Google's store it tells the
address and a token. What a plain GET would not honour is left to the file systems: proxies, keys of the customer's own,
whoever else pays, and any option that is not known to do no harm here.
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")

_SIGNED = 3600
"""Seconds that a signed address serves."""

_MARGIN = 600
"""Seconds before its end from which on an address is not used any more."""

_TOKEN = 60
"""Seconds that a token is taken for good; its file system renews it five minutes before its end."""


class RefusedError(OSError):
    """What was asked for is not to be had at an address in this way; it may be so in another."""


@dataclass
class Link:
    """Where plain HTTP reads a file.

    Attributes:
        url: with ``http`` or ``https``.
        headers: of a request.
        version: the header of an answer that tells a file's version as a listing does.
        until: time of ``time.monotonic`` up to which it may be used.
        works: it has brought something.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    version: str = "ETag"
    until: float = float("inf")
    works: bool = False

    @property
    def origin(self) -> tuple[str, str]:
        """Scheme, and host with port."""
        parts = urlsplit(self.url)
        return parts.scheme, parts.netloc


_refused: set[tuple[str, str]] = set()
"""Origins that have refused plain GETs: their file systems are asked, as long as the options stay."""


class Access:
    """How one file is reached, of a file system and by a path in it."""

    def __init__(self, system: Any, path: str) -> None:
        self.system, self.path = system, path
        self._link: Link | None = None
        self._until, self._lock = 0.0, threading.Lock()

    def use(self, get: Callable[[Link], T], ask: Callable[[], T]) -> T:
        """Carry a request out: ``get`` with an address where plain HTTP serves, else ``ask``, by the file system.

        Raises:
            RefusedError: an address that has worked does not any more; the next attempt takes a new one.
        """
        link = self._take()
        if link is not None:
            try:
                return get(link)
            except RefusedError as error:
                self._drop(link, error)
        return ask()

    def _take(self) -> Link | None:
        with self._lock:
            if self._until < time.monotonic():
                self._link = _find_link(self.system, self.path)
                self._until = float("inf") if self._link is None else self._link.until
            link = self._link
        return None if link is None or link.origin in _refused else link

    def _drop(self, link: Link, error: RefusedError) -> None:
        """What refuses an address that it has let through before takes it for expired; else it does so with any."""
        with self._lock:
            if self._link is link:
                self._until = 0.0
        if link.works:
            raise error
        logger.debug("%s is read through its file system: %s", link.origin[1], error)
        _refused.add(link.origin)


def forget_refusals() -> None:
    """Try plain GETs again wherever they were refused: with other options they may be let through."""
    _refused.clear()


def _find_link(system: Any, path: str) -> Link | None:
    protocols = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
    make, harmless = next((_WAYS[each] for each in protocols if each in _WAYS), (None, {}))
    if make is None or not _is_harmless(system.storage_options, harmless):
        return None
    try:
        link = make(system, path)
    except Exception as error:  # noqa: BLE001  of any library; the file system tells what is wrong when it is asked
        logger.debug("%s: no address for plain GETs: %s", path, error)
        return None
    parts = urlsplit(link.url)
    return None if "@" in parts.netloc or _has_proxy(parts.scheme, parts.netloc) else link


def _is_harmless(options: Mapping[str, Any], known: Mapping[str, frozenset[str] | None]) -> bool:
    """Whether each option is known, and each key of those that hold others."""
    for name, value in options.items():
        if name not in known and name not in _CACHES:
            return False
        inner = known.get(name)
        if inner is not None and not set(value or ()) <= inner:
            return False
    return True


def _has_proxy(scheme: str, host: str) -> bool:
    return scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)


def _link_http(system: Any, path: str) -> Link:
    headers = {**system.client_kwargs.get("headers", {}), **system.kwargs.get("headers", {})}
    return Link(str(system.encode_url(path)), headers)


def _link_signed(system: Any, path: str) -> Link:
    return Link(system.sign(path, expiration=_SIGNED), until=time.monotonic() + _SIGNED - _MARGIN)


def _link_s3(system: Any, path: str) -> Link:
    known = system.s3.meta
    choose = partial(_choose_signer, known.config.signature_version)
    known.events.register_first("choose-signer.s3", choose, unique_id="ucp")
    return _link_signed(system, path)


def _choose_signer(configured: Any, signature_version: Any, **_: Any) -> Any:
    """How an address is signed: not at all where nobody signs, else as is planned.

    botocore falls back to version 2 wherever some bucket may still know it, which most do not, and fails at the former.
    """
    if signature_version == "none-query":
        return configured
    return signature_version if str(signature_version).endswith("-query") else None


def _link_google(system: Any, path: str) -> Link:
    """Few of its credentials can sign, but all of them make the header of a request."""
    headers: dict[str, str] = {}
    system.credentials.apply(headers)
    return Link(system.url(path), headers, "x-goog-generation", time.monotonic() + _TOKEN)


def _allow(*names: str, **nested: tuple[str, ...]) -> dict[str, frozenset[str] | None]:
    return {**dict.fromkeys(names), **{name: frozenset(keys) for name, keys in nested.items()}}


_CACHES = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "asynchronous", "loop"}

_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")

_S3 = _allow(
    *("key", "secret", "token", "username", "password", "anon", "profile", "endpoint_url", "use_ssl"),
    *("default_block_size", "default_fill_cache", "default_cache_type", "max_concurrency", "fixed_upload_size"),
    client_kwargs=("region_name", "endpoint_url", "use_ssl", *_KEYS),
    config_kwargs=(
        *("region_name", "signature_version", "s3", "retries", "max_pool_connections"),
        *("connect_timeout", "read_timeout", "parameter_validation", "tcp_keepalive"),
    ),
)
_GOOGLE = _allow(
    *("project", "access", "token", "endpoint_url", "block_size", "consistency", "cache_timeout", "default_location"),
    *("secure_serialize", "check_connection", "requests_timeout", "timeout"),
)
_AZURE = _allow(
    *("account_name", "account_key", "connection_string", "account_host", "blocksize", "max_concurrency"),
    *("default_fill_cache", "default_cache_type", "assume_container_exists", "timeout"),
)
_HTTP = _allow(
    *("headers", "simple_links", "block_size", "same_scheme", "cache_type", "cache_options", "encoded"),
    client_kwargs=("headers",),
)

_Way = tuple[Callable[[Any, str], Link], Mapping[str, frozenset[str] | None]]

_WAYS: dict[str, _Way] = {
    "s3": (_link_s3, _S3),
    "gs": (_link_google, _GOOGLE),
    "abfs": (_link_signed, _AZURE),
    "http": (_link_http, _HTTP),
}
"""By one of a file system's protocols what makes an address, and the options with which it may."""
