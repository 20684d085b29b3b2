"""Experts in an index: forms, numbers, degrees, and DeepSpeed's universal format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from ...errors import MismatchError, UnsupportedError, fold_names
from ...formats.universal.upstream import CAT_DIM
from ...model.flat import Shape
from ...model.index import AtomicIndex, GroupInfo
from ...model.view import Shapes
from ...plan.derive import DerivedParam, Slice, can_fuse, derive
from ...plan.match import COUNT, Adaptation, Fault
from ...plan.settling import list_names, list_shapes
from ..registry import Extension
from .names import find_block, find_expert, is_expert, read_name

IS_EXPERT = "is_expert_param"
EXPERTS = "ep_num_experts"

_FUSED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
"""Parameters of transformers, and the parts of each AutoEP expert in them, in order."""

_ROUTER = {"gate.weight": "router.gate.weight", "gate.e_score_correction_bias": "router.e_score_correction_bias"}
"""Names in a layer's block in transformers, and in AutoEP."""


class IndexedExperts(Extension):
    """An index or a model with parameters that are named like experts."""

    def adapt(self, adaptation: Adaptation) -> None:
        """Put a layer's experts into the live model's form."""
        live = adaptation.view.shapes
        if not live.keys() <= list_names(adaptation.index):
            adaptation.index = _convert(adaptation.index, live)

    def fold_faults(
        self, saved: Iterable[str], live: Iterable[str], faults: Sequence[Fault]
    ) -> tuple[Sequence[Fault], str]:
        """Merge faults of each block whose number of experts differs; return a remedy."""
        saved_numbers, live_numbers = _list_numbers(saved), _list_numbers(live)
        differing = {
            block: (len(saved_numbers[block]), len(numbers))
            for block, numbers in live_numbers.items()
            if saved_numbers.get(block) not in (None, numbers)
        }
        counts = fold_names([(block.rstrip("."), count) for block, count in differing.items()], lambda count: count)
        block_faults = [
            Fault(block or "the model", f": {saved_count} experts in the checkpoint, {live_count} in the model", COUNT)
            for block, ((saved_count, live_count), *_) in counts
        ]
        faults = [*block_faults, *(fault for fault in faults if find_block(fault.name) not in differing)]
        return faults, " Resume with the number of experts that was saved." if differing else ""

    def cuts_groups(self, names: Iterable[str]) -> bool:
        """Return True for groups of experts, which DeepSpeed cuts by ``max_group_size``."""
        return all(map(is_expert, names))

    def check_degrees(self, index: AtomicIndex, degrees: Any) -> list[str]:
        names, ep = [read for key in index.atoms if (read := read_name(key.name))], degrees.ep
        layers = {read.layer: read.number + 1 for read in sorted(names)}  # the highest number of a layer is the last
        if ep > 1 and not names:
            raise MismatchError(f"The checkpoint has no experts that ep={ep} could distribute.")
        if degrees.zero > 2 and not all(read.fused for read in names):
            raise MismatchError("DeepSpeed's own experts can be resumed under ZeRO 0, 1 and 2 only.")
        if wrong := [layer.rstrip(".") for layer, number in layers.items() if degrees.shards % ep or number % ep]:
            raise MismatchError(
                f"ep={ep} must divide the data-parallel ranks and the experts of each layer ({wrong[0]})."
            )
        return ["experts, whose ranks are known only to a load"] if names else []

    # -- DeepSpeed's universal checkpoints

    def count_fused(self, tree: Mapping[Any, Any], shape: Shape, path: str) -> int:
        count = tree.get(EXPERTS)
        if not tree.get(IS_EXPERT):
            return 0
        if type(count) is not int or not can_fuse(shape, count):
            raise UnsupportedError(f"is of {count!r} experts and holds {shape}, which is not supported.", path=path)
        return count

    def make_upstream_keys(self, name: str, count: int) -> dict[str, Any]:
        """Return the entries by which upstream's loader cuts experts out of a parameter.

        Upstream numbers the experts of each rank's layers from 0, so at degrees above 1 it would load other ranks'
        experts. A count of 0 makes it refuse them there.
        """
        return {CAT_DIM: 0, IS_EXPERT: True, EXPERTS: count} if count or find_expert(name) else {}


