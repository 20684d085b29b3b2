"""Two jobs on two agents that lose what can be lost; nobody does anything about it.

    reference       1 rank, to the end
    the first job   saves to a folder every 10 steps. One agent is killed with SIGKILL, its workers end with it; the
                    other goes on alone, on half the ranks with the same total batch; a new agent joins, the ranks save
                    and the job grows; a rank is stopped (SIGSTOP), which is noticed by its silence; to the end
    the second job  saves into memory every 5 steps, each node's part into the other node's memory too. A process is
                    killed; then a whole node is: all its processes, and its memory. The other one goes on from its own
                    memory, on half the ranks; to the end

Exits with 1 when a step trained on other samples than the reference's, a loss is not the reference's (fp32 sums in
another order, which moves a loss by 1e-6; measured 7e-7), a process is left over, or a job did not end as it should;
and of the second job when a failure cost more than 5 steps, a step that was done twice on the same ranks has another
loss by a bit, or something was read from its folder.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agents import HERE, LONGEST, ROOT, DemoFailed, Job, is_alive, make_environment
from picture import Restart, Scene, draw

OUT = ROOT / "demo_out"
MEMORY = "/dev/shm"
BOUND = 1e-5  # of a loss, in nats; the samples are compared exactly
STORED, KEPT = 10, 5  # steps between saves to a folder, and into memory
BESIDE = 30  # steps between saves of the second job to its folder
SECOND = 120  # steps of the second job
NAMES = ("detected", "rendezvous", "start", "load", "first step")  # of the phases of a restart
NEW = "a new agent comes"
NOTICES = ("ended", "hanging", "rendezvous")  # of agents: the first one tells when something was noticed

Steps = Mapping[int, Mapping[str, Any]]


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


def run_first(job: Job) -> list[str]:
    """Let everything happen to agents; what went wrong."""
    whole = 2 * job.ranks
    job.say(f"the first job: {job.steps} steps on two agents with {job.ranks} rank{'s' * (job.ranks > 1)} each")
    job.say(f"it saves to its folder every {job.save_every} steps")
    job.launched = time.time()
    first, second = job.start_agent(), job.start_agent()
    job.wait_for_steps(whole, 15)
    job.wait_for_templates(first, second)
    doomed = job.find_ranks(first)
    job.note("the first agent is killed")
    first.kill()
    job.wait_for("the end of a killed agent's workers", lambda: doomed and not any(map(is_alive, doomed)))
    job.wait_for_steps(job.ranks, 8)
    job.note(NEW)
    third = job.start_agent()
    job.wait_for_steps(whole, 15)
    stopped = job.find_ranks(second)[-1]
    job.note("a rank is stopped")
    os.kill(stopped, signal.SIGSTOP)
    job.wait_for_steps(whole, 3)
    return wait_for_end(job, second, third)


def run_second(job: Job) -> list[str]:
    """Let it lose a process, and a node with its memory; what went wrong."""
    whole = 2 * job.ranks
    job.say(f"the second job: {job.steps} steps on two agents, each a node with a folder of {job.memory} as its memory")
    job.say(f"it saves into memory every {job.snapshot_every} steps, and to its folder every {job.save_every}")
    job.launched = time.time()
    first, second = job.start_agent(), job.start_agent()
    job.wait_for_steps(whole, BESIDE + KEPT + 2)
    job.wait_for_templates(first, second)
    doomed = job.find_ranks(second)[-1]
    job.note("a process is killed")
    os.kill(doomed, signal.SIGKILL)
    # A node whose last save is still on its way costs some steps more: as many as are done in the time of a copy.
    job.wait_for_steps(whole, 2 * KEPT, lambda step: step % KEPT == KEPT - 2 and job.has_copies())
    job.note("a node is lost")
    job.lose_node(1)
    first.wait()
    job.wait_for_steps(job.ranks, 3)
    return wait_for_end(job, second)


def wait_for_end(job: Job, *agents: subprocess.Popen[bytes]) -> list[str]:
    codes = [agent.wait(timeout=LONGEST) for agent in agents]
    job.say("the job has ended")
    left = [each["pid"] for each in job.read_log("started") if is_alive(each["pid"])]
    return [f"agents ended with {codes}"] * any(codes) + [f"processes are left: {left}"] * bool(left)


def find_restarts(job: Job) -> list[Restart]:
    """What every restart has cost, from the agents' events and the ranks' log."""
    events, log = job.read("events"), job.read("log")
    restarts = []
    for at, (what, began) in enumerate(job.faults):
        until = job.faults[at + 1][1] if at + 1 < len(job.faults) else float("inf")
        own = [each for each in [*events, *log] if began < each["time"] < until]
        end = find_last_round(own)
        noticed = min(e["time"] for e in own if e["event"] in NOTICES and e["pid"] in find_survivors(job, began))
        # A newcomer prepares itself while the others train on: what it costs begins with the last step that they take.
        steps = [each["time"] for each in own if each["event"] == "step" and each["time"] < noticed]
        still = max(steps, default=began) if what == NEW else began
        after = [each for each in own if each["time"] >= end]
        step = min(each["time"] for each in after if each["event"] == "step")
        started = max(each["time"] for each in after if each["event"] == "started" and each["time"] < step)
        loads = [each for each in after if each["event"] == "loaded" and each["time"] < step]
        times = [still, noticed, end, started, max(each["time"] for each in loads), step]
        phases = [b - a for a, b in itertools.pairwise(times)]
        again = find_lost(log, end, loads[0]["step"])
        read = count_read(job, loads)
        restarts.append(Restart(what, began - job.launched, still - began, phases, loads[0]["step"], again, read))
    return restarts


def find_lost(log: Sequence[dict[str, Any]], end: float, start: int) -> list[float]:
    """Seconds of the steps that were done before ``end`` and behind the step ``start``, and so are done again."""
    seconds, before, last = dict[int, float](), 0.0, 0
    for each in log:
        if each["time"] < end and each["event"] == "step":
            seconds[each["step"]], last = each["time"] - before, each["step"]
        before = each["time"]
    return [seconds[step] for step in range(start + 1, last + 1)]


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


def count_read(job: Job, loads: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes that all ranks have read in a load: of saves in memory, of copies there, of anything else."""
    counts = {"saves": 0, "copies": 0, "elsewhere": 0}
    for path, count in itertools.chain.from_iterable(each["read"].items() for each in loads):
        is_kept = job.memory is not None and Path(path).is_relative_to(job.memory)
        is_copy = is_kept and any(part.startswith("copy-") for part in Path(path).parts)
        counts["copies" if is_copy else "saves" if is_kept else "elsewhere"] += count
    return counts


