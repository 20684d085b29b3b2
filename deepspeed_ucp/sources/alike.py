"""Optimizer files that say the same but for places: the headers of thousands, as numbers beside one of them.

A rank's file differs from the first one's in where its pieces lie, how long they are, which parameters are in them,
and the padding. So a header travels as that; the rest is made of the first one's when it is asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, TypeVar, overload

from ..torchsave.records import FileRecord
from .headers import FileHeader, OptimHeader, Piece, TensorStates, put_piece

T = TypeVar("T")

OFFSET, NBYTES, CRC, START, NUMEL = range(5)
"""Numbers of a piece: its record's first byte, bytes and checksum (-1: none), its first byte there, its elements."""

WIDTH = 5


def list_pieces(optim: OptimHeader) -> list[Piece]:
    """All pieces of a header: masters, then of each tensor its states."""
    return [*optim.masters, *chain(*map(_list_states, optim.tensors))]


def _list_states(held: TensorStates) -> list[Piece]:
    return [*held.states.values(), *held.zero_dim.values()]


def number_pieces(optim: OptimHeader) -> array[int]:
    """The numbers of all pieces, one piece's behind the other's, and the groups' paddings."""
    found = array("q")
    for piece in list_pieces(optim):
        found.extend((*piece.place, piece.numel))
    found.extend(optim.paddings)
    return found


def _blank(optim: OptimHeader) -> OptimHeader:
    """A header without what is a file's own; of pieces it remains which of them share a record."""
    numbers: dict[FileRecord, int] = {}

    def clear(piece: Piece) -> Piece:
        number = numbers.setdefault(piece.record, len(numbers))
        shape = (-1,) if len(piece.shape) == 1 else piece.shape
        return Piece(FileRecord("", number, 0, None), 0, shape, piece.dtype, piece.fault)

    def clear_all(held: dict[str, Piece]) -> dict[str, Piece]:
        return {name: clear(piece) for name, piece in held.items()}

    masters = tuple(map(clear, optim.masters))
    tensors = tuple(
        replace(held, states=clear_all(held.states), zero_dim=clear_all(held.zero_dim)) for held in optim.tensors
    )
    return replace(optim, masters=masters, tensors=tensors, slices=(), paddings=(0,) * len(optim.paddings))


class Form:
    """An optimizer file's header, which others are like.

    Attributes:
        optim: that header.
        starts: the number of each tensor's first piece.
    """

    def __init__(self, optim: OptimHeader) -> None:
        self.optim, self._blank = optim, _blank(optim)
        counts = [len(_list_states(held)) for held in optim.tensors]
        self.starts = list(accumulate(counts, initial=len(optim.masters)))
        self._pieces = list_pieces(optim)
        shared = [piece.record.offset for piece in list_pieces(self._blank)]
        self.firsts = [shared.index(number) for number in shared]
        """Of each piece the first one that lies in the same record."""

    def fits(self, optim: OptimHeader) -> bool:
        """Whether a header says the same but for places."""
        return _blank(optim) == self._blank

    def list_states(self, tensor: int) -> range:
        """The numbers of a tensor's pieces."""
        return range(self.starts[tensor], self.starts[tensor + 1])

    def fill(self, numbers: array[int], slices: Any) -> OptimHeader:
        """A header of this form, from what is its own."""
        masters = _Made(self, numbers, len(self.optim.masters), self.make_piece)
        tensors = _Made(self, numbers, len(self.optim.tensors), self.make_states)
        paddings = tuple(numbers[len(self._pieces) * WIDTH :])
        return replace(self.optim, masters=masters, tensors=tensors, slices=slices, paddings=paddings)

    def make_piece(self, number: int, numbers: array[int]) -> Piece:
        """A piece of a file by its number."""
        like = self._pieces[number]
        *place, numel = numbers[number * WIDTH : (number + 1) * WIDTH]
        shape = (numel,) if len(like.shape) == 1 else like.shape
        return put_piece(place, like.record.name, shape, like.dtype, like.fault)

    def make_states(self, tensor: int, numbers: array[int]) -> TensorStates:
        """What a file has of a tensor."""
        like = self.optim.tensors[tensor]
        made = iter([self.make_piece(number, numbers) for number in self.list_states(tensor)])
        states = {name: next(made) for name in like.states}
        return replace(like, states=states, zero_dim={name: next(made) for name in like.zero_dim})


class _Made(Sequence[T]):
    """Parts of a header, made when they are asked for: by ``make``, of their number and the file's numbers."""

    __slots__ = ("form", "make", "most", "numbers")

    def __init__(self, form: Form, numbers: array[int], most: int, make: Callable[[int, array[int]], T]) -> None:
        self.form, self.numbers, self.most, self.make = form, numbers, most, make

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


