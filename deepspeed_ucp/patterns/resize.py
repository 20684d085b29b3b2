"""Parameters that the live model has in another shape: what is kept of the saved one, and what its new places hold.

Nothing changes its shape unless a rule says so:

    match:    regular expression of the name behind the set's prefix, as of a rule for a pattern
    dim:      the dimension that has another size (0); all others are equal
    new:      what new places hold: live (the live model's values), zero, or mean (of the rows that are kept; dim 0)
    keep:     places that are kept, the first ones; what a rule with ``vocab`` tells, else all
    shrink:   true: the live model may have fewer places than are kept, and the last ones are left out
    scale:    factor of what is kept, where ``new`` is zero: a number, ``16/32``, or ``lora``: the factor of a LoRA's
              product (alpha / rank) in the saved run by that of the live one

A rule counts where the shapes differ, so that it may stay when the run has saved. Optimizer states of new places are
zero; those of scaled ones follow their gradients, which the inverse of the factor scales.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite
from typing import ClassVar, Literal

from ..errors import MismatchError
from .adapters import read_live
from .kinds import FUSED_QKV
from .layout import Intervals, Layout, Product, Shape
from .regex import compile_regex

LORA = "lora"
"""A scale that the configurations of both sides' adapters tell."""

_OWN_LORA = re.compile(r".*\.lora_weight_(?P<side>[12])\..*")  # DeepSpeed's
_KINDS = 3


@dataclass(frozen=True)
class Resize:
    """A rule as it is written (see this module's text)."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    match: str
    dim: int = 0
    new: Literal["live", "zero", "mean"] = "live"
    keep: int | None = None
    shrink: bool = False
    scale: float | str = 1

    def __post_init__(self) -> None:
        compile_regex(self.match)
        if self.dim < 0 or (self.keep is not None and self.keep < 1):
            raise ValueError(f"{self.match!r}: dim is a dimension from 0 on, keep a number of places from 1 on")
        if self.new == "mean" and self.dim:
            raise ValueError(f"{self.match!r}: the mean is that of rows, dim 0")
        try:
            told = self.factor
        except (ValueError, ZeroDivisionError):
            told = 0.0
        if told is not None and not (isfinite(told) and told > 0):
            raise ValueError(f'{self.match!r}: scale is a number above 0, such as "16/32", or "{LORA}"')
        if told != 1 and self.new != "zero":
            raise ValueError(f'{self.match!r}: a scale goes with "new": "zero"')

    @property
    def factor(self) -> float | None:
        """Of what is kept; None where the adapters' configurations tell it."""
        if self.scale == LORA:
            return None
        return float(Fraction(self.scale) if isinstance(self.scale, str) else self.scale)

    def fits(self, name: str) -> bool:
        """Whether it is about a parameter."""
        return compile_regex(self.match).fullmatch(name) is not None

    def fit(self, saved: Layout, live: Layout, vocab: int | None = None) -> tuple[Layout, Resized]:
        """The saved layout with the places that are kept alone, and what becomes of the parameter.

        Args:
            vocab: rows that mean something, where a rule tells them.

        Raises:
            MismatchError: the shapes differ in something else, or places would be lost that the rule does not give up.
        """
        dim, told = self.dim, f"the resize rule {self.match!r}"
        have, want = saved.shape, live.shape
        if len(have) != len(want) or dim >= len(have) or have[:dim] + have[dim + 1 :] != want[:dim] + want[dim + 1 :]:
            raise MismatchError(
                f"{told} is about dimension {dim} alone; shape {have} in the checkpoint, {want} in the model"
            )
        if saved.mean or saved.view != have or live.view != want:
            raise MismatchError(f"{told}: what is cut into blocks, or is the mean of its replicas, keeps its shape")
        kept = min(self.keep or (vocab if vocab and dim == 0 else have[dim]), have[dim])
        if want[dim] < kept and not self.shrink:
            raise MismatchError(
                f'{told}: the model has {want[dim]} of {kept} {name_places(dim)}; "shrink": true leaves the last ones '
                "out"
            )
        kept = min(kept, want[dim])
        resized = Resized(dim, have[dim], want[dim], kept, self.new, self.factor)
        return (saved if kept == have[dim] else _claim(saved, dim, kept)), resized


