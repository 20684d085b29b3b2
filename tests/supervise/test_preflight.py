"""Tests of nodes before a start: real ones on this machine, and hosts that are stand-ins, some of which are bad."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.supervise.agents.agent import choose_arguments
from deepspeed_ucp.supervise.agents.endpoint import SharedFile
from deepspeed_ucp.supervise.agents.gathering import Gathering
from deepspeed_ucp.supervise.agents.leader import Leader, Limits, Past, Seat
from deepspeed_ucp.supervise.preflight import accelerators, links, probe
from deepspeed_ucp.supervise.preflight.asking import Exchange, Preflight, ask_here
from deepspeed_ucp.supervise.preflight.judging import Figure, Report, UnfitError
from tests.supervise.standins import ROOT, Stage, build, wait_until

A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"

BAD = """
import itertools, os, sys, threading
host = os.environ.get("STANDIN_HOST", "")
if "supervise" in sys.orig_argv:
    from deepspeed_ucp.supervise.preflight import asking
    asking.LIMIT = 110
if "deepspeed_ucp.supervise.preflight.probe" in sys.orig_argv:
    import time
    import numpy
    from deepspeed_ucp.supervise.preflight import links
    links._ALL, links._ONE = 60, 30
    ticks, slow = itertools.count(), 100 if host in os.environ["STANDIN_SLOW"] else 1
    time.perf_counter = lambda: slow * 0.01 * next(ticks)
    multiply = numpy.matmul
    def matmul(a, b, out):
        multiply(a, b, out=out)
        if host in os.environ["STANDIN_WRONG"]:
            out[5, 7] = numpy.nextafter(out[5, 7], numpy.float32(1e9))
    numpy.matmul = matmul
    if host in os.environ["STANDIN_DEAD"]:
        os.write(2, b"no such library\\n")
        os._exit(1)
