"""Two hosts on one machine: namespaces of their own for network and processes, a link between them, an sshd in each.

Neither sees the other's processes, as `pkill` of the launcher would, and what is left on one can be told.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.supervise.standins import ROOT, wait_until

NEAR, FAR = "10.77.0.1", "10.77.0.2"
NEEDED = ("ip", "ssh", "sshd", "ssh-keygen", "pdsh", "unshare", "nsenter")

_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_NOBODY = "02:00:00:00:00:99"
_SSHD = """
ListenAddress {address}
HostKey {folder}/key
PidFile none
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
"""
_SSH = """#!/bin/sh
exec {ssh} -i {folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"
"""


def find_missing() -> str | None:
    """What this takes and this machine lacks."""
    if os.geteuid():
        return "root is needed to make network namespaces"
    lacking = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed"
    try:
        pwd.getpwnam("sshd")
    except KeyError:
        return "sshd has no user here"
    made = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, text=True, check=False
    )
    return f"no namespaces here: {made.stderr.strip()}" if made.returncode else None


@dataclass(frozen=True)
class Host:
    """One of the two.

    Attributes:
        name: of its network namespace.
        root: its first process, as this machine counts.
    """

    name: str
    address: str
    root: psutil.Process

    def enter(self, *command: str) -> list[str]:
        """A command line that runs one there."""
        return ["nsenter", f"--target={self.root.pid}", "--net", "--mount", "--pid", f"--wd={ROOT}", *command]

    def find(self, *words: str) -> list[psutil.Process]:
        """Processes there whose first arguments these are."""
        return [each for each in psutil.process_iter() if self._has(each, words)]

    def _has(self, process: psutil.Process, words: Sequence[str]) -> bool:
        try:
            is_here = os.path.samefile(f"/proc/{process.pid}/ns/pid", f"/proc/{self.root.pid}/ns/pid")
            return is_here and process.cmdline()[1 : len(words) + 1] == list(words)
        except (psutil.NoSuchProcess, OSError):  # gone, or not to be looked at
            return False


@dataclass(frozen=True)
class Pair:
    """Both, the near one first."""

    near: Host
    far: Host

    def set_link(self, state: str) -> None:
        """``down``: the cable is pulled; ``up``: it is there again."""
        run("ip", "-n", self.far.name, "link", "set", "cable", state)

    @contextmanager
    def losing_everything(self) -> Iterator[None]:
        """What either sends goes astray, and nobody is told: a switch in between has failed."""
        for own, other in ((self.near, self.far), (self.far, self.near)):
            neighbour = (other.address, "lladdr", _NOBODY, "dev", "cable", "nud", "permanent")
            run("ip", "-n", own.name, "neighbour", "replace", *neighbour)
        yield
        for own, other in ((self.near, self.far), (self.far, self.near)):
            run("ip", "-n", own.name, "neighbour", "del", other.address, "dev", "cable")


def run(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, "PATH": _PATH})


@contextmanager
def build_pair(folder: Path) -> Iterator[Pair]:
    """Both hosts, which let each other in; ``folder/bin/ssh`` has the key."""
    (folder / "bin" / "ssh").write_text(_SSH.format(ssh=shutil.which("ssh"), folder=folder))
    (folder / "bin" / "ssh").chmod(0o755)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
    os.makedirs("/run/sshd", exist_ok=True)
    names = [f"ucp-{os.getpid()}-{which}" for which in ("near", "far")]
    with ExitStack() as undo:
        for name in names:
            run("ip", "netns", "add", name)
            undo.callback(run, "ip", "netns", "del", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        near, far = names
        run(
            *("ip", "-n", near, "link", "add", "name", "cable", "type", "veth"),
            *("peer", "name", "cable", "netns", far),
        )
        yield Pair(*(_start_host(folder, name, where, undo) for name, where in zip(names, (NEAR, FAR), strict=True)))


def _start_host(folder: Path, name: str, address: str, undo: ExitStack) -> Host:
    run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "cable")
    run("ip", "-n", name, "link", "set", "cable", "up")
    config = folder / f"sshd-{address}"
    config.write_text(_SSHD.format(address=address, folder=folder))
    sshd = [str(shutil.which("sshd", path=_PATH)), "-D", "-f", str(config)]
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    holder = subprocess.Popen(["ip", "netns", "exec", name, *apart, *sshd], env={**os.environ, "PATH": _PATH})
    undo.callback(holder.wait)
    undo.callback(holder.kill)  # and everything there with it
    wait_until(lambda: [each for each in psutil.Process(holder.pid).children() if "sshd" in each.name()])
    return Host(name, address, psutil.Process(holder.pid).children()[0])
