"""Flat buffers of ZeRO and their partitions, for both files and engines."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

Shape = tuple[int, ...]
Span = tuple[int, int]
"""Half-open (first, end)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements [start, start + numel) of a parameter, at ``offset`` of a partition."""

    name: str
    start: int
    numel: int
    offset: int


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """One flat buffer of a model-parallel rank, over all of its data-parallel ranks.

    It is a param group (ZeRO 1/2, BF16 and FP16 wrappers), a ZeRO-3 sub-group, or a single parameter (no wrapper).

    Attributes:
        names: parameters in flat order.
        shapes: their unpartitioned shapes.
        offsets: first element of each, ascending, in the whole buffer or in every partition (``by_parameter``).
        partition: elements of one partition, including padding.
        parts: number of partitions; 1 if every rank has the whole buffer.
        by_parameter: every parameter is cut into ``parts`` (ZeRO 3), instead of the buffer.
        ranks: ranks of the pipeline stage (``dp_rank * tp + tp_rank``) with this buffer of distributed parameters; None
            for all data-parallel ranks of the tensor-parallel rank.
        tensors: for each parameter its first element in the engine's tensor, which ZeRO 3 cuts as a whole, and the
            number of elements of this tensor; empty if every parameter is a tensor of its own.
    """

    group: int
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    offsets: tuple[int, ...]
    partition: int
    parts: int = 1
    by_parameter: bool = False
    ranks: range | None = None
    tensors: tuple[tuple[int, int], ...] = ()

    @property
    def numels(self) -> tuple[int, ...]:
        return tuple(map(prod, self.shapes))

    def cuts(self, part: int) -> list[Cut]:
        """List the cuts in a partition in order, without empty parameters and padding."""
        return list(self._cut_parameters(part) if self.by_parameter else self._cut_buffer(part))

    def gaps(self, part: int) -> list[Span]:
        """List the padding of a partition."""
        return find_gaps(((cut.offset, cut.offset + cut.numel) for cut in self.cuts(part)), self.partition)

    def keep(self, names: Iterable[str]) -> FlatBuffer:
        """Return the buffer with a subset of its parameters at the same offsets."""
        kept = set(names)
        indices = [index for index, name in enumerate(self.names) if name in kept]
        return replace(
            self,
            names=tuple(self.names[index] for index in indices),
            shapes=tuple(self.shapes[index] for index in indices),
            offsets=tuple(self.offsets[index] for index in indices),
            tensors=tuple(self.tensors[index] for index in indices) if self.tensors else (),
        )

    def join_touched(self, part: int) -> FlatBuffer:
        """Return an uncut buffer of all tensors that a partition has elements of."""
        names = {cut.name for cut in self.cuts(part)}
        starts = [offset - begin for offset, (begin, _) in zip(self.offsets, self._list_tensors(), strict=True)]
        touched = {start for name, start in zip(self.names, starts, strict=True) if name in names}
        sizes = zip(self.names, starts, self.numels, strict=True)
        kept = self.keep(name for name, start, numel in sizes if start in touched and numel)
        return join_parameters(self.group, kept.names, kept.shapes)

    def _list_tensors(self) -> Sequence[tuple[int, int]]:
        return self.tensors or [(0, numel) for numel in self.numels]

    def split(self, parts: Mapping[str, Mapping[str, Shape]]) -> FlatBuffer:
        """Return the buffer with each parameter replaced by its consecutive ``parts``."""
        placed = []
        for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True):
            begin = 0
            for part, size in parts[name].items():
                placed.append((part, size, offset if self.by_parameter else offset + begin, (begin, prod(shape))))
                begin += prod(size)
        names, shapes, offsets, tensors = zip(*placed, strict=True) if placed else ((), (), (), ())
        tensors = tensors if len(names) > len(self.names) else ()
        return replace(self, names=names, shapes=shapes, offsets=offsets, tensors=tensors)

    def _cut_parameters(self, part: int) -> Iterator[Cut]:
        tensors = self._list_tensors()
        for name, numel, offset, (begin, whole) in zip(self.names, self.numels, self.offsets, tensors, strict=True):
            size = -(-whole // self.parts)  # inlined `cut_parameter`: this runs for each of thousands of ranks
            low, high = max(part * size, begin), min((part + 1) * size, begin + numel)
            if low < high:
                yield Cut(name, low - begin, high - low, offset + low - part * size)

    def _cut_buffer(self, part: int) -> Iterator[Cut]:
        low, high = part * self.partition, (part + 1) * self.partition
        first = max(bisect_right(self.offsets, low) - 1, 0)
        for index in range(first, bisect_left(self.offsets, high)):
            offset = self.offsets[index]
            begin, end = max(offset, low), min(offset + prod(self.shapes[index]), high)
            if begin < end:
                yield Cut(self.names[index], begin - offset, end - begin, begin - low)

    def find_holders(self, index: int, low: int, high: int) -> Iterator[tuple[int, Cut]]:
        """Yield (partition, cut) for elements [low, high) of parameter ``index``."""
        begin, whole = self.tensors[index] if self.tensors else (0, prod(self.shapes[index]))
        size = divide_padded(whole, self.parts) if self.by_parameter else self.partition
        base, ahead = (begin, self.offsets[index]) if self.by_parameter else (self.offsets[index], 0)
        while low < high and size:
            part = (base + low) // size
            end = min((part + 1) * size - base, high)
            yield part, Cut(self.names[index], low, end - low, ahead + base + low - part * size)
            low = end

    @property
    def is_whole(self) -> bool:
        """True if no parameter extends beyond the last partition."""
        if self.by_parameter or not self.names:
            return True
        return self.offsets[-1] + prod(self.shapes[-1]) <= self.partition * self.parts


def count_rank_sets(buffers: Iterable[FlatBuffer]) -> int:
    """Return the most sets of ranks that share a param group: the degree ``ep``."""
    holders = {(buffer.group, buffer.ranks) for buffer in buffers if buffer.ranks is not None}
    return max(Counter(group for group, _ in holders).values(), default=1)


def join_parameters(
    group: int, names: Sequence[str], shapes: Sequence[Shape], *, parts: int = 1, partition: int | None = None,
    gaps: Sequence[int] = (),
) -> FlatBuffer:  # fmt: skip
    """Make a flat buffer of consecutive parameters in equal partitions.

    Used by ZeRO 1 and 2, BF16 and FP16 optimizers.

    Args:
        partition: elements of one partition; None if the buffer has no padding and is not cut.
        gaps: elements of padding behind each parameter (``parameter_alignment``), or empty.
    """
    sizes = list(map(prod, shapes))
    steps = [size + gap for size, gap in zip(sizes, gaps, strict=True)] if gaps else sizes
    offsets = tuple(accumulate(steps, initial=0))[:-1]
    size = sum(steps) if partition is None else partition
    return FlatBuffer(group, tuple(names), tuple(shapes), offsets, size, parts)


def join_reserved(group: int, names: Sequence[str], shapes: Sequence[Shape], parts: int) -> FlatBuffer:
    """Make a ZeRO-3 sub-group: an equal, padded part of each parameter per partition."""
    *offsets, partition = accumulate((divide_padded(prod(shape), parts) for shape in shapes), initial=0)
    return FlatBuffer(group, tuple(names), tuple(shapes), tuple(offsets), partition, parts, by_parameter=True)


def divide_padded(numel: int, parts: int) -> int:
    """Return the equal size of ``parts`` of ``numel`` elements, including padding."""
    return -(-numel // parts)


def cut_parameter(numel: int, part: int, parts: int) -> tuple[int, int]:
    """Return (start, elements) of a parameter in a ZeRO-3 partition, without padding."""
    size = divide_padded(numel, parts)
    start = min(part * size, numel)
    return start, min(size, numel - start)


def find_gaps(spans: Iterable[Span], high: int, low: int = 0) -> list[Span]:
    """List the parts of [low, high) that no span covers; spans are in any order."""
    gaps, position = [], low
    for begin, end in [*sorted(spans), (high, high)]:
        if begin > position:
            gaps.append((position, begin))
        position = max(position, end)
    return gaps
