"""Convert DeepSpeed's affine maps (``deepspeed/checkpoint/affine.py``, format 1) to layouts.

A map lists, per rank, blocks of the logical tensor with offsets and strides on both sides. AutoTP writes blocks of
whole rows and columns in row-major order, which are interval lists. Other maps are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..errors import MismatchError
from ..model import count
from ..model.flat import find_gaps
from .kinds import Partial, Pattern, Replicate, ShardH, ShardNC, ShardV
from .layout import Layout, Product, Shape, find_faults, make_strides, measure, whole

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Mapped(Pattern):
    """A layout given by an affine map; ``general`` is its pattern at other degrees, if it has one."""

    layout: Layout
    general: Pattern | None = None

    def _lay(self, shapes: Sequence[Shape]) -> Layout:
        if tuple(shapes) == self.layout.local_shapes:
            return self.layout
        if len(shapes) == 1 and count(shapes[0]) == count(self.layout.shape):
            return whole(shapes[0])
        return self._find_general(f"ranks that hold {list(shapes)}").join(shapes)

    def _spread(self, shape: Shape, degree: int) -> tuple[Shape, ...]:
        local = self.layout.local_shapes
        return local if len(local) == degree else self._find_general(f"{degree} ranks").spread(shape, degree)

    def _find_general(self, others: str) -> Pattern:
        if self.general is None:
            raise MismatchError(
                f"the affine map describes shards {list(self.layout.local_shapes)}; its layout has no counterpart for "
                f"{others}"
            )
        return self.general


def read_map(entry: Mapping[str, Any]) -> Mapped:
    """Convert a parameter's saved map (``ParamAffineMap.to_dict``).

    Raises:
        MismatchError: the map scales pieces, has pieces that are not row-major blocks, or does not cover each element.
    """
    shape = tuple(entry["logical_shape"])
    ranks = {int(rank): section for rank, section in entry["ranks"].items()}
    if sorted(ranks) != list(range(len(ranks))):
        raise MismatchError(f"the affine map describes ranks {sorted(ranks)}")
    local = tuple(tuple(ranks[rank]["shard_shape"]) for rank in range(len(ranks)))
    shards = tuple(_read_shard(ranks[rank]["pieces"], shape, local[rank]) for rank in range(len(ranks)))
    layout = _settle_overlap(Layout(shape, shape, shards, local))
    if faults := find_faults(layout):
        raise MismatchError(f"the affine map is not a tiling: {'; '.join(faults[:4])}")
    return Mapped(layout, generalise(layout))


def _read_shard(pieces: Sequence[Mapping[str, Any]], shape: Shape, local: Shape) -> Product:
    """Return one rank's interval lists; the pieces must be a grid of blocks in the same order on both sides."""
    blocks = [_read_block(piece, shape, local) for piece in pieces if count(tuple(piece["shape"]))]
    if not blocks:
        return tuple(((0, size),) if width else () for size, width in zip(shape, local, strict=True))
    axes = [sorted({block[axis] for block in blocks}) for axis in range(len(shape))]
    if count(tuple(map(len, axes))) != len(blocks) or len(set(blocks)) != len(blocks):
        raise MismatchError("the affine map's pieces are not a grid of blocks")
    for axis, spans in enumerate(axes):
        ends = [place + high - low for place, low, high in spans]
        if [place for place, _, _ in spans] != [0, *ends[:-1]] or ends[-1] != local[axis]:
            raise MismatchError(f"the affine map's pieces leave gaps in a shard along dimension {axis}")
    return tuple(tuple((low, high) for _, low, high in spans) for spans in axes)


def _read_block(piece: Mapping[str, Any], shape: Shape, local: Shape) -> tuple[tuple[int, int, int], ...]:
    """Return (local position, low, high) for each dimension."""
    scale = float(piece.get("scale", 1.0))
    if scale != 1.0:
        raise MismatchError(f"the affine map scales a piece by {scale}; scaled optimizer states cannot be loaded")
    sizes = tuple(piece["shape"])
    source, target = (_find_corner(piece[side], sizes, full) for side, full in (("source", shape), ("dest", local)))
    return tuple((to, low, low + size) for to, low, size in zip(target, source, sizes, strict=True))


def _find_corner(side: Sequence[Any], sizes: Shape, shape: Shape) -> Shape:
    """Return the coordinates of a block's first element in a tensor of ``shape``."""
    offset, strides = int(side[0]), tuple(side[1])
    expected = make_strides(shape)
    if len(sizes) != len(shape) or any(
        size > 1 and stride != step for size, stride, step in zip(sizes, strides, expected, strict=True)
    ):
        raise MismatchError(f"the affine map's pieces are not row-major blocks of {shape}")
    corner = []
    for step in expected:
        at, offset = divmod(offset, step) if step else (0, offset)
        corner.append(at)
    if offset or any(at + size > full for at, size, full in zip(corner, sizes, shape, strict=True)):
        raise MismatchError(f"the affine map's pieces reach beyond {shape}")
    return tuple(corner)


def _settle_overlap(layout: Layout) -> Layout:
    """Mark a tensor that all ranks have as replicated; else take each shared part of one axis from its lowest rank."""
    full = tuple(((0, size),) for size in layout.view)
    if len(layout.shards) > 1 and all(shard == full for shard in layout.shards):
        return replace(layout, replicated=True)
    axis = _find_cut_axis(layout)
    if axis is None:
        return layout
    taken: list[tuple[int, int]] = []
    claims = []
    for shard in layout.shards:
        mine = tuple(
            part
            for low, high in shard[axis]
            for part in find_gaps([(first, last) for first, last in taken if low < last and first < high], high, low)
        )
        claims.append((*shard[:axis], mine, *shard[axis + 1 :]))
        taken += mine
    return layout if tuple(claims) == layout.shards else replace(layout, claims=tuple(claims))


def _find_cut_axis(layout: Layout) -> int | None:
    """Return the axis along which the shards differ, or None if there are none or several."""
    cut = [axis for axis in range(len(layout.view)) if len({shard[axis] for shard in layout.shards}) > 1]
    return cut[0] if len(cut) == 1 else None


def generalise(layout: Layout) -> Pattern | None:
    """Return the pattern of a layout for any degree, or None."""
    if layout.replicated:
        return Partial() if layout.mean else Replicate()
    axis = _find_cut_axis(layout)
    if axis is None or layout.claims is not None or layout.view != layout.shape:
        return None
    pieces = [shard[axis] for shard in layout.shards]
    if _follows(interval for rank in pieces for interval in rank if interval[0] < interval[1]):
        return ShardV() if axis == 0 else ShardH(dim=axis)
    if len({len(rank) for rank in pieces}) != 1:
        return None
    parts = list(zip(*pieces, strict=True))
    if not _follows(interval for part in parts for interval in part):
        return None
    return ShardNC(parts=tuple(map(measure, parts)), dim=axis, sized=True)


def _follows(intervals: Iterable[tuple[int, int]]) -> bool:
    return all(end == start for (_, end), (start, _) in pairwise(intervals))
