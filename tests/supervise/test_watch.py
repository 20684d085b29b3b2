"""The ranks' lines: who may speak, what is made of it, and what ends with them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deepspeed_ucp.heartbeat import VARIABLE, find_network
from deepspeed_ucp.supervise import watch as watch_module
from deepspeed_ucp.supervise.blame import find_first_failure
from deepspeed_ucp.supervise.watch import Patience, RankStatus, Watch, find_ended, find_silence
from tests.supervise.standins import wait_until


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.close()


def connect(told: str) -> socket.socket:
    host, port, _ = told.split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def hello(key: str, rank: int = 0) -> bytes:
    return key.encode() + b"\n" + json.dumps({"hello": {"rank": rank, "pid": 1, "host": "here"}}).encode() + b"\n"


def test_a_rank_is_known_by_what_it_says(watch: Watch) -> None:
    told = watch.begin()
    with connect(told) as line:
        line.sendall(hello(watch.key, 3)[:20])
        time.sleep(0.05)
        line.sendall(hello(watch.key, 3)[20:] + b'{"step": 7}\n{"error": "Traceback"}\n')
        wait_until(lambda: watch.look() and watch.look()[0].error)
        (seen,) = watch.look()
        assert (seen.rank, seen.host, seen.step, seen.is_open) == (3, "here", 7, True)
        assert watch.send(signal.SIGUSR1) == 1
        assert json.loads(line.recv(100)) == {"signal": signal.SIGUSR1}
    wait_until(lambda: not seen.is_open)
    assert find_first_failure(watch.look()) is seen


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n",
        hello("of another launch"),
        b'{"step": 3}\n',
        b"[]\n",
        b'{"hello": 3}\n',
        b"\xff\xfe\n",
        b"x" * 100,
        b"[" * 60_000 + b"\n",
    ],
    ids=["http", "key", "no-hello", "list", "hello-3", "bytes", "long", "deep"],
)
@pytest.mark.parametrize("with_key", [False, True])
def test_nobody_else_is_listened_to(watch: Watch, said: bytes, with_key: bool) -> None:
    """Without the key nothing is parsed; with it, who says nothing of itself is no rank."""
    told = watch.begin()
    if with_key and said == b"x" * 100:
        said = b"x" * 100_000
    with connect(told) as line:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            line.sendall((watch.key.encode() + b"\n" if with_key else b"") + said)
            assert line.recv(100) == b""
        assert watch.look() == []
    with connect(told) as line:
        line.sendall(hello(watch.key))
        wait_until(watch.look)


@pytest.mark.parametrize(
    "said",
    [
        b'{"step": Infinity}',
        b'{"step": 1e999}',
        b'{"step": ' + b"9" * 5000 + b"}",
        b"[" * 60_000,
        b'{"error": ' + b"[" * 60_000,
        b'{"step": null}',
        b'{"where": 3}',
        b'{"where": {"stack": 3, "own": 1, "waits": null, "collectives": {}}}',
        b'{"step": 3, "work": "x"}',
        b'"hello"',
    ],
    ids=["infinity", "large", "digits", "deep", "deep-error", "null", "where", "stack", "work", "text"],
)
def test_nothing_that_a_rank_says_ends_the_listening(watch: Watch, said: bytes) -> None:
    told = watch.begin()
    with connect(told) as line:
        line.sendall(hello(watch.key) + said + b'\n{"step": 2}\n')
        wait_until(lambda: watch.look() and watch.look()[0].step == 2)


def test_what_is_told_as_an_error_is_text(watch: Watch) -> None:
    told = watch.begin()
    with connect(told) as line:
        line.sendall(hello(watch.key) + b'{"error": {"a": 1}}\n')
        wait_until(lambda: watch.look() and watch.look()[0].error == "{'a': 1}")


def test_strangers_are_let_go_in_time_and_are_never_many(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_STRANGERS", 3)
    told = watch.begin()
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(connect(told))
        rank.sendall(hello(watch.key))
        wait_until(watch.look)
        strangers = [stack.enter_context(connect(told)) for _ in range(5)]
        assert [line.recv(1) for line in strangers[:2]] == [b"", b""]  # who came first
        assert len(watch._heartbeats) == 4
        monkeypatch.setattr(watch_module, "_GREETING", 0.0)
        assert [line.recv(1) for line in strangers[2:]] == [b"", b"", b""]
        assert [seen.is_open for seen in watch.look()] == [True]


def test_the_port_is_there_for_those_alone_who_need_it() -> None:
    local, far = Watch(), Watch("127.0.0.2")  # as another host would reach this machine
    try:
        assert [watch._server.getsockname()[0] for watch in (local, far)] == ["127.0.0.1", "127.0.0.2"]
    finally:
        local.close()
        far.close()


def test_what_is_no_message_of_a_rank_is_passed_over(watch: Watch) -> None:
    told = watch.begin()
    with connect(told) as line:
        line.sendall(hello(watch.key) + b'{"ste{"step": 1}\n{"step": "x"}\n{"step": 2}\n')
        wait_until(lambda: watch.look() and watch.look()[0].step == 2)


def test_ranks_of_the_launch_before_are_let_go(watch: Watch) -> None:
    first = watch.begin()
    line = connect(first)
    line.sendall(hello(watch.key))
    wait_until(watch.look)
    assert watch.begin() != first
    assert line.recv(100) == b""
    assert watch.look() == []


RANK = """
import os, sys, time
from deepspeed_ucp import heartbeat
if os.fork() == 0:
    time.sleep(60)  # as a data loader's worker: it has no line
    os._exit(0)
