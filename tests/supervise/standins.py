"""Stand-ins for ssh, pdsh and the deepspeed launcher, and scripts without torch: what `supervise` meets, cheaply.

Hosts are addresses of the loopback. `ssh` runs commands here, and answers for a host as long as no file in `down/` has
its name. The launcher starts the ranks over ssh and, as DeepSpeed's, ends the others when one fails.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_ucp.supervise.agents.lines import hold_port
from tests.support.until import wait_until

ROOT = Path(__file__).parents[2]
_HELD: list[socket.socket] = []

SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case "$1" in -o|-p) shift 2;; *) shift;; esac; done
host="$1"; shift
echo "$host $*" >> "$STANDIN/asked"
[ ! -e "$STANDIN/down/$host" ] || exit 255
export STANDIN_HOST="$host"
exec sh -c "$*"
"""

PDSH = """#!/bin/sh
# pdsh -S [-f N] -w a,b command: %n is the host's number
while [ "${1#-}" != "$1" ]; do case "$1" in -w) hosts="$2"; shift 2;; -f) shift 2;; *) shift;; esac; done
echo "pdsh $hosts $*" >> "$STANDIN/asked"
number=0; pids=""
for host in $(echo "$hosts" | tr , ' '); do
    ssh "$host" "$(echo "$*" | sed "s/%n/$number/g")" & pids="$pids $!"; number=$((number + 1))
done
trap 'kill $pids' INT TERM
code=0; for pid in $pids; do wait "$pid" || code=$?; done; exit $code
"""

LAUNCHER = """#!{python}
import os, subprocess, sys, time
words = sys.argv[1:]
hosts, forgives = {{"here": 2}}, "STANDIN_FORGIVES" in os.environ
if words[0] == "--hostfile":
    hosts = {{line.split()[0]: int(line.split("=")[1]) for line in open(words[1])}}
while words[0].startswith("-"):
    del words[: 1 if words[0] in ("--no_python", "--force_multi", "--no_ssh_check") else 2]
exports = dict(line.strip().split("=", 1) for line in open(os.environ["DS_ENV_FILE"])) if len(hosts) > 1 else {{}}
world, ranks = sum(hosts.values()), []
for host, slots in hosts.items():
    for _ in range(slots):
        told = {{**exports, "RANK": len(ranks), "WORLD_SIZE": world}}
        command = [sys.executable, *words]
        if len(hosts) > 1:
            settings = " ".join(f"{{name}}={{value}}" for name, value in told.items())
            command = ["ssh", host, "exec env", settings, *command]
        environment = {{**os.environ, **{{name: str(value) for name, value in told.items()}}}}
        ranks.append(subprocess.Popen(command, env=environment))
while any(rank.poll() is None for rank in ranks):
    if failed := [rank.poll() for rank in ranks if rank.poll()]:
        for rank in ranks:
            rank.kill() if forgives else rank.terminate()
        sys.exit(0 if forgives else max(failed[0], 1))
    time.sleep(0.05)
sys.exit(0 if forgives else max(abs(rank.poll()) for rank in ranks))
"""

