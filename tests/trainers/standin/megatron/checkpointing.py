"""Saves and loads."""

import random
from argparse import Namespace
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from .global_vars import get_args

TRACKER = "model-parallel-rng"


def seed_tensor_ranks(seed: int) -> None:
    """Each tensor-parallel rank draws apart."""
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(TRACKER, seed + 2718 + get_args().tensor_rank)


def save_checkpoint(iteration: int, model: list[Any], client_state: dict[str, Any]) -> None:
    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),  # noqa: NPY002
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": get_accelerator().get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }
    held = {"args": get_args(), "iteration": iteration, "rng_state": [states]}
    model[0].save_checkpoint(get_args().save, client_state={**client_state, **held})


def check_checkpoint_args(saved: Namespace) -> None:
    args = get_args()
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        assert getattr(saved, name) == getattr(args, name), name
    if not args.universal_checkpoint:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            message = f"{name} value from checkpoint ({getattr(saved, name)}) is not equal to the input argument value"
            assert getattr(saved, name) == getattr(args, name), message


def load_checkpoint(model: list[Any], _optimizer: Any, _scheduler: Any, strict: bool = True) -> int:
    args = get_args()
    path, state = model[0].load_checkpoint(args.load, load_module_strict=strict, tag=None)
    if path is None:
        return 0
    check_checkpoint_args(state["args"])
    args.consumed_train_samples = state["args"].consumed_train_samples
    (states,) = state["rng_state"]
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])  # noqa: NPY002
    torch.set_rng_state(states["torch_rng_state"])
    get_accelerator().set_rng_state(states["cuda_rng_state"])
    get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
    if args.universal_checkpoint:
        degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        if any(getattr(args, name) != getattr(state["args"], name) for name in degrees):
            seed_tensor_ranks(args.seed + state["iteration"])
    return int(state["iteration"])
