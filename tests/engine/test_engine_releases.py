"""Saves of each release, loaded by all others, to the bit (`make test-releases`)."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.resume import Launch as Job
from deepspeed_ucp.testing.resume import SavedRun, resume_each, save_run
from tests.support.engines.cases import Case, saves_states, training
from tests.support.engines.driver import Engines, Saved
from tests.support.engines.experts import Spread
from tests.support.engines.parallel import Launch, Route, Runs

SAVES, OWN = os.environ.get("UCP_RELEASE_SAVES", ""), os.environ.get("UCP_RELEASE", "")
OPTIONS: dict[str, Any] = {"model": "mixed", "optimizer": "adamw", "scheduler": True}
pytestmark = pytest.mark.skipif(not SAVES, reason="`make test-releases` sets the folder of all saves")

DENSE = {
    "zero0": Case(0, 2),
    "zero0-bf16": Case(0, 2, "bf16"),
    "zero1": Case(1, 2, "bf16"),
    "zero1-fp16": Case(1, 2, "fp16"),
    "zero2": Case(2, 3),
    "zero3": Case(3, 2, "bf16"),
}
TARGETS = [Case(1, 3, "bf16"), Case(3, 2)]
EXPERTS = {"experts0": Spread(2, 0, "fp32", (2, 2)), "experts1": Spread(4, 1, "fp32", (2, 2))}
PIPELINE = Route("EBBBBBBH", Launch(1, 2, method="uniform"), Launch(1, 4, method="uniform"))
"""With a tied module."""


def list_saves(kind: str) -> list[Path]:
    """List the folders of a kind that other releases saved."""
    return sorted(path for path in Path(SAVES).glob(f"*/{kind}") if path.parent.name != OWN)


@pytest.mark.releases
def test_saves_for_other_releases(engines: Engines, ucp_worlds: WorldPool) -> None:
    root = Path(SAVES, OWN)
    shutil.rmtree(root, ignore_errors=True)
    for number, (kind, case) in enumerate(DENSE.items()):
        if saves_states(case.stage, case.precision):
            saved = save_run(training(**OPTIONS, seed=number), case.launch, (3, 2), root / kind, ucp_worlds)
            (root / kind / "saved.json").write_text(json.dumps([asdict(saved.launch), saved.losses]))
    for kind, spread in EXPERTS.items():
        saved = engines.save(spread, root / kind, 7)
        torch.save((saved.states, saved.losses), root / kind / "saved.pt")
    runs = Runs(ucp_worlds, root / "pipeline")
    (root / "pipeline.pkl").write_bytes(pickle.dumps(runs.saved(PIPELINE.model, PIPELINE.source)))


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("kind", DENSE)
def test_saves_of_other_releases(kind: str, target: Case, ucp_worlds: WorldPool, subtests: pytest.Subtests) -> None:
    folders = list_saves(kind)
    found = [json.loads((folder / "saved.json").read_text()) for folder in folders]
    saves = [
        SavedRun(Job(**launch), folder, tuple(losses)) for folder, (launch, losses) in zip(folders, found, strict=True)
    ]
    for folder, judge in zip(folders, resume_each(training(**OPTIONS), saves, target.launch, ucp_worlds), strict=True):
        with subtests.test(folder.parent.name):
            assert judge().direct


@pytest.mark.parametrize("kind", EXPERTS)
def test_saves_of_other_releases_with_experts(kind: str, engines: Engines, subtests: pytest.Subtests) -> None:
    folders = list_saves(kind)
    target = Spread(2, 1, "fp32", (1, 1))
    for folder, outcome in zip(folders, engines.load(target, *folders), strict=True):
        with subtests.test(folder.parent.name):
            saved = Saved(str(folder), *torch.load(folder / "saved.pt", weights_only=False))
            outcome.check(target, EXPERTS[kind], saved)


def test_saves_of_other_releases_as_pipelines(ucp_worlds: WorldPool, subtests: pytest.Subtests) -> None:
    for folder in list_saves("pipeline"):
        with subtests.test(folder.parent.name):
            runs = Runs(ucp_worlds, folder)
            saved = pickle.loads(folder.with_suffix(".pkl").read_bytes())
            runs._saved[PIPELINE.model, PIPELINE.source] = saved
            runs.check(PIPELINE, least=10)
