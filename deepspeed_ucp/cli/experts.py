"""What ``ds_ucp inspect`` tells of layers of experts: how many they have, and which ranks hold which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from ..atoms import AtomicIndex
from ..errors import fold_names
from ..experts import find_block, read_name, read_placement
from .printing import format_table

_OFTEN = 4
"""Expert-parallel ranks that a line of the table tells of."""


@dataclass(frozen=True, slots=True)
class ExpertHolders:
    """Ranks of a pipeline stage, and the experts that each of them holds."""

    ranks: tuple[int, ...]
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer of experts.

    Attributes:
        layer: name of the block that they are in.
        experts: how many it has.
        ep: expert-parallel degree; None where the files do not tell.
        held: who holds which; None likewise.
    """

    layer: str
    experts: int
    ep: int | None
    held: tuple[ExpertHolders, ...] | None


def list_layers(index: AtomicIndex) -> dict[str, ExpertLayer]:
    """All layers, by what the names of their experts' parameters begin with; empty for a model without experts."""
    counts: dict[str, int] = {}
    names: dict[str, str] = {}
    for key in index.stored.atoms:
        if read := read_name(key.name):
            counts[read.layer] = max(counts.get(read.layer, 0), read.number + 1)
            names[read.layer] = (find_block(key.name) or read.layer).rstrip(".")
    dp = index.run.counters.get("dp_world_size") or index.run.topology.dp
    placed = read_placement(chain(*index.run.flats.values()), dp)
    found = {}
    for layer, number in counts.items():
        held = [ExpertHolders(tuple(ranks), tuple(each)) for ranks, each in placed.get(layer, {}).items()]
        found[layer] = ExpertLayer(names[layer], number, len(held) or None, tuple(held) or None)
    return found


def describe_expert(layers: dict[str, ExpertLayer], name: str) -> dict[str, Any] | None:
    """Of an expert's parameter its layer, its number, how many the layer has, and the ranks that hold it."""
    read = read_name(name)
    if read is None:
        return None
    layer = layers[read.layer]
    ranks = next((each.ranks for each in layer.held or () if read.number in each.experts), None)
    return {"layer": layer.layer, "number": read.number, "of": layer.experts, "ranks": ranks}


def write_layers(layers: Iterable[ExpertLayer]) -> list[str]:
    """The table; layers whose names differ in numbers only share a line where all else is the same."""
    folded = fold_names([(each.layer, each) for each in layers], lambda each: (each.experts, each.ep, each.held))
    rows = [(name, one.experts, one.ep or "?", _write_held(one.held)) for name, (one, *_) in folded]
    return format_table(rows, ("layer of experts", "experts", "ep", "ranks: experts that they hold"), right=(1, 2))


def _write_held(held: Sequence[ExpertHolders] | None) -> str:
    if held is None:
        return "not told by these files"
    shown = [f"{write_numbers(each.ranks)}: {write_numbers(each.experts)}" for each in held[:_OFTEN]]
    more = [f"… ({len(held)} in all)"] if len(held) > _OFTEN else []
    return "; ".join([*shown, *more])


def write_numbers(numbers: Sequence[int]) -> str:
    """``0-3, 6``; of more than four apart from each other the ends."""
    spans = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda each: each[1] - each[0]):
        values = [value for _, value in run]
        spans.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return ", ".join(spans if len(spans) <= _OFTEN else [*spans[:2], "…", spans[-1]])
