"""Collects atoms from headers: interns files and records, joins fragments per tensor-parallel rank, checks coverage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..atoms import COPY, ITEMSIZE, Atom, AtomKey, FileRef, Fragment, ParamKey, Record, Shard, check_coverage
from ..errors import CheckpointError
from ..flat import Cut
from ..torchsave.records import FileRecord
from .headers import FileHeader, Holder, Piece

TOLD = 16
"""Faults that one error tells."""


@dataclass(slots=True)
class Seat:
    """One model-parallel rank while its files are added.

    Attributes:
        pp, tp: its pipeline and tensor-parallel rank.
        shapes: local shapes of the parameters that its optimizer owns, by their own names.
        instances: names that earlier stages hold as well → how many of them do.
    """

    pp: int = 0
    tp: int = 0
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    instances: Mapping[str, int] = field(default_factory=dict)

    def param(self, name: str) -> ParamKey:
        """What the index calls a parameter of this rank."""
        return ParamKey(name, self.instances.get(name, 0))

    def key(self, name: str, state: str) -> AtomKey:
        """What the index calls an atom of this rank."""
        return AtomKey(name, state, self.instances.get(name, 0))


class Builder:
    """Grows an index piece by piece; :meth:`finish_atoms` validates the result.

    Args:
        folder: the checkpoint's folder.
        tp: tensor-parallel degree: every atom has that many shards.
    """

    def __init__(self, folder: str, tp: int = 1) -> None:
        self.folder, self.tp = folder, tp
        self.files: list[FileRef] = []
        self.records: list[Record] = []
        self.scalars: dict[ParamKey, dict[str, Any]] = {}
        self.scalar_dtypes: dict[str, str] = {}
        self.irregular: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self._file_ids: dict[str, int] = {}
        self._record_ids: dict[tuple[int, FileRecord], int] = {}
        self._parts: dict[AtomKey, list[list[Fragment]]] = {}
        self._shapes: dict[AtomKey, list[tuple[int, ...] | None]] = {}
        self._dtypes: dict[AtomKey, str] = {}

    def file(self, header: FileHeader) -> int:
        """Index of a file."""
        path = f"{self.folder}/{header.name}"
        if path not in self._file_ids:
            self._file_ids[path] = len(self.files)
            self.files.append(FileRef(path, header.size, header.crc))
        return self._file_ids[path]

    def record(self, file: int, blob: FileRecord) -> int:
        """Index of a record."""
        key = (file, blob)
        found = self._record_ids.get(key)
        if found is None:
            found = self._record_ids[key] = len(self.records)
            self.records.append(Record(file, blob.offset, blob.nbytes, blob.crc))
        return found

    def add(self, seat: Seat, name: str, state: str, shape: tuple[int, ...], file: int, piece: Piece) -> None:
        """Add a whole local tensor as the shard of atom (name, state) that a tensor-parallel rank holds.

        Raises:
            CheckpointError: files disagree about its dtype or shape.
        """
        self.add_cuts(seat, state, (Cut(name, 0, piece.numel, 0),), file, piece, {name: shape})

    def add_cuts(
        self,
        seat: Seat,
        state: str,
        cuts: Sequence[Cut],
        file: int,
        piece: Piece,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Add the parts of a flat buffer ``piece`` that belong to parameters.

        Args:
            cuts: which elements of which parameters lie where in the buffer, by the rank's own names.
            shapes: the parameters' local shapes.

        Raises:
            CheckpointError: files disagree about a dtype or shape.
        """
        if piece.fault:
            if state != COPY:  # copies are looked at, never loaded
                self.unreadable.update({f"{seat.param(cut.name)} ({state})": piece.fault for cut in cuts})
            return
        record, offset, itemsize = self.record(file, piece.blob), piece.offset, ITEMSIZE[piece.dtype]
        for cut in cuts:
            key = seat.key(cut.name, state)
            parts = self._find_parts(key, seat.tp, shapes[cut.name], piece.dtype, file)
            if cut.numel:
                parts.append(Fragment(cut.start, cut.numel, record, offset + cut.offset * itemsize))

    def _find_parts(self, key: AtomKey, tp: int, shape: tuple[int, ...], dtype: str, file: int) -> list[Fragment]:
        shapes = self._shapes.get(key)
        if shapes is None:
            shapes = self._shapes[key] = [None] * self.tp
            self._dtypes[key] = dtype
            self._parts[key] = [[] for _ in range(self.tp)]
        known = shapes[tp]
        if known is None:
            shapes[tp] = known = shape
        if known != shape or self._dtypes[key] != dtype:
            raise CheckpointError(
                f"{self.files[file].path}: {key.param} ({key.state}) is {dtype} of shape {shape}; other files hold it "
                f"as {self._dtypes[key]} of shape {known}. The folder mixes files of several saves."
            )
        return self._parts[key][tp]

    def add_holder(self, seat: Seat, cuts: Sequence[Cut], holder: Holder, numel: int, file: int) -> None:
        """Add an optimizer tensor's states for every parameter in it.

        Args:
            seat: whose they are.
            cuts: the parameters in it, by their names in ``seat.shapes``.
            holder: the states.
            numel: elements that a state tensor must have to be element-wise.
            file: where they lie.
        """
        scalars = {
            name: value for name, value in holder.single.items() if numel != 1 or name == "step"
        } | holder.scalars
        for state, piece in holder.states.items():
            if state in scalars:
                self.scalar_dtypes.setdefault(state, piece.dtype)
            elif piece.fault:
                self.mark_irregular(seat, cuts, state, piece.fault)
            elif piece.numel != numel:
                what = f"shape {piece.shape} where the parameter's part has {numel} elements"
                self.mark_irregular(seat, cuts, state, what)
            else:
                self.add_cuts(seat, state, cuts, file, piece, seat.shapes)
        for state, kind in holder.other.items():
            self.mark_irregular(seat, cuts, state, kind)
        for scalar, piece in holder.zero_dim.items():
            if scalar in holder.scalars:
                self.scalar_dtypes.setdefault(scalar, piece.dtype)
        for cut in cuts:
            self.add_scalars(seat.param(cut.name), scalars, file)

    def mark_irregular(self, seat: Seat, cuts: Sequence[Cut], state: str, what: str) -> None:
        """Note a state that cannot be cut element by element."""
        for cut in cuts:
            self.irregular.setdefault(f"{seat.param(cut.name)}.{state}", what)

    def add_scalars(self, param: ParamKey, scalars: dict[str, Any], file: int) -> None:
        """Add the optimizer's scalars of a parameter; one that every rank counts for itself cannot be cut.

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
                what = f"a number of each rank's own, {known[key]} on one and {value} on another"
                self.irregular.setdefault(f"{param}.{key}", what)
            else:
                raise CheckpointError(
                    f"{self.files[file].path}: {param} has {key} {value}, other files of this checkpoint say "
                    f"{known[key]}. The file belongs to another step or run; put the right one back."
                )

    def has(self, name: str, state: str) -> bool:
        """Whether some rank has added a part of an atom."""
        return AtomKey(name, state) in self._parts

    def finish_atoms(self, empty: Mapping[ParamKey, Mapping[int, tuple[int, ...]]]) -> dict[AtomKey, Atom]:
        """All atoms, coverage checked; of faults each is told on a line of its own.

        Args:
            empty: per parameter the shapes of shards without elements, by tensor-parallel rank: no optimizer has them.

        Raises:
            CheckpointError: a gap, an overlap, or a tensor-parallel rank without its shard.
        """
        atoms, faults = {}, []
        for key in self._parts:
            try:
                atoms[key] = self._finish_atom(key, empty)
            except CheckpointError as error:
                faults.append(str(error))
        if faults:
            more = [f"… and {len(faults) - TOLD} more atoms."] if len(faults) > TOLD else []
            raise CheckpointError(*faults[:TOLD], *more)
        return atoms

    def _finish_atom(self, key: AtomKey, empty: Mapping[ParamKey, Mapping[int, tuple[int, ...]]]) -> Atom:
        shapes = self._fill_shapes(key, empty.get(key.param, {}))
        for fragments in self._parts[key]:
            if len(fragments) > 1:
                fragments.sort(key=_start)
        shards = tuple(Shard(shape, tuple(held)) for shape, held in zip(shapes, self._parts[key], strict=True))
        atom = Atom(key.name, key.state, self._dtypes[key], shards, key.instance)
        check_coverage(atom, self._path_of)
        return atom

    def _fill_shapes(self, key: AtomKey, empty: Mapping[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
        shapes = [known if known is not None else empty.get(tp) for tp, known in enumerate(self._shapes[key])]
        if None in shapes:
            held = next((self._path_of(fragments[0]) for fragments in self._parts[key] if fragments), self.folder)
            raise CheckpointError(
                f"{held}: holds {key.param} ({key.state}), the files of tensor-parallel rank {shapes.index(None)} do "
                "not. The folder mixes files of several saves, or lacks files."
            )
        return [shape for shape in shapes if shape is not None]

    def _path_of(self, fragment: Fragment) -> str:
        return self.files[self.records[fragment.record].file].path


def _start(fragment: Fragment) -> int:
    return fragment.start
