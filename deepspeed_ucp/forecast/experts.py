"""The param groups of a target without an engine, and which ranks hold which experts of them.

DeepSpeed takes the experts out of each param group, by the degree of their layer, and cuts such a group where it gets
too large (``moe/utils.py``, ``split_params_into_different_moe_groups_for_optimizer``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..atoms import COPY, MASTER, MODULE, AtomicIndex, count
from ..errors import MismatchError
from ..experts import ExpertName, place_experts, read_name, read_placement
from ..flat import Shape
from .degrees import Degrees

_NUMBER = re.compile(r"(\d+)")

Named = tuple[str, ExpertName]


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """What the same data-parallel ranks hold of a param group.

    Attributes:
        number: of the group.
        tensors: by parameter of a rank's module, in order, those of the whole model that lie in it.
        ranks: that hold it; None where all do.
        hyper: its hyper-parameters.
    """

    number: int
    tensors: tuple[tuple[str, ...], ...]
    ranks: range | None
    hyper: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SpreadLayer:
    """A layer of experts of a target: how many it has, and by expert-parallel rank who holds them."""

    count: int
    holders: tuple[range, ...]

    @property
    def degree(self) -> int:
        """Expert-parallel ranks."""
        return len(self.holders)

    def list_held(self, place: int) -> range:
        """Experts of an expert-parallel rank."""
        own = self.count // self.degree
        return range(place * own, (place + 1) * own)

    def find_ranks(self, expert: int) -> range | None:
        """The data-parallel ranks that hold an expert; None where all do."""
        return self.holders[expert * self.degree // self.count] if self.degree > 1 else None


Layers = Mapping[str, SpreadLayer]
"""By what the names of their parameters begin with, in the module's order."""


def spread_layers(index: AtomicIndex, names: Iterable[str], degrees: Degrees) -> dict[str, SpreadLayer]:
    """The layers of experts of a target.

    Args:
        names: of all parameters.

    Raises:
        MismatchError: degrees that the layers cannot be spread over, or with which no engine has such experts.
    """
    found = _read_names(index, dict.fromkeys(names))
    if not found:
        if max(degrees.ep) > 1:
            raise MismatchError(
                f"The checkpoint has no experts that ep={degrees.describe_ep()} could spread over ranks."
            )
        return {}
    _check_engine(found, degrees)
    counts: dict[str, int] = {}
    for read in found:
        counts[read.layer] = max(counts.get(read.layer, 0), read.number + 1)
    asked = degrees.ep * len(counts) if len(degrees.ep) == 1 else degrees.ep
    if len(asked) != len(counts):
        raise MismatchError(f"ep={degrees.describe_ep()} is for {len(asked)} layers of experts, found {len(counts)}.")
    layers = {}
    for (layer, held), degree in zip(counts.items(), asked, strict=True):
        if degrees.shards % degree or held % degree:
            raise MismatchError(
                f"ep={degree} has to divide the {degrees.shards} data-parallel ranks and the {held} experts of {layer}"
            )
        holders = place_experts(degrees.shards, degree, data_first=degrees.data_first)
        layers[layer] = SpreadLayer(held, tuple(holders))
    return layers


def _read_names(index: AtomicIndex, names: Mapping[str, None]) -> list[ExpertName]:
    """Names of experts' parameters, layers in the module's order: that of the experts' files, else of the numbers."""
    copies = [key.name for key in index.stored.atoms if key.state in (COPY, MODULE)]
    filed = [read for name in copies if name in names and (read := read_name(name))]
    others = [read for name in names if (read := read_name(name))]
    return filed + sorted(others, key=lambda read: [part.zfill(9) for part in _NUMBER.split(read.layer)])


def _check_engine(found: Sequence[ExpertName], degrees: Degrees) -> None:
    if degrees.zero > 2 and not all(read.fused for read in found):
        raise MismatchError("DeepSpeed's own experts are resumed under ZeRO 0, 1 and 2 alone.")
    if degrees.tp > 1:
        raise MismatchError(
            "How a run spreads its experts over tensor-parallel ranks only the live model tells: a resume at tp > 1 is "
            "not foreseen. The load itself asks for no more than patterns."
        )
    if len(set(degrees.ep)) > 1 and any(read.fused for read in found):
        raise MismatchError("AutoEP has one expert-parallel degree for all layers.")


