"""Headers of files that say the same but for places: one template, and of each file a row of numbers.

Thousands of optimizer files differ in where their pieces lie, how long these are, which parameters are in them, and the
padding; tens of thousands of experts' files in the layer and the number in the names of their tensors, and in places.
So a header travels as what is its own, the template once from each rank; the files of one template are a table of
pieces, and a header's pieces are made when they are asked for.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ..experts import count_experts, cut_number, find_expert
from ..torchsave.records import FileRecord
from .headers import FileHeader, OptimHeader, Piece, TensorStates

T = TypeVar("T")

PIECE: Final = np.dtype([(name, "<i8") for name in ("offset", "nbytes", "crc", "start", "numel")])
"""A piece: its record's first byte, bytes and checksum (-1: none), its first byte there, and its elements."""

_PIECE = struct.Struct("<5q")

_Own = tuple[Any, ...]
"""A file's own beside places: slices and paddings of an optimizer's; of an expert's, layer and number."""


def _list_states(held: TensorStates) -> list[Piece]:
    return [*held.states.values(), *held.zero_dim.values()]


def _list_pieces(header: FileHeader) -> list[Piece]:
    """All pieces of a header: an expert's tensors; of an optimizer's the masters, then of each tensor its states."""
    if header.optim is None:
        return list((header.layer or {}).values())
    return [*header.optim.masters, *chain(*map(_list_states, header.optim.tensors))]


def _number_pieces(header: FileHeader) -> bytes:
    """All pieces of a header, one :data:`PIECE` behind the other."""
    numbers = list[int]()
    for piece in _list_pieces(header):
        _, offset, nbytes, crc = piece.record
        numbers += (offset, nbytes, -1 if crc is None else crc, piece.offset, piece.numel)
    return _pack(numbers)


