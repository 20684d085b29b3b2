"""Features of GPUs: page-locked staging and streams, NCCL, random states of devices, and real kernels.

`make test-gpu` runs this and the other tests of engines with `DS_ACCELERATOR=cuda`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import ANY

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ucp.load import destinations
from deepspeed_ucp.testing import WorldPool
from tests.support.engines.cases import MIXED, Case
from tests.support.engines.driver import Engines, Row

pytestmark = pytest.mark.skipif(os.environ.get("DS_ACCELERATOR") != "cuda", reason="`make test-gpu` runs these tests")

WIDTH = 2048


def make_large(stage: int, layers: int, seed: int, options: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(seed)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"universal": options or True},
    }
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def train_large(engine: Any) -> None:
    batch = torch.randn(2, WIDTH, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(batch).float().square().mean())
    engine.step()


def read_whole(engine: Any) -> list[Tensor]:
    """Read whole masters and moments of all layers on the GPU, in the order of the parameters."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    parameters = list(engine.module.parameters())
    states = [safe_get_full_fp32_param(each).clone() for each in parameters]
    for name in ("exp_avg", "exp_avg_sq"):
        states += [safe_get_full_optimizer_state(each, name).clone() for each in parameters]
    return states


def save(folder: str, stage: int, layers: int) -> list[float]:
    """Train and save. Return a sum of each state, to show that the states changed."""
    engine = make_large(stage, layers, seed=1)
    train_large(engine)
    engine.save_checkpoint(folder)
    states = read_whole(engine)
    if dist.get_rank() == 0:
        torch.save([state.cpu() for state in states], f"{folder}/truth.pt")
    engine.destroy()
    return [state.double().sum().item() for state in states]


def load(folder: str, stage: int, layers: int, options: dict[str, Any], *, pinned: bool = True) -> Any:
    """Load into an engine. Return if all bits are restored, classes that copied, temporary bytes of GPU memory."""
    engine = make_large(stage, layers, seed=7, options={"mode": "direct", **options})
    found: list[str] = []
    choose = destinations.choose_device_copies

    def note(*args: Any) -> Any:
        made = choose(*args)
        found.append(type(made).__name__)
        return made

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    refuse = mock.patch.object(destinations, "_allocate_pinned", side_effect=RuntimeError("no memory can be locked"))
    with mock.patch("deepspeed_ucp.load.transfer.choose_device_copies", note), nullcontext() if pinned else refuse:
        engine.load_checkpoint(folder)
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())
    truth = torch.load(f"{folder}/truth.pt")
    equal = all(torch.equal(state.cpu(), true) for state, true in zip(read_whole(engine), truth, strict=True))
    lowered = all(
        torch.equal(own.cpu(), true.to(torch.bfloat16))
        for own, true in zip(_gather(engine), truth[: 2 * layers], strict=True)
    )
    train_large(engine)
    backend = dist.get_backend()
    engine.destroy()
    return {"equal": equal and lowered, "by": found, "beyond": beyond, "backend": backend}


def _gather(engine: Any) -> list[Tensor]:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters([each for each in parameters if hasattr(each, "ds_id")]):
        return [each.detach().clone() for each in parameters]


# --- tests

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
    (sums,) = ucp_worlds.get(1).run(save, folder, 1, LAYERS)
    assert all(sums[:LAYERS])
    return folder


@pytest.mark.parametrize(("stage", "ranks", "options", "pinned"), LOADS, ids=str)
def test_a_large_model_is_restored_to_the_bit_on_gpus(
    stage: int, ranks: int, options: dict[str, Any], pinned: bool, saved: str, ucp_worlds: WorldPool
) -> None:
    """A load of 50 M parameters uses up to 128 MiB of temporary GPU memory, for any window."""
    for found in ucp_worlds.get(ranks).run(load, saved, stage, LAYERS, options, pinned=pinned):
        assert found["equal"]
        assert set(found["by"]) == {"AsyncGpuCopies"}
        assert found["beyond"] < 160 << 20
        assert found["backend"] == ("nccl" if ranks == 1 else "host")


@pytest.fixture(scope="module")
def cpus() -> Iterator[WorldPool]:
    with WorldPool(env={"DS_ACCELERATOR": "cpu"}) as pool:
        yield pool


def test_a_run_moves_from_cpus_to_gpus_and_back(
    cpus: WorldPool, engines: Engines, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    sources = [Case(1, 4, "bf16"), Case(3, 2, "bf16"), Case(0, 1, "bf16"), Case(2, 3)]
    targets = [Case(0, 1, "bf16"), Case(3, 1, "bf16"), Case(2, 2, "bf16")]
    for here, there in ((Engines(cpus, tmp_path), engines), (engines, Engines(cpus, tmp_path))):
        runs = [here.saved(source, **MIXED) for source in sources]
        for target in targets:
            for run, outcome in zip(runs, there.load(target, *runs, **MIXED), strict=True):
                with subtests.test(source=str(run.kind), target=str(target)):
                    outcome.check(run, direct=ANY, tolerance=0.05)


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
"""Optimizers with kernels or step counters on the GPU, and page-locked memory."""


@pytest.mark.parametrize(("cases", "target", "optimizer"), KERNELS, ids=str)
def test_optimizers_with_kernels_of_the_device_resume(
    cases: list[Case], target: Case, optimizer: str, engines: Engines, subtests: pytest.Subtests
) -> None:
    engines.resume(Row(target, cases, options={"optimizer": optimizer}, compared={"direct": ANY}), subtests)
