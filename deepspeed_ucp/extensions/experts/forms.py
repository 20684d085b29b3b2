"""Experts in the live model's form: transformers 5 has two parameters for a layer's experts, AutoEP three for each.

``X.experts.gate_up_proj`` [experts, 2 × inner, hidden] has the rows of ``X.experts.w1.N`` and ``w3.N`` of each expert,
``X.experts.down_proj`` [experts, hidden, inner] those of ``w2.N``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

from ...model import AtomicIndex, GroupInfo
from ...model.view import Shapes
from ...plan.derive import DerivedParam, Slice, derive
from ...plan.settling import list_shapes
from .names import read_name

_FUSED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
"""Parameters of transformers, and the parts of each AutoEP expert in them, in order."""

_ROUTER = {"gate.weight": "router.gate.weight", "gate.e_score_correction_bias": "router.e_score_correction_bias"}
"""Names in a layer's block in transformers, and in AutoEP."""


def adapt_experts(index: AtomicIndex, live: Shapes) -> AtomicIndex:
    """Return the index with a layer's experts in the live model's form, if the checkpoint has the other one.

    A layer with another number of experts, or one that tensor parallelism cuts, is unchanged, and a load refuses it.
    """
    saved = {name: shapes[0] for name, shapes in list_shapes(index).items() if len(shapes) == 1}
    have, want = _count_experts(saved), _count_experts(live)
    made = dict[str, DerivedParam]()
    for layer, experts in want.items():
        if layer not in have:
            made.update(_split(layer, experts, saved))
    for layer, experts in have.items():
        if layer not in want:
            made.update(_fuse(layer, experts, live))
    if not made:
        return index
    for block in {name.partition(".experts.")[0] for name in made}:
        for pair in ((f"{block}.{name}" for name in names) for names in _ROUTER.items()):
            for old, new in permutations(pair):
                if old in saved and old not in live and new in live:
                    made[new] = DerivedParam.whole(old, saved[old])
    return _unite_groups(derive(index, made), made)


def _count_experts(names: Mapping[str, Any]) -> dict[str, int]:
    """Count the experts of each layer that has them as separate parameters."""
    numbers = defaultdict[str, set[int]](set)
    for expert in filter(None, map(read_name, names)):
        if expert.fused:
            numbers[expert.layer.removesuffix(".")].add(expert.number)
    return {layer: len(present) for layer, present in numbers.items() if present == set(range(len(present)))}


def _split(layer: str, experts: int, saved: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, DerivedParam]]:
    """Yield AutoEP's parameters of a layer that is fused."""
    for name, parts in _FUSED.items():
        if saved.get(f"{layer}.{name}", ())[:1] == (experts,):
            runs = experts * len(parts)
            for number in range(runs):
                expert, part = divmod(number, len(parts))
                piece = Slice(f"{layer}.{name}", number, runs)
                yield f"{layer}.{parts[part]}.{expert}", DerivedParam((piece,), 2)


def _fuse(layer: str, experts: int, live: Shapes) -> Iterator[tuple[str, DerivedParam]]:
    """Yield transformers' parameters of a layer whose experts are separate parameters."""
    for name, parts in _FUSED.items():
        if live.get(f"{layer}.{name}", ((),))[0][:1] == (experts,):
            slices = (Slice(f"{layer}.{part}.{number}") for number in range(experts) for part in parts)
            yield f"{layer}.{name}", DerivedParam(tuple(slices), 3, (experts,))


def _unite_groups(index: AtomicIndex, made: Mapping[str, DerivedParam]) -> AtomicIndex:
    """Move each group that has such experts only into another group with the same hyper-parameters, if there is one."""

    def is_made(group: GroupInfo) -> bool:
        return all(member.name in made for member in group.members)

    def list_hyper(group: GroupInfo) -> dict[str, Any]:
        return {key: value for key, value in group.hyper.items() if key != "name"}  # DeepSpeed names experts' groups

    groups: list[GroupInfo] = []
    for group in sorted(index.groups, key=is_made):
        at = next((at for at, known in enumerate(groups) if list_hyper(known) == list_hyper(group)), len(groups))
        if is_made(group) and at < len(groups):
            groups[at] = GroupInfo((*groups[at].members, *group.members), group.hyper)
        else:
            groups.append(group)
    return replace(index, groups=tuple(groups))
