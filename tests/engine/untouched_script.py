"""A training script without the plugin: resumes if possible, trains a step, prints the result."""

import argparse
import json
import os
import sys

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--checkpoints")
deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(13, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
engine.load_checkpoint(args.checkpoints)
batch = torch.ones(4, 13)
loss = engine(batch).square().mean()
engine.backward(loss)
engine.step()
report = getattr(engine, "ucp_report", None)
if torch.distributed.get_rank() == 0:
    found = {
        "steps": engine.global_steps,
        "direct": None if report is None else report.direct,
        "world": torch.distributed.get_world_size(),
        "argv": sys.argv[1:],
        "main": __name__,
        "file": os.path.basename(__file__),
    }
    print("FOUND " + json.dumps(found), flush=True)
# gloo's worker aborts if the interpreter exits while it uses tensors of the step's all-gather. A barrier has no
# tensors.
torch.distributed.barrier()
torch.distributed.destroy_process_group()
