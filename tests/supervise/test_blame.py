"""Who is to blame: the first failure, who holds the others up, who is slow; what ranks and the system say for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp import heartbeat
from deepspeed_ucp.errors import ConfigError
from deepspeed_ucp.heartbeat import STARTED, read_stat
from deepspeed_ucp.supervise import deaths
from deepspeed_ucp.supervise.blame import (
    Hang,
    describe_first_failure,
    examine_hang,
    find_broken,
    find_culprits,
    find_first_failure,
)
from deepspeed_ucp.supervise.command import Command
from deepspeed_ucp.supervise.deaths import Deaths
from deepspeed_ucp.supervise.hosts import run_for_words
from deepspeed_ucp.supervise.pace import WINDOW, Pace, find_stragglers
from deepspeed_ucp.supervise.supervisor import Outcome, Settings, Supervisor
from deepspeed_ucp.supervise.watch import RankStatus, StepTime, Watch, Where
from deepspeed_ucp.whereabouts import find_whereabouts
from tests.supervise.standins import Stage, build, find_port, wait_until

PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242"
STORE = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"
MINE = "ValueError: loss is nan"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return build(tmp_path)


def make_seen(rank: int, failed: float | None = None, line: str | None = None, **fields: Any) -> RankStatus:
    error = None if line is None else f"Traceback …\n{line}\n"
    return RankStatus(rank, "a", 1, "", 0.0, failed=failed, error=error, line=line, **fields)


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([make_seen(0), make_seen(1)], None),
        ([make_seen(0, 2.0, PEER), make_seen(1, 1.0, MINE)], 1),
        ([make_seen(0, 1.0, PEER), make_seen(1, 1.1, MINE)], 1),
        ([make_seen(0, 1.0, STORE), make_seen(1, 1.1, signal=signal.SIGKILL), make_seen(2, 1.05, PEER)], 1),
        ([make_seen(0, 1.0, PEER), make_seen(1, 1.1, signal=signal.SIGTERM), make_seen(2, 1.2, code=143)], 0),
        ([make_seen(0, 1.0, signal=signal.SIGABRT), make_seen(1, 1.2, signal=signal.SIGSEGV)], 1),
        ([make_seen(0, 1.0, signal=signal.SIGKILL), make_seen(1, 1.1, "KeyError: 'x'")], 0),
        ([make_seen(0, 1.0, PEER), make_seen(1, 40.0, MINE)], 0),
        ([make_seen(0, 1.0, code=3), make_seen(1, 0.9, "torch.distributed.DistBackendError: NCCL error in: …")], 0),
    ],
    ids=["none", "first", "cause-late", "killed", "ended", "watchdog", "killed-first", "much-later", "code"],
)
def test_the_cause_is_named_not_what_follows(ranks: list[RankStatus], first: int | None) -> None:
    found = find_first_failure(ranks)
    assert (None if found is None else found.rank) == first


@pytest.mark.parametrize(
    ("ranks", "broken"),
    [
        ([make_seen(0), make_seen(1)], None),
        ([make_seen(0, 0.0, code=143, is_open=False), make_seen(1)], None),
        ([make_seen(0, 0.0, signal=signal.SIGKILL, is_open=False), make_seen(1)], 0),
        ([make_seen(0, 0.0, MINE), make_seen(1)], None),
        ([make_seen(0, -6.0, MINE), make_seen(1)], 0),
        ([make_seen(0, 0.0, PEER, is_open=False), make_seen(1)], None),
        ([make_seen(0, -1.1, PEER, is_open=False), make_seen(1)], 0),
        ([make_seen(0, -0.2, PEER, is_open=False), make_seen(1, 0.0, MINE, is_open=False)], 1),
        ([make_seen(0, -9.0, code=143, is_open=False), make_seen(1, 0.0, code=3, is_open=False)], 1),
    ],
    ids=["none", "saved", "killed", "telling", "hanging", "follows", "alone", "cause", "one-has-saved"],
)
def test_ranks_are_ended_when_the_cause_has_been_told(
    ranks: list[RankStatus], broken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    found = find_broken(ranks)
    assert (None if found is None else found.rank) == broken


def test_a_failure_is_told_in_words() -> None:
    seen = make_seen(5, time.monotonic(), MINE, step=811, phase="backward")
    assert seen.describe() == f"rank 5 on a failed after step 811, in backward: {MINE}"
    killed = make_seen(5, time.monotonic(), signal=signal.SIGKILL, memory="out of memory, as the kernel says")
    told = describe_first_failure([killed]) or ""
    assert told.startswith(
        "rank 5 on a was ended by SIGKILL before its first step; out of memory, as the kernel says ("
    )
    assert told.endswith(" UTC, the first of this agent's ranks)")
    assert "which another agent may tell" in (describe_first_failure([make_seen(0, time.monotonic(), PEER)]) or "")
    assert describe_first_failure([make_seen(0)]) is None
    assert "was ended by signal 40" in make_seen(0, 1.0, signal=40).describe()


def at(waits: str | None, step: int = 7, phase: str | None = None, **collectives: int) -> RankStatus:
    return make_seen(
        0, step=step, phase=phase, where=Where(("train.py:3 main",), "train.py:3 main", waits, collectives)
    )


@pytest.mark.parametrize(
    ("ranks", "culprits"),
    [
        ([at("all_reduce"), at(None), at("all_reduce")], [1]),
        ([at("all_reduce"), at("all_reduce")], []),
        ([at(None), at(None)], []),
        ([at("item", world=5), at("item", world=4), at("item", world=5)], [1]),
        # a GPU's host waits elsewhere than in a function that is known: its collectives say that it has come
        ([at(None, world=5), at(None, world=4), at("wait", world=5)], [1]),
        # 1 waits in its pair for 0, and lets 2 wait for itself in the world
        ([at("wait", pair=1, world=4), at("wait", pair=2, world=4), at("wait", world=5)], [0]),
        ([at("item", step=8), at("item", step=7)], [1]),
        ([at("item", phase="backward"), at("item", phase="forward"), at("item", phase="forward")], [1, 2]),
        ([at("item", phase="backward"), at("item")], [1]),
        ([at("item", phase="save"), at("item")], []),
    ],
)
def test_who_was_not_waiting_is_named(ranks: list[RankStatus], culprits: list[int]) -> None:
    for rank, seen in enumerate(ranks):
        seen.rank = rank
    assert [seen.rank for seen in find_culprits(ranks)] == culprits


def step_times(*work: float, steps: int = WINDOW, seconds: float = 1.0) -> list[list[StepTime]]:
    return [[StepTime(rank, "a", step, own, seconds) for step in range(steps)] for rank, own in enumerate(work)]


def test_a_straggler_is_slower_than_the_median_and_costs_something() -> None:
    def find(*work: float, seconds: float = 1.0, named: frozenset[int] = frozenset()) -> list[tuple[int, float]]:
        times = step_times(*work, seconds=seconds)
        return [(each.rank, each.factor) for each in find_stragglers(times, named)]

    assert find(0.2, 0.2, 0.2, 0.4) == [(3, 2.0)]
    assert find(0.2, 0.5) == [(1, 2.5)]
    assert find(0.2, 0.2, 0.28) == []
    assert find(0.2, 0.2, 0.28, named=frozenset([2])) == [(2, 1.4)]
    assert find(0.002, 0.002, 0.004) == []  # nothing beside the rest of the step
    assert find(0.2) == find() == []


def test_stragglers_are_named_when_they_change_and_steps_are_written(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    pace = Pace(lambda event, **fields: events.append({"event": event, **fields}), str(tmp_path / "steps"))
    for step in range(5 * WINDOW):
        slow = 0.5 if 10 <= step < 30 else 0.1
        pace.follow([StepTime(rank, "a", step, slow if rank == 2 else 0.1, 1.0) for rank in range(4)])
    assert [[each["rank"] for each in event["ranks"]] for event in events] == [[2], []]
    assert events[0]["step"] <= 20 and events[0]["ranks"][0]["factor"] == 5.0 and events[0]["median"] == 0.1
    lines = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    assert len(lines) == 4 * 5 * WINDOW
    assert lines[-1] == {"rank": 3, "host": "a", "step": 49, "work": 0.1, "seconds": 1.0}
    with pytest.raises(ConfigError, match="nothing can be written there"):
        Pace(lambda *_, **__: None, str(tmp_path / "nowhere" / "steps"))


def test_own_time_is_what_a_rank_does_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now, collectives = 0.0, 0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    own = heartbeat._OwnTime()
    monkeypatch.setattr(own._counter, "count", lambda: collectives)
    told: list[dict[str, float]] = []

    def step(number: int, *parts: tuple[str | None, float, int]) -> None:
        nonlocal now, collectives
        for phase, seconds, begun in parts:
            own.turn(phase)
            now, collectives = now + seconds, collectives + begun
        told.append(own.end_step(number))

    whole = [(None, 1.0, 0), ("forward", 2.0, 0), (None, 0.5, 0), ("backward", 4.0, 3), ("step", 1.0, 1)]
    step(1, *whole)
    step(2, *whole)
    step(2, (None, 0.25, 0), ("save", 9.0, 2))  # it tells of a step that it has told of
    step(3, *whole, (None, 1.0, 1))  # the script has averaged its loss
    sharded = [(None, 1.0, 0), ("forward", 2.0, 4), (None, 0.5, 0), ("backward", 4.0, 3), ("step", 1.0, 1)]
    step(4, *sharded)
    assert told == [
        {},
        {"work": 3.5, "seconds": 8.5},
        {},
        {"work": 3.75, "seconds": 18.75},
        {"work": 1.5, "seconds": 8.5},
    ]


def test_where_a_process_is_tells_whether_it_waits() -> None:
    def look(source: str, path: str = "train.py") -> Any:
        """From another thread, while the main one is in a call of this source."""
        seen: list[Any] = []
        gate = Gate()
        asker = threading.Thread(
            target=lambda: (gate.entered.wait(120), seen.append(find_whereabouts()), gate.left.set())
        )
        asker.start()
        exec(compile(source, path, "exec"), {"gate": gate})
        asker.join()
        return seen[0]

    busy = look("def read():\n    gate.recv()\nread()")
    assert busy["waits"] is None
    assert any(place == "train.py:2 read" for place in busy["stack"])
    reduce = "def all_reduce():\n    gate.recv()\nall_reduce()"
    assert look(reduce, "/x/site-packages/torch/distributed/distributed_c10d.py")["waits"] == "all_reduce"
    assert look(reduce, "/x/site-packages/deepspeed/comm/torch.py")["waits"] == "all_reduce"


class Gate:
    """What a process stands in that is in C: without a frame of its own in this test."""

    def __init__(self) -> None:
        self.entered, self.left = threading.Event(), threading.Event()

    def recv(self) -> None:
        self.entered.set()
        while not self.left.is_set():
            time.sleep(0.005)


def test_a_method_that_waits_is_told_by_its_name() -> None:
    lock = threading.Lock()
    lock.acquire()
    seen: list[Any] = []

    def look() -> None:
        wait_until(lambda: find_whereabouts()["stack"][0].endswith("<lambda>"))
        seen.append(find_whereabouts())
        lock.release()

    class Work:
        timeout, wait, read = -1, staticmethod(lock.acquire), staticmethod(lock.acquire)

    for call in (lambda: Work.wait(True, Work.timeout), lambda: (Work.wait.__class__, len([]), Work.read())):
        thread = threading.Thread(target=look)
        thread.start()
        call()
        thread.join()
    assert [each["waits"] for each in seen] == ["wait", None]


RANK = """
import os, signal, time
from deepspeed_ucp import heartbeat
heartbeat.report_step(3)
heartbeat.report_phase("forward")
print("there", flush=True)
{then}
"""


@contextlib.contextmanager
def run_rank(told: str, rank: int, then: str, *enter: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", RANK.format(then=then)]
    environment = {**os.environ, heartbeat.VARIABLE: told, "RANK": str(rank), "WORLD_SIZE": "4"}
    with subprocess.Popen([*enter, *command], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.close()


def examine(watch: Watch, silent: Sequence[int] = ()) -> Hang:
    """A hang, when all others than these ranks have answered, which may take more than a second on a busy machine."""
    ask = watch.ask

    def ask_until_all_have() -> list[RankStatus]:
        until = time.monotonic() + 120
        while [seen.rank for seen in ask()] != [*silent]:
            assert time.monotonic() < until
        return [seen for seen in watch.look() if seen.rank in silent]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "ask", ask_until_all_have)
        return examine_hang(watch)


def test_in_a_hang_who_does_not_answer_is_named_within_a_second(watch: Watch) -> None:
    told = watch.begin()
    waiting = "def all_reduce():\n    time.sleep(600)\nall_reduce()"
    waiting = f"exec(compile({waiting!r}, '/torch/distributed/c.py', 'exec'))"
    with run_rank(told, 0, waiting), run_rank(told, 1, "os.kill(os.getpid(), signal.SIGSTOP)") as stopped:
        wait_until(lambda: len(watch.look()) == 2 and all(seen.phase for seen in watch.look()))
        wait_until(lambda: (read_stat(stopped.pid) or [""])[0] == "T")
        heard, began = [seen.heard for seen in watch.look()], time.monotonic()
        hang = examine(watch, silent=[1])
        assert time.monotonic() - began < 60  # one second, on a machine that has nothing else to do
        assert [each["rank"] for each in hang.culprits] == [1]
        assert "after step 3, in forward, does not answer: it is stopped" in hang.summary
        assert hang.places == {"after step 3, in forward": [0, 1]}
        assert [seen.heard for seen in watch.look()] == heard  # an answer is no sign of a step
        with run_rank(told, 2, "time.sleep(600)"):
            wait_until(lambda: len(watch.look()) == 3)
            stopped.kill()
            wait_until(lambda: sum(seen.is_open for seen in watch.look()) == 2)
            wait_until(lambda: "was not waiting, at <string>:7 <module>" in examine(watch).summary)
            assert [each["rank"] for each in examine(watch).culprits] == [2]
            assert "rank 3 has not come" in examine_hang(watch, has_all=True).summary
    assert next(seen.signal for seen in watch.look() if seen.rank == 1) == signal.SIGKILL


def test_a_look_at_frames_that_fails_ends_no_rank(watch: Watch) -> None:
    fail = "heartbeat.find_whereabouts = lambda: 1 / 0\ntime.sleep(600)"
    with run_rank(watch.begin(), 0, fail):
        wait_until(lambda: watch.look() and watch.look()[0].phase)
        time.sleep(0.1)
        assert watch.ask(seconds=60) == []
        assert watch.look()[0].is_open


def test_ranks_that_all_wait_wait_for_one_elsewhere(watch: Watch) -> None:
    waiting = "exec(compile('def barrier():\\n    time.sleep(600)\\nbarrier()', '/torch/distributed/c.py', 'exec'))"
    with run_rank(watch.begin(), 0, waiting):
        wait_until(lambda: watch.look() and watch.look()[0].phase)
        told = "all ranks here wait for others (barrier): the cause is a rank elsewhere, or what connects them"
        wait_until(lambda: examine(watch).summary == told)


def own_start() -> int:
    return int((read_stat(os.getpid()) or [])[STARTED])


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_tells_of_want_of_memory(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files like those of both versions stand in, with this process in them."""
    monkeypatch.setattr(deaths, "_CGROUPS", tmp_path)
    monkeypatch.setattr(deaths, "_LOG", str(tmp_path / "none"))
    root = tmp_path / "memory" if version == 1 else tmp_path
    names = ("memory.oom_control", "memory.limit_in_bytes") if version == 1 else ("memory.events", "memory.max")
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    held = [line.split(":", 2) for line in lines]
    within = [path for _, kinds, path in held if ("memory" in kinds.split(",") if version == 1 else not kinds)]
    if not within:
        pytest.skip("this machine has none of that version")
    own = root / within[0].lstrip("/")
    (own / "x").mkdir(parents=True)
    (root / names[1]).write_text(str(16 << 30))
    (own / names[1]).write_text(str(12 << 30))
    (own / names[0]).write_text("oom 0\noom_kill 3\n")
    told, pid, started = Deaths(), os.getpid(), own_start()
    told.note(pid, started + 1)  # another machine's, or one that has had this number before
    assert told.describe_memory(pid, 9) == ""
    told.note(pid, started)
    assert told.describe_memory(pid, 9) == ""
    (own / names[0]).write_text("oom 1\noom_kill 4\n")
    least = "(its cgroup has 12.00 GiB)"
    assert told.describe_memory(pid, 9) == f"out of memory, as its cgroup says {least}"
    assert told.describe_memory(pid, None) == f"its cgroup has lost a process for want of memory {least}"
    monkeypatch.setattr(deaths, "_RECENT", 0.0)
    assert told.describe_memory(pid, 9) == ""


