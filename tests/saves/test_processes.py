"""Whole jobs: one ends, one is killed after a save, and the next one loads from memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepspeed_ucp.saves.memory import find_root, list_jobs
from deepspeed_ucp.testing.world import hold_port
from tests.saves.saving import is_whole
from tests.support.forked import start_script
from tests.support.until import wait_until

SCRIPT = Path(__file__).parent / "script.py"


def run(log: Path, *arguments: object) -> tuple[list[Any], int]:
    """Run a job of one rank; return the result of its load, and its exit code."""
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    with hold_port() as held:
        process = start_script(SCRIPT, arguments, log, {**variables, "MASTER_PORT": held.getsockname()[1]})
        process.join(240)
        process.kill()
        process.join()
    output = log.read_text()
    found = [line.removeprefix("FOUND ") for line in output.splitlines() if line.startswith("FOUND ")]
    assert found and process.exitcode is not None, output
    return json.loads(found[0]), process.exitcode


def test_each_job_loads_the_last_save_of_the_job_before(tmp_path: Path) -> None:
    """The first job ends and frees memory. The second is killed; its writer continues. The third loads from memory."""
    folder, memory = tmp_path / "destination", tmp_path / "memory"
    found, code = run(tmp_path / "1", folder, memory, 2, "ended")
    assert (found[1], code) == (0, 0)
    assert (folder / "latest").read_text() == "global_step2" and is_whole(str(folder / "global_step2"))
    wait_until(lambda: list_jobs(find_root(str(memory))) == [])
    found, code = run(tmp_path / "2", folder, memory, 2, "killed")
    assert code == -9
    assert found[0].startswith(str(folder)) and found[1:] == [2, 2]
    found, code = run(tmp_path / "3", folder, memory, 0, "ended")
    assert found[0].startswith(str(memory)) and found[1:] == [4, 4]
    wait_until(lambda: (folder / "latest").read_text() == "global_step4")
    assert is_whole(str(folder / "global_step4"))
    wait_until(lambda: not [path for path in folder.iterdir() if path.name.startswith(".")])  # records too
