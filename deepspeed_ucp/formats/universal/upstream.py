"""Write and read the keys by which upstream's loader cuts a parameter.

They are in ``.pt`` files with the key ``param``. ``deepspeed/checkpoint/universal_checkpoint.py``
(``load_hp_checkpoint_state``) loads a tensor whole if shapes agree. Otherwise it pads a vocabulary's rows and cuts
along ``cat_dim``, each of ``param_n_sub_params`` equal parts along it, or each part of a ``sub_param_shape``. It
ignores the keys of parameters with AutoTP's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import MismatchError
from ...model.storage import count
from ...tensor_parallel.kinds import Pattern, SameShards, ShardH, ShardHy, ShardNC, ShardV, Unique
from ...tensor_parallel.layout import Layout, Shape
from ...tensor_parallel.metadata import Mapped, Viewed
from ...torchsave.objects import make_instance

CAT_DIM = "cat_dim"
EQUAL_PARTS = "param_n_sub_params"
PARTS = "sub_param_shape"
VOCABULARY = "vocab_tensor"


def upstream_keys(pattern: Pattern | None, shape: Shape, name: str = "") -> dict[str, Any]:
    """Return the entries that make upstream's loader cut a parameter.

    Args:
        shape: logical shape, including padding rows of a vocabulary.

    Returns:
        Entries for ``make_image``. Empty if every rank holds the whole, or if upstream has no form for the pattern
        (grids of several dimensions, overlapping blocks) and can load it only whole.
    """
    if pattern is None:
        return {}
    cut = pattern.general if isinstance(pattern, Mapped) else pattern
    keys = {CAT_DIM: 0} if isinstance(cut, Unique) and pattern.vocab is not None else _describe_cut(cut, shape, name)
    # Upstream pads the last dimension but one, to as many rows as all ranks have together: a matrix cut by rows.
    if pattern.vocab is not None and len(shape) == 2 and keys.get(CAT_DIM) == 0:
        keys[VOCABULARY] = True
    return keys


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
    if isinstance(pattern, ShardNC) and pattern.widths is not None:  # on the source's ranks: of all ranks together
        pattern = replace(pattern, parts=tuple(map(sum, pattern.widths)), sized=True, widths=None)
    try:
        layout = pattern.join([shape])
    except MismatchError:
        return {}
    axis = _find_axis(pattern, layout)
    if axis is None:
        return {}
    sizes = tuple(high - low for low, high in layout.shards[0][axis] if high > low)
    if layout.view != layout.shape or len(set(sizes)) > 1:
        divided = (*layout.view[:axis], sizes, *layout.view[axis + 1 :])
        fields = {"patterns": [re.escape(name)] if name else [], "shape": divided, "partition_dim": axis}
        return {PARTS: make_instance("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", fields)}
    return {CAT_DIM: axis, EQUAL_PARTS: len(sizes)} if len(sizes) > 1 else {CAT_DIM: axis}


def _find_axis(pattern: ShardNC | Viewed, layout: Layout) -> int | None:
    """Return the axis of the layout's view that is cut."""
    for axis, parts in enumerate(layout.shards[0]):
        if len(parts) > 1:
            return axis
    if isinstance(pattern, ShardNC):
        return pattern.dim % len(layout.shape) + (pattern.blocks > 1)
    outer = pattern.view[: pattern.axis]
    axes = (axis for axis in range(len(layout.view)) if count(layout.view[:axis]) == count(outer))
    return None if -1 in outer else next(axes, None)


def read_keys(keys: Mapping[str, Any], shape: Shape) -> Pattern | None:
    """Return the pattern of the shards that upstream joined; None without keys.

    Replicated parameters have no keys.
    """
    if CAT_DIM not in keys:
        return None
    dim, parts = int(keys[CAT_DIM]), int(keys.get(EQUAL_PARTS, 1))
    vocab = shape[0] if keys.get(VOCABULARY) and shape else None
    if parts > 1:
        return ShardNC(parts=(1,) * parts, dim=dim, vocab=vocab)
    return ShardV(vocab=vocab) if dim == 0 else ShardH(dim=dim, vocab=vocab)
