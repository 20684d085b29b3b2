"""Code of the benchmarks: commands, tables and targets."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.until import wait_until


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the commands, which imports that of the tables."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "bench"))
    return importlib.import_module("offline")


def test_a_command_is_measured_from_outside(
    offline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, seen = sys.modules["commands"], tmp_path / "seen"
    code = f"""
import os, time
begin = time.perf_counter()
held = bytearray(os.urandom(4096) * (64 << 8))
with open({str(tmp_path / "written")!r}, "wb") as file:
    file.write(held[: 8 << 20])
while not os.path.exists({str(seen)!r}):
    time.sleep(0.01)
print("ready", time.perf_counter() - begin)
print('{{"seconds": 0.25, "phases": {{"sync": 0.1}}}}')
"""
    read = commands._read_kib

    def look(*args: Any) -> int:
        if (found := read(*args)) >= 64 << 10:
            seen.touch()
        return int(found)

    monkeypatch.setattr(commands, "_read_kib", look)
    begin = time.perf_counter()
    done = commands.run_command([sys.executable, "-c", code], tmp_path / "logs" / "log")
    outside = time.perf_counter() - begin
    assert done.code == 0
    assert float(done.output.split()[1]) < done.seconds < outside
    assert done.data() == {"seconds": 0.25, "phases": {"sync": 0.1}}
    assert 64 << 20 < done.peak_bytes < 200 << 20
    assert done.io.requested > 0


def test_a_command_that_fails_leaves_its_errors(offline: ModuleType, tmp_path: Path) -> None:
    done = sys.modules["commands"].run_command([sys.executable, "-c", "raise SystemExit('no')"], tmp_path / "log")
    assert done.code == 1
    assert (tmp_path / "log").read_text() == "no\n"


@pytest.fixture
def report(offline: ModuleType) -> ModuleType:
    return sys.modules["report"]


@pytest.fixture
def found(report: ModuleType) -> Any:
    """Two rounds in which ours is 12 and 16 times as fast as upstream's, and takes 1.25 times as long as `cp`."""
    run, runs = report.Run, []
    for round_, slow in enumerate((12.0, 16.0)):
        runs += [
            run("floor-cp", round_, 0.5, 0.3, None, storage_bytes=1000, written_bytes=1000, peak_bytes=2 << 20),
            run("upstream-convert", round_, slow - 1, 1.0, slow - 4, storage_bytes=1200, written_bytes=2000),
            run("ours-convert", round_, 1.0, 0.0, 0.75, 0.25, 2.0, 1010, 1030, peak_bytes=50 << 20),
        ]
    return report.Results(tuple(runs), 100_000_000, 1000, "python bench/run.py", workers=(2, 2))


def test_targets_of_a_conversion(offline: ModuleType, report: ModuleType, found: Any) -> None:
    targets = {target.text.rpartition(": ")[2]: target for target in report.make_targets(found, offline.CONVERT)}
    assert {text: target.value for text, target in targets.items()} == {
        "upstream's ÷ this": 14.0,
        "÷ floor": 1.25,
        "÷ floor in the page cache": 1.5,
        "bytes from storage over bytes of state": 1.01,
        "bytes written over bytes of state": 1.03,
    }
    assert [target.reached for target in targets.values()] == [True, False, False, True, False]


def test_a_section_has_every_job_that_ran(offline: ModuleType, report: ModuleType, found: Any) -> None:
    restored = report.Results.restore(json.loads(json.dumps(found.data())))
    assert restored == found
    section = report.make_section("Conversions", "About.", {"ZeRO-1": restored}, offline.CONVERT)
    assert "\n\nZeRO-1 (best workers: 2 extracting, 2 merging):\n\n| command " in section
    (row,) = [line for line in section.splitlines() if line.startswith("| ours, ")]
    cells = "1.00 (1.00-1.00) | 1.00 | 50 | 1.25 | 14.00"
    assert re.sub(" +", " ", row) == f"| ours, `ds_ucp convert` | {cells} |"
    assert "upstream, best workers |" not in section  # it did not run
    assert "Targets reached: 2 of 5. Missed: ÷ floor ≤ 1 (1.25); ÷ floor in the page cache ≤ 1 (1.5)" in section


