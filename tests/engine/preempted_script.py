"""A job with data loaders, a helper process and a program; files of the test let it continue.

``preempted_script.py FOLDER METHOD …``; the folder gets the saves and a file for each event. The methods start
the workers of the evaluation.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

FEATURES, LONGEST = 8, 240.0


def wait_for(path: Path) -> None:
    until = time.monotonic() + LONGEST
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.01)


class Gated(Dataset[torch.Tensor]):
    """Samples of which those from ``closed`` on wait for the gate's file."""

    def __init__(self, gate: Path, closed: int) -> None:
        self.gate, self.closed = gate, closed

    def __len__(self) -> int:
        return 6

    def __getitem__(self, sample: int) -> torch.Tensor:
        if sample >= self.closed:
            wait_for(self.gate)
        return torch.full((FEATURES,), float(sample))


def answer(connection: Connection) -> None:
    while True:
        connection.send(connection.recv() + 1)


def main() -> None:
    folder = Path(sys.argv[1])
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None  # it compiles for a minute
    import deepspeed
    import torch.distributed as dist

    from deepspeed_ucp import preemption

    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()

    def report(event: str, text: object = "") -> None:
        part = folder / f"{event}-{rank}.part"
        part.write_text(str(text))
        part.rename(folder / f"{event}-{rank}")

    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}
    model = torch.nn.Linear(FEATURES, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    preemption.follow(engine, folder / "saves")

    def step(sample: torch.Tensor) -> None:
        engine.backward(engine(sample).square().mean())
        engine.step()

    receiver, sender = multiprocessing.get_context("fork").Pipe()
    multiprocessing.get_context("fork").Process(target=answer, args=(sender,), daemon=True).start()
    program = subprocess.Popen(["sleep", "600"])
    training: Any = DataLoader(Gated(folder / "train", 2), 1, num_workers=2, persistent_workers=True)
    # This reference lives until the interpreter exits.
    globals()["batches"] = batches = iter(training)
    step(next(batches))
    step(next(batches))
    report("evaluates", os.getpid())
    evaluation = [
        DataLoader(Gated(folder / "evaluate", 1), 1, num_workers=1, multiprocessing_context=method)
        for method in sys.argv[2:]
    ]
    for pair in zip(*evaluation, strict=True):
        with torch.no_grad():
            engine(torch.cat(pair))
        if pair[0][0, 0]:
            preemption.save_if_signaled(engine)
        else:
            report("waits")
    report("program", program.wait())
    receiver.send(1)
    report("helper", receiver.recv())
    report("trains", os.getpid())
    for sample in batches:
        receiver.send(engine.global_steps)
        assert receiver.recv() == engine.global_steps + 1
        step(sample)
    report("ended")


if __name__ == "__main__":
    main()
