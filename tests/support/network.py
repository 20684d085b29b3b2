"""Two nodes as two network namespaces with a cable between them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.until import wait_until

ADDRESSES = ("10.77.0.1", "10.77.0.2")


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
        wait_until(lambda: holder.poll() is not None or comm.read_text().strip() == "sleep")
        if holder.poll() is not None:
            raise OSError("unshare is not allowed")

    def enter(self, node: int) -> list[str]:
        return ["nsenter", "--target", str(self.holders[node].pid), "--user", "--net", "--preserve-credentials"]

    def run(self, node: int, *command: str) -> None:
        subprocess.run([*self.enter(node), *command], check=True, capture_output=True)

    def slow_down(self) -> None:
        """250 KB/s, in both directions."""
        for node in range(2):
            limit = ("rate", "2mbit", "burst", "64kb", "latency", "50ms")
            self.run(node, "tc", "qdisc", "add", "dev", f"cable{node}", "root", "tbf", *limit)

    def cut(self) -> None:
        self.run(0, "ip", "link", "set", "cable0", "down")

    def mend(self) -> None:
        self.run(0, "ip", "link", "set", "cable0", "up")


def end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


def build_network(*needed: str) -> Iterator[Network]:
    """For a fixture; skips where there are no namespaces, or one of some commands is lacking."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", *needed) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    with ExitStack() as stack:
        try:
            yield Network(stack)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"namespaces cannot be made here: {error}")