def test_a_failed_command_is_reported_and_not_repeated(offline: ModuleType, report: ModuleType) -> None:
    tried = []

    def measure(case: str, round_: int) -> Any:
        tried.append((case, round_))
        seconds, fault = (0.0, "broken") if case == "upstream-convert" else (1.0, "")
        return report.Run(case, round_, seconds, fault=fault)

    runs = sys.modules["rounds"].run_in_turns(["ours-convert", "upstream-convert"], 2, measure, lambda text: None)
    assert sorted(tried) == [("ours-convert", 0), ("ours-convert", 1), ("upstream-convert", 0)]
    results = report.Results(tuple(runs), 1, 1, "")
    assert "* upstream, defaults: broken" in report.make_section("", "", {"": results}, offline.CONVERT)
    assert report.make_targets(results, offline.CONVERT)[0].reached is None


def test_scaling_comes_from_rounds(offline: ModuleType, report: ModuleType) -> None:
    seconds = {"ours-workers-1": (4.0, 5.0), "ours-workers-2": (2.0, 2.0)}
    runs = [report.Run(case, round_, each) for case, both in seconds.items() for round_, each in enumerate(both)]
    results = report.Results(tuple(runs), 1, 1, "")
    section = report.cases_table(results, offline.SCALING)
    assert re.sub(" +", " ", section.splitlines()[-1]) == "| 2 workers | 2.00 (2.00-2.00) | 0 | 0.45 |"


# --- loads


def measure(report: ModuleType, case: str, seconds: tuple[float, ...], **more: Any) -> list[Any]:
    """One measurement per round."""
    return [report.Run(case, number, each, **more) for number, each in enumerate(seconds)]


def find_target(report: ModuleType, measured: list[Any], cases: list[Any], text: str) -> tuple[float, bool]:
    results = report.Results(tuple(measured), 1, 1, "")
    (target,) = [target for target in report.make_targets(results, cases) if text in target.text]
    return target.value, target.reached


def test_the_faster_way_to_read_is_the_floor_of_each_round(report: ModuleType) -> None:
    """If a file system has only one way, that one counts."""
    measured = measure(report, "floor-2", (1.0, 2.0, 1.0)) + measure(report, "floor-2-direct", (2.0, 1.0))
    measured += [report.Run("floor-2-direct", 2, 0.0, fault="this file system has no O_DIRECT")]
    measured += measure(report, "ours-2", (1.5, 1.5, 3.0))
    case = report.Case("ours-2", "ours", floor="floor-2", limits={"floor": 1.5})
    assert find_target(report, measured, [case], "floor") == (1.5, True)


def test_a_load_is_compared_with_a_load_of_the_same_state_from_a_tag(report: ModuleType) -> None:
    measured = measure(report, "ours-tag", (2.0,)) + measure(report, "ours-fsdp", (2.5,))
    twin = "ours-tag", "÷ that of a tag"
    cases = [report.Case("ours-tag", "tag"), report.Case("ours-fsdp", "fsdp", twin=twin, limits={"twin": 1.15})]
    assert find_target(report, measured, cases, "of a tag") == (1.25, False)
    results = report.Results(tuple(measured), 1, 1, "", import_seconds=0.3)
    assert "÷ that of a tag" in report.cases_table(results, cases)


def test_the_time_of_the_decision_is_compared_with_deepspeeds_load(report: ModuleType) -> None:
    phases = [{"index": index, "own load": 1.0} for index in (0.02, 0.03, 0.1)]
    measured = [report.Run("on-4", number, 1.0, phases=each) for number, each in enumerate(phases)]
    assert find_target(report, measured, [report.Case("on-4", "the plugin on", limits={"index": 0.02})], "") == (
        0.03,
        False,
    )


def test_sections_replace_those_with_the_same_title(report: ModuleType) -> None:
    page = "# Page\n\nHead.\n\n## One\n\nold\n\n## Two\n\nstays\n"
    put = report.put_sections(page, ["## One\n\nnew\n", "## Three\n\nmore\n"])
    assert put == "# Page\n\nHead.\n\n## One\n\nnew\n\n## Two\n\nstays\n\n## Three\n\nmore"


def test_a_load_of_other_values_is_timed_in_every_round(report: ModuleType) -> None:
    """A load that fails is not."""
    faults = {"upstream-dp2": (2.0, "loads other values"), "upstream-z3": (0.0, "fails")}

    def measure(case: str, round_: int) -> Any:
        seconds, fault = faults[case]
        return report.Run(case, round_, seconds, fault=fault)

    lines: list[str] = []
    found = sys.modules["rounds"].run_in_turns([*faults], 2, measure, lines.append)
    tried = sorted((each.case, each.round) for each in found)
    assert tried == [("upstream-dp2", 0), ("upstream-dp2", 1), ("upstream-z3", 0)]
    assert re.match(r"round 2/2  upstream-dp2 +2\.00 s .* loads other values$", lines[-1])


