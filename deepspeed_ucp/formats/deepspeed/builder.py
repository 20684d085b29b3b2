"""Build atoms from headers: number records, join fragments, verify coverage."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import Any

from ...errors import CheckpointError
from ...model.flat import Cut, FlatBuffer, Shape
from ...model.index import GroupInfo
from ...model.records import FileRef, Record, Records
from ...model.storage import (
    COPY,
    ITEMSIZE,
    MODULE,
    TIED,
    Atom,
    AtomKey,
    Atoms,
    Fragment,
    Fragments,
    ParamKey,
    ParamStorage,
    PartitionedState,
    check_coverage,
    count,
    number_layer,
    strip_compiled,
)
from ...model.topology import number_groups
from .headers import Batches, FileBatch, FileHeader, Piece, TensorStates
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
        """Group parameter names by layer and tied module."""
        tied = defaultdict[str, set[str]](set)
        for head, _, key in (name.removeprefix(TIED).partition(".") for name in names if name.startswith(TIED)):
            tied[head].add(key)
        return cls({number_layer(name) for name in names} - {-1}, tied)

    def find_tied(self, layer: int, tensors: Mapping[str, object]) -> list[str]:
        """Return the tied modules that a layer's file may hold: it has all their keys."""
        return [] if layer in self.untied else [key for key, names in self.tied.items() if names <= tensors.keys()]


@dataclass(slots=True)
class SavedRank:
    """A (pipeline, tensor-parallel) rank of the saved job while its files are added.

    Attributes:
        shapes: local name → local shape of the optimizer's parameters.
        instances: name → number of earlier stages that hold it as well.
        empty: shapes of shards without elements, whose parameters other tensor-parallel ranks' optimizers have.
        flats: its flat buffers, with the module's names.
        unsharded: parameters that tensor-parallel ranks do not cut: they have one shard.
    """

    pp_rank: int = 0
    tp_rank: int = 0
    shapes: dict[str, Shape] = field(default_factory=dict)
    instances: Mapping[str, int] = field(default_factory=dict)
    empty: dict[str, Shape] = field(default_factory=dict)
    flats: tuple[FlatBuffer, ...] = ()
    groups: tuple[GroupInfo, ...] = ()
    unsharded: set[str] = field(default_factory=set)
    _params: dict[str, ParamKey] = field(default_factory=dict)

    def find_tp_shard(self, name: str, tp_shards: int) -> tuple[int, int]:
        """Return (number of the rank's shard of a parameter, number of shards)."""
        return (0, 1) if name in self.unsharded else (self.tp_rank, tp_shards)

    def param(self, name: str) -> ParamKey:
        """Return the key of this stage's instance of a parameter."""
        key = self._params.get(name)
        if key is None:
            key = self._params[name] = ParamKey(name, self.instances.get(name, 0))
        return key


def create_ranks(save: Save, names: Sequence[Sequence[str]]) -> tuple[list[SavedRank], dict[str, int]]:
    """Create all model-parallel ranks, and number instances of shared parameters.

    Args:
        names: local names of the parameters of each model-parallel rank's optimizer.

    Returns:
        The ranks, and the number of stages of each parameter that several pipeline stages hold.
    """
    stages = [dict.fromkeys(chain(*names[first : first + save.tp])) for first in range(0, len(names), save.tp)]
    holders = Counter[str]()
    ranks = []
    for pp, stage_names in enumerate(stages):
        instances = {name: holders[name] for name in stage_names if name in holders}
        holders.update(stage_names.keys())
        for tp in range(save.tp):
            lacking = stage_names.keys() - set(names[pp * save.tp + tp])
            empty = _find_empty(save, pp * save.tp + tp, lacking) if lacking else {}
            ranks.append(SavedRank(pp, tp, instances=instances, empty=empty))
    return ranks, {name: stages for name, stages in holders.items() if stages > 1}


def _find_empty(save: Save, mp: int, names: Collection[str]) -> dict[str, Shape]:
    """Return the local shapes of a rank's tensors with these names and no elements."""
    model = save.model(mp)
    shapes = dict(model.frozen_shapes)
    for layer, header in save.layers[mp % save.tp].items():
        shapes.update({f"{layer}.{key}": piece.shape for key, piece in (header.layer or {}).items()})
    if model.module and not (model.param_shapes is not None and save.is_sharded):
        shapes.update({name: piece.shape for name, piece in model.module.items()})
    return {name: shape for name, shape in shapes.items() if name in names and not count(shape)}


