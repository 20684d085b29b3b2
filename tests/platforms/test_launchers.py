"""The recipes for torchrun and the deepspeed launcher restart after the loss of a rank or host."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.platforms.jobs import RECIPES, SAVE_EVERY, Run, Steps, wait_for
from tests.support.ports import find_port

SSH = """
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
[[ -e $HOSTS/$1 ]] || exit 255
shift; exec "$@"
"""
"""A stand-in for ssh, which runs the command here if a file with the name of the host exists."""

PDSH = """
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

HELD = SAVE_EVERY + 2


@pytest.mark.exhaustive
@pytest.mark.engine
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "deepspeed, two hosts"])
def test_the_recipe_restarts_after_a_killed_rank_or_lost_host(launcher: str, reference: Steps, tmp_path: Path) -> None:
    """With two hosts, the one with the killed rank becomes unreachable."""
    run, hosts, launcher = Run(tmp_path), int("two" in launcher) + 1, launcher.partition(",")[0]
    held, options = run.hold(HELD), f"--no_local_rank --master_port {find_port()}"
    variables = {"RANKS_PER_NODE": 1, "RENDEZVOUS": tmp_path / "rdzv", "PAUSE": 0, "HOSTS": tmp_path / "hosts"}
    if hosts == 1:
        options += " --num_gpus 1"
    else:
        options += " --master_addr 127.0.0.1"
        variables["HOSTFILE"] = tmp_path / "hostfile"
        (tmp_path / "hostfile").write_text("# all\n\nhost-a slots=1\nhost-b slots=1\n")
        (tmp_path / "hosts").mkdir()
        for host in ("host-a", "host-b"):
            (tmp_path / "hosts" / host).touch()
        for name, text in {"ssh": SSH, "pdsh": PDSH}.items():
            run.write_program(name, text)
    with run.start(RECIPES / launcher / "train.sh", *run.command, LAUNCHER=options, **variables) as started:
        run.wait_for_step(HELD, starts=1)
        (tmp_path / "hosts" / "host-b").unlink(missing_ok=True)
        os.kill(next(each["pid"] for each in run.read("started") if each["rank"] == hosts - 1), signal.SIGKILL)
        held.unlink()
        run.wait_for_end(started)
    run.check(reference, (hosts, 0), (1, SAVE_EVERY))


LOOPS = {
    "most restarts": ("echo start; exit 3", 1, "start\n" * 3, "ended with 3"),
    "too few hosts": ("echo start", 1, "", "fewer than 1 hosts answer"),
    "SIGTERM": (
        """bash -c "trap 'sleep 1; echo saved; exit' TERM; echo start; while :; do sleep 0.05; done" & wait""",
        143,
        "start\nsaved\n",
        "",
    ),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_the_deepspeed_recipes_loop_ends(kind: str, tmp_path: Path) -> None:
    """It ends with SIGTERM after the ranks: like the launcher on one machine, the stub does not forward the signal."""
    launcher, code, events, message = LOOPS[kind]
    run, noted, hosts = Run(tmp_path), tmp_path / "events", tmp_path / "hostfile"
    noted.touch()
    hosts.write_text("host-a slots=1\n")
    run.write_program("deepspeed", f"exec >>{noted}\n{launcher}")
    run.write_program("ssh", "exit 255")
    variables = {"PAUSE": 0, "MAX_RESTARTS": 2, "HOSTFILE": hosts if "hosts" in kind else ""}
    with run.start(RECIPES / "deepspeed" / "train.sh", "train.py", **variables) as started:
        if kind == "SIGTERM":
            wait_for("the rank", noted.read_text)
            started.terminate()
        run.wait_for_end(started, code)
    assert noted.read_text() == events and message in run.output.read_text()