@pytest.mark.parametrize("direct", [False, True])
def test_the_floor_reads_every_byte_once(offline: ModuleType, direct: bool, tmp_path: Path) -> None:
    floor, ranks = sys.modules["floor"], sys.modules["ranks"]
    (tmp_path / "a.pt").write_bytes(bytes(range(256)) * 20_000)
    (tmp_path / "b.pt").write_bytes(b"x" * 5001)
    pieces = [floor.Piece(tmp_path / "a.pt", 100, 5_100_000), floor.Piece(tmp_path / "b.pt", 0, 5001)]
    if direct and not floor.allows_direct(tmp_path / "a.pt"):
        pytest.skip("this file system has no O_DIRECT")
    with ranks.Ranks(2, floor.floor_body(pieces, direct=direct), tmp_path / "log") as launched:
        found = launched.run()
    assert sum(each["io"].requested for each in found) >= 5_105_001
    beyond = floor.floor_body([floor.Piece(tmp_path / "b.pt", 5000, 2)], direct=direct)
    with ranks.Ranks(1, beyond, tmp_path / "log") as launched, pytest.raises(ranks.RankFailed, match="EOFError"):
        launched.run()


def test_a_store_serves_a_folder_as_s3_does(offline: ModuleType, tmp_path: Path) -> None:
    """The plugin and plain GETs read it; the bytes sent are counted."""
    objects, floor, ranks = importlib.import_module("objects"), sys.modules["floor"], sys.modules["ranks"]
    data = bytes(range(256)) * 5000
    root = tmp_path / "run"
    (root / "step1").mkdir(parents=True)
    (root / "step1" / "a.pt").write_bytes(data)
    (root / "latest").write_text("step1")
    with objects.serve(root) as store:
        code = f"""
from deepspeed_ucp.io import store
store.set_storage_options({store.options!r})
root = "s3://{objects.BUCKET}"
found = store.list_folder(root)
assert {{name: entry.size for name, entry in found.items()}} == {{"latest": 5, "step1": store.FOLDER}}, found
assert {{*store.list_folder(root + "/step1")}} == {{"a.pt"}}
with store.open_stored(root + "/step1/a.pt") as file:
    view = bytearray(1000)
    file.read([memoryview(view)], 300)
print(view.hex())
"""
        done = sys.modules["commands"].run_command([sys.executable, "-c", code], tmp_path / "log")
        assert bytes.fromhex(done.output.strip()) == data[300:1300], (tmp_path / "log").read_text()
        before = store.served
        body = objects.get_body(store, root, [floor.Piece(root / "step1" / "a.pt", 10, 1_000_000)], 2)
        with ranks.Ranks(2, body, tmp_path / "log") as launched:
            launched.run()
        assert store.served - before == 1_000_000


# --- saves


@pytest.fixture
def saves(offline: ModuleType) -> ModuleType:
    return importlib.import_module("saves_report")


ROUND = {
    "copy": 0.2,
    "own": 2.0,
    "own sync": 1.0,
    "eager": 0.25,
    "torch": 0.5,
    "durable": 2.0,
    "cp": 1.6,
    "extra": 3 << 20,
    "writer": 40 << 20,
}
SAVED = {"saves": [ROUND, {**ROUND, "eager": 0.5, "copy": 0.1}, ROUND]}


def test_stalls_are_compared_with_floors_of_their_rounds(saves: ModuleType) -> None:
    targets = {target.text: target for target in (row.as_target() for row in saves.list_rows(SAVED) if row.limit)}
    missed = {text: round(target.value, 3) for text, target in targets.items() if not target.reached}
    assert missed == {"from stall to durable ÷ `cp` and `sync`": 1.25}
    assert targets["stall ÷ one copy of the state"].value == 1.25
    assert targets["stall ÷ DeepSpeed's own save, durable"].value == 0.25 / 3


