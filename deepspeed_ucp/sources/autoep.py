"""What AutoEP's model states tell of its experts: which expert-parallel rank holds which, and in what order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from math import prod
from typing import Any

from ..atoms import strip_compiled
from ..experts import MOST_EXPERTS
from .headers import ModelHeader, Piece, Placement

_VERSION = 1


def read_placements(layers: Any) -> dict[str, Placement]:
    """Of every AutoEP layer the experts of each expert-parallel rank, by what the names of their parameters begin with.

    Args:
        layers: ``ds_autoep_layers``; affine maps, where it has them, have to tell the same as the placement.

    Raises:
        ValueError: a description that is of no known form, contradicts itself, or has an expert on several ranks.
    """
    found = {}
    for layer in layers or ():
        prefix, placement = layer["expert_key_prefix"], _read_placement(layer)
        for name, told in ((layer.get("affine_maps") or {}).get("params") or {}).items():
            if _read_map(told) != placement:
                raise ValueError(f"the affine map of {name} is not its expert placement")
        found[f"{prefix}."] = placement
    return found


def read_folding(told: Any) -> tuple[int, int] | None:
    """The (tensor-parallel, expert-parallel) rank that wrote a file, where AutoEP tells it; else None.

    Args:
        told: ``folding`` (``deepspeed/checkpoint/autoep_universal.py``), or whatever has that name.
    """
    if not isinstance(told, Mapping) or not {"tp_rank", "ep_rank", "etp_size"} <= told.keys():
        return None
    return int(told["tp_rank"]), int(told["ep_rank"])


def _read_placement(layer: Mapping[str, Any]) -> Placement:
    told, count = layer.get("expert_placement"), int(layer["num_experts"])
    if not 0 < count <= MOST_EXPERTS:
        raise ValueError(f"{count} experts in a layer")
    if told is None:  # older releases: contiguous
        local = count // int(layer["ep_size"])
        placement = tuple(tuple(range(first, first + local)) for first in range(0, count, local))
    elif told["version"] != _VERSION:
        raise ValueError(f"an expert placement of version {told['version']!r}")
    else:
        ranks = sorted(told["ranks"], key=lambda each: int(each["rank"]))
        if [each["rank"] for each in ranks] != list(range(len(ranks))):
            raise ValueError("the ranks of an expert placement are not numbered from 0")
        placement = tuple(tuple(map(int, each["experts"])) for each in ranks)
    if len(placement) != layer["ep_size"] or sorted(chain(*placement)) != list(range(count)):
        raise ValueError(f"of {count} experts of {layer['expert_key_prefix']} not each is on one rank")
    return placement


def _read_map(told: Mapping[str, Any]) -> Placement:
    """The experts of each rank, by an affine map of ``deepspeed/checkpoint/affine.py``.

    Raises:
        ValueError: a piece is something else than whole experts.
    """
    shape = tuple(told["logical_shape"])
    strides, numel = [prod(shape[dim + 1 :]) for dim in range(len(shape))], prod(shape[1:])
    ranks = {int(rank): held for rank, held in told["ranks"].items()}
    placement, free = [], min(shape[0], MOST_EXPERTS)
    for rank in range(len(ranks)):
        held: dict[int, int] = {}
        for piece in ranks[rank]["pieces"]:
            (first, *steps), (begin, *others) = _flatten(piece["source"]), _flatten(piece["dest"])
            whole = [*piece["shape"]] == [piece["shape"][0], *shape[1:]] and piece.get("scale", 1.0) == 1.0
            if not whole or steps != strides or others != strides or first % numel or begin % numel:
                raise ValueError("a piece of an affine map is not of whole experts")
            free -= piece["shape"][0]
            if free < 0:
                raise ValueError("an affine map of more experts than there are")
            held.update({begin // numel + at: first // numel + at for at in range(piece["shape"][0])})
        placement.append(tuple(held[at] for at in range(len(held))))
    return tuple(placement)


def _flatten(place: tuple[int, list[int]]) -> list[int]:
    return [place[0], *place[1]]


def find_router_aliases(model: ModelHeader) -> dict[str, str]:
    """The second name that AutoEP gives its router, so that recorders of outputs find it; DeepSpeed saves both.

    A module counts as such where all that it holds are the router's tensors, to the byte.
    """
    if not model.placements:
        return {}
    blocks = {strip_compiled(layer).removesuffix("experts.") for layer in model.placements}
    held: dict[str, dict[str, dict[str, Piece]]] = {block: defaultdict(dict) for block in blocks}
    for name, piece in (model.module or {}).items():
        for block in (name[: end + 1] for end, letter in enumerate(name) if letter == "."):
            if block in held:
                child, _, rest = name[len(block) :].partition(".")
                held[block][child][rest] = piece
    return {
        f"{block}{child}.{rest}": f"{block}router.{rest}"
        for block, children in held.items()
        for child, tensors in children.items()
        if child != "router" and "router" in children and _list_contents(tensors) == _list_contents(children["router"])
        for rest in tensors
    }


def _list_contents(tensors: Mapping[str, Piece]) -> dict[str, Any]:
    return {name: piece.contents for name, piece in tensors.items()}
