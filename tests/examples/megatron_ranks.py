"""Functions of test_megatron_model.py that run on the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from config import Degrees, GPTConfig
from runs import gather_atoms
from training import Trainer

BATCH, STEPS = 4, 3


def train(config: GPTConfig, degrees: Degrees, stage: int) -> tuple[list[float], dict[str, Any]]:
    """Train STEPS steps; returns the losses and this rank's stage of the state."""
    clipping = {"gradient_clipping": 0.0} if config.deepspeed_moe else {}  # its norm depends on the degree
    trainer = Trainer(config, degrees, {**make_ds_config(stage), **clipping})
    losses = [trainer.train_step() for _ in range(STEPS)]
    return losses, {name: state["fp32"] for name, state in gather_atoms(trainer).items()}


def make_ds_config(stage: int) -> dict[str, Any]:
    # The steps of SGD are proportional to the gradients, so a wrong factor is visible.
    return {
        "train_batch_size": BATCH,
        "steps_per_print": 1 << 30,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
    }


def describe(config: GPTConfig, degrees: Degrees) -> dict[str, tuple[tuple[int, ...], bool, int, int]]:
    """Shape and Megatron's attributes of this rank's parameters, without an engine."""
    from gpt import GPT, make_pipeline
    from parallel import ParallelState

    parallel = ParallelState(degrees.tp, degrees.pp, degrees.sp)
    model: torch.nn.Module = (
        make_pipeline(config, parallel, degrees.partition_method) if degrees.pipeline else GPT(config, parallel)
    )
    return {
        name: (tuple(p.shape), p.tensor_model_parallel, p.partition_dim, p.partition_stride)  # type: ignore[attr-defined]
        for name, p in model.named_parameters()
    }


def save_client_state(config: GPTConfig, degrees: Degrees, folder: str) -> None:
    trainer = Trainer(config, degrees, make_ds_config(1))
    trainer.train_step()
    trainer.save(folder)
    dist.barrier()
