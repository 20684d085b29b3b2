"""``ds_ucp verify``: exit codes and JSON (``test_golden`` has the texts)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from deepspeed_ucp.cli.common import find_folders
from deepspeed_ucp.comm import Comm
from tests.cli.samples import write_sample
from tests.support.damage import flip_largest
from tests.support.mpi import needs_mpi, run_mpi
from tests.synth import Topology

OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sample(tmp_path, Topology(1, 3))


@needs_mpi
def test_ranks_of_mpirun_share_the_files_of_verify(folder: Path) -> None:
    flip_largest(folder / OPTIM.format(1))
    result = run_mpi(2, ["-m", "deepspeed_ucp", "verify", str(folder), "--json"])
    assert result.returncode != 0
    found = json.loads(result.stdout[result.stdout.index("{") : result.stdout.rindex("}") + 1])
    assert [fault["kind"] for fault in found["faults"]] == ["crc"]
    assert found["read"] == found["nbytes"]


def test_verify_uses_the_tag_of_the_first_place_in_all_places(folder: Path, tmp_path: Path) -> None:
    """A tag's folder may have any name in a further place."""
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
