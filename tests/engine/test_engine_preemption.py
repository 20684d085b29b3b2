"""Jobs with data-loader workers that the scheduler or the launcher signals, under the real launchers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deepspeed_ucp.testing.world import hold_port
from tests.platforms.jobs import DEEPSPEED, RANKS, TORCHRUN, find_processes, kill, make_environment
from tests.support.until import wait_until

SCRIPT = str(Path(__file__).with_name("preempted_script.py"))
LAUNCHERS: dict[str, tuple[list[str], Callable[[int, int], None], list[str]]] = {
    # The agent signals the process group of each rank.
    "torchrun": ([*TORCHRUN, "--master-port={port}"], os.kill, ["spawn", "forkserver"]),
    # A scheduler signals all processes; launch.py signals all descendants of a rank again.
    "deepspeed": ([*DEEPSPEED[:2], "--no_local_rank", "--master_port={port}"], os.killpg, ["fork"]),
}


@pytest.mark.exhaustive  # test_children.py has the workers, test_engine_carry.py the saves
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_with_data_loader_workers_saves_on_a_signal(launcher: str, tmp_path: Path) -> None:
    """The signal arrives in an evaluation or a wait for data. Workers and helpers survive it until their rank ends."""
    command, send, methods = LAUNCHERS[launcher]
    output, mark = tmp_path / "output", f"UCP_TEST={tmp_path}"

    def list_events(event: str) -> list[str]:
        return [(tmp_path / f"{event}-{rank}").read_text() for rank in range(RANKS)]

    def wait_for_event(event: str) -> None:
        def came() -> bool:
            assert process.poll() is None, output.read_text()[-4000:]
            return all((tmp_path / f"{event}-{rank}").exists() for rank in range(RANKS))

        wait_until(came, 240)

    with hold_port() as held, output.open("wb") as log:
        environment = make_environment(UCP_TEST=str(tmp_path))
        port = str(held.getsockname()[1])
        process = subprocess.Popen(
            [*(part.format(port=port) for part in command), SCRIPT, str(tmp_path), *methods],
            env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            wait_for_event("waits")
            for pid in map(int, list_events("evaluates")):  # like Slurm's --signal=USR1
                rank = psutil.Process(pid)
                for each in [rank, *rank.children(recursive=True)]:
                    each.send_signal(signal.SIGUSR1)
            (tmp_path / "evaluate").touch()
            wait_for_event("trains")
            assert (tmp_path / "saves" / "latest").read_text() == "global_step2"
            assert list_events("program") == [str(-signal.SIGUSR1)] * RANKS  # like without the plugin
            assert list_events("helper") == ["2"] * RANKS
            send(process.pid, signal.SIGTERM)
            wait_until(lambda: "SIGTERM received: " in output.read_text())
            (tmp_path / "train").touch()
            process.wait(240)
            wait_until(lambda: not find_processes(mark), 60)
        finally:
            kill(find_processes(mark))
            process.kill()
            for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
                left.unlink(missing_ok=True)
    log_text = output.read_text(errors="replace")
    assert (tmp_path / "saves" / "latest").read_text() == "global_step3", log_text[-4000:]
    assert log_text.count("SIGTERM: saving to ") == log_text.count("SIGUSR1: saving to ") == 1, log_text[-4000:]
    assert not any(
        each in log_text for each in ("DataLoader worker", "resource_tracker", "SIGKILL", "no save was made")
    ), log_text[-4000:]
