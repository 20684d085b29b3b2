"""How upstream cuts a parameter: the keys beside ``param`` in its ``.pt`` files, written and read.

``deepspeed/checkpoint/universal_checkpoint.py`` (``load_hp_checkpoint_state``) takes a tensor whole where shapes agree;
else it pads a vocabulary's rows, and cuts: along ``cat_dim``, each of ``param_n_sub_params`` equal parts along it, or
each part of a ``sub_param_shape``. Parameters with AutoTP's own metadata are cut by that; the keys are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...atoms import count
from ...errors import MismatchError
from ...patterns import Pattern, SameShards, ShardH, ShardHy, ShardNC, ShardV, Unique
from ...patterns.affine import Mapped
from ...patterns.layout import Layout, Shape
from ...patterns.metadata import Viewed
from ...torchsave.objects import PickledObject, make_instance

CAT_DIM = "cat_dim"
EQUAL_PARTS = "param_n_sub_params"
PARTS = "sub_param_shape"
VOCABULARY = "vocab_tensor"
IS_EXPERT = "is_expert_param"
EXPERTS = "ep_num_experts"


def upstream_keys(pattern: Pattern | None, shape: Shape, name: str = "") -> dict[str, Any]:
    """The entries that tell upstream's loader how to cut a parameter.

    Args:
        pattern: how it is cut; None where no tensor parallelism is known.
        shape: logical shape, rows of vocabulary padding included.
        name: the parameter's, for the class that names its patterns.

    Returns:
        Entries for ``make_image``; none where every rank holds the whole, or where upstream has no form for the pattern
        (grids of several dimensions, overlapping blocks): upstream then loads it only where it is not cut.
    """
    if pattern is None:
        return {}
    cut = pattern.general if isinstance(pattern, Mapped) else pattern
    found = {CAT_DIM: 0} if isinstance(cut, Unique) and pattern.vocab is not None else _describe_cut(cut, shape, name)
    # Upstream pads the last dimension but one, to as many rows as all ranks have together: a matrix cut by rows.
    if pattern.vocab is not None and len(shape) == 2 and found.get(CAT_DIM) == 0:
        found[VOCABULARY] = True
    return found


def expert_keys(experts: int) -> dict[str, Any]:
    """The entries that tell upstream's loader to take an expert-parallel rank's experts out of a parameter of all."""
    return {CAT_DIM: 0, IS_EXPERT: True, EXPERTS: experts}


def _describe_cut(pattern: Pattern | None, shape: Shape, name: str) -> dict[str, Any]:
    if isinstance(pattern, ShardH):
        return {CAT_DIM: pattern.dim % len(shape)} if shape else {}
    if isinstance(pattern, SameShards):
        return {CAT_DIM: 0}
    if isinstance(pattern, ShardHy):
        cut = [dim for dim, ranks in enumerate(pattern.grid) if ranks > 1]
        return {CAT_DIM: cut[0]} if len(cut) == 1 else {}
    if isinstance(pattern, (ShardNC, Viewed)):
        return _describe_parts(pattern, shape, name)
    return {}


def _describe_parts(pattern: ShardNC | Viewed, shape: Shape, name: str) -> dict[str, Any]:
    try:
        layout = _settle_widths(pattern).join([shape])
    except MismatchError:
        return {}
    axis = _find_axis(pattern, layout)
    if axis is None:
        return {}
    sizes = tuple(high - low for low, high in layout.shards[0][axis] if high > low)
    if layout.view != layout.shape or len(set(sizes)) > 1:
        return {PARTS: _make_parts(layout.view, axis, sizes, name)}
    return {CAT_DIM: axis, EQUAL_PARTS: len(sizes)} if len(sizes) > 1 else {CAT_DIM: axis}


def _settle_widths(pattern: ShardNC | Viewed) -> ShardNC | Viewed:
    """Sizes of the parts in place of their widths on the source's ranks."""
    if isinstance(pattern, Viewed) or pattern.widths is None:
        return pattern
    return replace(pattern, parts=tuple(map(sum, pattern.widths)), sized=True, widths=None)


def _find_axis(pattern: ShardNC | Viewed, layout: Layout) -> int | None:
    """The axis of the layout's view that is cut."""
    for axis, parts in enumerate(layout.shards[0]):
        if len(parts) > 1:
            return axis
    if isinstance(pattern, ShardNC):
        return pattern.dim % len(layout.shape) + (pattern.blocks > 1)
    outer = pattern.view[: pattern.axis]
    found = (axis for axis in range(len(layout.view)) if count(layout.view[:axis]) == count(outer))
    return None if -1 in outer else next(found, None)


def _make_parts(view: Shape, axis: int, sizes: tuple[int, ...], name: str) -> PickledObject:
    """Upstream's ``SubparamShape``, as a pickle holds it."""
    shape = (*view[:axis], sizes, *view[axis + 1 :])
    fields = {"patterns": [re.escape(name)] if name else [], "shape": shape, "partition_dim": axis}
    return make_instance("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", fields)


def read_keys(keys: Mapping[str, Any], shape: Shape) -> Pattern | None:
    """How upstream's converter joined tensor-parallel shards to ``shape``, where the keys say so.

    It marks what is replicated by nothing at all.
    """
    if CAT_DIM not in keys:
        return None
    dim, parts = int(keys[CAT_DIM]), int(keys.get(EQUAL_PARTS, 1))
    vocab = shape[0] if keys.get(VOCABULARY) and shape else None
    if parts > 1:
        return ShardNC(parts=(1,) * parts, dim=dim, vocab=vocab)
    return ShardV(vocab=vocab) if dim == 0 else ShardH(dim=dim, vocab=vocab)
