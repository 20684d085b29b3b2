"""Rules for vocabularies with other numbers of rows in model and checkpoint.

``docs/patterns.md`` describes their keys. Without a rule a different shape is an error. A rule has no effect if the
shapes are equal. Optimizer states of new rows are zero.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ..errors import MismatchError
from .facts import compile_regex
from .kinds import FUSED_QKV
from .layout import Layout, Shape


@dataclass(frozen=True)
class Resize:
    """A rule as written (``docs/patterns.md``)."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    match: str
    new: Literal["live", "zero", "mean"] = "live"
    keep: int | None = None
    shrink: bool = False

    def __post_init__(self) -> None:
        compile_regex(self.match)
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"{self.match!r}: keep is a number of rows from 1 on")

    def matches(self, name: str) -> bool:
        return compile_regex(self.match).fullmatch(name) is not None

    def fit(self, saved: Layout, live: Layout, vocab: int | None = None) -> tuple[Layout, Resized]:
        """Return the saved layout with the kept rows only, and the change of the rows.

        Args:
            vocab: rows without padding, if known.

        Raises:
            MismatchError: other dimensions differ, or rows would be lost and the rule does not have ``shrink``.
        """
        rule, before, after = f"the resize rule {self.match!r}", saved.shape, live.shape
        if len(before) != len(after) or not before or before[1:] != after[1:]:
            raise MismatchError(f"{rule} changes only rows; shape {before} in the checkpoint, {after} in the model")
        if saved.mean or saved.is_in_parts or live.is_in_parts:
            raise MismatchError(f"{rule}: parameters in parts, or averaged over replicas, cannot be resized")
        kept = min(self.keep or vocab or before[0], before[0])
        if after[0] < kept and not self.shrink:
            raise MismatchError(
                f'{rule}: the model has {after[0]} of {kept} rows; "shrink": true leaves the last ones out'
            )
        kept = min(kept, after[0])
        resized, shards = Resized(before[0], after[0], kept, self.new), saved.claims or saved.shards
        if kept == before[0]:
            return saved, resized
        rows = [tuple((low, min(high, kept)) for low, high in shard[0] if low < kept) for shard in shards]
        claims = tuple((part, *shard[1:]) for part, shard in zip(rows, shards, strict=True))
        return replace(saved, claims=claims), resized


@dataclass(frozen=True, slots=True)
class Resized:
    """A parameter with another number of rows.

    Attributes:
        saved, live: rows in the checkpoint and in the model.
        kept: number of saved rows that are kept, from the first on.
        pads: the new rows are a vocabulary's padding.
    """

    saved: int
    live: int
    kept: int
    new: str = "zero"
    pads: bool = False

    def describe(self) -> str:
        dropped, new = self.saved - self.kept, self.live - self.kept
        texts = [f"{self.kept} of {self.saved} rows are kept, {dropped} left out"] if dropped else []
        if new:
            content = {
                "live": "keep the live model's values",
                "zero": "are zero",
                "mean": f"are the mean of the {self.kept} that are kept",
            }[self.new]
            texts.append(f"{new} new {'ones' if dropped else 'rows'} {content}")
        return f"{self.saved} → {self.live}: {'; '.join(texts)}"


def find_added_padding(saved: Layout, live: Layout) -> Resized | None:
    """Return the change if a vocabulary has more (padding) rows in the model, or None."""
    if saved.shape[:1] < live.shape[:1]:
        return Resized(saved.shape[0], live.shape[0], saved.shape[0], pads=True)
    return None


def is_fused(name: str) -> bool:
    """Return True for a fused parameter's name: new rows would extend its last part."""
    return bool(FUSED_QKV.search(name) or "gate_up" in name) and ".lora_" not in name


def advise_resize(shapes: Mapping[str, tuple[Shape, Shape]]) -> str:
    """Suggest resize rules for different shapes; empty if no rules can help.

    Args:
        shapes: name → different logical shapes in the checkpoint and in the model.
    """
    rules = []
    for shrinks in (False, True):
        names = [name for name, (saved, live) in shapes.items() if (saved[:1] > live[:1]) is shrinks]
        if names:
            match = "|".join(dict.fromkeys(re.sub(r"\d+", r"\\d+", re.escape(name)) for name in names))
            rules.append({"match": match, **({"shrink": True} if shrinks else {})})
    if not rules or any(not saved or saved[1:] != live[1:] or is_fused(n) for n, (saved, live) in shapes.items()):
        return ""
    return (
        f' If the model differs on purpose, add rules: "patterns": {json.dumps({"resize": rules})} (docs/patterns.md).'
    )