"""
"""What all hosts' Python imports first: some compute wrong, are slow, or do not come to their test; of the others each
measurement takes the same time however busy this machine is, and an answer may."""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = build(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BAD)
    stage.environment["PYTHONPATH"] = f"{tmp_path / 'site'}:{stage.environment['PYTHONPATH']}"
    stage.environment |= dict.fromkeys(("STANDIN_WRONG", "STANDIN_SLOW", "STANDIN_DEAD"), "none")
    return stage


def test_hosts_that_fail_are_left_out_of_a_start(stage: Stage) -> None:
    """Before the first one, and before the next one again."""
    stage.environment["STANDIN_WRONG"] = B
    hostfile = stage.write_hosts(A, B, C)
    assert stage.run("--preflight", "--hostfile", hostfile, command=stage.launch(steps=4, fail_1=3)) == 0
    assert stage.names() == [
        *("preflight", "starting", "running", "failed", "restarting"),
        *("preflight", "starting", "running", "finished"),
    ]
    tested, _ = stage.find("preflight")
    assert list(tested["left_out"]) == [B]
    assert tested["left_out"][B][0] == "product: a sum of whole numbers is wrong"
    assert [each["hosts"] for each in stage.find("starting")] == [{A: 1, C: 1}] * 2
    assert tested["figures"][A].keys() >= {"memory", "product", "disk write", "disk read", "network", "round trips"}


def test_a_host_that_is_slow_or_has_no_answer_leaves_too_few(stage: Stage) -> None:
    stage.environment |= {"STANDIN_SLOW": C, "STANDIN_DEAD": "127.0.0.5"}
    hostfile = stage.write_hosts(A, B, C, "127.0.0.5")
    options = ("--preflight", "--min-nodes", "3", "--wait", "0", "--hostfile", hostfile)
    assert stage.run(*options, command=stage.launch()) == 1
    assert stage.names() == ["preflight", "gave_up"]
    (tested,) = stage.find("preflight")
    assert tested["left_out"].keys() == {C, "127.0.0.5"}
    assert tested["left_out"]["127.0.0.5"] == ["no report: no such library"]
    assert any(each.startswith("product ") and "the median of 3" in each for each in tested["left_out"][C])
    (end,) = stage.find("gave_up")
    assert (end["reason"], end["failing"]) == ("2 hosts answer, and pass their test", [C, "127.0.0.5"])


def test_this_machine_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    report = told["hosts"]["localhost"]["report"]
    assert {figure["what"] for figure in report["figures"]} >= {"memory", "product", "disk write", "free disk"}
    assert (told["hosts"]["localhost"]["faults"], told["notes"]) == ([], [])


def test_a_folder_that_cannot_be_written_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "nowhere")
    assert main(["preflight", folder]) == 1
    shown = capsys.readouterr().out
    assert f"localhost: disk, {folder}: No such file or directory\n0 of 1 pass\n" in shown
    assert "product, GFLOP/s" in shown


def test_a_test_that_does_not_come_to_an_end_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_ucp.supervise.preflight.asking.LIMIT", 0.3)
    monkeypatch.setattr(Preflight, "_make_command", lambda *_: "sleep 600")
    _, verdict = Preflight(ask_here, "127.0.0.1", "", lambda *_, **__: None).test({"here": 1})
    assert verdict.faults == {"here": ["no report: no answer within 0 s"]}


def test_who_is_not_ready_in_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    former = Exchange._wait

    def wait(exchange: Exchange, condition: Callable[[], bool]) -> None:
        """Time is up when three have come."""
        exchange._changed.wait_for(lambda: condition() or len(exchange._ready) == 3, 120)
        exchange._until = 0.0
        former(exchange, condition)

    monkeypatch.setattr(Exchange, "_wait", wait)

    def talk(exchange: Exchange, name: str) -> list[list[Any]]:
        """As a node does; whom it is to try."""
        address, port, key = exchange.line.rsplit(":", 2)
        with socket.create_connection((address, int(port))) as connection, connection.makefile("rw") as stream:
            print(key, json.dumps({"name": name, "address": name, "port": 1}), sep="\n", file=stream, flush=True)
            peers = json.loads(stream.readline())
            print(json.dumps(asdict(Report(faults=(name,)))), file=stream, flush=True)
            stream.readline()
            return list(peers)

    with Exchange("127.0.0.1", "abcd") as exchange, ThreadPoolExecutor(4) as pool:
        with socket.create_connection(("127.0.0.1", int(exchange.line.split(":")[1]))) as stranger:
            stranger.sendall(b"not the key\n{}\n")
            assert stranger.recv(1) == b""
        assert list(pool.map(talk, [exchange] * 3, "abd")) == [
            [["b", "b", 1], ["d", "d", 1]],
            [["d", "d", 1], ["a", "a", 1]],
            [["a", "a", 1], ["b", "b", 1]],
        ]
        assert {name: report.faults for name, report in exchange.reports.items()} == {each: (each,) for each in "abd"}


def test_links_that_fail_once_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As is all that may pass; of what is wrong for good there is one test."""
    tested: list[Report | str] = [
        *(Report(links={"b": None}), Report(links={"c": None}), Report(links={"a": None, "b": "refused"})),
        *(Report(links={"b": None}), Report(links={"c": None}), Report(links={"a": None, "b": None})),
    ]
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(Preflight, "_collect", lambda _, hosts: {host: tested.pop(0) for host in hosts})
    preflight = Preflight(ask_here, "127.0.0.1", "", lambda _, **told: events.append(told))
    assert preflight.select(dict.fromkeys("abc", 1)) == dict.fromkeys("abc", 1)
    tested += [Report(faults=("full",)), Report()]
    assert preflight.select(dict.fromkeys("ab", 1)) == {"b": 1}
    assert (tested, [event["left_out"] for event in events]) == ([], [{}, {"a": ["full"]}])


def flip(product: np.ndarray) -> None:
    product[3, 3] = np.nextafter(product[3, 3], np.float32(1e9))