@dataclass(frozen=True, slots=True)
class Resized:
    """A parameter in another shape.

    Attributes:
        dim: its dimension of another size.
        saved, live: places along it, in the checkpoint and in the model.
        kept: of the saved ones the first that are kept.
        new: what the new ones hold, as of :class:`Resize`.
        scale: factor of what is kept; None where it is not known yet.
        pads: new places are a vocabulary's padding.
    """

    dim: int
    saved: int
    live: int
    kept: int
    new: str = "zero"
    scale: float | None = 1.0
    pads: bool = False

    def describe(self) -> str:
        """What becomes of it, in words."""
        places, left, new = name_places(self.dim), self.saved - self.kept, self.live - self.kept
        told = [f"{self.kept} of {self.saved} {places} are kept, {left} left out"] if left else []
        if new:
            held = {
                "live": "keep the live model's values",
                "zero": "are zero",
                "mean": f"are the mean of the {self.kept} that are kept",
            }[self.new]
            told.append(f"{new} new {'ones' if left else places} {held}")
        if self.scale not in (1, None):
            told.append(f"what is kept is multiplied by {self.scale:g}")
        return f"{self.saved} → {self.live}: {'; '.join(told)}"


def name_places(dim: int) -> str:
    """What the places of a dimension are called."""
    return ("rows", "columns")[dim] if dim < 2 else f"places of dimension {dim}"


def pad_vocabulary(saved: Layout, live: Layout) -> Resized | None:
    """What becomes of a vocabulary that has more padding in the model; None where it has not."""
    if saved.shape[:1] < live.shape[:1]:
        return Resized(0, saved.shape[0], live.shape[0], saved.shape[0], pads=True)
    return None


def is_fused(name: str) -> bool:
    """Whether rows of a parameter are those of several, by its name: new ones at the end would be the last one's."""
    return bool(FUSED_QKV.search(name) or "gate_up" in name) and not _find_side(name)


def _claim(layout: Layout, axis: int, kept: int) -> Layout:
    """A layout of whose shards the first places of an axis alone are taken."""

    def clip(shard: Product) -> Product:
        return (*shard[:axis], _clip(shard[axis], kept), *shard[axis + 1 :])

    return replace(layout, claims=tuple(map(clip, layout.claims or layout.shards)))


def _clip(intervals: Intervals, end: int) -> Intervals:
    return tuple((low, min(high, end)) for low, high in intervals if low < end)


def advise_resize(shapes: Mapping[str, tuple[Shape, Shape]]) -> str:
    """Which rules would let a checkpoint go on in a model of other shapes; empty where it is another model.

    Args:
        shapes: by name the logical shapes in the checkpoint and in the model, which differ.
    """
    kinds: dict[tuple[int, str, bool], list[str]] = defaultdict(list)
    for name, (saved, live) in shapes.items():
        differing = [dim for dim, sizes in enumerate(zip(saved, live, strict=False)) if sizes[0] != sizes[1]]
        if len(saved) != len(live) or len(differing) != 1 or (differing == [0] and is_fused(name)):
            return ""
        kinds[differing[0], _find_side(name), saved[differing[0]] > live[differing[0]]].append(name)
    if not 0 < len(kinds) <= _KINDS:
        return ""
    rules = json.dumps({"resize": [_make_rule(names, *kind) for kind, names in kinds.items()]})
    if {("A", False), ("B", False)} == {(side, shrinks) for _, side, shrinks in kinds}:
        rules = f'"{LORA}"'  # the family, whose rules these are
    return f' Where the model is meant to differ, rules say so: "patterns": {rules} (docs/patterns.md).'


def _find_side(name: str) -> str:
    """Which matrix of a LoRA a parameter is: A or B of PEFT's, 1 or 2 of DeepSpeed's; empty of none."""
    if found := read_live(name):
        return found.kind[-1:] if found.kind[-2:] in ("_A", "_B") else ""
    own = _OWN_LORA.fullmatch(name)
    return own["side"] if own else ""


def _make_rule(names: list[str], dim: int, side: str, shrinks: bool) -> dict[str, object]:
    """A rule for parameters; ``side`` of an adapter's is A or B (DeepSpeed's 1 or 2)."""
    match = "|".join(dict.fromkeys(re.sub(r"\d+", r"\\d+", re.escape(name)) for name in names))
    rule: dict[str, object] = {"match": match}
    if side:
        kind = {"1": r"lora_weight_1\..*", "2": r"lora_weight_2\..*"}.get(side, rf"lora_(?:embedding_)?{side}\..*")
        rule = {"match": rf".*\.{kind}"}
    rule |= {"dim": dim} if dim else {}
    rule |= {"new": "zero", "scale": LORA} if side in ("B", "2") and dim == 1 else {}
    return rule | ({"shrink": True} if shrinks else {})
