"""What travels of experts' files that say the same but for places."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from deepspeed_ucp.sources.expertfiles import ExpertForms, ExpertTensors, count_filed
from deepspeed_ucp.sources.headers import FileHeader, Piece
from deepspeed_ucp.torchsave.records import FileRecord

LAYER = "body.{}.deepspeed_moe.experts.deepspeed_experts."


def make_tensors(layer: int, number: str, at: int = 64, crc: int | None = 7) -> dict[str, Piece]:
    """Two tensors, of which the second begins inside its record."""
    first = Piece(FileRecord("data/0", at, 24, crc), 0, (2, 3), "float32")
    second = Piece(FileRecord("data/1", at + 64, 20, crc), 8, (3,), "float32")
    return {f"{LAYER.format(layer)}{number}.{end}": piece for end, piece in (("w", first), ("b", second))}


def test_tensors_come_back_as_they_were_and_files_share_a_form() -> None:
    files = [make_tensors(0, "0"), make_tensors(1, "12", at=640, crc=None)]
    forms = ExpertForms()
    short = [forms.shorten(tensors) for tensors in files]
    assert all(isinstance(each, ExpertTensors) for each in short)
    again: list[ExpertTensors] = pickle.loads(pickle.dumps(short))
    assert [dict(each) for each in again] == files
    assert again[0].form is again[1].form
    assert LAYER.format(0) + "0.other" not in again[0]


def change(tensors: dict[str, Piece], **fields: object) -> dict[str, Piece]:
    """The second tensor with other values of some fields."""
    first, (name, piece) = tensors.items()
    return dict([first, (name, replace(piece, **fields))])  # type: ignore[arg-type]


PLAIN = make_tensors(0, "0")
SHARED = FileRecord("data/0", 64, 24, 7)


@pytest.mark.parametrize(
    "tensors",
    [
        {**PLAIN, **make_tensors(0, "1")},
        {**PLAIN, "dense": next(iter(PLAIN.values()))},
        make_tensors(0, "07"),
        change(PLAIN, record=SHARED),
        change(PLAIN, shape=(0,)),
        change(PLAIN, fault="permuted"),
        {},
    ],
    ids=["two experts", "dense too", "another spelling", "one record", "empty", "faulty", "nothing"],
)
def test_other_files_stay_as_they_are(tensors: dict[str, Piece]) -> None:
    assert ExpertForms().shorten(tensors) is tensors


def test_experts_are_counted_by_their_files() -> None:
    forms = ExpertForms()
    files = [forms.shorten(make_tensors(layer, number)) for layer, number in ((0, "0"), (0, "1"), (1, "0"))]
    headers = [FileHeader("expert", 1, layer=tensors) for tensors in [*files, make_tensors(0, "2"), PLAIN]]
    assert count_filed(headers) == {LAYER.format(0): 3, LAYER.format(1): 1}
