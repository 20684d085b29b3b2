"""``ds_ucp torchrun``: what it makes of torchrun's arguments, and a rendezvous that watches its workers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.errors import ConfigError, UcpError
from deepspeed_ucp.heartbeat import VARIABLE, read_stat
from deepspeed_ucp.supervise.agents import agent
from deepspeed_ucp.supervise.agents.agent import BACKEND, GuardedRendezvous, choose_arguments
from deepspeed_ucp.supervise.agents.gathering import Round
from deepspeed_ucp.supervise.agents.leader import Seat
from deepspeed_ucp.supervise.watch import Patience
from tests.supervise.standins import ROOT, is_running, wait_until


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    os.environ.pop(VARIABLE, None)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., GuardedRendezvous]]:
    made: list[GuardedRendezvous] = []

    def build(**conf: object) -> GuardedRendezvous:
        """That of a lone agent with one worker."""
        own = {"start": 60, "hang": 60, "events": str(tmp_path / "events"), **conf}
        made.append(GuardedRendezvous(RendezvousParameters(BACKEND, "localhost:0", "job", 1, 1, **own)))
        spec = SimpleNamespace(local_world_size=1, role="default")
        agent: Any = SimpleNamespace(get_worker_group=lambda: SimpleNamespace(spec=spec), list_pids=list)
        made[-1].begin(agent)
        return made[-1]

    yield build
    for each in made:
        each.shutdown()


Make = Callable[..., GuardedRendezvous]


def read_events(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]


WORKER = (
    "from deepspeed_ucp import heartbeat as h; h.report_step({step}); import sys, time; time.sleep({seconds}); {then}"
)


def work(step: int, seconds: float = 0, then: str = "") -> subprocess.Popen[bytes]:
    """A worker of the round that has just begun."""
    code = WORKER.format(step=step, seconds=seconds, then=then)
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RANK": "0", "PYTHONPATH": str(ROOT)})


def test_workers_that_fail_thrice_at_one_step_are_given_up(make: Make, tmp_path: Path) -> None:
    rendezvous = make()
    for _ in range(3):
        rendezvous.next_rendezvous()
        work(7).wait()
        wait_until(lambda: rendezvous._watch.look() and not rendezvous._watch.look()[0].is_open)
    with pytest.raises(UcpError, match="3 times after step 7"):
        rendezvous.next_rendezvous()
    assert [event["event"] for event in read_events(tmp_path)] == [
        *["rendezvous", "round"] * 3,
        "rendezvous",
        "gave_up",
    ]


def test_agents_that_come_and_go_are_no_fault_of_the_script(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous = make()
    seats = [Seat("a", "localhost:1"), Seat("b", "localhost:2")]
    rounds = [Round(at, 0, seats[: 2 - at % 2], [("default", 2), ("default", 1)], 7, [], True) for at in range(6)]
    monkeypatch.setattr(rendezvous.gathering, "join", lambda: rounds.pop(0))
    for _ in range(6):
        rendezvous.next_rendezvous()
    assert [event["agents"] for event in read_events(tmp_path) if event["event"] == "round"] == [2, 1, 2, 1, 2, 1]


def test_the_port_of_a_rounds_workers_is_theirs_until_the_next_round(make: Make) -> None:
    """They import first, and a port that nobody holds may be another process' by then."""
    rendezvous, ports = make(), []
    for _ in range(2):
        info = rendezvous.next_rendezvous()
        ports.append(info.bootstrap_store_info.master_port)  # type: ignore[union-attr]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", ports[-1]))
        TCPStore("127.0.0.1", ports[-1], 1, is_master=True).set("key", "value")
        work(len(ports)).wait()
    assert ports[0] != ports[1]


