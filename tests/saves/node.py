"""Trains as the only rank of a node, saving with copies after each step, which begins when a file is there."""

import json
import os
import sys
import time
import zlib

import deepspeed
import torch

import deepspeed_ucp  # noqa: F401 - the plugin

folder, memory, go, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
config = {
    "train_batch_size": 2,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "checkpoint": {"universal": {"save": {"memory": memory, "wait_s": 5.0, "copies": 1}}},
}
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(1)
model = torch.nn.Linear(100, 100)
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)


def tell(word: str, path: str | None) -> None:
    weights = zlib.crc32(model.weight.detach().numpy().tobytes())
    print(f"{word} {json.dumps([path, engine.global_steps, weights])}", flush=True)


path, _ = engine.load_checkpoint(folder)
tell("FOUND", path)
for _ in range(steps):
    while not os.path.exists(f"{go}{engine.global_steps + 1}"):
        time.sleep(0.01)
    engine.backward(engine(torch.ones(1, 100)).square().mean())
    engine.step()
    # A part that takes a minute on the way when the network is slow.
    engine.save_checkpoint(folder, client_state={"ballast": torch.zeros(1 << 22)})
    tell("SAVED", None)
if steps:
    time.sleep(600)
