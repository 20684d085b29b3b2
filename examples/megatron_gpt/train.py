"""Train a Megatron-style GPT under any mix of tensor, pipeline, sequence and data parallelism and ZeRO.

    deepspeed --num_accelerators 8 --no_local_rank examples/megatron_gpt/train.py --preset tiny --tp 2 --pp 2 \\
        --ds-config ds_configs/megatron_zero1_pp.json --steps 200 --save checkpoints --load checkpoints

With `import deepspeed_ucp` the same command resumes under any other --tp, --pp, --sp, number of ranks and ZeRO stage.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import deepspeed
import hjson
import torch.distributed as dist
from config import PRESETS, Degrees, GPTConfig
from training import Trainer

import deepspeed_ucp  # noqa: F401 - enables the plugin; the rest of the script does not refer to it


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ds-config", required=True, help="DeepSpeed's configuration")
    add_model_arguments(parser.add_argument_group("model", "Each option replaces a value of the preset."))
    topology = parser.add_argument_group("topology")
    topology.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    topology.add_argument("--pp", type=int, default=1, help="pipeline stages")
    topology.add_argument("--sp", type=int, default=1, help="sequence-parallel ranks (Ulysses)")
    topology.add_argument("--ep", type=int, default=1, help="expert-parallel ranks (with --deepspeed-moe --plain)")
    topology.add_argument("--plain", action="store_true", help="no PipelineModule; required by ZeRO 2 and 3 and --sp")
    topology.add_argument("--partition-method", default=Degrees.partition_method, help="how layers are cut into stages")
    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, default=200, help="global step at which to stop")
    run.add_argument("--save", help="folder to save checkpoints to")
    run.add_argument("--save-interval", type=int, default=100, help="steps between checkpoints")
    run.add_argument("--load", help="folder to resume from if it has a checkpoint")
    run.add_argument("--losses", type=Path, help="JSON file of the loss by step; a resume adds to it")
    parser.add_argument("--local_rank", type=int, default=-1, help="passed by launchers; not needed")
    return parser.parse_args()


def add_model_arguments(group: Any) -> None:
    """Add an option for each field of GPTConfig."""
    group.add_argument("--preset", "--model", choices=PRESETS, default="tiny", help="preset of the model")
    for item in fields(GPTConfig):
        flag = "--" + item.name.replace("_", "-")
        if item.type == "bool":
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        else:
            group.add_argument(flag, type=int)
    group.add_argument("--gqa", dest="kv_heads", type=int, metavar="KV_HEADS", help="same as --kv-heads")
    group.add_argument("--moe", dest="experts", type=int, metavar="EXPERTS", help="same as --experts")
    group.add_argument("--make-vocab-size-divisible-by", dest="vocabulary_divisor", type=int, metavar="N")


def make_config(args: argparse.Namespace) -> GPTConfig:
    given = {item.name: getattr(args, item.name) for item in fields(GPTConfig)}
    return replace(PRESETS[args.preset], **{name: value for name, value in given.items() if value is not None})


def report(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


class Losses:
    """The loss by step, which rank 0 writes to a JSON file atomically."""

    def __init__(self, path: Path | None) -> None:
        self._path = path if dist.get_rank() == 0 else None
        self._losses = json.loads(path.read_text()) if self._path and path and path.exists() else {}

    def add(self, step: int, loss: float) -> None:
        report(f"step {step:5}  loss {loss:.6f}")
        if self._path is None:
            return
        self._losses[str(step)] = loss
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps(self._losses, indent=1))
        temporary.replace(self._path)


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed()
    ds_config = hjson.loads(Path(args.ds_config).read_text())
    degrees = Degrees(args.tp, args.pp, args.sp, not args.plain, args.partition_method, args.ep)
    trainer = Trainer(make_config(args), degrees, ds_config)
    if args.load and trainer.load(args.load):
        report(f"resumed at step {trainer.step}; {trainer.engine.ucp_report.reason}")
    losses = Losses(args.losses)
    while trainer.step < args.steps:
        loss = trainer.train_step()
        losses.add(trainer.step, loss)
        if args.save and (trainer.step % args.save_interval == 0 or trainer.step == args.steps):
            trainer.save(args.save)
    dist.barrier()  # gloo's worker may else still hold tensors when the interpreter ends, and abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
