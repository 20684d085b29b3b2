"""Geometry of shards: how they tile a parameter, and the runs between two tilings.

A shard is a product of interval lists, one list per axis of a *view* of the parameter (the same elements in row-major
order, with an axis for every dimension that is cut). All patterns of Lian et al. (ATC'25, table 2) have this form:
Shard-V and Shard-H have one interval on one axis, Shard-Hy one on several axes, Shard-NC several on one axis.

The work is proportional to the number of intervals, not to the number of elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, pairwise, product
from math import prod

from ..errors import MismatchError
from ..model.storage import count, make_strides

Shape = tuple[int, ...]
Intervals = tuple[tuple[int, int], ...]
"""Half-open (low, high) intervals of a view axis, in the shard's order."""
Product = tuple[Intervals, ...]
"""One interval list per view axis: the elements of a shard."""
Span = tuple[int, int, int]
"""(source, target, length): positions in the two interval lists, and the number of positions."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Tiling of one parameter by its shards.

    Attributes:
        shape: the logical shape including this side's vocabulary padding.
        view: sizes of the view's axes; the same elements in row-major order.
        shards: for each rank and view axis the rank's intervals in local order.
        replicated: every shard is the whole tensor.
        mean: the logical value is the mean of the shards (Partial); they are replicated but may differ.
        claims: if shards overlap in parts (key/value blocks on every rank), the intervals to take from each rank, by
            axis; None takes all.
    """

    shape: Shape
    view: Shape
    shards: tuple[Product, ...]
    local_shapes: tuple[Shape, ...]
    replicated: bool = False
    mean: bool = False
    claims: tuple[Product, ...] | None = None

    @property
    def is_in_parts(self) -> bool:
        """True if a shard has several runs of rows, or blocks divide the rows."""
        return self.view != self.shape or any(len(rows) > 1 for shard in self.shards for rows in shard[:1])


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` runs of ``width`` elements.

    Run i is at ``src + i * src_step`` of the flattened source shard and at ``dst + i * dst_step`` of the flattened
    target shard. The steps of a single run are 0.
    """

    src: int
    dst: int
    width: int
    count: int = 1
    src_step: int = 0
    dst_step: int = 0

    @property
    def numel(self) -> int:
        return self.width * self.count

    @property
    def src_end(self) -> int:
        return self.src + (self.count - 1) * self.src_step + self.width


def whole(shape: Shape) -> Layout:
    """Return the layout of one shard without tensor parallelism."""
    return Layout(shape, shape, (tuple(((0, size),) for size in shape),), (shape,))


def stack(local_shapes: Sequence[Shape]) -> Layout:
    """Return the layout of concatenated flat shards, for unchanged shards.

    Its logical shape is unknown and not needed.
    """
    shards, low = [], 0
    for shape in local_shapes:
        high = low + count(shape)
        shards.append((((low, high),),))
        low = high
    return Layout((low,), (low,), tuple(shards), tuple(local_shapes))


def copy_runs(source: Layout, src_rank: int, target: Layout, dst_rank: int, low: int, high: int) -> tuple[Run, ...]:
    """Return the runs that copy a range of a target shard from a source shard.

    Args:
        source, target: layouts of the same parameter. One axis may be longer on one side (vocabulary padding, resized
            parameters); elements that one side lacks are omitted.
        src_rank: source shard; the caller chooses one if the source is replicated.
        low, high: range in the flattened target shard.

    Returns:
        As few runs as possible by ascending ``dst``; over all source ranks each element occurs once.

    Raises:
        MismatchError: the two views have no common refinement.
    """
    axes = list(zip(source.view, target.view, strict=False))
    if len(source.view) != len(target.view) or sum(src != dst for src, dst in axes) > 1:
        source, target = align(source, target)
    src_shard, dst_shard = source.shards[src_rank], target.shards[dst_rank]
    if src_shard == dst_shard and source.claims is None:
        high = min(high, _product_numel(dst_shard))
        return (Run(low, low, high - low),) if low < high else ()
    claim = None if source.claims is None else source.claims[src_rank]
    runs: list[Run] = []
    for box in _find_boxes(src_shard, dst_shard, claim):
        runs.extend(_clip_box(box, 0, 0, 0, low, high))
    return _merge(runs)


def restrict_source(run: Run, low: int, high: int) -> tuple[Run, ...]:
    """Clip a run to [low, high) of the flattened source shard: at most three runs."""
    clipped = _clip(run.src, run.dst, run.width, run.count, run.src_step, run.dst_step, low, high)
    return tuple(_make_run(src, dst, width, times, run.src_step, run.dst_step) for src, dst, width, times in clipped)


def find_faults(layout: Layout) -> list[str]:
    """Describe missing or repeated elements, and shapes that contradict intervals."""
    sides = enumerate(zip(layout.shards, layout.local_shapes, strict=True))
    faults = [f"rank {r}: {fault}" for r, side in sides for fault in _find_shard_faults(*side, layout.view)]
    return faults or _find_cover_faults(layout)


def _find_shard_faults(shard: Product, local: Shape, view: Shape) -> Iterator[str]:
    if _product_numel(shard) != count(local):
        yield f"intervals have {_product_numel(shard)} elements, local shape {local} has {count(local)}"
    for axis, (intervals, size) in enumerate(zip(shard, view, strict=True)):
        end = 0
        for low, high in sorted(intervals):
            if not 0 <= low <= high <= size:
                yield f"axis {axis}: [{low}, {high}) is not inside [0, {size})"
            elif low < end:
                yield f"axis {axis}: [{low}, {min(end, high)}) occurs twice"
            end = max(end, high)


def _find_cover_faults(layout: Layout) -> list[str]:
    if layout.replicated:
        full = tuple(((0, size),) for size in layout.view)
        return [f"rank {r} does not have the whole tensor" for r, shard in enumerate(layout.shards) if shard != full]
    parts = layout.shards if layout.claims is None else layout.claims
    faults = [
        f"ranks {first} and {second} have the same elements"
        for (first, part), (second, other) in combinations(enumerate(parts), 2)
        if all(any(overlap(*axes)) for axes in zip(part, other, strict=True))
    ]
    covered = sum(_product_numel(part) for part in parts)
    if not faults and covered != count(layout.view):
        faults.append(f"the shards have {covered} of {count(layout.view)} elements")
    return faults


def list_repeats(layout: Layout) -> Iterator[tuple[int, int, Layout]]:
    """Yield (rank that claims a part, another rank with it, the part as one shard).

    Replicated layouts have no claims and yield nothing.
    """
    claims = enumerate(layout.claims or ())
    for (rank, claim), (other, shard) in product(claims, enumerate(layout.shards)):
        part = tuple(tuple(overlap(*axes)) for axes in zip(claim, shard, strict=True))
        if rank != other and all(part):
            yield rank, other, Layout(layout.shape, layout.view, (part,), ((_product_numel(part),),))


def overlap(some: Intervals, others: Intervals) -> Iterator[tuple[int, int]]:
    """Yield the intersections of two interval lists."""
    for low, high in some:
        for first, last in others:
            if max(low, first) < min(high, last):
                yield max(low, first), min(high, last)


def measure(intervals: Intervals) -> int:
    """Return the total length of intervals."""
    return sum(high - low for low, high in intervals)


def _product_numel(shard: Product) -> int:
    return prod(map(measure, shard))


@dataclass(frozen=True, slots=True)
class _Box:
    """A block: its sizes, and its first element and strides in both shards."""

    src: int
    dst: int
    sizes: Shape
    src_strides: Shape
    dst_strides: Shape


@lru_cache(maxsize=1 << 14)
def _find_boxes(src_shard: Product, dst_shard: Product, claim: Product | None) -> tuple[_Box, ...]:
    """Return the common blocks of two shards by ascending first element in the target.

    Cached, because all layers of a model are cut in the same way.
    """
    axes = _collapse(
        [
            (_span_axis(source, target, None if claim is None else claim[axis]), measure(source), measure(target))
            for axis, (source, target) in enumerate(zip(src_shard, dst_shard, strict=True))
        ]
    )
    src_strides = make_strides([size for _, size, _ in axes])
    dst_strides = make_strides([size for _, _, size in axes])
    boxes = []
    for spans in product(*(spans for spans, _, _ in axes)):
        src = sum(span[0] * stride for span, stride in zip(spans, src_strides, strict=True))
        dst = sum(span[1] * stride for span, stride in zip(spans, dst_strides, strict=True))
        boxes.append(_Box(src, dst, tuple(span[2] for span in spans), src_strides, dst_strides))
    return tuple(sorted(boxes, key=lambda box: box.dst))


def _span_axis(src_intervals: Intervals, dst_intervals: Intervals, claim: Intervals | None) -> tuple[Span, ...]:
    """Intersect two interval lists of an axis, by ascending target position."""
    located = sorted(_locate(src_intervals))
    if claim is not None:
        located = [
            (start, end, source + start - low)
            for low, high, source in located
            for start, end in sorted(overlap(((low, high),), claim))
        ]
    spans = []
    index = 0
    for low, high, target in sorted(_locate(dst_intervals)):
        while index and located[index - 1][1] > low:
            index -= 1
        while index < len(located) and located[index][1] <= low:
            index += 1
        while index < len(located) and located[index][0] < high:
            first, last, source = located[index]
            start, end = max(low, first), min(high, last)
            spans.append((source + start - first, target + start - low, end - start))
            index += 1
    return _join_spans(sorted(spans, key=lambda span: span[1]))


def _locate(intervals: Intervals) -> Iterator[tuple[int, int, int]]:
    """Yield (low, high, local position of low) of non-empty intervals."""
    position = 0
    for low, high in intervals:
        if low < high:
            yield low, high, position
        position += high - low


def _join_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for span in spans:
        if joined:
            source, target, length = joined[-1]
            if source + length == span[0] and target + length == span[1]:
                joined[-1] = (source, target, length + span[2])
                continue
        joined.append(span)
    return tuple(joined)


def _collapse(axes: list[tuple[tuple[Span, ...], int, int]]) -> list[tuple[tuple[Span, ...], int, int]]:
    """Merge each axis that is whole in both shards into the next outer axis."""
    merged: list[tuple[tuple[Span, ...], int, int]] = []
    for spans, src_size, dst_size in axes:
        if merged and src_size == dst_size and spans == ((0, 0, src_size),):
            outer, outer_src, outer_dst = merged[-1]
            scaled = tuple((src * src_size, dst * src_size, size * src_size) for src, dst, size in outer)
            merged[-1] = (scaled, outer_src * src_size, outer_dst * src_size)
        else:
            merged.append((spans, src_size, dst_size))
    return merged


def _clip_box(box: _Box, axis: int, src: int, dst: int, low: int, high: int) -> Iterator[Run]:
    """Yield the runs of a box inside [low, high) of the target.

    ``src`` and ``dst`` are relative to the box; the axes before ``axis`` are fixed.
    """
    if not box.sizes:
        if low <= box.dst < high:
            yield Run(box.src, box.dst, 1)
        return
    if len(box.sizes) - axis > 2:
        stride, size = box.dst_strides[axis], box.sizes[axis]
        first, last = _meet_rows(box.dst + dst, size, stride, stride, low, high)
        for row in range(first, last):
            yield from _clip_box(box, axis + 1, src + row * box.src_strides[axis], dst + row * stride, low, high)
        return
    two = len(box.sizes) > 1
    times, src_step, dst_step = (box.sizes[-2], box.src_strides[-2], box.dst_strides[-2]) if two else (1, 0, 0)
    clipped = _clip(box.dst + dst, box.src + src, box.sizes[-1], times, dst_step, src_step, low, high)
    for to, start, width, rows in clipped:
        yield _make_run(start, to, width, rows, src_step, dst_step)


def _make_run(src: int, dst: int, width: int, times: int, src_step: int, dst_step: int) -> Run:
    return Run(src, dst, width, times, src_step, dst_step) if times > 1 else Run(src, dst, width)


def _meet_rows(base: int, rows: int, step: int, width: int, low: int, high: int) -> tuple[int, int]:
    """Return the range of rows [base + i * step, … + width) that meet [low, high)."""
    first = max(0, -(-(low - base - width + 1) // step))
    last = min(rows, -(-(high - base) // step))
    return first, max(first, last)


def _clip(
    near: int, far: int, width: int, times: int, near_step: int, far_step: int, low: int, high: int
) -> Iterator[tuple[int, int, int, int]]:
    """Clip ``times`` runs to [low, high) of their near side.

    Yields at most three (near, far, width, times): a partial first row, whole rows, and a partial last row.
    """
    first, last = _meet_rows(near, times, near_step or 1, width, low, high) if times > 1 else (0, 1)
    while first < last:
        start = near + first * near_step
        rows = last - first
        if start < low or start + width > high:
            rows = 1
        elif near + (last - 1) * near_step + width > high:
            rows -= 1
        begin, end = max(start, low), min(start + width, high)
        if begin < end:
            yield begin, far + first * far_step + begin - start, end - begin, rows
        first += rows


def _merge(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Sort runs by target, and join runs that are contiguous on both sides."""
    merged: list[Run] = []
    for run in sorted(runs, key=lambda run: run.dst):
        if run.count > 1 and run.src_step == run.dst_step == run.width:
            run = Run(run.src, run.dst, run.width * run.count)
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.count == run.count == 1
            and (last.src + last.width, last.dst + last.width) == (run.src, run.dst)
        ):
            merged[-1] = Run(last.src, last.dst, last.width + run.width)
        else:
            merged.append(run)
    return tuple(merged)


@lru_cache(maxsize=1 << 12)
def align(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Convert both layouts to the common refinement of their views.

    Only the length of axis 0 may differ.

    Raises:
        MismatchError: there is none, or a shard's intervals do not follow its axes.
    """
    steps = sorted({*_find_steps(source.view), *_find_steps(target.view)})
    if any(high % low for low, high in pairwise(steps)):
        raise MismatchError(f"views {source.view} and {target.view} of one parameter have no common refinement")
    return _refine(source, steps), _refine(target, steps)


def _find_steps(view: Shape) -> set[int]:
    """Return the strides of axes that are longer than one."""
    strides = make_strides(view)
    return {stride for axis, (stride, size) in enumerate(zip(strides, view, strict=True)) if size > 1 or axis == 0}


def _refine(layout: Layout, steps: Sequence[int]) -> Layout:
    """Convert a layout to the view whose axes have the strides ``steps``."""
    view: list[int] = []
    splits: list[tuple[int, list[int]]] = []
    strides = make_strides(layout.view)
    for axis, (size, stride) in enumerate(zip(layout.view, strides, strict=True)):
        if axis and size == 1:
            continue
        inner = [step // stride for step in steps if stride <= step and (axis == 0 or step < stride * size)]
        sizes = [high // low for low, high in pairwise([*inner, size])]
        if count(tuple(sizes)) != size:
            raise MismatchError(f"axis {axis} of view {layout.view} does not split into blocks of {sizes[:-1]}")
        view += reversed(sizes)
        splits.append((axis, sizes))
    claims = layout.claims
    return replace(
        layout,
        view=tuple(view),
        shards=tuple(_refine_shard(shard, splits) for shard in layout.shards),
        claims=None if claims is None else tuple(_refine_shard(shard, splits) for shard in claims),
    )


def _refine_shard(shard: Product, splits: Sequence[tuple[int, Sequence[int]]]) -> Product:
    refined = [intervals for axis, sizes in splits for intervals in _split_axis(shard[axis], sizes)]
    # The refined view omits axes of length 1; a shard with an empty interval list there is empty.
    return tuple(refined) if _product_numel(shard) else ((),) * len(refined)


def _split_axis(intervals: Intervals, sizes: Sequence[int]) -> list[Intervals]:
    """Split an axis's intervals over its refined axes, given innermost first."""
    axes: list[Intervals] = []
    intervals = tuple((low, high) for low, high in intervals if low < high)
    for size in sizes[:-1]:
        if all(low % size == 0 and high % size == 0 for low, high in intervals):
            axes.append(((0, size),))
            intervals = tuple((low // size, high // size) for low, high in intervals)
        elif len(intervals) == 1 and intervals[0][0] // size == (intervals[0][1] - 1) // size:
            low, high = intervals[0]
            axes.append(((low % size, low % size + high - low),))
            intervals = ((low // size, low // size + 1),)
        else:
            raise MismatchError(f"intervals {intervals} do not follow blocks of {size}")
    axes.append(intervals)
    return axes[::-1]
