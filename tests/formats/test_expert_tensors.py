"""Compact headers of experts' and optimizers' files that differ only in offsets."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from deepspeed_ucp.formats.deepspeed.headers import (
    Batches,
    ExpertTensors,
    FileHeader,
    HeaderCodec,
    HeaderDelta,
    OptimHeader,
    Piece,
    TensorStates,
    count_filed,
)
from deepspeed_ucp.torchsave.records import FileRecord

LAYER = "body.{}.deepspeed_moe.experts.deepspeed_experts."


def make_tensors(layer: int, number: str, at: int = 64, crc: int | None = 7) -> dict[str, Piece]:
    """Return two tensors; the second begins inside its record."""
    first = Piece(FileRecord("data/0", at, 24, crc), 0, (2, 3), "float32")
    second = Piece(FileRecord("data/1", at + 64, 20, crc), 8, (3,), "float32")
    return {f"{LAYER.format(layer)}{number}.{end}": piece for end, piece in (("w", first), ("b", second))}


def make_header(tensors: dict[str, Piece], name: str = "expert", size: int = 1) -> FileHeader:
    """The header of a file that holds some tensors."""
    return FileHeader(name, size, layer=tensors)


def test_decoded_headers_equal_the_originals_and_share_a_template() -> None:
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
def test_other_headers_are_not_encoded(tensors: dict[str, Piece]) -> None:
    header = make_header(tensors)
    assert HeaderCodec(FileHeader("first", 1)).encode(header) is header


def test_experts_are_counted_by_their_files() -> None:
    codec = HeaderCodec(FileHeader("first", 1))
    files = [make_header(make_tensors(layer, number)) for layer, number in ((0, "0"), (0, "1"), (1, "0"))]
    short = [codec.decode(codec.encode(header)) for header in files]
    headers = [*short, make_header(make_tensors(0, "2")), make_header(PLAIN)]
    assert count_filed(headers) == {LAYER.format(0): 3, LAYER.format(1): 1}


def make_optim(rank: int, numel: int, dtype: str = "float32") -> FileHeader:
    """The file of a rank with one flat buffer, whose master and state share a record."""
    record = FileRecord("data/0", 64 * rank, 8 * numel, None if rank else 7)
    master, state = (Piece(record, at * 4 * numel, (numel,), dtype) for at in range(2))
    tensors = (TensorStates({"exp_avg": state}, {"step": 3}),)
    slices, paddings = ((("w", rank, numel),),), (rank,)
    optim = OptimHeader("zero12", 1, (master,), tensors, (0,), ({"lr": 0.1},), slices, paddings=paddings)
    return FileHeader(f"rank{rank}", 1000 + rank, rank, optim=optim)


def unfold(header: FileHeader) -> FileHeader:
    """Build all pieces of a header."""
    optim = header.optim
    return replace(header, optim=optim and replace(optim, masters=(*optim.masters,), tensors=(*optim.tensors,)))


def test_decoded_optimizer_headers_equal_the_originals_and_form_a_table() -> None:
    first, *others = headers = [make_optim(rank, numel) for rank, numel in enumerate((8, 5, 8))]
    odd = make_optim(3, 8, "bfloat16")
    codec = HeaderCodec(first)
    short = [codec.encode(header) for header in (*others, odd)]
    assert [each.template is None for each in short if isinstance(each, HeaderDelta)] == [True, True, False]
    again = list(map(codec.decode, pickle.loads(pickle.dumps(short))))
    assert list(map(unfold, again)) == [*others, odd]
    alike, apart = Batches([first, *again]).list_runs([*again, first])
    assert (alike.parts, apart.parts) == ([0, 1, 3], [2])
    assert alike.headers == [*again[:2], first]
    assert alike.pick(0, "offset") == [64, 128, 0]
    assert alike.pick(1, "start") == [20, 32, 32]
    assert alike.pick_padding(0) == [1, 2, 0]
    assert alike.batch.template.firsts == [0, 0]
    assert headers[0].optim and alike.batch.make_piece(1, 0) == headers[0].optim.tensors[0].states["exp_avg"]