def test_the_kernels_log_names_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(deaths, "_ALL_PIDS", os.stat("/proc/self/ns/pid").st_ino)
    monkeypatch.setattr(deaths, "_CGROUPS", tmp_path)
    (tmp_path / "log").write_text("3,1,1,-;Out of memory: Killed process 17 (python)\n")
    told = Deaths()
    told.note(os.getpid(), own_start())
    with open(tmp_path / "log", "a") as log:
        log.write(f"3,2,2,-;Memory cgroup out of memory: Killed process {os.getpid()} (python) total-vm:1kB\n")
    wait_until(lambda: told.describe_memory(os.getpid(), 9) == "out of memory, as the kernel says")
    told.close()


def test_the_kernel_of_another_host_is_asked(tmp_path: Path) -> None:
    """By a shell, whose `dmesg` stands in."""
    with open("/proc/uptime") as stream:
        now = float(stream.read().split()[0])
    log = f"[{now - 9000:12.6f}] Killed process 17 (a)\n[{now:12.6f}] oom: Killed process 18 (b)\n[{now:12.6f}] more\n"
    (tmp_path / "log").write_text(log)
    (tmp_path / "dmesg").write_text(f"#!/bin/sh\ncat {tmp_path}/log\n")
    (tmp_path / "dmesg").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def ask(command: str) -> str:
        return run_for_words(["sh", "-c", command], 60, path)

    assert deaths.ask_kernel(18, ask) == "out of memory, as the kernel says"
    assert deaths.ask_kernel(17, ask) == deaths.ask_kernel(1, ask) == deaths.ask_kernel(19, ask) == ""


