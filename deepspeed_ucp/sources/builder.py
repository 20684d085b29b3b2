"""Collects atoms from headers: interns files and records, joins fragments, checks coverage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..atoms import COPY, Atom, FileRef, Fragment, GroupInfo, Record, check_coverage
from ..errors import CheckpointError
from ..plan.geometry import Cut
from .headers import Holder, Piece
from .torchfile import Blob


@dataclass(slots=True)
class Builder:
    """Grows an index piece by piece; :meth:`finish_atoms` validates the result."""

    folder: str
    files: list[FileRef] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[GroupInfo] = field(default_factory=list)
    irregular: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    _file_ids: dict[str, int] = field(default_factory=dict)
    _record_ids: dict[tuple[int, Blob], int] = field(default_factory=dict)
    _parts: dict[tuple[str, str], list[Fragment]] = field(default_factory=lambda: defaultdict(list))
    _kinds: dict[tuple[str, str], tuple[tuple[int, ...], str]] = field(default_factory=dict)

    def file(self, path: str, size: int) -> int:
        """Index of a file."""
        if path not in self._file_ids:
            self._file_ids[path] = len(self.files)
            self.files.append(FileRef(path, size))
        return self._file_ids[path]

    def record(self, file: int, blob: Blob) -> int:
        """Index of a record."""
        key = (file, blob)
        if key not in self._record_ids:
            self._record_ids[key] = len(self.records)
            self.records.append(Record(file, blob.offset, blob.nbytes, blob.crc))
        return self._record_ids[key]

    def add(self, name: str, state: str, shape: tuple[int, ...], file: int, piece: Piece, start: int = 0) -> None:
        """Add ``piece`` as the elements from ``start`` on of atom (name, state).

        Raises:
            CheckpointError: files disagree about its dtype or shape.
        """
        if piece.fault and state == COPY:
            return  # copies are looked at, never loaded
        if piece.fault:
            self.unreadable[f"{name} ({state})"] = piece.fault
            return
        key = (name, state)
        kind = self._kinds.setdefault(key, (shape, piece.dtype))
        if kind != (shape, piece.dtype):
            raise CheckpointError(
                f"{self.files[file].path}: {name} ({state}) is {piece.dtype} of shape {shape}; other files hold it as "
                f"{kind[1]} of shape {kind[0]}. The folder mixes files of several saves."
            )
        parts = self._parts[key]
        if piece.numel:
            parts.append(Fragment(start, piece.numel, self.record(file, piece.blob), piece.offset))

    def add_holder(self, cuts: Sequence[Cut], holder: Holder, numel: int, file: int) -> None:
        """Add an optimizer tensor's states for every parameter in it.

        Args:
            cuts: the parameters in it, by their names in ``shapes``.
            holder: the states.
            numel: elements that a state tensor must have to be element-wise.
            file: where they lie.
        """
        for state, piece in holder.states.items():
            if piece.fault:
                self.mark_irregular(cuts, state, piece.fault)
                continue
            if piece.numel != numel:
                self.mark_irregular(cuts, state, f"shape {piece.shape} where the parameter's part has {numel} elements")
                continue
            for cut in cuts:
                part = piece.narrow(cut.offset, cut.numel)
                self.add(cut.name, state, self.shapes[cut.name], file, part, cut.start)
        for state, kind in holder.other.items():
            self.mark_irregular(cuts, state, kind)
        for cut in cuts:
            self.add_scalars(cut.name, holder.scalars, file)

    def mark_irregular(self, cuts: Sequence[Cut], state: str, what: str) -> None:
        """Note a state that cannot be cut element by element."""
        for cut in cuts:
            self.irregular.setdefault(f"{cut.name}.{state}", what)

    def add_scalars(self, name: str, scalars: dict[str, Any], file: int) -> None:
        """Add the optimizer's scalars of a parameter.

        Raises:
            CheckpointError: another rank's file says otherwise: it is of another step.
        """
        known = self.scalars.setdefault(name, scalars)
        for key, value in scalars.items():
            if key in known and known[key] != value and value == value:
                raise CheckpointError(
                    f"{self.files[file].path}: {name} has {key} {value}, other files of this checkpoint say "
                    f"{known[key]}. The file belongs to another step or run; put the right one back."
                )

    def finish_atoms(self) -> dict[tuple[str, str], Atom]:
        """All atoms, coverage checked.

        Raises:
            CheckpointError: a gap or an overlap.
        """
        atoms = {}
        for (name, state), parts in self._parts.items():
            shape, dtype = self._kinds[name, state]
            parts.sort(key=lambda part: part.start)
            atom = Atom(name, state, shape, dtype, tuple(parts))
            check_coverage(atom, [self.files[self.records[part.record].file].path for part in parts])
            atoms[name, state] = atom
        return atoms
