"""Sequence parallelism (Ulysses, ALST) in each way of giving batch sizes, to the same and to other topologies.

With an mpu of ALST's kind DeepSpeed computes its batch sizes with ``/``: the saved counters are floats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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


Save = Callable[[Spread], SavedRun]


@pytest.fixture(scope="module")
def save(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Train a source, from weights of its own, and save it, once."""
    root = tmp_path_factory.mktemp("sequence")

    @functools.cache
    def get(source: Spread) -> SavedRun:
        name = str(source)
        return save_run(source.training(sum(map(ord, name))), source.launch, STEPS, root / name, ucp_worlds)

    return get


@pytest.fixture
def check(save: Save, ucp_worlds: WorldPool, subtests: pytest.Subtests) -> Callable[..., None]:
    """Load each source into one engine: all bits, all counters, and the losses that follow."""
    return functools.partial(check_each, save=save, worlds=ucp_worlds, subtests=subtests)


def list_sources(kind: str, stages: Sequence[int], precision: str = "fp32") -> list[Spread]:
    return [Spread(kind, stage, way, sp=2, precision=precision) for stage in stages for way in WAYS]


def check_each(
    sources: Sequence[Spread], target: Spread, *, save: Save, worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    runs = [save(source) for source in sources]
    judges = resume_each(target.training(1), runs, target.launch, worlds)
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
def test_alst(target: Spread, check: Callable[..., None]) -> None:
    check(list_sources("alst", (1, 3)), target)


@pytest.mark.releases
def test_alst_in_bf16(check: Callable[..., None]) -> None:
    sources = list_sources("alst", (2,), "bf16")
    check(sources, Spread("alst", 3, "micro", sp=4, precision="bf16"))


def test_from_data_parallelism_to_alst(check: Callable[..., None]) -> None:
    sources = [Spread("none", stage, "micro", world=2) for stage in (0, 1, 3)]
    check(sources, Spread("alst", 1, "micro", sp=2))


@pytest.mark.engine_smoke
@pytest.mark.parametrize(
    "target", [Spread("mpu", 1, "micro", sp=2), Spread("mpu", 2, "all", sp=4), Spread("none", 1, world=3)], ids=str
)
def test_ulysses(target: Spread, check: Callable[..., None]) -> None:
    """Below stage 3, where DeepSpeed partitions parameters over the data-parallel ranks of such an mpu alone."""
    check(list_sources("mpu", (1,)), target)
