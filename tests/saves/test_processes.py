"""Whole jobs: one ends, one is killed after a save, and the next one loads from memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from deepspeed_ucp.saves.memory import Job, find_root, is_locked, list_jobs
from deepspeed_ucp.testing.world import hold_port
from tests.saves.saving import PATIENCE, TAG, is_whole, make_save
from tests.support.forked import start_script
from tests.support.until import wait_until

SCRIPT = Path(__file__).parent / "script.py"


class Rank:
    """A rank of a job, with its output in a file."""

    def __init__(self, log: Path, rank: int, port: int, ranks: int, *arguments: object) -> None:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.log = log
        self.process = start_script(SCRIPT, arguments, log, variables)

    def end(self) -> tuple[list[Any], str, int]:
        """Return the result of its load, the final digest of its weights, and its exit code."""
        self.process.join(240)
        self.process.kill()
        self.process.join()
        output = self.log.read_text()
        found = dict(line.split(" ", 1) for line in output.splitlines() if line.startswith(("FOUND ", "WEIGHTS ")))
        assert "FOUND" in found, output
        assert self.process.exitcode is not None
        return json.loads(found["FOUND"]), found.get("WEIGHTS", ""), self.process.exitcode


def run(log: Path, ranks: int, *arguments: object) -> tuple[list[Any], str, int]:
    """Run a job; return the result of its ranks, which must be equal. Their output is in a folder."""
    log.mkdir()
    with hold_port() as held:
        job = [Rank(log / str(rank), rank, held.getsockname()[1], ranks, *arguments) for rank in range(ranks)]
        results = [each.end() for each in job]
    assert all(each == results[0] for each in results)
    return results[0]


def test_each_job_loads_the_last_save_of_the_job_before(tmp_path: Path) -> None:
    """The first job ends and frees memory. The second is killed; its writer continues. The third loads from memory."""
    folder, memory = tmp_path / "destination", tmp_path / "memory"
    found, _, code = run(tmp_path / "1", 1, folder, memory, 2, "ended")
    assert (found[1], code) == (0, 0)
    assert (folder / "latest").read_text() == "global_step2" and is_whole(str(folder / "global_step2"))
    wait_until(lambda: list_jobs(find_root(str(memory))) == [])
    found, _, code = run(tmp_path / "2", 1, folder, memory, 2, "killed")
    assert code == -9
    assert found[0].startswith(str(folder)) and found[1:] == [2, 2]
    found, _, code = run(tmp_path / "3", 1, folder, memory, 0, "ended")
    assert found[0].startswith(str(memory)) and found[1:] == [4, 4]
    wait_until(lambda: (folder / "latest").read_text() == "global_step4")
    assert is_whole(str(folder / "global_step4"))
    wait_until(lambda: not [path for path in folder.iterdir() if path.name.startswith(".")])  # records too


def test_an_uncaught_error_keeps_saves_in_memory(tmp_path: Path) -> None:
    code = (
        "import sys; from deepspeed_ucp.config import SaveOptions, UniversalConfig\n"
        "from deepspeed_ucp.saves.memory import name_job; from deepspeed_ucp.saves.saver import Saver\n"
        "options = SaveOptions(memory=sys.argv[1], wait_s=float(sys.argv[2]))\n"
        "saver = Saver(UniversalConfig(save=options), name_job(), 0, [0]); saver.open()\n"
        "print(saver.job.folder, flush=True); input()\n"
        "saver.writer.notify()\n"
        "raise ValueError('an uncaught error')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "memory"), str(PATIENCE)]
    with subprocess.Popen(
        command, cwd=SCRIPT.parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        make_save(Job(process.stdout.readline().rstrip("\n")), str(tmp_path / "destination"))
        assert "an uncaught error" in process.communicate("\n")[1]
    (job,) = list_jobs(find_root(str(tmp_path / "memory")))
    wait_until(lambda: not is_locked(job))
    assert is_whole(str(tmp_path / "destination" / TAG)) and [save.tag for save in job.list_saves()] == [TAG]


def test_a_run_continues_after_all_ranks_are_killed_between_snapshots(tmp_path: Path) -> None:
    """Only the steps since the last snapshot are lost. The result equals an uninterrupted run's to the bit."""
    destination, memory = tmp_path / "destination", tmp_path / "memory"
    killed = run(tmp_path / "1", 2, destination, memory, 8, "killed", 3)
    assert killed[0] == [None, 0, None] and killed[2] == -signal.SIGKILL
    (path, *found), weights, code = run(tmp_path / "2", 2, destination, memory, 4, "ended", 3)
    assert path.startswith(str(memory)) and found == [6, 6] and code == 0
    # All ranks have the same samples, so one rank computes the same as two.
    whole = run(tmp_path / "3", 1, tmp_path / "whole", memory, 10, "ended", 99)
    assert weights == whole[1] != killed[1]
    assert not destination.exists()
