"""Engines whose model is Megatron-Core's own GPT, which go on from its checkpoints; run on the ranks of a world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from deepspeed_ucp.testing.capture import CapturedEngine, capture
from tests.export.foreign_run import Lines, make_engine
from tests.support import mcore


def go_on(
    folder: str,
    model: str,
    stages: tuple[int, ...],
    steps: range,
    *,
    tp: int = 1,
    precision: str = "",
    load: dict[str, Any] | None = None,
    **changes: Any,
) -> list[tuple[CapturedEngine, list[float], list[str], tuple[Any, Any]]]:
    """Load into engines of some stages, and train; of each what it held, its losses, what was logged, what came back.

    Args:
        tp: degree of tensor parallelism.
        precision: section of the ds_config that is enabled.
        load: more of what ``load_checkpoint`` takes.
        changes: of the model's arguments.
    """
    found = []
    for stage in stages:
        with mcore.join_groups(tp=tp):
            dtype = {"bf16": torch.bfloat16}.get(precision, torch.float32)
            args = mcore.make_args(model, tp=tp, params_dtype=dtype, **changes)
            engine = start(args, stage, precision)
            with Lines() as heard:
                loaded = engine.load_checkpoint(folder, **(load or {}))
            state, losses = capture(engine), []
            for step in steps:
                loss = engine(**mcore.make_batch(args, step)).float().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            found.append((state, losses, heard.lines, loaded))
            engine.destroy()
    return found


def start(args: Any, stage: int, precision: str = "") -> Any:
    """An engine of a model with other weights, and Megatron's param groups."""
    module = mcore.build(args, seed=7)
    params = [*module.parameters()]
    groups = [{"params": [each for each in params if (each.dim() == 1) == is_vector]} for is_vector in (False, True)]
    optimizer = torch.optim.AdamW(groups, lr=1e-5)
    mpu = make_mpu() if args.tensor_model_parallel_size > 1 else None
    return make_engine(module, optimizer, stage, precision=precision, mpu=mpu, patterns="mcore-local")


def make_mpu() -> SimpleNamespace:
    """From which DeepSpeed learns of Megatron-Core's groups."""
    from megatron.core import parallel_state

    mpu = SimpleNamespace()
    for name in ("rank", "world_size", "group"):
        for kind in ("data_parallel", "tensor_model_parallel", "pipeline_model_parallel"):
            setattr(mpu, f"get_{kind}_{name}", getattr(parallel_state, f"get_{kind}_{name}"))
        setattr(mpu, f"get_model_parallel_{name}", getattr(mpu, f"get_tensor_model_parallel_{name}"))
    return mpu
