"""How many experts the blocks of a checkpoint and of a model have, and what is said where these are not the same."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import fold_names
from ..experts import find_block, find_expert, find_place
from .settling import Shapes

_DOCUMENT = "docs/patterns.md"


class Fault(NamedTuple):
    """What keeps a parameter from being matched, or that a lenient load passes it over.

    Attributes:
        name: the parameter's, or what all names of several begin with.
        text: the words behind the name.
        kind: faults of one kind are told together.
    """

    name: str
    text: str
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.name}{self.text}"


SHAPE = "shape"
"""The kind of a parameter that has other sizes in the model."""


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """What there is of experts on both sides: their atoms' names, by what all names in their block begin with."""

    saved: Mapping[str, Sequence[str]]
    live: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, saved: Iterable[str], live: Iterable[str]) -> ExpertCounts:
        """By the names of both sides."""
        return cls(_list_blocks(saved), _list_blocks(live))

    @property
    def differing(self) -> dict[str, tuple[int, int]]:
        """Experts in the checkpoint and in the model, of blocks that both have, where they are not the same ones."""
        both = {block: (_list_numbers(self.saved[block]), _list_numbers(self.live[block])) for block in self._both}
        return {block: (len(have), len(want)) for block, (have, want) in both.items() if have != want}

    @property
    def _both(self) -> list[str]:
        return [block for block in self.live if block in self.saved]

    def take_routers(self, resized: MutableMapping[str, Fault], saved: Mapping[str, str], live: Shapes) -> list[Fault]:
        """Faults of what has a row for each expert, and other numbers of rows on the two sides.

        Args:
            resized: live names of other numbers of rows; what is taken is no longer in it.
            saved: live name → saved name.
            live: local shapes.
        """
        found = []
        for name in list(resized):
            block = next((each for each in self.live if name.startswith(each)), None)
            if block is not None and live[name][0][0] == len(_list_numbers(self.live[block])):
                rule = json.dumps({"from": re.escape(saved[name]), "to": None})
                text = f"{resized.pop(name).text}, a row for each expert: the rename rule {rule} leaves it out"
                found.append(Fault(name, text, SHAPE))
        return found

    def fold(self, faults: Sequence[Fault]) -> list[Fault]:
        """Faults of parameters; those of blocks with other experts as one."""
        differing = self.differing
        counts = fold_names([(block.rstrip("."), count) for block, count in differing.items()], lambda count: count)
        blocks = [
            Fault(block or "the model", f": {have} experts in the checkpoint, {want} in the model")
            for block, ((have, want), *_) in counts
        ]
        return [*blocks, *(fault for fault in faults if find_block(fault.name) not in differing)]

    def advise(self) -> str:
        """What to do where the experts of the two sides are not the same; empty where they are."""
        for block, (have, want) in self.differing.items():
            number = _choose(have, want)
            saved, live = rf"(?P<x>.*\.experts\.w[123])\.{{{number}}}", "{x}.{e}"
            if find_expert(self.saved[block][0]):
                saved, live = rf"(?P<x>.*\.deepspeed_experts)\.{{{number}}}\.(?P<rest>.*)", "{x}.{e}.{rest}"
            rule = json.dumps({"from": saved, "to": live})
            return (
                f" Which saved expert feeds which new one a rename rule tells, such as {rule}; a router is left out by "
                f"one as well ({_DOCUMENT})."
            )
        if self.saved.keys() != self.live.keys():
            return f" Rename rules tell which saved parameter feeds which expert ({_DOCUMENT})."
        return ""


def advise_fused(name: str, have: int, want: int) -> str:
    """What to do where a parameter that may hold experts, one behind the other, has another number of them."""
    rule = json.dumps({"from": rf"{re.escape(name)}\.{{{_choose(have, want)}}}", "to": f"{name}.{{e}}"})
    return f" (of experts the rename rule {rule} would tell which feeds which)"


def _choose(have: int, want: int) -> str:
    return f"e % {have}" if want > have else f"e * {have // max(want, 1)}"


def _list_blocks(names: Iterable[str]) -> dict[str, list[str]]:
    blocks: dict[str, list[str]] = defaultdict(list)
    for name in names:
        block = find_block(name)
        if block is not None:
            blocks[block].append(name)
    return blocks


def _list_numbers(names: Iterable[str]) -> set[int]:
    return {found[1] for name in names if (found := find_place(name))}
