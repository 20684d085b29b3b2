"""Assigns layers, parameters and buffers to pipeline ranks: DeepSpeed's placements, and other ones.

Sources: `PipelineModule._partition_layers` and `_build` (names, tied modules), `deepspeed.runtime.utils`
(`partition_uniform`); interleaved 1F1B after Megatron-LM, bidirectional after Chimera and DualPipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .description import Model, Param, Topology

Placement = tuple[tuple[int, ...], ...]  # the layers of each pipeline rank

_TIED = "tied_modules."


def contiguous(layers: int, pp: int) -> Placement:
    """Place layers as `partition_method="uniform"`: the first stages are one longer, the last ones may be empty."""
    size, rest = divmod(layers, pp)
    starts = [rank * size + min(rank, rest) for rank in range(pp + 1)]
    return tuple(tuple(range(starts[rank], starts[rank + 1])) for rank in range(pp))


def interleaved(layers: int, pp: int, chunks: int) -> Placement:
    """Place layers as interleaved 1F1B: pp x chunks pieces, dealt to the ranks in turn."""
    pieces = contiguous(layers, pp * chunks)
    return tuple(tuple(layer for piece in pieces[rank::pp] for layer in piece) for rank in range(pp))


def bidirectional(layers: int, pp: int) -> Placement:
    """Place layers as Chimera or DualPipe: rank r holds stages r and pp-1-r, one for each direction."""
    stages = contiguous(layers, pp)
    return tuple(tuple(sorted(stages[rank] + stages[pp - 1 - rank])) for rank in range(pp))


def placement_of(model: Model, topology: Topology) -> Placement:
    """Return the layers of each pipeline rank; one rank without layers if the model is no PipelineModule."""
    if not model.layers:
        return ((),)
    return topology.placement or contiguous(len(model.layers), topology.pp)


def layers_of(model: Model, name: str) -> tuple[int, ...]:
    """Return the layers of a parameter or buffer: one, or all layers of its tied module."""
    if name.startswith(_TIED):
        key = name[len(_TIED) :].partition(".")[0]
        return tuple(index for index, layer in enumerate(model.layers) if layer.tied == key)
    return (int(name.partition(".")[0]),)


def layer_prefix(model: Model, layer: int) -> str:
    """Return PipelineModule's prefix for the names of a layer's state_dict."""
    key = model.layers[layer].tied
    return f"{layer}." if key is None else f"{_TIED}{key}."


def local_prefixes(model: Model, layers: Iterable[int]) -> list[str]:
    """Return the prefixes of a rank's layers in the order of `named_parameters`: tied modules are registered first."""
    prefixes = dict.fromkeys(layer_prefix(model, layer) for layer in layers)
    return sorted(prefixes, key=lambda prefix: not prefix.startswith(_TIED))


def holders(model: Model, topology: Topology, name: str) -> tuple[int, ...]:
    """Return the pipeline ranks that hold a parameter or buffer, in order."""
    if not model.layers:
        return (0,)
    layers = set(layers_of(model, name))
    return tuple(rank for rank, held in enumerate(placement_of(model, topology)) if layers & set(held))


def instance_names(model: Model, topology: Topology) -> dict[str, tuple[str, ...]]:
    """Return {name: names of the instances in stage order} for parameters that several pipeline ranks hold.

    The first instance has the plain name, the k-th further one is "name#k".
    """
    held = {param.name: len(holders(model, topology, param.name)) for param in model.owners}
    return {name: tuple(instance(name, index) for index in range(count)) for name, count in held.items() if count > 1}


def instance(name: str, index: int) -> str:
    return f"{name}#{index}" if index else name


def atom_key(name: str, state: str) -> tuple[str, str, int]:
    """Return the index's key for a state of "name" or "name#k"."""
    plain, _, number = name.partition("#")
    return plain, state, int(number or 0)


def differs_by_stage(param: Param) -> bool:
    """Return True if instances have different values: DeepSpeed ties only `tied_weight_attr` of a tied module."""
    return param.name.startswith(_TIED) and not param.tied
