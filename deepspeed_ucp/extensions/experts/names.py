"""Names of expert parameters, and the distribution of experts over ranks.

Every rank numbers its experts of a layer from 0. Atoms have the expert's number in the whole layer, like the expert's
file. DeepSpeed's layers (``deepspeed/moe``) have a number in the names of their parameters. AutoEP's layers
(``module_inject/auto_ep_layer.py``) have several experts in one parameter ``…experts.w1``, whose part for expert 3 is
the atom ``…experts.w1.3``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ...model.flat import Shape

_EXPERT = re.compile(r"((?:^|.*\.)deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,9})(?=\.|$)", re.ASCII)

DATA_FIRST = "use_data_before_expert_parallelism"
"""Key of a ds_config: ranks with the same experts are consecutive."""

_PART = re.compile(r"((?:^|.*\.)experts\.)(w[123])\.(\d{1,9})", re.ASCII)

_LAYER = re.compile(r"(?:deepspeed_moe\.)?experts\.(?:deepspeed_experts\.)?$")


class ExpertName(NamedTuple):
    """Parts of the name of an expert's parameter in the whole model.

    Attributes:
        layer: common prefix of the layer's experts.
        number: number of the expert in the whole layer.
        end: name of the parameter in the expert.
        fused: a rank's experts are in one parameter (AutoEP).
    """

    layer: str
    number: int
    end: str
    fused: bool


def read_name(name: str) -> ExpertName | None:
    """Parse an atom's name; None if it is not an expert's."""
    if match := _EXPERT.match(name):
        return ExpertName(match[1], int(match[2]), name[match.end() :], fused=False)
    match = _PART.fullmatch(name)
    return ExpertName(match[1], int(match[3]), match[2], fused=True) if match else None


def find_expert(name: str) -> tuple[str, int] | None:
    """Return the layer and number of an expert of DeepSpeed's layers, or None."""
    return (match[1], int(match[2])) if (match := _EXPERT.match(name)) else None


def cut_number(name: str) -> tuple[str, str]:
    """Split an expert's name at its number; (name, "") for other parameters."""
    return (match[1], name[match.end() :]) if (match := _EXPERT.match(name)) else (name, "")


def count_experts(names: Iterable[str]) -> dict[str, int]:
    """Count the experts of each layer, which must be numbered from 0 without gaps."""
    counts: dict[str, int] = {}
    for name in names:
        if expert := find_expert(name):
            counts[expert[0]] = max(counts.get(expert[0], 0), expert[1] + 1)
    return counts


def find_block(name: str) -> str | None:
    """Return the prefix of all names in an expert's block, with its router's, or None.

    It is the same for a layer of DeepSpeed's and for an AutoEP layer that replaces it.
    """
    expert = read_name(name)
    return None if expert is None else _LAYER.sub("", expert.layer)


def is_expert(name: str) -> bool:
    """Return True for the atom name of an expert's parameter."""
    return read_name(name) is not None


def name_first_expert(name: str) -> str:
    """Return the name, or for an expert the name of its layer's first expert."""
    expert = read_name(name)
    if expert is None:
        return name
    return f"{expert.layer}{expert.end}.0" if expert.fused else f"{expert.layer}0{expert.end}"


def find_layer(name: str, layers: Collection[str]) -> str | None:
    """Return the layer of a rank's parameter, or None if it is not an expert's."""
    if not layers:
        return None
    match = _EXPERT.match(name)
    layer = match[1] if match else name[: name.rfind(".") + 1]
    return layer if layer in layers else None


def name_experts(name: str, shape: Shape, placement: Iterable[Sequence[int]]) -> list[dict[str, Shape]]:
    """Map a local parameter to whole-model names and shapes, once per rank.

    An expert's name gets its number in the whole layer. A fused parameter has a name for each expert.

    Args:
        placement: for each rank, the numbers of its experts in the whole layer, in the rank's order.
    """
    if match := _EXPERT.match(name):
        layer, local, end = match[1], int(match[2]), name[match.end() :]
        return [{f"{layer}{numbers[local]}{end}": shape} for numbers in placement]
    return [{f"{name}.{number}": shape[1:] for number in numbers} for numbers in placement]


