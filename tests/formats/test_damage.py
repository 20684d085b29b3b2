"""Damaged, special and hostile files give the right header, or an error with the file's name, without blocking."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, UcpError
from deepspeed_ucp.formats import read_latest
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.deepspeed.reading import read_file
from deepspeed_ucp.formats.findings import WARNING, Finding, fold_findings, make_error
from deepspeed_ucp.formats.latest import find_checkpoint
from deepspeed_ucp.formats.open import survey_checkpoint
from deepspeed_ucp.io.store import open_stream
from tests.formats.saves import STATES, check_refused, find_states, make_files, open_alone, open_files, shard
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (3, 5)), Param("b", (7,), group=1)), {"count": torch.arange(3)})
NAMES = (STATES, shard(0))


@pytest.fixture(scope="module", params=["zip", "legacy"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    path = write_checkpoint(folder, MODEL, random_state(MODEL, 0), Topology(1), legacy=request.param == "legacy")
    return {name: (path / name).read_bytes() for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_truncated_and_other_files_are_refused(files: dict[str, bytes], tmp_path: Path, name: str) -> None:
    whole = files[name]
    cuts = [whole[:at] for at in {*range(0, len(whole), 61), *range(len(whole) - 60, len(whole)), *range(20)}]
    others = [b"", b"PK", b"PK\3\4" + bytes(100), bytes(1000), b"not a checkpoint", b"\x80\x02N."]
    for data in (*cuts, *others):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=f"{tmp_path}/{name}"):
            read_file(str(tmp_path), name)


@pytest.mark.parametrize(
    "content", [None, [1, 2], torch.ones(2), {}, {"optimizer_state_dict": None}], ids=lambda c: type(c).__name__
)
def test_a_file_without_optimizer_states_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / NAMES[1])
    with pytest.raises(CheckpointError, match=f"{NAMES[1]}: (holds a |has no optimizer_state_dict)"):
        read_file(str(tmp_path), NAMES[1])


def test_headers_show_faults_that_prevent_a_load(tmp_path: Path) -> None:
    """Missing names of stage 0's states are no fault here: an engine supplies them."""

    def survey(folder: Path, *also: str) -> UcpError | None:
        return survey_checkpoint(str(folder), Comm(), Naming(groups="module"), also=also).fault

    for tag, topology in (("stage 0", Topology(0, 2)), ("stage 1", Topology(1, 2))):
        path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), topology, tag=tag)
        assert survey(path) is None
    os.rename(path / NAMES[1], tmp_path / NAMES[1])
    assert "is missing" in str(survey(path))
    assert survey(path, str(tmp_path)) is None
    with pytest.raises(CheckpointError, match="cannot be listed"):
        survey(tmp_path / "absent")


def test_equal_findings_of_many_files_are_merged(tmp_path: Path) -> None:
    """Numbers of files become ranges. Texts that differ only in figures show the first file's figures."""
    name = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    names = [name.format(rank) for rank in (0, 1, 2, 5)]
    missing = [Finding("missing", each, f"run/{each} is missing; do.") for each in names]
    cut = [Finding("header", name.format(rank), f"run/{name.format(rank)}: has {rank}0 bytes.") for rank in (3, 4, 7)]
    alone = [Finding("crc", name.format(9), "a"), Finding("inconsistent", "", "1"), Finding("inconsistent", "", "2")]
    texts = [each.text for each in fold_findings([*missing, *cut, *alone])]
    assert texts == [
        f"run/{name.format('{0-2,5}')} (4 files) is missing; do.",
        f"run/{name.format(3)}: has 30 bytes. Likewise {name.format('{4,7}')} (2 more files).",
        *("a", "1", "2"),
    ]
    warning = Finding("missing", name.format(8), f"run/{name.format(8)} is missing; do.", WARNING)
    assert len(fold_findings([*missing, warning])) == 2
    error = make_error([*missing, *cut, warning])
    assert isinstance(error, CheckpointError) and error.args == tuple(texts[:2])
    assert make_error([warning]) is None


OPTIM = shard(1)


def bind(path: Path) -> None:
    place = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(place)


ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": bind,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    "folder": os.mkdir,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1, 3))


@pytest.mark.parametrize("kind", ODD)
def test_special_files_as_state_files_are_refused(folder: Path, kind: str) -> None:
    (folder / OPTIM).unlink()
    ODD[kind](folder / OPTIM)
    check_refused(folder, f"{OPTIM}: cannot be read|{OPTIM} is missing")
    assert [finding.file for finding in survey_checkpoint(str(folder), Comm()).findings] == [OPTIM]


@pytest.mark.parametrize("kind", ODD)
def test_special_files_of_other_names_are_ignored(folder: Path, kind: str) -> None:
    ODD[kind](folder / shard(7))
    ODD[kind](folder.parent / "global_step9")
    assert open_alone(folder).atoms
    assert find_checkpoint(str(folder.parent)) == str(folder)


def test_links_and_deeper_tags_are_followed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1, 3), tag="run/step3")
    assert find_checkpoint(str(tmp_path)) == str(folder)
    (tmp_path / "link").symlink_to(folder)
    assert open_alone(tmp_path / "link").atoms


@pytest.mark.parametrize("kind", sorted(set(ODD) - {"dangling"}))
def test_a_special_file_as_latest_is_refused(folder: Path, kind: str) -> None:
    (folder.parent / "latest").unlink()
    ODD[kind](folder.parent / "latest")
    with pytest.raises(CheckpointError, match="latest: cannot be read"):
        read_latest(str(folder.parent))
    assert main(["verify", str(folder.parent)]) == 2


@pytest.mark.parametrize("tag", ["../other", "a/../../other", "/tmp", "..", "x" * 5000, "a\0b", "a\nb", "a\x1b[31mb"])
def test_a_tag_outside_of_the_folder_is_refused(tmp_path: Path, tag: str) -> None:
    folder = write_checkpoint(tmp_path / "other" / "run", MODEL, random_state(MODEL, 0), Topology(1, 1), tag="t")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text(tag)
    (tmp_path / "run" / "t").symlink_to(folder)
    for read in (read_latest, find_checkpoint):
        with pytest.raises(CheckpointError, match="latest: (names|holds) ") as caught:
            read(str(tmp_path / "run"))
        assert len(str(caught.value)) < 1000


def test_opening_a_new_fifo_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    regular = os.stat(tmp_path / "file")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(os, "stat", lambda *_: regular)
    with pytest.raises(OSError, match="a FIFO"):
        open_stream(str(tmp_path / "fifo"))


def test_each_atom_with_a_gap_has_a_line_in_the_error(tmp_path: Path) -> None:
    """A long list is truncated."""
    for number, lines in ((2, 2), (19, 17)):
        model = Model(tuple(Param(f"p{at}", (8,), group=at) for at in range(number)))
        files = make_files(model, Topology(1, 2))
        for states in find_states(files[shard(0)])["state"].values():
            del states["exp_avg"]
        with pytest.raises(CheckpointError, match=r"p0 \(exp_avg, .*: elements \[0, 4\) are missing") as caught:
            open_files(tmp_path / str(number), files)
        found = str(caught.value).splitlines()
        assert len(found) == lines and (number == 2 or found[-1] == "… and 3 more faults.")
