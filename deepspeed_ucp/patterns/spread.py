"""Shapes that shards of another degree would have, where no live model tells: equal parts, as a pattern cuts."""

from __future__ import annotations

from contextlib import suppress

from ..atoms import count
from ..errors import MismatchError
from .affine import Mapped
from .kinds import Partial, Pattern, Replicate, ShardH, ShardHy, ShardNC
from .layout import Shape


def spread_shapes(pattern: Pattern, shape: Shape, degree: int, pad: int | None = None) -> tuple[Shape, ...]:
    """Local shapes of ``degree`` ranks that hold a parameter in equal parts.

    Args:
        shape: logical shape, vocabulary padding included.
        degree: tensor-parallel degree.
        pad: a vocabulary is padded to a multiple of this times the degree (Megatron's
            ``make_vocab_size_divisible_by``); None pads as little as the degree needs.

    Raises:
        MismatchError: the parameter has no equal parts for that degree.
    """
    if pattern.vocab is not None and shape:
        shape = (_pad_rows(pattern.vocab, shape[0], degree, pad), *shape[1:])
    if degree == 1 or isinstance(pattern, (Replicate, Partial)):
        return (shape,) * degree
    if isinstance(pattern, Mapped):
        return _spread_map(pattern, shape, degree)
    if isinstance(pattern, ShardHy):
        return _spread_grid(pattern, shape, degree)
    if isinstance(pattern, ShardNC):
        return _spread_dim(shape, pattern.dim, degree, pattern.blocks)
    if isinstance(pattern, ShardH):
        return _spread_dim(shape, pattern.dim, degree, 1)
    return _spread_other(pattern, shape, degree)


def _spread_other(pattern: Pattern, shape: Shape, degree: int) -> tuple[Shape, ...]:
    """Parts along the first dimension along which the pattern takes equal ones (Viewed)."""
    for dim, size in enumerate(shape):
        if size % degree == 0:
            local = _spread_dim(shape, dim, degree, 1)
            with suppress(MismatchError):
                pattern.cut(shape, local)
                return local
    raise MismatchError(f"{type(pattern).__name__.lower()}: shape {shape} has no {degree} equal parts")


def _pad_rows(vocab: int, rows: int, degree: int, pad: int | None) -> int:
    if pad is None:
        return rows if rows % degree == 0 else -(-rows // degree) * degree
    return -(-vocab // (pad * degree)) * pad * degree


def _spread_map(pattern: Mapped, shape: Shape, degree: int) -> tuple[Shape, ...]:
    if len(pattern.layout.local_shapes) == degree:
        return pattern.layout.local_shapes
    if pattern.general is None:
        raise MismatchError(
            f"the affine map describes {len(pattern.layout.local_shapes)} shards; {degree} have no counterpart in it"
        )
    return spread_shapes(pattern.general, shape, degree)


def _spread_grid(pattern: ShardHy, shape: Shape, degree: int) -> tuple[Shape, ...]:
    grid = (*pattern.grid, *(1,) * (len(shape) - len(pattern.grid)))
    if count(grid) != degree or len(grid) != len(shape) or any(n % g for n, g in zip(shape, grid, strict=True)):
        raise MismatchError(f"grid {list(pattern.grid)} does not cut shape {shape} into {degree} equal parts")
    return (tuple(size // ranks for size, ranks in zip(shape, grid, strict=True)),) * degree


def _spread_dim(shape: Shape, dim: int, degree: int, blocks: int) -> tuple[Shape, ...]:
    if not -len(shape) <= dim < len(shape):
        raise MismatchError(f"shard along dimension {dim}, but the shape {shape} has {len(shape)} dimensions")
    dim %= len(shape)
    if shape[dim] % (degree * blocks):
        each = f" of each of {blocks} blocks" if blocks > 1 else ""
        raise MismatchError(f"dimension {dim} of shape {shape} has no {degree} equal parts{each}")
    return ((*shape[:dim], shape[dim] // degree, *shape[dim + 1 :]),) * degree
