"""Train with DeepSpeed under Ray Train on the available workers: `python train.py --storage /shared/runs`.

Each worker runs `train`, which does not import deepspeed_ucp: an environment variable enables the plugin. Each start
loads the last checkpoint, which any number of workers may have saved.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

import deepspeed
import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

CONFIG = {
    "train_batch_size": 16,  # of all workers; the micro batch follows from their number
    "steps_per_print": 1 << 30,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 0.0,
}


def train(settings: dict[str, Any]) -> None:
    """Train on a worker. Ray restarts all workers unless this function returns."""
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        engine.load_checkpoint(find_place(checkpoint))
    leaving: set[str] = set()
    while engine.global_steps < settings["steps"]:
        began = time.monotonic()
        loss = train_step(engine)
        record(settings["record"], step=engine.global_steps, loss=loss)
        notice = ray.train.get_preemption_info()  # a barrier; all workers get the same result
        news = set(notice.preempted_node_ids) - leaving if notice else set()
        leaving |= news
        if news or engine.global_steps % settings["save_every"] == 0:
            save(engine, loss)
        time.sleep(max(0.0, settings["pace"] - (time.monotonic() - began)))


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def draw_samples(step: int) -> torch.Tensor:
    """Return the total batch of a step, the same for any number of workers."""
    return torch.randn(CONFIG["train_batch_size"], 32, generator=torch.Generator().manual_seed(step))


def find_loss(model: Any, samples: torch.Tensor) -> torch.Tensor:
    return (model(samples) - samples.sin().sum(1, keepdim=True)).square().mean()


def train_step(engine: Any) -> float:
    """Take a step. Return the loss of the total batch."""
    context, total = ray.train.get_context(), 0.0
    mine = draw_samples(engine.global_steps).chunk(context.get_world_size())[context.get_world_rank()]
    parts = mine.to(engine.device).chunk(engine.gradient_accumulation_steps())
    for part in parts:
        loss = find_loss(engine, part)
        engine.backward(loss)
        engine.step()
        total += loss.item() / len(parts)
    mean = torch.tensor(total, device=engine.device) / context.get_world_size()
    torch.distributed.all_reduce(mean)
    return float(mean)


def save(engine: Any, loss: float) -> None:
    """Save each worker's files to a temporary folder; Ray copies them to a folder of its storage and publishes it."""
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        metrics = {"step": engine.global_steps, "loss": loss}
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def find_place(checkpoint: Checkpoint) -> str:
    """Return the path or URL of the checkpoint in Ray's storage, where the workers read it without a copy."""
    schemes = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "abfs://"}
    return schemes[checkpoint.filesystem.type_name] + checkpoint.path


def record(path: str, **fields: Any) -> None:
    """Append a JSON line on the first worker."""
    context = ray.train.get_context()
    if path and context.get_world_rank() == 0:
        with open(path, "a", encoding="utf-8") as file:
            line = {"time": time.time(), "world": context.get_world_size(), "pid": os.getpid(), **fields}
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="shared folder, or URL that Ray can write to")
    parser.add_argument("--name", default="elastic", help="name of the run; an existing run continues")
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 2), metavar=("MIN", "MAX"))
    parser.add_argument("--gpus", action="store_true", help="one GPU per worker")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save_every", type=int, default=20, help="steps between saves")
    parser.add_argument("--pace", type=float, default=0.0, help="minimum seconds per step")
    parser.add_argument("--record", default="", help="file for the losses, as JSON lines")
    parser.add_argument("--look_every", type=float, default=60.0, help="seconds between checks for new nodes")
    args = parser.parse_args()
    variables = {"DEEPSPEED_UCP": "1"} | ({} if args.gpus else {"DS_ACCELERATOR": "cpu"})
    # Seconds that Ray waits for a lost node before it starts on the others (default 60).
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "30")
    ray.init(runtime_env={"env_vars": variables})
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(args),
        torch_config=TorchConfig(backend="nccl" if args.gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=tuple(args.workers),
            use_gpu=args.gpus,
            elastic_resize_monitor_interval_s=args.look_every,
        ),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage,
            failure_config=FailureConfig(max_failures=100),  # counts each end of a worker except a return
        ),
    )
    result = trainer.fit()
    print(f"trained to step {args.steps}; last checkpoint: {result.checkpoint.path if result.checkpoint else None}")


if __name__ == "__main__":
    main()
