"""Differences between a model and a checkpoint, by parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import fold_names

EXTRA, MISSING, SHAPE, COUNT = "extra", "missing", "shape", "count"
"""Kinds of faults: a name that the model lacks or the checkpoint lacks, another shape, another number of parameters."""

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
