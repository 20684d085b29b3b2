"""Jobs under real launchers: a script without the plugin; a job with data-loader workers that is signaled."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.testing.world import hold_port
from tests.platforms.jobs import DEEPSPEED, RANKS, TORCHRUN, find_processes, kill_all, make_environment
from tests.support.engines.cases import Case
from tests.support.engines.driver import Engines
from tests.support.until import wait_until

# --- a script without the plugin under `ds_ucp run` and launchers, or under the environment variable

SCRIPT = str(Path(__file__).with_name("untouched_script.py"))
ROOT = str(Path(__file__).parents[2])
MPIRUN = [shutil.which("mpirun") or "mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(RANKS)]
LAUNCHERS = {
    "torchrun": [*TORCHRUN, "--master-port={port}", "--no-python", "ds_ucp", "run"],
    "torchrun-module": [*TORCHRUN, "--master-port={port}", "-m", "deepspeed_ucp", "run"],  # compiles
    "deepspeed": [*DEEPSPEED, "--master_port={port}", "ds_ucp", "run"],
    "mpirun": [*MPIRUN, "ds_ucp", "run"],
    "environment": [sys.executable],
    "deepspeed-environment": [*DEEPSPEED[:-1], "--master_port={port}"],
}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}

NOT_COMPILED = """
import sys
from types import SimpleNamespace

# DeepSpeed compiles its shared-memory collectives at every first launch, which takes minutes, for inference alone.
import torch.utils.cpp_extension
operator = SimpleNamespace(initialize=lambda size, rank: None, vector_kernel_level=lambda: 0)
torch.utils.cpp_extension.load = lambda name, **options: {"deepspeed_shm_comm": operator}[name]
"""
DS_UCP = f"""{NOT_COMPILED}
from deepspeed_ucp.cli import main
sys.exit(main())
"""
START = f"""{NOT_COMPILED}
import site
site.addsitedir({ROOT!r})  # as for an installed package
"""


@pytest.fixture(scope="module")
def checkpoint(engines: Engines) -> Path:
    """Save the script's model on three ranks under ZeRO-1."""
    options = {"model": "sequential", "optimizer": "adam_like_fused_uniform"}
    return engines.save(Case(1, 3), steps=(5,), after=0, **options).folder


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Put `ds_ucp` on the PATH, and remove DeepSpeed's files from /dev/shm afterwards."""
    script = tmp_path / "bin" / "ds_ucp"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\n{DS_UCP}")
    script.chmod(0o755)
    with hold_port() as held:
        port = str(held.getsockname()[1])
        variables = make_environment(MASTER_PORT=port)
        yield variables | {"PATH": f"{script.parent}{os.pathsep}{variables['PATH']}"}
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        buffer.unlink(missing_ok=True)


@pytest.mark.exhaustive  # test_startup.py has the start, test_engine_saves.py engines with the variable
@pytest.mark.timeout(600)  # DeepSpeed compiles at the first time
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_unchanged_script_resumes_under_every_launcher(
    launcher: str, checkpoint: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """It also resumes under the environment variable without `ds_ucp run`."""
    command = [part.format(port=environment["MASTER_PORT"]) for part in LAUNCHERS[launcher]]
    if not Path(command[0]).exists():
        pytest.skip(f"{command[0]} is not installed")
    ds_config: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    ranks = 1 if launcher == "environment" else RANKS
    if ranks == 1:
        environment |= ALONE
    if launcher.endswith("environment"):
        (tmp_path / "bin" / "sitecustomize.py").write_text(START)
        path = f"{tmp_path / 'bin'}{os.pathsep}{environment['PYTHONPATH']}"
        environment |= {"PYTHONPATH": path, "DEEPSPEED_UCP": "1"}
        ds_config["checkpoint"] = {"load_universal": False}  # like OpenRLHF
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps(ds_config))
    arguments = ["--deepspeed_config", str(config), "--checkpoints", str(checkpoint)]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command += [SCRIPT, *arguments]
    done = subprocess.run(command, check=False, env=environment, cwd=tmp_path, timeout=500, **streams)
    output = done.stdout
    found = [json.loads(line.split("FOUND ", 1)[1]) for line in output.splitlines() if "FOUND " in line]
    assert done.returncode == 0 and len(found) == 1, output[-4000:]
    assert found[0]["direct"] is True
    assert (found[0]["world"], found[0]["steps"]) == (ranks, 6)
    assert (found[0]["main"], found[0]["file"]) == ("__main__", Path(SCRIPT).name)
    assert [a for a in found[0]["argv"] if not a.startswith("--local_rank")] == arguments
    assert output.count("deepspeed_ucp loads it") == 1
    by_itself = output.count("deepspeed_ucp is on by the environment variable DEEPSPEED_UCP")
    assert by_itself == launcher.endswith("environment")


# --- a job with data-loader workers that the scheduler or the launcher signals

PREEMPTED = str(Path(__file__).with_name("preempted_script.py"))
SIGNALERS: dict[str, tuple[list[str], Callable[[int, int], None]]] = {
    # The agent signals the process group of each rank.
    "torchrun": ([*TORCHRUN, "--master-port={port}"], os.kill),
    # A scheduler signals all processes; launch.py signals all descendants of a rank again.
    "deepspeed": ([*DEEPSPEED[:2], "--no_local_rank", "--master_port={port}"], os.killpg),
}


@pytest.mark.exhaustive  # test_children.py has the workers, test_engine_carry.py the saves
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", SIGNALERS)
def test_a_job_with_data_loader_workers_saves_on_a_signal(
    launcher: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """The signal arrives in a wait for data. Workers survive it until their rank ends."""
    command, send = SIGNALERS[launcher]
    output, mark = tmp_path / "output", f"UCP_TEST={tmp_path}"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [*(part.format(port=environment["MASTER_PORT"]) for part in command), PREEMPTED, str(tmp_path)],
            env=environment | {"UCP_TEST": str(tmp_path)}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            wait_until(lambda: len([*tmp_path.glob("step2-*")]) == RANKS or process.poll() is not None, 240)
            send(process.pid, signal.SIGTERM)
            wait_until(lambda: "SIGTERM received: " in output.read_text())
            (tmp_path / "gate").touch()
            process.wait(240)
            wait_until(lambda: not find_processes(mark), 60)
        finally:
            kill_all(mark)
            process.kill()
    text = output.read_text(errors="replace")
    assert (tmp_path / "saves" / "latest").read_text() == "global_step3", text[-4000:]
    assert text.count("SIGTERM: saving to ") == 1, text[-4000:]
    assert not any(words in text for words in ("DataLoader worker", "resource_tracker", "SIGKILL", "no save was made"))