def compare(job: Job, reference: Steps) -> list[str]:
    """Every step that the job took, those that it took twice included, with the reference's."""
    faults = []
    for each in job.read_log("step"):
        expected = reference[each["step"]]
        if each["samples"] != expected["samples"]:
            faults.append(f"step {each['step']} on {each['world']} ranks trained on other samples")
        if not abs(each["loss"] - expected["loss"]) < BOUND:
            faults.append(f"step {each['step']}: loss {each['loss']:.6f}, uninterrupted {expected['loss']:.6f}")
    taken = {each["step"] for each in job.read_log("step")}
    return faults[:5] + ["steps are missing"] * (taken != set(range(1, job.steps + 1)))


def find_repeated(job: Job) -> Iterator[tuple[int, float, float]]:
    """Steps that were done twice on as many ranks, with both losses."""
    seen: dict[int, dict[str, Any]] = {}
    for each in job.read_log("step"):
        before = seen.get(each["step"])
        if before is not None and before["world"] == each["world"]:
            yield each["step"], before["loss"], each["loss"]
        seen[each["step"]] = each


def check_memory(job: Job, restarts: Sequence[Restart]) -> dict[str, list[str]]:
    """By what saves into memory promise where that was broken."""
    repeated = list(find_repeated(job))
    return {
        f"each failure cost {job.snapshot_every} steps at most": [
            f"{each.what}: {len(each.lost)} steps were done again"
            for each in restarts
            if len(each.lost) > job.snapshot_every
        ],
        "what was loaded came from memory, no byte from the checkpoint folder": [
            f"{each.what}: {each.read}" for each in restarts if each.read["elsewhere"] or not each.read["saves"]
        ],
        "the lost node's part came from its neighbour's memory": [
            f"{each.what}: {each.read}" for each in restarts[-1:] if not each.read["copies"]
        ],
        f"steps that were done twice on the same ranks ({len(repeated)}) have the same losses, to the last bit": [
            f"step {step}: loss {before!r}, then {after!r}" for step, before, after in repeated if before != after
        ],
    }


