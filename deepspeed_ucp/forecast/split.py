"""Which pipeline stage holds which parameter, where no live model tells."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from ..atoms import TIED, AtomicIndex, strip_compiled
from ..errors import MismatchError

Stages = Mapping[str, tuple[int, ...]]
"""Plain name → the stages that hold it, ascending."""

_LAYER = re.compile(r"^(\d+)\.|\.(\d+)\.")

SAVED = "the checkpoint's own pipeline stages"
SPLIT = "parameters in order, in stages of near equal bytes that end with a layer"


def find_layer(name: str) -> int | None:
    """Number of a parameter's layer, the first number in its name; None without one."""
    found = _LAYER.search(name)
    return int(found[1] or found[2]) if found else None


def place_stages(index: AtomicIndex, names: Sequence[str], weights: Mapping[str, int], pp: int) -> tuple[Stages, str]:
    """The stages of every parameter, and how they were found.

    Args:
        names: all parameters in order, by plain names.
        weights: bytes of each.
        pp: number of stages.

    Raises:
        MismatchError: there are fewer layers than stages.
    """
    if pp == 1:
        return dict.fromkeys(names, (0,)), ""
    if pp == index.run.topology.pp and index.run.flats:
        return _keep_stages(index, names, pp), SAVED
    return split_stages(names, weights, pp), SPLIT


def _keep_stages(index: AtomicIndex, names: Sequence[str], pp: int) -> Stages:
    tp = index.run.topology.tp
    held: dict[str, tuple[int, ...]] = {}
    for stage in range(pp):
        ranks = range(stage * tp, (stage + 1) * tp)
        flats = [flat for mp in ranks for flat in index.run.flats.get(mp, ())]
        for name in dict.fromkeys(strip_compiled(raw) for flat in flats for raw in flat.names):
            held[name] = (*held.get(name, ()), stage)
    ends: list[int] = []  # the last layer of each stage
    for stage in range(pp):
        own = [find_layer(name) for name, stages in held.items() if stage in stages and not name.startswith(TIED)]
        ends.append(max((layer for layer in own if layer is not None), default=ends[-1] if ends else -1))
    homes = {name.split(".")[1]: stages for name, stages in held.items() if name.startswith(TIED)}
    for name in names:
        if name in held:
            continue
        layer = find_layer(name)
        if name.startswith(TIED):
            held[name] = homes.get(name.split(".")[1], (0,))
        elif layer is None:
            held[name] = (0,)
        else:
            held[name] = (next((stage for stage, end in enumerate(ends) if layer <= end), pp - 1),)
    return held


def split_stages(names: Sequence[str], weights: Mapping[str, int], pp: int) -> Stages:
    """Near equal stages: the largest is as small as can be.

    Modules that a pipeline ties (``tied_modules``) are held by the first and the last stage; what has no layer's number
    goes to the first stage where it comes before the layers, else to the last.

    Raises:
        MismatchError: there are fewer layers than stages.
    """
    numbered = {name: layer for name in names if (layer := find_layer(name)) is not None and not name.startswith(TIED)}
    layers = sorted(set(numbered.values()))
    if len(layers) < pp:
        raise MismatchError(f"{pp} pipeline stages, but the parameters' names tell of {len(layers)} layers")
    others: dict[str, tuple[int, ...]] = {}
    before = True
    for name in names:
        before = before and name not in numbered
        if name.startswith(TIED):
            others[name] = (0, pp - 1)
        elif name not in numbered:
            others[name] = (0,) if before else (pp - 1,)
    sizes = dict.fromkeys(layers, 0)
    for name, layer in numbered.items():
        sizes[layer] += weights[name]
    for name, stages in others.items():
        for stage in stages:
            sizes[layers[-1] if stage else layers[0]] += weights[name]
    stage_of = dict(zip(layers, balance([sizes[layer] for layer in layers], pp), strict=True))
    return {name: others.get(name) or (stage_of[numbered[name]],) for name in names}


def balance(sizes: Sequence[int], parts: int) -> list[int]:
    """The part of each item, for runs of items of which the largest is as small as can be; no part is empty."""
    least = range(max(sizes), sum(sizes) + 1)
    limit = least[bisect_left(least, True, key=lambda most: _fill(sizes, parts, most)[-1] < parts)]
    return _fill(sizes, parts, limit)


def _fill(sizes: Sequence[int], parts: int, limit: int) -> list[int]:
    """Runs of at most ``limit``, as long as can be, but that an item is left for each further part."""
    found, held = [0], sizes[0]
    for at, size in enumerate(sizes[1:], 1):
        begins = held + size > limit or len(sizes) - at < parts - found[-1]
        held = size if begins else held + size
        found.append(found[-1] + begins)
    return found
