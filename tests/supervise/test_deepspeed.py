"""``ds_ucp supervise`` over the real ``deepspeed`` launcher: with stand-ins for pdsh and ssh, and with two network
namespaces as two hosts, whose link is cut in the middle of a step."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.supervise.namespaces import FAR, NEAR, Pair, build_pair, find_missing
from tests.supervise.standins import Stage, build, find_port, is_running, kill, wait_until

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(280)]

RANK = """
import os, sys, time, pathlib
if os.path.exists("/sys/class/net/cable"):
    os.environ["GLOO_SOCKET_IFNAME"] = "cable"
folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
import deepspeed_ucp
from deepspeed_ucp import heartbeat
(folder / "pids").open("a").write(f"{os.getpid()} {os.environ['RANK']} {os.environ.get('STANDIN_HOST', '')}\\n")
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
saved = folder / "saved"
step = int(saved.read_text() or 0) if saved.exists() else 0
while step < steps:
    dist.all_reduce(torch.ones(1))
    step += 1
    heartbeat.report_step(step)
    if dist.get_rank() == 0:
        (folder / "next").write_text(str(step)); os.replace(folder / "next", saved)
    while (folder / "wait").exists() and step > 2:
        dist.all_reduce(torch.ones(1))
        heartbeat.report_step(step)
        (folder / f"at-{dist.get_rank()}").touch()
        time.sleep(0.02)
"""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = build(tmp_path)
    (tmp_path / "bin" / "deepspeed").unlink()
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "wait").touch()
    beside = os.path.dirname(sys.executable)
    stage.environment["PATH"] = f"{tmp_path / 'bin'}:{beside}:{os.environ['PATH']}"
    stage.environment["DS_ACCELERATOR"] = "cpu"
    return stage


def launch(stage: Stage, *options: str) -> list[str]:
    script = [str(stage.folder / "rank.py"), str(stage.folder), "5"]
    return ["deepspeed", "--no_local_rank", "--master_port", str(find_port()), *options, *script]


def test_a_lost_host_is_left_out(stage: Stage) -> None:
    """Its ranks are killed and its name no longer answers; the launcher goes over pdsh first, and then starts the lone
    host's ranks itself."""
    hosts = stage.write_hosts("127.0.0.2", "127.0.0.3")
    with stage.supervise(
        "--hostfile", hosts, "--settle", "5", command=launch(stage, "--master_addr", "127.0.0.1")
    ) as p:
        wait_until(lambda: all((stage.folder / f"at-{rank}").exists() for rank in (0, 1)))
        wait_until(lambda: "running" in stage.names())
        (stage.folder / "down" / "127.0.0.3").touch()
        kill(stage.pids("127.0.0.3"))
        wait_until(lambda: stage.names().count("starting") == 2)
        assert not any(map(is_running, stage.pids()))
        (stage.folder / "wait").unlink()
        assert p.wait(timeout=120) == 0
    first, second = stage.find("starting")
    assert (first["hosts"], second["hosts"]) == ({"127.0.0.2": 1, "127.0.0.3": 1}, {"127.0.0.2": 1})
    assert any(
        line.startswith("pdsh 127.0.0.2,127.0.0.3") for line in (stage.folder / "asked").read_text().splitlines()
    )
    assert stage.find("finished")[0]["step"] == 5


@pytest.fixture
def pair(stage: Stage) -> Iterator[Pair]:
    if (reason := find_missing()) is not None:
        pytest.skip(reason)
    for name in ("ssh", "pdsh"):
        (stage.folder / "bin" / name).unlink()
    with build_pair(stage.folder) as pair:
        yield pair


@contextmanager
def supervise_near(stage: Stage, pair: Pair, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """From the start of training on both hosts on."""
    words = [
        "supervise",
        "--no-warm",
        "--log",
        str(stage.folder / "events"),
        "--hostfile",
        stage.write_hosts(NEAR, FAR),
    ]
    command = [sys.executable, "-m", "deepspeed_ucp", *words, *options, "--", *launch(stage)]
    with subprocess.Popen(pair.near.enter(*command), env=stage.environment) as process:
        try:
            wait_until(lambda: "running" in stage.names())
            wait_for_ranks(stage)
            yield process
        finally:
            process.kill()


def wait_for_ranks(stage: Stage) -> None:
    """Until both have come to their third step since the last time."""
    paths = [stage.folder / f"at-{rank}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() for path in paths))
    for path in paths:
        path.unlink()


@contextmanager
def bystand(pair: Pair) -> Iterator[subprocess.Popen[bytes]]:
    """What looks like another job's launcher on the far host."""
    words = f"import time; time.sleep(600)  # {sys.executable} -u -m deepspeed.launcher.launch"
    with subprocess.Popen(pair.far.enter(sys.executable, "-c", words)) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_partition_leaves_the_far_host_out_and_its_ranks_end(stage: Stage, pair: Pair) -> None:
    """The link is gone in the middle of a step. When it is there again, the next start is on both."""
    with supervise_near(stage, pair, "--hang", "10", "--settle", "5") as process:
        rank = ("-u", str(stage.folder / "rank.py"))
        assert pair.far.find(*rank) and pair.far.find("-u", "-m")
        pair.set_link("down")
        wait_until(lambda: stage.names().count("starting") == 2)
        wait_until(lambda: not pair.far.find("-u"))
        wait_until(lambda: stage.names().count("running") == 2)
        pair.set_link("up")
        pair.near.find(*rank)[0].kill()
        wait_until(lambda: stage.names().count("running") == 3)
        (stage.folder / "wait").unlink()
        assert process.wait(timeout=120) == 0
    assert [event["hosts"] for event in stage.find("starting")] == [{NEAR: 1, FAR: 1}, {NEAR: 1}, {NEAR: 1, FAR: 1}]
    assert [event["lost"] for event in stage.find("restarting")] == [[FAR], []]
    assert stage.find("finished")[0]["step"] == 5


def test_a_short_loss_is_outlived_and_a_stopped_rank_of_the_far_host_ended(stage: Stage, pair: Pair) -> None:
    """Another job's launcher there is none of ours: DeepSpeed's own ends it with its `pkill`, when it is told to go."""
    with supervise_near(stage, pair, "--hang", "25") as process, bystand(pair) as bystander:
        with pair.losing_everything():
            time.sleep(4)
        wait_for_ranks(stage)
        wait_for_ranks(stage)
        assert stage.names() == ["starting", "running"]
        (stopped,) = pair.far.find("-u", str(stage.folder / "rank.py"))
        stopped.suspend()
        wait_until(lambda: stage.names().count("starting") == 2)
        assert not stopped.is_running()
        assert bystander.poll() is None
        (stage.folder / "wait").unlink()
        assert process.wait(timeout=120) == 0
    assert [event["hosts"] for event in stage.find("starting")] == [{NEAR: 1, FAR: 1}] * 2
    assert stage.find("hanging")[0]["ranks"] == 2
    assert stage.find("finished")[0]["step"] == 5
