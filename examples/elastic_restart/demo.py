"""Run two jobs that lose agents, ranks and a node, and resume without help. Part of `make demo`.

Each job has two torchrun agents.

    reference  1 rank, uninterrupted
    storage    saves to a folder every 10 steps. One agent gets SIGKILL, and its ranks end with it. The other agent
               resumes alone, on half the ranks with the same total batch. A new agent joins: the ranks save, and
               the job grows. A rank is stopped (SIGSTOP): the agent's timer expires and the rank is killed
    memory     saves into memory every 5 steps, with a copy of each node's part in the other node's memory. A process
               is killed. Then a node is lost: all its processes and its memory. The other node resumes alone from
               its memory, on half the ranks

The jobs run at the same time, because they wait most of the time.

Exits with 1 if a promise is broken: a step trained on other samples than the reference, a loss differs from the
reference (sums in another order change it by 1e-6 in fp32), a process remains, or a job fails. The memory job also
fails if an event costs more than 5 steps, if a step repeated on the same ranks has another loss, or if a byte is read
from its checkpoint folder.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agents import HANG, HERE, KEEP_ALIVE, LONGEST, ROOT, DemoFailed, Job, count_ranks, is_alive, make_environment
from picture import Restart, Scene, draw

OUT = ROOT / "demo_out"
MEMORY = "/dev/shm"
BOUND = 1e-5  # of a loss, in nats; the samples are compared exactly
STORED, KEPT = 10, 5  # steps between saves to a folder, and into memory
BACKUP = 30  # steps between saves of the second job to its folder
SECOND = 120  # steps of the second job
NAMES = ("detected", "rendezvous", "start", "load", "first step")  # phases of a restart
KILLED, JOINED, STOPPED = "the first agent is killed", "a new agent joins", "a rank is stopped"
OPTIONS = {KILLED: KEEP_ALIVE, STOPPED: HANG, "a node is lost": KEEP_ALIVE}  # configured seconds of detection
TARGET = 12.0  # seconds from an event to training on two quiet cores, without OPTIONS

Steps = Mapping[int, Mapping[str, Any]]


def run_reference(job: Job) -> dict[int, dict[str, Any]]:
    """Run the job uninterrupted on one rank; return its steps by number."""
    command = [
        *(sys.executable, str(HERE / "job.py"), "--steps", str(job.steps), "--save_every", "0"),
        *("--folder", str(job.folder / "none"), "--record", str(job.folder / "reference")),
    ]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**make_environment(), **alone}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoFailed(f"the reference ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return {each["step"]: each for each in job.read("reference") if each["event"] == "step"}


def run_first(job: Job) -> list[str]:
    """Run the first job with its three events; return broken promises."""
    whole = 2 * job.ranks
    job.say(f"two agents with {count_ranks(job.ranks)} each; saves to its folder every {job.save_every} steps")
    job.launched = time.time()
    first, second = job.start_agent(), job.start_agent()
    job.wait_for_steps(whole, 15)
    doomed = job.find_ranks(first)
    job.note(KILLED)
    first.kill()
    job.wait_for("the end of a killed agent's ranks", lambda: doomed and not any(map(is_alive, doomed)))
    job.wait_for_steps(job.ranks, 8)
    job.note(JOINED)
    third = job.start_agent()
    # Not during a save, in which a rank has no timer.
    job.wait_for_steps(whole, 15, lambda step: step % STORED == STORED // 2)
    stopped = job.find_ranks(second)[-1]
    job.note(STOPPED)
    os.kill(stopped, signal.SIGSTOP)
    job.wait_for_steps(whole, 3)
    return wait_for_end(job, second, third)


def run_second(job: Job) -> list[str]:
    """Run the second job, which loses a process, then a node with its memory; return broken promises."""
    whole = 2 * job.ranks
    job.say(f"two agents, each a node with a folder of {job.memory} as its memory")
    job.say(f"saves into memory every {job.snapshot_every} steps, and to its folder every {job.save_every}")
    job.launched = time.time()
    first, second = job.start_agent(), job.start_agent()
    job.wait_for_steps(whole, BACKUP + KEPT + 2)
    doomed = job.find_ranks(second)[-1]
    job.note("a process is killed")
    os.kill(doomed, signal.SIGKILL)
    # A loss during the copy of a save would also cost the steps since the previous save.
    job.wait_for_steps(whole, 2 * KEPT, lambda step: step % KEPT == KEPT - 2 and job.has_copies())
    job.note("a node is lost")
    job.lose_node(1)
    first.wait()
    job.wait_for_steps(job.ranks, 3)
    return wait_for_end(job, second)


def wait_for_end(job: Job, *agents: subprocess.Popen[bytes]) -> list[str]:
    job.set_pace(0.0)  # no event follows
    codes = [agent.wait(timeout=LONGEST) for agent in agents]
    job.report_starts()
    job.say(f"ended at step {job.read_log('step')[-1]['step']}")
    left = [each["pid"] for each in job.read_log("started") if is_alive(each["pid"])]
    return [f"agents ended with {codes}"] * any(codes) + [f"processes are left: {left}"] * bool(left)


def find_restarts(job: Job) -> list[Restart]:
    """Measure each restart, from the logs of agents and ranks."""
    agents, log = job.read_agents(), job.read("log")
    restarts = []
    for at, (fault, began) in enumerate(job.faults):
        until = job.faults[at + 1][1] if at + 1 < len(job.faults) else float("inf")
        known = {each["pid"] for each in agents if each["time"] < began}
        own = [each for each in agents if began < each["time"] < until and each["pid"] in known]
        noticed = min(each["time"] for each in own if each["event"] in ("failed", "rendezvous"))
        # Training continues while a new agent starts: the cost begins with the last step before the restart.
        steps = [each["time"] for each in log if began < each["time"] < noticed and each["event"] == "step"]
        still = max(steps, default=began) if fault == JOINED else began
        ranks = [each for each in log if noticed < each["time"] < until]
        loads = [each for each in ranks if each["event"] == "loaded"]
        step = min(each["time"] for each in ranks if each["event"] == "step" and each["time"] > loads[0]["time"])
        loads = [each for each in loads if each["time"] < step]
        started = max(each["time"] for each in ranks if each["event"] == "started" and each["time"] < step)
        end = max(each["time"] for each in own if each["event"] == "round" and each["time"] < started)
        times = [still, noticed, end, started, max(each["time"] for each in loads), step]
        phases = [b - a for a, b in itertools.pairwise(times)]
        again = find_lost(log, end, loads[0]["step"])
        read = count_read(job, loads)
        restarts.append(Restart(fault, began - job.launched, still - began, phases, loads[0]["step"], again, read))
    return restarts


def find_lost(log: Sequence[dict[str, Any]], end: float, start: int) -> list[float]:
    """Return the seconds of each step after ``start`` that ran before ``end`` and is repeated."""
    seconds, before, last = dict[int, float](), 0.0, 0
    for each in log:
        if each["time"] < end and each["event"] == "step":
            seconds[each["step"]], last = each["time"] - before, each["step"]
        before = each["time"]
    return [seconds[step] for step in range(start + 1, last + 1)]


def count_read(job: Job, loads: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count the bytes that all ranks read in a load: from saves in memory, copies in memory, and other places."""
    counts = {"saves": 0, "copies": 0, "elsewhere": 0}
    for path, count in itertools.chain.from_iterable(each["read"].items() for each in loads):
        is_kept = job.memory is not None and Path(path).is_relative_to(job.memory)
        is_copy = is_kept and any(part.startswith("copy-") for part in Path(path).parts)
        counts["copies" if is_copy else "saves" if is_kept else "elsewhere"] += count
    return counts


