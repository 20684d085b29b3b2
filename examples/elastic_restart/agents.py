"""Two torchrun agents on one machine. Each stands for a node and has a separate memory folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from deepspeed_ucp.saves.memory import find_root, list_jobs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACE = 0.25  # seconds per step, as if the model were larger
HANG = 5  # seconds without progress after which an agent kills a rank
KEEP_ALIVE = 3  # seconds without a heartbeat after which an agent is lost
LONGEST = 600.0  # seconds to wait for any event, on a busy machine too
CONF = f"store_type=file,keep_alive_interval=1,keep_alive_max_attempt={KEEP_ALIVE},last_call_timeout=3"
VARIABLE = "NODE_MEMORY"  # a node's memory folder; also identifies the node's processes

AGENT_EVENTS = {
    "failed": re.compile(r"failed \(exitcode|Detected \d+ new nodes"),
    "rendezvous": re.compile(r"Rendezvous'ing worker group"),
    "round": re.compile(r"Starting worker group"),
}
"""Events of torch's agents, by their log lines (with LOGLEVEL=INFO)."""

STAMP = re.compile(r"[IWE](\d{4} \d\d:\d\d:\d\d\.\d{6}) (\d+) ")


def count_ranks(world: int) -> str:
    return f"{world} rank{'s' * (world > 1)}"


