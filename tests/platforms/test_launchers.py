"""The recipes for torchrun and the deepspeed launcher restart after the loss of a rank or host."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.platforms.jobs import LONGEST, RECIPES, SAVE_EVERY, Run, Steps, make_environment, wait_for
from tests.support.ports import find_port

SSH = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
[[ -e $HOSTS/$1 ]] || exit 255
shift; exec "$@"
"""
"""A stand-in for ssh, which runs the command here if a file with the name of the host exists."""

PDSH = """#!/bin/bash
while [[ $1 == -* ]]; do
    [[ $1 == -w ]] && hosts=$2
    [[ $1 == -[wf] ]] && shift
    shift
done
[[ $1 == pkill* ]] && exit 0
number=0 code=0
for host in ${hosts//,/ }; do
    command="$*"
    ssh "$host" bash -c "${command//%n/$number}" &
    number=$((number + 1))
done
for job in $(jobs -p); do wait "$job" || code=$?; done
exit $code
"""


@contextmanager
def start(launcher: str, run: Run, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with (run.folder / "output").open("wb") as output:
        recipe = [str(RECIPES / launcher / "train.sh"), *run.command()]
        started = subprocess.Popen(recipe, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield started
        finally:
            started.terminate()
            started.wait()


@pytest.mark.exhaustive
@pytest.mark.engine
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_the_recipe_restarts_after_a_killed_rank(launcher: str, reference: Steps, tmp_path: Path) -> None:
    run = Run(tmp_path)
    held = run.hold(SAVE_EVERY + 2)
    options = f"--no_local_rank --num_gpus 1 --master_port {find_port()}"
    variables = {"RANKS_PER_NODE": "1", "RENDEZVOUS": str(tmp_path / "rdzv"), "LAUNCHER": options, "PAUSE": "0"}
    with start(launcher, run, make_environment(**variables)) as started:
        run.wait_for_step(SAVE_EVERY + 2, starts=1, tell=(tmp_path / "output").read_text)
        os.kill(run.read("started")[-1]["pid"], signal.SIGKILL)
        held.unlink()
        assert started.wait(timeout=240) == 0, (tmp_path / "output").read_text()[-3000:]
    assert run.find_starts() == [(1, 0), (1, SAVE_EVERY)]
    run.check(reference)


@pytest.mark.exhaustive
@pytest.mark.engine
def test_the_deepspeed_recipe_continues_without_an_unreachable_host(reference: Steps, tmp_path: Path) -> None:
    hosts, programs = tmp_path / "hosts", tmp_path / "programs"
    for folder in (hosts, programs):
        folder.mkdir()
    for host in ("host-a", "host-b"):
        (hosts / host).touch()
    for name, text in {"ssh": SSH, "pdsh": PDSH}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "hostfile").write_text("# all\n\nhost-a slots=1\nhost-b slots=1\n")
    options = f"--no_local_rank --master_addr 127.0.0.1 --master_port {find_port()}"
    variables = {"HOSTFILE": str(tmp_path / "hostfile"), "HOSTS": str(hosts), "LAUNCHER": options, "PAUSE": "0"}
    environment = make_environment(**variables)
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    run = Run(tmp_path)
    held = run.hold(SAVE_EVERY + 2)
    with start("deepspeed", run, environment) as started:
        run.wait_for_step(SAVE_EVERY + 2, starts=1, tell=(tmp_path / "output").read_text)
        (hosts / "host-b").unlink()
        os.kill(next(each["pid"] for each in run.read("started") if each["rank"] == 1), signal.SIGKILL)
        held.unlink()
        assert started.wait(timeout=240) == 0, (tmp_path / "output").read_text()[-3000:]
    assert run.find_starts() == [(2, 0), (1, SAVE_EVERY)]
    run.check(reference)


def run_with_stub(folder: Path, deepspeed: str, **variables: str) -> subprocess.Popen[str]:
    """Start the recipe with a stub of the launcher."""
    (folder / "deepspeed").write_text(f"#!/bin/bash\n{deepspeed}\n")
    (folder / "ssh").write_text("#!/bin/bash\nexit 255\n")
    for name in ("deepspeed", "ssh"):
        (folder / name).chmod(0o755)
    environment = make_environment(**variables)
    environment["PATH"] = f"{folder}:{environment['PATH']}"
    recipe = RECIPES / "deepspeed" / "train.sh"
    return subprocess.Popen([str(recipe), "train.py"], env=environment, stdout=subprocess.PIPE, text=True, cwd=folder)


@pytest.mark.parametrize(
    ("deepspeed", "variables", "starts", "message"),
    [
        ("exit 3", {"MAX_RESTARTS": "2", "PAUSE": "0"}, 3, ""),
        ("exit 0", {"HOSTFILE": "hostfile"}, 0, "fewer than 1 hosts answer"),
    ],
    ids=["most-restarts", "too-few-hosts"],
)
def test_the_deepspeed_recipes_loop_ends(
    deepspeed: str, variables: dict[str, str], starts: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "hostfile").write_text("host-a slots=1\n")
    (tmp_path / "starts").touch()
    started = run_with_stub(tmp_path, f"echo start >>starts; {deepspeed}", **variables)
    assert message in started.communicate(timeout=LONGEST)[0]
    assert (started.returncode, (tmp_path / "starts").read_text()) == (1, "start\n" * starts)


def test_the_deepspeed_recipes_loop_forwards_sigterm_to_ranks_and_ends(tmp_path: Path) -> None:
    """Like the launcher on one machine, the stub does not forward the signal. The recipe waits for the rank."""
    rank = "trap 'sleep 1; echo saved >>events; exit' TERM; echo start >>events; while :; do sleep 0.05; done"
    started = run_with_stub(tmp_path, f'bash -c "{rank}" & wait', PAUSE="0")
    wait_for("the rank", (tmp_path / "events").exists)
    started.terminate()
    started.communicate(timeout=LONGEST)
    assert started.returncode == 143
    assert (tmp_path / "events").read_text() == "start\nsaved\n"
