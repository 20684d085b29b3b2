"""The files of one save: their expected names, and their headers by role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ...errors import CheckpointError
from ...extensions.registry import SaveExtension, find_for_save
from ...model import Use
from ..places import FileTable
from .files import ROLES, Key, read_optim_ranks, sort_names
from .headers import FileHeader, ModelHeader, OptimHeader


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
        expected: names of all files that the save must have, and the reason if DeepSpeed may not have written one.
        extensions: special cases of this save; empty until ``first`` is read.
        pp, tp: pipeline and tensor parallel degrees.
        dp: number of data-parallel ranks, read from the model states.
        models: model states by model-parallel rank; under ZeRO 3 one per data-parallel rank.
        shards: optimizer states by model- and data-parallel rank; empty lists at ZeRO stage 0.
        layers: layer files of a pipeline by tensor-parallel rank and layer.
        further: headers of the extensions' files by role and key, which for optimizer states begins with the
            model-parallel rank.
        swaps: swap files by (optimizer file, sub-group) and state.
    """

    where: FileTable
    names: dict[str, dict[Key, str]]
    copies: dict[str, str] = field(default_factory=dict)
    sp: int = 1
    first: list[FileHeader] = field(default_factory=list)
    expected: dict[str, str] = field(default_factory=dict)
    extensions: list[SaveExtension] = field(default_factory=list)
    pp: int = 1
    tp: int = 1
    dp: int = 1
    models: list[list[FileHeader]] = field(default_factory=list)
    shards: list[list[FileHeader]] = field(default_factory=list)
    layers: list[dict[int, FileHeader]] = field(default_factory=list)
    further: dict[str, dict[Key, FileHeader]] = field(default_factory=dict)
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
        """All headers: model states, optimizer states, layers, files of extensions, swap files."""
        layers, swaps = (files.values() for files in self.layers), (files.values() for files in self.swaps.values())
        files = [*chain(*self.models), *chain(*self.shards), *chain(*layers)]
        further = (files.values() for files in self.further.values())
        files += [*chain(*further), *chain(*swaps)]
        return files

    def list_ranks(self, mp: int) -> range:
        """Return the ranks of a pipeline stage (``dp_rank * tp + tp_rank``) that hold a model-parallel rank."""
        return range(mp % self.tp, self.dp * self.tp, self.tp)

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


def name_expected_files(save: Save) -> dict[str, str]:
    """Return the content of ``save.expected``, determined from the headers in ``save.first``.

    Raises:
        CheckpointError: a pipeline has no layer files, or those of two saves.
    """
    first, model = save.first, save.first[0].model
    if model is None:
        return {}
    pp, tp = find_degrees(save, model)
    _, dp = count_ranks(model)
    names = name_model_files(save, first[0])
    if len(first) > 1:
        prefix = next(prefix for (prefix, _, _), name in save.names["optim"].items() if name == first[1].name)
        names += name_shards(save, prefix, pp * tp, dp)
    expected = dict.fromkeys(names, "")
    for extension in save.extensions:
        expected |= extension.name_files(save)
    return expected


def name_shards(save: Save, prefix: str, mp: int, dp: int) -> list[str]:
    """Return the expected names of ZeRO's optimizer states of all ranks."""
    return [save.name("optim", prefix, model, rank) for model in range(mp) for rank in range(dp)]


def name_model_files(save: Save, first: FileHeader) -> list[str]:
    """Return the expected names of the model states of all ranks; ``first`` is the header of the first rank's."""
    if first.model is None:
        return []
    ranks, dp = count_ranks(first.model)
    if read_optim_ranks(first.name) is None:
        return [save.name("model", mp, 0) for mp in range(ranks)]
    return [save.name("model_zero3", mp, rank) for mp in range(ranks) for rank in range(dp)]


def arrange_headers(save: Save, headers: Sequence[FileHeader]) -> list[Any]:
    """Assign headers to the fields of a save by role; the first header must be the first rank's model states.

    Returns:
        The extensions' findings about files without header.

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
    save.first = save.first or [headers[0]]
    save.extensions = save.extensions or find_for_save(save)
    return list(chain.from_iterable(extension.arrange(save, by_name) for extension in save.extensions))


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