def tell(title: str, job: Job, reference: Steps, restarts: Sequence[Restart]) -> None:
    print(f"\n{title:34}{'done again':>16}" + "".join(f"{name:>12}" for name in NAMES) + f"{'restart':>10}")
    for each in restarts:
        again = f"{len(each.lost)} steps, {sum(each.lost):.1f} s"
        cells = "".join(f"{seconds:10.2f} s" for seconds in each.phases)
        beside = f", after {each.prepared:.1f} s beside training" if each.prepared else ""
        print(f"  {each.what:32}{again:>16}{cells}{sum(each.phases):8.1f} s{beside}")
    steps = job.read_log("step")
    worst = max(abs(each["loss"] - reference[each["step"]]["loss"]) for each in steps)
    print(f"  {len(steps)} steps for {job.steps}; the largest difference of a loss is {worst:.1e}.")


def tell_loads(restarts: Sequence[Restart]) -> None:
    for each in restarts:
        print(
            f"  {each.what}: went on from step {each.start}; read {each.read['saves'] / 1e6:.1f} MB of saves and "
            f"{each.read['copies'] / 1e6:.1f} MB of copies in memory, {each.read['elsewhere']} bytes of the folder"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Two jobs that go on whatever happens to their agents and nodes.")
    parser.add_argument("--ranks", type=int, default=1, help="of each agent")
    parser.add_argument("--steps", type=int, default=240, help="of the first job")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    (OUT / ".gitignore").write_text("*\n")
    began, broken = time.time(), list[str]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what follows is removed all the same
    with (
        tempfile.TemporaryDirectory(dir=OUT, prefix="restart-") as folder,
        tempfile.TemporaryDirectory(dir=MEMORY, prefix="ds_ucp-demo-") as memory,
    ):
        folders = [Path(folder, name) for name in ("first", "second")]
        for each in folders:
            each.mkdir()
        first = Job(folders[0], args.ranks, args.steps, began, STORED)
        second = Job(folders[1], args.ranks, min(SECOND, args.steps), began, BESIDE, KEPT, Path(memory))
        try:
            broken = run(first, second)
        except (DemoFailed, subprocess.TimeoutExpired) as error:
            broken = [str(error)]
        finally:
            first.end()
            second.end()
    print(f"Picture: {OUT / 'elastic_restart.png'}. {time.time() - began:.0f} s in all.")
    for each in broken:
        print(f"FAILED: {each}")
    return 1 if broken else 0


def run(first: Job, second: Job) -> list[str]:
    """Run both jobs, and tell and draw what came of them; which promises were broken."""
    reference = run_reference(first)
    ended = [*run_first(first), *run_second(second)]
    titles = f"saves to storage every {STORED} steps", f"saves into memory every {KEPT} steps"
    restarts = [find_restarts(job) for job in (first, second)]
    for title, job, own in zip(titles, (first, second), restarts, strict=True):
        tell(title, job, reference, own)
    tell_loads(restarts[1])
    scenes = [
        Scene(title, job.read_log("step"), own, job.launched, every)
        for title, job, own, every in zip(titles, (first, second), restarts, (STORED, KEPT), strict=True)
    ]
    draw(reference, scenes, OUT / "elastic_restart.png")
    promises = {
        **check_memory(second, restarts[1]),
        "every step had the samples and the loss of the uninterrupted run": [
            *compare(first, reference),
            *compare(second, reference),
        ],
        "both jobs ended by themselves, and left no process": ended,
    }
    print()
    for promise, faults in promises.items():
        print(f"{'BROKEN' if faults else 'kept'}: {promise}")
    return [each for faults in promises.values() for each in faults]


if __name__ == "__main__":
    sys.exit(main())
