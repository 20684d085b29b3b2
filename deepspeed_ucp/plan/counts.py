"""How a model and a checkpoint differ, parameter by parameter, and what is said of other numbers of experts."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import gcd
from typing import NamedTuple

from ..errors import fold_names
from ..experts import find_block, find_expert, read_name
from .settling import Shapes

_DOCUMENT = "docs/patterns.md"

EXTRA, MISSING, SHAPE, COUNT = "extra", "missing", "shape", "count"
"""Kinds of faults: a name that the model lacks, or the checkpoint, another shape, another number of experts."""

_EXAMPLES = 3


class Fault(NamedTuple):
    """What keeps a parameter from being matched, or that a lenient load passes it over.

    Attributes:
        name: the parameter's, or what all names of several begin with.
        text: the words behind the name.
        kind: one of the four.
    """

    name: str
    text: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name}{self.text}"

    def add(self, text: str) -> Fault:
        """The same with more that is said."""
        return self._replace(text=self.text + text)


def list_faults(faults: Iterable[Fault]) -> str:
    """Of missing names, of extra ones and of all others some, and how many there are."""
    kinds: dict[str, list[Fault]] = defaultdict(list)
    for each in faults:
        kinds[each.kind if each.kind in (EXTRA, MISSING) else ""].append(each)
    return ", ".join(map(_list_some, kinds.values()))


def _list_some(faults: Sequence[Fault]) -> str:
    if len(faults) <= _EXAMPLES:
        return ", ".join(map(str, faults))
    folded = [f"{name}{texts[0]}" for name, texts in fold_names([each[:2] for each in faults], str)]
    return f"{', '.join(folded[:_EXAMPLES])}, … ({len(faults)} in all)"


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
        blocks = [block for block in self.live if block in self.saved]
        both = {block: (_list_numbers(self.saved[block]), _list_numbers(self.live[block])) for block in blocks}
        return {block: (len(have), len(want)) for block, (have, want) in both.items() if have != want}

    def take_routers(self, resized: MutableMapping[str, Fault], saved: Mapping[str, str], live: Shapes) -> list[Fault]:
        """Faults of what has a row for each expert, and other numbers of rows on the two sides.

        Args:
            resized: live names of other numbers of rows; what is taken is no longer in it.
            saved: live name → saved name.
            live: local shapes.
        """
        faults = []
        for name in list(resized):
            block = next((each for each in self.live if name.startswith(each)), None)
            if block is not None and live[name][0][0] == len(_list_numbers(self.live[block])):
                rule = json.dumps({"from": re.escape(saved[name]), "to": None})
                faults.append(resized.pop(name).add(f", a row for each expert: the rename rule {rule} leaves it out"))
        return faults

    def fold(self, faults: Sequence[Fault]) -> list[Fault]:
        """The same, with one for those of blocks with other experts."""
        differing = self.differing
        counts = fold_names([(block.rstrip("."), count) for block, count in differing.items()], lambda count: count)
        others = [
            Fault(block or "the model", f": {have} experts in the checkpoint, {want} in the model", COUNT)
            for block, ((have, want), *_) in counts
        ]
        return [*others, *(each for each in faults if find_block(each.name) not in differing)]

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


_NUMBER = re.compile(r"(?<=\.)\d{1,4}(?=\.)", re.ASCII)


def advise_layers(names: Iterable[str], saved: Container[str], live: Container[str]) -> str:
    """Which rule lets a checkpoint go on with another number of layers; empty where that is not what differs.

    Args:
        names: that one side lacks.
        saved, live: all names of both sides.
    """
    for name in names:
        for number in _NUMBER.finditer(name):
            begin, end = name[: number.start()], name[number.end() :]
            have, want = (next(each for each in count() if f"{begin}{each}{end}" not in side) for side in (saved, live))
            if 0 < min(have, want) <= int(number[0]) < max(have, want):
                shared = gcd(have, want)
                scaled = f"n{f' * {have // shared}' * (have > shared)}{f' // {want // shared}' * (want > shared)}"
                rule = {"from": rf"{re.escape(begin)}{{{scaled}}}\.(?P<x>.*)", "to": f"{begin}{{n}}.{{x}}"}
                return (
                    f" Which of the {have} saved layers feed which of the {want} new ones a rename rule tells, such as "
                    f"{json.dumps(rule)} ({_DOCUMENT})."
                )
    return ""


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
    return {read.number for name in names if (read := read_name(name))}
