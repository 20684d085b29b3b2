"""How long training stands still for a save: DeepSpeed's own, ours by way of memory, and one copy of the state.

``python bench/saves.py [--params-m 150] [--ranks 4] [--rounds 5]``, interleaved on one engine, medians. *Until durable*
is from there to a seal in the folder, of ours; of DeepSpeed's own save, which leaves that to the system, a ``sync``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from deepspeed_ucp.testing import World  # noqa: E402

WIDTH = 2048


def make_engine(params_m: int, memory: str) -> Any:
    """An engine at ZeRO-1 in bf16."""
    import deepspeed
    import torch

    layers = params_m * 10**6 // WIDTH**2
    module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"universal": {"save": {"memory": memory}}},
    }
    return deepspeed.initialize(model=module, optimizer=torch.optim.AdamW(module.parameters()), config=config)[0]


def measure(params_m: int, rounds: int, folder: str, memory: str) -> list[dict[str, float]]:
    """Seconds of each kind, by round; all ranks wait for each other around it."""
    import torch
    import torch.distributed as dist

    import deepspeed_ucp
    from deepspeed_ucp.saves.saver import finish_saves

    engine, found, held = make_engine(params_m, memory), list[dict[str, float]](), dict[int, torch.Tensor]()

    def copy() -> None:
        flat = engine.optimizer.single_partition_of_fp32_groups[0]
        state = engine.optimizer.optimizer.state[flat]
        tensors = [flat, state["exp_avg"], state["exp_avg_sq"]]
        for index, tensor in enumerate([*tensors, *(engine.module.parameters() if dist.get_rank() == 0 else ())]):
            held.setdefault(index, torch.empty_like(tensor)).copy_(tensor.detach())

    def save_own() -> None:
        deepspeed_ucp.uninstall()
        engine.save_checkpoint(f"{folder}/own", tag=f"step{len(found) % 2}")
        deepspeed_ucp.install()

    kinds = {
        "one copy": copy,
        "DeepSpeed's own": save_own,
        "  sync": lambda: os.sync() if dist.get_rank() == 0 else None,
        "ours": lambda: engine.save_checkpoint(f"{folder}/ours"),
        "  until durable": lambda: finish_saves(engine),
    }
    for _ in range(rounds + 1):
        engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        found.append({})
        for name, work in kinds.items():
            dist.barrier()
            start = time.perf_counter()
            work()
            dist.barrier()
            found[-1][name] = time.perf_counter() - start
    engine.destroy()
    return found[1:]  # the first one's memory is new


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params-m", type=int, default=150)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    memory = tempfile.mkdtemp(prefix="ucp-bench-", dir="/dev/shm")
    with tempfile.TemporaryDirectory(prefix="ucp-bench-", dir=ROOT) as folder, World(args.ranks, timeout=900) as world:
        found = world.run(measure, args.params_m, args.rounds, folder, memory)[0]
    shutil.rmtree(memory)
    floor = statistics.median(each["one copy"] for each in found)
    print(f"{args.params_m} M parameters, ZeRO-1 bf16, {args.ranks} ranks, {args.rounds} rounds; seconds, ÷ one copy")
    for name in found[0]:
        values = sorted(each[name] for each in found)
        median = statistics.median(values)
        print(f"{name:18} {median:6.2f} ({values[0]:.2f}-{values[-1]:.2f}) {median / floor:6.1f}")


if __name__ == "__main__":
    main()