@pytest.mark.parametrize(
    ("is_bad", "told"),
    [
        (lambda call: call == 0, "a sum of whole numbers is wrong"),
        (lambda call: call == 3, "the same product has other bits each time"),
    ],
)
def test_products_that_are_wrong_are_noticed(
    is_bad: Callable[[int], bool], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply, calls = np.matmul, iter(range(100))

    def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        multiply(a, b, out=out)
        if is_bad(next(calls)):
            flip(out)

    monkeypatch.setattr(probe, "_SIZE", 64)
    assert probe.measure_product()[1] == []
    monkeypatch.setattr(np, "matmul", matmul)
    assert probe.measure_product()[1] == [told]


def test_devices_are_tested_as_processors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    figures, faults = accelerators.Device("cpu", size=64, seconds=0).measure()
    assert ([figure.what for figure in figures], faults) == (["device product", "device memory"], [])
    assert accelerators.Device("cpu", size=64, seconds=0).measure()[0][0].bits == figures[0].bits
    real, calls = torch.Tensor.__matmul__, iter(range(100))

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = real(a, b)
        if product.dim() == 2 and next(calls) in (0, 5):
            product[3, 3] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", matmul)
    assert accelerators.Device("cpu", size=64, seconds=0).measure()[1] == [
        "cpu: a sum of whole numbers is wrong",
        "cpu: the same product has other bits each time",
    ]


def test_links_tell_who_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_ONE", 120)
    monkeypatch.setattr(links, "_ALL", 120)
    good, other = links.Links("127.0.0.1", b"key"), links.Links("127.0.0.1", b"not")
    figures, reached = good.try_all([
        ("good", "127.0.0.1", good.port),
        ("closed", "127.0.0.1", 1),
        ("stranger", "127.0.0.1", other.port),
    ])  # fmt: skip
    assert [figure.what for figure in figures] == ["network", "round trips"]
    assert reached.pop("stranger") in ("the other side has gone", "Connection reset by peer")
    assert reached == {"good": None, "closed": "Connection refused"}


@pytest.mark.parametrize(
    ("variables", "address"),
    [({}, "default"), ({"NCCL_SOCKET_IFNAME": "=lo"}, "127.0.0.1"), ({"GLOO_SOCKET_IFNAME": "x,lo"}, "127.0.0.1"),
     ({"NCCL_SOCKET_IFNAME": "^lo"}, "default")],
)  # fmt: skip
def test_links_go_the_way_that_training_takes(
    variables: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert links.find_link_address("default") == address


class Member(list[dict[str, Any]]):
    """What an agent is told."""

    def send(self, **fields: Any) -> None:
        self.append(fields)


@pytest.mark.parametrize("then", ["passes", "leaves"])
def test_an_agent_whose_node_fails_against_the_others_is_waited_for_until_it_passes_or_leaves(then: str) -> None:
    reports = {name: asdict(Report((Figure("product", 1.0, "x", bits=str(name == "c")),))) for name in "abcd"}
    leader = Leader(Seat("a", "a:1"), Limits(1, 4), Past(), 0.0, lambda: 7)
    told = {name: Member() for name in "abcd"}
    hello = {"address": "x:1", "ranks": 2, "role": "default", "round": 0, "seats": [], "after": 0, "ready": True}
    members = {
        name: leader.greet({**hello, "name": name, "report": reports[name], "asked": 1}, told[name], name, 0.0)
        for name in "abcd"
    }
    leader.tick(1.0)
    leader.tick(1.1)
    assert told["c"][-1] == {"unfit": "product: other bits than 3 of 4 of its kind have", "asked": 1}
    assert not any("port" in each for name in "abd" for each in told[name])
    if then == "passes":
        leader.hear(members["c"], {"ready": True, "after": 0, "report": reports["a"], "asked": 2}, 2.0)
    else:
        leader.hear(members["c"], {"bye": True}, 2.0)
    leader.tick(20.0)
    assert len(told["a"][-1]["seats"]) == (4 if then == "passes" else 3)


def test_an_agent_tests_its_node_again_when_the_others_have_other_bits(tmp_path: Path) -> None:
    endpoints = [SharedFile(str(tmp_path / "endpoint"), "job", silence=30, host="127.0.0.1") for _ in range(3)]
    agents = [Gathering(endpoint, Limits(3, 3, times=100), "job") for endpoint in endpoints]
    reports = [asdict(Report((Figure("product", 1.0, "x", bits=bits),))) for bits in "001"]
    try:
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(agent.join, report) for agent, report in zip(agents[:2], reports[:2], strict=True)]
            with pytest.raises(UnfitError, match="other bits than 2 of 3"):
                agents[2].join(reports[2])
            (head,) = [agent for agent in agents if agent._leader is not None]
            with head.changed:
                head._leader.members[agents[2].name].line.send(unfit="too late", asked=1)  # type: ignore[union-attr]
            assert not any(each.done() for each in others)
            assert {agents[2].join(reports[0]).rank, *(each.result().rank for each in others)} == {0, 1, 2}
    finally:
        for agent in agents:
            agent._release()


def test_torchruns_own_options_stand_before_the_script() -> None:
    args = choose_arguments(["--preflight", "--preflight-dir", "/scratch", "train.py", "--preflight-dir", "x"])
    assert (args.preflight, args.preflight_dir, args.training_script_args) == (
        True,
        "/scratch",
        ["--preflight-dir", "x"],
    )
    assert not choose_arguments(["train.py", "--preflight"]).preflight


AGENT = """
import os, sys
from pathlib import Path
from deepspeed_ucp.supervise.agents import agent
from deepspeed_ucp.supervise.preflight.judging import Figure, Report
from deepspeed_ucp.supervise.preflight.asking import Preflight
from deepspeed_ucp.cli.dispatch import main
folder, own = Path(sys.argv[1]), sys.argv[2]
def collect(self, hosts):
    faults = ("disk: full",) if (folder / f"bad-{own}").exists() else ()
    return {host: Report((Figure("memory", 1.0, "x"),), faults) for host in hosts}
Preflight._collect = collect
sys.exit(main(["torchrun", "--preflight", *sys.argv[3:]]))
"""

WORKER = """
import os, sys, time
from pathlib import Path
folder, world = Path(sys.argv[1]), os.environ["WORLD_SIZE"]
(folder / f"began-{world}").touch()
while not (folder / f"go-{world}").exists():
    time.sleep(0.05)
sys.exit(world == "2")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("bad", ["0", "1"])
def test_an_agent_whose_node_fails_after_a_failure_leaves_the_others(bad: str, tmp_path: Path) -> None:
    """The first one leads."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "worker.py").write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    agents: list[subprocess.Popen[str]] = []

    def start(name: str) -> None:
        options = ["--nnodes", "1:2", "--rdzv-endpoint", str(tmp_path / "endpoint"), "--rdzv-id", "job"]
        conf = ["--rdzv-conf", f"last_call_timeout=30,events={tmp_path / f'events-{name}'}"]
        words = [str(tmp_path / "agent.py"), str(tmp_path), name, *options, *conf]
        command = [sys.executable, *words, str(tmp_path / "worker.py"), str(tmp_path)]
        agents.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))

    try:
        start("0")
        start("1")
        wait_until((tmp_path / "began-2").exists)
        (tmp_path / f"bad-{bad}").touch()
        (tmp_path / "go-2").touch()
        wait_until((tmp_path / "began-1").exists)
        (tmp_path / "go-1").touch()
        told = [each.communicate(timeout=120)[1] for each in agents]
    finally:
        for each in agents:
            each.kill()
    codes = [each.returncode for each in agents]
    assert codes[int(bad)] == 2 and codes[1 - int(bad)] == 0
    message = "ds_ucp torchrun: this node fails its test: disk: full. The others go on without it;"
    assert message in told[int(bad)]
    events = [json.loads(line) for line in (tmp_path / f"events-{bad}").read_text().splitlines()]
    assert [event["event"] for event in events][-2:] == ["preflight", "unfit"]
