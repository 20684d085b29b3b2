"""Functions of the tests of random states that run on the ranks. Imported on the ranks only."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_ucp.model import SavedJob
from deepspeed_ucp.trainers import accelerating, huggingface
from deepspeed_ucp.trainers.randomness import restore_ranks

SAVED = {"hf": ("python", "numpy", "cpu"), "accelerate": ("random_state", "numpy_random_seed", "torch_manual_seed")}


def save(folder: str, kind: str, ranks: int) -> None:
    """Write the files of all ranks of a job, as the trainers do."""
    for rank in range(ranks):
        seed(1000 * ranks + rank)
        states = dict(zip(SAVED[kind], (random.getstate(), np.random.get_state(), torch.get_rng_state()), strict=True))  # noqa: NPY002
        names = {
            "hf": f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth",
            "accelerate": f"random_states_{rank}.pkl",
        }
        torch.save(states, os.path.join(folder, names[kind]))


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002
    torch.manual_seed(value)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()  # noqa: NPY002


def restore(folder: str, kind: str, ranks: int) -> tuple[float, ...]:
    """Restore the states of a number of ranks; returns numbers that this rank draws then."""
    from types import SimpleNamespace

    engine: Any = SimpleNamespace(seq_data_parallel_group=dist.group.WORLD, mp_world_size=1)
    seed(77)
    read = (
        partial(huggingface.read_random, folder, ranks) if kind == "hf" else partial(accelerating.read_random, folder)
    )
    restore_ranks(engine, folder, SavedJob(ranks, 1, 6, 8, 1), read)
    return draw()
