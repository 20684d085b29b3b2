"""Files of one save: expected names, headers by role, and files of another save."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ...engine_state import KEY
from ...errors import CheckpointError
from ...extensions.registry import REGISTRY, SaveExtension, find_for_save
from ...model.index import Use
from ...model.topology import find_label
from ...torchsave.objects import PickledObject, has_more_parts
from ..findings import FAULT, WARNING, Finding
from ..locations import FileTable
from .files import ROLES, Key, read_shard_ranks, sort_names
from .headers import FileHeader, ModelHeader, OptimHeader


@dataclass(slots=True)
class Save:
    """The files of one save by role.

    :meth:`of` sets their names, :func:`arrange_headers` the headers that were read. Model-parallel rank: ``pp_rank * tp
    + tp_rank``.

    Attributes:
        where: all files of the folder, their places, and the ranks that can read each.
        names: role → key → file in the folder (:data:`~.files.ROLES`).
        copies: duplicate file → the file with equal content that is read instead (:func:`~.files.choose_copies`).
        sp: sequence-parallel degree if files are named by sequence-parallel rank (ALST before DeepSpeed 0.19.8).
        first: headers of the first rank's model states and, if any, optimizer states; empty until they are read.
        expected: names of all files that the save must have, and the reason if DeepSpeed may not have written one.
        extensions: special cases of this save; empty until ``first`` is read.
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
        save = cls(where, *sort_names(where.folder, where.entries))
        save._merge_sequence_ranks()
        return save

    def _merge_sequence_ranks(self) -> None:
        """Set ``sp`` and merge the ranks if file names are by sequence-parallel rank.

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
        if all(keys == {(rank % sp, rank) for rank in range(len(keys))} for keys in ranks):
            self.sp = sp
            self.names["optim"] = {(prefix, 0, rank): name for (prefix, _, rank), name in optims.items()}
            self.names["model_zero3"] = {(0, rank): name for (_, rank), name in models.items()}

    @property
    def folder(self) -> str:
        """Path of the save's folder in the first of its places."""
        return self.where.folder

    def name(self, role: str, *key: Any) -> str:
        """Return a file's name in the folder, or DeepSpeed's name for a missing file."""
        if key in self.names[role]:
            return self.names[role][key]
        if self.sp > 1 and role in ("optim", "model_zero3"):
            *prefix, _, rank = key
            key = (*prefix, rank % self.sp, rank)
        return ROLES[role].make_name(*key)

    def path(self, file: FileHeader | str) -> str:
        return self.where.path(file if isinstance(file, str) else file.name)

    @property
    def main(self) -> FileHeader:
        """Header of the first rank's model states, for values equal on all ranks."""
        return self.models[0][0]

    @property
    def zero(self) -> dict[str, Any]:
        """Section ``zero_optimization`` of the ds_config, or an empty dict."""
        return self.main.config.get("zero_optimization") or {}

    @property
    def headers(self) -> list[FileHeader]:
        """All headers: model and optimizer states, layers, extensions' files, swap files."""
        by_key: list[Mapping[Any, FileHeader]] = [*self.layers, *self.further.values(), *self.swaps.values()]
        return [*chain(*self.models, *self.shards), *chain.from_iterable(files.values() for files in by_key)]

    def list_ranks(self, mp: int) -> range:
        """Return the ranks ``dp_rank * tp + tp_rank`` that hold a model-parallel rank."""
        return range(mp % self.tp, self.dp * self.tp, self.tp)

    @property
    def is_pipeline(self) -> bool:
        """Whether the model's tensors are in layer files."""
        return self.model(0).module is None

    @property
    def is_sharded(self) -> bool:
        """Whether each data-parallel rank has model states, without parameters (ZeRO 3)."""
        return read_shard_ranks(self.main.name) is not None

    @property
    def first_models(self) -> list[ModelHeader]:
        """Model headers of data-parallel rank 0, by model-parallel rank."""
        return [self.model(mp) for mp in range(len(self.models))]

    def count_accumulation_steps(self) -> int:
        """Return the gradient accumulation steps by the ds_config; 1 if unknown."""
        sizes = self.model(0).batch
        if steps := sizes.get("gradient_accumulation_steps"):
            return int(steps)
        micro = sizes.get("train_micro_batch_size_per_gpu")
        return sizes.get("train_batch_size", 0) // (micro * self.dp) or 1 if micro else 1

    def model(self, mp: int) -> ModelHeader:
        """Return the model header of data-parallel rank 0 for a model-parallel rank."""
        return self.models[mp][0].require_model()

    def shard(self, stage: int, rank: int) -> FileHeader:
        """Return a stage's optimizer states of rank ``dp_rank * tp + tp_rank``."""
        return self.shards[stage * self.tp + rank % self.tp][rank // self.tp]

    def optim(self, mp: int) -> OptimHeader:
        """Return the optimizer header in a model-parallel rank's model states (stage 0)."""
        optim = self.model(mp).optim
        if optim is None:
            raise CheckpointError("holds no optimizer state.", path=self.path(self.models[mp][0]))
        return optim

    def list_globals(self) -> dict[Use, str]:
        """Map the classes and functions in the files' pickles to the first file's path."""
        paths: dict[Use, str] = {}
        for header in self.headers:
            for use in header.globals:
                paths.setdefault(use, self.path(header))
        return paths


def count_ranks(model: ModelHeader) -> tuple[int, int]:
    """Return (model-parallel, data-parallel) ranks of a save, without MiCS replicas."""
    return model.counters.get("mp_world_size") or 1, model.shard_size or model.counters.get("dp_world_size") or 1


def find_degrees(save: Save, model: ModelHeader) -> tuple[int, int]:
    """Return the (pipeline, tensor) parallel degrees of a save."""
    ranks, _ = count_ranks(model)
    if model.degrees and model.degrees[0] * model.degrees[1] == ranks:
        return model.degrees
    if model.module is not None:  # older releases store only the product of the degrees
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
    """Return the content of ``save.expected``, from the headers in ``save.first``."""
    first, model = save.first, save.first[0].require_model()
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
    """Return the expected names of all model states, given the first one's header."""
    ranks, dp = count_ranks(first.require_model())
    if read_shard_ranks(first.name) is None:
        return [save.name("model", mp, 0) for mp in range(ranks)]
    return [save.name("model_zero3", mp, rank) for mp in range(ranks) for rank in range(dp)]


def arrange_headers(save: Save, headers: Sequence[FileHeader]) -> list[Any]:
    """Assign headers to a save's fields by role, and set its degrees and extensions.

    The first header must be of ``save.main``.

    Returns:
        The extensions' findings about files without header.
    """
    model = headers[0].require_model()
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
    """Return the devices of optimizer and parameter offload as ``optimizer/param``.

    Deprecated keys are read too. With SuperOffload or ZenFlow their name replaces the optimizer's device.
    """
    devices = []
    for section, deprecated in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        options = zero.get(section)
        device = options.get("device") if isinstance(options, dict) else None
        device = device or ("cpu" if zero.get(deprecated) else "none")
        devices.append("superoffload" if isinstance(options, dict) and options.get("super_offload") else str(device))
    return "/".join(["zenflow" if zero.get("zenflow") else devices[0], devices[1]])


# -- files of another save --------------------------------------------------------------------------------------------
#
# Neither DeepSpeed nor ``torch.save`` gives a save an identity: ``.data/serialization_id`` is a hash of the records'
# names and checksums, and zip entries have no times. So all values that the ranks of a launch write alike are compared,
# and the file that differs from most is named.

DEEPSPEEDS = frozenset(
    [
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "ds_config"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_version"),
        *("checkpoint_parallel_dimensions", "autotp_config"),
        *(key for row in REGISTRY for key in row.keys),
    ]
)
"""Keys of a model-states file that DeepSpeed writes (engine.py ``_common_checkpoint_state`` and similar functions)."""

_VERSION, _WRITER, _CONFIG = "ds_version", "the form of its archive", "its whole ds_config"
_SCHEDULER, _CLIENT = "its lr_scheduler", "its client state"
"""Marks: values that are equal in all files; the scheduler and the client state are only in model states."""

_EVERYWHERE = ("kind", "stage", "scaler", "clip_grad", "elastic")
"""Fields of optimizer headers that are equal on all ranks."""

_LIMIT = 20_000  # maximum number of values that are hashed; larger trees get no mark

Comparison = tuple[Iterable[FileHeader], str, Callable[[FileHeader], Any], str]
"""A value that is equal in all files of a save: the files, its name, its reader, and the severity of a difference."""


def read_marks(tree: Mapping[Any, Any], writer: str) -> dict[str, str]:
    """Return a file's marks, short hashes of values that all files of a save share.

    ``writer``: form of the archive, which differs between torch releases and DeepSpeed's writers.
    """
    others = (*DEEPSPEEDS, "optimizer_state_dict", KEY)  # the plugin's state differs by rank
    client = {key: value for key, value in tree.items() if key not in others}
    marks = {
        _VERSION: str(tree.get("ds_version") or ""),
        _WRITER: writer,
        _CONFIG: _digest(tree.get("ds_config"), _to_text),
        _SCHEDULER: _digest(tree.get("lr_scheduler"), _to_text),
        # without digits and other values than text, which may differ by rank
        _CLIENT: _digest(client, lambda value: re.sub(r"\d+", "", value) if isinstance(value, str) else ""),
    }
    return {name: mark for name, mark in marks.items() if mark}


def _to_text(value: Any) -> str:
    """Convert plain data to text; integers of any size to hexadecimal digits."""
    return hex(value) if type(value) is int else str(value)


def _digest(value: Any, write: Callable[[Any], str]) -> str:
    """Return a short hash of plain data; empty without data or above the limit."""
    if not value or has_more_parts(value, _LIMIT):
        return ""
    digest, todo = hashlib.sha256(), [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            digest.update(b"{")
            todo += [part for pair in item.items() for part in pair]
        elif isinstance(item, (list, tuple)):
            digest.update(b"[")
            todo += item
        elif isinstance(item, PickledObject):
            digest.update(item.kind.encode("utf-8", "replace"))
        elif item is None or isinstance(item, (bool, int, float, str)):
            digest.update(write(item).encode("utf-8", "replace") + b";")
    return digest.hexdigest()[:16]


def find_foreign_files(save: Save) -> list[Finding]:
    """Return the first finding for each file of another step, run or world size."""
    by_file: dict[str, Finding] = {}
    differences = (_find_outliers(save, *comparison) for comparison in _list_comparisons(save))
    for finding in chain(_check_world_sizes(save), *differences):
        by_file.setdefault(finding.file, finding)
    return list(by_file.values())


def _check_world_sizes(save: Save) -> Iterator[Finding]:
    most, is_uneven = save.dp * save.tp, any(extension.is_uneven for extension in save.extensions)
    for header in chain(*save.shards):
        counts = header.require_optim().partition_count
        if all(count == save.dp for count in counts):
            continue
        if not is_uneven or not all(0 < count <= most and not most % count for count in counts):
            yield _describe_foreign(save, header, f"was saved by {counts} ranks, the model states say {save.dp}")


def list_optim_comparisons(headers: Sequence[FileHeader]) -> Iterator[Comparison]:
    """Yield the comparisons of fields that are equal in optimizer files of all ranks."""
    yield from ((headers, name, _make_optim_reader(name), FAULT) for name in _EVERYWHERE)


def _list_comparisons(save: Save) -> Iterator[Comparison]:
    """Yield comparisons by significance: only a file's first difference is reported."""
    models, shards = list(chain(*save.models)), list(chain(*save.shards))
    files = [*models, *shards]
    yield models, "its step", _read_counters, FAULT
    yield from chain(list_optim_comparisons(models), list_optim_comparisons(shards))
    further = [(mp, header) for files in save.further.values() for (mp, *_), header in files.items() if header.optim]
    if further:
        optims = [header for _, header in further]
        yield from list_optim_comparisons(optims)
        yield optims, "the optimizer's step", read_step, FAULT
        for stage in range(save.pp):
            yield [header for mp, header in further if mp // save.tp == stage], "groups", read_groups, FAULT
    for stage in range(save.pp):
        ranks = slice(stage * save.tp, (stage + 1) * save.tp)
        for same_stage in (save.models[ranks], save.shards[ranks]):
            yield chain(*same_stage), "groups", read_groups, FAULT
    for name in ("partition_count", "alignment"):
        yield from ((headers, name, _make_optim_reader(name), FAULT) for headers in save.shards)
    yield [header for header in files if header.config], "its ds_config", lambda header: header.config, FAULT
    versions, configs = ([header for header in files if mark in header.marks] for mark in (_VERSION, _CONFIG))
    yield versions, _VERSION, _make_mark_reader(_VERSION), FAULT
    yield shards, _WRITER, _make_mark_reader(_WRITER), FAULT  # users sometimes rewrite model states
    yield configs, _CONFIG, _make_mark_reader(_CONFIG), WARNING
    for mark in (_SCHEDULER, _CLIENT):  # a script may save different strings on each rank
        yield models, mark, _make_mark_reader(mark), WARNING


def _read_counters(header: FileHeader) -> dict[str, Any]:
    model = header.require_model()
    return {**model.counters, "degrees": model.degrees}


def _make_mark_reader(mark: str) -> Callable[[FileHeader], Any]:
    return lambda header: header.marks.get(mark, "")


def _make_optim_reader(attribute: str) -> Callable[[FileHeader], Any]:
    def read(header: FileHeader) -> Any:
        optim = header.optim or (header.model.optim if header.model else None)
        return getattr(optim, attribute) if optim else None

    return read


def read_groups(header: FileHeader) -> Any:
    """Return param groups; labeled ones are sorted, as their order differs by rank."""
    groups = _make_optim_reader("groups")(header)
    return groups and tuple(sorted(groups, key=find_label))


def read_step(header: FileHeader) -> Any:
    """Return the highest step of the optimizer's parameters."""
    optim = header.require_optim()
    values = [*(fields.scalars for fields in optim.tensors), *optim.groups]
    return max((fields["step"] for fields in values if isinstance(fields.get("step"), (int, float))), default=None)


def _find_outliers(
    save: Save, headers: Iterable[FileHeader], label: str, read: Callable[[FileHeader], Any], severity: str
) -> Iterator[Finding]:
    """Yield a finding for each header whose value differs from the most frequent one."""
    alike: list[tuple[Any, list[FileHeader]]] = []
    headers = list(headers)
    values = list(map(read, headers))
    if values.count(values[0] if values else None) == len(values):
        return
    for header, value in zip(headers, values, strict=True):
        # NaN is not equal to itself
        same = (group for known, group in alike if known is value or known == value or repr(known) == repr(value))
        if (group := next(same, None)) is None:
            alike.append((value, group := []))
        group.append(header)
    usual, most = max(alike, key=lambda pair: len(pair[1]))
    for value, foreign in alike:
        for header in foreign if foreign is not most else ():
            fault = f"{label} differs from that of {most[0].name} ({_describe_difference(value, usual)})"
            yield _describe_foreign(save, header, fault, severity)


def _describe_foreign(save: Save, header: FileHeader, fault: str, severity: str = FAULT) -> Finding:
    advice = (
        "The file belongs to another step, run or world size; put the right one back."
        if severity == FAULT
        else "It may be of another step, run or world size, unless the ranks saved different ones on purpose."
    )
    return Finding("foreign", header.name, f"{save.path(header)}: {fault}. {advice}", severity)


def _describe_difference(actual: Any, usual: Any) -> str:
    """Describe the difference of two values; for param groups and dicts, by key."""
    if isinstance(actual, tuple) and isinstance(usual, tuple) and len(actual) == len(usual):
        for index, (left, right) in enumerate(zip(actual, usual, strict=True)):
            if repr(left) != repr(right) and isinstance(left, dict) and isinstance(right, dict):
                return f"group {index}: {_describe_difference(left, right)}"
    if isinstance(actual, dict) and isinstance(usual, dict):
        keys = [key for key in {**actual, **usual} if repr(actual.get(key)) != repr(usual.get(key))]
        return ", ".join(f"{key} {actual.get(key)} ≠ {usual.get(key)}" for key in keys)
    return f"{actual} ≠ {usual}"
