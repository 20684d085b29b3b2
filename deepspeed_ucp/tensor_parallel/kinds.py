"""Patterns: how shards make up a logical tensor (Lian et al., ATC'25, table 2).

A pattern is independent of ranks and degrees, which follow from the shards' shapes, even or not. ``join`` makes the
layout of given shards.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from math import gcd
from typing import ClassVar

from ..errors import MismatchError, pluralize
from ..model.storage import count
from .layout import Intervals, Layout, Shape, stack, whole

TABLE = re.compile(r"embed|vocab|wte|lm_head|output_layer|final_linear|embd", re.IGNORECASE)
"""Names of parameters with one row per token."""

FUSED_QKV = re.compile(r"query_key_value|qkv|c_attn|in_proj|attn\.W?pack|key_value|(^|\.)kv(_proj)?\.", re.IGNORECASE)
"""Names of fused attention projections. Per-rank [q; k; v] and interleaving per head group have the same shapes."""

VOCABULARY_HINT = 'if that is a vocabulary\'s padding, give a rule with "vocab": true, and original_vocab_size'


def advise_vocabulary(names: Iterable[str]) -> str:
    """Suggest a rule for vocabulary padding; empty if no name is an embedding's."""
    match = "|".join(re.escape(name) for name in names if TABLE.search(name))
    if not match:
        return ""
    rule = json.dumps({"match": match, "pattern": "shard-v", "vocab": True})
    hint = f"{VOCABULARY_HINT[:1].upper()}{VOCABULARY_HINT[1:]}"
    return f' {hint}: "patterns": {{"original_vocab_size": <rows in use>, "rules": [{rule}]}}.'


