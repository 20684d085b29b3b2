"""How ZeRO lays parameters out in flat buffers and cuts these: one description for files and engines."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

Shape = tuple[int, ...]
Span = tuple[int, int]
"""First element, and behind the last."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements [start, start + numel) of a parameter lie at element ``offset`` of a partition."""

    name: str
    start: int
    numel: int
    offset: int


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """One flat buffer of a model-parallel rank, over all data-parallel ranks that hold it.

    It is a param group (ZeRO 1/2, BF16 and FP16 wrappers), a ZeRO-3 sub-group, or a single parameter (no wrapper).

    Attributes:
        group: index of the param group that it belongs to.
        names: parameters in flat order.
        shapes: their shapes, ZeRO's partitioning undone.
        offsets: element at which each begins, ascending: in the whole buffer, or in every partition (``by_parameter``).
        partition: elements of one partition, padding included.
        parts: number of partitions; 1 where every rank holds the whole.
        by_parameter: every parameter is cut into ``parts`` (ZeRO 3), instead of the buffer.
        ranks: ranks of its pipeline stage, ``dp_rank * tp + tp_rank``, that hold it, as with expert parallelism; None
            where all data-parallel ranks of its tensor-parallel rank do.
        tensors: by parameter the element at which it begins in the tensor that the engine has, which ZeRO 3 cuts as
            one, and that tensor's elements; empty where every parameter is such a tensor.
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
        """Elements of each parameter."""
        return tuple(map(prod, self.shapes))

    def cuts(self, part: int) -> list[Cut]:
        """What a partition holds, in its order; empty parameters and padding are not in it."""
        return list(self._cut_parameters(part) if self.by_parameter else self._cut_buffer(part))

    def gaps(self, part: int) -> list[Span]:
        """Padding of a partition: its elements that no parameter covers."""
        return find_gaps(((cut.offset, cut.offset + cut.numel) for cut in self.cuts(part)), self.partition)

    def keep(self, names: Iterable[str]) -> FlatBuffer:
        """The same buffer with some of its parameters alone, where they lie."""
        kept = set(names)
        places = [place for place, name in enumerate(self.names) if name in kept]
        return replace(
            self,
            names=tuple(self.names[place] for place in places),
            shapes=tuple(self.shapes[place] for place in places),
            offsets=tuple(self.offsets[place] for place in places),
            tensors=tuple(self.tensors[place] for place in places) if self.tensors else (),
        )

    def join_touched(self, part: int) -> FlatBuffer:
        """The tensors of which a partition holds some elements, whole, one behind the other on one rank."""
        held = {cut.name for cut in self.cuts(part)}
        starts = [
            offset - begin for offset, (begin, _) in zip(self.offsets, self.tensors or self._list_whole(), strict=True)
        ]
        touched = {start for name, start in zip(self.names, starts, strict=True) if name in held}
        sizes = zip(self.names, starts, self.numels, strict=True)
        kept = self.keep(name for name, start, numel in sizes if start in touched and numel)
        return join_parameters(self.group, kept.names, kept.shapes)

    def _list_whole(self) -> list[Span]:
        """``tensors`` of parameters that are each a tensor of its own."""
        return [(0, numel) for numel in self.numels]

    def split(self, parts: Mapping[str, Mapping[str, Shape]]) -> FlatBuffer:
        """The same buffer, its parameters under other names; one that holds several, one behind the other, as these.

        Args:
            parts: by parameter what is in it, in order.
        """
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
        tensors = self.tensors or self._list_whole()
        for name, numel, offset, (begin, whole) in zip(self.names, self.numels, self.offsets, tensors, strict=True):
            size = -(-whole // self.parts)  # as cut_parameter, which a call for each of thousands of ranks would slow
            low, high = max(part * size, begin), min((part + 1) * size, begin + numel)
            if low < high:
                yield Cut(name, low - begin, high - low, offset + low - part * size)

    def _cut_buffer(self, part: int) -> Iterator[Cut]:
        low, high = part * self.partition, (part + 1) * self.partition
        first = max(bisect_right(self.offsets, low) - 1, 0)
        for place in range(first, bisect_left(self.offsets, high)):
            offset = self.offsets[place]
            begin, end = max(offset, low), min(offset + prod(self.shapes[place]), high)
            if begin < end:
                yield Cut(self.names[place], begin - offset, end - begin, begin - low)

    def find_holders(self, place: int, low: int, high: int) -> Iterator[tuple[int, Cut]]:
        """(partition, what it has) of those that hold elements [low, high) of the parameter at ``place``."""
        begin, whole = self.tensors[place] if self.tensors else (0, prod(self.shapes[place]))
        size = reserve(whole, self.parts) if self.by_parameter else self.partition
        base, ahead = (begin, self.offsets[place]) if self.by_parameter else (self.offsets[place], 0)
        while low < high and size:
            part = (base + low) // size
            end = min((part + 1) * size - base, high)
            yield part, Cut(self.names[place], low, end - low, ahead + base + low - part * size)
            low = end

    @property
    def is_whole(self) -> bool:
        """Whether the partitions have room for all parameters."""
        return self.by_parameter or not self.names or self.end <= self.partition * self.parts

    @property
    def end(self) -> int:
        """Elements up to the end of the last parameter, where the buffer is cut as a whole."""
        return self.offsets[-1] + prod(self.shapes[-1])


def count_degree(buffers: Iterable[FlatBuffer]) -> int:
    """Expert-parallel degree: how many sets of ranks hold parts of a param group; of several degrees the largest."""
    holders = {(buffer.group, buffer.ranks) for buffer in buffers if buffer.ranks is not None}
    return max(Counter(group for group, _ in holders).values(), default=1)


def join_parameters(
    group: int, names: Sequence[str], shapes: Sequence[Shape], *, parts: int = 1, partition: int | None = None,
    gaps: Sequence[int] = (),
) -> FlatBuffer:  # fmt: skip
    """Parameters that follow each other in a flat buffer, which is cut into equal partitions (ZeRO 1/2, BF16, FP16).

    Args:
        partition: elements of one partition; None where the buffer has no padding and is not cut.
        gaps: elements of padding behind each parameter (``parameter_alignment``); empty where there is none.
    """
    sizes = list(map(prod, shapes))
    steps = [size + gap for size, gap in zip(sizes, gaps, strict=True)] if gaps else sizes
    offsets = tuple(accumulate(steps, initial=0))[:-1]
    size = sum(steps) if partition is None else partition
    return FlatBuffer(group, tuple(names), tuple(shapes), offsets, size, parts)


def join_reserved(group: int, names: Sequence[str], shapes: Sequence[Shape], parts: int) -> FlatBuffer:
    """A ZeRO-3 sub-group: of every parameter each partition has the same number of elements, padding included."""
    *offsets, partition = accumulate((reserve(prod(shape), parts) for shape in shapes), initial=0)
    return FlatBuffer(group, tuple(names), tuple(shapes), tuple(offsets), partition, parts, by_parameter=True)


def reserve(numel: int, parts: int) -> int:
    """ZeRO 3: elements of a parameter that each of ``parts`` partitions reserves, padding included."""
    return -(-numel // parts)


def cut_parameter(numel: int, part: int, parts: int) -> tuple[int, int]:
    """ZeRO 3: (start, elements) of a parameter that a partition holds; none where it holds padding only."""
    size = reserve(numel, parts)
    start = min(part * size, numel)
    return start, min(size, numel - start)


def find_gaps(spans: Iterable[Span], high: int, low: int = 0) -> list[Span]:
    """What ranges [low, high), in any order, leave free of [``low``, ``high``)."""
    gaps, position = [], low
    for begin, end in [*sorted(spans), (high, high)]:
        if begin > position:
            gaps.append((position, begin))
        position = max(position, end)
    return gaps
