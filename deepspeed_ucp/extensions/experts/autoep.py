"""Read AutoEP's placement of experts, writing ranks, and aliases of its router."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from math import prod
from typing import Any

from ...formats.deepspeed.headers import Piece
from ...model.storage import are_alike, strip_compiled
from ...plan.derive import MOST_FUSED

Placement = tuple[tuple[int, ...], ...]
"""The experts of a layer that each expert-parallel rank holds, in the rank's order."""

_VERSION = 1


def read_placements(layers: Any) -> dict[str, Placement]:
    """Map the prefix of each AutoEP layer's expert parameters to their placement.

    Args:
        layers: ``ds_autoep_layers``; its affine maps, if any, must agree with the placement.

    Raises:
        ValueError: a description has an unknown form, contradicts itself, or has an expert on several ranks.
    """
    placements = {}
    for layer in layers or ():
        prefix, placement = layer["expert_key_prefix"], _read_placement(layer)
        for name, affine in ((layer.get("affine_maps") or {}).get("params") or {}).items():
            if _read_map(affine) != placement:
                raise ValueError(f"the affine map of {name} is not its expert placement")
        placements[f"{prefix}."] = placement
    return placements


def read_folding(value: Any) -> tuple[int, int] | None:
    """Return the (tensor-parallel, expert-parallel) rank that wrote a file, or None.

    Args:
        value: ``folding`` (``deepspeed/checkpoint/autoep_universal.py``), or another value under that key.
    """
    if not isinstance(value, Mapping) or not {"tp_rank", "ep_rank", "etp_size"} <= value.keys():
        return None
    return int(value["tp_rank"]), int(value["ep_rank"])


def _read_placement(layer: Mapping[str, Any]) -> Placement:
    descriptor, count = layer.get("expert_placement"), int(layer["num_experts"])
    if not 0 < count <= MOST_FUSED:
        raise ValueError(f"{count} experts in a layer")
    if descriptor is None:  # older releases: contiguous
        local = count // int(layer["ep_size"])
        placement = tuple(tuple(range(first, first + local)) for first in range(0, count, local))
    elif descriptor["version"] != _VERSION:
        raise ValueError(f"an expert placement of version {descriptor['version']!r}")
    else:
        ranks = sorted(descriptor["ranks"], key=lambda entry: int(entry["rank"]))
        if [entry["rank"] for entry in ranks] != list(range(len(ranks))):
            raise ValueError("the ranks of an expert placement are not numbered from 0")
        placement = tuple(tuple(map(int, entry["experts"])) for entry in ranks)
    if len(placement) != layer["ep_size"] or sorted(chain(*placement)) != list(range(count)):
        raise ValueError(f"of {count} experts of {layer['expert_key_prefix']} not each is on one rank")
    return placement


def _read_map(affine: Mapping[str, Any]) -> Placement:
    """Return the placement in an affine map of ``deepspeed/checkpoint/affine.py``.

    Raises:
        ValueError: a piece has other elements than those of whole experts.
    """
    shape = tuple(affine["logical_shape"])
    strides, numel = [prod(shape[dim + 1 :]) for dim in range(len(shape))], prod(shape[1:])
    ranks = {int(rank): entry for rank, entry in affine["ranks"].items()}
    placement, free = [], min(shape[0], MOST_FUSED)
    for rank in range(len(ranks)):
        experts: dict[int, int] = {}
        for piece in ranks[rank]["pieces"]:
            (first, steps), (begin, dest_steps) = piece["source"], piece["dest"]
            is_whole = [*piece["shape"]] == [piece["shape"][0], *shape[1:]] and piece.get("scale", 1.0) == 1.0
            if not is_whole or [*steps] != strides or [*dest_steps] != strides or first % numel or begin % numel:
                raise ValueError("a piece of an affine map is not of whole experts")
            free -= piece["shape"][0]
            if free < 0:
                raise ValueError("an affine map of more experts than there are")
            experts.update({begin // numel + i: first // numel + i for i in range(piece["shape"][0])})
        placement.append(tuple(experts[i] for i in range(len(experts))))
    return tuple(placement)


def find_router_aliases(layers: Iterable[str], module: Mapping[str, Piece]) -> dict[str, str]:
    """Map second names of AutoEP's router, for output recorders, to the first names.

    A sibling module is an alias if its tensors are those of the router, to the byte (by their checksums). ``layers``
    are prefixes of the experts' names.
    """
    blocks = {strip_compiled(layer).removesuffix("experts.") for layer in layers}
    children_by_block: dict[str, dict[str, dict[str, Piece]]] = {block: defaultdict(dict) for block in blocks}
    for name, piece in module.items() if blocks else ():
        for block in (name[: end + 1] for end, letter in enumerate(name) if letter == "."):
            if block in children_by_block:
                child, _, end = name[len(block) :].partition(".")
                children_by_block[block][child][end] = piece
    aliases = {}
    for block, children in children_by_block.items():
        router = children.pop("router", {})
        for child, tensors in children.items():
            if tensors.keys() == router.keys() and all(
                tensors[end] == piece or are_alike((tensors[end].contents, piece.contents))
                for end, piece in router.items()
            ):
                aliases.update({f"{block}{child}.{end}": f"{block}router.{end}" for end in tensors})
    return aliases
