"""What ``ds_ucp inspect`` tells of layers of experts: how many they have, and which ranks hold which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from ..atoms import AtomicIndex
from ..errors import fold_names
from ..experts import Placement, find_block, place_experts, read_name
from .printing import format_table

_OFTEN = 4
"""Expert-parallel ranks that a line of the table tells of."""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer of experts.

    Attributes:
        name: of the block that they are in.
        experts: how many it has.
        held: ranks of its pipeline stage → experts that they hold; None where the files do not tell.
    """

    name: str
    experts: int
    held: Placement | None

    @property
    def ep(self) -> int | None:
        """Expert-parallel degree."""
        return None if self.held is None else len(self.held)

    def find_ranks(self, expert: int) -> range | None:
        """The ranks that hold an expert."""
        return next((ranks for ranks, numbers in (self.held or {}).items() if expert in numbers), None)

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        held = self.held and [{"ranks": list(ranks), "experts": list(each)} for ranks, each in self.held.items()]
        return {"layer": self.name, "experts": self.experts, "ep": self.ep, "held": held}


def list_layers(index: AtomicIndex) -> dict[str, ExpertLayer]:
    """All layers, by what the names of their experts' parameters begin with; empty for a model without experts."""
    counts: dict[str, int] = {}
    names: dict[str, str] = {}
    for key in index.stored.atoms:
        if read := read_name(key.name):
            counts[read.layer] = max(counts.get(read.layer, 0), read.number + 1)
            names[read.layer] = (find_block(key.name) or read.layer).rstrip(".")
    dp = index.run.counters.get("dp_world_size") or index.run.topology.dp
    placed = place_experts(chain(*index.run.flats.values()), dp)
    return {layer: ExpertLayer(names[layer], count, placed.get(layer)) for layer, count in counts.items()}


def describe_expert(layers: dict[str, ExpertLayer], name: str) -> dict[str, Any] | None:
    """Of an expert's parameter its layer, its number, how many the layer has, and the ranks that hold it."""
    read = read_name(name)
    if read is None:
        return None
    layer = layers[read.layer]
    ranks = layer.find_ranks(read.number)
    return {"layer": layer.name, "number": read.number, "of": layer.experts, "ranks": ranks and list(ranks)}


def write_layers(layers: Iterable[ExpertLayer]) -> list[str]:
    """The table; layers whose names differ in numbers only share a line where all else is the same."""
    folded = fold_names([(layer.name, layer) for layer in layers], lambda layer: repr(layer.to_data() | {"layer": ""}))
    rows = [(name, str(held[0].experts), _write_degree(held[0]), _write_held(held[0].held)) for name, held in folded]
    header = ("layer of experts", "experts", "ep", "ranks: experts that they hold")
    return format_table(rows, header, right=(1, 2))


def _write_degree(layer: ExpertLayer) -> str:
    return "?" if layer.ep is None else str(layer.ep)


def _write_held(held: Placement | None) -> str:
    if held is None:
        return "not told by these files"
    told = [f"{write_numbers(ranks)}: {write_numbers(numbers)}" for ranks, numbers in held.items()]
    more = [f"… ({len(told)} in all)"] if len(told) > _OFTEN else []
    return "; ".join([*told[:_OFTEN], *more])


def write_numbers(numbers: Sequence[int]) -> str:
    """``0-3, 6``; of more than four apart from each other the ends."""
    spans = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda each: each[1] - each[0]):
        values = [value for _, value in run]
        spans.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return ", ".join(spans if len(spans) <= _OFTEN else [*spans[:2], "…", spans[-1]])
