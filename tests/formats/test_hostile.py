"""Special files and hostile names in a checkpoint's folder: opening neither blocks nor leaves the folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.formats import open_checkpoint, read_latest
from deepspeed_ucp.formats.latest import find_checkpoint
from deepspeed_ucp.formats.open import survey_checkpoint
from deepspeed_ucp.io.store import open_regular
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (9, 5)), Param("b", (17,), group=1)))
OPTIM = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


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
def test_special_files_in_place_of_a_state_file_are_named(
    folder: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / OPTIM).unlink()
    ODD[kind](folder / OPTIM)
    with pytest.raises(CheckpointError, match=f"{OPTIM}: cannot be read|{OPTIM} is missing"):
        open_checkpoint(str(folder), Comm())
    assert [finding.file for finding in survey_checkpoint(str(folder), Comm()).findings] == [OPTIM]
    assert main(["verify", str(folder)]) == 1
    assert OPTIM in capsys.readouterr().out
    assert main(["inspect", str(folder)]) == 2
    assert OPTIM in capsys.readouterr().out


@pytest.mark.parametrize("kind", ODD)
def test_special_files_of_no_save_are_ignored(folder: Path, kind: str) -> None:
    ODD[kind](folder / "zero_pp_rank_7_mp_rank_00_optim_states.pt")
    ODD[kind](folder.parent / "global_step9")
    assert open_checkpoint(str(folder), Comm()).stored.atoms
    assert find_checkpoint(str(folder.parent)) == str(folder)


def test_links_and_deeper_tags_are_followed(tmp_path: Path) -> None:
    """Content-addressed stores consist of links out of the folder."""
    folder = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1, 3), tag="run/step3")
    assert find_checkpoint(str(tmp_path)) == str(folder)
    (tmp_path / "store").mkdir()
    os.rename(folder / OPTIM, tmp_path / "store" / "0f3a")
    (folder / OPTIM).symlink_to(tmp_path / "store" / "0f3a")
    (tmp_path / "link").symlink_to(folder)
    assert open_checkpoint(str(tmp_path / "link"), Comm()).stored.atoms


@pytest.mark.parametrize("kind", sorted(set(ODD) - {"dangling"}))
def test_a_special_file_as_latest_is_refused(folder: Path, kind: str) -> None:
    (folder.parent / "latest").unlink()
    ODD[kind](folder.parent / "latest")
    with pytest.raises(CheckpointError, match="latest: cannot be read"):
        read_latest(str(folder.parent))
    assert main(["verify", str(folder.parent)]) == 1


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
    with pytest.raises(OSError, match="is a FIFO"):
        open_regular(str(tmp_path / "fifo"))
