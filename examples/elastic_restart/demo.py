"""A job on two agents that loses one, gets another, and hangs; nobody does anything about it.

    reference   1 rank, to the end
    the job     two agents; one is killed with SIGKILL, its workers end with it; the other goes on alone, on half the
                ranks with the same total batch; a new agent joins, the ranks save and the job grows; a rank is stopped
                (SIGSTOP), which is noticed by its silence; to the end

Exits with 1 when a step trained on other samples than the reference's, a loss is not the reference's (fp32 sums in
another order, which moves a loss by 1e-6; measured 7e-7), a process is left over, or the job did not end as it should.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from picture import Restart, draw

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT = ROOT / "demo_out"
BOUND = 1e-5  # of a loss, in nats; the samples are compared exactly
PACE = 0.08  # seconds a step: a model that is not tiny
HANG = 5
LONGEST = 120.0  # seconds for anything to come
CONF = f"keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=2,hang={HANG}"


class DemoFailed(Exception):
    """Something did not come."""


@dataclass
class Job:
    """The two agents, what they and their ranks log, and what was done to them.

    Attributes:
        began: the demo; ``launched``: its first agent.
    """

    folder: Path
    ranks: int
    steps: int
    began: float = field(default_factory=time.time)
    launched: float = 0.0
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    faults: list[tuple[str, float]] = field(default_factory=list)

    def say(self, text: str) -> None:
        print(f"{time.time() - self.began:5.0f} s  {text}", flush=True)

    def read(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def start_agent(self) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "deepspeed_ucp", "torchrun", "--nnodes", "1:2", "--rdzv-id", "demo"),
            *("--nproc-per-node", str(self.ranks), "--rdzv-endpoint", str(self.folder / "rendezvous")),
            *("--rdzv-conf", f"{CONF},events={self.folder / 'events'}", str(HERE / "job.py")),
            *("--steps", str(self.steps), "--pace", str(PACE)),
            *("--folder", str(self.folder / "checkpoints"), "--record", str(self.folder / "log")),
        ]
        with (self.folder / f"agent{len(self.agents)}.out").open("wb") as output:
            agent = subprocess.Popen(command, env=make_environment(), stdout=output, stderr=subprocess.STDOUT)
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

    def wait_for_steps(self, world: int, count: int) -> int:
        """Until a world of this size has taken some steps since the last fault; the last of them."""
        since = self.faults[-1][1] if self.faults else 0.0

        def look() -> int | None:
            steps = [
                each["step"]
                for each in self.read("log")
                if each["event"] == "step" and each["world"] == world and each["time"] > since
            ]
            return steps[-1] if len(steps) >= count else None

        step = int(self.wait_for(f"step {count} of {world} ranks", look))
        start = [each["step"] for each in self.read("log") if each["event"] == "loaded"][-1]
        self.say(f"step {step:3}: {world} rank{'s train' if world > 1 else ' trains'}, from step {start} on")
        return step

    def find_ranks(self, agent: subprocess.Popen[bytes]) -> list[int]:
        """Processes that this agent has started."""
        pids = [each["pid"] for each in self.read("log") if each["event"] == "started"]
        return [pid for pid in pids if is_child(pid, agent.pid)]

    def tail(self) -> str:
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("agent*.out"))]
        return "\n".join("\n".join(text.splitlines()[-15:]) for text in texts)

    def end(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        for each in self.read("log"):
            if each["event"] == "started" and is_alive(each["pid"]):
                os.kill(each["pid"], signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def is_child(pid: int, parent: int) -> bool:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent and is_alive(pid)
    except FileNotFoundError:
        return False


def make_environment() -> dict[str, str]:
    """One thread a rank: the model is tiny, and threads that wait for each other are slow where other work runs."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"DS_ACCELERATOR": "cpu", **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run_reference(job: Job) -> dict[int, dict[str, Any]]:
    """The same job on one rank that nothing happens to, by step."""
    job.say("reference: 1 rank")
    command = [
        *(sys.executable, "-m", "deepspeed_ucp", "torchrun", "--nproc-per-node", "1", str(HERE / "job.py")),
        *("--steps", str(job.steps), "--save_every", "0"),
        *("--folder", str(job.folder / "none"), "--record", str(job.folder / "reference")),
    ]
    done = subprocess.run(command, env=make_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoFailed(f"the reference ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return {each["step"]: each for each in job.read("reference") if each["event"] == "step"}


def run_job(job: Job) -> list[str]:
    """Let everything happen to it; what went wrong."""
    whole = 2 * job.ranks
    job.say(f"the job: {job.steps} steps on two agents with {job.ranks} rank{'s' * (job.ranks > 1)} each")
    job.launched = time.time()
    first, second = job.start_agent(), job.start_agent()
    job.wait_for_steps(whole, 25)
    doomed = job.find_ranks(first)
    job.note("the first agent is killed")
    first.kill()
    job.wait_for("the end of a killed agent's workers", lambda: doomed and not any(map(is_alive, doomed)))
    job.wait_for_steps(job.ranks, 15)
    job.note("a new agent comes")
    third = job.start_agent()
    job.wait_for_steps(whole, 25)
    stopped = job.find_ranks(second)[-1]
    job.note("a rank is stopped")
    os.kill(stopped, signal.SIGSTOP)
    job.wait_for_steps(whole, 3)
    codes = [agent.wait(timeout=LONGEST) for agent in (second, third)]
    job.say("the job has ended")
    pids = [each["pid"] for each in job.read("log") if each["event"] == "started"]
    left = [pid for pid in pids if is_alive(pid)]
    return [f"agents ended with {codes}"] * any(codes) + [f"processes are left: {left}"] * bool(left)


def find_restarts(job: Job) -> list[Restart]:
    """The seconds of every phase of every restart, from the agents' events and the ranks' log."""
    events, log = job.read("events"), job.read("log")
    restarts = []
    for at, (what, began) in enumerate(job.faults):
        until = job.faults[at + 1][1] if at + 1 < len(job.faults) else float("inf")
        own = [each for each in [*events, *log] if began < each["time"] < until]
        end = find_last_round(own)
        starts = [e["time"] for e in own if e["event"] == "rendezvous" and e["pid"] in find_survivors(job, began)]
        after = [each for each in own if each["time"] >= end]
        started = max(each["time"] for each in after if each["event"] == "started")
        loaded = max(each["time"] for each in after if each["event"] == "loaded")
        step = min(each["time"] for each in after if each["event"] == "step")
        times = [began, min(starts), end, started, loaded, step]
        restarts.append(Restart(what, began - job.launched, [b - a for a, b in itertools.pairwise(times)]))
    return restarts


def find_last_round(events: Sequence[dict[str, Any]]) -> float:
    """When the last agent has joined the round after which the job trained."""
    first_step = min(
        (each["time"] for each in events if each["event"] == "step" and follows_start(events, each)), default=0.0
    )
    return max(each["time"] for each in events if each["event"] == "round" and each["time"] < first_step)


def follows_start(events: Sequence[dict[str, Any]], step: dict[str, Any]) -> bool:
    return any(each["event"] == "started" and each["time"] < step["time"] for each in events)


def find_survivors(job: Job, began: float) -> set[int]:
    """Agents that were in a round before."""
    return {each["pid"] for each in job.read("events") if each["event"] == "round" and each["time"] < began}


def compare(job: Job, reference: dict[int, dict[str, Any]]) -> list[str]:
    """Every step that the job took, those that it took twice included, with the reference's."""
    faults = []
    for each in job.read("log"):
        if each["event"] != "step":
            continue
        expected = reference[each["step"]]
        if each["samples"] != expected["samples"]:
            faults.append(f"step {each['step']} on {each['world']} ranks trained on other samples")
        if not abs(each["loss"] - expected["loss"]) < BOUND:
            faults.append(f"step {each['step']}: loss {each['loss']:.6f}, uninterrupted {expected['loss']:.6f}")
    taken = {each["step"] for each in job.read("log") if each["event"] == "step"}
    return faults[:5] + ["steps are missing"] * (taken != set(reference))


def tell(job: Job, reference: dict[int, dict[str, Any]], restarts: Sequence[Restart]) -> None:
    names = ("detected", "rendezvous", "start", "load", "first step")
    print(f"\n{'':26}" + "".join(f"{name:>12}" for name in names) + f"{'in all':>10}")
    for restart in restarts:
        cells = "".join(f"{seconds:10.2f} s" for seconds in restart.phases)
        print(f"{restart.what:26}{cells}{sum(restart.phases):8.1f} s")
    deltas = [
        abs(each["loss"] - reference[each["step"]]["loss"]) for each in job.read("log") if each["event"] == "step"
    ]
    print(f"\n{len(deltas)} steps for {len(reference)}; the largest difference of a loss is {max(deltas):.1e}.")


def main() -> int:
    parser = argparse.ArgumentParser(description="A job on two agents that goes on whatever happens to them.")
    parser.add_argument("--ranks", type=int, default=1, help="of each agent")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    (OUT / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(dir=OUT, prefix="restart-") as folder:
        job = Job(Path(folder), args.ranks, args.steps)
        try:
            reference = run_reference(job)
            faults = [*run_job(job), *compare(job, reference)]
            restarts = find_restarts(job)
            tell(job, reference, restarts)
            draw(reference, job.read("log"), restarts, job.launched, OUT / "elastic_restart.png")
        except (DemoFailed, subprocess.TimeoutExpired) as error:
            faults = [str(error)]
        finally:
            job.end()
    print(f"Picture: {OUT / 'elastic_restart.png'}. {time.time() - job.began:.0f} s in all.")
    for fault in faults:
        print(f"FAILED: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
