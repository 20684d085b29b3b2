"""Files of one expert each that say the same but for places: the tensors of tens of thousands, as numbers.

An expert's file holds the same tensors as any other's, under names that differ in the layer and in the expert's number.
So what files have alike travels once from each rank, and the tensors are made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..experts import count_experts, cut_number, find_expert
from .headers import FileHeader, Piece, Shape, put_piece

WIDTH = 4
"""Numbers of a tensor: its :attr:`~.headers.Piece.place`."""


class Like(NamedTuple):
    """What a tensor has in all files: how its name ends, its record's name, shape and dtype."""

    end: str
    record: str
    shape: Shape
    dtype: str


Form = tuple[Like, ...]


class ExpertTensors(Mapping[str, Piece]):
    """The tensors of an expert's file by name.

    Args:
        form: what they have alike with other files'.
        layer: what the names of all experts of the layer begin with.
        number: of the expert, in the whole layer.
        numbers: :data:`WIDTH` of each tensor, one tensor's behind the other's.
    """

    __slots__ = ("form", "layer", "number", "numbers")

    def __init__(self, form: Form, layer: str, number: int, numbers: tuple[int, ...]) -> None:
        self.form, self.layer, self.number, self.numbers = form, layer, number, numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return ExpertTensors, (self.form, self.layer, self.number, self.numbers)

    def __len__(self) -> int:
        return len(self.form)

    def __iter__(self) -> Iterator[str]:
        begin = f"{self.layer}{self.number}"
        return iter([begin + like.end for like in self.form])

    def __getitem__(self, name: str) -> Piece:
        for place, each in enumerate(self):
            if each == name:
                return self._make(place)
        raise KeyError(name)

    def _make(self, place: int) -> Piece:
        like, numbers = self.form[place], self.numbers[place * WIDTH : (place + 1) * WIDTH]
        return put_piece(numbers, like.record, like.shape, like.dtype)


class ExpertForms:
    """Makes the tensors of experts' files short; files that are alike share one form."""

    def __init__(self) -> None:
        self._known: dict[Form, Form] = {}

    def shorten(self, tensors: Mapping[str, Piece]) -> Mapping[str, Piece]:
        """The same; as they are where they are not of one expert, or cannot be cut."""
        found = {find_expert(name) for name in tensors}
        expert = found.pop() if len(found) == 1 else None
        pieces = tensors.values()
        if expert is None or len({each.record for each in pieces}) < len(pieces):
            return tensors
        if any(piece.fault or not piece.numel for piece in pieces):
            return tensors
        form = tuple(
            Like(cut_number(name)[1], piece.record.name, piece.shape, piece.dtype) for name, piece in tensors.items()
        )
        numbers = (number for piece in tensors.values() for number in piece.place)
        made = ExpertTensors(self._known.setdefault(form, form), *expert, tuple(numbers))
        return made if list(made) == list(tensors) else tensors


def count_filed(files: Iterable[FileHeader]) -> dict[str, int]:
    """Experts per layer, of those that have files, as :func:`~..experts.count_experts` has them."""
    held = [header.layer or {} for header in files]
    counts = count_experts(name for each in held if not isinstance(each, ExpertTensors) for name in each)
    for each in held:
        if isinstance(each, ExpertTensors):
            counts[each.layer] = max(counts.get(each.layer, 0), each.number + 1)
    return counts


class Filed(NamedTuple):
    """Files of one form: their headers, and their tensors."""

    headers: list[FileHeader]
    tensors: list[ExpertTensors]

    def add(self, header: FileHeader, tensors: ExpertTensors) -> None:
        """Add a file."""
        self.headers.append(header)
        self.tensors.append(tensors)

    def column(self, place: int, which: int) -> list[int]:
        """One of the numbers of a tensor, by file."""
        at = place * WIDTH + which
        return [each.numbers[at] for each in self.tensors]
