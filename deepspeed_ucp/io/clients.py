"""Make obstore's clients of object stores and HTTP servers.

The URL, ``storage_options`` and the environment configure a client. obstore's threads do not survive a fork: a process
that was forked from one with clients cannot use stores.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from obstore import exceptions, store

from ..errors import ConfigError, StorageError, UnsupportedError, shorten, suggest
from .interface import CHANGED, ChangedError
from .paths import find_root_url, normalize

RETRIES = {"max_retries": 10, "retry_timeout": timedelta(minutes=3)}
"""Retries of one request that fails with a connection error, a timeout, or a status of 5xx, 408 or 429."""

READING, WRITING = "60s", "10min"
"""Timeouts of one request. A read that is cut continues at the next byte; a write starts again."""

ABSENT = "it does not exist, or was removed"
READ_ONLY = "cannot be written to; such URLs are read only. Write elsewhere."

_S3 = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "anon": "skip_signature",
    "endpoint_url": "endpoint",
    "region_name": "region",
}
_AZURE = {
    "account_name": "account_name",
    "account_key": "account_key",
    "sas_token": "sas_key",
    "anon": "skip_signature",
    "endpoint_url": "endpoint",
}
_CONNECTION = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}
"""Parts of Azure's ``connection_string``."""

_OTHERS = ("client_kwargs", "connection_string", "headers", "profile", "project")
OPTIONS = (*_S3, "account_name", "account_key", "sas_token", *_OTHERS)
"""Names in ``storage_options``, as in fsspec. Each store takes its own and ignores the others."""

_GOOGLE_DEFAULTS = ("google_default", "cloud", "cache")
_AWS_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Environment variables that obstore itself takes credentials from, and refreshes them."""


class _ClientState:
    """This process's clients by store and timeout, and its flat ``storage_options``."""

    def __init__(self) -> None:
        self.clients: dict[tuple[str, str], Any] = {}
        self.options: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.is_forked = False  # True if the parent process had clients

    def reset_after_fork(self) -> None:
        self.is_forked = self.is_forked or bool(self.clients)
        self.clients, self.lock = {}, threading.Lock()


_process = _ClientState()
os.register_at_fork(after_in_child=_process.reset_after_fork)


def set_options(options: Mapping[str, Any]) -> None:
    """Set ``storage_options`` for all clients of this process."""
    nested = options.get("client_kwargs") or {}
    flat = {**nested, **{name: value for name, value in options.items() if name != "client_kwargs"}}
    for name in flat:
        if name not in OPTIONS:
            near = suggest(name, OPTIONS, cutoff=0.8) or f"there are {shorten(OPTIONS, limit=len(OPTIONS))}"
            raise ConfigError(f"`storage_options`: {name!r} is not supported; {near}, and environment variables.")
    with _process.lock:
        if flat != _process.options:
            _process.options, _process.clients = flat, {}


def get_headers() -> dict[str, str]:
    """Return the headers that ``storage_options`` adds to requests."""
    return dict(_process.options.get("headers") or {})


def connect(url: str, *, writing: bool = False) -> tuple[Any, str]:
    """Return a URL's cached client (obstore), and the key of the URL's object in it.

    Raises:
        UnsupportedError: the scheme is unknown, or it is read-only and ``writing`` is True.
        ConfigError: obstore refuses the URL or the options.
        StorageError: this process was forked from one that has used stores.
    """
    root, scheme = find_root_url(normalize(url)), url.partition("://")[0]
    if scheme not in MAKERS:
        known = ", ".join(f"{known_scheme}://" for known_scheme in MAKERS)
        raise UnsupportedError(f"{scheme}:// is unknown; there are {known}.", path=url)
    if writing and scheme in ("http", "https"):
        raise UnsupportedError(READ_ONLY, path=url)
    if _process.is_forked:
        raise StorageError(
            "its client does not survive a fork: start processes that use stores with `spawn` or `forkserver`.",
            path=url,
        )
    key = root, WRITING if writing else READING
    with _process.lock:
        if key not in _process.clients:
            headers = {"default_headers": get_headers()} if get_headers() else {}
            client_options = {"allow_http": True, "timeout": key[1], "connect_timeout": "20s", **headers}
            try:
                made = MAKERS[scheme](root, {"client_options": client_options, "retry_config": RETRIES})
            except (exceptions.BaseError, ValueError, TypeError) as error:
                text = f"{root}: {_shorten(error)}; check the URL and `storage_options`."
                raise ConfigError(text) from error
            _process.clients[key] = made
        path = normalize(url)[len(root) :].lstrip("/")
        return _process.clients[key], unquote(path) if scheme in ("http", "https") else path


