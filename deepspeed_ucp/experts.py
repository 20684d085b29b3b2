"""Mixtures of experts: what their experts are called, and which ranks hold them.

Every rank counts the experts of a layer that it holds from 0. An atom is named by the number that the expert has in its
whole layer, as the file of that expert names it. DeepSpeed's own layers (``deepspeed/moe``) have that number in the
names of their parameters; AutoEP's (``module_inject/auto_ep_layer.py``) hold several experts in one parameter
``…experts.w1``, of which ``…experts.w1.3`` is the part of one expert.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from .flat import Shape

_EXPERT = re.compile(r"((?:^|.*\.)deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,9})(?=\.|$)", re.ASCII)

DATA_FIRST = "use_data_before_expert_parallelism"
"""Key of a ds_config: ranks that hold the same experts follow each other."""

_PART = re.compile(r"((?:^|.*\.)experts\.)(w[123])\.(\d{1,9})", re.ASCII)

_LAYER = re.compile(r"(?:deepspeed_moe\.)?experts\.(?:deepspeed_experts\.)?$")

MOST_EXPERTS = 1 << 14
"""Of a layer, as far as files are believed."""

Held = Mapping[str, Sequence[int]]
"""By what the names of a layer's own parameters begin with: the numbers, in the whole layer, of the experts that a rank
holds, in its order."""

_FIXED = ("moe", "name")


class ExpertName(NamedTuple):
    """The name of an expert's parameter in the whole model, taken apart.

    Attributes:
        layer: what the names of all experts of its layer begin with.
        number: of the expert, in the whole layer.
        end: which of the expert's parameters it is.
        fused: the experts that a rank holds lie in one parameter (AutoEP).
    """

    layer: str
    number: int
    end: str
    fused: bool


def read_name(name: str) -> ExpertName | None:
    """An atom's name, taken apart; None where it is no expert's."""
    if found := _EXPERT.match(name):
        return ExpertName(found[1], int(found[2]), name[found.end() :], fused=False)
    part = _PART.fullmatch(name)
    return ExpertName(part[1], int(part[3]), part[2], fused=True) if part else None


def find_expert(name: str) -> tuple[str, int] | None:
    """The layer of an expert's parameter or buffer, and the expert's number; None for anything else."""
    found = _EXPERT.match(name)
    return (found[1], int(found[2])) if found else None


def cut_number(name: str) -> tuple[str, str]:
    """What an expert's name has before its number, and behind it; of another parameter the name."""
    found = _EXPERT.match(name)
    return (found[1], name[found.end() :]) if found else (name, "")


def count_experts(names: Iterable[str]) -> dict[str, int]:
    """Experts per layer, of those that are numbered without a gap from 0."""
    counts: dict[str, int] = {}
    for name in names:
        if found := find_expert(name):
            counts[found[0]] = max(counts.get(found[0], 0), found[1] + 1)
    return counts


def find_block(name: str) -> str | None:
    """What the names of everything begin with that is in the block of an expert's atom, its router's name too.

    It is the same of a layer of DeepSpeed's own and of AutoEP's in its place.
    """
    found = read_name(name)
    return None if found is None else _LAYER.sub("", found.layer)


def holds_experts(shape: Shape, experts: int) -> bool:
    """Whether a tensor may hold the parameters of so many experts, one behind the other."""
    return 0 < experts <= MOST_EXPERTS and shape[:1] == (experts,) and prod(shape) > 0


def is_expert(name: str) -> bool:
    """Whether an atom's name is that of an expert's parameter."""
    return read_name(name) is not None


def find_layer(name: str, layers: Collection[str]) -> str | None:
    """Which of the layers a rank's own parameter is of; None for what is no expert's."""
    if not layers:
        return None
    found = _EXPERT.match(name)
    layer = found[1] if found else name[: name.rfind(".") + 1]
    return layer if layer in layers else None


def name_experts(name: str, shape: Shape, held: Held) -> dict[str, Shape]:
    """A rank's own parameter → the whole model's parameters that it is, with their shapes.

    It is itself; an expert's under the number in the whole layer; or those of several experts, one behind the other.
    """
    found = _EXPERT.match(name) if held else None
    layer = found[1] if found else name[: name.rfind(".") + 1]
    if layer not in held:
        return {name: shape}
    if found:
        return {f"{layer}{held[layer][int(found[2])]}{name[found.end() :]}": shape}
    return {f"{name}.{number}": shape[1:] for number in held[layer]}


