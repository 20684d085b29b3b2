"""``ds_ucp verify``: exit codes, words and JSON."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.cli.common import find_folders
from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from tests.cli.samples import flip_largest, write_sample
from tests.support.mpi import needs_mpi, run_mpi
from tests.synth import Topology

OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A ZeRO-1 checkpoint of three ranks: its tag's folder."""
    return write_sample(tmp_path, Topology(1, 3))


def run(*argv: object) -> int:
    return main(["verify", *map(str, argv)])


def test_json_tells_everything(folder: Path, run_json: Any) -> None:
    code, told = run_json("verify", folder)
    assert (code, told["whole"], told["faults"], told["kind"]) == (0, True, [], "normal")
    assert {file["name"]: file["bytes"] for file in told["files"]} == {
        name: os.path.getsize(folder / name) for name in os.listdir(folder)
    }
    assert told["read"] == told["bytes"] == sum(file["bytes"] for file in told["files"])
    assert told["rate"] == pytest.approx(told["read"] / told["seconds"])


def test_faults_are_named_and_exit_1(folder: Path, run_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flip_largest(folder / OPTIM.format(1))
    (folder / OPTIM.format(2)).unlink()
    assert run(folder) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"FAULT [crc] {OPTIM.format(1)}: record data/") for line in lines)
    assert any(line.startswith("FAULT [missing]") and OPTIM.format(2) in line for line in lines)
    code, told = run_json("verify", folder)
    assert (code, told["whole"]) == (1, False)
    assert {(fault["kind"], fault["file"]) for fault in told["faults"]} == {
        ("crc", OPTIM.format(1)),
        ("missing", OPTIM.format(2)),
    }
    assert next(fault for fault in told["faults"] if fault["kind"] == "crc")["tensors"]


def test_a_foreign_checkpoint_that_does_not_open(tmp_path: Path, run_json: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(30))
    code, told = run_json("verify", tmp_path)
    assert (code, told["kind"]) == (1, "foreign")


@needs_mpi
def test_ranks_of_mpirun_share_the_files(folder: Path) -> None:
    flip_largest(folder / OPTIM.format(1))
    result = run_mpi(2, ["-m", "deepspeed_ucp", "verify", str(folder), "--json"])
    assert result.returncode != 0
    told = json.loads(result.stdout[result.stdout.index("{") : result.stdout.rindex("}") + 1])
    assert [fault["kind"] for fault in told["faults"]] == ["crc"]
    assert told["read"] == told["bytes"]


def test_every_place_means_the_tag_that_the_first_one_names(folder: Path, tmp_path: Path) -> None:
    """A tag's own folder is that tag under any name."""
    there = tmp_path / "there"
    copy = there / folder.name
    shutil.copytree(folder, copy)
    shutil.copytree(folder, there / "newer")
    shutil.copytree(folder, tmp_path / "else" / "renamed")
    (there / "latest").write_text("newer")
    run, comm = str(folder.parent), Comm()
    assert find_folders(run, [str(there)], comm) == [str(folder), str(copy)]
    assert find_folders(str(folder), [str(there), run], comm) == [str(folder), str(copy), str(folder)]
    renamed = str(tmp_path / "else" / "renamed")
    assert find_folders(renamed, [str(there)], comm) == [renamed, str(there / "newer")]
    assert find_folders(run, [renamed], comm) == [str(folder), renamed]
    assert find_folders(str(tmp_path / "absent"), [renamed, run], comm)[:2] == [renamed, str(folder)]
    assert os.path.basename(find_folders(str(tmp_path / "absent"), [str(there)], comm)[-1]) == "newer"