def compare(job: Job, reference: Steps) -> list[str]:
    """Compare each step of the job, also repeated ones, with the reference."""
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
    """Yield steps repeated on the same number of ranks, with both losses."""
    seen: dict[int, dict[str, Any]] = {}
    for each in job.read_log("step"):
        before = seen.get(each["step"])
        if before is not None and before["world"] == each["world"]:
            yield each["step"], before["loss"], each["loss"]
        seen[each["step"]] = each


def check_memory(job: Job, restarts: Sequence[Restart]) -> dict[str, list[str]]:
    """Return the promises of saves into memory, each with the faults that break it."""
    repeated = list(find_repeated(job))
    return {
        f"each event cost at most {job.snapshot_every} steps": [
            f"{each.event}: {len(each.lost)} steps were repeated"
            for each in restarts
            if len(each.lost) > job.snapshot_every
        ],
        "every load came from memory, no byte from the checkpoint folder": [
            f"{each.event}: {each.read}" for each in restarts if each.read["elsewhere"] or not each.read["saves"]
        ],
        "the lost node's part came from its neighbour's memory": [
            f"{each.event}: {each.read}" for each in restarts[-1:] if not each.read["copies"]
        ],
        f"steps repeated on the same ranks ({len(repeated)}) have the same loss, bit for bit": [
            f"step {step}: loss {before!r}, then {after!r}" for step, before, after in repeated if before != after
        ],
    }


