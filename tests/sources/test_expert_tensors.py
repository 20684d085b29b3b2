"""What travels of experts' files that say the same but for places."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from deepspeed_ucp.sources.headers import FileHeader, Piece
from deepspeed_ucp.sources.pieces import ExpertTensors, HeaderCodec, HeaderDelta, count_filed
from deepspeed_ucp.torchsave.records import FileRecord

LAYER = "body.{}.deepspeed_moe.experts.deepspeed_experts."


def make_tensors(layer: int, number: str, at: int = 64, crc: int | None = 7) -> dict[str, Piece]:
    """Two tensors, of which the second begins inside its record."""
    first = Piece(FileRecord("data/0", at, 24, crc), 0, (2, 3), "float32")
    second = Piece(FileRecord("data/1", at + 64, 20, crc), 8, (3,), "float32")
    return {f"{LAYER.format(layer)}{number}.{end}": piece for end, piece in (("w", first), ("b", second))}


def make_header(tensors: dict[str, Piece], name: str = "expert", size: int = 1) -> FileHeader:
    """The header of a file that holds some tensors."""
    return FileHeader(name, size, layer=tensors)


def test_headers_come_back_as_they_were_and_files_share_a_template() -> None:
    files = [make_tensors(0, "0"), make_tensors(1, "12", at=640, crc=None)]
    headers = [make_header(tensors, f"file{number}", number) for number, tensors in enumerate(files)]
    codec = HeaderCodec(FileHeader("first", 1))
    short = [codec.encode(header) for header in headers]
    assert all(isinstance(each, HeaderDelta) for each in short)
    again = list(map(codec.decode, pickle.loads(pickle.dumps(short))))
    assert [replace(each, layer=dict(each.layer or {})) for each in again] == headers
    tensors = [each.layer for each in again if isinstance(each.layer, ExpertTensors)]
    assert tensors[0].template is tensors[1].template
    assert LAYER.format(0) + "0.other" not in tensors[0]


def change(tensors: dict[str, Piece], **fields: object) -> dict[str, Piece]:
    """The second tensor with other values of some fields."""
    first, (name, piece) = tensors.items()
    return dict([first, (name, replace(piece, **fields))])  # type: ignore[arg-type]


PLAIN = make_tensors(0, "0")


@pytest.mark.parametrize(
    "tensors",
    [
        {**PLAIN, **make_tensors(0, "1")},
        {**PLAIN, "dense": next(iter(PLAIN.values()))},
        make_tensors(0, "07"),
        change(PLAIN, shape=(0,)),
        change(PLAIN, fault="permuted"),
        {},
    ],
    ids=["two experts", "dense too", "another spelling", "empty", "faulty", "nothing"],
)
def test_other_files_stay_as_they_are(tensors: dict[str, Piece]) -> None:
    header = make_header(tensors)
    assert HeaderCodec(FileHeader("first", 1)).encode(header) is header


def test_experts_are_counted_by_their_files() -> None:
    codec = HeaderCodec(FileHeader("first", 1))
    files = [make_header(make_tensors(layer, number)) for layer, number in ((0, "0"), (0, "1"), (1, "0"))]
    short = [codec.decode(codec.encode(header)) for header in files]
    headers = [*short, make_header(make_tensors(0, "2")), make_header(PLAIN)]
    assert count_filed(headers) == {LAYER.format(0): 3, LAYER.format(1): 1}