def place_experts(dp: int, degree: int, tp: int = 1, tp_rank: int | None = None, *, data_first: bool) -> list[range]:
    """List a pipeline stage's ranks with the same experts, by expert-parallel rank.

    The order is that of ``deepspeed/utils/groups.py``.

    Args:
        degree: expert-parallel degree, a divisor of the number of ranks over which experts are distributed.
        tp_rank: tensor-parallel rank whose data-parallel ranks these are; None for all ranks of the stage.
        data_first: ``use_data_before_expert_parallelism``.
    """
    ranks = range(dp * tp) if tp_rank is None else range(tp_rank, dp * tp, tp)
    replicas = len(ranks) // degree
    if data_first:
        return [ranks[rank * replicas : (rank + 1) * replicas] for rank in range(degree)]
    return [ranks[rank::degree] for rank in range(degree)]


def assign_experts(names: Sequence[str], degree: int, live: int = 0, *, ordered: bool = True) -> list[list[str]]:
    """Return each expert-parallel rank's names of a param group in the rank's order.

    Args:
        names: all ranks' names in a live engine: the first rank's, then each other rank's experts.
        live: the live engine's degree, or 0 if unknown.
        ordered: the optimizer may have the module's order.

    Raises:
        ValueError: the degree does not fit, or the optimizer's order of experts differs from the module's, so that only
            the ranks of the live degree are known.
    """
    counts = count_experts(names)
    if not counts:
        return [list(names)] * degree
    if any(count % degree for count in counts.values()):
        raise ValueError(f"{degree} expert-parallel ranks do not fit {sorted(set(counts.values()))} experts")
    assigned = [_assign(names, counts, number) for number in range(1, max(counts.values()) + 1)]
    fitting = [len(ranks) for ranks in assigned if list(dict.fromkeys(chain(*ranks))) == list(names)]
    if fitting and (ordered or degree in fitting):
        return _assign(names, counts, degree)
    if degree != live:
        raise ValueError(
            f"the optimizer has the experts in another order than the module, and {live or 'an unknown number of'} "
            f"expert-parallel ranks, where the saved run had {degree}"
        )
    return [_shift_numbers(names, counts, degree, rank) for rank in range(degree)]


def _assign(names: Sequence[str], counts: Mapping[str, int], degree: int) -> list[list[str]]:
    """Distribute names over expert-parallel ranks in module order; [] if impossible.

    All experts of a layer are at the position of its first expert.
    """
    if any(count % degree for count in counts.values()):
        return []
    ends: dict[str, dict[str, None]] = {layer: {} for layer in counts}
    order: dict[str, str | None] = {}
    for name in names:
        match = _EXPERT.match(name)
        order.setdefault(match[1] if match else name, match and match[1])
        if match:
            ends[match[1]][name[match.end() :]] = None

    def list_experts(rank: int, layer: str) -> Iterable[str]:
        size = counts[layer] // degree
        return (f"{layer}{number}{end}" for number in range(rank * size, (rank + 1) * size) for end in ends[layer])

    return [
        [part for name, layer in order.items() for part in ([name] if layer is None else list_experts(rank, layer))]
        for rank in range(degree)
    ]


def _shift_numbers(names: Sequence[str], counts: Mapping[str, int], degree: int, rank: int) -> list[str]:
    """Return a rank's names: the first rank's, with the numbers of its own experts."""
    shifted = []
    for name in names:
        match = _EXPERT.match(name)
        if match is None:
            shifted.append(name)
        elif int(match[2]) < (size := counts[match[1]] // degree):
            shifted.append(f"{match[1]}{int(match[2]) + rank * size}{name[match.end() :]}")
    return shifted
