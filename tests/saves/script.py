"""Trains, saves through memory after each step or by snapshots, and ends or is killed."""

import hashlib
import json
import os
import signal
import sys

import deepspeed
import torch

from deepspeed_ucp import snapshots
from tests.saves.saving import PATIENCE

folder, memory, steps, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
every = int(sys.argv[5]) if len(sys.argv) > 5 else 0
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
if every:
    snapshots.follow(engine, folder, every=every, client_state=lambda: {"step": engine.global_steps})
path, state = engine.load_checkpoint(folder)
print("FOUND " + json.dumps([path, engine.global_steps, (state or {}).get("step")]), flush=True)
for _ in range(steps):
    engine.backward(engine(torch.ones(2, 300)).square().mean())
    engine.step()
    if not every:
        engine.save_checkpoint(folder, client_state={"step": engine.global_steps})
print("WEIGHTS " + hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
