"""The model-parallel ranks' parts of the model, and the whole model's param groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import CheckpointError
from ...model import TIED, GroupInfo, ParamKey, count, number_layer, strip_compiled
from ...model.experts import cut_number, find_expert, find_layer
from ...model.flat import FlatBuffer
from ...model.topology import number_groups
from .headers import FileHeader, Shape
from .save import Save


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The layers and tied modules of a pipeline, by its parameters' names.

    A layer file has the keys of the layer's state_dict; PipelineModule names its parameters ``<layer>.<key>``, those of
    a tied module ``tied_modules.<tied key>.<key>`` (runtime/pipe/module.py, ``_build`` and ``save_state_dict``).

    Attributes:
        untied: layers with parameters of their own.
        tied: tied module → keys in it.
    """

    untied: set[int]
    tied: dict[str, set[str]]

    @classmethod
    def of(cls, names: Collection[str]) -> LayerNames:
        """Parse parameter names."""
        tied = defaultdict[str, set[str]](set)
        for head, _, key in (name.removeprefix(TIED).partition(".") for name in names if name.startswith(TIED)):
            tied[head].add(key)
        return cls({number_layer(name) for name in names} - {-1}, tied)

    def find_tied(self, layer: int, tensors: Mapping[str, object]) -> list[str]:
        """Return the tied modules that a layer's file may hold, as it has all their keys."""
        return [] if layer in self.untied else [key for key, names in self.tied.items() if names <= tensors.keys()]


@dataclass(slots=True)
class SavedRank:
    """One model-parallel rank of the source while its files are added.

    Attributes:
        pp, tp: its pipeline and tensor-parallel rank.
        shapes: local name → local shape of the optimizer's parameters.
        instances: name → number of earlier stages that hold it as well.
        empty: shapes of shards without elements, whose parameters other tensor-parallel ranks' optimizers have.
        flats: its flat buffers, with the module's names.
        groups: its param groups.
        experts_over_tp: whole experts that are spread over all ranks of its pipeline stage: they have one shard.
    """

    pp: int = 0
    tp: int = 0
    shapes: dict[str, Shape] = field(default_factory=dict)
    instances: Mapping[str, int] = field(default_factory=dict)
    empty: dict[str, Shape] = field(default_factory=dict)
    flats: tuple[FlatBuffer, ...] = ()
    groups: tuple[GroupInfo, ...] = ()
    experts_over_tp: set[str] = field(default_factory=set)
    _params: dict[str, ParamKey] = field(default_factory=dict)

    def find_tp_shard(self, name: str, tp_shards: int) -> tuple[int, int]:
        """Return (number of the rank's shard of a parameter, number of shards); usually there are ``tp_shards``."""
        return (0, 1) if name in self.experts_over_tp else (self.tp, tp_shards)

    def param(self, name: str) -> ParamKey:
        """Return the index's key of a parameter of this rank."""
        found = self._params.get(name)
        if found is None:
            found = self._params[name] = ParamKey(name, self.instances.get(name, 0))
        return found


def list_ranks(save: Save, names: Sequence[Sequence[str]]) -> tuple[list[SavedRank], dict[str, int]]:
    """Create all model-parallel ranks, and number the parameters that several stages hold under one name.

    Args:
        save: the files.
        names: local names of the parameters of each model-parallel rank's optimizer.

    Returns:
        The ranks, and the number of stages of each parameter that several pipeline stages hold.
    """
    stages = [dict.fromkeys(n for held in names[i : i + save.tp] for n in held) for i in range(0, len(names), save.tp)]
    holders: dict[str, int] = {}
    ranks = []
    for pp, held in enumerate(stages):
        instances = {name: holders[name] for name in held if name in holders}
        for name in held:
            holders[name] = holders.get(name, 0) + 1
        for tp in range(save.tp):
            lacking = held.keys() - set(names[pp * save.tp + tp])
            empty = _find_empty(save, pp * save.tp + tp) if lacking else {}
            empty = {name: shape for name, shape in empty.items() if name in lacking}
            ranks.append(SavedRank(pp, tp, instances=instances, empty=empty))
    return ranks, {name: stages for name, stages in holders.items() if stages > 1}


def _find_empty(save: Save, mp: int) -> dict[str, Shape]:
    """Return the local shapes of a rank's tensors without elements, which uneven shards may have."""
    model = save.model(mp)
    found = dict(model.frozen_shapes)
    for layer, header in save.layers[mp % save.tp].items():
        found.update({f"{layer}.{key}": piece.shape for key, piece in (header.layer or {}).items()})
    if model.module and not (model.param_shapes is not None and save.is_sharded):
        found.update({name: piece.shape for name, piece in model.module.items()})
    return {name: shape for name, shape in found.items() if not count(shape)}