def test_of_a_rank_elsewhere_that_told_nothing_the_kernel_of_its_host_is_asked(stage: Stage) -> None:
    asked: list[Any] = []
    supervisor = Supervisor(Command(("deepspeed",)), {"node-a": 1, "127.0.0.9": 1}, Settings(), lambda *_, **__: None)
    try:
        seen = RankStatus(3, "node-b", 17, "127.0.0.9", 0.0, failed=1.0)
        supervisor._watch._ranks.append(seen)
        supervisor.reach.ask = lambda *given, **more: asked.append(given) or "oom: Killed process 17 (python)"  # type: ignore
        reason = supervisor._judge(Outcome(1, "it ended with 1"), ["node-a", "127.0.0.9"]).reason
        assert reason.endswith("has gone without a word before its first step; out of memory, as the kernel says")
        assert [host for host, _ in asked] == ["127.0.0.9"]
        seen.memory = ""
        supervisor._judge(Outcome(1, "it ended with 1"), ["node-a"])  # it has been lost
        assert len(asked) == 1
    finally:
        supervisor._watch.close()


def test_a_rank_that_the_kernel_has_killed_for_want_of_memory_is_told(watch: Watch, tmp_path: Path) -> None:
    """With a limit of a cgroup (version 1, where this process may make one)."""
    folder = Path("/sys/fs/cgroup/memory") / f"ds_ucp_test_{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no cgroup of version 1 can be made here")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(64 << 20))
        enter = ("sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh")
        then = f"while not os.path.exists({str(tmp_path / 'go')!r}):\n    time.sleep(0.01)\nx = bytearray(200 << 20)"
        with run_rank(watch.begin(), 4, then, *enter):
            wait_until(watch.look)
            (tmp_path / "go").touch()
            wait_until(lambda: watch.look() and not watch.look()[0].is_open)
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()
    told = watch.look()[0].describe()
    assert "rank 4 on" in told and "was ended by SIGKILL after step 3, in forward; out of memory, as " in told
    assert told.endswith("(its cgroup has 0.06 GiB)")


