"""Tied tensors of a model that a checkpoint holds separately, compared by their checksums."""

from __future__ import annotations

import pytest

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.model.records import Records
from deepspeed_ucp.model.storage import COPY, MODULE, Atom, Fragment, Fragments
from deepspeed_ucp.plan.match import are_same
from tests.plan import planning
from tests.plan.matching import match

Parts = list[tuple[int, int, int, int]]
"""First element, number of elements, record, byte in the record."""

HALVES = [(0, 2, 0, 0), (2, 2, 1, 0)]


def make_atoms(one: Parts, other: Parts, dtype: str = "float32", numel: int = 4) -> list[Atom]:
    copy = Atom.of("head", MODULE, [((numel,), Fragments(dtype, [Fragment(*part) for part in other]))])
    return [planning.make_atom("embed", 4, *one), copy]


def make_records(*crcs: int | None, nbytes: int = 8) -> Records:
    return Records.of([(0, nbytes * number, nbytes, crc) for number, crc in enumerate(crcs)])


@pytest.mark.parametrize(
    ("crcs", "other", "same"),
    [
        ((5, 6, 5, 6), [(0, 2, 2, 0), (2, 2, 3, 0)], True),
        ((5, 6, 5, 7), [(0, 2, 2, 0), (2, 2, 3, 0)], False),
        ((5, 6, 6, 5), [(0, 2, 2, 0), (2, 2, 3, 0)], False),
        ((5, 6, 5, None), [(0, 2, 2, 0), (2, 2, 3, 0)], None),
        ((5, 6, 5, 6), [(0, 1, 2, 0), (1, 1, 2, 4), (2, 2, 3, 0)], None),
        ((5, 6, 5, 6, 7), [(0, 1, 2, 4), (1, 1, 3, 0), (2, 2, 4, 0)], None),
    ],
    ids=["same", "other", "exchanged", "no checksum", "cut otherwise", "among others"],
)
def test_are_same_compares_checksums_of_blocks(crcs: tuple[int | None, ...], other: Parts, same: bool | None) -> None:
    atoms = make_atoms(HALVES, other)
    assert are_same(planning.make_index(atoms, make_records(*crcs)), *atoms) is same


@pytest.mark.parametrize("change", [{"dtype": "int32"}, {"numel": 5}])
def test_atoms_of_other_dtypes_or_sizes_cannot_be_compared(change: dict[str, object]) -> None:
    atoms = make_atoms(HALVES, HALVES, **change)  # type: ignore[arg-type]
    assert are_same(planning.make_index(atoms, make_records(5, 6)), *atoms) is None
    assert are_same(planning.make_index(atoms, make_records(5, 6)), atoms[0], None) is None


def test_a_record_with_further_tensors_cannot_be_compared() -> None:
    """For example, a flat buffer with other parameters."""
    atoms = make_atoms([(0, 4, 0, 0)], [(0, 4, 1, 0)])
    assert are_same(planning.make_index(atoms, make_records(5, 6, nbytes=16)), *atoms) is False
    assert are_same(planning.make_index(atoms, make_records(5, 6, nbytes=20)), *atoms) is None


@pytest.mark.parametrize(("crc", "texts"), [(5, []), (6, ["saved with other values"]), (None, ["values are used"])])
def test_a_dropped_16_bit_tie_is_compared_with_the_copy(crc: int | None, texts: list[str]) -> None:
    """The master of the remaining tensor has another dtype and is in a flat buffer with others."""
    held = [
        planning.make_atom("embed", 4, (0, 4, 0, 0)),
        planning.make_atom("embed", 4, (0, 4, 1, 0), dtype="bfloat16", state=COPY),
        planning.make_atom("head", 4, (0, 4, 2, 0), dtype="bfloat16", state=MODULE),
    ]
    records = Records.of([(0, 0, 80, 1), (0, 80, 8, 5), (0, 88, 8, crc)])
    found = match(planning.make_index(held, records), {"embed": (4,)}, {}, aliases={"head": "embed"}, strict=False)
    assert all(text in note for text, note in zip(texts, [*map(str, found.skipped), *found.notes], strict=True))


def test_a_live_tie_whose_copies_differ_is_refused() -> None:
    """A copy is skipped if it is equal, or if checksums cannot decide."""
    live, ties = {"embed": (4,)}, {"head": "embed"}
    atoms = make_atoms([(0, 4, 0, 0)], [(0, 4, 1, 0)])
    for crc in (5, None):
        assert match(planning.make_index(atoms, make_records(5, crc, nbytes=16)), live, {}, aliases=ties).skipped == []
    index = planning.make_index(atoms, make_records(5, 6, nbytes=16))
    with pytest.raises(MismatchError, match="head: tied to embed in the model, but saved with other values"):
        match(index, live, {}, aliases=ties)
    (skipped,) = match(index, live, {}, aliases=ties, strict=False).skipped
    assert skipped.name == "head"
