"""examples/platforms/slurm under a real Slurm: drained and lost nodes, signals, failures, cancellations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.platforms.cluster import Cluster, find_missing
from tests.platforms.jobs import SAVE_EVERY, Run, Steps, kill_all, read_end, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(find_missing()), reason=find_missing())]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    try:
        yield Cluster(folder)
    finally:
        kill_all(f"SLURM_CONF={folder / 'slurm.conf'}")


def test_failed_jobs_are_restarted_and_cancelled_ones_are_not(cluster: Cluster, tmp_path: Path) -> None:
    """Stand-ins replace Python: the recipe's reaction to exit codes does not depend on training."""
    failing = Run(tmp_path).write_program("fails", f"echo started >> {tmp_path}/starts; exit 3")
    waiting = Run(tmp_path).write_program("waits", f"touch {tmp_path}/begun; exec sleep 600")
    one = ("--nodes=1",)
    first = cluster.submit(tmp_path / "1", "x", options=one, PYTHON=failing, MAX_RESTARTS="1")
    second = cluster.submit(tmp_path / "2", "x", options=one, PYTHON=waiting)
    wait_for("the second job", (tmp_path / "begun").exists, cluster.output)
    cluster.ask("scancel", second)
    job = cluster.wait_for_end(first)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "3:0", "1")
    assert (tmp_path / "starts").read_text().splitlines() == ["started"] * 2
    job = cluster.wait_for_end(second)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")


FOLLOWING = """
import pathlib, sys, time
from types import SimpleNamespace
from deepspeed_ucp import preemption
folder = pathlib.Path(sys.argv[1])
save = lambda *_, **__: (folder / "saved").open("a").write("saved\\n")
engine = SimpleNamespace(global_steps=2, save_checkpoint=save)
preemption.follow(engine, "nowhere", requeue=True)
(folder / "started").open("a").write("started\\n")
while True:
    preemption.save_if_signaled(engine)
    time.sleep(0.05)
"""


def test_a_rank_requeues_its_job_unless_it_is_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(FOLLOWING)
    command = f"srun {sys.executable} {tmp_path / 'rank.py'} {tmp_path}"
    options = ("--nodes=1", "--requeue", f"--output={tmp_path / 'output'}", "--open-mode=append")
    job = cluster.ask("sbatch", "--parsable", *options, "--wrap", command)

    def count(name: str) -> int:
        path = tmp_path / name
        return len(path.read_text().splitlines()) if path.exists() else 0

    wait_for("the first start", lambda: count("started") == 1, cluster.output)
    cluster.ask("scancel", "--signal=USR1", job)  # like --signal=USR1@…
    wait_for("the second start", lambda: count("started") == 2, cluster.output)
    cluster.ask("scancel", job)
    ended = cluster.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "1")
    wait_for("its save", lambda: count("saved") == 2)
    wait_for("its message", lambda: "is not requeued: it is " in (tmp_path / "output").read_text())


@pytest.mark.engine
def test_a_slurm_job_resumes_without_a_drained_or_lost_node(cluster: Cluster, reference: Steps, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.hold(4)  # until a signal
    held = run.hold(SAVE_EVERY * 2 + 2)
    job = cluster.submit(run.output, *run.command)
    run.wait_for_step(4, starts=1)
    assert cluster.find_job(job)["NumNodes"] == "2"
    # The operator drains a node and signals the job, which saves and leaves the node.
    cluster.ask("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    cluster.ask("scancel", "--batch", "--signal=USR1", job)
    run.wait_for_step(SAVE_EVERY * 2 + 2, starts=2)
    assert cluster.find_states()["n2"] == "drained"
    cluster.ask("scontrol", "update", "nodename=n2", "state=resume")
    # The node of the batch script is lost.
    cluster.lose("n1")
    held.unlink()
    ended = cluster.wait_for_end(job, run.output)
    state = ended["JobState"], ended["Restarts"], ended["NodeList"]
    assert state == ("COMPLETED", "2", "n2"), read_end(run.output)
    run.check(reference, (2, 0), (1, 4), (1, SAVE_EVERY * 2))  # no step was lost by the signal