def describe_start(load: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    """Describe a start: the step from which it resumes, and the steps that it repeats."""
    reached = max((each["step"] for each in steps if each["time"] < load["time"]), default=0)
    ranks, step = count_ranks(load["world"]), load["step"]
    if not reached:
        return f"first start, {ranks}"
    if reached <= step:
        return f"resumed from step {step}, {ranks}; no step is repeated"
    return f"resumed from step {step}, {ranks}; repeats steps {step + 1} to {reached}"


class DemoFailed(Exception):
    """An expected event did not happen."""


@dataclass
class Job:
    """Two agents, their logs, and the faults injected so far.

    Attributes:
        name: for the log.
        began: start of the demo; ``launched``: start of the first agent.
        save_every, snapshot_every: steps between saves to the checkpoint folder and into memory (0: none).
        memory: holds one folder per node, which stands for that node's memory.
        faults: name and time of each injected fault.
        reported: number of starts that have been logged.
    """

    name: str
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
    reported: int = 0

    def __post_init__(self) -> None:
        self.set_pace(PACE)

    def set_pace(self, seconds: float) -> None:
        """Set the minimum seconds per step of the running job."""
        (self.folder / "pace.new").write_text(str(seconds))
        (self.folder / "pace.new").replace(self.folder / "pace")

    def say(self, text: str) -> None:
        print(f"{time.time() - self.began:5.0f} s  {self.name}: {text}", flush=True)

    def read(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def read_log(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.read("log") if each["event"] == event]

    def read_agents(self) -> list[dict[str, Any]]:
        """Events of all agents, in the order of time."""
        texts = [path.read_text(errors="replace") for path in self.folder.glob("agent*.out")]
        return sorted((each for text in texts for each in parse_events(text)), key=lambda each: float(each["time"]))

    def start_agent(self) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--max-restarts", "100"),
            *("--nproc-per-node", str(self.ranks), "--rdzv-backend", "c10d", "--rdzv-id", "demo"),
            *("--rdzv-endpoint", str(self.folder / "rendezvous"), "--rdzv-conf", CONF, str(HERE / "job.py")),
            *("--steps", str(self.steps), "--pace", str(self.folder / "pace"), "--hang", str(HANG)),
            *("--save_every", str(self.save_every), "--snapshot_every", str(self.snapshot_every)),
            *("--folder", str(self.folder / "checkpoints"), "--record", str(self.folder / "log")),
        ]
        environment, number = make_environment(), len(self.agents) + 1
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
        environment["LOGLEVEL"] = "INFO"  # for `parse_events`
        if self.memory is not None:
            environment[VARIABLE] = str(self.memory / f"node{number}")
        with (self.folder / f"agent{number}.out").open("wb") as output:
            agent = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        self.agents.append(agent)
        return agent

    def note(self, fault: str) -> None:
        self.faults.append((fault, time.time()))
        self.say(fault)

    def wait_for(self, description: str, condition: Callable[[], Any]) -> Any:
        until = time.time() + LONGEST
        while not (found := condition()):
            self.report_starts()
            if time.time() > until or all(agent.poll() is not None for agent in self.agents):
                raise DemoFailed(f"waiting for {description}. The agents' last lines:\n{self.tail()}")
            time.sleep(0.05)
        self.report_starts()
        return found

    def report_starts(self) -> None:
        """Log each start of the job once its ranks have loaded."""
        loads = [each for each in self.read_log("loaded") if each["rank"] == 0]
        for load in loads[self.reported :]:
            self.say(describe_start(load, self.read_log("step")))
        self.reported = len(loads)

    def wait_for_steps(self, world: int, count: int, then: Callable[[int], bool] = lambda _: True) -> int:
        """Wait until ``world`` ranks took ``count`` steps since the last fault, and ``then`` accepts the last step."""
        since = self.faults[-1][1] if self.faults else 0.0

        def look() -> int | None:
            steps = [each["step"] for each in self.read_log("step") if each["world"] == world and each["time"] > since]
            return steps[-1] if len(steps) >= count and then(steps[-1]) else None

        step = int(self.wait_for(f"step {count} on {world} ranks", look))
        self.say(f"step {step}, {count_ranks(world)}")
        return step

    def find_ranks(self, agent: subprocess.Popen[bytes]) -> list[int]:
        """Return the live ranks of an agent."""
        own = {each.pid for each in psutil.Process(agent.pid).children(recursive=True)}
        return [each["pid"] for each in self.read_log("started") if each["pid"] in own and is_alive(each["pid"])]

    def has_copies(self) -> bool:
        """Return True if each node has a copy of the other node's part of the last save."""
        jobs = [list_jobs(find_root(str(node)))[-1] for node in self.memory.iterdir()] if self.memory else []
        last = max(job.list_numbers()[-1] for job in jobs)
        return all(last in [copy.number for copy in job.list_copies()] for job in jobs)

    def lose_node(self, number: int) -> None:
        """Kill all processes of a node and delete its memory, as a power failure does."""
        memory = str(self.memory / f"node{number}") if self.memory else ""
        while pids := list(find_processes(memory)):
            kill(pids)
            time.sleep(0.02)
        shutil.rmtree(memory)

    def tail(self) -> str:
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("agent*.out"))]
        return "\n".join("\n".join(text.splitlines()[-15:]) for text in texts)

    def end(self) -> None:
        """Kill the remaining processes: after a failure, and writers that wait for a lost node."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        kill([each["pid"] for each in self.read_log("started") if is_alive(each["pid"])])
        while self.memory is not None and (pids := list(find_processes(f"{self.memory}{os.sep}"))):
            kill(pids)
            time.sleep(0.02)


def parse_events(text: str) -> Iterator[dict[str, Any]]:
    """Yield the events in an agent's log; ``pid`` is the agent's."""
    for line in text.splitlines():
        stamp = STAMP.match(line)
        event = next((name for name, pattern in AGENT_EVENTS.items() if pattern.search(line)), None)
        if stamp and event:
            moment = datetime.strptime(f"{datetime.now().year} {stamp[1]}", "%Y %m%d %H:%M:%S.%f")
            yield {"event": event, "time": moment.timestamp(), "pid": int(stamp[2])}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def find_processes(memory: str) -> Iterator[int]:
    """Yield the processes (agent, ranks, writers) whose memory folder has this path prefix."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:  # the process ended or belongs to another user
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
    """Make an environment with one thread per rank: the model is tiny, and more threads are slow on a busy machine."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"DS_ACCELERATOR": "cpu", **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