def fill_param_shapes(save: Save) -> None:
    """Set missing ``param_shapes`` of model states in place.

    A pipeline with BF16_Optimizer and without ZeRO saves none. The optimizer files' ``param_slice_mappings`` have the
    names in flat order and the element counts; the model's tensors have the shapes.
    """
    for mp, models in enumerate(save.models):
        model = save.model(mp)
        if model.param_shapes is None:
            groups_held = max((len(shard.require_optim().slices) for shard in save.shards[mp]), default=0)
            groups = tuple(_derive_group(save, mp, group) for group in range(groups_held))
            models[0] = replace(models[0], model=replace(model, param_shapes=groups, optim=None))


def _derive_group(save: Save, mp: int, group: int) -> tuple[tuple[str, Shape], ...]:
    """Return (name, shape) of a param group's parameters in flat order."""
    shards = save.shards[mp]
    for extension in save.extensions:
        shards = extension.list_group_files(save, mp, group) or shards
    numels: dict[str, int] = {}
    for slices in (shard.require_optim().slices for shard in shards):
        for name, _, numel in sorted(slices[group] if group < len(slices) else (), key=lambda entry: entry[1]):
            numels[name] = numels.get(name, 0) + numel
    return tuple((name, _find_shape(save, mp, name, numels)) for name in numels)


def _find_shape(save: Save, mp: int, raw: str, numels: Mapping[str, int]) -> Shape:
    """Return a parameter's local shape: the only one with its number of elements."""
    name = strip_compiled(raw)
    module = save.model(mp).module
    if module is None:
        shapes = _find_layer_shapes(save.layers[mp % save.tp], name, set(map(strip_compiled, numels)))
    else:
        shapes = {module[name].shape} if name in module else set()
    fitting = {shape for shape in shapes if count(shape) == numels[raw]}
    for extension in save.extensions if not fitting else ():
        fitting = extension.find_shapes(save, mp, name)
    if len(fitting) == 1:
        return fitting.pop()
    fault = "differs between the model's files" if fitting else "is in none of the model's files"
    raise CheckpointError(
        f"the shape of {raw} ({numels[raw]} elements) {fault}. The "
        "folder lacks a file or mixes files of several saves.",
        path=save.folder,
    )


def _find_layer_shapes(layers: Mapping[int, FileHeader], name: str, names: set[str]) -> set[Shape]:
    """Return a parameter's shapes in layer files; ``names`` identify tied modules."""
    head, _, key = name.removeprefix(TIED).partition(".")
    tensors = {layer: header.layer or {} for layer, header in layers.items()}
    if name.startswith(TIED):
        known = LayerNames.of(names)
        fitting = [layer for layer in tensors if head in known.find_tied(layer, tensors[layer])]
    else:
        fitting = [layer for layer in tensors if str(layer) == head]
    return {tensors[layer][key].shape for layer in fitting if key in tensors[layer]}


def join_groups(save: Save, ranks: Sequence[SavedRank]) -> tuple[GroupInfo, ...]:
    """Return the whole model's param groups, joined over all model-parallel ranks."""
    stages = [ranks[first : first + save.tp] for first in range(0, len(ranks), save.tp)]
    numbers = number_groups([[group.hyper for group in stage_ranks[0].groups] for stage_ranks in stages])
    joined: dict[int, tuple[dict[ParamKey, None], dict[str, Any]]] = {}
    for stage_ranks, numbered in zip(stages, numbers, strict=True):
        for index, number in enumerate(numbered):
            members, _ = joined.setdefault(number, ({}, stage_ranks[0].groups[index].hyper))
            # A tensor-parallel rank may lack parameters that are empty there.
            members.update(dict.fromkeys(member for rank in stage_ranks for member in rank.groups[index].members))
    return tuple(GroupInfo(tuple(members), hyper) for members, hyper in joined.values())


def check_steps(save: Save, ranks: Sequence[SavedRank], scalars: Mapping[ParamKey, Mapping[str, Any]]) -> None:
    """Refuse a pipeline stage without a step in common with the first one's."""
    first: set[Any] = set()
    for mp, rank in list(enumerate(ranks))[:: save.tp] if save.pp > 1 else ():
        members = (member for group in rank.groups for member in group.members)
        steps = {scalars[member]["step"] for member in members if "step" in scalars.get(member, {})}
        first = first or steps
        if steps and steps.isdisjoint(first):
            files = save.shards[mp] or save.models[mp]
            raise CheckpointError(
                f"has step {min(steps)}, other stages of this checkpoint have {min(first)}. The "
                "file belongs to another step or run; put the right one back.",
                path=save.path(files[0]),
            )


