"""`make bench`: how long resuming, converting, exporting and checking take, against the storage and upstream.

All cases run in one go on one checkpoint, in rounds; before every measurement the page cache is emptied and checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the plugin of this checkout, also when it is not installed
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from cold import make_cold  # noqa: E402
from commands import draw_rounds  # noqa: E402
from engines import state_bytes  # noqa: E402
from fingerprint import Sums, find_differing, join_parts  # noqa: E402
from floor import DIRECT, allows_direct, floor_body  # noqa: E402
from meters import Io  # noqa: E402
from objects import BUCKET, get_body, make_warm, serve  # noqa: E402
from offline import BEST, Source  # noqa: E402
from offline import Bench as OfflineBench  # noqa: E402
from offline_report import Found, make_offline_section, summarise  # noqa: E402
from planning import make_plan_section, measure_plans  # noqa: E402
from ranks import Body, RankFailed, Ranks  # noqa: E402
from report import (  # noqa: E402
    AT_SCALE,
    SUMMARY,
    Measured,
    Results,
    describe_machine,
    explain,
    find_part,
    make_section,
    put_part,
    summarise_loads,
    table,
)
from restart import make_restart_section, measure_restarts  # noqa: E402
from scaling import JOBS, make_scaling_section, measure_scaling, simulate_scaling  # noqa: E402
from suites import DATA_PARALLEL, OFFLINE, SUITES, Offline, Suite  # noqa: E402

import deepspeed_ucp  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

TAG = "global_step1"
UNIVERSAL_TAG = f"{TAG}_universal"
PLAN, SCALING, RESTART = "plan", "scaling", "restart"
TITLES = {suite.name: suite.short for suite in SUITES}
ALL = (*(suite.name for suite in (*SUITES, *OFFLINE)), SCALING, PLAN, RESTART)
ATTEMPTS = 6
FIGURES = ("<!-- figures: written by make bench -->", "<!-- end of figures -->")
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


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class WrongState(RuntimeError):
    """A load that was timed brought back other bits than were saved."""


class Bench:
    """One suite: its checkpoint and the measurements made on it."""

    def __init__(self, suite: Suite, folder: Path, params_m: float) -> None:
        self.suite, self.folder, self.params_m = suite, folder, params_m
        self.checkpoint, self.universal = folder / "checkpoint", folder / "universal"
        self.saved: dict[str, Sums] = {}
        self.parameters = 0

    def save(self) -> None:
        """Train a step in the suite's topology and save, unless the folder holds that checkpoint already."""
        note = self.folder / "saved.json"
        if note.exists() and json.loads(note.read_text())["params_m"] == self.params_m:
            saved = json.loads(note.read_text())
            say(f"using the checkpoint in {self.checkpoint}")
        else:
            say(f"training one step on {self.suite.source.ranks} ranks, and saving")
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
        say(f"{self.parameters / 1e6:.1f} M parameters, {state_bytes(self.parameters) / (1 << 30):.2f} GiB of state")

    def convert(self) -> tuple[float, int]:
        """Seconds of upstream's conversion with a cold cache, without its interpreter's start; how often it failed.

        Of a pipeline with tied modules it fails now and then: two stages write files of the same names at once.
        """
        for failures in range(ATTEMPTS):
            shutil.rmtree(self.universal, ignore_errors=True)
            self.universal.mkdir()
            say("converting with deepspeed.checkpoint.ds_to_universal")
            make_cold(self.checkpoint)
            before = Io.now()
            told = self._run_conversion()
            if told.returncode == 0:
                seconds, read = float(told.stdout.splitlines()[-1]), Io.now() - before
                say(f"converted in {seconds:.1f} s; {read.storage / (1 << 30):.2f} GiB from storage")
                return seconds, failures
            say("the conversion failed")
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

    def measure(self, case: str, round_: int) -> Measured:
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
            return Measured(case, round_, 0.0, 0, fault=told_here)
        return self._judge(case, round_, told)

    def _judge(self, case: str, round_: int, told: Sequence[dict[str, Any]]) -> Measured:
        """What the ranks of a load tell, once its values are the saved ones."""
        if case.startswith("ours") and not all(part["direct"] for part in told):
            raise RuntimeError(f"{case}: the plugin left the load to DeepSpeed: {told[0]['reason']}")
        differing = find_differing(_join(told), self.saved)
        fault = f"loads other values of {_shorten(differing)}" if differing else ""
        if fault and not case.startswith("upstream"):
            raise WrongState(f"{case} {fault}")
        return Measured(
            case,
            round_,
            **_combine(told),
            extra_bytes=max(part["extra"] for part in told),
            kept_bytes=max(part["kept"] for part in told),
            reported_bytes=sum(part.get("reported_bytes", 0) for part in told),
            phases=_slowest_phases(told),
            fault=fault,
        )

    def _measure_floor(self, case: str, round_: int) -> Measured:
        pieces, direct = self.suite.find_pieces(self.checkpoint / TAG), case.endswith(DIRECT)
        if direct and not allows_direct(pieces[0].file):
            return Measured(case, round_, 0.0, 0, fault="this file system has no O_DIRECT")
        with self._ranks(self.suite.floors[case], floor_body(pieces, direct=direct), case) as ranks:
            parts = ranks.run(before=lambda: make_cold(self.checkpoint))
        return Measured(case, round_, **_combine(parts))

    def _measure_getters(self, case: str, round_: int) -> Measured:
        pieces = self.suite.find_pieces(self.checkpoint / TAG)
        with serve(self.checkpoint) as store:
            world, streams = self.suite.getters[case]
            body = get_body(store, self.checkpoint, pieces, streams)
            with self._ranks(world, body, case) as ranks:
                parts = ranks.run(before=lambda: make_warm(self.checkpoint))
            return replace(Measured(case, round_, **_combine(parts)), storage_bytes=store.served)

    def _measure_stored(self, case: str, round_: int) -> Measured:
        with serve(self.checkpoint) as store:
            options = {"universal": {"storage_options": store.options}}
            topology = replace(self.suite.topologies[case], checkpoint=options)
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