def place_experts(dp: int, degree: int, tp: int = 1, tp_rank: int | None = None, *, data_first: bool) -> list[range]:
    """Ranks of a pipeline stage that hold the same experts, by expert-parallel rank (``deepspeed/utils/groups.py``).

    Args:
        dp, tp: data- and tensor-parallel ranks; the stage has ``dp * tp``.
        degree: expert-parallel ranks, which divides those over which experts are spread.
        tp_rank: the tensor-parallel rank over whose data-parallel ranks they are; None where they are over all.
        data_first: ``use_data_before_expert_parallelism``.
    """
    ranks = range(dp * tp) if tp_rank is None else range(tp_rank, dp * tp, tp)
    replicas = len(ranks) // degree
    if data_first:
        return [ranks[rank * replicas : (rank + 1) * replicas] for rank in range(degree)]
    return [ranks[rank::degree] for rank in range(degree)]


def drop_fixed(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of a param group; of experts' without what names process groups of the engine."""
    return {key: value for key, value in hyper.items() if not (hyper.get("moe") and key in _FIXED)}


def deal_experts(names: Sequence[str], degree: int, live: int = 0, *, ordered: bool = True) -> list[list[str]]:
    """What each expert-parallel rank has of a param group, in its own order.

    Args:
        names: what all ranks of a live engine hold of the group: the first one's names, then each other rank's experts.
        degree: expert-parallel ranks.
        live: those of the live engine; 0 where not known.
        ordered: its optimizer is not known to have them in another order than the module.

    Raises:
        ValueError: the degree does not fit, or the optimizer has the experts in another order than the module, so that
            only the live degree's ranks are known.
    """
    counts = count_experts(names)
    if not counts:
        return [list(names)] * degree
    if any(count % degree for count in counts.values()):
        raise ValueError(f"{degree} expert-parallel ranks do not fit {sorted(set(counts.values()))} experts")
    dealt = [_deal(names, counts, each) for each in range(1, max(counts.values()) + 1)]
    known = [len(held) for held in dealt if list(dict.fromkeys(chain(*held))) == list(names)]
    if known and (ordered or degree in known):
        return _deal(names, counts, degree)
    if degree != live:
        raise ValueError(
            f"the optimizer has the experts in another order than the module, and {live or 'an unknown number of'} "
            f"expert-parallel ranks, where the saved run had {degree}"
        )
    return [_shift(names, counts, degree, place) for place in range(degree)]


def _deal(names: Sequence[str], counts: Mapping[str, int], degree: int) -> list[list[str]]:
    """Names by expert-parallel rank in the order of the module: a layer's experts are where its first one is.

    Empty where the degree does not fit.
    """
    if any(count % degree for count in counts.values()):
        return []
    ends: dict[str, dict[str, None]] = {layer: {} for layer in counts}
    order: dict[str, str | None] = {}
    for name in names:
        found = _EXPERT.match(name)
        order.setdefault(found[1] if found else name, found and found[1])
        if found:
            ends[found[1]][name[found.end() :]] = None

    def list_held(place: int, layer: str) -> Iterable[str]:
        size = counts[layer] // degree
        return (f"{layer}{number}{end}" for number in range(place * size, (place + 1) * size) for end in ends[layer])

    return [
        [each for name, layer in order.items() for each in ([name] if layer is None else list_held(place, layer))]
        for place in range(degree)
    ]


def _shift(names: Sequence[str], counts: Mapping[str, int], degree: int, place: int) -> list[str]:
    """One rank's names in the first one's order, which is the same on every rank, as each counts its own from 0."""
    shifted = []
    for name in names:
        found = _EXPERT.match(name)
        if found is None:
            shifted.append(name)
        elif int(found[2]) < (size := counts[found[1]] // degree):
            shifted.append(f"{found[1]}{int(found[2]) + place * size}{name[found.end() :]}")
    return shifted