def _pack(numbers: Collection[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


class HeaderTemplate:
    """What headers say alike, as one of them; equal to those of all files that say the same but for places.

    Attributes:
        header: the one, of an optimizer's file or an expert's.
        firsts: of each piece the first one that lies in the same record.
        starts: of an optimizer's file the number of each tensor's first piece.
        ends: of an expert's file how the names of its tensors end.
    """

    def __init__(self, header: FileHeader) -> None:
        self.header, self._pieces = header, _list_pieces(header)
        numbers: dict[FileRecord, int] = {}
        self.firsts = [numbers.setdefault(piece.record, number) for number, piece in enumerate(self._pieces)]
        optim = header.optim
        shapes = [(-1,) if optim and len(piece.shape) == 1 else piece.shape for piece in self._pieces]
        kinds = [(piece.dtype, piece.fault) for piece in self._pieces]
        self._kinds = tuple(zip(self.firsts, shapes, kinds, strict=True))
        self.ends = tuple(cut_number(name)[1] for name in header.layer or ())
        self.starts = list(accumulate(map(_count_states, optim.tensors), initial=len(optim.masters))) if optim else []

    def __reduce__(self) -> tuple[Any, ...]:
        return HeaderTemplate, (self.header,)

    def __hash__(self) -> int:
        return hash(self._kinds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeaderTemplate) and self._kinds == other._kinds and self._rest == other._rest

    @cached_property
    def _rest(self) -> tuple[object, ...]:
        """What the header says besides pieces, without what is a file's own."""
        optim, names = self.header.optim, list[tuple[list[str], list[str]]]()
        if optim is not None:
            names = [(list(held.states), list(held.zero_dim)) for held in optim.tensors]
            tensors = tuple(replace(held, states={}, zero_dim={}) for held in optim.tensors)
            optim = replace(optim, masters=(), tensors=tensors, slices=(), paddings=(0,) * len(optim.paddings))
        told = self.header.globals, self.header.config, self.header.marks, self.header.model, self.header.checked
        return told, optim, names, self.starts, self.ends

    @property
    def optim(self) -> OptimHeader:
        """The optimizer's part of its header."""
        if self.header.optim is None:
            raise TypeError(f"{self.header.name} is not an optimizer's file")
        return self.header.optim

    def list_states(self, tensor: int) -> range:
        """The numbers of a tensor's pieces."""
        return range(self.starts[tensor], self.starts[tensor + 1])

    def make_piece(self, number: int, numbers: bytes) -> Piece:
        """A piece of a file by its number.

        Args:
            numbers: of all pieces of the file, one :data:`PIECE` behind the other.
        """
        like = self._pieces[number]
        offset, nbytes, crc, start, numel = _PIECE.unpack_from(numbers, number * _PIECE.size)
        shape = (numel,) if len(like.shape) == 1 else like.shape
        record = FileRecord(like.record.name, offset, nbytes, None if crc < 0 else crc)
        return Piece(record, start, shape, like.dtype, like.fault)

    def make_states(self, tensor: int, numbers: bytes) -> TensorStates:
        """What a file has of a tensor."""
        like = self.optim.tensors[tensor]
        made = iter([self.make_piece(number, numbers) for number in self.list_states(tensor)])
        states = {name: next(made) for name in like.states}
        return replace(like, states=states, zero_dim={name: next(made) for name in like.zero_dim})

    def fill(self, delta: HeaderDelta) -> FileHeader:
        """The header of another file."""
        like, numbers = self.header, delta.numbers
        optim, layer = like.optim, like.layer
        if optim is None:
            layer = ExpertTensors(self, numbers, *delta.own)
        else:
            slices, paddings = delta.own
            masters = LazyParts(self, numbers, len(optim.masters), self.make_piece)
            tensors = LazyParts(self, numbers, len(optim.tensors), self.make_states)
            optim = replace(optim, masters=masters, tensors=tensors, slices=slices, paddings=paddings)
        return FileHeader(
            name=delta.name,
            size=delta.size,
            crc=delta.crc,
            globals=like.globals,
            config=like.config,
            marks=like.marks,
            model=like.model,
            optim=optim,
            layer=layer,
            folding=delta.folding,
            checked=like.checked,
        )


def _count_states(held: TensorStates) -> int:
    return len(held.states) + len(held.zero_dim)


class LazyParts(Sequence[T]):
    """Parts of a header, made when they are asked for: by ``make``, of their number and the file's numbers."""

    __slots__ = ("make", "most", "numbers", "template")

    def __init__(self, template: HeaderTemplate, numbers: bytes, most: int, make: Callable[[int, bytes], T]) -> None:
        self.template, self.numbers, self.most, self.make = template, numbers, most, make

    def __len__(self) -> int:
        return self.most

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...
    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        found = range(self.most)[at]
        if isinstance(found, int):
            return self.make(found, self.numbers)
        return tuple(self.make(number, self.numbers) for number in found)


class ExpertTensors(Mapping[str, Piece]):
    """The tensors of an expert's file by name, made when they are asked for.

    Args:
        layer: what the names of all experts of the layer begin with.
        number: of the expert, in the whole layer.
    """

    __slots__ = ("layer", "number", "numbers", "template")

    def __init__(self, template: HeaderTemplate, numbers: bytes, layer: str, number: int) -> None:
        self.template, self.numbers, self.layer, self.number = template, numbers, layer, number

    def __len__(self) -> int:
        return len(self.template.ends)

    def __iter__(self) -> Iterator[str]:
        begin = f"{self.layer}{self.number}"
        return iter([begin + end for end in self.template.ends])

    def __getitem__(self, name: str) -> Piece:
        for place, each in enumerate(self):
            if each == name:
                return self.template.make_piece(place, self.numbers)
        raise KeyError(name)


def count_filed(files: Iterable[FileHeader]) -> dict[str, int]:
    """Experts per layer, of those that have files, as :func:`~..experts.count_experts` has them."""
    held = [header.layer or {} for header in files]
    counts = count_experts(name for each in held if not isinstance(each, ExpertTensors) for name in each)
    for each in held:
        if isinstance(each, ExpertTensors):
            counts[each.layer] = max(counts.get(each.layer, 0), each.number + 1)
    return counts


class HeaderDelta(NamedTuple):
    """A header as it travels: what it has otherwise than its template's.

    Attributes:
        template: None where it is the first rank's optimizer file, which every rank has.
        name, size, crc, folding: the header's.
        own: what else is its own.
        numbers: of its pieces, one :data:`PIECE` behind the other.
    """

    template: HeaderTemplate | None
    name: str
    size: int
    crc: int | None
    folding: tuple[int, int] | None
    own: _Own
    numbers: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """The numbers one by one: most take a few bytes."""
        return _take_delta, (*self[:-1], struct.unpack(f"<{len(self.numbers) // 8}q", self.numbers))


def _take_delta(*told: Any) -> HeaderDelta:
    return HeaderDelta._make((*told[:-1], _pack(told[-1])))


class HeaderCodec:
    """Makes the headers that a rank has read short, and those that it is told long again.

    Args:
        first: a header that every rank has.
    """

    def __init__(self, first: FileHeader) -> None:
        self.first = HeaderTemplate(first)
        self._known = {self.first: self.first}

    def encode(self, header: FileHeader) -> FileHeader | HeaderDelta:
        """What travels of a header; itself where it is neither an optimizer's nor of one expert, or cannot be cut."""
        own = _find_own(header)
        if own is None:
            return header
        template = HeaderTemplate(header)
        known = self._known.setdefault(template, template)
        numbers = _number_pieces(header)
        sent = None if known is self.first else known
        return HeaderDelta(sent, header.name, header.size, header.crc, header.folding, own, numbers)

    def decode(self, told: FileHeader | HeaderDelta) -> FileHeader:
        """The header that was encoded."""
        return (told.template or self.first).fill(told) if isinstance(told, HeaderDelta) else told


def _find_own(header: FileHeader) -> _Own | None:
    """See :data:`_Own`; None of a header that is told as it is."""
    if header.optim is not None:
        return header.optim.slices, header.optim.paddings
    tensors = header.layer or {}
    expert = next(map(find_expert, tensors), None)
    if expert is None or any(piece.fault or not piece.numel for piece in tensors.values()):
        return None
    layer, number = expert
    return expert if all(name.startswith(f"{layer}{number}.") for name in tensors) else None


class FileBatch:
    """Files of one template, and their pieces as a table.

    Attributes:
        numbers: of the files in the index, once they have some.
        records: by piece the number of the first file's record there; the other files' follow.
    """

    def __init__(self, template: HeaderTemplate) -> None:
        self.template, self.files, self.numbers = template, list[FileHeader](), array("q")
        self.records: dict[int, int] = {}
        self._rows: list[bytes] = []

    def add(self, header: FileHeader, numbers: bytes) -> None:
        """Add a file."""
        self.files.append(header)
        self._rows.append(numbers)

    @cached_property
    def table(self) -> npt.NDArray[np.void]:
        """By file and piece the numbers, a :data:`PIECE`; once all files are there."""
        return np.frombuffer(b"".join(self._rows), PIECE).reshape(len(self.files), -1)

    def make_piece(self, piece: int, file: int) -> Piece:
        """A piece of one of the files."""
        return self.template.make_piece(piece, self._rows[file])


@dataclass(frozen=True, slots=True)
class FileRun:
    """Some of a batch's files: which they are in it, and which partitions of a flat buffer they hold."""

    batch: FileBatch
    files: list[int]
    parts: list[int]

    @property
    def headers(self) -> list[FileHeader]:
        """The files'."""
        return [self.batch.files[file] for file in self.files]

    def pick(self, piece: int, which: str) -> list[int]:
        """One of the numbers of a piece, by file; by its name in :data:`PIECE`."""
        found: list[int] = self.batch.table[which][self.files, piece].tolist()
        return found

    def pick_padding(self, group: int) -> list[int]:
        """Elements of padding at the end of a group's partition, by file; 0 where files do not tell."""
        optim = self.batch.template.optim
        told = optim.traits.strips_padding and group < len(optim.paddings)
        return [header.optim.paddings[group] if told and header.optim else 0 for header in self.headers]

    def number(self, first: int) -> list[int]:
        """What numbers files have of which the batch's first one has this."""
        return [first + file for file in self.files]

    def split(self) -> Iterator[FileRun]:
        """Each file for itself."""
        for file, part in zip(self.files, self.parts, strict=True):
            yield FileRun(self.batch, [file], [part])


class Batches:
    """Optimizer files, and files of one expert each, by template."""

    def __init__(self, headers: Iterable[FileHeader]) -> None:
        self._batches: dict[HeaderTemplate, FileBatch] = {}
        self._places: dict[str, tuple[FileBatch, int]] = {}
        for header in headers:
            self._add(header)

    def _add(self, header: FileHeader) -> None:
        parts = header.optim.masters if header.optim else header.layer
        if isinstance(parts, (LazyParts, ExpertTensors)):
            template, numbers = parts.template, parts.numbers
        else:
            template, numbers = HeaderTemplate(header), _number_pieces(header)
        batch = self._batches.setdefault(template, FileBatch(template))
        self._places[header.name] = batch, len(batch.files)
        batch.add(header, numbers)

    def list_runs(self, headers: Iterable[FileHeader]) -> list[FileRun]:
        """Files by batch; which they are among the headers tells the partition of a flat buffer that they hold."""
        found: dict[int, FileRun] = {}
        for part, header in enumerate(headers):
            batch, file = self._places[header.name]
            run = found.setdefault(id(batch), FileRun(batch, [], []))
            run.files.append(file)
            run.parts.append(part)
        return list(found.values())
