"""Requests to stores that are tried again, each by itself, here and nowhere else."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..errors import ConfigError
from .paths import find_store

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")

ATTEMPTS = 8
"""How often a request is made that gets no further."""

LEAST_RATE = 1024
"""Bytes a second of one request below which it gets no further: a server may give one now and then for ever."""

_PAUSE, _LONGEST_PAUSE = 0.2, 20.0
"""Seconds: the longest pause behind the first failure, which doubles with each, and the longest of all."""

_WARN_AT, _SILENCE = 3, 60.0
"""Of a request the failure that is told of, and the seconds in which no other's of its store is: many fail at once."""

_TRANSIENT, _REFUSED = {408, 425, 429}, {501, 505}
"""Of the HTTP statuses from 400 to 499 those that may pass; of those from 500 on those that do not."""

HINTS = {
    401: "check the credentials",
    403: "check the credentials, and that they may read and list here",
    404: "it is not there, or was removed",
}

CHECK_OPTIONS = "check the URL, and `storage_options` (endpoint_url, key, client_kwargs…) by what its library takes."

_CLIENTS = {"aiohttp", "azure", "botocore", "aiobotocore", "google", "gcsfs", "requests", "urllib3"}
_CLIENTS |= {"ftplib", "paramiko", "pyarrow", "smbprotocol"}
"""Libraries whose errors are those of requests."""

_LASTING = re.compile(
    r"Authent|Certificate|Credential|Validation|ParamV|ProfileNotFound|NoRegion|InvalidURL|NotSupported|Redirect"
)
"""In the names of those libraries' errors: what no second attempt mends."""


CHANGED = "has changed since its header was read"


_warned: dict[str, float] = {}
"""When a failure of a store was last told."""


class ChangedError(OSError):
    """A file is not the one any more whose header was read."""


def attempt(work: Callable[[], T], what: str, left: Callable[[], int] = lambda: 0) -> T:
    """Carry a request out, again and again where what failed may pass.

    Args:
        work: the request.
        what: the URL, for messages.
        left: bytes that have not come yet; attempts are counted anew where they become fewer fast enough.

    Raises:
        OSError: it failed for good; says why and what to do.
        ConfigError: the store's library cannot do with what it was given.
    """
    count = 0
    while True:
        before, begin = left(), time.monotonic()
        try:
            return work()
        except Exception as raised:  # noqa: BLE001 - of others' libraries; `explain` raises what is none of a request's
            error = _find_cause(raised)
            lasting = explain(error, what)
            if lasting is not None:
                raise lasting from error
            came = before - left()
            count = 1 if came and came >= LEAST_RATE * (time.monotonic() - begin) else count + 1
            if count == ATTEMPTS:
                text = f"failed {ATTEMPTS} times, at last with {_describe(error)}"
                advice = "check credentials, endpoint and network, and try again when the store answers"
                raise OSError(f"{text}; {advice}") from error
            _pause(count, what, error)


def _pause(count: int, what: str, error: Exception) -> None:
    """Exponential backoff with full jitter, so that thousands of ranks do not come back at once."""
    pause = random.uniform(0, min(_PAUSE * 2 ** (count - 1), _LONGEST_PAUSE))
    level = logging.WARNING if count == _WARN_AT and _is_due(what) else logging.DEBUG
    text = f"attempt {count} of {ATTEMPTS} failed with {_describe(error)}"
    logger.log(level, "%s: %s; the next one is in %.1f s", what, text, pause)
    time.sleep(pause)


def _is_due(url: str) -> bool:
    """Whether nothing was told of a URL's store for a while."""
    store, now = find_store(url), time.monotonic()
    if now - _warned.get(store, -_SILENCE) < _SILENCE:
        return False
    _warned[store] = now
    return True


def _find_cause(error: Exception) -> Exception:
    """What fsspec says of the web's files is that they are not there, whatever failed."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception):
        is_cause = isinstance(cause, (TypeError, ValueError, TimeoutError, ConnectionError))
        return cause if is_cause or type(cause).__module__.split(".")[0] == "aiohttp" else error
    return error


def explain(error: BaseException, what: str) -> OSError | None:
    """The error to raise for one that another attempt meets again; None for one that may pass.

    Raises:
        ConfigError: the store's library cannot do with what it was given.
        BaseException: ``error``, where it is none of a request's.
    """
    status = find_status(error)
    if status is not None and (status in _TRANSIENT or (status >= 500 and status not in _REFUSED)):
        return None
    if isinstance(error, ChangedError) or status == 416:
        return error if isinstance(error, ChangedError) else ChangedError(CHANGED)
    if isinstance(error, FileNotFoundError) or status == 404:
        return FileNotFoundError(HINTS[404])
    if isinstance(error, PermissionError) or status in (401, 403):
        return PermissionError(f"{_describe(error)}: {HINTS.get(status or 403, '')}")
    if isinstance(error, (IsADirectoryError, NotADirectoryError)) or _is_refusal(error, status):
        return error if isinstance(error, OSError) else OSError(_describe(error) + _advise(error))
    if isinstance(error, (OSError, EOFError, TimeoutError)) or type(error).__module__.split(".")[0] in _CLIENTS:
        return None
    if isinstance(error, (TypeError, ValueError)):
        raise ConfigError(f"{what}: {_describe(error)}; {CHECK_OPTIONS}") from error
    raise error


def _advise(error: BaseException) -> str:
    return f"; {HINTS[401]}" if "Credential" in type(error).__name__ else ""


def _is_refusal(error: BaseException, status: int | None) -> bool:
    if status is not None:  # of those below 400: redirections that lead nowhere
        return status < 500 or status in _REFUSED
    return type(error).__module__.split(".")[0] in _CLIENTS and _LASTING.search(type(error).__name__) is not None


def find_status(error: BaseException) -> int | None:
    """The HTTP status that an error is about; botocore's, of which s3fs makes others, keeps it in the answer."""
    answers = [getattr(each, "response", None) for each in (error, error.__cause__)]
    statuses = [each.get("ResponseMetadata", {}).get("HTTPStatusCode") for each in answers if isinstance(each, Mapping)]
    statuses += [getattr(error, name, None) for name in ("status", "status_code", "code")]
    return next((status for status in statuses if isinstance(status, int) and 300 <= status < 600), None)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