def fill_param_shapes(save: Save) -> None:
    """Derive missing ``param_shapes`` of model states, as of a pipeline with BF16_Optimizer without ZeRO.

    The optimizer files' ``param_slice_mappings`` have the names in flat order and the element counts; the model's
    tensors have the shapes.

    Raises:
        CheckpointError: a parameter without a shape.
    """
    for mp, models in enumerate(save.models):
        model = save.model(mp)
        if model.param_shapes is None:
            groups_held = max((len(shard.optim.slices) for shard in save.shards[mp] if shard.optim), default=0)
            groups = tuple(_read_group(save, mp, group) for group in range(groups_held))
            models[0] = replace(models[0], model=replace(model, param_shapes=groups, optim=None))


def _read_group(save: Save, mp: int, group: int) -> tuple[tuple[str, Shape], ...]:
    """Return the parameters of a param group in flat order; experts over tensor-parallel ranks need all files."""
    shards, first = save.shards[mp], save.shards[mp][0].optim
    if save.experts_over_tp and first and group < len(first.groups) and first.groups[group].get("moe"):
        shards = [save.shard(mp // save.tp, rank) for rank in range(save.dp * save.tp)]
    numels: dict[str, int] = {}
    for slices in (shard.optim.slices for shard in shards if shard.optim):
        for name, _, numel in sorted(slices[group] if group < len(slices) else (), key=lambda entry: entry[1]):
            numels[name] = numels.get(name, 0) + numel
    return tuple((name, _find_shape(save, mp, name, numels)) for name in numels)


def _find_shape(save: Save, mp: int, raw: str, numels: Mapping[str, int]) -> Shape:
    name = strip_compiled(raw)
    module = save.model(mp).module
    if module is None:
        found = _look_into_layers(save.layers[mp % save.tp], name, set(map(strip_compiled, numels)))
    else:
        found = {module[name].shape} if name in module else set()
    fitting = {shape for shape in found if count(shape) == numels[raw]} or _look_into_experts(save, mp, name)
    if len(fitting) == 1:
        return fitting.pop()
    raise CheckpointError(
        f"the shape of {raw} ({numels[raw]} elements) is in none of the model's files. The "
        "folder lacks a file or mixes files of several saves.",
        path=save.listing.folder,
    )


def _look_into_layers(layers: Mapping[int, FileHeader], name: str, names: set[str]) -> set[Shape]:
    """Return a parameter's shapes in its layer's file, or in all files that may hold its tied module."""
    head, _, key = name.removeprefix(TIED).partition(".")
    tensors = {layer: header.layer or {} for layer, header in layers.items()}
    if name.startswith(TIED):
        known = LayerNames.of(names)
        files = [held for layer, held in tensors.items() if head in known.find_tied(layer, held)]
    else:
        files = [held for layer, held in tensors.items() if str(layer) == head]
    return {held[key].shape for held in files if key in held}


def _look_into_experts(save: Save, mp: int, name: str) -> set[Shape]:
    """Return the shapes that files of single experts give a rank's parameter; AutoEP's parameters hold several."""
    files = [header for (_, _, held), header in save.experts.items() if held in save.list_expert_ranks(mp)]
    pieces = {key: piece for header in files for key, piece in (header.layer or {}).items()}
    placements = {strip_compiled(layer): experts for layer, experts in save.model(mp).placements.items()}
    if layer := find_layer(name, placements):
        fused = [piece for key, piece in pieces.items() if key.rpartition(".")[0] == name]
        return {(len(held), *piece.shape) for held in placements[layer] for piece in fused}
    wanted = cut_number(name)
    return {piece.shape for key, piece in pieces.items() if find_expert(key) and cut_number(key) == wanted}


def join_groups(save: Save, ranks: Sequence[SavedRank]) -> tuple[GroupInfo, ...]:
    """Return the param groups of the whole model; tensor-parallel ranks may lack parameters that are empty there."""
    stages = [ranks[first : first + save.tp] for first in range(0, len(ranks), save.tp)]
    numbers = number_groups([[group.hyper for group in held[0].groups] for held in stages])
    joined: dict[int, tuple[dict[ParamKey, None], dict[str, Any]]] = {}
    for held, numbered in zip(stages, numbers, strict=True):
        for index, number in enumerate(numbered):
            members, _ = joined.setdefault(number, ({}, held[0].groups[index].hyper))
            members.update(dict.fromkeys(member for rank in held for member in rank.groups[index].members))
    return tuple(GroupInfo(tuple(members), hyper) for members, hyper in joined.values())


def check_steps(save: Save, ranks: Sequence[SavedRank], scalars: Mapping[ParamKey, Mapping[str, Any]]) -> None:
    """Refuse a pipeline stage of another step: no parameter has a step of the first stage.

    Args:
        save: the files.
        ranks: with their param groups.
        scalars: parameter → the optimizer's scalars.

    Raises:
        CheckpointError: names the stage's file.
    """
    first: set[Any] = set()
    for mp, rank in list(enumerate(ranks))[:: save.tp]:
        members = (member for group in rank.groups for member in group.members)
        held = {scalars[member]["step"] for member in members if "step" in scalars.get(member, {})}
        first = first or held
        if held and held.isdisjoint(first):
            files = save.shards[mp] or save.models[mp]
            raise CheckpointError(
                f"has step {min(held)}, other stages of this checkpoint have {min(first)}. The "
                "file belongs to another step or run; put the right one back.",
                path=save.path(files[0]),
            )
