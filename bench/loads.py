"""What one suite's loads take: its checkpoint is made, upstream converts it, and in rounds each case loads it, cold."""

from __future__ import annotations

import functools
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cold import make_cold
from engines import state_bytes
from fingerprint import Sums, find_differing, join_parts
from floor import DIRECT, allows_direct, floor_body
from meters import Io
from objects import BUCKET, get_body, make_warm, serve
from offline import Source
from ranks import Body, RankFailed, Ranks
from report import Results, Run
from rounds import run_in_turns

if TYPE_CHECKING:
    from suites import Suite

TAG = "global_step1"
UNIVERSAL_TAG = f"{TAG}_universal"
ATTEMPTS = 6
CONVERSION = """
import time
from deepspeed.checkpoint import ds_to_universal
began = time.perf_counter()
ds_to_universal.main(ds_to_universal.parse_arguments())
print(time.perf_counter() - began)
"""
IMPORT = """
import time
import deepspeed
import deepspeed_ucp
began = time.perf_counter()
import deepspeed_ucp.load.resume
print(time.perf_counter() - began)
"""


class WrongState(RuntimeError):
    """A load that was timed brought back other bits than were saved."""


class Bench:
    """One suite: its checkpoint and the measurements made on it."""

    def __init__(self, suite: Suite, folder: Path, params_m: float, say: Callable[[str], None]) -> None:
        self.suite, self.folder, self.params_m, self._say = suite, folder, params_m, say
        self.checkpoint, self.universal = folder / "checkpoint", folder / "universal"
        self.saved: dict[str, Sums] = {}
        self.parameters = 0

    def save(self) -> None:
        """Train a step in the suite's topology and save, unless the folder holds that checkpoint already."""
        note = self.folder / "saved.json"
        if note.exists() and json.loads(note.read_text())["params_m"] == self.params_m:
            saved = json.loads(note.read_text())
            self._say(f"using the checkpoint in {self.checkpoint}")
        else:
            self._say(f"training one step on {self.suite.source.ranks} ranks, and saving")
            body = self.suite.save_body(self.suite.source, self.params_m, self.checkpoint)
            with self._ranks(self.suite.source.ranks, body, "save") as ranks:
                told = ranks.run()
            saved = {
                "params_m": self.params_m,
                "parameters": told[0]["parameters"],
                "fingerprint": _join(told),
            }
            note.write_text(json.dumps(saved))
        self.parameters, self.saved = saved["parameters"], saved["fingerprint"]
        size = state_bytes(self.parameters)
        self._say(f"{self.parameters / 1e6:.1f} M parameters, {size / (1 << 30):.2f} GiB of state")

    def run(self, rounds: int, only: Sequence[str] | None, command: str) -> Results | None:
        """Measure the suite's cases, or those in `only`; return None if the suite has none of these."""
        chosen = [case.name for case in self.suite.cases if not only or case.name in only]
        if not chosen:
            return None
        wanted = any(name.startswith("upstream") for name in chosen)
        conversion, failures = self.convert() if wanted else (None, 0)
        measured = run_in_turns(chosen, rounds, self.measure, self._say)
        shutil.rmtree(self.universal, ignore_errors=True)
        size = state_bytes(self.parameters)
        imports = measure_import()
        return Results(tuple(measured), self.parameters, size, command, conversion, failures, imports)

    def convert(self) -> tuple[float, int]:
        """Seconds of upstream's conversion with a cold cache, without its interpreter's start; how often it failed.

        Of a pipeline with tied modules it fails now and then: two stages write files of the same names at once.
        """
        for failures in range(ATTEMPTS):
            shutil.rmtree(self.universal, ignore_errors=True)
            self.universal.mkdir()
            self._say("converting with deepspeed.checkpoint.ds_to_universal")
            make_cold(self.checkpoint)
            before = Io.now()
            told = self._run_conversion()
            if told.returncode == 0:
                seconds, read = float(told.stdout.splitlines()[-1]), Io.now() - before
                self._say(f"converted in {seconds:.1f} s; {read.storage / (1 << 30):.2f} GiB from storage")
                return seconds, failures
            self._say("the conversion failed")
        raise RuntimeError(f"upstream's conversion failed {ATTEMPTS} times: see {self._log('convert')}")

    def describe(self) -> Source:
        """The checkpoint for the commands that work on it."""
        return Source(
            self.checkpoint,
            TAG,
            self.folder / "out",
            self.folder / "logs",
            self.parameters,
            self.saved,
            self.suite.conversion_options,
            self.suite.patterns,
        )

    def _run_conversion(self) -> subprocess.CompletedProcess[str]:
        folders = {"input": self.checkpoint / TAG, "output": self.universal / UNIVERSAL_TAG}
        paths = [each for key, path in folders.items() for each in (f"--{key}_folder", str(path))]
        command = [sys.executable, "-c", CONVERSION, *self.suite.conversion_options, *paths]
        log = self._log("convert")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as errors:
            return subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, check=False, text=True)

    def measure(self, case: str, round_: int) -> Run:
        """One load of one case, with the cache emptied before it.

        Raises:
            WrongState: it loaded other bits than were saved. Of upstream's loads only the result tells that.
        """
        if case in self.suite.floors:
            return self._measure_floor(case, round_)
        if case in self.suite.getters:
            return self._measure_getters(case, round_)
        if case in self.suite.stored:
            return self._measure_stored(case, round_)
        is_upstream, has_plugin = case.startswith("upstream"), not case.startswith(("upstream", "deepspeed"))
        topology = self.suite.topologies[case]
        folder, tag = (self.universal, UNIVERSAL_TAG) if is_upstream else (self.checkpoint, TAG)
        body = self.suite.load_body(topology, self.params_m, folder, tag, has_plugin)
        try:
            with self._ranks(topology.ranks, body, case) as ranks:
                told = ranks.run(before=lambda: make_cold(folder))
        except RankFailed as error:
            if not is_upstream:
                raise
            told_here = _tell_failure(error).replace(f"{self.folder.parent}/", "")  # without the machine's own folders
            return Run(case, round_, 0.0, fault=told_here)
        return self._judge(case, round_, told)

    def _judge(self, case: str, round_: int, told: Sequence[dict[str, Any]]) -> Run:
        """What the ranks of a load tell, once its values are the saved ones."""
        if case.startswith("ours") and not all(part["direct"] for part in told):
            raise RuntimeError(f"{case}: the plugin left the load to DeepSpeed: {told[0]['reason']}")
        differing = find_differing(_join(told), self.saved)
        fault = f"loads other values of {_shorten(differing)}" if differing else ""
        if fault and not case.startswith("upstream"):
            raise WrongState(f"{case} {fault}")
        return Run(
            case,
            round_,
            **_combine(told),
            extra_bytes=max(part["extra"] for part in told),
            kept_bytes=max(part["kept"] for part in told),
            phases=_slowest_phases(told),
            fault=fault,
        )

    def _measure_floor(self, case: str, round_: int) -> Run:
        pieces, direct = self.suite.find_pieces(self.checkpoint / TAG), case.endswith(DIRECT)
        if direct and not allows_direct(pieces[0].file):
            return Run(case, round_, 0.0, fault="this file system has no O_DIRECT")
        with self._ranks(self.suite.floors[case], floor_body(pieces, direct=direct), case) as ranks:
            parts = ranks.run(before=lambda: make_cold(self.checkpoint))
        return Run(case, round_, **_combine(parts))

    def _measure_getters(self, case: str, round_: int) -> Run:
        pieces = self.suite.find_pieces(self.checkpoint / TAG)
        with serve(self.checkpoint) as store:
            world, streams = self.suite.getters[case]
            body = get_body(store, self.checkpoint, pieces, streams)
            with self._ranks(world, body, case) as ranks:
                parts = ranks.run(before=lambda: make_warm(self.checkpoint))
            return replace(Run(case, round_, **_combine(parts)), storage_bytes=store.served)

    def _measure_stored(self, case: str, round_: int) -> Run:
        with serve(self.checkpoint) as store:
            topology = self.suite.topologies[case]
            options = {**topology.checkpoint["universal"], "storage_options": store.options}
            topology = replace(topology, checkpoint={"universal": options})
            body = self.suite.load_body(topology, self.params_m, f"s3://{BUCKET}", TAG, True)
            with self._ranks(topology.ranks, body, case) as ranks:
                told = ranks.run(before=lambda: make_warm(self.checkpoint))
            return replace(self._judge(case, round_, told), storage_bytes=store.served)

    def _ranks(self, world: int, body: Body, name: str) -> Ranks:
        return Ranks(world, body, self._log(name))

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