def test_missing_measurements_are_named(saves: ModuleType) -> None:
    facts = {"command": "python bench/saves.py", "machine": "a machine", "params_m": 4.0, "ranks": 2}
    resumed = {"seconds": 1.0, "again": 0.5, "fresh": 1.0, "cold seconds": 2.0}
    found = {**SAVED, **facts, "resumes": {"1 rank": [resumed] * 3}}
    section = saves.make_section(found)
    assert "A lost node was not measured. DLRover was left out (`--dlrover`).\n" in section
    row = next(line for line in section.splitlines() if "cache cold" in line)
    assert "| resume from memory, → 1 rank: 1.00 s (1.00-1.00) | one copy" in re.sub(" +", " ", section)
    cells = "from the disk, cache cold: 2.00 s (2.00-2.00) | 0.50 (≤ 0.6) |"
    assert re.sub(" +", " ", row).endswith(f"| {cells}")
    lost = {**found, "lost": [{"seconds": 1.0, "fresh": 0.5, "storage": 7.0}] * 3}
    assert ": 7 bytes (7-7) " in saves.make_section(lost) and "A lost node" not in saves.make_section(lost)


def test_short_peaks_of_memory_are_measured(saves: ModuleType) -> None:
    code = "print('there', flush=True); input(); held = bytearray(b'x' * (40 << 20)); input(); del held; print('gone')"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline()
        with importlib.import_module("meters").AnonymousPeak(process.pid) as seen:
            process.stdin.write(b"\n")
            process.stdin.flush()
            wait_until(lambda: seen.peak - seen.before > 30 << 20)
        process.communicate(b"\n")
    assert seen.peak - seen.before < 100 << 20


def test_writers_below_a_folder_are_ended(saves: ModuleType, tmp_path: Path) -> None:
    code = "import sys; sys.stdin.read()"
    folders = tmp_path / "ours", tmp_path / "other"
    started = [subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE) for folder in folders]
    importlib.import_module("saves").end_writers(str(folders[0]))
    assert [process.poll() is None for process in started] == [False, True]
    started[1].communicate()


def test_the_house_report_of_a_checkout(offline: ModuleType, tmp_path: Path) -> None:
    house = importlib.import_module("house")
    package = tmp_path / "deepspeed_ucp"
    (package / "low").mkdir(parents=True)
    (package / "__init__.py").write_text('"""What it is."""\n')
    (package / "high.py").write_text(
        "from .low import one\n\n\nclass _Claim:\n    expert = 1\n\n\ndef go():\n    return one.go()\n"
    )
    (package / "low" / "__init__.py").write_text("")
    (package / "low" / "one.py").write_text(
        "from . import two\n\n\nclass _Claim:\n    a = 1\n\n\ndef go():\n    return _go()\n\n\n"
        "def _go():\n    return two\n"
    )
    (package / "low" / "two.py").write_text("from deepspeed_ucp.high import go\nfrom .one import go\n")
    (tmp_path / "setup.cfg").write_text(
        "[importlinter:contract:layers]\nlayers =\n    (deepspeed_ucp.high)\n    deepspeed_ucp.low\n"
    )
    modules = [house.Module(tmp_path, file) for file in sorted(package.rglob("*.py"))]
    row = house.describe(modules, {"files": {"low/one.py"}, "types": {"deepspeed_ucp.low.one.Thing"}})
    assert (row["lines"], row["files"], row["functions"], row["passed"], row["types"]) == (25, 5, 3, 1, 1)
    (tmp_path / "README.md").write_text("Three short words.\n")
    figures = house.summarise(tmp_path, modules)
    assert figures == {
        "types for a byte range": "1: Claim",
        "types for an engine": "0: ",
        "types for a file": "0: ",
        'files with "expert" outside extensions/': "1",
        "class names used twice": "_Claim",
        "import circles": "('deepspeed_ucp.high', 'deepspeed_ucp.low.one', 'deepspeed_ucp.low.two')",
        "imports that point up": "1",
        "docstrings that begin with What, Who, Which, Of, The same": "1 of 1",
        "lines of tests": "0",
        "lines of bench": "0",
        "words of documents": "3",
    }


def test_docstrings_do_not_begin_with_a_relative_clause(offline: ModuleType) -> None:
    house = importlib.import_module("house")
    root = Path(__file__).parents[1]
    modules = [house.Module(root, file) for file in sorted((root / "deepspeed_ucp").rglob("*.py"))]
    docstrings = [text for module in modules for text in module.list_docstrings()]
    inverted = [text.partition("\n")[0] for text in docstrings if house.INVERTED.match(text)]
    assert len(inverted) < 0.005 * len(docstrings), inverted
