"""Output lines of the demos about an interrupted job."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("loaded", "at", "line"),
    [
        (0, 0.5, "first start, 2 ranks"),
        (60, 63.5, "resumed from step 60, 2 ranks; repeats steps 61 to 63"),
        (60, 60.5, "resumed from step 60, 2 ranks; no step is repeated"),
        (0, 3.5, "resumed from step 0, 2 ranks; repeats steps 1 to 3"),
    ],
)
def test_the_line_of_a_resume_names_its_step_and_the_repeated_ones(
    loaded: int, at: float, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "elastic_restart"))
    steps = [{"step": step, "time": step} for step in range(1, 84)]
    load = {"step": loaded, "time": at, "world": 2}
    assert importlib.import_module("agents").describe_start(load, steps) == line


@pytest.mark.parametrize("code", [0, 3])
def test_lines_of_a_program_are_logged_at_once_and_the_rest_at_its_end(
    code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    demo = importlib.import_module("demo")
    script = tmp_path / "script.py"
    script.write_text(f"print('a table'); print('   12 s  segment 1: resumed from step 20'); raise SystemExit({code})")
    monkeypatch.setitem(demo.PROGRAMS, "stub", (str(script),))
    assert demo.Demo().run("stub") is (code == 0)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith(" s  stub             segment 1: resumed from step 20")
    verdict = "succeeded" if code == 0 else "FAILED with exit code 3"
    assert rest == ["", f"===== stub: {verdict} =====", "a table", "=====", ""]


def test_the_description_names_duration_and_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    demo = importlib.import_module("demo")
    assert "two minutes" in demo.DESCRIPTION and demo.OPERATOR in demo.DESCRIPTION
    assert all(f"\n  {name} " in demo.DESCRIPTION for name in demo.PROGRAMS if name != "stub")
