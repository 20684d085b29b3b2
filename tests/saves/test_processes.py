"""Whole jobs: one that ends, one that is killed after a save, and what the next one finds."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.testing.ports import hold_port
from tests.saves.saving import is_whole
from tests.support.forked import start_script
from tests.support.until import wait_until

SCRIPT = Path(__file__).parent / "script.py"


class Rank:
    """One of a job, whose output goes to a file."""

    def __init__(self, log: Path, rank: int, port: int, ranks: int, *arguments: object) -> None:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.log = log
        self.process = start_script(SCRIPT, arguments, log, variables)

    def end(self) -> tuple[list[Any], str, int]:
        """What its load found, a digest of its weights in the end, and its exit code."""
        self.process.join(240)
        self.process.kill()
        self.process.join()
        output = self.log.read_text()
        told = dict(line.split(" ", 1) for line in output.splitlines() if line.startswith(("FOUND ", "WEIGHTS ")))
        assert "FOUND" in told, output
        assert self.process.exitcode is not None
        return json.loads(told["FOUND"]), told.get("WEIGHTS", ""), self.process.exitcode


def run(log: Path, ranks: int, *arguments: object) -> tuple[list[Any], str, int]:
    """What all ranks of a job tell in its end; their output goes to files of a folder."""
    log.mkdir()
    with hold_port() as held:
        job = [Rank(log / str(rank), rank, held.getsockname()[1], ranks, *arguments) for rank in range(ranks)]
        told = [each.end() for each in job]
    assert all(each == told[0] for each in told)
    return told[0]


@pytest.mark.timeout(300)
def test_jobs_one_after_the_other(tmp_path: Path) -> None:
    """The first ends, and waits; the second is killed, and its writer goes on; the third finds all in memory."""
    folder, memory = tmp_path / "place", tmp_path / "memory"
    found, _, code = run(tmp_path / "1", 1, folder, memory, 2, "ended")
    assert (found[1], code) == (0, 0)
    assert (folder / "latest").read_text() == "global_step2" and is_whole(str(folder / "global_step2"))
    found, _, code = run(tmp_path / "2", 1, folder, memory, 2, "killed")
    assert code == -9
    assert found[0].startswith(str(memory)) and found[1:] == [2, 2]
    found, _, code = run(tmp_path / "3", 1, folder, memory, 0, "ended")
    assert found[0].startswith(str(memory)) and found[1:] == [4, 4]
    wait_until(lambda: (folder / "latest").read_text() == "global_step4")
    assert is_whole(str(folder / "global_step4"))
    assert [path for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.timeout(300)
def test_all_ranks_killed_between_snapshots(tmp_path: Path) -> None:
    """No more than the steps since the last one are lost, and the run goes on as the one that was not killed."""
    place, memory = tmp_path / "place", tmp_path / "memory"
    killed = run(tmp_path / "1", 2, place, memory, 8, "killed", 3)
    assert killed[0] == [None, 0, None] and killed[2] == -signal.SIGKILL
    (path, *found), weights, code = run(tmp_path / "2", 2, place, memory, 4, "ended", 3)
    assert path.startswith(str(memory)) and found == [6, 6] and code == 0
    # All ranks have the same samples, so that one trains as two.
    whole = run(tmp_path / "3", 1, tmp_path / "whole", memory, 10, "ended", 99)
    assert weights == whole[1] != killed[1]
    assert not place.exists()
