"""Convert patterns to plain data for an atomic checkpoint's manifest, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from ..errors import MismatchError
from .kinds import Partial, Pattern, Replicate, SameShards, ShardH, ShardHy, ShardNC, ShardV, Unique
from .layout import Layout
from .metadata import Mapped, Viewed
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
    """Convert a pattern to plain data: its ``kind`` and its fields without defaults."""
    recorded: dict[str, Any] = {"kind": _NAMES[type(pattern)]}
    for field in sorted(fields(pattern), key=lambda field: bool(field.kw_only)):
        value = getattr(pattern, field.name)
        if isinstance(value, Layout):
            recorded[field.name] = {part.name: getattr(value, part.name) for part in fields(value)}
        elif value != field.default:
            recorded[field.name] = record_pattern(value) if isinstance(value, Pattern) else value
    return recorded


def read_pattern(recorded: Mapping[str, Any]) -> Pattern:
    """Convert the result of :func:`record_pattern` back.

    Raises:
        MismatchError: the data is malformed.
    """
    kind = _KINDS.get(str(recorded.get("kind")))
    if kind is None:
        raise MismatchError(f"a recorded pattern is of unknown kind: {dict(recorded)!r}; update deepspeed_ucp")
    values = {key: value for key, value in recorded.items() if key != "kind"}
    try:
        if isinstance(values.get("general"), Mapping):
            values["general"] = read_pattern(values["general"])
        return _make_reader(kind).validate_python(values)  # type: ignore[no-any-return]
    except ValueError as error:
        raise MismatchError(f"a recorded pattern cannot be read ({error}): {dict(recorded)!r}") from error


@lru_cache
def _make_reader(kind: type[Pattern]) -> Any:
    from pydantic import TypeAdapter  # as manifests are checked

    return TypeAdapter(kind)


def from_recorded(recorded: Mapping[str, Mapping[str, Any]]) -> RuleSet:
    """Make rules from the recorded patterns of an atomic checkpoint's tensors.

    The pattern of a tensor that was not cut gives no rule, only a vocabulary's size.

    Args:
        recorded: parameter → pattern as plain data (``AtomicIndex.recorded``).
    """
    literal: dict[str, tuple[Rule, ...]] = {}
    vocabs = set()
    for name, data in recorded.items():
        pattern = read_pattern(data)
        vocabs.add(pattern.vocab)
        if not isinstance(pattern, (Unique, SameShards)):
            literal[name] = (name_rule(name, pattern),)
    vocabs.discard(None)
    vocab = vocabs.pop() if len(vocabs) == 1 else None
    return RuleSet(ORIGIN, literal=literal, vocab=vocab)