def test_ranks_are_numbered_over_all_agents_and_by_role(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = make()
    seats = [Seat(name, "localhost:1") for name in "abc"]
    found = Round(1, 2, seats, [("trainer", 2), ("reader", 1), ("trainer", 2)], 7, [], False)
    monkeypatch.setattr(rendezvous.gathering, "join", lambda: found)
    info = rendezvous.next_rendezvous()
    assert (info.rank, info.world_size, info.bootstrap_store_info.master_port) == (2, 3, 7)  # type: ignore[union-attr]
    workers = rendezvous.assign_ranks("trainer")
    assert [(each.local_rank, each.global_rank, each.role_rank) for each in workers] == [(0, 3, 2), (1, 4, 3)]
    assert {(each.world_size, each.role_world_size) for each in workers} == {(5, 4)}


def test_workers_that_hang_are_ended_also_when_they_are_stopped(make: Make, tmp_path: Path) -> None:
    rendezvous = make(hang=0)
    rendezvous.next_rendezvous()
    process = work(3, seconds=600)
    wait_until(lambda: rendezvous._watch.look() and rendezvous._watch.look()[0].step == 3)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: (read_stat(process.pid) or [""])[0] == "T")
    rendezvous._patience = Patience(start=60, step=1)
    assert process.wait(timeout=120) == -signal.SIGKILL
    assert [event["ranks"] for event in read_events(tmp_path) if event["event"] == "hanging"] == [[0]]
    rendezvous.next_rendezvous()
    reason = read_events(tmp_path)[-2]["reason"]
    assert re.match(r"no rank has ended a step for \d+ s: rank 0 on .* it is stopped", reason)


def test_why_there_is_another_round_is_told(make: Make, tmp_path: Path) -> None:
    rendezvous = make()
    rendezvous.next_rendezvous()
    work(3, then="sys.exit(17)").wait()
    wait_until(lambda: rendezvous._watch.look() and not rendezvous._watch.look()[0].is_open)
    rendezvous.next_rendezvous()
    rendezvous.next_rendezvous()
    told = [event["reason"] for event in read_events(tmp_path) if event["event"] == "rendezvous"]
    assert told[::2] == [None, "agents have come or gone, or silent workers failed"]
    assert told[1].startswith(f"rank 0 on {socket.gethostname()} ended with 17 after step 3 (")


def test_workers_of_the_round_before_are_let_go(make: Make) -> None:
    rendezvous = make()
    rendezvous.next_rendezvous()
    process = work(3, seconds=600)
    wait_until(rendezvous._watch.look)
    rendezvous.next_rendezvous()
    assert process.wait(timeout=120) == -signal.SIGKILL


def test_the_next_round_begins_when_the_guard_is_done_with_the_last_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it ends the workers of the next one."""
    rendezvous = make()
    rendezvous.next_rendezvous()
    ending, go_on, end = threading.Event(), threading.Event(), rendezvous._end_workers
    monkeypatch.setattr(rendezvous, "_end_workers", lambda: (ending.set(), go_on.wait(120), end()))
    work(3, then="sys.exit(17)").wait()
    assert ending.wait(120)
    joining = threading.Thread(target=rendezvous.next_rendezvous)
    joining.start()
    joining.join(0.3)
    assert joining.is_alive()
    go_on.set()
    joining.join()
    process = work(3)
    assert process.wait(timeout=120) == 0


def test_the_last_line_says_who_is_to_blame(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def fail(words: list[str]) -> None:
        raise ChildFailedError("worker", {0: ProcessFailure(0, 1, 1, "")})

    monkeypatch.setattr(agent, "run", fail)
    monkeypatch.setattr(agent, "find_verdict", lambda: "rank 1 on a failed")
    assert main(["torchrun", "train.py"]) == 1
    lines = capsys.readouterr().err.rstrip().splitlines()
    assert "ChildFailedError" in "".join(lines) and lines[-1] == "ds_ucp torchrun: given up: rank 1 on a failed"


@pytest.mark.parametrize(
    ("words", "endpoint", "conf"),
    [
        (["--nnodes", "1:2", "--rdzv-endpoint", "/shared/x"], "/shared/x", ""),
        (["--rdzv-endpoint", "head:29400", "--rdzv-conf", "hang=5"], "head:29400", "hang=5"),
        (["--standalone", "--nproc-per-node", "2"], "localhost:0", ""),
        ([], "localhost:0", ""),
        (["--nnodes", "2", "--node-rank", "1", "--master-addr", "head"], "head:29500", ""),
    ],
)
def test_torchruns_arguments_are_its_own_on_our_rendezvous(words: list[str], endpoint: str, conf: str) -> None:
    args = choose_arguments([*words, "train.py", "--rdzv-conf", "x"])
    assert (args.rdzv_backend, args.rdzv_endpoint, args.standalone, args.max_restarts) == (
        BACKEND,
        endpoint,
        False,
        100,
    )
    assert args.rdzv_conf == conf
    assert args.training_script_args == ["--rdzv-conf", "x"]
    assert [choose_arguments(["--max-restarts", many, "train.py"]).max_restarts for many in "30"] == [3, 0]


@pytest.mark.parametrize(("conf", "said"), [("hnag=5", "hnag=5: not known"), ("hang=soon", "a number of seconds")])
def test_a_configuration_that_is_none_is_refused(conf: str, said: str) -> None:
    key, value = conf.split("=")
    with pytest.raises(ConfigError, match=said):
        GuardedRendezvous(RendezvousParameters(BACKEND, "localhost:0", "job", 1, 1, timeout=900, **{key: value}))


def test_another_rendezvous_is_refused() -> None:
    assert choose_arguments(["--rdzv-backend", "c10d", "train.py"]).rdzv_backend == BACKEND
    with pytest.raises(ConfigError, match="--rdzv-backend etcd: .* Leave the option out"):
        choose_arguments(["--rdzv-backend", "etcd", "train.py"])


SCRIPT = """
import os, pathlib, sys, time
from types import SimpleNamespace
from deepspeed_ucp import heartbeat, preemption
import torch
import torch.distributed as dist
engine = SimpleNamespace(global_steps=0, save_checkpoint=lambda *_, **__: None)
preemption.follow(engine, "nowhere")
dist.init_process_group("gloo")
folder, saved = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1]) / "saved"
step = int(saved.read_text() or 0) if saved.exists() else 0
first = step + 1
while not (folder / "stop").exists() or step % 20:
    dist.all_reduce(torch.ones(1))
    step += 1
    heartbeat.report_step(step)
    if step == first:  # before its first step a rank has another patience
        (folder / "pids").open("a").write(f"{os.getpid()} {os.getppid()} {dist.get_world_size()}\\n")
    if dist.get_rank() == 0:
        (folder / "next").write_text(str(step)); os.replace(folder / "next", saved)
    preemption.save_if_signaled(engine)
    time.sleep(0.05)
