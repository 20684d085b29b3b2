"""What ranks do with a large model on GPUs. Imported on the ranks only."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ucp.load import uploads

WIDTH = 2048


def make(stage: int, layers: int, seed: int, options: dict[str, Any] | None = None, **config: Any) -> Any:
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
        **config,
    }
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def train(engine: Any) -> None:
    batch = torch.randn(2, WIDTH, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(batch).float().square().mean())
    engine.step()


def read_whole(engine: Any) -> list[Tensor]:
    """Masters and moments of all layers, whole, on the GPU, in the order of the parameters."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    parameters = list(engine.module.parameters())
    states = [safe_get_full_fp32_param(each).clone() for each in parameters]
    for name in ("exp_avg", "exp_avg_sq"):
        states += [safe_get_full_optimizer_state(each, name).clone() for each in parameters]
    return states


def save(folder: str, stage: int, layers: int) -> list[float]:
    """A sum of each state, as a sign that they differ from what an engine begins with."""
    engine = make(stage, layers, seed=1)
    train(engine)
    engine.save_checkpoint(folder)
    states = read_whole(engine)
    if dist.get_rank() == 0:
        torch.save([state.cpu() for state in states], f"{folder}/truth.pt")
    engine.destroy()
    return [state.double().sum().item() for state in states]


def load(folder: str, stage: int, layers: int, options: dict[str, Any], *, pinned: bool = True, **config: Any) -> Any:
    """Load into an engine of other weights.

    Returns:
        Whether every bit is there, what copied, seconds, and the GPU memory that the load took for a while, in bytes
        beyond what the engine held before or after it.
    """
    engine = make(stage, layers, seed=7, options={"mode": "direct", **options}, **config)
    found: list[str] = []
    choose = uploads.choose_uploads

    def note(*args: Any) -> Any:
        made = choose(*args)
        found.append(type(made).__name__)
        return made

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    refuse = mock.patch.object(uploads, "_allocate_pinned", side_effect=RuntimeError("no memory can be locked"))
    start = time.perf_counter()
    with mock.patch("deepspeed_ucp.load.exchange.choose_uploads", note), nullcontext() if pinned else refuse:
        engine.load_checkpoint(folder)
    torch.cuda.synchronize()
    seconds, held = time.perf_counter() - start, torch.cuda.memory_allocated()
    beyond = torch.cuda.max_memory_allocated() - max(before, held)
    truth = torch.load(f"{folder}/truth.pt")
    equal = all(torch.equal(state.cpu(), true) for state, true in zip(read_whole(engine), truth, strict=True))
    lowered = all(
        torch.equal(own.cpu(), true.to(torch.bfloat16))
        for own, true in zip(_gather(engine), truth[: 2 * layers], strict=True)
    )
    train(engine)
    backend = dist.get_backend()
    engine.destroy()
    return {"equal": equal and lowered, "by": found, "s": seconds, "beyond": beyond, "backend": backend}


def _gather(engine: Any) -> list[Tensor]:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters([each for each in parameters if hasattr(each, "ds_id")]):
        return [each.detach().clone() for each in parameters]