TRAINING = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
from deepspeed_ucp import heartbeat
heartbeat.connect()
dist.init_process_group("gloo")
folder, rank = pathlib.Path(sys.argv[1]), dist.get_rank()
launch = len(list(folder.glob("launch-*")))
dist.barrier()
if rank == 0:
    (folder / f"launch-{launch}").touch()
for step in range(1, 31):
    heartbeat.report_phase("forward")
    if step == 3 and rank == 1 and launch == 0:
        try:
            raise ValueError("the loss is nan")
        finally:
            dist.destroy_process_group()  # of which the others tell before this one ends
            time.sleep(1)
    if step == 3 and rank == 1 and launch == 1:
        time.sleep(600)
    time.sleep(0.2 if rank == 1 else 0.01)
    heartbeat.report_phase("backward")
    dist.all_reduce(torch.ones(1))
    heartbeat.report_phase(None)
    heartbeat.report_step(step)
dist.barrier()
os._exit(0)  # torch's teardown may take as long as a hang is given here
"""


PATIENT = """
import sys
if "supervise" in sys.orig_argv:
    from deepspeed_ucp.supervise.watch import Watch
    Watch.ask.__defaults__ = (60.0,)
"""
"""Both ranks answer, however busy the machine is."""


def test_of_real_ranks_the_one_is_named_that_is_to_blame(stage: Stage) -> None:
    """In the first launch one fails, after whose end the other does, first; in the second one sleeps; in the third it
    is slow."""
    (stage.folder / "rank.py").write_text(TRAINING)
    (stage.folder / "sitecustomize.py").write_text(PATIENT)
    stage.environment["PYTHONPATH"] += f":{stage.folder}"
    script = f"""