def plan_groups(
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
    layers: Layers,
    shapes: Mapping[str, Shape],
    limit: int,
) -> list[PlannedGroup]:
    """Param groups as DeepSpeed makes them, those of experts by who holds them.

    Args:
        groups: the saved ones, names and hyper-parameters. Of experts those with equal ones are one group, which the
            saved run had cut by degree and by size.
        layers: of experts.
        shapes: of all parameters.
        limit: elements of a rank's group of experts at most (``max_group_size``).
    """
    planned: list[PlannedGroup] = []
    taken: list[tuple[Mapping[str, Any], list[Named]]] = []
    for names, hyper in groups:
        experts = [(name, read) for name in names if (read := read_name(name))]
        dense = tuple((name,) for name in names if not read_name(name))
        if dense or not experts:
            planned.append(PlannedGroup(len(planned), dense, None, hyper))
        known = next((held for other, held in taken if other == hyper), None)
        if known is not None:
            known += experts
        elif experts:
            taken.append((hyper, experts))
    number = len(planned)
    for hyper, experts in taken:
        for same in _split_degrees(experts, layers):
            pieces = [list(_cut_pieces(each, shapes, limit)) for each in _deal(same, layers)]
            holders = layers[same[0][1].layer].holders
            for piece in range(len(pieces[0])):
                for ranks, held in zip(holders, pieces, strict=True):
                    who = ranks if len(holders) > 1 else None
                    planned.append(PlannedGroup(number, tuple(held[piece]), who, hyper))
                number += 1
    return planned


def _split_degrees(experts: Sequence[Named], layers: Layers) -> list[list[Named]]:
    """By degree, in the order of the names that DeepSpeed gives to their process groups."""
    found: dict[int, list[Named]] = defaultdict(list)
    for name, read in experts:
        found[layers[read.layer].degree].append((name, read))
    return [found[degree] for degree in sorted(found, key=lambda degree: f"ep_size_{degree}")]


def _deal(experts: Sequence[Named], layers: Layers) -> Iterator[list[tuple[str, ...]]]:
    """What each expert-parallel rank's module holds of some experts, in its order."""
    order = {layer: at for at, layer in enumerate(layers)}
    ends = {each: at for at, each in enumerate(dict.fromkeys((read.layer, read.end) for _, read in experts))}

    def rate(named: Named) -> tuple[int, str, int, int]:
        read = named[1]
        first = read.end if read.fused else ""  # AutoEP's tensors are registered as w1, w2, w3
        return order[read.layer], first, read.number, ends[read.layer, read.end]

    ordered = sorted(experts, key=rate)
    for place in range(layers[experts[0][1].layer].degree):
        tensors: dict[tuple[str, int, str], list[str]] = defaultdict(list)
        for name, read in ordered:
            if read.number in layers[read.layer].list_held(place):
                tensors[read.layer, -1 if read.fused else read.number, read.end].append(name)
        yield [tuple(names) for names in tensors.values()]


def _cut_pieces(
    tensors: Sequence[tuple[str, ...]], shapes: Mapping[str, Shape], limit: int
) -> Iterator[list[tuple[str, ...]]]:
    piece: list[tuple[str, ...]] = []
    size = 0
    for names in tensors:
        numel = sum(count(shapes[name]) for name in names)
        if piece and size + numel > limit:
            yield piece
            piece, size = [], 0
        piece.append(names)
        size += numel
    if piece:
        yield piece


def find_moved_experts(index: AtomicIndex, degrees: Degrees) -> list[str]:
    """Layers whose experts lie on other ranks of a target than in the checkpoint, in words.

    Over tensor-parallel ranks only the live model spreads them: there nothing is told.

    Raises:
        MismatchError: as of :func:`spread_layers`.
    """
    if degrees.tp > 1:
        return []
    names = [key.name for key in index.stored.atoms if key.state == MASTER]
    saved = read_placement(chain(*index.run.flats.values()), degrees.shards)
    found = []
    for layer, spread in spread_layers(index, names, degrees).items():
        wanted = {ranks: tuple(spread.list_held(place)) for place, ranks in enumerate(spread.holders)}
        if saved.get(layer, wanted) != wanted:
            found.append(f"experts of {layer.rstrip('.')} on other ranks")
    return found