def _translate_options(names: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {names[name]: value for name, value in options.items() if name in names and value is not None}
    return {name: value if isinstance(value, bool) else str(value) for name, value in renamed.items()}


def _make_s3(root: str, common: dict[str, Any]) -> Any:
    config, profile = _translate_options(_S3, _process.options), _process.options.get("profile")
    is_given = "access_key_id" in config or config.get("skip_signature")
    provider = None if is_given else _find_aws_provider(profile)
    return store.S3Store(root.partition("://")[2], config=config, credential_provider=provider, **common)  # type: ignore[arg-type]


def _find_aws_provider(profile: str | None) -> Any:
    """Return boto3's credentials if AWS's files or a profile provide them, else None."""
    named = profile or os.environ.get("AWS_PROFILE")
    if profile is None and any(map(os.environ.get, _AWS_ENVIRONMENT)):
        return None
    files = (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config"))  # obstore reads neither
    paths = (Path(os.environ.get(name) or Path.home() / ".aws" / file) for name, file in files)
    if not named and not any(path.is_file() for path in paths):
        return None
    try:
        import boto3  # type: ignore[import-untyped]
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        if named:
            raise UnsupportedError(f"AWS profile {named!r} takes boto3; pip install boto3.") from error
        return None
    try:
        return Boto3CredentialProvider(boto3.Session(profile_name=profile))
    except (BotoCoreError, ValueError) as error:
        if named:
            raise ConfigError(f"AWS profile {named!r}: {error}; check AWS_PROFILE and ~/.aws.") from error
        return None


def _make_google(root: str, common: dict[str, Any]) -> Any:
    options, config = _process.options, dict[str, Any]()
    token, endpoint = options.get("token"), options.get("endpoint_url")
    if endpoint:  # of an emulator
        names = ("client_email", "private_key", "private_key_id")
        account = {"gcs_base_url": endpoint, "disable_oauth": True, **dict.fromkeys(names, "")}
        config["service_account_key"] = json.dumps(account)
    elif isinstance(token, Mapping):
        config["service_account_key"] = json.dumps(dict(token))
    elif options.get("anon") or token == "anon":
        config["skip_signature"] = True
    elif token and token not in _GOOGLE_DEFAULTS:
        config["application_credentials"] = os.path.expanduser(str(token))
    return store.GCSStore(root.partition("://")[2], config=config, **common)  # type: ignore[arg-type]


def _make_azure(root: str, common: dict[str, Any]) -> Any:
    text = str(_process.options.get("connection_string") or "")
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    config = {**_translate_options(_CONNECTION, parts), **_translate_options(_AZURE, _process.options)}
    return store.AzureStore.from_url(root, config=config, **common)  # type: ignore[arg-type]


MAKERS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    **dict.fromkeys(("s3", "s3a"), _make_s3),
    **dict.fromkeys(("gs", "gcs"), _make_google),
    **dict.fromkeys(("az", "abfs", "abfss"), _make_azure),
    **dict.fromkeys(("http", "https"), lambda root, common: store.HTTPStore(root, **common)),
}
"""Function that makes the client of a store, by scheme."""


@contextmanager
def convert_errors(url: str) -> Iterator[None]:
    """Context that raises obstore's errors as OSErrors with a cause and a remedy.

    Raises:
        FileNotFoundError: there is no such object, or no such bucket.
        PermissionError: the credentials do not suffice.
        ChangedError: the object is shorter than it was.
        OSError: another request failed.
    """
    try:
        yield
    except (exceptions.BaseError, OSError) as error:
        raise make_os_error(error, url) from error


_CREDENTIALS = "{text}; check the credentials, and that they may read, list and write here"
_BUCKET = "there is no bucket {root}; check its name and the endpoint"

_Cause = tuple[type[OSError], str]

_BY_TEXT: dict[str, _Cause] = {
    "NoSuchBucket": (FileNotFoundError, _BUCKET),
    "ContainerNotFound": (FileNotFoundError, _BUCKET),
    "specified bucket does not exist": (FileNotFoundError, _BUCKET),
    "169.254.169.254": (PermissionError, "no credentials were found ({text}); check the environment"),
    "metadata.google": (PermissionError, "no credentials were found ({text}); check the environment"),
    "416 Range": (ChangedError, CHANGED),
    **dict.fromkeys(("ExpiredToken", "401 Unauthorized", "403 Forbidden"), (PermissionError, _CREDENTIALS)),
    "301 Moved": (OSError, "{text}; name the bucket's region (region_name, AWS_REGION)"),
    "without LOCATION": (OSError, "{text}; name the bucket's region (region_name, AWS_REGION)"),
}
"""Kind and message of errors whose text (status, code or address) shows the cause."""

_BY_KIND: dict[type[Exception], _Cause] = {
    FileNotFoundError: (FileNotFoundError, ABSENT),
    exceptions.PermissionDeniedError: (PermissionError, _CREDENTIALS),
    exceptions.UnauthenticatedError: (PermissionError, _CREDENTIALS),
    exceptions.PreconditionError: (ChangedError, CHANGED),
    Exception: (OSError, "{text}; check credentials, endpoint and network, and try again when the store answers"),
}


def make_os_error(error: Exception, url: str) -> OSError:
    """Return an OSError of the kind and with the cause of one of obstore's errors."""
    if isinstance(error, ChangedError):
        return error
    causes = [cause for text, cause in _BY_TEXT.items() if text in str(error)]
    causes += [cause for kind, cause in _BY_KIND.items() if isinstance(error, kind)]
    made, text = causes[0]
    return made(text.format(text=_shorten(error), root=find_root_url(url)))


def _shorten(error: Exception) -> str:
    """Return one line of an error without debug output, URL queries and HTML pages."""
    text = str(error).partition("\n\nDebug source")[0]
    text, separator, code = text.partition("<Code>")
    text = " ".join(word.partition("?")[0] for word in text.partition("<")[0].split())  # a query may hold a signature
    suffix = f" ({code.partition('<')[0]})" if separator else ""
    return text.rstrip(" :-") + suffix
