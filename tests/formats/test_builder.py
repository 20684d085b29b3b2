"""Coverage of atoms as they are put together."""

from __future__ import annotations

import pytest

from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.formats.deepspeed.builder import MOST_FAULTS, Builder, SavedRank
from deepspeed_ucp.formats.deepspeed.headers import FileHeader, Piece
from deepspeed_ucp.formats.deepspeed.save import Save
from deepspeed_ucp.formats.places import FileTable
from deepspeed_ucp.model.flat import Cut
from deepspeed_ucp.torchsave.records import FileRecord


def build(cuts: dict[str, Cut], shape: tuple[int, ...] = (8,)) -> Builder:
    """Atoms of one flat buffer of 8 elements each."""
    header = FileHeader("file.pt", 4096)
    builder = Builder(Save(FileTable.of("folder", {}), {}, models=[[header]], shards=[[]]))
    piece = Piece(FileRecord("data/0", 0, 4096, None), 0, (1024,), "float32")
    builder.add_cuts(SavedRank(shapes=dict.fromkeys(cuts, shape)), "fp32", list(cuts.values()), header, piece)
    return builder


def test_each_atom_with_a_gap_has_a_line_in_the_error() -> None:
    cuts = {"whole": Cut("whole", 0, 8, 0), "first": Cut("first", 0, 5, 8), "second": Cut("second", 2, 6, 16)}
    with pytest.raises(CheckpointError) as caught:
        build(cuts).finish_atoms()
    lines = str(caught.value).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["first", "second"]
    assert "[0, 2) are missing" in lines[1]


def test_a_long_list_is_cut_short() -> None:
    cuts = {f"p{i}": Cut(f"p{i}", 0, 7, 8 * i) for i in range(MOST_FAULTS + 3)}
    with pytest.raises(CheckpointError) as caught:
        build(cuts).finish_atoms()
    assert str(caught.value).splitlines()[-1] == "… and 3 more tensors."
    assert len(str(caught.value).splitlines()) == MOST_FAULTS + 1
