"""Builds an index's atoms from headers: numbers files and records, joins fragments, verifies coverage."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from ...errors import CheckpointError
from ...model import (
    COPY,
    ITEMSIZE,
    MODULE,
    Atom,
    AtomKey,
    Atoms,
    FileRef,
    Fragment,
    Fragments,
    ParamKey,
    ParamStorage,
    PartitionedState,
    Record,
    Records,
    check_coverage,
)
from ...model.access import READ_ALL, ReadAccess
from ...model.flat import Cut
from ...torchsave.records import FileRecord
from .files import Listing
from .headers import FileHeader, Piece, Shape, TensorStates
from .pieces import Batches, FileBatch
from .ranks import SavedRank
from .save import Save

MOST_FAULTS = 16
"""Faults that one error lists."""

_COMPRESSION_ERRORS = ("worker_error", "server_error")
"""States of 1-bit optimizers (up to DeepSpeed 0.18), which may have as many elements as the parameter."""

_Empty = Mapping[tuple[ParamKey, int], Shape]
"""(parameter, tensor-parallel rank) without elements → its shape there."""


def _refer(listing: Listing, header: FileHeader) -> FileRef:
    name, size, where = header.name, header.size, listing.where
    if where is None:
        return FileRef(listing.path(name), size, header.crc)
    path, copies = where.path(name, size), where.list_copies(name, near=True) if where.folders[1:] else {}
    near = [each for each, nbytes in copies.items() if nbytes == size]
    # Legacy files and swap files have no header with checksums that identifies a copy before it is read, and a nearer
    # copy of the same size may belong to an earlier save: they are read from the first place that has them.
    return FileRef(path, size, header.crc, tuple(near if header.checked else near and [path]))


class Builder:
    """Collects the parts of an index; :meth:`finish_atoms` validates them.

    Args:
        save: headers of the checkpoint's files.
        tp: tensor-parallel degree: the number of shards of each atom, except whole experts with one shard.
    """

    def __init__(self, save: Save, tp: int = 1) -> None:
        self.save, self.tp = save, tp
        self.ranks: list[SavedRank] = []
        self.batches = Batches(())
        self.instances: dict[str, int] = {}
        self.aliases: dict[str, str] = {}
        self.ambiguous: tuple[str, ...] = ()
        self.files: list[FileRef] = []
        self.records = Records()
        self.scalars: dict[ParamKey, dict[str, Any]] = {}
        self.scalar_dtypes: dict[str, str] = {}
        self.irregular: dict[AtomKey, str] = {}
        self.unreadable: dict[AtomKey, str] = {}
        self._file_ids: dict[str, int] = {}
        self._record_ids: dict[tuple[int, FileRecord], int] = {}
        self._storages: dict[ParamKey, list[ParamStorage]] = {}
        self._tp_shards: dict[ParamKey, int] = {}
        self._module: dict[ParamKey, None] = {}
        self.repeated: dict[AtomKey, list[tuple[int, Fragment]]] = defaultdict(list)
        for header in save.headers:
            self._file(header)

    @property
    def optimized(self) -> set[str]:
        """Names of the parameters that an optimizer owns on any model-parallel rank."""
        return {name for rank in self.ranks for name in rank.shapes}

    def record(self, header: FileHeader, record: FileRecord) -> int:
        """Return the number of a file's record; new records are numbered."""
        file = self._file(header)
        found = self._record_ids.get((file, record))
        if found is None:
            found = self._record_ids[file, record] = len(self.records)
            self.records.append(Record(file, record.offset, record.nbytes, record.crc))
        return found

    def number_records(self, batch: FileBatch, piece: int) -> int:
        """Return the record number of the batch's first file for a piece; those of the other files follow."""
        first = batch.template.firsts[piece]
        found = batch.records.get(first)
        if found is None:
            found = batch.records[first] = len(self.records)
            batch.numbers = batch.numbers or array("q", map(self._file, batch.files))
            column = batch.table[:, first]
            self.records.extend(batch.numbers, *(column[which].tolist() for which in ("offset", "nbytes", "crc")))
        return found

    def _file(self, header: FileHeader) -> int:
        found = self._file_ids.get(header.name)
        if found is None:
            found = self._file_ids[header.name] = len(self.files)
            self.files.append(_refer(self.save.listing, header))
        return found

    def find_access(self) -> ReadAccess:
        """Return which ranks can read which of the files."""
        where = self.save.listing.where
        return READ_ALL if where is None else where.see(list(self._file_ids))

    def add(self, rank: SavedRank, name: str, state: str, header: FileHeader, piece: Piece) -> None:
        """Add a whole local tensor as a tensor-parallel rank's shard of atom (name, state); see :meth:`add_cuts`."""
        self.add_cuts(rank, state, (Cut(name, 0, piece.numel, 0),), header, piece, {name: piece.shape})

    def note_unreadable(self, rank: SavedRank, names: Iterable[str], state: str, fault: str) -> None:
        """Record tensors whose bytes cannot be resharded."""
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
        """Add the parts of parameters in a flat buffer ``piece``.

        Args:
            rank: the rank that holds it.
            state: of the atoms.
            cuts: the parts of the rank's parameters in the buffer.
            header: of its file.
            piece: the buffer.
            shapes: the parameters' local shapes; default: ``rank.shapes``.

        Raises:
            CheckpointError: files disagree about a dtype or shape.
        """
        if piece.fault:
            self.note_unreadable(rank, (cut.name for cut in cuts), state, piece.fault)
            return
        record = self.record(header, piece.record) if any(cut.numel for cut in cuts) else -1
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
        place: int,
        states: Mapping[str, PartitionedState | Fragments],
        header: FileHeader,
    ) -> None:
        """Add the storage of a parameter.

        Args:
            rank: the rank that holds it.
            name: on that rank.
            shape, place, states: as of :class:`~..atoms.ParamStorage`.
            header: of a file with some of its elements.

        Raises:
            CheckpointError: files disagree about its dtype or shape.
        """
        param, (tp_shard, tp_shards) = rank.param(name), rank.find_tp_shard(name, self.tp)
        if COPY in states or MODULE in states:
            self._module[param] = None
        held = ParamStorage(tp_shard, shape, place, states)
        known = self._storages.setdefault(param, [])
        self._tp_shards.setdefault(param, tp_shards)
        for each in known:
            if not each.states.keys().isdisjoint(states):
                self._compare(param, each, held, header)
        known.append(held)

    def _compare(self, param: ParamKey, known: ParamStorage, held: ParamStorage, header: FileHeader) -> None:
        for state in held.states.keys() & known.states.keys():
            dtype, known_dtype = held.states[state].dtype, known.states[state].dtype
            if dtype != known_dtype or (held.tp_shard == known.tp_shard and held.shape != known.shape):
                self.refuse_mismatch(header, param, state, (dtype, held.shape), (known_dtype, known.shape))

    def refuse_mismatch(
        self, header: FileHeader, param: ParamKey, state: str, found: tuple[str, Shape], known: tuple[str, Shape]
    ) -> None:
        """Raise CheckpointError: files disagree about the (dtype, shape) of an atom."""
        raise CheckpointError(
            f"{param} ({state}) is {found[0]} of shape {found[1]}; other files hold it "
            f"as {known[0]} of shape {known[1]}. The folder mixes files of several saves.",
            path=self.save.path(header),
        )

    def add_repeated(self, rank: SavedRank, state: str, cuts: Sequence[Cut], header: FileHeader, piece: Piece) -> None:
        """Add further copies of elements, which a load compares; arguments as of :meth:`add_cuts`."""
        record, itemsize = self.record(header, piece.record), ITEMSIZE[piece.dtype]
        for cut in cuts:
            fragment = Fragment(cut.start, cut.numel, record, piece.offset + cut.offset * itemsize)
            tp_shard, _ = rank.find_tp_shard(cut.name, self.tp)
            self.repeated[rank.param(cut.name).atom(state)].append((tp_shard, fragment))

    def _find_parts(
        self, rank: SavedRank, name: str, state: str, shape: Shape, dtype: str, header: FileHeader
    ) -> list[Fragment]:
        """Return the list of a parameter's fragments for one state; create it if it does not exist."""
        tp_shard, _ = rank.find_tp_shard(name, self.tp)
        for each in self._storages.get(rank.param(name), ()):
            held = each.states.get(state)
            if isinstance(held, Fragments) and each.tp_shard == tp_shard and (held.dtype, each.shape) == (dtype, shape):
                return held.fragments
        new = Fragments(dtype, [])
        self.add_storage(rank, name, shape, 0, {state: new}, header)
        return new.fragments

    def sort_states(
        self, params: Iterable[ParamKey], held: TensorStates, numel: int, header: FileHeader
    ) -> dict[str, Piece]:
        """Return the element-wise states of one of the optimizer's tensors; record the others for its parameters.

        Args:
            params: the parameters in the tensor.
            held: its states.
            numel: elements of an element-wise state.
            header: of the file.
        """
        scalars = {n: value for n, value in held.single.items() if numel != 1 or n == "step"} | held.scalars
        odd, found = dict(held.other), {}
        for state, piece in held.states.items():
            if state in scalars:
                self.scalar_dtypes.setdefault(state, piece.dtype)
            elif state in _COMPRESSION_ERRORS:
                odd[state] = "a compression error of rank 0; those of other ranks are not saved"
            elif piece.fault or piece.numel != numel:
                expected = f"shape {piece.shape} where the parameter's part has {numel} elements"
                odd[state] = piece.fault or expected
            else:
                found[state] = piece
        for scalar, piece in held.zero_dim.items():
            if scalar in held.scalars:
                self.scalar_dtypes.setdefault(scalar, piece.dtype)
        for param in params:
            for state, description in odd.items():
                self.irregular.setdefault(param.atom(state), description)
            self.add_scalars(param, scalars, header)
        return found

    def add_scalars(self, param: ParamKey, scalars: dict[str, Any], header: FileHeader) -> None:
        """Add the optimizer's scalars of a parameter; scalars that differ between ranks are recorded as irregular.

        Raises:
            CheckpointError: another rank's file has another step.
        """
        known = self.scalars.setdefault(param, scalars)
        if known is scalars:
            return
        for key, value in scalars.items():
            if key not in known or known[key] == value or value != value:
                continue
            if key != "step":
                difference = f"a number that differs between ranks, {known[key]} on one and {value} on another"
                self.irregular.setdefault(param.atom(key), difference)
            else:
                raise CheckpointError(
                    f"{param} has {key} {value}, other files of this checkpoint have "
                    f"{known[key]}. The file belongs to another step or run; put the right one back.",
                    path=self.save.path(header),
                )

    def close_gaps(self) -> list[str]:
        """Renumber the instances of parameters whose files lack some; return the names of these parameters."""
        filed = {
            name: [at for at in range(most) if ParamKey(name, at) in self._storages]
            for name, most in self.instances.items()
        }
        moved = {ParamKey(name, at): ParamKey(name, to) for name, held in filed.items() for to, at in enumerate(held)}
        for field in ("_storages", "_tp_shards", "_module"):
            setattr(self, field, {moved.get(param, param): value for param, value in getattr(self, field).items()})
        lost = [name for name, held in filed.items() if 0 < len(held) < self.instances[name]]
        self.instances |= {name: len(filed[name]) for name in lost}
        return lost

    def finish_atoms(self) -> Atoms:
        """Verify coverage and return all atoms.

        Raises:
            CheckpointError: gaps, overlaps, or tensor-parallel ranks without their shard; one line for each.
        """
        faults: list[str] = []
        empty = {(rank.param(n), rank.tp): shape for rank in self.ranks for n, shape in rank.empty.items()}
        for param, held in self._storages.items():
            if not _is_sound(held, self._tp_shards[param]):
                self._storages[param] = self._join(param, empty, faults)
        if faults:
            more = [f"… and {len(faults) - MOST_FAULTS} more tensors."] if len(faults) > MOST_FAULTS else []
            raise CheckpointError(*faults[:MOST_FAULTS], *more)
        return Atoms(self._storages, self._module)

    def _join(self, param: ParamKey, empty: _Empty, faults: list[str]) -> list[ParamStorage]:
        """Join a parameter's storages into one for each state and ``tp_shard``; append coverage faults."""
        found: list[ParamStorage] = []
        for state in dict.fromkeys(state for each in self._storages[param] for state in each.states):
            try:
                found += self._join_state(param, state, empty)
            except CheckpointError as error:
                faults.append(str(error))
        return found

    def _join_state(self, param: ParamKey, state: str, empty: _Empty) -> list[ParamStorage]:
        held = [each for each in self._storages[param] if state in each.states and _has_any(each, state)]
        if not held:
            return []
        dtype, joined = held[0].states[state].dtype, list[ParamStorage]()
        for tp_shard in range(self._tp_shards[param]):
            parts = [each for each in held if each.tp_shard == tp_shard]
            shape = parts[0].shape if parts else empty.get((param, tp_shard))
            if shape is None:
                path = next((self._path_of(part) for each in held for part in each.shard(state).fragments), None)
                raise CheckpointError(
                    f"holds {param} ({state}), the files of tensor-parallel rank "
                    f"{tp_shard} do not. The folder mixes files of several saves, or lacks files.",
                    path=path or self.save.listing.folder,
                )
            fragments = [part for each in parts for part in each.shard(state).fragments]
            fragments.sort(key=attrgetter("start"))
            joined.append(ParamStorage(tp_shard, shape, 0, {state: Fragments(dtype, fragments)}))
        atom = Atom(param.name, state, dtype, tuple(each.shard(state) for each in joined), param.instance)
        check_coverage(atom, self._path_of)
        return joined

    def _path_of(self, fragment: Fragment) -> str:
        return self.files[self.records.files[fragment.record]].path


def _has_any(held: ParamStorage, state: str) -> bool:
    """Return True if files have elements of a state; files of a flat buffer may lack it."""
    return not isinstance(held.states[state], PartitionedState) or bool(held.shard(state).fragments)


def _is_sound(held: Sequence[ParamStorage], tp_shards: int) -> bool:
    """Return True if each state covers each tensor-parallel shard exactly once, in their order."""
    seen: dict[str, int] = {}
    for tp_shard, shape, _, states in held:
        for state, storage in states.items():
            if seen.get(state, 0) != tp_shard or not storage.covers(shape):
                return False
            seen[state] = tp_shard + 1
    return all(count == tp_shards for count in seen.values())
