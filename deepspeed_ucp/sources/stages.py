"""Which model-parallel rank holds which parameters, and which of them several pipeline stages hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..atoms import ParamKey, count, strip_compiled
from .builder import Seat
from .family import Save


@dataclass(slots=True)
class Stages:
    """The model-parallel ranks' parts of the model.

    Attributes:
        seats: by model-parallel rank.
        instances: parameters that several pipeline stages hold → how many do.
        empty: per parameter the shapes of shards without elements, by tensor-parallel rank: no optimizer has them.
    """

    seats: list[Seat]
    instances: dict[str, int] = field(default_factory=dict)
    empty: dict[ParamKey, dict[int, tuple[int, ...]]] = field(default_factory=dict)


def name_stages(save: Save, names: Sequence[Sequence[str]]) -> Stages:
    """Seats for all model-parallel ranks; what several stages hold under one name is numbered in their order.

    Args:
        save: the files.
        names: per model-parallel rank the parameters that its optimizer owns, by their own names.
    """
    holders: dict[str, list[int]] = {}
    for mp, held in enumerate(names):
        for name in held:
            stages = holders.setdefault(name, [])
            if not stages or stages[-1] != mp // save.tp:
                stages.append(mp // save.tp)
    numbers: list[dict[str, int]] = [{} for _ in range(save.pp)]
    for name, stages in holders.items():
        for number, stage in enumerate(stages[1:], 1):
            numbers[stage][name] = number
    seats = [Seat(mp // save.tp, mp % save.tp, instances=numbers[mp // save.tp]) for mp in range(save.pp * save.tp)]
    found = Stages(seats, {name: len(stages) for name, stages in holders.items() if len(stages) > 1})
    _note_empty(save, found, names)
    return found


def _note_empty(save: Save, stages: Stages, names: Sequence[Sequence[str]]) -> None:
    """Uneven widths can leave a tensor-parallel rank without elements: its optimizer does not have the parameter."""
    if save.tp == 1:
        return
    for stage in range(save.pp):
        ranks = range(stage * save.tp, (stage + 1) * save.tp)
        everything = dict.fromkeys(name for mp in ranks for name in names[mp])
        for mp in ranks:
            if len(names[mp]) == len(everything):
                continue
            shapes = _find_hollow(save, mp)
            lacking = set(everything) - set(names[mp])
            for name in lacking & set(shapes):
                stages.empty.setdefault(stages.seats[mp].param(name), {})[mp % save.tp] = shapes[name]


def _find_hollow(save: Save, mp: int) -> Mapping[str, tuple[int, ...]]:
    """Local shapes of a rank's tensors without elements."""
    model = save.model(mp)
    found = {strip_compiled(name): tuple(shape) for name, shape in model.frozen_shapes.items()}
    for layer, header in save.layers[mp % save.tp].items():
        found.update({f"{layer}.{key}": piece.shape for key, piece in (header.layer or {}).items() if not piece.numel})
    if model.module and not (
        model.param_shapes is not None and save.models[mp][0].name in save.listing.model_zero3.values()
    ):
        found.update({strip_compiled(name): piece.shape for name, piece in model.module.items() if not piece.numel})
    return {name: shape for name, shape in found.items() if not count(shape)}
