"""Patterns as plain data, as an atomic checkpoint's manifest holds them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from ..errors import MismatchError
from .affine import Mapped
from .kinds import Partial, Pattern, Replicate, SameShards, ShardH, ShardHy, ShardNC, ShardV, Unique
from .layout import Layout
from .metadata import Viewed
from .rules import Rule, RuleSet, name_rule

ORIGIN = "the atomic checkpoint's manifest"

_KINDS: dict[str, type[Pattern]] = {
    "unique": Unique,
    "replicate": Replicate,
    "partial": Partial,
    "shard-h": ShardH,
    "shard-v": ShardV,
    "shard-hy": ShardHy,
    "shard-nc": ShardNC,
    "same-shards": SameShards,
    "viewed": Viewed,
    "mapped": Mapped,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def record_pattern(pattern: Pattern) -> dict[str, Any]:
    """A pattern as plain data: its ``kind``, and those of its fields that are not the default."""
    told: dict[str, Any] = {"kind": _NAMES[type(pattern)]}
    for field in sorted(fields(pattern), key=lambda field: bool(field.kw_only)):
        value = getattr(pattern, field.name)
        if value != field.default:
            told[field.name] = _record(value)
    return told


def _record(value: Any) -> Any:
    if isinstance(value, Layout):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return record_pattern(value) if type(value) in _NAMES else value


def read_pattern(told: Mapping[str, Any]) -> Pattern:
    """The pattern that :func:`record_pattern` has told.

    Raises:
        MismatchError: data of another form.
    """
    kind = _KINDS.get(str(told.get("kind")))
    if kind is None:
        raise MismatchError(f"a recorded pattern is of unknown kind: {dict(told)!r}; update deepspeed_ucp")
    values = {key: value for key, value in told.items() if key != "kind"}
    try:
        if isinstance(values.get("general"), Mapping):
            values["general"] = read_pattern(values["general"])
        return _make_reader(kind).validate_python(values)  # type: ignore[no-any-return]
    except ValueError as error:
        raise MismatchError(f"a recorded pattern cannot be read ({error}): {dict(told)!r}") from error


@lru_cache
def _make_reader(kind: type[Pattern]) -> Any:
    from pydantic import TypeAdapter  # as manifests are checked

    return TypeAdapter(kind)


def from_recorded(recorded: Mapping[str, Mapping[str, Any]], origin: str = ORIGIN) -> RuleSet:
    """Rules from the patterns by which an atomic checkpoint's tensors were united.

    A tensor that one rank held whole tells nothing about how another topology cuts it, only of its vocabulary.

    Args:
        recorded: per parameter its pattern as plain data (``AtomicIndex.recorded``).
        origin: name of the rule set.

    Raises:
        MismatchError: data of another form.
    """
    literal: dict[str, tuple[Rule, ...]] = {}
    vocabs = set()
    for name, told in recorded.items():
        pattern = read_pattern(told)
        vocabs.add(pattern.vocab)
        if not isinstance(pattern, (Unique, SameShards)):
            literal[name] = (name_rule(name, pattern),)
    vocabs.discard(None)
    vocab = vocabs.pop() if len(vocabs) == 1 else None
    return RuleSet(origin, literal=literal, vocab=vocab)