heartbeat.report_step(1)
{then}
"""


_started: list[subprocess.Popen[bytes]] = []


def start(told: str, then: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, VARIABLE: told, "RANK": "5"}
    command = [sys.executable, "-c", RANK.format(then=then)]
    _started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True))
    return _started[-1]


@pytest.fixture(autouse=True)
def _tidy() -> Iterator[None]:
    """What ranks have started lives on, and has their end of the pipe."""
    yield
    while _started:
        with contextlib.suppress(ProcessLookupError), _started.pop() as process:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("then", "goodbye", "error", "code"),
    [
        ("pass", True, None, None),
        ("1 / 0", True, "ZeroDivisionError", None),
        ("os.kill(os.getpid(), 9)", False, None, None),
        ("os._exit(0)", True, None, None),
        ("os._exit(status=3)", False, None, 3),
        ("sys.exit()", True, None, None),
        ("sys.exit(0)", True, None, None),
        ("sys.exit(4)", True, None, 4),
        ("sys.exit('oh')", True, None, 1),
    ],
    ids=["done", "error", "killed", "at-once", "at-once-3", "exit", "exit-0", "exit-4", "exit-text"],
)
def test_how_a_rank_ends_is_told(watch: Watch, then: str, goodbye: bool, error: str | None, code: int | None) -> None:
    process = start(watch.begin(), then)
    process.wait()
    wait_until(lambda: watch.look() and not watch.look()[0].is_open)
    (seen,) = watch.look()
    assert (seen.rank, seen.pid, seen.step, seen.said_goodbye) == (5, process.pid, 1, goodbye)
    assert (seen.error or "").count("ZeroDivisionError") == (error is not None)
    assert seen.code == code
    assert (find_first_failure([seen]) is seen) == (not goodbye or error is not None or code is not None)
    os.killpg(process.pid, signal.SIGKILL)


def test_a_process_that_has_nothing_to_tell_is_not_heard_of(watch: Watch) -> None:
    """Importing the package connects to nobody; an error before the first engine is told all the same."""
    environment = {**os.environ, VARIABLE: watch.begin(), "RANK": "5"}
    for code, expected in (("pass", 0), ("1 / 0", 1)):
        done = subprocess.run(
            [sys.executable, "-c", f"import deepspeed_ucp\n{code}"],
            env=environment,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == expected
        watch.catch_up()
        assert len(watch.look()) == expected
    assert "ZeroDivisionError" in (watch.look()[0].error or "")


def test_a_rank_ends_with_its_watcher(watch: Watch) -> None:
    process = start(watch.begin(), "time.sleep(60)")
    wait_until(lambda: watch.look() and watch.look()[0].step == 1)
    watch.begin()
    assert process.wait(timeout=120) == -signal.SIGKILL
    os.killpg(process.pid, signal.SIGKILL)
    assert b"rank 5: the watcher at 127.0.0.1" in process.stderr.read()  # type: ignore[union-attr]


PREEMPTED = """
from types import SimpleNamespace
from deepspeed_ucp import preemption
engine = SimpleNamespace(global_steps=2, save_checkpoint=lambda *_, **__: None)
preemption.follow(engine, "folder", actions={actions})
heartbeat.report_step(2)
while True:
    preemption.save_if_signaled(engine)
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("actions", "passed_on", "code"), [(None, False, 143), (None, True, 0), ({signal.SIGTERM: 0}, False, 0)]
)
def test_a_rank_that_goes_for_itself_has_not_done_its_work(
    watch: Watch, actions: dict[int, int] | None, passed_on: bool, code: int
) -> None:
    """Whoever watches would take 0 for the end of the run, on all hosts: unless all of it has been told."""
    process = start(watch.begin(), PREEMPTED.format(actions=actions and {int(k): v for k, v in actions.items()}))
    wait_until(lambda: watch.look() and watch.look()[0].step == 2)
    if passed_on:
        watch.send(signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == code
    os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("key", "said", "code"),
    [("key@1", b"cannot be reached", 0), (f"key@{find_network()}", b"has ended before: this rank ends", -9)],
    ids=["elsewhere", "here"],
)
def test_a_watcher_that_cannot_be_reached_is_done_without_but_not_one_that_has_ended(
    key: str, said: bytes, code: int
) -> None:
    """A rank that is still importing when its watcher is killed would train on for a launch that has been given up."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and does not listen
        process = start(f"127.0.0.1:{deaf.getsockname()[1]}:{key}", "")
        assert process.wait(timeout=120) == code
    assert said in process.stderr.readline()  # type: ignore[union-attr]


def make_ranks(*heard: float, steps: tuple[int | None, ...] = (1, 1)) -> list[RankStatus]:
    return [RankStatus(rank, "here", 1, "", at, step) for rank, (at, step) in enumerate(zip(heard, steps, strict=True))]


def test_silence_is_that_of_all_ranks() -> None:
    patience = Patience(start=100, step=10)
    assert find_silence([], patience, 1000) is None
    assert find_silence(make_ranks(0, 5), patience, 14) is None
    assert find_silence(make_ranks(0, 5), patience, 16) == 11
    assert find_silence(make_ranks(0, 5, steps=(None, None)), patience, 50) is None
    assert find_silence(make_ranks(0, 5, steps=(None, None)), patience, 106) == 101
    assert find_silence(make_ranks(0, 5), Patience(start=0, step=0), 10**6) is None


def test_silence_is_counted_as_far_as_the_watcher_has_listened(watch: Watch) -> None:
    told = watch.begin()
    with connect(told) as line:
        line.sendall(hello(watch.key))
        wait_until(watch.look)
        with watch._lock:  # it is stopped, as its whole process may be
            line.sendall(b'{"step": 1}\n')
            sent = time.monotonic()
            time.sleep(0.3)
            assert watch.heard_until <= sent
        wait_until(lambda: watch.heard_until > sent)
        assert watch.look()[0].step == 1


def test_all_that_has_come_is_heard_before_it_is_judged(watch: Watch) -> None:
    told, seen = watch.begin(), list[RankStatus]()
    with connect(told) as line:
        with watch._lock:  # its thread is behind
            line.sendall(hello(watch.key) + b'{"step": 1}\n')
            judging = threading.Thread(target=lambda: (watch.catch_up(120), seen.extend(watch.look())))
            judging.start()
            judging.join(0.2)
            assert judging.is_alive()
        judging.join()
    assert [rank.step for rank in seen] == [1]


def make_seen(rank: int, **fields: Any) -> RankStatus:
    return RankStatus(rank, "a", 1, "", 0.0, **fields)


def test_ranks_that_have_ended_before_their_time_are_named() -> None:
    ranks = [make_seen(0), make_seen(1, said_goodbye=True), make_seen(2, said_goodbye=True, error="oh", failed=1.0)]
    ranks += [make_seen(3, said_goodbye=True), make_seen(4, said_goodbye=True, code=1, failed=1.0)]
    assert find_ended(ranks) == [1, 3]


def test_the_first_failure_is_the_one_that_counts(watch: Watch) -> None:
    """Not that of whom an error has ended: it may be about a rank that has gone without a word."""
    told = watch.begin()
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(connect(told)) for _ in range(4)]
        for rank, line in enumerate(lines):
            line.sendall(hello(watch.key, rank))
            wait_until(lambda rank=rank: len(watch.look()) > rank)  # type: ignore[misc]
        ranks = watch.look()
        assert find_first_failure(ranks) is None
        lines[2].sendall(b'{"end": true}\n')
        lines[2].close()
        wait_until(lambda: not ranks[2].is_open)
        assert find_first_failure(ranks) is None
        lines[1].close()
        wait_until(lambda: not ranks[1].is_open)
        lines[0].sendall(b'{"error": "Connection closed by peer"}\n')
        wait_until(lambda: ranks[0].error)
        found = find_first_failure(ranks)
        assert found is ranks[1]
        assert found.describe() == "rank 1 on here has gone without a word before its first step"
        assert find_first_failure(ranks[:1] + ranks[2:]) is ranks[0]
        assert ranks[0].describe() == "rank 0 on here failed before its first step"
        lines[3].sendall(b'{"end": true, "code": 17}\n')
        wait_until(lambda: ranks[3].code)
        assert ranks[3].describe() == "rank 3 on here ended with 17 before its first step"