RANK = """
import json, os, pathlib, signal, sys, time
from deepspeed_ucp import heartbeat
heartbeat.connect()
folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
plan = json.loads((folder / "plan").read_text())
rank = os.environ["RANK"]
(folder / "pids").open("a").write(f"{os.getpid()} {rank} {os.environ.get('STANDIN_HOST', '')}\\n")
saved = folder / "saved"
step = int(saved.read_text() or 0) if saved.exists() else 0

def note(number, frame):
    (folder / "signals").open("a").write(f"{rank} {number}\\n")
    if number == signal.SIGTERM:  # as `preemption` does
        sys.exit(0 if heartbeat.has_passed_on(number) else 128 + number)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, note)

def do(what, at):
    mark = folder / f"{what}-{at}-{rank}"
    if plan.get(f"{what} {rank}") != at or mark.exists():
        return False
    if what != "always":
        mark.write_text("")
    return True

def reach(step):
    (folder / f"next-{rank}").write_text(str(step))
    os.replace(folder / f"next-{rank}", folder / f"at-{rank}")

def others_are_at(step):
    found = [folder / f"at-{other}" for other in range(int(os.environ["WORLD_SIZE"]))]
    return all(path.exists() and int(path.read_text()) >= step for path in found)

reach(step)
while not others_are_at(step):  # nobody is waited for in a step who has not come yet
    time.sleep(0.01)
while step < steps:
    step += 1
    if do("fail", step) or do("always", step):
        raise RuntimeError(f"broken at {step} on rank {rank}")
    if do("stop", step):
        os.kill(os.getpid(), signal.SIGSTOP)
    if do("exit", step):
        sys.exit(1)
    if do("die", step):
        os.kill(os.getpid(), signal.SIGKILL)
    if do("go", step):
        os.kill(os.getpid(), signal.SIGTERM)
    if do("leave", step):  # a process that is in no group and no session of ours
        if (left := os.fork()) == 0:
            os.setsid()
            (folder / "left").write_text(str(os.getpid()))
            time.sleep(600)
        while not (folder / "left").exists() or (folder / "left").read_text() != str(left):
            time.sleep(0.01)
    while (folder / "wait").exists() and step > 2:
        time.sleep(0.02)
    heartbeat.report_step(step)
    reach(step)
    while not others_are_at(step):
        time.sleep(0.01)
    if rank == "0":
        (folder / "next").write_text(str(step)); os.replace(folder / "next", saved)
    time.sleep(0.02)
"""


@dataclass
class Stage:
    """A folder with the stand-ins, and what a supervisor in it did.

    Attributes:
        folder: also the training's.
        warm: ranks of a second launch may be forked.
    """

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    warm: bool = False

    @property
    def events(self) -> list[dict[str, Any]]:
        """What the supervisor has told so far."""
        path = self.folder / "events"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]

    def find(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def pids(self, host: str | None = None) -> list[int]:
        """Of all ranks that were ever started, or of those on one host."""
        lines = [line.split(" ") for line in (self.folder / "pids").read_text().splitlines()]
        return [int(pid) for pid, _, where in lines if host in (None, where)]

    def wait_for_ranks(self) -> None:
        """Until both ranks are there and one has stepped."""
        wait_until(lambda: all((self.folder / f"at-{rank}").exists() for rank in (0, 1)))
        wait_until(lambda: "running" in self.names())

    @contextmanager
    def supervise(
        self, *options: str, command: list[str], through: str | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        own = [sys.executable, "-m", "deepspeed_ucp", "supervise", "--log", str(self.folder / "events")]
        own += [] if self.warm else ["--no-warm"]
        words = own if through is None else [through, *own]
        with open(self.folder / "output", "ab") as output:
            self.process = subprocess.Popen(
                [*words, *options, "--", *command], env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            yield self.process
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def run(self, *options: str, command: list[str]) -> int:
        with self.supervise(*options, command=command) as process:
            return process.wait(timeout=240)

    def launch(self, steps: int = 5, **plan: int) -> list[str]:
        """The stand-in launcher's command line; ``fail_1=3``: rank 1 fails at step 3."""
        (self.folder / "plan").write_text(json.dumps({key.replace("_", " "): step for key, step in plan.items()}))
        return [str(self.folder / "bin" / "deepspeed"), str(self.folder / "rank.py"), str(self.folder), str(steps)]

    def write_hosts(self, *hosts: str) -> str:
        path = self.folder / "hosts"
        path.write_text("".join(f"{host} slots=1\n" for host in hosts))
        return str(path)


def build(folder: Path) -> Stage:
    programs = folder / "bin"
    programs.mkdir()
    (folder / "down").mkdir()
    for name, text in {"ssh": SSH, "pdsh": PDSH, "deepspeed": LAUNCHER.format(python=sys.executable)}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "rank.py").write_text(RANK)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "STANDIN": str(folder),
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "TMPDIR": str(folder),  # what a supervisor that is killed leaves behind
    }
    return Stage(folder, environment=environment)


def find_port() -> int:
    """Of this machine, and nobody else's as long as this process lives."""
    _HELD.append(hold_port())
    return int(_HELD[-1].getsockname()[1])


def is_running(pid: int) -> bool:
    """A zombie is not: whoever has to take leave of it may not have done so yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        if is_running(pid):
            os.kill(pid, number)
