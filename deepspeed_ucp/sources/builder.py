"""Collects atoms from headers: interns files and records, joins fragments per tensor-parallel rank, checks coverage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from ..atoms import COPY, ITEMSIZE, Atom, AtomKey, FileRef, Fragment, ParamKey, Record, Shard, check_coverage
from ..errors import CheckpointError
from ..flat import Cut
from ..sight import Sight
from ..torchsave.records import FileRecord
from .files import Listing
from .headers import FileHeader, Piece, Shape, TensorStates
from .ranks import SavedRank
from .save import Save

TOLD = 16
"""Faults that one error tells."""

_COMPRESSION_ERRORS = ("worker_error", "server_error")
"""States of 1-bit optimizers (to DeepSpeed 0.18). They may have as many elements as the parameter."""


def _refer(listing: Listing, header: FileHeader) -> FileRef:
    name, size, where = header.name, header.size, listing.where
    if where is None:
        return FileRef(listing.path(name), size, header.crc)
    return FileRef(where.path(name, size), size, header.crc, where.find_near(name, size))


class Builder:
    """Grows an index piece by piece; :meth:`finish` validates the result.

    Args:
        save: the checkpoint's model states, and other files.
        tp: tensor-parallel degree: every atom has that many shards, but for experts that are folded.
    """

    def __init__(self, save: Save, tp: int = 1) -> None:
        self.save, self.tp = save, tp
        self.ranks: list[SavedRank] = []
        self.instances: dict[str, int] = {}
        self.aliases: dict[str, str] = {}
        self.files: list[FileRef] = []
        self.records: list[Record] = []
        self.scalars: dict[ParamKey, dict[str, Any]] = {}
        self.scalar_dtypes: dict[str, str] = {}
        self.irregular: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self._file_ids: dict[str, int] = {}
        self._record_ids: dict[tuple[int, FileRecord], int] = {}
        self._parts: dict[AtomKey, list[list[Fragment]]] = {}
        self._shapes: dict[AtomKey, list[Shape | None]] = {}
        self._dtypes: dict[AtomKey, str] = {}
        self._repeated: dict[AtomKey, list[tuple[int, Fragment]]] = defaultdict(list)
        for header in save.headers:
            self._file(header)

    @property
    def optimized(self) -> set[str]:
        """Parameters that an optimizer owns on some model-parallel rank."""
        return {name for rank in self.ranks for name in rank.shapes}

    def record(self, header: FileHeader, record: FileRecord) -> int:
        """Number of a file's record."""
        file = self._file(header)
        found = self._record_ids.get((file, record))
        if found is None:
            found = self._record_ids[file, record] = len(self.records)
            self.records.append(Record(file, record.offset, record.nbytes, record.crc))
        return found

    def _file(self, header: FileHeader) -> int:
        found = self._file_ids.get(header.name)
        if found is None:
            found = self._file_ids[header.name] = len(self.files)
            self.files.append(_refer(self.save.listing, header))
        return found

    def find_sight(self) -> Sight | None:
        """Which ranks can read which of the files; None where every rank can read all."""
        where = self.save.listing.where
        return None if where is None else where.see(list(self._file_ids))

    def add(self, rank: SavedRank, name: str, state: str, header: FileHeader, piece: Piece) -> None:
        """Add a whole local tensor as the shard of atom (name, state) that a tensor-parallel rank holds.

        Raises:
            CheckpointError: files disagree about its dtype or shape.
        """
        self.add_cuts(rank, state, (Cut(name, 0, piece.numel, 0),), header, piece, {name: piece.shape})

    def add_cuts(
        self,
        rank: SavedRank,
        state: str,
        cuts: Sequence[Cut],
        header: FileHeader,
        piece: Piece,
        shapes: Mapping[str, Shape] | None = None,
    ) -> None:
        """Add the parts of a flat buffer ``piece`` that belong to parameters.

        Args:
            rank: whose it is.
            state: of the atoms.
            cuts: which elements of which parameters lie where in the buffer, by the rank's own names.
            header: of its file.
            piece: where it lies.
            shapes: the parameters' local shapes, if they are not those of ``rank.shapes``.

        Raises:
            CheckpointError: files disagree about a dtype or shape.
        """
        if piece.fault:
            if state != COPY:  # copies are looked at, never loaded
                self.unreadable.update({f"{rank.param(cut.name)} ({state})": piece.fault for cut in cuts})
            return
        record, offset, itemsize = self.record(header, piece.record), piece.offset, ITEMSIZE[piece.dtype]
        shapes = rank.shapes if shapes is None else shapes
        for cut in cuts:
            name, numel = cut.name, cut.numel
            place = rank.find_lane(name, self.tp)
            parts = self._find_parts(rank.key(name, state), place, shapes[name], piece.dtype, header)
            if numel:
                parts.append(Fragment(cut.start, numel, record, offset + cut.offset * itemsize))

    def add_repeated(self, rank: SavedRank, state: str, cuts: Sequence[Cut], header: FileHeader, piece: Piece) -> None:
        """Add parts of a flat buffer that other ranks' files hold as well; arguments as of :meth:`add_cuts`."""
        record, itemsize = self.record(header, piece.record), ITEMSIZE[piece.dtype]
        for cut in cuts:
            fragment = Fragment(cut.start, cut.numel, record, piece.offset + cut.offset * itemsize)
            lane, _ = rank.find_lane(cut.name, self.tp)
            self._repeated[rank.key(cut.name, state)].append((lane, fragment))

    def finish_repeated(self) -> dict[AtomKey, tuple[tuple[int, Fragment], ...]]:
        """What :meth:`add_repeated` was told of, by atom."""
        return {key: tuple(parts) for key, parts in self._repeated.items()}

    def _find_parts(
        self, key: AtomKey, place: tuple[int, int], shape: Shape, dtype: str, header: FileHeader
    ) -> list[Fragment]:
        """The fragments of an atom's lane, which ``place`` tells with the number of lanes."""
        lane, lanes = place
        shapes = self._shapes.get(key)
        if shapes is None:
            shapes = self._shapes[key] = [None] * lanes
            self._dtypes[key] = dtype
            self._parts[key] = [[] for _ in range(lanes)]
        known = shapes[lane]
        if known is None:
            shapes[lane] = known = shape
        if known != shape or self._dtypes[key] != dtype:
            raise CheckpointError(
                f"{self.save.path(header)}: {key.param} ({key.state}) is {dtype} of shape {shape}; other files hold it "
                f"as {self._dtypes[key]} of shape {known}. The folder mixes files of several saves."
            )
        return self._parts[key][lane]

    def add_states(
        self, rank: SavedRank, cuts: Sequence[Cut], held: TensorStates, numel: int, header: FileHeader
    ) -> None:
        """Add what the optimizer keeps for one of its tensors to every parameter in it.

        Args:
            rank: whose it is.
            cuts: the parameters in the tensor, by their names in ``rank.shapes``.
            held: the states.
            numel: elements that a state must have to be element-wise.
            header: of the file where they lie.
        """
        scalars = {n: value for n, value in held.single.items() if numel != 1 or n == "step"} | held.scalars
        odd = dict(held.other)
        for state, piece in held.states.items():
            if state in scalars:
                self.scalar_dtypes.setdefault(state, piece.dtype)
            elif state in _COMPRESSION_ERRORS:
                odd[state] = "a compression error of rank 0's own; no other rank's is saved"
            elif piece.fault or piece.numel != numel:
                expected = f"shape {piece.shape} where the parameter's part has {numel} elements"
                odd[state] = piece.fault or expected
            else:
                self.add_cuts(rank, state, cuts, header, piece)
        for scalar, piece in held.zero_dim.items():
            if scalar in held.scalars:
                self.scalar_dtypes.setdefault(scalar, piece.dtype)
        for param in [rank.param(cut.name) for cut in cuts]:
            for state, what in odd.items():  # cannot be cut element by element
                self.irregular.setdefault(f"{param}.{state}", what)
            self.add_scalars(param, scalars, header)

    def add_scalars(self, param: ParamKey, scalars: dict[str, Any], header: FileHeader) -> None:
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
                    f"{self.save.path(header)}: {param} has {key} {value}, other files of this checkpoint say "
                    f"{known[key]}. The file belongs to another step or run; put the right one back."
                )

    def finish_atoms(self) -> dict[AtomKey, Atom]:
        """All atoms, coverage checked; of faults each is told on a line of its own.

        Raises:
            CheckpointError: a gap, an overlap, or a tensor-parallel rank without its shard.
        """
        atoms, faults = {}, []
        empty = {(rank.param(n), rank.tp): shape for rank in self.ranks for n, shape in rank.empty.items()}
        for key in self._parts:
            try:
                atoms[key] = self._finish_atom(key, empty)
            except CheckpointError as error:
                faults.append(str(error))
        if faults:
            more = [f"… and {len(faults) - TOLD} more atoms."] if len(faults) > TOLD else []
            raise CheckpointError(*faults[:TOLD], *more)
        return atoms

    def _finish_atom(self, key: AtomKey, empty: Mapping[tuple[ParamKey, int], Shape]) -> Atom:
        held, shapes = self._parts[key], self._shapes[key]
        if None in shapes:
            shapes = [empty.get((key.param, tp)) if s is None else s for tp, s in enumerate(shapes)]
        if None in shapes:
            path = next((self._path_of(fragments[0]) for fragments in held if fragments), self.save.listing.folder)
            raise CheckpointError(
                f"{path}: holds {key.param} ({key.state}), the files of tensor-parallel rank {shapes.index(None)} do "
                "not. The folder mixes files of several saves, or lacks files."
            )
        for fragments in held:
            fragments.sort(key=attrgetter("start"))
        shards = tuple(Shard(shape, tuple(part)) for shape, part in zip(shapes, held, strict=True) if shape is not None)
        atom = Atom(key.name, key.state, self._dtypes[key], shards, key.instance)
        check_coverage(atom, self._path_of)
        return atom

    def _path_of(self, fragment: Fragment) -> str:
        return self.files[self.records[fragment.record].file].path
