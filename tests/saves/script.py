"""Trains, saves through memory after each step, and ends or is killed."""

import json
import os
import signal
import sys

import deepspeed
import torch

from tests.saves.saving import PATIENCE

folder, memory, steps, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
config = {
    "train_batch_size": 2,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "checkpoint": {"universal": {"save": {"memory": memory, "wait_s": PATIENCE}}},
}
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)
model = torch.nn.Linear(300, 300)
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
path, state = engine.load_checkpoint(folder)
print("FOUND " + json.dumps([path, engine.global_steps, (state or {}).get("step")]), flush=True)
for _ in range(steps):
    engine.backward(engine(torch.ones(2, 300)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, client_state={"step": engine.global_steps})
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
