"""Names and headers of experts' files in a save, and degrees inferred from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

from ...formats.deepspeed.files import Key, Role
from ...formats.deepspeed.headers import FileHeader, OptimHeader, PrefixedTensors
from ...formats.deepspeed.save import Save, count_ranks, find_degrees, name_model_files
from ...model.topology import find_label
from .names import DATA_FIRST, count_experts, find_expert, place_experts

NO_LAYER = -1
"""Layer of an expert's file without one in its name: older releases write an expert's parts of all layers to one."""

_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_GROUP = re.compile(r"ep_size_([1-9]\d{0,3})", re.ASCII)


def _name_expert(layer: int, expert: int, mp: int) -> str:
    return ("" if layer == NO_LAYER else f"layer_{layer}_") + f"expert_{expert}_mp_rank_{mp:02d}_model_states.pt"


ROLES = {
    "expert": Role(_EXPERT, lambda match: (int(match[1] or NO_LAYER), int(match[2]), int(match[3])), _name_expert),
    "expert_optim": Role(
        _OPTIM,
        lambda match: (int(match[2]), int(match[1])),
        lambda mp, rank: f"expp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt",
    ),
}
"""Roles of experts' files, and their keys:

* expert: single experts, by layer, counted from 0, or ``NO_LAYER``; by expert; by model-parallel rank
* expert_optim: optimizer states of stage 0, by model-parallel and expert-parallel rank
"""


class ExpertFiles:
    """The experts' files of a save.

    Attributes:
        files: headers of single experts' files by key (:data:`ROLES`).
        optims: headers of the experts' optimizer files at ZeRO stage 0 by key.
        tp_shards: shards of an expert's parameter: ``tp`` with expert tensor parallelism, else 1 (experts are then
            distributed over all ranks of a pipeline stage, and each is saved once).
        stages: model states of the later pipeline stages, since each lists only its own experts.
    """

    def __init__(self) -> None:
        self.files: dict[Key, FileHeader] = {}
        self.optims: dict[Key, FileHeader] = {}
        self.tp_shards = 1
        self.stages: list[FileHeader] = []

    @cached_property
    def counts(self) -> dict[str, int]:
        """Layer → number of experts with files, for DeepSpeed's own layers."""
        return count_experts(chain.from_iterable(map(_list_names, self.files.values())))

    def is_over_tp(self, save: Save) -> bool:
        """Return True if whole experts are distributed over the tensor-parallel ranks too."""
        return self.tp_shards < save.tp

    def list_sharing(self, save: Save, mp: int) -> range:
        """Return the model-parallel ranks whose files hold the experts of rank ``mp``."""
        first = mp // save.tp * save.tp
        return range(first, first + save.tp) if self.is_over_tp(save) else range(mp, mp + 1)


def find_compact(header: FileHeader) -> tuple[str, int] | None:
    """Return the layer and number of an expert with a compact header, else None."""
    return find_expert(header.layer.prefix) if isinstance(header.layer, PrefixedTensors) else None


def _list_names(header: FileHeader) -> Iterable[str]:
    """Return the names in an expert's file, or the prefix if the header is compact."""
    compact = find_compact(header)
    return header.layer or {} if compact is None else [f"{compact[0]}{compact[1]}"]


def list_holders(save: Save, mp: int, degree: int, *, over_tp: bool) -> list[range]:
    """List a pipeline stage's ranks with the same experts, by expert-parallel rank."""
    tp_rank = None if over_tp else mp % save.tp
    return place_experts(save.dp, degree, save.tp, tp_rank, data_first=bool(save.main.config.get(DATA_FIRST)))