@dataclass(frozen=True, slots=True)
class Pattern(ABC):
    """How one parameter is cut.

    Attributes:
        vocab: rows without padding if dimension 0 is a padded vocabulary, whose padding may differ between two sides;
            None if there is no padding.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    vocab: int | None = field(default=None, kw_only=True)

    def join(self, local_shapes: Sequence[Shape]) -> Layout:
        """Make the layout of shards with these shapes, one per rank.

        Raises:
            MismatchError: the shapes contradict the pattern.
        """
        if not local_shapes:
            raise MismatchError("there are no shards")
        layout = self._lay([tuple(shape) for shape in local_shapes])
        if self.vocab is not None and (not layout.shape or layout.shape[0] < self.vocab):
            raise MismatchError(
                f"shape {layout.shape} has fewer rows than the vocabulary, original_vocab_size {self.vocab}"
            )
        return layout

    def is_in_parts(self, shapes: Sequence[Shape]) -> bool:
        """Return True if a shard has several runs of rows, so that none can be appended."""
        return self.join(shapes).is_in_parts

    def spread(self, shape: Shape, degree: int, pad: int | None = None) -> tuple[Shape, ...]:
        """Return the local shapes at a degree, for a target without a live model.

        Args:
            shape: logical shape including vocabulary padding.
            pad: pad a vocabulary to a multiple of this times the degree (Megatron's
                ``make_vocab_size_divisible_by``); None pads to a multiple of the degree.

        Raises:
            MismatchError: the parameter cannot be cut into equal parts for this degree.
        """
        if self.vocab is not None and shape:
            step = degree if pad is None else pad * degree
            rows = -(-(shape[0] if pad is None else self.vocab) // step) * step
            shape = (rows, *shape[1:])
        return (shape,) if degree == 1 else self._spread(shape, degree)

    @abstractmethod
    def _lay(self, shapes: Sequence[Shape]) -> Layout:
        """Make the layout, as :meth:`join` does, without a check of the vocabulary."""

    def _spread(self, shape: Shape, degree: int) -> tuple[Shape, ...]:
        """Return equal parts along the first dimension whose cut :meth:`join` accepts."""
        for dim, size in enumerate(shape):
            if size % degree == 0:
                local = (_resize(shape, dim, size // degree),) * degree
                with suppress(MismatchError):
                    check_shapes(shape, self.join(local).shape, self.vocab)
                    return local
        raise MismatchError(f"{type(self).__name__.lower()}: shape {shape} has no {degree} equal parts")


SIDES = ("the checkpoint", "the model")
"""Names of source and target in messages."""


def check_shapes(source: Shape, target: Shape, vocab: int | None, sides: tuple[str, str] = SIDES) -> None:
    """Compare the logical shapes of both sides, except a vocabulary's padding.

    Raises:
        MismatchError: the shapes differ; if it can be padding, the message names the setting.
    """
    is_padding = len(source) == len(target) > 0 and source[1:] == target[1:]
    if source == target or (is_padding and vocab is not None):
        return
    advice = ": another model, or the wrong pattern"
    if is_padding:
        advice = f"; {VOCABULARY_HINT}. If neither is right, the pattern is not this parameter's"
    raise MismatchError(f"logical shape {source} in {sides[0]}, {target} in {sides[1]}{advice}")


@dataclass(frozen=True, slots=True)
class Unique(Pattern):
    """One rank has the whole tensor."""

    def _lay(self, shapes: Sequence[Shape]) -> Layout:
        if len(shapes) != 1:
            raise MismatchError(f"unique, but {len(shapes)} tensor-parallel ranks hold it")
        return whole(shapes[0])


@dataclass(frozen=True, slots=True)
class Replicate(Pattern):
    """Every rank has the whole tensor with the same values."""

    def _lay(self, shapes: Sequence[Shape]) -> Layout:
        if len(set(shapes)) != 1:
            raise MismatchError(f"replicated, but the ranks' shapes differ: {list(shapes)}")
        full = whole(shapes[0])
        if len(shapes) == 1:
            return full
        return replace(full, shards=full.shards * len(shapes), local_shapes=tuple(shapes), replicated=True)

    def _spread(self, shape: Shape, degree: int) -> tuple[Shape, ...]:
        return (shape,) * degree


@dataclass(frozen=True, slots=True)
class Partial(Replicate):
    """Every rank has the whole tensor; the logical value is the mean of their values."""

    def _lay(self, shapes: Sequence[Shape]) -> Layout:
        layout = super(Partial, self)._lay(shapes)
        return replace(layout, mean=layout.replicated)


@dataclass(frozen=True, slots=True)
class ShardH(Pattern):
    """Each rank has one block along ``dim``, in rank order.

    Every rank's width is a multiple of ``unit`` (rows of a head group that must stay together).
    """

    dim: int = 1
    unit: int = 1

    def _lay(self, shapes: Sequence[Shape]) -> Layout:
        dim = _find_dim(self.dim, shapes)
        widths = [shape[dim] for shape in shapes]
        _check_unit(widths, self.unit, dim)
        shape = _resize(shapes[0], dim, sum(widths))
        return _lay_axis(shape, shape, dim, [(part,) for part in _chain(widths)], shapes)

    def _spread(self, shape: Shape, degree: int) -> tuple[Shape, ...]:
        return _spread_dim(shape, self.dim, degree)


@dataclass(frozen=True, slots=True)
class ShardV(ShardH):
    """Each rank has one block along dimension 0."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class ShardHy(Pattern):
    """Ranks form a row-major grid with ``grid[d]`` ranks along dimension d."""

    grid: tuple[int, ...]

    def _lay(self, shapes: Sequence[Shape]) -> Layout:
        grid = self._fit(len(shapes), len(shapes[0]))
        if len({len(shape) for shape in shapes}) != 1:
            raise MismatchError(f"the ranks' shapes have different numbers of dimensions: {list(shapes)}")
        places = list(product(*map(range, grid)))
        parts = [self._measure(dim, grid, places, shapes) for dim in range(len(grid))]
        shards = tuple(tuple((parts[dim][at],) for dim, at in enumerate(place)) for place in places)
        shape = tuple(part[-1][1] for part in parts)
        return Layout(shape, shape, shards, tuple(shapes))

    def _fit(self, ranks: int, dims: int) -> tuple[int, ...]:
        if ranks == 1:
            return (1,) * dims
        if len(self.grid) > dims or count(self.grid) != ranks:
            raise MismatchError(f"grid {list(self.grid)} does not fit {ranks} ranks and {dims} dimensions")
        return self.grid + (1,) * (dims - len(self.grid))

    def _spread(self, shape: Shape, degree: int) -> tuple[Shape, ...]:
        cuts = enumerate(zip(shape, self._fit(degree, len(shape)), strict=True))
        return (tuple(_divide(size, ranks, dim, f"{ranks} equal parts") for dim, (size, ranks) in cuts),) * degree

    @staticmethod
    def _measure(dim: int, grid: Shape, places: Sequence[Shape], shapes: Sequence[Shape]) -> list[tuple[int, int]]:
        widths = []
        for at in range(grid[dim]):
            sizes = {shape[dim] for place, shape in zip(places, shapes, strict=True) if place[dim] == at}
            if len(sizes) != 1:
                raise MismatchError(f"ranks at index {at} of the grid's dimension {dim} differ there: {sorted(sizes)}")
            widths.append(sizes.pop())
        return _chain(widths)


