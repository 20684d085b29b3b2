"""Code of the benchmarks: commands, floors, tables, thousands of ranks, and the report on the code."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed_ucp.model.storage import count
from tests.support.until import wait_until


class Modules:
    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(name)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Modules:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "bench"))
    return Modules()


def test_time_and_memory_of_a_command_are_measured(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen"
    code = f"""
import os, time
begin = time.perf_counter()
data = bytearray(os.urandom(4096) * (64 << 8))
while not os.path.exists({str(seen)!r}):
    time.sleep(0.01)
print(time.perf_counter() - begin)
"""
    read = bench.commands.read_bytes

    def look(*args: Any) -> int:
        if (size := read(*args)) >= 64 << 20:
            seen.touch()
        return int(size)

    monkeypatch.setattr(bench.commands, "read_bytes", look)
    begin = time.perf_counter()
    result = bench.commands.run_command([sys.executable, "-c", code], tmp_path / "logs" / "log")
    assert result.code == 0
    assert float(result.output) < result.seconds < time.perf_counter() - begin
    assert 64 << 20 < result.peak_bytes < 200 << 20


def test_a_failed_command_is_reported_with_its_error_output(bench: Any, tmp_path: Path) -> None:
    result = bench.commands.run_command([sys.executable, "-c", "raise SystemExit('no')"], tmp_path / "log")
    assert result.code == 1
    assert (tmp_path / "log").read_text() == "no\n"


@pytest.mark.parametrize("direct", [False, True])
def test_the_floor_reads_a_byte_once(bench: Any, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floor = bench.floor
    if not direct:
        monkeypatch.setattr(floor.os, "O_DIRECT", 0)
    data = {"a.pt": bytes(range(256)) * 20_000, "b.pt": b"x" * 5001}
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    assert sum(piece.length for piece in floor.list_pieces(tmp_path, "*.pt")) == sum(map(len, data.values()))
    reader = floor.Reader([floor.Piece(tmp_path / "a.pt", 100, 5_100_000), floor.Piece(tmp_path / "b.pt", 0, 5001)])
    reader.run(2)
    assert reader._memory.tobytes() == data["a.pt"][100:5_100_100] + data["b.pt"]
    with pytest.raises(EOFError, match=r"b\.pt ends before byte 5002"):
        floor.Reader([floor.Piece(tmp_path / "b.pt", 5000, 2)]).run(1)


def measure_cases(bench: Any, cases: Any, seconds: dict[str, tuple[float, ...]], **more: Any) -> Any:
    """Run cases with predefined seconds by round, on a checkpoint of 1,000 bytes of state."""
    left = {name: iter(each) for name, each in seconds.items()}

    def replace(case: Any) -> Any:
        return lambda _: bench.harness.Run(next(left[case.name]), **more.get(case.name, {}))

    chosen = [case for case in cases if case.name in seconds]
    faked = [bench.harness.Case(**{**vars(case), "measure": replace(case)}) for case in chosen]
    harness = bench.harness.Bench(bench.cases.DATA_PARALLEL, Path("nowhere"), 1, parameters=1000 // 12)
    return harness.run(faked, max(map(len, seconds.values())))


def test_ratios_are_compared_with_limits_and_promises(bench: Any) -> None:
    """In two rounds the plugin is 12 and 16 times as fast as upstream, and 1.25 times as slow as `cp`."""
    seconds = {"floor-cp": (0.5, 0.5), "upstream-convert": (12.0, 16.0), "ours-convert": (1.0, 1.0)}
    more = {
        "floor-cp": {"sync_seconds": 0.3},
        "ours-convert": {"storage_bytes": 1000, "written_bytes": 1100, "memory_bytes": 50 << 20},
    }
    results = measure_cases(bench, bench.cases.CONVERSIONS, seconds, **more)
    (row,) = [line for line in results.describe().splitlines() if line.startswith("| ours, ")]
    cells = "1.00 (1.00-1.00) | 1.00 | 50 | 1.25 (≤ 1) | 14.00 (≥ 10)"
    assert re.sub(" +", " ", row) == f"| ours, `ds_ucp convert` | {cells} |"
    assert "2 merging" not in results.describe()  # it did not run
    assert results.list_excesses() == ["ours, `ds_ucp convert`: 1.10 times the state written, at most 1.02 allowed"]
    row = results.make_readme_row("title", results.cases[2])
    assert row == ["title", "1.0", "1.25", "14.00", "50"]


def test_a_failed_case_is_reported_and_not_repeated(bench: Any) -> None:
    seconds = {"upstream": (0.0,), "ours-2": (1.0, 1.0), "ours-3": (1.0, 1.0)}
    faults = {"upstream": {"fault": "fails: broken"}}
    results = measure_cases(bench, bench.cases.LOADS, seconds, **faults)
    assert {name: len(runs) for name, runs in results.runs.items()} == {"upstream": 1, "ours-2": 2, "ours-3": 2}
    assert "* upstream, 2 ranks ZeRO-1: fails: broken" in results.describe()
    assert results.ratio("upstream", "ours-2") is None


def test_a_load_of_other_values_is_timed_in_every_round(bench: Any) -> None:
    results = measure_cases(bench, bench.cases.LOADS, {"upstream": (1.0, 3.0)}, upstream={"fault": "other values of w"})
    assert "2.00 (1.00-3.00) (other values)" in results.describe()


def test_names_of_cases_are_unique_in_a_section(bench: Any) -> None:
    for section in bench.cases.SECTIONS:
        names = [case.name for case in section.cases]
        assert len({*names}) == len(names)
        assert {name for case in section.cases for name in (case.floor[0], case.upstream[0]) if name} <= {*names}
    assert bench.run.README_ROWS.keys() <= {case.name for each in bench.cases.SECTIONS for case in each.cases}


def test_stalls_are_compared_with_those_of_other_cases_in_the_same_round(bench: Any) -> None:
    figures = {"stall": 0.25, "copy": 0.2, "deepspeed": 3.0, "torch": 0.5, "durable": 2.0, "cp": 1.6}
    figures |= {"extra": 3 << 20, "writer": 40 << 20}
    saves = [figures, {**figures, "stall": 0.5, "copy": 0.1}, figures]
    resumes = {"1 rank": [{"seconds": 1.0, "again": 0.5, "cold seconds": 2.0}] * 3}
    lines = re.sub(" +", " ", bench.saves.make_section(saves, resumes, "a command", 300)).splitlines()
    assert "| stall | 0.25 (0.25-0.50) | one copy of the state | 0.20 (0.10-0.20) | 1.25 (≤ 1.3) |" in lines
    (resumed,) = [line for line in lines if "cache cold" in line]
    assert resumed.endswith(
        "→ 1 rank | 1.00 (1.00-1.00) | from the disk, cache cold | 2.00 (2.00-2.00) | 0.50 (≤ 0.6) |"
    )
    assert lines[-1] == "Anonymous memory: a save 3 (3-3) MiB (≤ 64 MiB), the writer 40 (40-40) MiB."


def test_short_peaks_of_memory_are_measured(bench: Any) -> None:
    code = "print('there', flush=True); input(); held = bytearray(b'x' * (40 << 20)); input(); del held; print('gone')"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline()
        with bench.meters.watch_anonymous(process.pid) as memory:
            process.stdin.write(b"\n")
            process.stdin.flush()
            wait_until(lambda: memory.peak - memory.before > 30 << 20)
        process.communicate(b"\n")
    assert memory.peak - memory.before < 100 << 20


def test_writers_of_saves_below_a_folder_are_ended(bench: Any, tmp_path: Path) -> None:
    code = "import sys; sys.stdin.read()"
    folders = tmp_path / "ours", tmp_path / "other"
    started = [subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE) for folder in folders]
    bench.saves.end_writers(str(folders[0]))
    assert [process.poll() is None for process in started] == [False, True]
    started[1].communicate()


def test_docstrings_begin_with_a_short_line_that_is_no_relative_clause(bench: Any) -> None:
    root = Path(__file__).parents[1]
    modules = [bench.house.Module(root, file) for file in sorted((root / "deepspeed_ucp").rglob("*.py"))]
    lines = [text.partition("\n")[0] for module in modules for text in module.list_docstrings()]
    assert [line for line in lines if len(line) > 80] == []
    inverted = [line for line in lines if bench.house.INVERTED.match(line)]
    assert len(inverted) < 0.005 * len(lines), inverted


def make_job(bench: Any, kind: str, times: int = 1, layers: int = 1) -> Any:
    """Make a job with `times` as many ranks and files, and, if it is dense, `layers` times as many layers."""
    jobs = bench.jobs
    if kind == "moe":
        source, target = (bench.moe.MoeRanks(jobs.QUICK_MOE, ranks * times, 16) for ranks in (64, 48))
        return jobs.make_moe(source, target)
    sizes = replace(jobs.QUICK_DENSE, layers=layers * jobs.QUICK_DENSE.layers)
    source, target = (bench.dense.DenseRanks(sizes, 4, 4, dp * times) for dp in (4, 3))
    if kind == "dense3":
        target = bench.dense.DenseRanks(sizes, 1, 1, 48 * times, 100_000)
    return jobs.make_dense(source, target)


def plan_rank(bench: Any, job: Any) -> Any:
    return bench.scale_plan.Planner(job, bench.scale_plan.make_script(job, [5]), 5).plan()


@pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.exhaustive), "moe"])
def test_messages_to_a_rank_grow_no_faster_than_the_ranks(bench: Any, kind: str) -> None:
    once, twice = (plan_rank(bench, make_job(bench, kind, times)) for times in (1, 2))
    for before, after in ((once.received, twice.received), (once.received_later, twice.received_later)):
        assert before.keys() == after.keys()
        assert all(after[step] <= 2.2 * nbytes for step, nbytes in before.items())


@pytest.mark.parametrize("kind", ["dense", "dense3"])
def test_reads_of_a_rank_grow_no_faster_than_its_share(bench: Any, kind: str) -> None:
    """Twice as many ranks read half as much each. Each layer adds equal numbers of reads and message bytes."""
    first, second, fourth = (plan_rank(bench, make_job(bench, kind, layers=layers)) for layers in (1, 2, 4))
    assert plan_rank(bench, make_job(bench, kind, times=2)).requests <= 1.1 * first.requests
    for measure in (lambda plan: plan.requests, lambda plan: sum(plan.received.values())):
        small, medium, large = map(measure, (first, second, fourth))
        assert large - medium <= 1.1 * 2 * (medium - small)


@pytest.mark.parametrize("name", ["dense1-quick", "dense3-quick", "moe-quick"])
def test_a_rank_gets_the_claims_of_its_peers(bench: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, sent = bench.jobs.QUICK_JOBS[name], {}

    take = bench.scale_plan.Planner._take_tables

    def record(planner: Any, tables: list[Any]) -> Any:
        sent[planner.rank] = tables
        return take(planner, tables)

    monkeypatch.setattr(bench.scale_plan.Planner, "_take_tables", record)
    ranks = (0, 5, job.ranks - 1)
    script = bench.scale_plan.make_script(job, ranks)
    planned = [bench.scale_plan.Planner(job, script, rank).plan() for rank in ranks]
    for rank in ranks:
        for peer in ranks:
            np.testing.assert_array_equal(script.tables[rank][peer], sent[peer][rank])
    assert sum(len(sent[peer][rank]) for peer in ranks for rank in ranks)
    for each in planned:
        assert each.requests > 0
        assert each.headers <= each.most_headers + 4, "more than four and a share of the rest"


def test_the_models_have_a_trillion_parameters(bench: Any) -> None:
    for name in ("dense1-10k", "moe-10k"):
        assert 1.00e12 < bench.jobs.JOBS[name].source.sizes.parameters < 1.04e12
    dense = bench.jobs.JOBS["dense1-10k"].source
    parameters = [parameter for stage in dense.sizes.list_stages(dense.pp) for parameter in stage]
    tied = sum(count(parameter.shape) for parameter in parameters if parameter.layer < 0)
    assert sum(count(parameter.shape) for parameter in parameters) == dense.sizes.parameters + tied // 2
