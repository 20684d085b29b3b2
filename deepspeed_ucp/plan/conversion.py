"""Assignment of an atomic checkpoint's parts to workers (ATC'25, section 4.3).

This is the paper's nested parallel reconfiguration without its temporary files: atoms are cut into ranges of bounded
size, ranges are grouped into batches, batches are assigned to nodes by bytes, and a node's workers take them one by
one. The plan is a function of the sizes, and every rank computes the same one; the written bytes do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 1 << 20
"""Bytes; ranges of one file begin at multiples of it, to keep two workers from writing to one page."""

RANGE = 16 << 20
"""Bytes; the largest range, and the size to which small atoms are bundled."""

GRAIN = 40
"""Least batches per node, if the alignment allows: the last one is a small part of a node's share."""

MAX_RANGES = 256
"""Ranges per batch: bounds the small files that one batch keeps open."""


@dataclass(frozen=True, slots=True)
class Output:
    """An atom to write, and the place of its first byte in the source (for the order)."""

    numel: int
    itemsize: int
    place: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Elements [start, start + numel) of an output."""

    output: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Ranges that one worker reads together: one of a large atom, or small atoms."""

    ranges: tuple[Range, ...]
    nbytes: int


def plan_conversion(
    outputs: Sequence[Output], nodes: int, *, most: int = RANGE, whole: bool = False
) -> list[list[Batch]]:
    """Return the batches of each node, in the order in which its workers take them.

    Batches stay in the order of the source, and each node gets a run of them. It reads its part of the storage from
    front to back, and at most two nodes share a file that is not larger than a node's share.

    Args:
        most: bytes of a batch at most; at least ``ALIGNMENT``.
        whole: assign each output to one node: nodes share no folder.
    """
    most = min(most, max(sum(output.nbytes for output in outputs) // (nodes * GRAIN), ALIGNMENT))
    batches = cut_batches(outputs, most)
    assigned: list[list[Batch]] = [[] for _ in range(nodes)]
    homes: dict[int, int] = {}
    for batch, node in zip(batches, assign_runs([batch.nbytes for batch in batches], nodes), strict=True):
        home = homes.setdefault(batch.ranges[0].output, node) if whole else node
        assigned[home].append(batch)
    return assigned


def assign_runs(sizes: Sequence[int], nodes: int) -> list[int]:
    """Return the node of each part: runs of about equal bytes, in order."""
    total = sum(sizes)
    ends = zip(sizes, accumulate(sizes), strict=True)
    return [min((2 * end - size) * nodes // (2 * total), nodes - 1) if total else 0 for size, end in ends]


def cut_batches(outputs: Sequence[Output], most: int = RANGE) -> list[Batch]:
    """Cut the outputs into batches of at most ``most`` bytes, in source order."""
    step = max(most // ALIGNMENT, 1) * ALIGNMENT
    batches: list[Batch] = []
    bundle: list[Range] = []
    size = 0
    for number in sorted(range(len(outputs)), key=lambda number: (outputs[number].place, number)):
        output = outputs[number]
        if output.nbytes > step:
            width = step // output.itemsize
            for low in range(0, output.numel, width):
                numel = min(width, output.numel - low)
                batches.append(Batch((Range(number, low, numel),), numel * output.itemsize))
        else:
            if bundle and (size + output.nbytes > step or len(bundle) == MAX_RANGES):
                batches.append(Batch(tuple(bundle), size))
                bundle, size = [], 0
            bundle.append(Range(number, 0, output.numel))
            size += output.nbytes
    return [*batches, Batch(tuple(bundle), size)] if bundle else batches