def print_table(title: str, job: Job, reference: Steps, restarts: Sequence[Restart]) -> None:
    print(f"\n{title:34}{'repeated':>16}" + "".join(f"{name:>12}" for name in NAMES) + f"{'restart':>10}")
    for each in restarts:
        again = f"{len(each.lost)} steps, {sum(each.lost):.1f} s"
        cells = "".join(f"{seconds:10.2f} s" for seconds in each.phases)
        ahead = f", after {each.prepared:.1f} s during which training continued" if each.prepared else ""
        print(f"  {each.event:32}{again:>16}{cells}{sum(each.phases):8.1f} s{ahead}")
    steps = job.read_log("step")
    worst = max(abs(each["loss"] - reference[each["step"]]["loss"]) for each in steps)
    print(f"  {len(steps)} steps for {job.steps}; the largest difference of a loss is {worst:.1e}.")
    slow = [each.event for each in restarts if sum(each.phases) - OPTIONS.get(each.event, 0) > TARGET]
    if slow:
        print(f"  More than {TARGET:.0f} s beyond the configured detection, on a busy machine: {', '.join(slow)}.")


def print_loads(restarts: Sequence[Restart]) -> None:
    for each in restarts:
        print(
            f"  {each.event}: resumed from step {each.start}; read {each.read['saves'] / 1e6:.1f} MB of saves and "
            f"{each.read['copies'] / 1e6:.1f} MB of copies in memory, {each.read['elsewhere']} bytes of the folder"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Two jobs that survive the loss of agents, ranks and a node.")
    parser.add_argument("--ranks", type=int, default=1, help="ranks per agent")
    parser.add_argument("--steps", type=int, default=240, help="steps of the first job")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    (OUT / ".gitignore").write_text("*\n")
    began, broken = time.time(), list[str]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes the temporary folders
    with (
        tempfile.TemporaryDirectory(dir=OUT, prefix="restart-") as folder,
        tempfile.TemporaryDirectory(dir=MEMORY, prefix="ds_ucp-demo-") as memory,
    ):
        folders = [Path(folder, name) for name in ("first", "second")]
        for each in folders:
            each.mkdir()
        first = Job("storage", folders[0], args.ranks, args.steps, began, STORED)
        second = Job("memory", folders[1], args.ranks, min(SECOND, args.steps), began, BACKUP, KEPT, Path(memory))
        try:
            broken = run(first, second)
        except (DemoFailed, subprocess.TimeoutExpired) as error:
            broken = [str(error)]
        finally:
            first.end()
            second.end()
    print(f"Picture: {OUT / 'elastic_restart.png'}. {time.time() - began:.0f} s in total.")
    for each in broken:
        print(f"FAILED: {each}")
    return 1 if broken else 0


def run(first: Job, second: Job) -> list[str]:
    """Run both jobs, print and draw the results; return broken promises."""
    with ThreadPoolExecutor() as pool:
        calls = pool.submit(run_first, first), pool.submit(run_second, second), pool.submit(run_reference, first)
    ended, reference = [*calls[0].result(), *calls[1].result()], calls[2].result()
    titles = f"saves to storage every {STORED} steps", f"saves into memory every {KEPT} steps"
    restarts = [find_restarts(job) for job in (first, second)]
    for title, job, own in zip(titles, (first, second), restarts, strict=True):
        print_table(title, job, reference, own)
    print_loads(restarts[1])
    scenes = [
        Scene(title, job.read_log("step"), own, job.launched, every)
        for title, job, own, every in zip(titles, (first, second), restarts, (STORED, KEPT), strict=True)
    ]
    draw(reference, scenes, OUT / "elastic_restart.png")
    promises = {
        **check_memory(second, restarts[1]),
        "every step has the samples and the loss of the uninterrupted run": [
            *compare(first, reference),
            *compare(second, reference),
        ],
        "both jobs ended without help and left no process": ended,
    }
    print()
    for promise, faults in promises.items():
        print(f"{'BROKEN' if faults else 'kept'}: {promise}")
    return [each for faults in promises.values() for each in faults]


if __name__ == "__main__":
    sys.exit(main())
