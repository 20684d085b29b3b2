"""A whole restart, from the kill to the first step: of a job under `ds_ucp torchrun` that loses one of two agents, and
DeepSpeed's way, a conversion and a new launch on fewer ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from cold import make_cold
from report import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).resolve().parent
SOURCE_RANKS, TARGET_RANKS = 4, 2
CASES = {"ours": "this plugin, under `ds_ucp torchrun`", "upstream": "DeepSpeed's conversion and a new launch"}
PHASES = ("detection", "rendezvous", "conversion", "start", "load", "first step")
LONGEST = 1800.0


@dataclass(frozen=True)
class Restart:
    """One restart: its case, and the seconds of each of `PHASES`."""

    case: str
    seconds: tuple[float, ...]


class Log:
    """The JSON lines of a launch that is going on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)

    def find(self, *events: str, after: float = 0.0) -> list[float]:
        lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
        return [told["time"] for told in map(json.loads, lines) if told["event"] in events and told["time"] > after]

    def wait_for(self, event: str, process: subprocess.Popen[bytes], count: int = 1, after: float = 0.0) -> float:
        until = time.monotonic() + LONGEST
        while len(found := self.find(event, after=after)) < count:
            if process.poll() not in (None, 0) or time.monotonic() > until:
                raise RuntimeError(f"{self.path}: the launch ended with {process.poll()} before {event!r}")
            time.sleep(0.02)
        return found[count - 1]


@contextlib.contextmanager
def launch(how: str, ranks: int, params_m: float, folder: Path, log: Log) -> Iterator[subprocess.Popen[bytes]]:
    """The job under the launcher, in a process group of its own, of which nothing is left afterwards."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    beside = Path(sys.executable).with_name("deepspeed")
    command = [
        *(str(beside), "--num_accelerators", str(ranks), "--no_local_rank", "--master_port", str(port)),
        *(str(HERE / "restart_job.py"), "--how", how, "--params_m", str(params_m)),
        *("--folder", str(folder), "--record", str(log.path)),
    ]
    try:
        with run(command, log.path.parent / f"{how}.out") as process:
            yield process
    finally:
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
            buffer.unlink(missing_ok=True)


@contextlib.contextmanager
def run(command: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a process group of its own, which is killed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(case: str, params_m: float, folder: Path) -> Restart:
    """Kill a run on 4 ranks that has saved, and time what follows until 2 ranks have ended their first step."""
    shutil.rmtree(folder, ignore_errors=True)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    run = measure_ours if case == "ours" else measure_upstream
    return Restart(case, tuple(b - a for a, b in itertools.pairwise(run(params_m, folder, checkpoint))))


def measure_upstream(params_m: float, folder: Path, checkpoint: Path) -> list[float]:
    """When each of `PHASES` began, and the last one ended: nobody has to notice anything, nor meet anybody."""
    log = Log(folder / "source.jsonl")
    with launch("save", SOURCE_RANKS, params_m, checkpoint, log) as process:
        log.wait_for("saved", process)
        log.wait_for("step", process, 3)
    make_cold(checkpoint)
    killed = time.time()  # the cache is emptied while nobody waits
    convert(checkpoint, folder / "universal")
    begun = time.time()
    log = Log(folder / "target.jsonl")
    with launch("upstream", TARGET_RANKS, params_m, folder / "universal", log) as process:
        stepped = log.wait_for("step", process)
    return [killed, killed, killed, begun, log.find("started")[0], log.find("loaded")[0], stepped]


def measure_ours(params_m: float, folder: Path, checkpoint: Path) -> list[float]:
    """The same, of a job on two agents with two ranks each, the first of which is killed."""
    log, events = Log(folder / "log.jsonl"), Log(folder / "events.jsonl")
    command = [
        *(sys.executable, "-m", "deepspeed_ucp", "torchrun", "--nnodes", "1:2", "--rdzv-id", "bench"),
        *("--nproc-per-node", str(TARGET_RANKS), "--rdzv-endpoint", str(folder / "rendezvous")),
        *("--rdzv-conf", f"events={events.path}", str(HERE / "restart_job.py"), "--how", "ours"),
        *("--params_m", str(params_m), "--folder", str(checkpoint), "--record", str(log.path)),
    ]
    with contextlib.ExitStack() as ends:
        first, second = (ends.enter_context(run(command, folder / f"agent{number}.out")) for number in (1, 2))
        log.wait_for("saved", second)
        log.wait_for("step", second, 3)
        events.wait_for("template", second, 2)
        time.sleep(1.0)  # and it has been tried
        make_cold(checkpoint)
        killed = time.time()
        first.kill()
        stepped = log.wait_for("step", second, after=log.wait_for("loaded", second, after=killed))
    noticed, met = min(events.find("ended", "rendezvous", after=killed)), events.find("round", after=killed)[-1]
    started, loaded = (log.find(name, after=killed)[0] for name in ("started", "loaded"))
    return [killed, noticed, met, met, started, loaded, stepped]


def convert(checkpoint: Path, target: Path) -> None:
    """DeepSpeed's own script, as a user runs it."""
    tag = (checkpoint / "latest").read_text().strip()
    target.mkdir()
    folders = ["--input_folder", str(checkpoint / tag), "--output_folder", str(target / f"{tag}_universal")]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", *folders]
    with (target.parent / "conversion.out").open("wb") as output:
        done = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError((target.parent / "conversion.out").read_text()[-3000:])
    (target / "latest_universal").write_text(f"{tag}_universal")


def measure_restarts(folder: Path, params_m: float, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All cases in each round, as data."""
    found = []
    for round_ in range(rounds):
        for case in CASES:
            found.append(measure(case, params_m, folder))
            told = ", ".join(f"{name} {s:.1f}" for name, s in zip(PHASES, found[-1].seconds, strict=True))
            say(f"round {round_ + 1}/{rounds}  restart, {case}: {sum(found[-1].seconds):.1f} s ({told})")
    shutil.rmtree(folder, ignore_errors=True)
    return {"params_m": params_m, "rounds": rounds, "restarts": [asdict(each) for each in found]}


def make_restart_section(found: dict[str, Any]) -> str:
    """The section of the page: seconds by phase, medians over the rounds."""
    rows = []
    for case, title in CASES.items():
        runs = [each["seconds"] for each in found["restarts"] if each["case"] == case]
        phases = [median(column) for column in zip(*runs, strict=True)]
        rows.append([title, *(f"{seconds:.1f}" for seconds in phases), f"{median(map(sum, runs)):.1f}"])
    header = ["seconds", *PHASES, "kill → first step"]
    command = found.get("command", "python bench/run.py")  # results of an earlier form do not tell
    return f"""## A whole restart

Written by `{command}`. Of a run of {found["params_m"]:.0f} M parameters on {SOURCE_RANKS} ranks
with ZeRO-1, two agents with two each, one agent is killed; the other's {TARGET_RANKS} ranks go on from a save.
With DeepSpeed all are killed, its script converts the save, and {TARGET_RANKS} ranks are launched at once. The cache is
cold: {found["rounds"]} rounds, medians.

{table(header, rows)}
"""
