"""Two nodes as two network namespaces: one is cut off in the middle of a copy and killed, the other one goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.saves.memory import Job, find_root, list_jobs
from deepspeed_ucp.saves.writer import is_locked
from tests.saves.saving import find_writer
from tests.support.forked import start_script
from tests.support.network import ADDRESSES, Network, build_network
from tests.support.until import wait_until

NODE = Path(__file__).parent / "node.py"
PLACE = "/proc/none/run"
"""Nothing is there, and nobody can write there."""


class Rank:
    """A node's only rank: what it says, by its first word."""

    def __init__(self, network: Network, tmp_path: Path, node: int, world: int, steps: int) -> None:
        variables = {"RANK": str(node % world), "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}
        variables |= {"MASTER_ADDR": ADDRESSES[0] if world > 1 else "127.0.0.1", "MASTER_PORT": "29500"}
        variables |= {"GLOO_SOCKET_IFNAME": f"cable{node}" if world > 1 else "lo"}
        self.memory, self.log = tmp_path / f"memory{node}", tmp_path / f"log{node}-{world}"
        self.log.touch()
        arguments = (PLACE, self.memory, tmp_path / "go", steps)
        self.process = start_script(NODE, arguments, self.log, variables, network=network.holders[node].pid)
        network.stack.callback(self.end)

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    def wait_for(self, word: str, count: int = 1) -> list[Any]:
        def look() -> list[str]:
            return [line for line in self.log.read_text().splitlines() if line.startswith(f"{word} ")]

        wait_until(lambda: len(look()) >= count or not self.process.is_alive())
        assert len(look()) >= count, self.log.read_text()
        return json.loads(look()[count - 1].removeprefix(f"{word} "))

    def find_job(self) -> Job:
        (job,) = list_jobs(find_root(str(self.memory)))
        return job


@pytest.fixture
def network() -> Iterator[Network]:
    yield from build_network("tc")


@pytest.mark.timeout(300)
def test_a_node_that_is_cut_off_in_the_middle_of_a_copy_and_killed(network: Network, tmp_path: Path) -> None:
    """The other one goes on alone from the last save that had been copied, though its part of a later one is whole."""
    ranks = [Rank(network, tmp_path, node, 2, 2) for node in range(2)]
    (tmp_path / "go1").touch()
    (_, _, weights), _ = [rank.wait_for("SAVED") for rank in ranks]
    jobs = [rank.find_job() for rank in ranks]
    wait_until(lambda: all([copy.number for copy in job.list_copies()] == [1] for job in jobs))
    wait_until(lambda: all(any(job.list_saves()[0].read_copied().values()) for job in jobs))
    network.slow_down()
    (tmp_path / "go2").touch()
    for rank in ranks:
        rank.wait_for("SAVED", 2)
    half = Path(jobs[1].folder) / "copy-0-new"
    wait_until(lambda: sum(path.stat().st_size for path in half.rglob("*.pt")) > 1 << 20)
    network.cut()
    os.kill(find_writer(jobs[0]), 9)
    for rank in ranks:
        rank.end()
    wait_until(lambda: not is_locked(jobs[0]))
    shutil.rmtree(ranks[0].memory)
    assert jobs[1].list_saves()[-1].number == 2 and [copy.number for copy in jobs[1].list_copies()] == [1]
    (tmp_path / "go2").unlink()
    alone = Rank(network, tmp_path, 1, 1, 1)
    path, step, found = alone.wait_for("FOUND")
    assert path.startswith(str(ranks[1].memory)) and (step, found) == (1, weights)
    (tmp_path / "go2").touch()
    alone.wait_for("SAVED")
    alone.end()
    for job in list_jobs(find_root(str(ranks[1].memory))):
        with suppress(AssertionError):
            os.kill(find_writer(job), 9)
