"""Train the byte-level GPT with DeepSpeed. `import deepspeed_ucp` alone makes this ordinary script elastic.

    deepspeed --num_accelerators 4 --no_local_rank examples/byte_gpt/train.py \\
        --deepspeed_config ds_config.json --steps 100 --checkpoint_dir checkpoints --save_every 20

With `"checkpoint": {"universal": true}` in ds_config.json the same command resumes under any other number of ranks and
any other ZeRO stage. The text is the source code of the Python standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from model import ByteGPT, GPTConfig

import deepspeed_ucp  # noqa: F401  (installs the hook; the rest of the script is unchanged)

HELD_OUT_EVERY = 10  # every tenth file is never trained on
HELD_OUT_SAMPLES = 48


def read_corpus() -> tuple[np.ndarray, np.ndarray]:
    """The standard library's top-level modules in the order of their names, as (training, held-out) uint8 arrays."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    training = b"".join(file.read_bytes() for i, file in enumerate(files) if i % HELD_OUT_EVERY)
    held_out = b"".join(file.read_bytes() for file in files[::HELD_OUT_EVERY])
    return np.frombuffer(training, dtype=np.uint8), np.frombuffer(held_out, dtype=np.uint8)


def sample(text: np.ndarray, key: tuple[int, int], count: int, context: int) -> torch.Tensor:
    """`count` windows of `text` of context + 1 bytes, int64; a pure function of `key`, so the same for any world."""
    generator = np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))
    starts = generator.integers(0, len(text) - context - 1, size=count)
    return torch.from_numpy(np.stack([text[s : s + context + 1] for s in starts]).astype(np.int64))


def my_slice(samples: torch.Tensor) -> torch.Tensor:
    """This rank's contiguous part of a global batch."""
    share = len(samples) // dist.get_world_size()
    return samples[dist.get_rank() * share :][:share]


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean over data-parallel ranks, summed in fp64 so that the order of ranks does not matter."""
    total = value.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train_step(engine: Any, samples: torch.Tensor) -> float:
    """One optimizer step on this rank's share of the global batch; the loss over the whole global batch."""
    losses = []
    for micro in samples.split(engine.train_micro_batch_size_per_gpu()):
        loss = engine(micro[:, :-1], micro[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return mean_over_ranks(torch.stack(losses).mean())


@torch.no_grad()
def held_out_loss(engine: Any, text: np.ndarray, context: int) -> float:
    """Mean loss over a fixed set of windows of text that was never trained on."""
    mine = my_slice(sample(text, (0, 0), HELD_OUT_SAMPLES, context))
    return mean_over_ranks(engine(mine[:, :-1], mine[:, 1:]))


def digest(engine: Any) -> dict[str, str]:
    """SHA-256 of every whole fp32 master and moment, gathered by DeepSpeed's public functions; keys `parameter/state`.

    Zero is added to each value first: the gathering of ZeRO 1 and 2 is a sum over ranks and loses the sign of a zero,
    that of ZeRO 3 keeps it.
    """
    digests = {}
    for name, parameter in engine.module.named_parameters():
        states = {"fp32": safe_get_full_fp32_param(parameter)}
        states |= {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
        for state, value in states.items():
            content = (value.detach().float() + 0.0).contiguous().numpy().tobytes()
            digests[f"{name}/{state}"] = hashlib.sha256(content).hexdigest()
    return digests


class Log:
    """JSON lines written by rank 0 without buffering, so a killed run keeps all of them."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def write(self, event: str, **fields: object) -> None:
        if dist.get_rank() != 0:
            return
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields})
        if self._path is None:
            print(line, flush=True)
            return
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def describe_load(engine: Any, path: str | None, seconds: float) -> dict[str, object]:
    """Describe the load for the log."""
    report = getattr(engine, "ucp_report", None)
    return {
        "path": path,
        "seconds": round(seconds, 3),
        "by_plugin": bool(report is not None and report.direct),
        "reason": report.reason if report is not None else "",
    }


def save(engine: Any, log: Log, directory: str, with_digest: bool) -> None:
    if with_digest:
        log.write("digest", when="saved", step=engine.global_steps, atoms=digest(engine))
    engine.save_checkpoint(directory)
    log.write("saved", step=engine.global_steps)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on the standard library's sources.")
    parser.add_argument("--steps", type=int, default=100, help="global step at which to stop")
    parser.add_argument("--checkpoint_dir", default="checkpoints", help="where to resume from and to save to")
    parser.add_argument("--save_every", type=int, default=0, help="steps between checkpoints; 0 saves none")
    parser.add_argument("--log", help="append JSON lines to this file instead of writing them to stdout")
    parser.add_argument("--digest", action="store_true", help="log a SHA-256 of every atom when it is loaded or saved")
    parser.add_argument("--seed", type=int, default=1, help="of the initial weights and of the order of the text")
    parser.add_argument("--local_rank", type=int, default=-1, help="passed by launchers; not needed")
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = ByteGPT(GPTConfig())
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    log = Log(args.log)
    log.write("started", ranks=dist.get_world_size(), stage=engine.zero_optimization_stage())

    began = time.perf_counter()
    path, _ = engine.load_checkpoint(args.checkpoint_dir)
    log.write("loaded", step=engine.global_steps, **describe_load(engine, path, time.perf_counter() - began))
    if args.digest and path:
        log.write("digest", when="loaded", step=engine.global_steps, atoms=digest(engine))

    training, held_out = read_corpus()
    context = model.config.context
    while engine.global_steps < args.steps:
        batch = sample(training, (args.seed, engine.global_steps + 1), engine.train_batch_size(), context)
        loss = train_step(engine, my_slice(batch))
        log.write("step", step=engine.global_steps, loss=loss)
        if args.save_every and engine.global_steps % args.save_every == 0:
            save(engine, log, args.checkpoint_dir, args.digest)
    log.write("finished", step=engine.global_steps, held_out_loss=held_out_loss(engine, held_out, context))
    dist.barrier()  # gloo's worker may else still hold tensors when the interpreter ends, and abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
