"""Agents on two nodes, between which the network is cut and mended: one of them goes on, the other one comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.supervise.standins import ROOT, wait_until
from tests.support.network import ADDRESSES, Network, build_network

AGENT = """
import sys, time
from deepspeed_ucp.errors import UcpError
from deepspeed_ucp.supervise.agents.endpoint import Addresses, SharedFile
from deepspeed_ucp.supervise.agents.gathering import Gathering
from deepspeed_ucp.supervise.agents.leader import Limits
where, host = sys.argv[1:]
endpoint = SharedFile(where, "job", silence=30, host=host) if "/" in where else Addresses(where)
own = Gathering(endpoint, Limits(1, 2, every=0.4, times=30, last_call=600, join=600), "job", host=host)
try:
    while True:
        found = own.join()
        print("round", len(found.seats), found.rank, flush=True)
        while own.ended is None and not own.count_waiting():
            time.sleep(0.02)
        print("ended", own.ended, flush=True)
except UcpError as error:
    print("error", error, flush=True)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    yield from build_network()


class Node:
    """An agent, and what it says."""

    def __init__(self, network: Network, tmp_path: Path, number: int, endpoint: str) -> None:
        self.log = tmp_path / f"log{number}"
        command = [*network.enter(number), sys.executable, "-c", AGENT, endpoint, ADDRESSES[number]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        network.stack.callback(self.process.wait)
        network.stack.callback(self.process.kill)

    def list_words(self, first: str) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [line.removeprefix(f"{first} ") for line in lines if line.startswith(f"{first} ")]

    def wait_for(self, first: str, count: int) -> str:
        wait_until(lambda: len(self.list_words(first)) >= count or self.process.poll() is not None)
        assert len(self.list_words(first)) >= count, self.log.read_text()
        return self.list_words(first)[count - 1]


def test_of_two_halves_the_first_agents_goes_on(network: Network, tmp_path: Path) -> None:
    first, second = (Node(network, tmp_path, number, f"{ADDRESSES[0]}:29400") for number in (0, 1))
    assert [first.wait_for("round", 1), second.wait_for("round", 1)] == ["2 0", "2 1"]
    network.cut()
    assert first.wait_for("round", 2) == "1 0"
    assert "behind a cut network" in second.wait_for("error", 1)
    assert second.list_words("ended") == [f"the agent on {os.uname().nodename} answers no more"]


def test_by_a_shared_file_one_goes_on_and_the_other_comes_back(network: Network, tmp_path: Path) -> None:
    nodes = [Node(network, tmp_path, number, str(tmp_path / "endpoint")) for number in (0, 1)]
    assert sorted(each.wait_for("round", 1) for each in nodes) == ["2 0", "2 1"]
    network.cut()
    wait_until(lambda: any(len(each.list_words("round")) == 2 for each in nodes))
    lone, lost = sorted(nodes, key=lambda each: -len(each.list_words("round")))
    assert lone.wait_for("round", 2) == "1 0"
    wait_until(lambda: lost.list_words("ended"))
    with pytest.raises(AssertionError):
        wait_until(lambda: len(lost.list_words("round")) > 1 or len(lone.list_words("ended")) > 1, 4)
    network.mend()
    assert sorted([lone.wait_for("round", 3), lost.wait_for("round", 2)]) == ["2 0", "2 1"]
