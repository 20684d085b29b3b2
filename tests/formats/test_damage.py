"""A damaged file gives the right header or an error that names the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, UcpError, UnsupportedError
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.deepspeed.reading import read_file
from deepspeed_ucp.formats.findings import WARNING, Finding, fold_findings, make_error
from deepspeed_ucp.formats.open import survey_checkpoint
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (3, 5)), Param("b", (7,), group=1)), {"count": torch.arange(3)})
NAMES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


@pytest.fixture(scope="module", params=["zip", "legacy"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Bytes of a model and an optimizer file by name."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_checkpoint(folder, MODEL, random_state(MODEL, 0), Topology(1), legacy=request.param == "legacy")
    return {name: (path / name).read_bytes() for name in NAMES}


def look(folder: Path, name: str, data: bytes) -> object:
    """The header of a file with such bytes, or the error that a user may get to see."""
    (folder / name).write_bytes(data)
    try:
        return read_file(str(folder), name)
    except (CheckpointError, UnsupportedError) as caught:
        error = caught
    assert str(folder / name) in str(error)
    return error


@pytest.mark.parametrize("name", NAMES)
def test_truncated_and_other_files_are_refused(files: dict[str, bytes], tmp_path: Path, name: str) -> None:
    whole = files[name]
    cuts = [whole[:at] for at in {*range(0, len(whole), 61), *range(len(whole) - 60, len(whole)), *range(20)}]
    others = [b"", b"PK", b"PK\3\4" + bytes(100), bytes(1000), b"not a checkpoint", b"\x80\x02N."]
    for data in (*cuts, *others):
        assert isinstance(look(tmp_path, name, data), CheckpointError), len(data)


@pytest.mark.parametrize(
    "content", [None, [1, 2], torch.ones(2), {}, {"optimizer_state_dict": None}], ids=lambda c: type(c).__name__
)
def test_a_file_without_optimizer_states_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / NAMES[1])
    with pytest.raises(CheckpointError, match=f"{NAMES[1]}: (holds a |has no optimizer_state_dict)"):
        read_file(str(tmp_path), NAMES[1])


def survey(folder: Path, *also: str) -> UcpError | None:
    return survey_checkpoint(str(folder), Comm(), Naming(groups="module"), also=also).fault


def test_headers_show_faults_that_prevent_a_load(tmp_path: Path) -> None:
    """The names of stage 0's states need an engine, and are no fault here."""
    path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(0, 2))
    assert survey(path) is None
    path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1, 2), tag="other")
    assert survey(path) is None
    os.rename(path / NAMES[1], tmp_path / NAMES[1])
    assert "is missing" in str(survey(path))
    assert survey(path, str(tmp_path)) is None
    with pytest.raises(CheckpointError, match="cannot be listed"):
        survey(tmp_path / "absent")


def test_equal_findings_of_many_files_are_merged(tmp_path: Path) -> None:
    """Numbers of files become ranges; texts that differ in figures show those of the first file."""
    name = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    names = [name.format(rank) for rank in (0, 1, 2, 5)]
    missing = [Finding("missing", each, f"run/{each} is missing; do.") for each in names]
    cut = [Finding("header", name.format(rank), f"run/{name.format(rank)}: has {rank}0 bytes.") for rank in (3, 4, 7)]
    alone = [Finding("crc", name.format(9), "a"), Finding("inconsistent", "", "1"), Finding("inconsistent", "", "2")]
    told = [each.text for each in fold_findings([*missing, *cut, *alone])]
    assert told == [
        f"run/{name.format('{0-2,5}')} (4 files) is missing; do.",
        f"run/{name.format(3)}: has 30 bytes. Likewise {name.format('{4,7}')} (2 more files).",
        *("a", "1", "2"),
    ]
    warning = Finding("missing", name.format(8), f"run/{name.format(8)} is missing; do.", WARNING)
    assert len(fold_findings([*missing, warning])) == 2
    error = make_error([*missing, *cut, warning])
    assert isinstance(error, CheckpointError) and error.args == tuple(told[:2])
    assert make_error([warning]) is None