import os, subprocess, sys
own = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT="{find_port()}", WORLD_SIZE="2", OMP_NUM_THREADS="1")
command = [sys.executable, {str(stage.folder / "rank.py")!r}, {str(stage.folder)!r}]
ranks = [subprocess.Popen(command, env=own | {{"RANK": r}}) for r in "01"]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""
    steps = stage.folder / "steps"
    options = ("--hang", "12", "--settle", "20", "--steps", str(steps))
    assert stage.run(*options, command=[sys.executable, "-c", script]) == 0
    failed, hung = stage.find("failed")
    assert (failed["rank"], failed["phase"], failed["error"]) == (1, "forward", "ValueError: the loss is nan")
    assert "failed after step 2, in forward: ValueError: the loss is nan" in failed["reason"]
    assert "rank 1 on" in hung["reason"] and "was not waiting, at" in hung["reason"] and hung["rank"] is None
    (hanging,) = stage.find("hanging")
    assert hanging["places"] == {"after step 2, in backward": [0], "after step 2, in forward": [1]}
    assert "rank.py:" in hanging["culprits"][0]["stack"][0]
    (straggler,) = stage.find("straggler")
    assert [each["rank"] for each in straggler["ranks"]] == [1]
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    assert {line["step"] for line in lines} == set(range(2, 31))
