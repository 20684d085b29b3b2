"""Mixture-of-experts in an index: forms and numbers of experts, degrees, and DeepSpeed's universal checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import MismatchError, UnsupportedError, fold_names
from ...formats.universal.upstream import CAT_DIM
from ...model import AtomicIndex
from ...model.flat import Shape
from ...plan.derive import can_fuse
from ...plan.faults import COUNT, Fault
from ...plan.match import Adaptation
from ..registry import NameExtension
from .forms import adapt_experts
from .names import find_block, find_expert, is_expert, read_name

IS_EXPERT = "is_expert_param"
EXPERTS = "ep_num_experts"


class IndexedExperts(NameExtension):
    """An index or a model with parameters that are named like experts."""

    def adapt(self, adaptation: Adaptation) -> None:
        """Put a layer's experts into the live model's form."""
        adaptation.index = adapt_experts(adaptation.index, adaptation.view.shapes)

    def fold_faults(
        self, saved: Iterable[str], live: Iterable[str], faults: Sequence[Fault]
    ) -> tuple[Sequence[Fault], str]:
        """Replace the faults of blocks with another number of experts by one each; return a remedy for these."""
        differing = _find_differing(saved, live)
        counts = fold_names([(block.rstrip("."), count) for block, count in differing.items()], lambda count: count)
        others = [
            Fault(block or "the model", f": {have} experts in the checkpoint, {want} in the model", COUNT)
            for block, ((have, want), *_) in counts
        ]
        faults = [*others, *(fault for fault in faults if find_block(fault.name) not in differing)]
        return faults, " Resume with the number of experts that was saved." if differing else ""

    def cuts_groups(self, names: Iterable[str]) -> bool:
        """Return True for experts, whose groups are cut by size (``max_group_size``), differently at every degree."""
        return all(map(is_expert, names))

    def check_degrees(self, index: AtomicIndex, degrees: Any) -> list[str]:
        """Check the degrees of a planned run as DeepSpeed's expert layers do; only a live engine knows their ranks."""
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
        """Return the number of experts in a parameter's file that holds all experts of a layer, else 0."""
        count = tree.get(EXPERTS)
        if not tree.get(IS_EXPERT):
            return 0
        if type(count) is not int or not can_fuse(shape, count):
            raise UnsupportedError(f"is of {count!r} experts and holds {shape}, which is not supported.", path=path)
        return count

    def make_upstream_keys(self, name: str, count: int) -> dict[str, Any]:
        """Return the entries by which upstream's loader cuts an expert-parallel rank's experts out of a parameter.

        Upstream numbers the experts of each rank's layers from 0, so at degrees above 1 it would load other ranks'
        experts. A count of 0 makes it refuse them there.
        """
        return {CAT_DIM: 0, IS_EXPERT: True, EXPERTS: count} if count or find_expert(name) else {}


def _find_differing(saved: Iterable[str], live: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the numbers of saved and live experts, for blocks that both sides have with different experts."""
    have, want = _list_numbers(saved), _list_numbers(live)
    return {block: (len(have[block]), len(want[block])) for block in want if have.get(block) not in (None, want[block])}


def _list_numbers(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of the experts in each block, by the common prefix of the block's names."""
    blocks: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if (block := find_block(name)) is not None and (read := read_name(name)):
            blocks[block].add(read.number)
    return blocks
