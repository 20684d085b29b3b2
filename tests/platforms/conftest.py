"""The reference run of all recipes."""

from __future__ import annotations

import pytest

from tests.platforms.jobs import SCRIPT, Run, Steps
from tests.support.forked import start_script


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """The steps of an uninterrupted run on one rank."""
    run = Run(tmp_path_factory.mktemp("reference"))
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    process = start_script(SCRIPT, run.command[1:], run.output, alone)
    process.join()
    assert process.exitcode == 0, run.output.read_text()[-2000:]
    return {each["step"]: each for each in run.read("step")}
