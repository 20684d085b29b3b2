"""Reports of steps and phases to each listener, without an engine."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp import beacon
from deepspeed_ucp.beacon import Listener, dlrover, kubeflow, nvrx, torchelastic
from tests.support.certificates import make_certificate, make_context
from tests.support.until import wait_until


@pytest.fixture(autouse=True)
def _reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beacon, "_active", None)
    monkeypatch.setenv("RANK", "0")


def test_phases_nest_and_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = mock.Mock(spec=Listener)
    monkeypatch.setattr(beacon, "_active", {"recorder": recorder})
    with beacon.phase("train_batch"):
        with beacon.phase("forward"):
            pass
        with pytest.raises(MemoryError), beacon.phase("backward"):
            raise MemoryError
    beacon.report_step(3)
    inner = [getattr(mock.call, call)(name) for name in ("forward", "backward") for call in ("enter", "leave")]
    outer = mock.call.enter("train_batch"), mock.call.leave("train_batch")
    assert recorder.mock_calls == [outer[0], *inner, outer[1], mock.call.report_step(3, None)]


def test_a_failing_listener_is_dropped(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    failing, working = mock.Mock(spec=Listener), mock.Mock(spec=Listener)
    failing.report_step.side_effect, failing.end.side_effect = RuntimeError("broken pipe"), OSError("no end either")
    monkeypatch.setattr(beacon, "_active", {"failing": failing, "working": working})
    beacon.report_step(1)
    beacon.report_step(2)
    assert failing.mock_calls == [mock.call.report_step(1, None), mock.call.end()]
    assert working.mock_calls == [mock.call.report_step(step, None) for step in (1, 2)]
    assert caplog.messages == ["rank 0: failing gets no further reports of this rank: broken pipe"]


def test_a_forked_process_does_not_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beacon, "_active", {"working": Listener()})
    child = os.fork()
    if not child:
        os._exit(len(beacon._find_listeners()))
    assert os.waitpid(child, 0)[1] == 0
    assert len(beacon._find_listeners()) == 1


def test_reports_for_dlrover_are_complete_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runtime_metrics.json"
    monkeypatch.setenv("RUNTIME_METRICS_PATH", str(path))
    before = time.time()
    for pause, step, written in ((0.0, 1, 1), (3600.0, 2, 1), (0.0, 3, 3)):
        monkeypatch.setattr(dlrover, "_PAUSE", pause)
        beacon.report_step(step)
        record = json.loads(path.read_text())
        assert record["step"] == written and before <= record["timestamp"] <= time.time()
    assert os.listdir(tmp_path) == [path.name]
    path.unlink()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(beacon, "_active", None)
    beacon.report_step(4)
    assert not path.exists()


class Controller(http.server.BaseHTTPRequestHandler):
    """Stand-in for Kubeflow Trainer's controller, which records the posts."""

    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts.append((self.headers["Authorization"], body))
        self.send_response(self.server.answers.pop(0) if self.server.answers else 200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An HTTPS server with a separate CA, set in the environment; ``goes_on`` ends the pause between two posts."""
    certificate = make_certificate(tmp_path)
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Controller)
    server.posts, server.answers, server.token, server.goes_on = [], [], tmp_path / "token", threading.Event()
    server.socket = make_context(certificate).wrap_socket(server.socket, server_side=True)
    server.token.write_text("one\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://127.0.0.1:{server.server_port}/status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(server.token))
    monkeypatch.setattr(kubeflow, "_TIMEOUT", 120.0)
    pause = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: server.goes_on.wait())
    monkeypatch.setattr(kubeflow, "time", pause)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.goes_on.set()
    beacon.mute("kubeflow")
    server.shutdown()
    server.server_close()


def test_the_newest_step_is_posted_to_kubeflow(controller: Any) -> None:
    beacon.report_step(10, 40)
    wait_until(lambda: len(controller.posts) == 1)
    controller.token.write_text("two\n")  # tokens expire
    for step in range(11, 21):
        beacon.report_step(step, 40)
    assert len(controller.posts) == 1
    controller.goes_on.set()
    wait_until(lambda: len(controller.posts) == 2)
    (first, begun), (second, later) = controller.posts
    assert (first, second) == ("Bearer one", "Bearer two")
    status = begun["trainerStatus"]
    assert datetime.fromisoformat(status.pop("lastUpdatedTime")).tzinfo is not None
    assert status == {"metrics": [{"name": "step", "value": "10"}], "progressPercentage": 25}
    status = later["trainerStatus"]
    assert (status["metrics"][0]["value"], status["progressPercentage"]) == ("20", 50)
    assert isinstance(status["estimatedRemainingSeconds"], int)
    beacon.mute("kubeflow")
    beacon.report_step(21)
    time.sleep(0.5)
    assert len(controller.posts) == 2


def test_a_failing_kubeflow_controller_is_a_warning(controller: Any, caplog: pytest.LogCaptureFixture) -> None:
    controller.answers += [503, 503]
    controller.goes_on.set()
    for step in range(3):
        beacon.report_step(step)
        wait_until(lambda step=step: len(controller.posts) == step + 1)  # type: ignore[misc]
    (message,) = caplog.messages
    assert message.endswith("to Kubeflow Trainer, training continues: HTTP Error 503: Service Unavailable")


@pytest.fixture
def monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A socket like that of NVRx's monitor, and a stand-in for its client."""

    class Client:
        def init_workload_monitoring(self) -> None:
            self.calls, self.section_timeouts = [], SimpleNamespace(section=dict.fromkeys(("setup", "step", "save")))
            self.send_heartbeat = lambda: self.calls.append("heartbeat")
            self.start_section = lambda name: self.calls.append(f"+{name}")
            self.end_section = lambda name: self.calls.append(f"-{name}")
            self.rank_monitor_socket = socket.socket(socket.AF_UNIX)
            self.rank_monitor_socket.connect(path)
            clients.append(self)

        def shutdown_workload_monitoring(self) -> None:
            self.calls.append("end")
            self.rank_monitor_socket.close()

    path, clients = str(tmp_path / "socket"), list[Client]()
    library, package = ModuleType("nvidia_resiliency_ext.fault_tolerance"), ModuleType("nvidia_resiliency_ext")
    vars(library)["RankMonitorClient"] = Client
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        yield SimpleNamespace(server=server, clients=clients, make=Client)
        for each in clients:
            each.rank_monitor_socket.close()


def pass_through(*names: str) -> None:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(beacon.phase(name))


def take_step() -> None:
    pass_through("forward")
    pass_through("step", "save")
    beacon.report_step(1)


def test_steps_and_sections_with_a_timeout_are_reported_to_nvrx(monitor: Any) -> None:
    pass_through("load")
    take_step()
    step = ["+step", "-step", "+step", "+save", "-save", "-step"]
    (client,) = monitor.clients
    assert client.calls == ["+setup", *step, "-setup", "heartbeat"]
    take_step()
    assert client.calls[9:] == [*step, "heartbeat"]


def test_only_one_client_reports_to_nvrx(monitor: Any) -> None:
    """A client of the script takes precedence, even if it connects later."""
    early = monitor.make()
    early.init_workload_monitoring()
    take_step()
    assert monitor.clients == [early] and early.calls == []
    early.rank_monitor_socket.close()
    beacon._active = None
    take_step()
    late = monitor.make()
    late.init_workload_monitoring()
    ours = monitor.clients[1]
    assert monitor.clients == [early, ours, late] and ours.calls[-1] == "end"
    take_step()
    assert ours.calls[-1] == "end" and late.calls == []


def test_an_unreachable_nvrx_monitor_is_a_warning(
    monitor: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", "nowhere")
    monitor.server.close()
    take_step()
    monkeypatch.setattr(beacon, "_active", None)
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.fault_tolerance", None)
    take_step()
    unreachable, missing = caplog.messages
    assert "cannot be reached, training continues" in unreachable and "Install nvidia-resiliency-ext" in missing
    assert socket.getdefaulttimeout() is None and not nvrx._is_connected("nowhere")


class Timers:
    """The agent's end of the pipe: the expiration of each timer, None when it is released."""

    def __init__(self, path: Path) -> None:
        self.pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def read(self) -> list[float | None]:
        try:
            text = os.read(self.pipe, 1 << 16).decode()
        except BlockingIOError:
            return []
        requests = [json.loads(each) for each in text.splitlines()]
        kills, harmless = requests[::2], requests[1::2]
        assert {(each["pid"], each["signal"]) for each in kills} == {(os.getpid(), signal.SIGKILL)}
        assert {(each["pid"], each["signal"]) for each in harmless} == {(-os.getpgrp(), signal.SIGCONT)}
        ends = [each["expiration_time"] for each in kills]
        assert ends == [each["expiration_time"] for each in harmless]
        return [None if each < 0 else each for each in ends]


@pytest.fixture
def timers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Timers]:
    """Timers whose renewals are all sent, even shortly after the last one."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(tmp_path / "pipe"))
    monkeypatch.setattr(torchelastic, "_RENEWALS", float("inf"))
    monkeypatch.setattr(torchelastic, "_limit", 0.0)
    torchelastic.set_limit(100)
    torchelastic.set_limit(50)
    timers = Timers(tmp_path / "pipe")
    yield timers
    beacon.mute("torchelastic")
    os.close(timers.pipe)


def test_the_agents_timer_starts_with_the_first_step_and_pauses_in_loads_and_saves(timers: Timers) -> None:
    pass_through("load", "forward")
    pass_through("forward")  # may compile
    pass_through("save")
    beacon.report_step(0)
    assert timers.read() == []
    before = time.time()
    with beacon.phase("step"):
        assert timers.read() == []
    (end,) = timers.read()
    assert end is not None and before + 100 <= end <= time.time() + 100
    beacon.report_step(1)
    pass_through("forward")
    assert len(timers.read()) == 3
    with beacon.phase("save"):
        assert timers.read() == [None]
        with beacon.phase("forward"):
            beacon.report_step(1)
        assert timers.read() == []
    (end,) = timers.read()
    assert end is not None
    assert beacon._active is not None
    beacon._active["torchelastic"].end()  # at exit
    beacon.report_step(2)
    assert timers.read() == [None]


@pytest.mark.parametrize(("name", "value", "sent"), [("_RENEWALS", 20, 3), ("_limit", 0.0, 0)], ids=["rare", "off"])
def test_timers_are_sent_rarely_or_never(
    name: str, value: float, sent: int, timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer is renewed after each save, because a save releases it."""
    monkeypatch.setattr(torchelastic, name, value)
    for _ in range(3):
        take_step()
    ends = timers.read()
    assert len([each for each in ends if each is not None]) == sent and bool(ends) is bool(sent)


def test_a_stalled_agent_gets_timers_with_later_expiration(timers: Timers, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise it would kill the rank when it reads again."""
    take_step()
    with ExitStack() as stack:
        filler = os.open(os.environ["TORCHELASTIC_TIMER_FILE"], os.O_WRONLY | os.O_NONBLOCK)
        stack.callback(os.close, filler)
        stack.enter_context(suppress(BlockingIOError))
        while True:
            os.write(filler, b"\n" * 4096)
    take_step()
    pass_through("save")
    while len(os.read(timers.pipe, 1 << 16)) == 1 << 16:
        pass
    take_step()
    assert timers.read()
    assert not caplog.messages


def test_an_exited_agent_is_a_warning(timers: Timers, caplog: pytest.LogCaptureFixture) -> None:
    take_step()
    pipe = timers.pipe
    os.close(pipe)
    take_step()
    timers.pipe = os.open(os.devnull, os.O_RDONLY)
    (message,) = caplog.messages
    assert "torchelastic gets no further reports of this rank" in message