"""


@pytest.mark.exhaustive
def test_agents_survive_each_other(tmp_path: Path) -> None:
    """The first of two agents, which has rank 0, is killed; the other goes on; a third comes; a worker is stopped; the
    third is told to go, as on a node that is drained, and the other goes on again; then all are."""
    (tmp_path / "worker.py").write_text(SCRIPT)
    conf = f"keep_alive_interval=1,keep_alive_max_attempt=30,last_call_timeout=30,hang=15,events={tmp_path / 'events'}"
    command = [
        *(sys.executable, "-m", "deepspeed_ucp", "torchrun", "--nnodes", "1:2", "--nproc-per-node", "1"),
        *("--rdzv-endpoint", str(tmp_path / "store"), "--rdzv-id", "test", "--rdzv-conf", conf),
        *(str(tmp_path / "worker.py"), str(tmp_path)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def workers(world: int) -> list[tuple[int, int]]:
        """Live workers in a world of this size, with their agents."""
        path = tmp_path / "pids"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [tuple(map(int, line.split())) for line in lines]
        return [(pid, agent) for pid, agent, size in found if size == world and is_running(pid)]

    agents = [subprocess.Popen(command, env=environment) for _ in range(2)]
    try:
        wait_until(lambda: len(workers(2)) == 2)
        doomed = [pid for pid, agent in workers(2) if agent == agents[0].pid]
        agents[0].kill()
        wait_until(lambda: len(workers(1)) == 1)
        assert not any(map(is_running, doomed))
        agents.append(subprocess.Popen(command, env=environment))
        wait_until(lambda: len(workers(2)) == 2)
        stopped, _ = workers(2)[0]
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: not is_running(stopped))
        wait_until(lambda: len(workers(2)) == 2)
        agents[2].terminate()
        wait_until(lambda: len(workers(1)) == 1)
        assert agents[2].wait(timeout=120) == 1 and agents[1].poll() is None
        agents.append(subprocess.Popen(command, env=environment))
        wait_until(lambda: len(workers(2)) == 2)
        (tmp_path / "stop").touch()
        assert [agents[at].wait(timeout=120) for at in (1, 3)] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    told = {event["event"] for event in read_events(tmp_path)}
    assert told - {"template", "prepared"} == {"rendezvous", "round", "ended", "hanging"}  # those two come if they can