def _join(told: Sequence[dict[str, Any]]) -> dict[str, Sums]:
    return join_parts(part for each in told for part in each["fingerprint"])


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"`{name}`" for name in names[:3]) + more


def _combine(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seconds": max(part["seconds"] for part in parts),
        "storage_bytes": sum(part["io"].storage for part in parts),
        "busy": sum(part["io"].busy for part in parts),
    }


def _slowest_phases(parts: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part.get("phases", {}))
    return {name: max(part["phases"].get(name, 0.0) for part in parts) for name in names}


def _tell_failure(error: RankFailed) -> str:
    """The statement that failed and its exception."""
    lines = [line.strip(" ^~") for line in str(error).splitlines()]
    told = [line for line in lines if line]
    frames = [number for number, line in enumerate(told) if line.startswith('File "')]
    if not frames:
        return f"fails with `{told[-1]}`"
    statement, function = told[frames[-1] + 1], told[frames[-1]].rpartition(" in ")[2]
    return f"fails with `{told[-1]}` at `{statement}` in `{function}`"


@functools.cache
def measure_import() -> float:
    """Seconds that a process's first load imports for, median of three processes."""
    runs = [subprocess.run([sys.executable, "-c", IMPORT], stdout=subprocess.PIPE, check=True) for _ in range(3)]
    return statistics.median(float(run.stdout.split()[-1]) for run in runs)
