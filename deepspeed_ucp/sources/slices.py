"""Names and shapes where the model states give none: BF16_Optimizer without ZeRO, in a pipeline.

There ``param_shapes`` is None. The optimizer files' ``param_slice_mappings`` have the names in flat order and the
element counts; the model's own tensors have the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..atoms import count, strip_compiled
from ..errors import CheckpointError
from .family import Save
from .headers import FileHeader

TIED = "tied_modules."

Entries = tuple[tuple[str, tuple[int, ...]], ...]


def fill_param_shapes(save: Save) -> None:
    """Give every rank's model states the ``param_shapes`` that they lack.

    Raises:
        CheckpointError: a parameter without a shape.
    """
    for mp, models in enumerate(save.models):
        header = models[0]
        if header.model is None or header.model.param_shapes is not None:
            continue
        groups = tuple(_read_group(save, mp, group) for group in range(_count_groups(save.shards[mp])))
        models[0] = replace(header, model=replace(header.model, param_shapes=groups, optim=None))


def _count_groups(shards: list[FileHeader]) -> int:
    return max((len(shard.optim.slices) for shard in shards if shard.optim), default=0)


def _read_group(save: Save, mp: int, group: int) -> Entries:
    numels: dict[str, int] = {}
    for shard in save.shards[mp]:
        slices = shard.optim.slices if shard.optim else ()
        for name, _, numel in sorted(slices[group] if group < len(slices) else (), key=lambda entry: entry[1]):
            numels[name] = numels.get(name, 0) + numel
    return tuple((name, _find_shape(save, mp % save.tp, name, numels)) for name in numels)


def _find_shape(save: Save, tp: int, name: str, numels: Mapping[str, int]) -> tuple[int, ...]:
    own = strip_compiled(name)
    module = save.model(tp).module
    if module is not None:
        found = {piece.shape for key, piece in module.items() if strip_compiled(key) == own}
    else:
        found = _look_into_layers(save, tp, own, {strip_compiled(key) for key in numels})
    fitting = {shape for shape in found if count(shape) == numels[name]}
    if len(fitting) == 1:
        return fitting.pop()
    raise CheckpointError(
        f"{save.listing.folder}: the shape of {name} ({numels[name]} elements) is in none of the model's files. The "
        "folder lacks a file or mixes files of several saves."
    )


def _look_into_layers(save: Save, tp: int, name: str, names: set[str]) -> set[tuple[int, ...]]:
    """Shapes that a parameter has in its layer's file; that of a tied module can be any with such a key."""
    head, _, key = name.removeprefix(TIED).partition(".")
    layers = save.layers[tp]
    if not name.startswith(TIED):
        layers = {layer: header for layer, header in layers.items() if str(layer) == head}
    else:
        layers = {
            layer: header for layer, header in layers.items() if not any(n.startswith(f"{layer}.") for n in names)
        }
    return {
        piece.shape
        for header in layers.values()
        for raw, piece in (header.layer or {}).items()
        if strip_compiled(raw) == key
    }
