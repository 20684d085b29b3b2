"""The files of one save: their expected names, and their headers by role."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ...errors import CheckpointError
from ...extensions.registry import Extension
from ...model import Use
from ...model.experts import DATA_FIRST, place_experts
from ..places import FileTable
from .files import NO_AXIS, NO_LAYER, ROLES, Key, read_optim_ranks, sort_names
from .headers import FileHeader, ModelHeader, OptimHeader

_GROUP = re.compile(r"ep_size_([1-9]\d{0,3})", re.ASCII)


@dataclass(slots=True)
class Save:
    """The files of one save by role: :meth:`of` sets their names, :func:`arrange_headers` the headers that were read.

    Model-parallel rank: ``pp_rank * tp + tp_rank``.

    Attributes:
        where: all files of the folder, their places, and the ranks that can read each.
        names: role → key → file in the folder (:data:`~.files.ROLES`).
        copies: duplicate file → the file with equal content that is read instead (:func:`~.files.choose_copies`).
        sp: sequence-parallel degree if files are named by sequence-parallel rank (ALST before DeepSpeed 0.19.8).
        first: headers of the first rank's model states and, if any, optimizer states; empty until they are read.
        expected: names of all files that the save must have.
        extensions: special cases of this save; empty until ``first`` is read.
        pp, tp: pipeline and tensor parallel degrees.
        dp: number of data-parallel ranks, read from the model states.
        models: model states by model-parallel rank; under ZeRO 3 one per data-parallel rank.
        shards: optimizer states by model- and data-parallel rank; empty lists at ZeRO stage 0.
        layers: layer files of a pipeline by tensor-parallel rank and layer.
        experts, expert_optims: files of these roles by key.
        expert_tp_shards: shards of an expert's parameter: ``tp`` with expert tensor parallelism, else 1 (experts are
            then distributed over all ranks of a pipeline stage).
        swaps: swap files by (optimizer file, sub-group) and state.
    """

    where: FileTable
    names: dict[str, dict[Key, str]]
    copies: dict[str, str] = field(default_factory=dict)
    sp: int = 1
    first: list[FileHeader] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    extensions: list[Extension] = field(default_factory=list)
    pp: int = 1
    tp: int = 1
    dp: int = 1
    models: list[list[FileHeader]] = field(default_factory=list)
    shards: list[list[FileHeader]] = field(default_factory=list)
    layers: list[dict[int, FileHeader]] = field(default_factory=list)
    experts: dict[Key, FileHeader] = field(default_factory=dict)
    expert_optims: dict[Key, FileHeader] = field(default_factory=dict)
    expert_tp_shards: int = 1
    swaps: dict[tuple[str, int], dict[str, FileHeader]] = field(default_factory=dict)

    @classmethod
    def of(cls, where: FileTable) -> Save:
        """Sort the files of a folder by role.

        Raises:
            UnsupportedError: the kind of checkpoint is not supported.
            CheckpointError: the folder holds files of two saves, or no model states.
        """
        save = cls(where, *sort_names(where.folder, where.entries))
        save._merge_sequence_ranks()
        return save

    def _merge_sequence_ranks(self) -> None:
        """Assign files that are named by sequence-parallel rank to the only model-parallel rank.

        Before 0.19.8 DeepSpeed uses ALST's sequence-parallel rank as the model-parallel rank in file names: rank 3 of
        sequence groups of 2 writes ``zero_pp_rank_3_mp_rank_01_optim_states.pt``. With tensor or pipeline parallelism
        each data-parallel rank has a file per model-parallel rank instead.
        """
        optims, models = self.names["optim"], self.names["model_zero3"]
        by_rank = {(mp, rank): prefix for prefix, mp, rank in optims}
        sp = max((mp for mp, _ in (*by_rank, *models)), default=0) + 1
        if sp == 1 or len(self.names["model"]) > 1 or len(by_rank) < len(optims):
            return
        ranks = [keys for keys in (by_rank.keys(), models.keys()) if keys]
        if all(len(keys) % sp == 0 and keys == {(rank % sp, rank) for rank in range(len(keys))} for keys in ranks):
            self.sp = sp
            self.names["optim"] = {(prefix, 0, rank): name for (prefix, _, rank), name in optims.items()}
            self.names["model_zero3"] = {(0, rank): name for (_, rank), name in models.items()}

    @property
    def folder(self) -> str:
        """Path of the save's folder in the first of its places."""
        return self.where.folder

    def name(self, role: str, *key: Any) -> str:
        """Return the name of a file in the folder, or if it is missing, the name that DeepSpeed gives it."""
        return self.names[role].get(key) or ROLES[role].make_name(*key)

    def path(self, file: FileHeader | str) -> str:
        """Return the full path of a file."""
        return self.where.path(file if isinstance(file, str) else file.name)

    @property
    def main(self) -> FileHeader:
        """Header of the first rank's model states, from which values that are equal on all ranks are read."""
        return self.models[0][0]

    @property
    def zero(self) -> dict[str, Any]:
        """The ds_config's ``zero_optimization``."""
        return self.main.config.get("zero_optimization") or {}

    @property
    def headers(self) -> list[FileHeader]:
        """All headers: model states, optimizer states, layers, experts, swap files."""
        layers, swaps = (files.values() for files in self.layers), (files.values() for files in self.swaps.values())
        files = [*chain(*self.models), *chain(*self.shards), *chain(*layers)]
        files += [*self.experts.values(), *self.expert_optims.values(), *chain(*swaps)]
        return files

    @property
    def experts_over_tp(self) -> bool:
        """Whether whole experts are distributed over the tensor-parallel ranks too."""
        return self.expert_tp_shards < self.tp

    @property
    def is_pipeline(self) -> bool:
        """Whether the model's tensors are in layer files."""
        return self.main.model is not None and self.main.model.module is None

    @property
    def is_sharded(self) -> bool:
        """Whether each data-parallel rank has its own model states (ZeRO 3), which contain no parameter data."""
        return read_optim_ranks(self.main.name) is not None

    @property
    def first_models(self) -> list[ModelHeader]:
        """Model headers of data-parallel rank 0, by model-parallel rank."""
        return [self.model(mp) for mp in range(len(self.models))]

    def count_accumulation_steps(self) -> int:
        """Return the number of gradient accumulation steps as DeepSpeed derives it from the ds_config; 1 if unknown."""
        sizes = self.model(0).batch
        if steps := sizes.get("gradient_accumulation_steps"):
            return int(steps)
        micro = sizes.get("train_micro_batch_size_per_gpu")
        return sizes.get("train_batch_size", 0) // (micro * self.dp) or 1 if micro else 1

    def model(self, mp: int) -> ModelHeader:
        """Return the model header of data-parallel rank 0 for a model-parallel rank.

        Raises:
            CheckpointError: its file holds no model states.
        """
        model = self.models[mp][0].model
        if model is None:
            raise CheckpointError("holds no model states.", path=self.path(self.models[mp][0]))
        return model

    def shard(self, stage: int, rank: int) -> FileHeader:
        """Return the optimizer states of rank ``dp_rank * tp + tp_rank`` of a pipeline stage."""
        return self.shards[stage * self.tp + rank % self.tp][rank // self.tp]

    def list_expert_ranks(self, mp: int) -> range:
        """Return the model-parallel ranks whose files hold the experts of a model-parallel rank."""
        first = mp // self.tp * self.tp
        return range(first, first + self.tp) if self.experts_over_tp else range(mp, mp + 1)

    def optim(self, mp: int) -> OptimHeader:
        """Return the optimizer header in a model-parallel rank's model states (ZeRO stage 0).

        Raises:
            CheckpointError: they hold none.
        """
        optim = self.model(mp).optim
        if optim is None:
            raise CheckpointError("holds no optimizer state.", path=self.path(self.models[mp][0]))
        return optim

    def list_globals(self) -> dict[Use, str]:
        """Map each class and function that the files' pickles name to the path of the first such file."""
        paths: dict[Use, str] = {}
        for header in self.headers:
            for use in header.globals:
                paths.setdefault(use, self.path(header))
        return paths


def list_holders(save: Save, mp: int, degree: int, *, over_tp: bool) -> list[range]:
    """List for each expert-parallel rank the ranks of a pipeline stage that hold the same parameters.

    Args:
        degree: expert-parallel degree; 1 for other parameters.
        over_tp: experts are distributed over the tensor-parallel ranks too.
    """
    tp_rank = None if over_tp else mp % save.tp
    return place_experts(save.dp, degree, save.tp, tp_rank, data_first=bool(save.main.config.get(DATA_FIRST)))


def count_ranks(model: ModelHeader) -> tuple[int, int]:
    """Return the (model-parallel, data-parallel) ranks of a save, without the replicas of MiCS."""
    return model.counters.get("mp_world_size") or 1, model.shard_size or model.counters.get("dp_world_size") or 1


def find_degrees(save: Save, model: ModelHeader) -> tuple[int, int]:
    """Return the (pipeline, tensor) parallel degrees of a save; older releases store only their product.

    Raises:
        CheckpointError: the layer files of a pipeline do not fit the number of ranks.
    """
    ranks, _ = count_ranks(model)
    if model.degrees and model.degrees[0] * model.degrees[1] == ranks:
        return model.degrees
    if model.module is not None:
        return 1, ranks
    tp = len({max(tp, 0) for _, tp in save.names["layer"]}) or 1
    if ranks % tp:
        raise CheckpointError(
            f"saved by {ranks} model-parallel ranks, its layer files are of {tp} tensor-parallel "
            "ones. The folder lacks files or mixes two saves.",
            path=save.folder,
        )
    return ranks // tp, tp


def name_expected_files(save: Save, stages: Sequence[FileHeader] = ()) -> list[str]:
    """Return the names of all files that a save must have, determined from the headers in ``save.first``.

    Args:
        stages: model states of the later pipeline stages with experts, since each lists only its own experts.

    Raises:
        CheckpointError: a pipeline has no layer files, or those of two saves.
    """
    first, model = save.first, save.first[0].model
    if model is None:
        return []
    pp, tp = find_degrees(save, model)
    _, dp = count_ranks(model)
    names = name_model_files(save, first[0])
    if len(first) > 1:
        prefix = next(prefix for (prefix, _, _), name in save.names["optim"].items() if name == first[1].name)
        names += name_shards(save, prefix, pp * tp, dp)
    if model.module is None:
        names += _name_layers(save, tp)
    if model.experts and read_optim_ranks(first[0].name) is None:  # ZeRO 3 has them in the model states
        tp_shards = count_expert_tp_shards(save, tp)
        for stage, header in enumerate([first[0], *stages]):
            places = range(stage * tp, (stage + 1) * tp)
            names += _name_experts(save, header.model.experts if header.model else (), places, tp_shards)
            if header.model and (len(first) == 1 or header.model.optim):
                names += _name_expert_optims(save, header.model.optim, places, tp_shards)
    return names


def name_shards(save: Save, prefix: str, mp: int, dp: int) -> list[str]:
    """Return the expected names of ZeRO's optimizer states of all ranks."""
    return [save.name("optim", prefix, model, rank) for model in range(mp) for rank in range(dp)]


def count_expert_tp_shards(save: Save, tp: int) -> int:
    """Return the number of shards of an expert's parameter: ``tp`` with expert tensor parallelism, else 1.

    Without expert tensor parallelism, experts are also distributed over the tensor-parallel ranks, and each is saved
    once.
    """
    model = save.first[0].model
    if tp == 1 or model is None or model.placements:
        return 1
    optim = save.first[-1].optim
    if optim is not None:
        _, dp = count_ranks(model)
        for degree, count in zip(map(_parse_expert_degree, optim.groups), optim.partition_count, strict=False):
            if degree:
                return 1 if degree * count > dp else tp
    if save.names["expert_optim"]:
        return tp if any(mp % tp != rank % tp for mp, rank in save.names["expert_optim"]) else 1
    files = save.names["expert"]
    whole = {(layer, expert, mp // tp) for layer, expert, mp in files}
    return tp if len(files) > len(whole) else 1


def name_unwritten_models(save: Save) -> set[str]:
    """Return the names of model state files that are not written because an earlier rank holds the same experts."""
    header, model = save.first[0], save.first[0].model
    optim = save.first[-1].optim or (model.optim if model else None)
    if model is None or model.placements or optim is None:
        return set()
    (_, tp), (_, dp) = find_degrees(save, model), count_ranks(model)
    degree = max(map(_parse_expert_degree, optim.groups), default=0)
    if not degree or dp * tp % degree or count_expert_tp_shards(save, tp) > 1:
        return set()
    writers = {ranks[0] for ranks in place_experts(dp, degree, tp, data_first=bool(header.config.get(DATA_FIRST)))}
    return {name for mp, name in enumerate(name_model_files(save, header)) if mp % tp not in writers}


def _parse_expert_degree(group: Mapping[str, Any]) -> int:
    """Parse the expert-parallel degree from the name of a param group; return 0 if it has none."""
    match = _GROUP.fullmatch(str(group.get("name"))) if group.get("moe") else None
    return int(match[1]) if match else 0


def _name_expert_optims(save: Save, optim: OptimHeader | None, places: range, tp_shards: int) -> Iterator[str]:
    """Yield the expected names of experts' optimizer files at ZeRO stage 0, at least one per expert-parallel rank."""
    degrees = [degree for group in (optim.groups if optim else ()) if (degree := _parse_expert_degree(group))]
    files = save.names["expert_optim"]
    count = max(degrees, default=max((rank for mp, rank in files if mp in places), default=-1) + 1)
    for rank in range(count):
        holders = [mp for mp in places if tp_shards > 1 or (mp, rank) in files]
        for mp in holders or [places[rank % len(places)]]:
            yield ROLES["expert_optim"].make_name(mp, rank)


def name_model_files(save: Save, first: FileHeader) -> list[str]:
    """Return the expected names of the model states of all ranks; ``first`` is the header of the first rank's."""
    if first.model is None:
        return []
    ranks, dp = count_ranks(first.model)
    if read_optim_ranks(first.name) is None:
        return [save.name("model", mp, 0) for mp in range(ranks)]
    return [save.name("model_zero3", mp, rank) for mp in range(ranks) for rank in range(dp)]


def _name_layers(save: Save, tp: int) -> list[str]:
    """Return the expected names of layer files.

    Layers without parameters and buffers have no file, so a layer that all ranks lack is not detected here.
    """
    files = save.names["layer"]
    plain = {layer for layer, rank in files if rank == NO_AXIS}
    numbered = {layer for layer, rank in files if 0 <= rank < tp}
    if not plain and not numbered:
        raise CheckpointError(
            "a pipeline's model states without any layer_*-model_states.pt. Copy the whole folder.", path=save.folder
        )
    if plain and numbered and tp == 1:
        raise CheckpointError(
            f"holds the layer files of two saves ({files[min(plain), NO_AXIS]} and "
            f"{files[min(numbered), 0]} do not belong together). Remove the older save's files.",
            path=save.folder,
        )
    if tp == 1 and plain:
        return [files[layer, NO_AXIS] for layer in sorted(plain)]
    return [save.name("layer", layer, rank) for layer in sorted(numbered) for rank in range(tp)]


def _name_experts(save: Save, layers: Sequence[int], places: range, tp_shards: int) -> Iterator[str]:
    """Yield the expected names of experts' files; older releases write one file per expert for all layers.

    Args:
        layers: number of experts by layer of a pipeline stage.
        places: the stage's model-parallel ranks; an expert that is not sharded has a file of at least one of them.
    """
    files = save.names["expert"]
    keys = [(layer, expert) for layer, experts in enumerate(layers) for expert in range(experts)]
    if files and all(layer == NO_LAYER for layer, _, _ in files):
        keys = [(NO_LAYER, expert) for expert in range(max(layers, default=0))]
    for key in keys:
        holders = [mp for mp in places if tp_shards > 1 or (*key, mp) in files]
        for mp in holders or places[:1]:
            yield ROLES["expert"].make_name(*key, mp)


def arrange_headers(save: Save, headers: Sequence[FileHeader]) -> None:
    """Assign headers to the fields of a save by role; the first header must be the first rank's model states.

    Param groups are reordered (:func:`align_save`) and omitted values added (:func:`complete_header`).

    Raises:
        CheckpointError: the first file holds no model states.
    """
    model = headers[0].model
    if model is None:
        raise CheckpointError("holds no model states.", path=save.path(headers[0]))
    by_name = {header.name: header for header in headers}

    def list_read(role: str) -> list[tuple[Key, FileHeader]]:
        return [(key, by_name[name]) for key, name in sorted(save.names[role].items()) if name in by_name]

    save.pp, save.tp = find_degrees(save, model)
    _, save.dp = count_ranks(model)
    ranks = range(save.pp * save.tp)
    save.models, save.shards, save.layers = [[] for _ in ranks], [[] for _ in ranks], [{} for _ in range(save.tp)]
    for (mp, _), header in [*list_read("model"), *list_read("model_zero3")]:
        save.models[mp].append(header)
    for (_, mp, _), header in list_read("optim"):
        save.shards[mp].append(header)
    for (layer, rank), header in list_read("layer"):
        save.layers[max(rank, 0)][layer] = header
    align_save(save)
    save.experts, save.expert_optims = dict(list_read("expert")), dict(list_read("expert_optim"))
    for mp, models in enumerate(save.models):
        beside = [*save.shards[mp], *(header for (rank, _), header in save.expert_optims.items() if rank == mp)]
        models[:1] = [complete_header(header, *beside[:1]) for header in models[:1]]
    save.first = save.first or [headers[0]]
    save.expert_tp_shards = count_expert_tp_shards(save, save.tp)


def complete_header(header: FileHeader, beside: FileHeader | None = None) -> FileHeader:
    """Return a header of model states with the ds_config and the optimizer, if DeepSpeed has omitted them.

    DeepSpeed up to 0.19.2 omits them if the model has experts (engine.py ``_save_moe_checkpoint``). They are taken
    from ``beside``, a header of optimizer states.
    """
    model = header.model
    if beside is None or header.config or model is None or not model.experts:
        return header
    optim = model.optim if beside.config else model.optim or beside.optim  # at ZeRO stage 0 no file has the ds_config
    return replace(header, config=beside.config, model=replace(model, optim=optim))


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
    """Return the rank's indices of the param groups in the order of ``first``, matched by their number of partitions.

    Return an empty list if the order is equal or the number of groups differs.
    """
    if optim is None or optim.partition_count == first.partition_count:
        return []
    mine, wanted = (_sort_indices(header.partition_count) for header in (optim, first))
    return [mine[wanted.index(group)] for group in range(len(mine))] if len(mine) == len(wanted) else []


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


def _sort_indices(counts: Sequence[int]) -> list[int]:
    """Return the indices of param groups sorted by their number of partitions."""
    return sorted(range(len(counts)), key=counts.__getitem__)


def describe_offload(zero: Mapping[str, Any]) -> str:
    """Return the devices of optimizer and parameter offload in a ds_config as ``optimizer/param``.

    Deprecated keys are read too. With SuperOffload or ZenFlow their name replaces the optimizer's device.
    """
    devices = []
    for section, deprecated in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        options = zero.get(section)
        device = options.get("device") if isinstance(options, dict) else None
        device = device or ("cpu" if zero.get(deprecated) else "none")
        devices.append("superoffload" if isinstance(options, dict) and options.get("super_offload") else str(device))
    return "/".join(["zenflow" if zero.get("zenflow") else devices[0], devices[1]])
