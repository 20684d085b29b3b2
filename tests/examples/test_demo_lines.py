"""The demos' lines about an interrupted job."""

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