@dataclass(frozen=True, slots=True)
class ShardNC(Pattern):
    """Each rank has a share of every part; ``dim`` has ``blocks`` blocks of parts.

    Examples: [q; k; v] with unequal parts, of which each rank has [q_r; k_r; v_r]: ``parts=(q, k, v)``. Fused gate/up:
    two equal parts. Fused experts [experts * out, in] cut along out: ``blocks=experts``.

    Attributes:
        blocks: number of equal blocks along ``dim``, each cut in the same way.
        parts: sizes of a block's parts, or their proportions; sizes must add up to a block.
        sized: ``parts`` are sizes.
        unit: each rank's width of each part is a multiple of this (the head's size).
        widths: width of each part on each rank if it does not follow from the shapes (uneven parts with different
            proportions); for the side with that many ranks and these widths.
    """

    parts: tuple[int, ...] = (1,)
    dim: int = 0
    blocks: int = 1
    sized: bool = False
    unit: int = 1
    widths: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        """Raise MismatchError if the widths are of other parts, or of several degrees."""
        if self.widths is None:
            return
        sums, weight = [sum(part) for part in self.widths], sum(self.parts)
        total = weight if self.sized else sum(sums)
        is_complete = len(sums) == len(self.parts) and len({len(part) for part in self.widths}) == 1
        if not is_complete or [size * weight for size in sums] != [part * total for part in self.parts]:
            raise MismatchError(
                f"widths {[list(part) for part in self.widths]} are not those of parts {list(self.parts)}: each part "
                "needs its width on every rank, and these sum to its size"
            )

    def _lay(self, shapes: Sequence[Shape]) -> Layout:
        dim = _find_dim(self.dim, shapes)
        locals_ = [_divide(shape[dim], self.blocks, dim, f"{self.blocks} blocks") for shape in shapes]
        widths = self._measure(locals_, dim)
        for rank_widths in zip(*widths, strict=True):
            _check_unit(rank_widths, self.unit, dim)
        block, pieces = sum(locals_), [list[tuple[int, int]]() for _ in shapes]
        start = 0
        for part in widths:
            for rank, (low, high) in enumerate(_chain(part)):
                pieces[rank].append((start + low, start + high))
            start += sum(part)
        shape = _resize(shapes[0], dim, block * self.blocks)
        if self.blocks == 1:
            return _lay_axis(shape, shape, dim, pieces, shapes)
        view = (*shape[:dim], self.blocks, block, *shape[dim + 1 :])
        return _lay_axis(shape, view, dim + 1, pieces, shapes)

    def _spread(self, shape: Shape, degree: int) -> tuple[Shape, ...]:
        return _spread_dim(shape, self.dim, degree, self.blocks)

    def _measure(self, locals_: Sequence[int], dim: int) -> list[list[int]]:
        """Return the width of every part on every rank."""
        if self.widths is not None and len(self.widths[0]) == len(locals_):
            if [sum(rank) for rank in zip(*self.widths, strict=True)] != list(locals_):
                raise MismatchError(f"widths {list(self.widths)} do not sum to the shards' widths {list(locals_)}")
            return [list(part) for part in self.widths]
        total, weight = sum(locals_), sum(self.parts)
        if self.sized and weight != total:
            raise MismatchError(f"parts {list(self.parts)} sum to {weight}, dimension {dim} has blocks of {total}")
        sizes = [[part * local for local in locals_] for part in self.parts]
        if weight == 0 or any(size % weight for part in sizes for size in part):
            raise MismatchError(
                f"parts {list(self.parts)} do not follow from the ranks' widths {list(locals_)} along dimension "
                f"{dim}: the parts' shares are not whole. Give each part's width on each rank (widths)"
            )
        measured = [[size // weight for size in part] for part in sizes]
        if self.unit == 1 and (others := _find_other_widths(measured)):
            raise MismatchError(
                f"parts {list(self.parts)} can be cut in two ways into the ranks' widths {list(locals_)} along "
                f"dimension {dim}: {measured} or {others}. Give each part's width on each rank (widths), or the size "
                "of a head that stays together (unit)"
            )
        return measured


def _find_other_widths(measured: list[list[int]]) -> list[list[int]] | None:
    """Return other plausible widths of parts with the same sum on each rank, or None.

    Heads are dealt evenly, or in equal numbers to all ranks but the last. Without heads this gives other sums, unless
    all parts are equal.
    """
    sizes, ranks = [sum(part) for part in measured], len(measured[0])
    if len(set(sizes)) == 1 or all(len(set(part)) == 1 for part in measured):
        return None
    sums, common = [sum(rank) for rank in zip(*measured, strict=True)], gcd(*sizes)
    for head in (head for head in range(1, common + 1) if common % head == 0):
        for deal in (_deal_evenly, _deal_first):
            dealt = [[head * heads for heads in deal(size // head, ranks)] for size in sizes]
            if dealt != measured and [sum(rank) for rank in zip(*dealt, strict=True)] == sums:
                return dealt
    return None


def _deal_evenly(total: int, ranks: int) -> list[int]:
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def _deal_first(total: int, ranks: int) -> list[int]:
    most = -(-total // ranks)
    return [min(most, max(total - rank * most, 0)) for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class SameShards(Pattern):
    """Shards are unchanged: both sides have the same degree and shapes."""

    def _lay(self, shapes: Sequence[Shape]) -> Layout:
        return whole(shapes[0]) if len(shapes) == 1 else stack(shapes)


def _spread_dim(shape: Shape, dim: int, degree: int, blocks: int = 1) -> tuple[Shape, ...]:
    dim = _find_dim(dim, [shape])
    block = _divide(shape[dim], blocks, dim, f"{blocks} blocks")
    return (_resize(shape, dim, blocks * _divide(block, degree, dim, f"{degree} equal parts")),) * degree


def _find_dim(dim: int, shapes: Sequence[Shape]) -> int:
    """Check that shards differ only along ``dim``; return it as a non-negative number."""
    dims = len(shapes[0])
    if not -dims <= dim < dims:
        raise MismatchError(
            f"shard along dimension {dim}, but the shape {shapes[0]} has {pluralize(dims, 'dimension')}"
        )
    dim %= dims
    for shape in shapes[1:]:
        if len(shape) != dims:
            raise MismatchError(f"the ranks' shapes have different numbers of dimensions: {list(shapes)}")
        for axis in range(dims):
            if axis != dim and shape[axis] != shapes[0][axis]:
                raise MismatchError(f"shard along dimension {dim}, but the shapes differ in {axis}: {list(shapes)}")
    return dim


def _check_unit(widths: Sequence[int], unit: int, dim: int) -> None:
    if any(width % unit for width in widths):
        raise MismatchError(f"widths {list(widths)} along dimension {dim} are not whole units of {unit}")


def _divide(total: int, parts: int, dim: int, description: str) -> int:
    if parts < 1 or total % parts:
        raise MismatchError(f"dimension {dim}: {total} does not divide into {description}")
    return total // parts


def _resize(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _chain(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Return consecutive intervals of these widths."""
    ends = list(accumulate(widths))
    return [(end - width, end) for width, end in zip(widths, ends, strict=True)]


def _lay_axis(
    shape: Shape, view: Shape, axis: int, pieces: Sequence[Sequence[tuple[int, int]]], local: Sequence[Shape]
) -> Layout:
    """Return the layout of shards with ``pieces`` of one axis, and all of the others."""
    full: list[Intervals] = [((0, size),) for size in view]
    shards = tuple((*full[:axis], tuple(piece), *full[axis + 1 :]) for piece in pieces)
    return Layout(shape, view, shards, tuple(local))
