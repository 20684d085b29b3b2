"""Two nodes as two network namespaces: one is cut off in the middle of a copy and killed, the other one goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.saves.memory import Job, find_root, list_jobs
from tests.saves.saving import find_writer
from tests.support.forked import start_script

NODE = Path(__file__).parent / "node.py"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PLACE = "/proc/none/run"
"""Nothing is there, and nobody can write there."""


class Network:
    """Two namespaces and a cable between them; a user namespace around both, so that anyone may make them."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack, self.holders = stack, list[subprocess.Popen[bytes]]()
        self._hold(["unshare", "--user", "--map-root-user", "--net"])
        self._hold([*self.enter(0), "unshare", "--net"])
        peer = str(self.holders[1].pid)
        self.run(0, "ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", peer)
        for node, address in enumerate(ADDRESSES):
            self.run(node, "ip", "address", "add", f"{address}/24", "dev", f"cable{node}")
            for device in ("lo", f"cable{node}"):
                self.run(node, "ip", "link", "set", device, "up")

    def _hold(self, command: list[str]) -> None:
        holder = subprocess.Popen([*command, "sleep", "600"], stderr=subprocess.DEVNULL)
        self.stack.callback(end, holder)
        self.holders.append(holder)
        comm = Path(f"/proc/{holder.pid}/comm")  # its last name, which it has when all else is done
        wait_for(lambda: holder.poll() is not None or comm.read_text().strip() == "sleep", 5)
        if holder.poll() is not None:
            raise OSError("unshare is not allowed")

    def enter(self, node: int) -> list[str]:
        return ["nsenter", "--target", str(self.holders[node].pid), "--user", "--net", "--preserve-credentials"]

    def run(self, node: int, *command: str) -> None:
        subprocess.run([*self.enter(node), *command], check=True, capture_output=True)

    def slow_down(self) -> None:
        """2 MB/s, in both directions."""
        for node in range(2):
            limit = ("rate", "16mbit", "burst", "64kb", "latency", "50ms")
            self.run(node, "tc", "qdisc", "add", "dev", f"cable{node}", "root", "tbf", *limit)

    def cut(self) -> None:
        self.run(0, "ip", "link", "set", "cable0", "down")


def end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


def wait_for(is_so: Callable[[], object], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


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

        wait_for(lambda: len(look()) >= count or not self.process.is_alive(), 120)
        assert len(look()) >= count, self.log.read_text()
        return json.loads(look()[count - 1].removeprefix(f"{word} "))

    def find_job(self) -> Job:
        (job,) = list_jobs(find_root(str(self.memory)))
        return job


@pytest.fixture
def network() -> Iterator[Network]:
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    with ExitStack() as stack:
        try:
            yield Network(stack)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"namespaces cannot be made here: {error}")


@pytest.mark.timeout(300)
def test_a_node_that_is_cut_off_in_the_middle_of_a_copy_and_killed(network: Network, tmp_path: Path) -> None:
    """The other one goes on alone from the last save that had been copied, though its part of a later one is whole."""
    ranks = [Rank(network, tmp_path, node, 2, 2) for node in range(2)]
    (tmp_path / "go1").touch()
    (_, _, weights), _ = [rank.wait_for("SAVED") for rank in ranks]
    jobs = [rank.find_job() for rank in ranks]
    wait_for(lambda: all([copy.number for copy in job.list_copies()] == [1] for job in jobs))
    wait_for(lambda: all(job.list_saves()[0].read_copied() for job in jobs))
    network.slow_down()
    (tmp_path / "go2").touch()
    for rank in ranks:
        rank.wait_for("SAVED", 2)
    half = Path(jobs[1].folder) / "copy-0-new"
    wait_for(lambda: sum(path.stat().st_size for path in half.rglob("*.pt")) > 1 << 20)
    network.cut()
    for pid in (ranks[0].process.pid, find_writer(jobs[0]), ranks[1].process.pid):
        assert pid is not None
        os.kill(pid, 9)
    shutil.rmtree(ranks[0].memory)
    assert jobs[1].list_saves()[-1].number == 2 and half.is_dir()
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
