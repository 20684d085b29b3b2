"""`make bench`: how long a resume takes, against the storage's floor, DeepSpeed's own load and upstream's conversion.

All cases run in one go on one checkpoint, in rounds; before every measured load the page cache is emptied and checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the plugin of this checkout, also when it is not installed
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from cold import make_cold  # noqa: E402
from engines import Engine, add_fingerprints, load_body, save_body, state_bytes  # noqa: E402
from floor import floor_body, state_pieces  # noqa: E402
from meters import Io  # noqa: E402
from ranks import Body, Ranks  # noqa: E402
from report import (  # noqa: E402
    Case,
    Measured,
    Results,
    make_page,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SOURCE = Engine(ranks=4, stage=1)
TAG = "global_step1"
UNIVERSAL_TAG = f"{TAG}_universal"
OURS = {"universal": True}
ENGINES = {
    "deepspeed": SOURCE,
    "ours-2": Engine(2, 1, OURS),
    "ours-3": Engine(3, 1, OURS),
    "ours-z3-2": Engine(2, 3, OURS),
    "upstream": Engine(2, 1, {"load_universal": True}),
}
FLOORS = {"floor-2": 2, "floor-3": 3}
CASES = (
    Case("floor-2", "floor, 2 processes"),
    Case("floor-3", "floor, 3 processes"),
    Case("deepspeed", "DeepSpeed's own, 4 ranks ZeRO-1"),
    Case("upstream", "upstream, 2 ranks ZeRO-1 (conversion + load)", floor="floor-2"),
    Case("ours-2", "ours, 2 ranks ZeRO-1", floor="floor-2", is_ours=True),
    Case("ours-3", "ours, 3 ranks ZeRO-1", floor="floor-3", is_ours=True),
    Case("ours-z3-2", "ours, 2 ranks ZeRO-3", floor="floor-2", is_ours=True),
)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class WrongState(RuntimeError):
    """A load that was timed brought back other bits than were saved."""


class Bench:
    """One checkpoint and the measurements made on it."""

    def __init__(self, folder: Path, params_m: float) -> None:
        self.folder, self.params_m = folder, params_m
        self.checkpoint, self.universal = folder / "checkpoint", folder / "universal"
        self.fingerprint: dict[str, int] = {}
        self.parameters = 0

    def save(self) -> None:
        """Train a step on 4 ranks ZeRO-1 bf16 and save, unless the folder holds that checkpoint already."""
        note = self.folder / "saved.json"
        if note.exists() and json.loads(note.read_text())["params_m"] == self.params_m:
            saved = json.loads(note.read_text())
            say(f"using the checkpoint in {self.checkpoint}")
        else:
            say(f"training one step on {SOURCE.ranks} ranks ZeRO-{SOURCE.stage} bf16, and saving")
            with self._ranks(SOURCE.ranks, save_body(SOURCE, self.params_m, self.checkpoint), "save") as ranks:
                parts = ranks.run()
            saved = {
                "params_m": self.params_m,
                "parameters": parts[0]["parameters"],
                "fingerprint": add_fingerprints([part["fingerprint"] for part in parts]),
            }
            note.write_text(json.dumps(saved))
        self.parameters, self.fingerprint = saved["parameters"], saved["fingerprint"]
        say(f"{self.parameters / 1e6:.1f} M parameters, {state_bytes(self.parameters) / (1 << 30):.2f} GiB of state")

    def convert(self) -> float:
        """Seconds of upstream's conversion with a cold cache, without its interpreter's start and imports."""
        shutil.rmtree(self.universal, ignore_errors=True)
        self.universal.mkdir()
        module = "deepspeed.checkpoint.ds_to_universal"
        start_up = _timed(lambda: _call([sys.executable, "-c", f"import {module}"], self._log("convert")))
        say("converting with deepspeed.checkpoint.ds_to_universal")
        make_cold(self.checkpoint)
        before = Io.now()
        command = [
            sys.executable,
            "-m",
            module,
            "--inject_missing_state",
            "--input_folder",
            str(self.checkpoint / TAG),
            "--output_folder",
            str(self.universal / UNIVERSAL_TAG),
        ]
        seconds = _timed(lambda: _call(command, self._log("convert")))
        read = Io.now() - before
        say(
            f"converted in {seconds:.1f} s, of which {start_up:.1f} s start-up are not counted; "
            f"{read.storage / (1 << 30):.2f} GiB from storage"
        )
        return seconds - start_up

    def measure(self, case: str, round_: int) -> Measured:
        """One load of one case, with the cache emptied before it."""
        if case in FLOORS:
            return self._measure_floor(case, round_)
        topology = ENGINES[case]
        folder, tag = (self.universal, UNIVERSAL_TAG) if case == "upstream" else (self.checkpoint, TAG)
        body = load_body(topology, self.params_m, folder, tag, with_plugin=case.startswith("ours"))
        with self._ranks(topology.ranks, body, case) as ranks:
            parts = ranks.run(before=lambda: make_cold(folder))
        if add_fingerprints([part["fingerprint"] for part in parts]) != self.fingerprint:
            raise WrongState(f"{case}: the state that was loaded is not the state that was saved")
        return Measured(
            case,
            round_,
            **_combine(parts),
            extra_bytes=max(part["extra"] for part in parts),
            kept_bytes=max(part["kept"] for part in parts),
            reported_bytes=sum(part.get("reported_bytes", 0) for part in parts),
            phases=_slowest_phases(parts),
        )

    def _measure_floor(self, case: str, round_: int) -> Measured:
        pieces = state_pieces(self.checkpoint / TAG)
        with self._ranks(FLOORS[case], floor_body(pieces), case) as ranks:
            parts = ranks.run(before=lambda: make_cold(self.checkpoint))
        return Measured(case, round_, **_combine(parts))

    def _ranks(self, world: int, body: Body, name: str) -> Ranks:
        return Ranks(world, body, self._log(name))

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


def _combine(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seconds": max(part["seconds"] for part in parts),
        "storage_bytes": sum(part["io"].storage for part in parts),
        "requested_bytes": sum(part["io"].requested for part in parts),
    }


def _slowest_phases(parts: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part.get("phases", {}))
    return {name: max(part["phases"].get(name, 0.0) for part in parts) for name in names}


def _call(command: Sequence[str], log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=True)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def run_rounds(bench: Bench, chosen: Sequence[str], rounds: int) -> list[Measured]:
    """All chosen cases in each round, next to each other; each round begins with another of them."""
    measured = []
    for round_ in range(rounds):
        shift = round_ % len(chosen)
        for case in [*chosen[shift:], *chosen[:shift]]:
            result = bench.measure(case, round_)
            measured.append(result)
            say(
                f"round {round_ + 1}/{rounds}  {case:10}  {result.seconds:7.2f} s  "
                f"{result.storage_bytes / (1 << 30):6.2f} GiB from storage  "
                f"extra {result.extra_bytes >> 20} MiB, kept {result.kept_bytes >> 20} MiB"
            )
    return measured


def parse_arguments() -> argparse.Namespace:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params-m", type=float, help="millions of parameters (default 300, with --quick 4)")
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 1")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="measure these cases only")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the checkpoint there, and use it when it exists")
    parser.add_argument("--output", type=Path, help="default docs/benchmarks.md for a whole run, else bench_out/")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round: does everything run?")
    args = parser.parse_args()
    args.params_m = args.params_m or (4 if args.quick else 300)
    args.rounds = args.rounds or (1 if args.quick else 3)
    is_whole = args.only == names and not args.quick
    args.output = args.output or (ROOT / "docs" if is_whole else ROOT / "bench_out") / "benchmarks.md"
    return args


def main() -> None:
    args = parse_arguments()
    out = ROOT / "bench_out"
    out.mkdir(exist_ok=True)
    (out / ".gitignore").write_text("*\n")
    folder = args.keep or out / "work"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        bench = Bench(folder.resolve(), args.params_m)
        bench.save()
        conversion = bench.convert() if "upstream" in args.only else None
        measured = run_rounds(bench, args.only, args.rounds)
        results = Results(measured, state_bytes(bench.parameters), conversion)
        (out / "results.json").write_text(json.dumps([dataclasses.asdict(m) for m in measured], indent=1))
        page = make_page(results, CASES, " ".join(["python", "bench/run.py", *sys.argv[1:]]))
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(page)
        print(f"\n{page}\nwritten to {args.output}")
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
