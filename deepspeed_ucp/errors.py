"""Errors. Each says what is wrong (file or parameter), what was expected, what was found and what to do."""

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
"""What a URL says of who asks: all of it on the web, elsewhere where it has a password (``abfs`` has a container).

A secret may have a ``/`` in it, which a port has not.
"""

_QUERY = re.compile(r"(://[^\s?#\"]*\?)([^\s#\"]+?)(?=[:.,;)]*(?:[\s#\"]|$))")
"""What a URL asks with; a signature or a token may be among it."""


class UcpError(RuntimeError):
    """Base of every error that this package raises on purpose. What it is about is data; text is for people alone.

    Args:
        lines: what is told, a line each, as :func:`escape` has it.
        path: the file or folder that it is about, which is told in front of the first line.
        kind: of what is found there, as a finding (:mod:`deepspeed_ucp.sources.findings`) has it.
        findings: what it was made of, where that is more than path and kind tell.

    Attributes:
        text: what is told without the path.
        shared: every rank of the launch raises it.
        echo: and another rank than this one is to tell it.
        rank: that has found it, where several ranks raise it.
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
        """What it tells, as another rank raises it; nothing of what this rank alone knows."""
        error = type(self)(*self.args)
        error.path, error.kind, error.text, error.findings = self.path, self.kind, self.text, self.findings
        error.shared, error.echo, error.rank = shared, echo, rank
        return error


class ConfigError(UcpError):
    """The ds_config (``checkpoint.universal``, batch sizes) cannot be honoured."""


class CheckpointError(UcpError):
    """The checkpoint on disk is missing something, damaged, or mixes files of several runs or steps."""


class ChecksumError(CheckpointError):
    """The bytes of a file are not those that its writer stored a checksum of."""


class MismatchError(UcpError):
    """Checkpoint and live engine disagree: parameters, shapes, param groups or the kind of optimizer."""


class UnsupportedError(UcpError):
    """The checkpoint or the engine uses a feature that the plugin does not cover (yet), or not without consent."""


class StorageError(UcpError):
    """A file cannot be read or written: the system cannot, or what lies there is in use or is not to be replaced."""


class TagTakenError(StorageError):
    """Another job has published the tag that this one was writing; no retry can mend that."""


class DiskFullError(StorageError):
    """What is to be written does not fit: the disk is full, a quota is used up, or a file would be too large."""


class OutOfReachError(CheckpointError, StorageError):
    """A file of a checkpoint cannot be read, and that is no fault of the file: permissions, network, limits."""


class RemoteError(UcpError):
    """Another rank failed with an error that is not one of ours; carries its text."""


def let_go(error: BaseException) -> None:
    """Give back what the calls held that an error has ended: memory to exchange bytes in, a second copy of the states.

    An error and the calls that have noted it are a cycle, which the collector of garbage finds late. So this is for
    whoever passes an error over, and for the last that sees one: its calls' variables are no more to be had.
    """
    ended: BaseException | None = error
    while ended is not None:
        traceback.clear_frames(ended.__traceback__)
        ended = ended.__cause__


class Objections:
    """Errors of steps that do not need each other's results, to be raised as one.

    As a context manager it keeps what a step raises; :meth:`settle` raises.
    """

    def __init__(self) -> None:
        self.found: list[UcpError] = []

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, UcpError):
            self.found.append(error)
        return isinstance(error, UcpError)

    def settle(self) -> None:
        """Raise what was found.

        Raises:
            UcpError: of the first one's kind, with the lines of all.
        """
        if not self.found:
            return
        first, *others = self.found
        if not others:
            raise first
        lines = [line for error in others for line in str(error).split("\n")]
        told = type(first)(*first.args, *lines).copy(shared=first.shared, echo=first.echo, rank=first.rank)
        raise told from first


def escape(text: str) -> str:
    """Text as one line that shows what it is: no line breaks, terminal codes, changes of direction; no passwords."""
    text = hide_secrets(text)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def hide_secrets(text: str) -> str:
    """Text without what may be secret in its URLs: ``https://me:word@host/run?sig=1`` is ``https://…@host/run?sig=…``."""
    if "://" not in text:
        return text

    def hide(query: re.Match[str]) -> str:
        return query[1] + (re.sub(r"(?<==)[^&]+", "…", query[2]) if "=" in query[2] else "…")

    return _QUERY.sub(hide, _USERINFO.sub("…@", text))


