"""A training job that can be killed at any moment and resumes on any number of ranks.

`demo.py` runs it under torchrun, the tests of ../platforms under other launchers. The model and the text are those of
../byte_gpt. The order of the samples does not depend on the number of ranks, random states are part of the checkpoint,
and SIGTERM (torchrun sends it when an agent joins) makes all ranks save first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "byte_gpt"))

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from model import ByteGPT, GPTConfig
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, Dataset
from train import read_corpus

from deepspeed_ucp import preemption, rng, snapshots
from deepspeed_ucp.data import ElasticSampler

SIZES = GPTConfig(context=64, width=64, layers=2)
CONFIG = {
    "train_batch_size": 16,
    "steps_per_print": 1 << 30,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
}
IN_MEMORY = {
    "save": {"memory": "$NODE_MEMORY", "copies": 1},
    "same_topology": "direct",  # its report lists each file
}


class Windows(Dataset[tuple[int, torch.Tensor]]):
    """Windows of a text, with their numbers."""

    def __init__(self, text: np.ndarray, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        window = self.text[number * self.context :][: self.context + 1]
        return number, torch.from_numpy(window.astype(np.int64))


class Log:
    """Writes JSON lines without buffering."""

    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, event: str, **fields: object) -> None:
        line = json.dumps({"event": event, "time": time.time(), "rank": dist.get_rank(), **fields})
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def build(seed: int, *, in_memory: bool, hang: float) -> Any:
    torch.manual_seed(seed)
    model = ByteGPT(SIZES)
    universal = {"fallback": True, "seal": True, "hang_timeout_s": hang, **(IN_MEMORY if in_memory else {})}
    config = {**CONFIG, "checkpoint": {"universal": universal}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train_step(engine: Any, batches: Any, log: Log) -> None:
    """Take a step. Log the loss of the total batch, and the sum of its samples' numbers, which identifies them."""
    totals = torch.zeros(2, dtype=torch.float64)
    for _ in range(engine.gradient_accumulation_steps()):
        numbers, window = next(batches)
        loss = engine(window[:, :-1], window[:, 1:])
        engine.backward(loss)
        totals += torch.tensor([loss.item(), float(numbers.sum())], dtype=torch.float64)
        if engine.is_gradient_accumulation_boundary():  # before the step, since this process may exit at its end
            log_step(engine, totals, log)
        engine.step()


def log_step(engine: Any, totals: torch.Tensor, log: Log) -> None:
    dist.all_reduce(totals)
    world = dist.get_world_size()
    if dist.get_rank() == 0:
        loss = totals[0].item() / world / engine.gradient_accumulation_steps()
        log.write("step", step=engine.global_steps + 1, loss=loss, samples=int(totals[1]), world=world)


@record  # torchrun prints the first failure of all ranks
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--folder", required=True, help="folder of the checkpoints")
    parser.add_argument("--record", required=True)
    parser.add_argument("--save_every", type=int, default=10, help="steps between saves to the folder; 0: never")
    parser.add_argument("--snapshot_every", type=int, default=0, help="steps between saves into memory; 0: never")
    parser.add_argument("--pace", type=Path, help="file with the minimum seconds per step, read at each step")
    parser.add_argument("--hang", type=float, default=1800, help="seconds without progress before a rank is killed")
    args = parser.parse_args()
    deepspeed.init_distributed()
    log = Log(args.record)
    engine = build(seed=1, in_memory=args.snapshot_every > 0, hang=args.hang)
    text = Windows(read_corpus()[0], SIZES.context)
    sampler = ElasticSampler(text, engine.train_batch_size(), rank=dist.get_rank(), world=dist.get_world_size())
    sampler.follow(engine)
    rng.follow(engine)
    preemption.follow(engine, args.folder)
    if args.snapshot_every:
        snapshots.follow(engine, args.folder, every=args.snapshot_every)
    log.write("started", pid=os.getpid(), world=dist.get_world_size())
    engine.load_checkpoint(args.folder)
    read = {path: count for path, (count, _) in engine.ucp_report.files.items()} if engine.ucp_report else {}
    log.write("loaded", step=engine.global_steps, world=dist.get_world_size(), read=read)
    batches = iter(DataLoader(text, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler))
    try:
        train(engine, batches, log, args)
    except SystemExit:  # after the save on SIGTERM
        leave()
        raise
    leave()


def train(engine: Any, batches: Any, log: Log, args: argparse.Namespace) -> None:
    while engine.global_steps < args.steps:
        began = time.monotonic()
        train_step(engine, batches, log)
        if args.save_every and engine.global_steps % args.save_every == 0:
            engine.save_checkpoint(args.folder)
        if args.pace:
            time.sleep(max(0.0, float(args.pace.read_text()) - (time.monotonic() - began)))


def leave() -> None:
    """Destroy the process group on all ranks together; otherwise gloo may abort at the end of the interpreter."""
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
