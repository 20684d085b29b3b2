"""The complete benchmark of saves on tiny engines: it measures every figure."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepspeed_ucp.testing import WorldPool

BENCH = Path(__file__).parents[2] / "bench"
pytestmark = pytest.mark.skipif(os.environ.get("DS_ACCELERATOR") == "cuda", reason="the benchmark is of processors")


def call_there(call: bytes) -> Any:
    """Run a function of the benchmarks' modules, which are not in a package."""
    if str(BENCH) not in sys.path:
        sys.path.insert(0, str(BENCH))
    work, args, options = pickle.loads(call)
    return work(*args, **options)


class BenchWorlds:
    """Worlds whose ranks can import the benchmarks' modules."""

    def __init__(self, worlds: WorldPool, ranks: int = 0) -> None:
        self.worlds, self.ranks = worlds, ranks

    def get(self, ranks: int) -> BenchWorlds:
        return BenchWorlds(self.worlds, ranks)

    def close(self) -> None:
        """Do nothing: tiny engines may keep their memory."""

    def run(self, work: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return self.worlds.get(self.ranks).run(call_there, pickle.dumps((work, args, options)))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("saves")


@pytest.mark.exhaustive  # the benchmark is not part of the package
def test_every_method_to_save_and_resume_is_measured(bench: ModuleType, ucp_worlds: WorldPool, tmp_path: Path) -> None:
    worlds, folder, memory = BenchWorlds(ucp_worlds), tmp_path / "disk", tmp_path / "memory"
    for each in (folder, memory):
        each.mkdir()
    plan = bench.Plan(4, 1, str(memory), str(folder))
    saves = bench.join_ranks(worlds.get(2).run(bench.saves_ranks.measure_saves, plan))
    resumed = bench.replace(plan, folder=f"{folder}/run")
    resumes = bench.measure_resumes(worlds, resumed, 2, {"1 rank": (1, 3)})
    rows = bench.make_rows("{}", saves, bench.SAVES) + bench.make_rows("resume", resumes["1 rank"], bench.RESUMES)
    assert len(rows) == 6
    assert all(value > 0 for each in (*saves, *resumes["1 rank"]) for key, value in each.items() if key != "extra")
    assert {path.name for path in folder.iterdir()} == {"run"}  # saves of other methods are deleted
    assert not [each for each in memory.rglob("*.pt") if "/step" in str(each)]