class FileBatch:
    """Files of one form, and the numbers of their pieces as columns.

    Attributes:
        numbers: of the files in the index, once they have some.
        records: by piece the number of the first file's record there; the other files' follow.
    """

    def __init__(self, form: Form) -> None:
        self.form, self.files, self.numbers = form, list[FileHeader](), array("q")
        self.records: dict[int, int] = {}
        self._numbers = array("q")
        self._columns: dict[int, array[int]] = {}

    def add(self, header: FileHeader, numbers: array[int]) -> None:
        """Add a file."""
        self.files.append(header)
        self._numbers.extend(numbers)

    def column(self, piece: int, which: int) -> array[int]:
        """One of the numbers of a piece, by file."""
        return self._column(piece * WIDTH + which)

    def padding(self, group: int) -> array[int]:
        """Elements of padding at the end of a group's partition, by file; empty where files do not tell."""
        optim = self.form.optim
        told = optim.kind == "zero12" and group < len(optim.paddings)
        return self._column(self.form.starts[-1] * WIDTH + group) if told else array("q")

    def _column(self, at: int) -> array[int]:
        found = self._columns.get(at)
        if found is None:
            found = self._columns[at] = self._numbers[at :: self._width]
        return found

    def make_piece(self, piece: int, file: int) -> Piece:
        """A piece of one of the files."""
        begin = file * self._width
        return self.form.make_piece(piece, self._numbers[begin : begin + self._width])

    @property
    def _width(self) -> int:
        """Numbers of a file."""
        return len(self._numbers) // len(self.files)


@dataclass(frozen=True, slots=True)
class FileRun:
    """Some of a batch's files: which they are in it, and which partitions of a flat buffer they hold."""

    batch: FileBatch
    files: Sequence[int]
    parts: Sequence[int]

    def pick(self, piece: int, which: int) -> Sequence[int]:
        """One of the numbers of a piece, by file."""
        return self._pick(self.batch.column(piece, which))

    def pick_padding(self, group: int) -> Sequence[int]:
        """The groups' paddings, by file."""
        column = self.batch.padding(group)
        return self._pick(column) if column else [0] * len(self.files)

    def _pick(self, column: array[int]) -> Sequence[int]:
        if isinstance(files := self.files, range):
            return column[files.start : files.stop : files.step]
        return [column[file] for file in files]

    def number(self, first: int) -> Sequence[int]:
        """What numbers files have of which the batch's first one has this."""
        if isinstance(files := self.files, range):
            return range(first + files.start, first + files.stop, files.step)
        return [first + file for file in files]

    def split(self) -> Iterator[FileRun]:
        """Each file for itself."""
        for file, part in zip(self.files, self.parts, strict=True):
            yield FileRun(self.batch, [file], [part])


class Batches:
    """All optimizer files of a save, by form."""

    def __init__(self, headers: Iterable[FileHeader]) -> None:
        self._batches: dict[int, FileBatch] = {}
        self._places: dict[str, tuple[FileBatch, int]] = {}
        for header in headers:
            self._add(header)

    def _add(self, header: FileHeader) -> None:
        optim = header.optim
        if optim is None:
            return
        form = optim.masters.form if isinstance(optim.masters, _Made) else None
        key = id(form.optim if form else optim)
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = FileBatch(form or Form(optim))
        self._places[header.name] = batch, len(batch.files)
        batch.add(header, optim.masters.numbers if isinstance(optim.masters, _Made) else number_pieces(optim))

    def list_runs(self, headers: Iterable[FileHeader]) -> list[FileRun]:
        """The files that hold a flat buffer, partition by partition."""
        found: dict[int, tuple[FileBatch, list[int], list[int]]] = {}
        for part, header in enumerate(headers):
            batch, file = self._places[header.name]
            _, files, parts = found.setdefault(id(batch), (batch, [], []))
            files.append(file)
            parts.append(part)
        return [FileRun(batch, _find_range(files), parts) for batch, files, parts in found.values()]


def _find_range(numbers: list[int]) -> Sequence[int]:
    """Ascending numbers that are as far apart as the first two are; other ones as they are."""
    step = max(numbers[1] - numbers[0], 1) if len(numbers) > 1 else 1
    found = range(numbers[0], numbers[-1] + 1, step)
    return found if list(found) == numbers else numbers


@dataclass(frozen=True, slots=True)
class Short:
    """A header as it travels: what it has otherwise than the first rank's."""

    name: str
    size: int
    crc: int | None
    folding: tuple[int, int] | None
    numbers: array[int]
    slices: tuple[tuple[tuple[str, int, int], ...], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return Short, tuple(getattr(self, name) for name in self.__slots__)


class Shortening:
    """Headers against the first rank's, which every rank has."""

    def __init__(self, first: FileHeader) -> None:
        self.first = first
        self.form = Form(first.optim) if first.optim else None

    def cut(self, header: FileHeader) -> FileHeader | Short:
        """What travels of a header."""
        optim, first = header.optim, self.first
        told = header.globals, header.config, header.marks, header.checked
        if optim is None or self.form is None or told != (first.globals, first.config, first.marks, first.checked):
            return header
        if not self.form.fits(optim):
            return header
        return Short(header.name, header.size, header.crc, header.folding, number_pieces(optim), optim.slices)

    def restore(self, short: Short) -> FileHeader:
        """The header that was cut."""
        first, form = self.first, self.form
        if form is None:
            raise ValueError("there is no header that it is like")
        optim = form.fill(short.numbers, short.slices)
        size, crc, folding = short.size, short.crc, short.folding
        return replace(first, name=short.name, size=size, crc=crc, optim=optim, folding=folding)
