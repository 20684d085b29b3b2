"""Differences between a model and a checkpoint, by parameter; a different number of experts is one fault."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import fold_names
from ..model.experts import find_block, read_name

EXTRA, MISSING, SHAPE, COUNT = "extra", "missing", "shape", "count"
"""Kinds of faults: a name that the model lacks or the checkpoint lacks, another shape, another number of experts."""

_EXAMPLES = 3


class Fault(NamedTuple):
    """A difference that prevents a match, or that a lenient load ignores.

    Attributes:
        name: the parameter's, or the common prefix of several.
        text: follows the name in the message.
        kind: one of the four.
    """

    name: str
    text: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name}{self.text}"


def list_faults(faults: Iterable[Fault]) -> str:
    """List some missing names, some extra ones and some other faults, with their numbers."""
    kinds: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        kinds[fault.kind if fault.kind in (EXTRA, MISSING) else ""].append(fault)
    return ", ".join(map(_list_some, kinds.values()))


def _list_some(faults: Sequence[Fault]) -> str:
    if len(faults) <= _EXAMPLES:
        return ", ".join(map(str, faults))
    folded = [f"{name}{texts[0]}" for name, texts in fold_names([fault[:2] for fault in faults], str)]
    return f"{', '.join(folded[:_EXAMPLES])}, … ({len(faults)} in all)"


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Experts on both sides: their atoms' names, by the prefix of their block."""

    saved: Mapping[str, Sequence[str]]
    live: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, saved: Iterable[str], live: Iterable[str]) -> ExpertCounts:
        """Group the names of both sides."""
        return cls(_list_blocks(saved), _list_blocks(live))

    @property
    def differing(self) -> dict[str, tuple[int, int]]:
        """Numbers of saved and live experts, for blocks that both sides have with different experts."""
        blocks = [block for block in self.live if block in self.saved]
        both = {block: (_list_numbers(self.saved[block]), _list_numbers(self.live[block])) for block in blocks}
        return {block: (len(have), len(want)) for block, (have, want) in both.items() if have != want}

    def fold(self, faults: Sequence[Fault]) -> list[Fault]:
        """Replace the faults of blocks with other experts by one each."""
        differing = self.differing
        counts = fold_names([(block.rstrip("."), count) for block, count in differing.items()], lambda count: count)
        others = [
            Fault(block or "the model", f": {have} experts in the checkpoint, {want} in the model", COUNT)
            for block, ((have, want), *_) in counts
        ]
        return [*others, *(fault for fault in faults if find_block(fault.name) not in differing)]


def _list_blocks(names: Iterable[str]) -> dict[str, list[str]]:
    blocks: dict[str, list[str]] = defaultdict(list)
    for name in names:
        block = find_block(name)
        if block is not None:
            blocks[block].append(name)
    return blocks


def _list_numbers(names: Iterable[str]) -> set[int]:
    return {read.number for name in names if (read := read_name(name))}
