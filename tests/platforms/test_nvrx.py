"""examples/platforms/nvrx under the real ``ft_launcher``: its monitor gets steps and sections, and kills hung ranks."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.platforms.jobs import RECIPES, STEPS, Run, Steps
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
    variables = {"RANKS_PER_NODE": 1, "ENDPOINT": f"127.0.0.1:{find_port()}", "RDZV_CONF": "last_call_timeout=2"}
    variables |= {"GRACE": 3, "FT_CONFIG": tmp_path / "ft.yaml"}
    command = ["bash", RECIPES / "nvrx" / "train.sh", *run.command]
    with run.start(*command, **variables) as first, run.start(*command, **variables) as second:
        run.wait_for_step(4, starts=1)
        os.kill(run.read("started")[-1]["pid"], signal.SIGSTOP)
        held.unlink()
        run.wait_for_step(STEPS, starts=2)
        for agent in first, second:
            run.wait_for_end(agent)
    assert "Section 'step' has been open" in run.output.read_text()
    resumed = run.read("loaded")[-1]["step"]
    run.check(reference, (2, 0), (2, resumed))