def shorten(names: object, limit: int = 8) -> str:
    """Join names for a message, naming at most ``limit`` of them."""
    items = [str(name) for name in names]  # type: ignore[attr-defined]
    text = ", ".join(items[:limit])
    return text if len(items) <= limit else f"{text}, … ({len(items)} in all)"


def count_of(number: int, noun: str) -> str:
    """``1 file``, ``5 files``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def describe_changes(*facts: tuple[str, Any, Any]) -> str:
    """``micro batch 4 → 2, ranks 2 → 4`` of names with an old and a new value, where these differ."""
    return ", ".join(f"{name} {old} → {new}" for name, old, new in facts if old != new)


def suggest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """``did you mean 'preserve_batch_size'?`` of the valid name that is like ``name``; empty where none is.

    Args:
        name: what was written, in any case and with ``-`` for ``_``.
        cutoff: how like it has to be, from 0 to 1, as ``difflib`` has it.
    """
    plain = {each.lower().replace("-", "_"): each for each in valid}
    near = get_close_matches(name.lower().replace("-", "_"), plain, n=1, cutoff=cutoff)
    return f"did you mean {plain[near[0]]!r}?" if near else ""


def advise(name: str, valid: Iterable[str], listed: str = "") -> str:
    """What to write for a name that is refused, as a sentence: the valid name that is like it, or else all of them.

    Args:
        listed: the sentence that names all of them.
    """
    valid = list(valid)
    return _begin(suggest(name, valid)) or listed or f"Valid: {', '.join(valid)}."


def describe_faults(error: Any, keys: Iterable[str] = (), listed: str = "") -> str:
    """What a pydantic ``ValidationError`` finds wrong with a configuration, as sentences: where, what, what is there.

    Of most values that is the type: what stands in a wrong place may be a secret.

    Args:
        keys: what it may have, for keys that it may not.
        listed: the sentence that names these, told where an unknown key is like none of them.
    """
    keys, found = tuple(keys), error.errors()
    faults = [(".".join(map(str, each["loc"])), _describe_fault(each)) for each in found]
    text = "; ".join(": ".join(filter(None, fault)) for fault in faults)
    advice = [_advise_fault(each, keys, listed) for each in found]
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
        return _begin(suggest(fault["input"], re.findall(r"'([^']*)'", fault["ctx"]["expected"])))
    return ""


def _begin(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def describe_type(value: object) -> str:
    """A value's type for messages that must not tell the value."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


def fold_names(items: Iterable[tuple[str, T]], same: Callable[[T], Hashable]) -> list[tuple[str, list[T]]]:
    """(Name, item) whose names differ in numbers only, under one name with ranges: ``h.{0-11}.mlp.bias``.

    Args:
        items: each name once, or with items that differ.
        same: what the items under one name have in common.
    """
    groups: dict[Hashable, dict[str, T]] = {}
    for name, item in items:
        groups.setdefault((_NUMBER.sub("{}", name), same(item)), {})[name] = item
    return [folded for group in groups.values() for folded in _fold_group(group)]


def _fold_group(group: Mapping[str, T]) -> list[tuple[str, list[T]]]:
    """One entry where the numbers' combinations are complete (layers × experts), else split at the first place."""
    numbers = {name: tuple(map(int, _NUMBER.findall(name))) for name in group}
    places = [sorted(set(values)) for values in zip(*numbers.values(), strict=True)]
    if len(group) == prod(map(len, places)):
        spans = (None if len(values) == 1 else f"{{{join_numbers(values)}}}" for values in places)
        name = _NUMBER.sub(lambda digits: next(spans) or digits[0], next(iter(group)))
        return [(name, list(group.values()))]
    at = next((place for place, values in enumerate(places) if len(values) > 1), None)
    if at is None:  # numbers that are written in several ways
        return [(name, [item]) for name, item in group.items()]
    parts = [{name: group[name] for name in group if numbers[name][at] == value} for value in places[at]]
    return [folded for part in parts for folded in _fold_group(part)]


def join_numbers(values: Iterable[int]) -> str:
    """Ascending numbers in few characters: ``0-3,8``."""
    spans: list[list[int]] = []
    for value in values:
        if spans and spans[-1][-1] + 1 == value:
            spans[-1] = [spans[-1][0], value]
        else:
            spans.append([value])
    return ",".join("-".join(map(str, span)) for span in spans)
