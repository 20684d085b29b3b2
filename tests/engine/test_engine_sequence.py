"""Sequence parallelism (Ulysses, ALST) in each way of giving batch sizes, to the same and to other topologies.

With an mpu of ALST's kind DeepSpeed computes its batch sizes with ``/``: the saved counters are floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.resume import SavedRun, resume_each, save_run
from tests.support.engines.sequence import BATCH, WAYS, Spread

STEPS = (2, 2)
FLOATS = {"micro", "micro-accumulation"}
"""Ways whose count of samples is a float in ALST's saves."""


class Saves:
    """Each source's run, saved once."""

    def __init__(self, worlds: WorldPool, root: Path) -> None:
        self.worlds, self.root = worlds, root
        self._runs: dict[str, SavedRun] = {}

    def get(self, source: Spread) -> SavedRun:
        """Train a source, from weights of its own, and save it."""
        name = str(source)
        if name not in self._runs:
            training = source.training(sum(map(ord, name)))
            self._runs[name] = save_run(training, source.launch, STEPS, self.root / name, self.worlds)
        return self._runs[name]


@pytest.fixture(scope="module")
def saves(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(ucp_worlds, tmp_path_factory.mktemp("sequence"))


def list_sources(kind: str, stages: Sequence[int], precision: str = "fp32") -> list[Spread]:
    return [Spread(kind, stage, way, sp=2, precision=precision) for stage in stages for way in WAYS]


def check(sources: Sequence[Spread], target: Spread, saves: Saves, subtests: pytest.Subtests) -> None:
    """Load each source into one engine: all bits, all counters, and the losses that follow."""
    runs = [saves.get(source) for source in sources]
    judges = resume_each(target.training(1), runs, target.launch, saves.worlds)
    for source, run, judge in zip(sources, runs, judges, strict=True):
        with subtests.test(f"{source}→{target}"):
            report = judge()
            same = (source.stage, source.world, source.precision) == (target.stage, target.world, target.precision)
            is_plain = not any(run.folder.glob("*/*_mp_rank_01_*"))  # before 0.19.8 ALST's sequence ranks name files
            assert report.direct is not (same and is_plain)  # ranks of a sequence group partition like others
            assert report.parameters == 10 and report.states >= 38
            assert read_samples(run.folder) == STEPS[0] * BATCH
            assert isinstance(read_samples(run.folder), float) == (source.kind == "alst" and source.way in FLOATS)


def read_samples(folder: Path) -> Any:
    """The number of samples as DeepSpeed saved it."""
    path = next(folder.glob("global_step*/*model_states.pt"))
    return torch.load(path, map_location="cpu", weights_only=False)["global_samples"]


TARGETS = [
    Spread("alst", 1, "micro", sp=2),
    Spread("alst", 3, "micro-accumulation", sp=2),
    Spread("alst", 2, "train-micro", sp=4),
    Spread("alst", 3, "train", sp=4),
    Spread("none", 1, "train", world=3),
    Spread("none", 3, "all", world=4),
]


@pytest.mark.releases
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_alst(target: Spread, saves: Saves, subtests: pytest.Subtests) -> None:
    check(list_sources("alst", (1, 3)), target, saves, subtests)


@pytest.mark.releases
def test_alst_in_bf16(saves: Saves, subtests: pytest.Subtests) -> None:
    sources = list_sources("alst", (2,), "bf16")
    check(sources, Spread("alst", 3, "micro", sp=4, precision="bf16"), saves, subtests)


def test_from_data_parallelism_to_alst(saves: Saves, subtests: pytest.Subtests) -> None:
    sources = [Spread("none", stage, "micro", world=2) for stage in (0, 1, 3)]
    check(sources, Spread("alst", 1, "micro", sp=2), saves, subtests)


@pytest.mark.engine_smoke
@pytest.mark.parametrize(
    "target", [Spread("mpu", 1, "micro", sp=2), Spread("mpu", 2, "all", sp=4), Spread("none", 1, world=3)], ids=str
)
def test_ulysses(target: Spread, saves: Saves, subtests: pytest.Subtests) -> None:
    """Below stage 3, where DeepSpeed partitions parameters over the data-parallel ranks of such an mpu alone."""
    check(list_sources("mpu", (1,)), target, saves, subtests)