_COMPRESSION_ERRORS = ("worker_error", "server_error")
"""States of 1-bit optimizers (up to DeepSpeed 0.18), which may have as many elements as the parameter."""

_Empty = Mapping[tuple[ParamKey, int], Shape]
"""(parameter, tensor-parallel rank) without elements → its shape there."""


class Builder:
    """Collector of the parts of an index; :meth:`finish_atoms` validates them.

    Args:
        tp: tensor-parallel degree: the number of shards of each atom, except those with one shard.

    Attributes:
        ranks: model-parallel ranks, in the order of ``Save.models``.
        instances, aliases, ambiguous, scalars, scalar_dtypes, irregular, unreadable, repeated: of the
            :class:`~deepspeed_ucp.model.index.AtomicIndex`.
        file_ids: file → its number in ``files``.
        batches: optimizer files grouped by template.
    """

    def __init__(self, save: Save, tp: int = 1) -> None:
        self.save, self.tp = save, tp
        self.ranks: list[SavedRank] = []
        self.instances: dict[str, int] = {}
        self.aliases: dict[str, str] = {}
        self.ambiguous: tuple[str, ...] = ()
        self.files: list[FileRef] = []
        self.records = Records()
        self.scalars: dict[ParamKey, dict[str, Any]] = {}
        self.scalar_dtypes: dict[str, str] = {}
        self.irregular: dict[AtomKey, str] = {}
        self.unreadable: dict[AtomKey, str] = {}
        self.file_ids: dict[str, int] = {}
        self._record_ids: dict[tuple[int, Record], int] = {}
        self._storages: dict[ParamKey, list[ParamStorage]] = {}
        self._tp_shards: dict[ParamKey, int] = {}
        self._module: dict[ParamKey, None] = {}
        self.batches: Batches = {}
        self.repeated: dict[AtomKey, list[tuple[int, Fragment]]] = defaultdict(list)
        for header in save.headers:
            self._number_file(header)

    @property
    def optimized(self) -> set[str]:
        """Names of the parameters that an optimizer owns on any model-parallel rank."""
        return {name for rank in self.ranks for name in rank.shapes}

    def number_record(self, header: FileHeader, record: Record) -> int:
        """Return the number of a file's record; new records are numbered."""
        file = self._number_file(header)
        number = self._record_ids.get((file, record))
        if number is None:
            number = self._record_ids[file, record] = len(self.records)
            self.records.append(file, record)
        return number

    def number_records(self, batch: FileBatch, piece: int) -> array[int]:
        """Return a piece's record number in each selected file of a batch."""
        first = batch.template.firsts[piece]
        if first not in batch.record_numbers:  # number the record in all files with this template
            batch.record_numbers[first] = len(self.records)
            if not batch.file_numbers:
                batch.file_numbers.extend(map(self._number_file, batch.all_files))
            column = batch.table[:, first]
            columns = (array("q", column[name].tobytes()) for name in ("offset", "nbytes", "crc"))
            self.records.extend(batch.file_numbers, *columns)
        return array("q", (batch.rows + batch.record_numbers[first]).tobytes())

    def _number_file(self, header: FileHeader) -> int:
        """Return the number of a file; new files are numbered."""
        number = self.file_ids.get(header.name)
        if number is None:
            number = self.file_ids[header.name] = len(self.files)
            self.files.append(self.save.where.make_ref(header.name, header.size, header.crc, identified=header.checked))
        return number

    def add(self, rank: SavedRank, name: str, state: str, header: FileHeader, piece: Piece) -> None:
        """Add a whole local tensor as a rank's shard of an atom; see :meth:`add_cuts`."""
        self.add_cuts(rank, state, (Cut(name, 0, piece.numel, 0),), header, piece, {name: piece.shape})

    def note_unreadable(self, rank: SavedRank, names: Iterable[str], state: str, fault: str) -> None:
        """Record why the bytes of tensors cannot be resharded."""
        if state != COPY:  # copies are compared, never loaded
            self.unreadable.update({rank.param(name).atom(state): fault for name in names})

    def add_cuts(
        self,
        rank: SavedRank,
        state: str,
        cuts: Sequence[Cut],
        header: FileHeader,
        piece: Piece,
        shapes: Mapping[str, Shape] | None = None,
    ) -> None:
        """Add the parts of parameters that a saved tensor has, or record its fault.

        Args:
            shapes: the parameters' local shapes; default: ``rank.shapes``.
        """
        if piece.fault:
            self.note_unreadable(rank, (cut.name for cut in cuts), state, piece.fault)
            return
        record = self.number_record(header, piece.record) if any(cut.numel for cut in cuts) else -1
        offset, itemsize = piece.offset, ITEMSIZE[piece.dtype]
        shapes = rank.shapes if shapes is None else shapes
        for cut in cuts:
            parts = self._find_parts(rank, cut.name, state, shapes[cut.name], piece.dtype, header)
            if cut.numel:
                parts.append(Fragment(cut.start, cut.numel, record, offset + cut.offset * itemsize))

    def add_storage(
        self,
        rank: SavedRank,
        name: str,
        shape: Shape,
        index: int,
        states: Mapping[str, PartitionedState | Fragments],
        header: FileHeader,
    ) -> None:
        """Add a :class:`ParamStorage` of a parameter.

        Raises:
            CheckpointError: files disagree about its dtype or shape.
        """
        param, (tp_shard, tp_shards) = rank.param(name), rank.find_tp_shard(name, self.tp)
        if COPY in states or MODULE in states:
            self._module[param] = None
        known = self._storages.setdefault(param, [])
        self._tp_shards.setdefault(param, tp_shards)
        for other in known:
            for state in [state for state in states if state in other.states]:
                dtype, known_dtype = states[state].dtype, other.states[state].dtype
                if dtype != known_dtype or (tp_shard == other.tp_shard and shape != other.shape):
                    self.refuse_mismatch(header, param, state, (dtype, shape), (known_dtype, other.shape))
        known.append(ParamStorage(tp_shard, shape, index, states))

    def refuse_mismatch(
        self, header: FileHeader, param: ParamKey, state: str, actual: tuple[str, Shape], known: tuple[str, Shape]
    ) -> None:
        raise CheckpointError(
            f"{param} ({state}) is {actual[0]} of shape {actual[1]}; other files hold it "
            f"as {known[0]} of shape {known[1]}. The folder mixes files of several saves.",
            path=self.save.path(header),
        )

    def add_repeated(self, rank: SavedRank, state: str, cuts: Sequence[Cut], header: FileHeader, piece: Piece) -> None:
        """Add further copies of elements, which a load compares; see :meth:`add_cuts`."""
        record, itemsize = self.number_record(header, piece.record), ITEMSIZE[piece.dtype]
        for cut in cuts:
            fragment = Fragment(cut.start, cut.numel, record, piece.offset + cut.offset * itemsize)
            tp_shard, _ = rank.find_tp_shard(cut.name, self.tp)
            self.repeated[rank.param(cut.name).atom(state)].append((tp_shard, fragment))

    def _find_parts(
        self, rank: SavedRank, name: str, state: str, shape: Shape, dtype: str, header: FileHeader
    ) -> list[Fragment]:
        """Return a parameter's list of fragments for one state; create it if missing."""
        tp_shard, _ = rank.find_tp_shard(name, self.tp)
        for storage in self._storages.get(rank.param(name), ()):
            known = storage.states.get(state)
            if (
                isinstance(known, Fragments)
                and storage.tp_shard == tp_shard
                and (known.dtype, storage.shape) == (dtype, shape)
            ):
                return known.fragments
        new = Fragments(dtype, [])
        self.add_storage(rank, name, shape, 0, {state: new}, header)
        return new.fragments

    def classify_states(
        self, params: Iterable[ParamKey], states: TensorStates, numel: int, header: FileHeader
    ) -> dict[str, Piece]:
        """Return the element-wise states of a tensor; record others for its parameters.

        ``numel``: elements of an element-wise state.
        """
        scalars = {n: value for n, value in states.single.items() if numel != 1 or n == "step"} | states.scalars
        irregular, elementwise = dict(states.other), {}
        for state, piece in states.states.items():
            if state in scalars:
                self.scalar_dtypes.setdefault(state, piece.dtype)
            elif state in _COMPRESSION_ERRORS:
                irregular[state] = "a compression error of rank 0; those of other ranks are not saved"
            elif piece.fault or piece.numel != numel:
                expected = f"shape {piece.shape} where the parameter's part has {numel} elements"
                irregular[state] = piece.fault or expected
            else:
                elementwise[state] = piece
        for scalar, piece in states.zero_dim.items():
            if scalar in states.scalars:
                self.scalar_dtypes.setdefault(scalar, piece.dtype)
        for param in params:
            for state, description in irregular.items():
                self.irregular.setdefault(param.atom(state), description)
            self.add_scalars(param, scalars, header)
        return elementwise

    def add_scalars(self, param: ParamKey, scalars: dict[str, Any], header: FileHeader) -> None:
        """Add a parameter's scalars; refuse a differing step, record other differences."""
        known = self.scalars.get(param)
        if not known:  # ranks without states of the parameter have no scalars
            self.scalars[param] = scalars
        elif scalars and known is not scalars:
            for key in known.keys() ^ scalars.keys():
                self.irregular.setdefault(param.atom(key), "a number that only some of its ranks have")
            for key in known.keys() & scalars.keys():
                self._compare_scalar(param, key, known[key], scalars[key], header)

    def _compare_scalar(self, param: ParamKey, key: str, known: Any, value: Any, header: FileHeader) -> None:
        if known == value or (known != known and value != value):
            return
        if key == "step":
            raise CheckpointError(
                f"{param} has {key} {value}, other files of this checkpoint have "
                f"{known}. The file belongs to another step or run; put the right one back.",
                path=self.save.path(header),
            )
        difference = f"a number that differs between ranks, {known} on one and {value} on another"
        self.irregular.setdefault(param.atom(key), difference)

    def renumber_instances(self) -> list[str]:
        """Number the instances consecutively; return the parameters with missing ones."""
        filed = {
            name: [at for at in range(most) if ParamKey(name, at) in self._storages]
            for name, most in self.instances.items()
        }
        moved = {ParamKey(name, at): ParamKey(name, to) for name, taken in filed.items() for to, at in enumerate(taken)}
        for table in ("_storages", "_tp_shards", "_module"):
            setattr(self, table, {moved.get(param, param): value for param, value in getattr(self, table).items()})
        lost = [name for name, taken in filed.items() if 0 < len(taken) < self.instances[name]]
        self.instances |= {name: len(filed[name]) for name in lost}
        return lost

    def finish_atoms(self) -> Atoms:
        """Verify coverage and return all atoms.

        Raises:
            CheckpointError: gaps, overlaps, or tensor-parallel ranks without their shard; one line for each.
        """
        faults: list[str] = []
        empty = {(rank.param(n), rank.tp_rank): shape for rank in self.ranks for n, shape in rank.empty.items()}
        for param, storages in self._storages.items():
            if not _needs_no_join(storages, self._tp_shards[param]):
                self._storages[param] = []
                for state in dict.fromkeys(state for storage in storages for state in storage.states):
                    try:
                        self._storages[param] += self._join(param, state, storages, empty)
                    except CheckpointError as error:
                        faults.append(str(error))
        if faults:
            raise CheckpointError(*faults)
        return Atoms(self._storages, self._module)

    def _join(self, param: ParamKey, state: str, storages: Sequence[ParamStorage], empty: _Empty) -> list[ParamStorage]:
        """Merge a state's storages to one per tensor-parallel shard; verify coverage."""
        storages = [part for part in storages if state in part.states]
        storages = [  # files of a flat buffer may lack the state
            part for part in storages if isinstance(part.states[state], Fragments) or part.list_fragments(state)
        ]
        if not storages:
            return []
        dtype, joined = storages[0].states[state].dtype, list[ParamStorage]()
        for tp_shard in range(self._tp_shards[param]):
            parts = [storage for storage in storages if storage.tp_shard == tp_shard]
            shape = parts[0].shape if parts else empty.get((param, tp_shard))
            if shape is None:
                fragments = [fragment for storage in storages for fragment in storage.list_fragments(state)]
                path = next(map(self._find_path, fragments), None)
                raise CheckpointError(
                    f"holds {param} ({state}), the files of tensor-parallel rank "
                    f"{tp_shard} do not. The folder mixes files of several saves, or lacks files.",
                    path=path or self.save.folder,
                )
            fragments = [part for storage in parts for part in storage.list_fragments(state)]
            fragments.sort(key=attrgetter("start"))
            joined.append(ParamStorage(tp_shard, shape, 0, {state: Fragments(dtype, fragments)}))
        check_coverage(Atom(param.name, state, dtype, tuple(joined), param.instance), self._find_path)
        return joined

    def _find_path(self, fragment: Fragment) -> str:
        return self.files[self.records.files[fragment.record]].path


def _needs_no_join(storages: Sequence[ParamStorage], tp_shards: int) -> bool:
    """Return True if one storage of each state covers each shard, in order."""
    seen: dict[str, int] = {}
    for tp_shard, shape, _, states in storages:
        for state, storage in states.items():
            if seen.get(state, 0) != tp_shard or not storage.covers(shape):
                return False
            seen[state] = tp_shard + 1
    return all(count == tp_shards for count in seen.values())