def infer_degrees(save: Save, first: FileHeader, find: Callable[[str, Iterable[Key]], FileHeader | None]) -> FileHeader:
    """Add the parallel degrees that older releases do not store to a model header.

    A pipeline with experts has no layer files; ranks of its first stage hold equal names.
    """
    model = first.model
    if model is None or model.module is None or model.degrees:
        return first
    (ranks, _), tp = count_ranks(model), 1
    while tp < ranks and (tp, 0) in save.names["model"]:
        header = find("model", [(tp, 0)])
        if header is None or header.model is None or set(header.model.module or ()) != set(model.module):
            break
        tp += 1
    return replace(first, model=replace(model, degrees=(ranks // tp, tp)))


def count_tp_shards(save: Save, tp: int) -> int:
    """Return :attr:`ExpertFiles.tp_shards`."""
    model = save.first[0].model
    if tp == 1 or model is None or model.facts.get("placements"):
        return 1
    optim, (_, dp) = save.first[-1].optim, count_ranks(model)
    if optim is not None:
        for degree, count in zip(map(_parse_degree, optim.groups), optim.partition_count, strict=False):
            if degree:
                return 1 if degree * count > dp else tp
    if optims := save.names["expert_optim"]:
        degree = 1 + max(rank for _, rank in optims)
        step = dp * tp // degree if save.first[0].config.get(DATA_FIRST) else 1
        return tp if any(mp % tp != rank * step % tp for mp, rank in optims) else 1
    files = save.names["expert"]
    whole = {(layer, expert, mp // tp) for layer, expert, mp in files}
    return tp if len(files) > len(whole) else 1


def name_unwritten_models(save: Save) -> set[str]:
    """Name model state files that are not written: other ranks hold the same experts."""
    header, model = save.first[0], save.first[0].model
    optim = save.first[-1].optim or (model.optim if model else None)
    if model is None or model.facts.get("placements") or optim is None:
        return set()
    (_, tp), (_, dp) = find_degrees(save, model), count_ranks(model)
    degree = max(map(_parse_degree, optim.groups), default=0)
    if not degree or dp * tp % degree or count_tp_shards(save, tp) > 1:
        return set()
    writers = {ranks[0] for ranks in place_experts(dp, degree, tp, data_first=bool(header.config.get(DATA_FIRST)))}
    return {name for mp, name in enumerate(name_model_files(save, header)) if mp % tp not in writers}


def _parse_degree(group: Mapping[str, Any]) -> int:
    """Return the expert-parallel degree in a param group's name, or 0 without one."""
    match = _GROUP.fullmatch(find_label(group))
    return int(match[1]) if match else 0


def name_optims(save: Save, optim: OptimHeader | None, model_ranks: range, tp_shards: int) -> Iterator[str]:
    """Yield the names of experts' ZeRO-0 optimizer files, at least one per rank."""
    degrees = [degree for group in (optim.groups if optim else ()) if (degree := _parse_degree(group))]
    files = save.names["expert_optim"]
    count = max(degrees, default=max((rank for mp, rank in files if mp in model_ranks), default=-1) + 1)
    for rank in range(count):
        holders = [mp for mp in model_ranks if tp_shards > 1 or (mp, rank) in files]
        for mp in holders or [model_ranks[rank % len(model_ranks)]]:
            yield ROLES["expert_optim"].make_name(mp, rank)


def name_experts_files(save: Save, layers: Sequence[int], model_ranks: range, tp_shards: int) -> Iterator[str]:
    """Yield the expected names of experts' files.

    Args:
        layers: number of experts by layer of a pipeline stage.
        model_ranks: of the stage; an expert that is not sharded has a file of at least one of them.
    """
    files = save.names["expert"]
    keys = [(layer, expert) for layer, experts in enumerate(layers) for expert in range(experts)]
    if files and all(layer == NO_LAYER for layer, _, _ in files):
        keys = [(NO_LAYER, expert) for expert in range(max(layers, default=0))]
    for key in keys:
        holders = [mp for mp in model_ranks if tp_shards > 1 or (*key, mp) in files]
        for mp in holders or model_ranks[:1]:
            yield ROLES["expert"].make_name(*key, mp)


def complete_header(header: FileHeader, states: FileHeader | None = None) -> FileHeader:
    """Add the ds_config and optimizer to model states from which DeepSpeed omits them.

    DeepSpeed up to 0.19.2 omits them if the model has experts (engine.py ``_save_moe_checkpoint``). They are taken
    from ``states``, a header of optimizer states.
    """
    model = header.model
    if states is None or header.config or model is None or not model.facts.get("experts"):
        return header
    optim = model.optim if states.config else model.optim or states.optim  # at ZeRO stage 0 no file has the ds_config
    return replace(header, config=states.config, model=replace(model, optim=optim))


def align_save(save: Save) -> None:
    """Reorder the param groups of all ranks of a pipeline stage as on its first rank.

    DeepSpeed creates groups of several expert-parallel degrees in the order of a set of strings, which differs between
    processes; groups of one degree keep their order (``moe/utils.py``).
    """
    for mp, shards in enumerate(save.shards):
        stage = save.shards[mp // save.tp * save.tp]
        first = stage[0].optim if stage else None
        if not (shards and first):
            continue
        model, order = save.models[mp][0].model if save.models[mp] else None, find_order(shards[0].optim, first)
        if model and model.param_shapes and len(order) == len(model.param_shapes):
            shapes = tuple(model.param_shapes[group] for group in order)
            save.models[mp][0] = replace(save.models[mp][0], model=replace(model, param_shapes=shapes))
        save.shards[mp] = [align_groups(header, first) for header in shards]


def find_order(optim: OptimHeader | None, first: OptimHeader) -> list[int]:
    """Match a rank's param groups to the order of ``first`` by partition counts.

    Return an empty list if the order is equal or the number of groups differs.
    """
    if optim is None or optim.partition_count == first.partition_count:
        return []
    counts = (header.partition_count for header in (optim, first))
    order, first_order = (sorted(range(len(values)), key=values.__getitem__) for values in counts)
    return [order[first_order.index(group)] for group in range(len(order))] if len(order) == len(first_order) else []


def align_groups(header: FileHeader, first: OptimHeader) -> FileHeader:
    """Reorder a header's param groups as in ``first``."""
    optim, order = header.optim, find_order(header.optim, first)
    if optim is None or not order:
        return header
    fields = ("masters", "tensors", "groups", "slices", "partition_count", "paddings", "alignment")
    rows = {field: getattr(optim, field) for field in fields}
    moved: dict[str, Any] = {
        field: tuple(row[group] for group in order) for field, row in rows.items() if len(row) == len(order)
    }
    return replace(header, optim=replace(optim, **moved))
