"""examples/platforms/nvrx under the real ``ft_launcher``: its monitor gets steps and sections, and kills hung ranks."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.platforms.jobs import LONGEST, RECIPES, Run, Steps, find_processes, kill, make_environment
from tests.support.ports import find_port

MISSING = importlib.util.find_spec("nvidia_resiliency_ext") is None or shutil.which("ft_launcher") is None
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.skipif(MISSING, reason="no nvidia-resiliency-ext")]

TIMEOUTS = """
fault_tolerance:
  workload_check_interval: 0.5
  initial_rank_heartbeat_timeout: 60
  rank_heartbeat_timeout: 60
  rank_section_timeouts: {setup: 60, step: 4, checkpointing: 60}
"""


def test_nvrx_kills_a_hung_rank_and_the_job_resumes(reference: Steps, tmp_path: Path) -> None:
    """There are two agents with one rank each. One rank is stopped in a step."""
    run = Run(tmp_path)
    held = run.hold(4)
    (tmp_path / "ft.yaml").write_text(TIMEOUTS)
    fields = {
        "RANKS_PER_NODE": "1",
        "ENDPOINT": f"127.0.0.1:{find_port()}",
        "RDZV_CONF": "last_call_timeout=2",
        "GRACE": "3",
    }
    environment = make_environment(**fields, FT_CONFIG=str(tmp_path / "ft.yaml"))
    command = ["bash", str(RECIPES / "nvrx" / "train.sh"), *run.command()]
    agents, logs = list[subprocess.Popen[bytes]](), [tmp_path / "first", tmp_path / "second"]

    def tell() -> str:
        return "\n".join(log.read_text()[-3000:] for log in logs)

    try:
        for log in logs:
            with log.open("wb") as output:
                agents.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        run.wait_for_step(4, starts=1, tell=tell)
        os.kill(run.read("started")[-1]["pid"], signal.SIGSTOP)
        held.unlink()
        run.wait_for_step(run.steps, starts=2, tell=tell)
        assert [agent.wait(timeout=LONGEST) for agent in agents] == [0, 0], tell()
    finally:
        kill(find_processes(f"FT_CONFIG={tmp_path / 'ft.yaml'}"))
        for agent in agents:
            agent.wait(timeout=LONGEST)
    assert any("Section 'step' has been open" in log.read_text() for log in logs), tell()
    assert [world for world, _ in run.find_starts()] == [2, 2]
    run.check(reference)