def _list_numbers(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of the experts in each block, by the prefix of its names."""
    blocks: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if (block := find_block(name)) is not None and (read := read_name(name)):
            blocks[block].add(read.number)
    return blocks


# -- the live model's form: transformers 5 has two parameters for a layer's experts, AutoEP three for each
#
# X.experts.gate_up_proj [experts, 2 × inner, hidden] has the rows of X.experts.w1.N and w3.N of each expert,
# X.experts.down_proj [experts, hidden, inner] those of w2.N.


def _convert(index: AtomicIndex, live: Shapes) -> AtomicIndex:
    """Convert experts to the live model's form if the checkpoint has the other form.

    A layer with another number of experts, or one that tensor parallelism cuts, is unchanged, and a load refuses it.
    """
    saved = {name: shapes[0] for name, shapes in list_shapes(index).items() if len(shapes) == 1}
    saved_counts, live_counts = _count_experts(saved), _count_experts(live)
    derived = dict[str, DerivedParam]()
    for layer, experts in live_counts.items():
        if layer not in saved_counts:
            derived.update(_split(layer, experts, saved))
    for layer, experts in saved_counts.items():
        if layer not in live_counts:
            derived.update(_fuse(layer, experts, live))
    if not derived:
        return index
    for block in {name.partition(".experts.")[0] for name in derived}:
        for pair in ((f"{block}.{name}" for name in names) for names in _ROUTER.items()):
            for old, new in permutations(pair):
                if old in saved and old not in live and new in live:
                    derived[new] = DerivedParam.whole(old, saved[old])
    return _unite_groups(derive(index, derived), derived)


def _count_experts(names: Mapping[str, Any]) -> dict[str, int]:
    """Count the experts of each layer that has them as separate parameters."""
    numbers = defaultdict[str, set[int]](set)
    for expert in filter(None, map(read_name, names)):
        if expert.fused:
            numbers[expert.layer.removesuffix(".")].add(expert.number)
    return {layer: len(present) for layer, present in numbers.items() if present == set(range(len(present)))}


def _split(layer: str, experts: int, saved: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, DerivedParam]]:
    """Yield AutoEP's parameters as parts of transformers' saved ones of a layer."""
    for name, parts in _FUSED.items():
        if saved.get(f"{layer}.{name}", ())[:1] == (experts,):
            runs = experts * len(parts)
            for number in range(runs):
                expert, part = divmod(number, len(parts))
                piece = Slice(f"{layer}.{name}", number, runs)
                yield f"{layer}.{parts[part]}.{expert}", DerivedParam((piece,), 2)


def _fuse(layer: str, experts: int, live: Shapes) -> Iterator[tuple[str, DerivedParam]]:
    """Yield transformers' parameters of a layer, joined from AutoEP's saved ones."""
    for name, parts in _FUSED.items():
        if live.get(f"{layer}.{name}", ((),))[0][:1] == (experts,):
            slices = (Slice(f"{layer}.{part}.{number}") for number in range(experts) for part in parts)
            yield f"{layer}.{name}", DerivedParam(tuple(slices), 3, (experts,))


def _unite_groups(index: AtomicIndex, converted: Mapping[str, DerivedParam]) -> AtomicIndex:
    """Join groups of converted experts to other groups with equal hyper-parameters."""

    def is_converted(group: GroupInfo) -> bool:
        return all(member.name in converted for member in group.members)

    def list_hyper(group: GroupInfo) -> dict[str, Any]:
        return {key: value for key, value in group.hyper.items() if key != "name"}  # DeepSpeed names experts' groups

    groups: list[GroupInfo] = []
    for group in sorted(index.groups, key=is_converted):
        at = next((at for at, known in enumerate(groups) if list_hyper(known) == list_hyper(group)), len(groups))
        if is_converted(group) and at < len(groups):
            groups[at] = GroupInfo((*groups[at].members, *group.members), group.hyper)
        else:
            groups.append(group)
    return replace(index, groups=tuple(groups))
