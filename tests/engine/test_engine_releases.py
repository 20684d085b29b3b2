"""Saves of each release of DeepSpeed, loaded by all others to the bit (`make test-releases`)."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.releases import find_reason
from tests.support.engines.cases import MIXED, Case
from tests.support.engines.driver import Engines, Saved
from tests.support.engines.experts import Spread
from tests.support.engines.parallel import pipe

SAVES, OWN = os.environ.get("UCP_RELEASE_SAVES", ""), os.environ.get("UCP_RELEASE", "")
pytestmark = pytest.mark.skipif(not SAVES, reason="`make test-releases` sets the folder of all saves")

KINDS: dict[str, Any] = {
    "zero0": Case(0, 2),
    "zero0-bf16": Case(0, 2, "bf16"),
    "zero1": Case(1, 2, "bf16"),
    "zero1-fp16": Case(1, 2, "fp16"),
    "zero2": Case(2, 3),
    "zero3": Case(3, 2, "bf16"),
    "experts0": Spread(0, 2, "fp32", (2, 2)),
    "experts1": Spread(1, 4, "fp32", (2, 2)),
    "pipeline": pipe(1, 2, method="uniform", model="EBBBBBBH"),  # with a tied module
}
TARGETS = {
    "zero": [Case(1, 3, "bf16"), Case(3, 2)],
    "experts": [Spread(1, 2, "fp32", (1, 1))],
    "pipeline": [KINDS["pipeline"].but(pp=4)],
}
ROWS = [(kind, to) for kind in KINDS for name, targets in TARGETS.items() if kind.startswith(name) for to in targets]


@pytest.mark.releases
def test_write_saves_for_other_releases(engines: Engines) -> None:
    root = Path(SAVES, OWN)
    shutil.rmtree(root, ignore_errors=True)
    for number, (name, kind) in enumerate(KINDS.items()):
        if not isinstance(kind, Case) or not find_reason(f"saves/zero{kind.stage}-{kind.precision}"):
            (root / name).mkdir(parents=True)
            saved = engines.save(kind, root / name, number, **(MIXED if isinstance(kind, Case) else {}))
            (root / name / "saved.pkl").write_bytes(pickle.dumps(saved.ranks))


@pytest.mark.parametrize(("name", "target"), ROWS, ids=str)
def test_saves_of_other_releases(name: str, target: Any, engines: Engines, subtests: pytest.Subtests) -> None:
    folders = sorted(path for path in Path(SAVES).glob(f"*/{name}") if path.parent.name != OWN)
    runs = [Saved(KINDS[name], each, pickle.loads((each / "saved.pkl").read_bytes())) for each in folders]
    outcomes = engines.load(target, *runs, **(MIXED if isinstance(target, Case) else {}))
    for run, outcome in zip(runs, outcomes, strict=True):
        with subtests.test(run.folder.parent.name):
            outcome.check(run, direct=True, losses=name != "pipeline")
