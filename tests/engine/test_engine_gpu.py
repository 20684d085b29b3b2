"""What only a GPU can show: page-locked staging and streams, NCCL, random states of the device, real kernels.

`make test-gpu` runs this and the other tests of engines with `DS_ACCELERATOR=cuda`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.resume import resume_each as resume_each_of
from deepspeed_ucp.testing.resume import save_run
from tests.engine.conftest import STEPS
from tests.support.engines import gpu as engine_gpu
from tests.support.engines.cases import Case, training

pytestmark = pytest.mark.skipif(os.environ.get("DS_ACCELERATOR") != "cuda", reason="`make test-gpu` runs these tests")

LAYERS = 12
DIRECT = {"same_topology": "direct"}
LOADS: list[tuple[int, int, dict[str, Any], bool]] = [
    (1, 1, DIRECT, True),
    (2, 1, {"threads": 8, "window_mb": 16}, True),
    (3, 1, {"threads": 1}, True),
    (3, 1, {"threads": 8}, False),
    (1, 2, {"threads": 4, "window_mb": 16}, True),
    (3, 2, {}, True),
    (2, 3, {}, False),
]
"""Stage, ranks, options, and whether the system locks pages."""


@pytest.fixture(scope="module")
def saved(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("large"))
    (sums,) = ucp_worlds.get(1).run(engine_gpu.save, folder, 1, LAYERS)
    assert all(sums[:LAYERS])
    return folder


@pytest.mark.parametrize(("stage", "ranks", "options", "pinned"), LOADS, ids=str)
def test_a_large_model_comes_back_to_the_bit(
    stage: int, ranks: int, options: dict[str, Any], pinned: bool, saved: str, ucp_worlds: WorldPool
) -> None:
    """A load of 50 M parameters took up to 128 MiB of the GPU's memory for a while, whatever the window."""
    for found in ucp_worlds.get(ranks).run(engine_gpu.load, saved, stage, LAYERS, options, pinned=pinned):
        assert found["equal"]
        assert set(found["by"]) == {"GpuUploads"}
        assert found["beyond"] < 160 << 20
        assert found["backend"] == ("nccl" if ranks == 1 else "host")


@pytest.fixture(scope="module")
def cpus() -> Iterator[WorldPool]:
    with WorldPool(env={"DS_ACCELERATOR": "cpu"}) as pool:
        yield pool


def test_from_cpus_and_back(cpus: WorldPool, ucp_worlds: WorldPool, tmp_path: Path) -> None:
    train = training("mixed", "adamw", scheduler=True)
    sources = [Case(1, 4, "bf16"), Case(3, 2, "bf16"), Case(0, 1, "bf16"), Case(2, 3)]
    targets = [Case(0, 1, "bf16"), Case(3, 1, "bf16"), Case(2, 2, "bf16")]
    for here, there in ((cpus, ucp_worlds), (ucp_worlds, cpus)):
        saves = []
        for number, case in enumerate(sources):
            folder = tmp_path / f"{here is cpus}{number}"
            source = training("mixed", "adamw", scheduler=True, seed=number)
            saves.append(save_run(source, case.launch, STEPS, folder, here))
        for target in targets:
            for judge in resume_each_of(train, saves, target.launch, there, loss_tolerance=0.05):
                assert judge().parameters == 10


PINNED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
KERNELS: list[tuple[list[Case], Case, str]] = [
    ([Case(0, 1, "fp16"), Case(1, 2, "fp16"), Case(0, 2, "bf16")], Case(0, 1, "fp16"), "fused_adam"),
    ([Case(0, 1, "fp16"), Case(3, 2, "fp16"), Case(2, 1)], Case(2, 1, "fp16"), "fused_adam"),
    ([Case(1, 2, "bf16"), Case(3, 1, "fp16")], Case(3, 2, "bf16"), "fused_adam"),
    ([Case(0, 2), Case(1, 1, "bf16"), Case(3, 2, "fp16")], Case(0, 1), "adamw_fused"),
    ([Case(0, 2), Case(1, 1, "bf16"), Case(3, 2, "fp16")], Case(2, 2), "adamw_fused"),
    ([Case(0, 2), Case(1, 1, "bf16"), Case(3, 2, "fp16")], Case(3, 1), "adamw_fused"),
    ([Case(0, 2), Case(1, 1, "bf16")], Case(1, 2, "fp16"), "adamw_capturable"),
    ([Case(0, 1), Case(1, 1, "bf16")], Case(0, 1), "adamw_capturable"),
    ([Case(2, 1, "bf16"), Case(3, 2, "fp16")], Case(2, 1, "fp16", zero=PINNED), "adamw"),
    ([Case(2, 2, "bf16", zero=PINNED), Case(1, 1, "fp16")], Case(3, 1, "bf16", zero=PINNED), "adamw"),
]
"""Optimizers whose kernels, or whose step counters, are a GPU's; memory that is page-locked."""


@pytest.mark.parametrize(("cases", "target", "optimizer"), KERNELS, ids=str)
def test_kernels_of_the_device(
    cases: list[Case], target: Case, optimizer: str, resume_each: Callable[..., None]
) -> None:
    resume_each(cases, target, lambda *_: None, model="mixed", optimizer=optimizer)