def run_rounds(bench: Bench, chosen: Sequence[str], rounds: int) -> list[Measured]:
    """All chosen cases in each round. A load of upstream's that has failed is not tried again."""
    measured: list[Measured] = []
    for case, round_ in draw_rounds(chosen, rounds):
        if any(m.case == case and not m.seconds for m in measured):
            continue
        result = bench.measure(case, round_)
        measured.append(result)
        say(
            f"round {round_ + 1}/{rounds}  {case:13}  {result.seconds:7.2f} s  {result.busy:5.2f} s busy  "
            f"{result.storage_bytes / (1 << 30):6.2f} GiB from storage  "
            f"extra {result.extra_bytes >> 20} MiB, kept {result.kept_bytes >> 20} MiB  {result.fault}"
        )
    return measured


@functools.cache
def measure_import() -> float:
    """Seconds that a process's first load imports for, median of three processes."""
    runs = [subprocess.run([sys.executable, "-c", IMPORT], stdout=subprocess.PIPE, check=True) for _ in range(3)]
    return statistics.median(float(run.stdout.split()[-1]) for run in runs)


def run_source(suite: Suite, folder: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Everything that is asked for and works on one suite's checkpoint; results go into `found`."""
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(suite, folder.resolve(), args.params_m)
    bench.save()
    if suite.name in args.suites:
        results = run_loads(bench, args)
        if results is not None:
            found[suite.name] = results
    source = bench.describe()
    for offline in OFFLINE:
        if offline.name in args.suites and suite in offline.sources:
            run_offline(offline, source, suite, args, found)
    if SCALING in args.suites and suite is DATA_PARALLEL:
        runs = measure_scaling(source, args.rounds, say, args.only)
        found.setdefault(SCALING, {})["runs"] = [dataclasses.asdict(run) for run in runs]


def run_loads(bench: Bench, args: argparse.Namespace) -> dict[str, Any] | None:
    """The loads of a suite; its results as data, None where none of its cases is chosen."""
    chosen = [case.name for case in bench.suite.cases if not args.only or case.name in args.only]
    if not chosen:
        return None
    wanted = any(name.startswith("upstream") for name in chosen)
    conversion, failures = bench.convert() if wanted else (None, 0)
    measured = run_rounds(bench, chosen, args.rounds)
    shutil.rmtree(bench.universal, ignore_errors=True)
    parameters, size = bench.parameters, state_bytes(bench.parameters)
    results = Results(tuple(measured), parameters, size, conversion, failures, tell_command(), measure_import())
    return dataclasses.asdict(results)


def run_offline(
    offline: Offline, source: Source, suite: Suite, args: argparse.Namespace, found: dict[str, Any]
) -> None:
    """One suite of commands on one checkpoint."""
    say(f"suite {offline.name}: {suite.short}")
    bench = OfflineBench(source, offline.jobs, say)
    if any(job.name == BEST and (not args.only or BEST in args.only) for job in offline.jobs):
        bench.find_workers()
    runs = bench.run(args.rounds, args.only)
    if runs:
        found.setdefault(offline.name, {})[suite.name] = Found.of(runs, bench.source, tell_command()).data()


def tell_command() -> str:
    return " ".join(["python", *sys.argv])


def make_page(found: dict[str, Any]) -> str:
    """docs/benchmarks.md from the results of all suites that have been measured."""
    suites = [(suite, _restore(found[suite.name])) for suite in SUITES if suite.name in found]
    sections = [make_section(results, suite.cases, suite.title, suite.tell(results)) for suite, results in suites]
    measured = [(offline, restore_runs(found[offline.name])) for offline in OFFLINE if offline.name in found]
    sections += [make_offline_section(offline.name, each, TITLES, offline.jobs) for offline, each in measured]
    if SCALING in found:
        sections.append(make_scaling_section(found[SCALING]))
    if PLAN in found:
        sections.append(make_plan_section(found[PLAN]))
    if RESTART in found:
        sections.append(make_restart_section(found[RESTART]))
    # Results of an earlier form do not tell what a first load imports.
    newest = max((results for _, results in suites), key=lambda each: each.import_seconds, default=None)
    how = f"{explain(newest)}\n\n" if newest else ""
    return f"# Benchmarks\n\n`make bench` on {describe_machine()}.\n\n{how}" + "\n".join(sections)


def update_readme(found: dict[str, Any]) -> None:
    """Put the figures between README's marks, where there are any."""
    file = ROOT / "README.md"
    page = file.read_text()
    if not find_part(page, FIGURES):
        return
    rows: list[list[str]] = []
    for suite in (suite for suite in SUITES if suite.name in found):
        rows += summarise_loads(_restore(found[suite.name]), suite.cases, suite.short)
    for offline in (offline for offline in OFFLINE if offline.name in found):
        rows += summarise(restore_runs(found[offline.name]), TITLES, offline.jobs)
    file.write_text(put_part(page, FIGURES, table(SUMMARY, rows)))


def _restore(data: dict[str, Any]) -> Results:
    return Results(**{**data, "measured": tuple(Measured(**each) for each in data["measured"])})


def is_wanted(suite: Suite, names: Sequence[str]) -> bool:
    """Whether something that is asked for works on this suite's checkpoint."""
    offline = any(each.name in names and suite in each.sources for each in OFFLINE)
    return suite.name in names or offline or (SCALING in names and suite is DATA_PARALLEL)


def restore_runs(data: dict[str, Any]) -> dict[str, Found]:
    return {key: Found.restore(each) for key, each in data.items()}


def parse_arguments() -> argparse.Namespace:
    names = list(ALL)
    jobs = [*(job for offline in OFFLINE for job in offline.jobs), *JOBS]
    cases = sorted({each.name for each in (*(case for suite in SUITES for case in suite.cases), *jobs)})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--suites", nargs="+", choices=names, default=names, help="measure these; the last results of the others stay"
    )
    parser.add_argument("--params-m", type=float, help="millions of parameters (default 300, with --quick 4)")
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 1")
    parser.add_argument("--only", nargs="+", choices=cases, help="measure these cases only")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep checkpoints there, and use them when they exist")
    parser.add_argument(
        "--output", type=Path, help="default docs/benchmarks.md, in bench_out/ while not all is measured"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round: does everything run?")
    args = parser.parse_args()
    args.params_m = args.params_m or (4 if args.quick else 300)
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.partial = bool(args.only) or args.quick
    return args


def main() -> None:
    args = parse_arguments()
    deepspeed_ucp.uninstall()  # the ranks are forked
    out = ROOT / "bench_out"
    out.mkdir(exist_ok=True)
    (out / ".gitignore").write_text("*\n")
    note = out / ("partial.json" if args.partial else "results.json")
    found: dict[str, Any] = json.loads(note.read_text()) if note.exists() and not args.partial else {}
    folder = args.keep or out / "work"
    try:
        for suite in SUITES:
            if not is_wanted(suite, args.suites):
                continue
            say(f"suite {suite.name}: {suite.title}")
            run_source(suite, folder / suite.name, args, found)
            note.write_text(json.dumps(found, indent=1))
            if not args.keep:  # two checkpoints may be more than the disk has room for
                shutil.rmtree(folder / suite.name)
        if SCALING in args.suites and not args.only:
            found[SCALING] |= {"simulated": simulate_scaling(say, quick=args.quick), "command": tell_command()}
        if PLAN in args.suites and not args.only:
            found[PLAN] = measure_plans(folder / PLAN, quick=args.quick, rounds=args.rounds, say=say)
        if RESTART in args.suites and not args.only:
            found[RESTART] = measure_restarts(folder / RESTART, args.params_m, args.rounds, say)
        note.write_text(json.dumps(found, indent=1))
        page = make_page(found)
        is_whole = not args.partial and {*found} == {*ALL}
        output = args.output or (ROOT / "docs" if is_whole else out) / "benchmarks.md"
        if output.exists() and (kept := find_part(output.read_text(), AT_SCALE)):
            page = f"{page.rstrip()}\n\n{kept}\n"
        output.write_text(page)
        if is_whole and not args.output:
            update_readme(found)
        print(f"\n{page}\nwritten to {output}")
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
