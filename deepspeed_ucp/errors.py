"""Errors and messages: each names a file or parameter, the found value, a remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import prod
from typing import Any, TypeVar

T = TypeVar("T")
_NUMBER = re.compile(r"\d{1,18}")
_USERINFO = re.compile(
    r"(?:(?<=http://)|(?<=https://)|(?<=://)(?=[^\s/?#\"@]*:))[^\s/?#\"]+@"
    r"|(?<=://)[^\s/?#\"@:]+:(?!\d+[/?#])[^\s?#\"]*?@",
    re.IGNORECASE,
)
"""User and password in a URL: always in http(s), in other schemes only with a password (``abfs`` has a container).

A password may contain ``/``; a port does not.
"""

_QUERY = re.compile(r"(://[^\s?#\"]*\?)([^\s#\"]+?)(?=[:.,;)]*(?:[\s#\"]|$))")
"""Query of a URL, which may contain a signature or a token."""


class UcpError(RuntimeError):
    """Base of all errors that this package raises on purpose.

    Programs use the attributes; the text is for people.

    Args:
        lines: lines of the message, which :func:`escape` escapes.
        path: file or folder concerned; a prefix of the first line.
        kind: kind of the finding (:mod:`deepspeed_ucp.formats.findings`).
        findings: all findings, if there is more than path and kind.

    Attributes:
        text: the message without the path.
        shared: every rank of the launch raises the error.
        echo: another rank prints the shared error.
        rank: the rank that found the error, if several ranks raise it.
    """

    shared = False
    echo = False
    rank: int | None = None

    def __init__(self, *lines: object, path: str = "", kind: str = "", findings: Iterable[Any] = ()) -> None:
        texts = [escape(str(line)) for line in lines]
        self.path, self.kind, self.text, self.findings = path, kind, "\n".join(texts), tuple(findings)
        if path:
            texts[0] = f"{escape(path)}: {texts[0]}"
        super().__init__(*texts)

    def __str__(self) -> str:
        text = "\n".join(self.args)
        return text if self.rank is None else f"[rank {self.rank}] {text}"

    def copy(self, *, shared: bool, echo: bool, rank: int | None) -> UcpError:
        """Return the error as another rank raises it, without traceback and cause."""
        error = type(self)(*self.args)
        error.path, error.kind, error.text, error.findings = self.path, self.kind, self.text, self.findings
        error.shared, error.echo, error.rank = shared, echo, rank
        return error


class ConfigError(UcpError):
    """The ds_config (``checkpoint.universal``, batch sizes) cannot be honoured."""


class CheckpointError(UcpError):
    """The checkpoint is incomplete or damaged, or mixes files of several saves."""


class ChecksumError(CheckpointError):
    """The bytes of a file do not match their checksum."""


class MismatchError(UcpError):
    """Checkpoint and engine differ: parameters, shapes, param groups or optimizer."""


class UnsupportedError(UcpError):
    """The plugin does not support a feature of checkpoint or engine, or needs consent."""


class StorageError(UcpError):
    """The system cannot read or write a file, or a file there is in use or protected."""


class TagTakenError(StorageError):
    """Another job has published the tag being written; a retry would fail too."""


class DiskFullError(StorageError):
    """No room for a file: the disk is full, a quota exceeded, or the file too large."""


class OutOfReachError(CheckpointError, StorageError):
    """A file is unreadable for outside reasons: permissions, network, limits."""


class RemoteError(UcpError):
    """Another rank failed with an error that is not a UcpError; has its text."""


def clear_frames(error: BaseException) -> None:
    """Clear a handled error's frames, which keep buffers and optimizer states alive.

    An error and the frames that refer to it form a cycle, which the garbage collector frees late. Afterwards the
    variables of these frames are gone.
    """
    ended: BaseException | None = error
    while ended is not None:
        traceback.clear_frames(ended.__traceback__)
        ended = ended.__cause__


class Objections:
    """Collects UcpErrors of independent steps, to be raised as one.

    As a context manager it catches such an error of a step; :meth:`settle` raises.
    """

    def __init__(self) -> None:
        self.errors: list[UcpError] = []

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, UcpError):
            self.errors.append(error)
        return isinstance(error, UcpError)

    def settle(self) -> None:
        """Raise the collected errors as one, of the first one's class, with all lines."""
        if not self.errors:
            return
        first, *others = self.errors
        if not others:
            raise first
        error, lines = first.copy(shared=first.shared, echo=first.echo, rank=first.rank), "\n".join(map(str, others))
        error.args, error.text = (*first.args, *lines.split("\n")), f"{first.text}\n{lines}"
        raise error from first


def raise_first(errors: Iterable[BaseException | None]) -> None:
    """Raise the first error, if any."""
    for error in errors:
        if error is not None:
            raise error


def escape(text: str) -> str:
    """Escape line breaks, terminal codes and bidi marks; hide secrets in URLs."""
    text = hide_secrets(text)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def hide_secrets(text: str) -> str:
    """Hide secrets in URLs: ``://me:word@h/run?sig=1`` → ``://…@h/run?sig=…``."""
    if "://" not in text:
        return text

    def hide(query: re.Match[str]) -> str:
        return query[1] + (re.sub(r"(?<==)[^&]+", "…", query[2]) if "=" in query[2] else "…")

    return _QUERY.sub(hide, _USERINFO.sub("…@", text))


