"""A job with data-loader workers, which wait for the third sample until a test makes the file FOLDER/gate.

``preempted_script.py FOLDER``; the folder gets the saves and a file for each step.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

FEATURES, FOLDER = 8, Path(sys.argv[-1])


class Gated(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, sample: int) -> torch.Tensor:
        until = time.monotonic() + 240
        while sample >= 2 and not (FOLDER / "gate").exists():
            assert time.monotonic() < until, "the gate did not open"
            time.sleep(0.01)
        return torch.full((FEATURES,), float(sample))


def main() -> None:
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None  # it compiles for a minute
    import deepspeed
    import torch.distributed as dist

    from deepspeed_ucp import preemption

    deepspeed.init_distributed("gloo")
    adam = {"type": "Adam", "params": {"torch_adam": True}}  # the fused one would be compiled
    config = {"train_batch_size": 2, "optimizer": adam, "zero_optimization": {"stage": 1}}
    model = torch.nn.Linear(FEATURES, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    preemption.follow(engine, FOLDER / "saves")
    loader: DataLoader[torch.Tensor] = DataLoader(Gated(), 1, num_workers=2, persistent_workers=True)
    # This reference lives until the interpreter exits.
    globals()["batches"] = batches = iter(loader)
    for sample in batches:
        engine.backward(engine(sample).square().mean())
        engine.step()
        (FOLDER / f"step{engine.global_steps}-{dist.get_rank()}").touch()


if __name__ == "__main__":
    main()
