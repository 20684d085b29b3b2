"""The job of the suite `restart`: it resumes where it can, trains, saves once, and goes on until it is killed; with
DeepSpeed's load it takes one step."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("save", "ours", "upstream"), required=True)
    parser.add_argument("--params_m", type=float, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args()
    if args.how == "ours":
        import deepspeed_ucp  # noqa: F401
    import torch
    import torch.distributed as dist
    from engines import Engine, build_model, initialise

    def record(event: str) -> None:
        if dist.get_rank() == 0:
            with args.record.open("a") as file:
                file.write(json.dumps({"event": event, "time": time.time()}) + "\n")

    checkpoint = {"ours": {"universal": True}, "upstream": {"load_universal": True}}.get(args.how, {})
    engine = initialise(Engine(0, 1, checkpoint), build_model(args.params_m))
    record("started")
    if args.how != "save" and engine.load_checkpoint(args.folder)[0] is None and args.how == "upstream":
        raise SystemExit("nothing was loaded")
    record("loaded")
    while True:
        engine.backward(engine(torch.tensor(1e-2)))
        engine.step()
        dist.barrier()
        record("step")
        if args.how == "upstream":
            break
        if engine.global_steps == 1:
            engine.save_checkpoint(args.folder)
            record("saved")
        time.sleep(0.2)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