def shorten(names: object, limit: int = 8) -> str:
    """Join at most ``limit`` names for a message."""
    items = [str(name) for name in names]  # type: ignore[attr-defined]
    text = ", ".join(items[:limit])
    return text if len(items) <= limit else f"{text}, … ({len(items)} in all)"


def pluralize(number: int, noun: str) -> str:
    """Format ``1 file``, ``5 files``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def describe_changes(*facts: tuple[str, Any, Any]) -> str:
    """Format (name, old, new) of different values: ``micro batch 4 → 2, ranks 2 → 4``."""
    return ", ".join(f"{name} {old} → {new}" for name, old, new in facts if old != new)


def suggest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``did you mean 'name'?`` for the most similar valid name, or "".

    Args:
        name: the name as written, in any case and with ``-`` or ``_``.
    """
    plain = {valid_name.lower().replace("-", "_"): valid_name for valid_name in valid}
    near = get_close_matches(name.lower().replace("-", "_"), plain, n=1, cutoff=cutoff)
    return f"did you mean {plain[near[0]]!r}?" if near else ""


def advise(name: str, valid: Iterable[str], listed: str = "") -> str:
    """Suggest the most similar valid name; else ``listed``, a sentence with all names."""
    valid = list(valid)
    return _capitalize(suggest(name, valid)) or listed or f"Valid: {', '.join(valid)}."


def describe_faults(error: Any, keys: Iterable[str] = (), listed: str = "") -> str:
    """Describe a pydantic ``ValidationError``: location, fault, found value.

    Most values are shown by their type only, because a misplaced value may be a secret.

    Args:
        keys: valid keys, to suggest one for an unknown key.
        listed: sentence with the valid keys, for an unknown key that is similar to none of them.
    """
    keys, errors = tuple(keys), error.errors()
    faults = [(".".join(map(str, fault["loc"])), _describe_fault(fault)) for fault in errors]
    text = "; ".join(": ".join(filter(None, fault)) for fault in faults)
    advice = [_advise_fault(fault, keys, listed) for fault in errors]
    return " ".join([f"{text}.", *filter(None, dict.fromkeys(advice))])


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument", "invalid_key")


def _describe_fault(fault: Mapping[str, Any]) -> str:
    if fault["type"] in _UNKNOWN:
        return "unknown key"
    value, is_near = fault["input"], fault["type"] in ("literal_error", "greater_than_equal", "less_than_equal")
    is_shown = is_near and isinstance(value, (str, int))
    return f"{fault['msg']} (found {repr(value) if is_shown else describe_type(value)})"


def _advise_fault(fault: Mapping[str, Any], keys: Sequence[str], listed: str) -> str:
    if fault["type"] in _UNKNOWN:
        return advise(str(fault["loc"][-1]), keys, listed)
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        return _capitalize(suggest(fault["input"], re.findall(r"'([^']*)'", fault["ctx"]["expected"])))
    return ""


def _capitalize(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def describe_type(value: object) -> str:
    """Describe a value by its type, for messages that must not contain it."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


def fold_names(items: Iterable[tuple[str, T]], key: Callable[[T], Hashable]) -> list[tuple[str, list[T]]]:
    """Group (name, item) whose names differ only in numbers: ``h.{0-11}.mlp.bias``.

    Args:
        items: a name may occur several times, with items of different keys.
        key: function of an item; the items of a group have equal keys.
    """
    groups: dict[Hashable, dict[str, T]] = {}
    for name, item in items:
        groups.setdefault((_NUMBER.sub("{}", name), key(item)), {})[name] = item
    return [folded for group in groups.values() for folded in _fold_group(group)]


def _fold_group(group: Mapping[str, T]) -> list[tuple[str, list[T]]]:
    """Fold names if all combinations of numbers exist, else split by the first number."""
    numbers = {name: tuple(map(int, _NUMBER.findall(name))) for name in group}
    places = [sorted(set(values)) for values in zip(*numbers.values(), strict=True)]
    if len(group) == prod(map(len, places)):
        spans = (None if len(values) == 1 else f"{{{join_numbers(values)}}}" for values in places)
        name = _NUMBER.sub(lambda digits: next(spans) or digits[0], next(iter(group)))
        return [(name, list(group.values()))]
    at = next((place for place, values in enumerate(places) if len(values) > 1), None)
    if at is None:  # equal numbers with different spellings
        return [(name, [item]) for name, item in group.items()]
    parts = [{name: group[name] for name in group if numbers[name][at] == value} for value in places[at]]
    return [folded for part in parts for folded in _fold_group(part)]


def join_numbers(values: Iterable[int]) -> str:
    """Format ascending numbers as ranges: ``0-3,8``."""
    spans: list[list[int]] = []
    for value in values:
        if spans and spans[-1][-1] + 1 == value:
            spans[-1] = [spans[-1][0], value]
        else:
            spans.append([value])
    return ",".join("-".join(map(str, span)) for span in spans)
