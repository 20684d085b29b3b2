"""The demos' lines about an interrupted job."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("loaded", "at", "line"),
    [
        (0, 0.5, "step  83: 2 ranks, first start"),
        (60, 63.5, "step  83: 2 ranks, resumed after step 60; repeated steps: 3"),
        (60, 60.5, "step  83: 2 ranks, resumed after step 60; repeated steps: 0"),
    ],
)
def test_progress_after_a_resume_names_the_repeated_steps(
    loaded: int, at: float, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "elastic_restart"))
    steps = [{"step": step, "time": step} for step in range(1, 84)]
    assert importlib.import_module("agents").describe_progress(2, 83, {"step": loaded, "time": at}, steps) == line
