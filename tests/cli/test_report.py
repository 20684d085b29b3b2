"""``ds_ucp report`` over the file of a load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.cli.dispatch import main

RANKS = [
    {
        "rank": rank,
        "host": f"worker-{rank}",
        "started": 1000.0,
        "spans": [["index", 1010.0, 0.5], ["read", 1010.5, 1.0 + rank], ["fill", 1012.5, 0.25], ["finish", 1013, 0.1]],
        "bytes_read": 3_000_000,
        "bytes_again": 0,
        "requests": 7,
        "threads": 2,
        "files": {"/ckpt/a.pt": [2_000_000, 0.5], f"/ckpt/b\x1b{rank}.pt": [1_000_000, 1.0 + rank]},
    }
    for rank in range(2)
]
LOAD = {
    "version": 1, "time": 1014.0, "loaded": "/ckpt/mp.pt", "step": 40, "direct": True, "reason": "dp 4 → 2",
    "state_bytes": 6_000_000, "ranks": RANKS,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "load-20261122T104512-310.json").write_text(json.dumps({**LOAD, "step": 20}))
    (tmp_path / "load-20261122T104513-001.json").write_text(json.dumps(LOAD))
    (tmp_path / ".load-20261122T104514-001.json.17").write_text("{")
    return tmp_path


def test_the_last_load_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "/ckpt/mp.pt: step 40, loaded by deepspeed_ucp on 2 ranks in 2.85 s"
    assert lines[4].split() == ["rank", "host", "start", "index", "read", "fill", "finish", "bytes", "requests"]
    assert lines[6].split() == ["1", "worker-1", "10.00", "0.50", "2.00", "0.25", "0.10", "2.86", "MiB", "7"]
    assert "slowest rank  1 on worker-1: 2.85 s" in lines
    assert r"slowest file  /ckpt/b\x1b1.pt: 488 KiB/s while it was read" in lines
    assert "reading alone 1.25 s, the load 2.28 times that" in lines


def test_as_json_and_of_one_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "load-20261122T104512-310.json"
    assert main(["report", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["loads"], told["slowest_rank"], told["seconds"]) == (20, 1, 1, pytest.approx(2.85))
    assert told["ranks"][0]["phases"]["read"] == 1.0
    assert told["ranks"][0]["floor"] == 0.75


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_it_is_drawn(folder: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    assert main(["report", str(folder), "--plot", str(folder / f"out.{ending}")]) == 0
    assert (folder / f"out.{ending}").stat().st_size > 5000


def test_a_load_that_read_nothing_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    empty: list[Any] = [{**rank, "files": {}, "bytes_read": 0} for rank in RANKS]
    (tmp_path / "load-1.json").write_text(json.dumps({**LOAD, "ranks": empty}))
    assert main(["report", str(tmp_path), "--plot", str(tmp_path / "out.png")]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"version": 9, "ranks": [1]}',
        '{"version": 1, "ranks": [{}]}',
        json.dumps({"version": 1, "ranks": RANKS}),
        json.dumps({**LOAD, "ranks": [{**RANKS[0], "files": []}]}),
        json.dumps({**LOAD, "ranks": [{**RANKS[0], "requests": float("inf")}]}),
        "[" * 100_000,
        "\0" * 100,
    ],
    ids=str.__len__,
)
def test_other_files_are_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "load-1.json").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    assert "is no report of a load" in capsys.readouterr().err


def test_a_folder_without_any_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no report of a load" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--plot", "x.png"]) == 2
