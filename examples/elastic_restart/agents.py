"""Two agents on one machine, each a node with a folder of memory of its own; what they log; how they are lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from deepspeed_ucp.saves.memory import find_root, list_jobs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACE = 0.25  # seconds a step: a model that is not tiny
HANG = 5
LONGEST = 120.0  # seconds for anything to come
PREPARING = 40.0  # seconds for an agent to import what its next ranks need
CONF = f"keep_alive_interval=1,last_call_timeout=2,hang={HANG}"
VARIABLE = "NODE_MEMORY"  # names a node's folder of memory, and so all of its processes


def describe_progress(world: int, step: int, load: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    """One line: where the job resumed, how many steps it repeats, and which step it has reached."""
    reached = max((each["step"] for each in steps if each["time"] < load["time"]), default=0)
    ranks = f"{world} rank{'s' * (world > 1)}"
    if not reached:
        return f"step {step:3}: {ranks}, first start"
    repeated = max(0, reached - load["step"])
    return f"step {step:3}: {ranks}, resumed after step {load['step']}; repeated steps: {repeated}"


class DemoFailed(Exception):
    """Something did not come."""


@dataclass
class Job:
    """The two agents, what they and their ranks log, and what was done to them.

    Attributes:
        began: the demo; ``launched``: its first agent.
        save_every, snapshot_every: steps between saves to the checkpoint folder, and into memory (0: none).
        memory: has a folder for each node, as if it were that node's memory.
    """

    folder: Path
    ranks: int
    steps: int
    began: float
    save_every: int
    snapshot_every: int = 0
    memory: Path | None = None
    launched: float = 0.0
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    faults: list[tuple[str, float]] = field(default_factory=list)

    def say(self, text: str) -> None:
        print(f"{time.time() - self.began:5.0f} s  {text}", flush=True)

    def read(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def read_log(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.read("log") if each["event"] == event]

    def start_agent(self) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "deepspeed_ucp", "torchrun", "--nnodes", "1:2", "--rdzv-id", "demo"),
            *("--nproc-per-node", str(self.ranks), "--rdzv-endpoint", str(self.folder / "rendezvous")),
            *("--rdzv-conf", f"{CONF},events={self.folder / 'events'}", str(HERE / "job.py")),
            *("--steps", str(self.steps), "--pace", str(PACE)),
            *("--save_every", str(self.save_every), "--snapshot_every", str(self.snapshot_every)),
            *("--folder", str(self.folder / "checkpoints"), "--record", str(self.folder / "log")),
        ]
        environment, number = make_environment(), len(self.agents) + 1
        if self.memory is not None:
            environment[VARIABLE] = str(self.memory / f"node{number}")
        with (self.folder / f"agent{number}.out").open("wb") as output:
            agent = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        self.agents.append(agent)
        return agent

    def note(self, what: str) -> None:
        self.faults.append((what, time.time()))
        self.say(what)

    def wait_for(self, what: str, condition: Callable[[], Any]) -> Any:
        until = time.time() + LONGEST
        while not (found := condition()):
            if time.time() > until or all(agent.poll() is not None for agent in self.agents):
                raise DemoFailed(f"{what} did not come; see the agents' last lines:\n{self.tail()}")
            time.sleep(0.02)
        return found

    def wait_for_steps(self, world: int, count: int, then: Callable[[int], bool] = lambda _: True) -> int:
        """Until a world of this size has taken some steps since the last fault, and ``then`` takes the last of them."""
        since = self.faults[-1][1] if self.faults else 0.0

        def look() -> int | None:
            steps = [each["step"] for each in self.read_log("step") if each["world"] == world and each["time"] > since]
            return steps[-1] if len(steps) >= count and then(steps[-1]) else None

        step = int(self.wait_for(f"step {count} of {world} ranks", look))
        self.say(describe_progress(world, step, self.read_log("loaded")[-1], self.read_log("step")))
        return step

    def wait_for_templates(self, *agents: subprocess.Popen[bytes]) -> None:
        """Until these agents have what their next ranks are forked from; where there is no such thing, not long."""
        until = time.time() + PREPARING

        def look() -> bool:
            told = [each for each in self.read("events") if each["event"] == "template"]
            made = {each["pid"] for each in told if "seconds" in each}
            return made >= {each.pid for each in agents} or time.time() > until

        self.wait_for("a template", look)

    def find_ranks(self, agent: subprocess.Popen[bytes]) -> list[int]:
        """Ranks that this agent has started, or had forked."""
        own = {each.pid for each in psutil.Process(agent.pid).children(recursive=True)}
        return [each["pid"] for each in self.read_log("started") if each["pid"] in own and is_alive(each["pid"])]

    def has_copies(self) -> bool:
        """Whether each node has a copy of the other one's part of the last save."""
        jobs = [list_jobs(find_root(str(node)))[-1] for node in self.memory.iterdir()] if self.memory else []
        last = max(job.list_numbers()[-1] for job in jobs)
        return all(last in [copy.number for copy in job.list_copies()] for job in jobs)

    def lose_node(self, number: int) -> None:
        """Kill all processes of a node, as when its power fails, and take its memory away."""
        memory = str(self.memory / f"node{number}") if self.memory else ""
        while pids := list(find_processes(memory)):
            kill(pids)
            time.sleep(0.02)
        shutil.rmtree(memory)

    def tail(self) -> str:
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("agent*.out"))]
        return "\n".join("\n".join(text.splitlines()[-15:]) for text in texts)

    def end(self) -> None:
        """End what is left: after a failure, and writers that still wait for a node that is lost."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        kill([each["pid"] for each in self.read_log("started") if is_alive(each["pid"])])
        while self.memory is not None and (pids := list(find_processes(f"{self.memory}{os.sep}"))):
            kill(pids)
            time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def find_processes(memory: str) -> Iterator[int]:
    """Those whose folder of memory has a path that begins so: a node's agent, ranks and writers."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if any(each.startswith(f"{VARIABLE}={memory}".encode()) for each in variables):
            yield int(path.parent.name)


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def make_environment() -> dict[str, str]:
    """One thread a rank: the model is tiny, and threads that wait for each other are slow where other work runs."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"DS_ACCELERATOR": "cpu", **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
