"""Read-only folders of HTTP servers: index pages list files, HEAD gives versions."""

from __future__ import annotations

import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from email.message import Message
from email.utils import parsedate_to_datetime
from html.parser import HTMLParser
from urllib.parse import quote, unquote, urljoin, urlsplit

from .clients import ABSENT, connect, get_headers
from .interface import Store
from .objects import ObjectStore, make_version
from .paths import FOLDER, Entry, normalize
from .threads import map_threads

ATTEMPTS, PAUSE = 8, 0.2
"""Attempts of a request, and seconds of the first pause."""

_TIMEOUT = 60.0
_AT_ONCE = 16
_LARGEST_PAGE = 64 << 20
_DEEPEST = 64  # levels of folders

_STATUS = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError, 410: FileNotFoundError}
_HINTS = {401: "check the credentials", 403: "check the credentials", 404: ABSENT}


class _Links(HTMLParser):
    """Names that an index page links to in its folder; folders end with ``/``."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self._page, self.names = page, set[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for target in [value for name, value in attrs if tag == "a" and name == "href" and value]:
            try:
                there, here = urlsplit(urljoin(self._page, target)), urlsplit(self._page)
            except ValueError:  # it is no URL
                continue
            name = unquote(there.path.removeprefix(here.path))
            is_below = there.netloc == here.netloc and there.path.startswith(here.path)
            if is_below and name.strip("/") not in ("", ".", "..") and "/" not in name.rstrip("/") and not there.query:
                self.names.add(name)


class WebStore(ObjectStore):
    """HTTP servers. A folder is a page of HTML with links to its files."""

    def list_folder(self, folder: str) -> dict[str, Entry]:
        folder = normalize(folder)
        headers, body = _request("GET", f"{folder}/")
        if not _is_page(headers):
            raise NotADirectoryError("is no index page")
        links = _Links(quote(f"{folder}/", safe=":/%"))
        links.feed(body.decode("utf-8", "replace"))
        names = sorted(links.names)
        entries = {name.rstrip("/"): Entry(FOLDER, 0.0) for name in names if name.endswith("/")}
        files = [name for name in names if not name.endswith("/")]
        listed = map_threads(lambda name: self.find_entry(f"{folder}/{name}"), files, _AT_ONCE)
        entries |= {name: entry or Entry(0, 0.0) for name, entry in zip(files, listed, strict=True)}  # 0: a broken link
        self.note_listed(folder, entries)
        return entries

    def list_tree(self, folder: str, depth: int = 0) -> dict[str, Entry]:
        if depth > _DEEPEST:
            raise OSError(
                f"{folder}: the server lists more than {_DEEPEST} folders deep; its links may lead in circles"
            )
        tree = dict[str, Entry]()
        for name, entry in self.list_folder(folder).items():
            if entry.is_folder:
                below = self.list_tree(f"{folder}/{name}", depth + 1)
                tree.update({f"{name}/{path}": child for path, child in below.items()})
            else:
                tree[name] = entry
        return tree

    def find_entry(self, url: str) -> Entry | None:
        url = normalize(url)
        try:
            headers, _ = _request("HEAD", url)
        except FileNotFoundError:
            return None
        if _is_page(headers):
            return Entry(FOLDER, 0.0)
        changed = None
        with suppress(ValueError, TypeError):
            changed = parsedate_to_datetime(headers["Last-Modified"])
        version = make_version(headers["ETag"], changed)
        entry = Entry(int(headers["Content-Length"] or 0), changed.timestamp() if changed else 0.0, version)
        self.note_listed(url.rpartition("/")[0], {url.rpartition("/")[2]: entry})
        return entry

    def is_folder(self, url: str) -> bool:
        return Store.is_folder(self, url)


def _is_page(headers: Mapping[str, str] | Message) -> bool:
    return (headers["Content-Type"] or "").startswith("text/html")


def _read_page(answer: http.client.HTTPResponse) -> bytes:
    """Return the body of an index page; OSError if it is cut or too large."""
    body = answer.read(_LARGEST_PAGE)
    if answer.length or answer.read(1):  # files that it does not list would be missed
        raise OSError(f"the index page ends after {len(body)} bytes, or has more than {_LARGEST_PAGE}")
    return body


def _request(method: str, url: str) -> tuple[Message, bytes]:
    """Return an answer's headers and, for an index page, its body."""
    connect(url)  # checks the options; obstore's request needs a length, which many pages lack
    request = urllib.request.Request(quote(url, safe=":/%"), method=method, headers=get_headers())
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                return answer.headers, _read_page(answer) if _is_page(answer.headers) else b""
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                kind = _STATUS.get(error.code, OSError)
                raise kind(f"status {error.code} {error.reason}; {_HINTS.get(error.code, 'check the URL')}") from error
            failure: Exception = error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(reason := getattr(error, "reason", None), ssl.SSLCertVerificationError):
                raise OSError(f"{reason}; SSL_CERT_FILE names further authorities") from error
            failure = error
    advice = "check the URL and the network, and try again when the server answers"
    raise OSError(f"failed {ATTEMPTS} times, at last with {failure}; {advice}") from failure
