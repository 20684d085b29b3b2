"""What the ranks do in the tests of what a save carries. Imported on the ranks only."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ucp import preemption, rng
from deepspeed_ucp.data import ElasticSampler
from deepspeed_ucp.engine_state import KEY, Carried, carry
from tests.support.engines.cases import BATCH, FEATURES, make_engine

SAMPLES = 5 * BATCH - 7


@dataclass(frozen=True)
class Trained:
    """One rank's part of a run: the samples of each step, and what the generators draw after the load and the save."""

    samples: list[list[int]]
    begin: list[float]
    end: list[float]


def go_on(ds_config: dict[str, Any], folder: str, steps: int, *, seed: int, load: bool = True) -> Trained:
    """Load, train on what the sampler gives, save; sampler and generators begin with a seed of their own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = make_engine(ds_config, "plain")
    sampler = ElasticSampler(SAMPLES, BATCH, rank=rank, world=world, seed=seed)
    sampler.follow(engine)
    rng.follow(engine)
    for generator in rng.list_generators().values():
        generator.seed(1000 * seed + rank)
    if load:
        _, client_state = engine.load_checkpoint(folder)
        assert client_state["mine"] == 7 and KEY not in client_state
    begin, samples = _draw(), [_train(engine, part) for part in _take(sampler, steps, BATCH // world)]
    engine.save_checkpoint(folder, client_state={"mine": 7})
    engine.destroy()
    return Trained(samples, begin, _draw())


def _take(sampler: ElasticSampler, steps: int, share: int) -> Iterator[list[int]]:
    """This rank's samples of each step, epoch after epoch."""
    while True:
        held: list[int] = []
        for sample in sampler:
            held.append(sample)
            if len(held) == share:
                yield held
                held, steps = [], steps - 1
            if not steps:
                return


def _train(engine: Any, samples: list[int]) -> list[int]:
    batch = torch.tensor(samples, dtype=torch.float32)[:, None].expand(-1, FEATURES) / SAMPLES
    engine.backward(engine(batch.to(engine.device, memory_format=torch.contiguous_format)).square().mean())
    engine.step()
    return samples


def _draw() -> list[float]:
    device = get_accelerator().current_device_name()
    drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]  # noqa: NPY002
    return [*drawn, torch.rand(1, device=device).item()]


@dataclass(frozen=True)
class Told:
    """One rank's part of a run that gets a signal: the steps that it ended, and its exit code."""

    steps: int
    code: int | None


def train_until_told(ds_config: dict[str, Any], folder: str, number: int, steps: int, when: str = "step") -> Told:
    """The last rank gets a signal in its second step, or in a ``save`` or ``load`` before the first step."""
    engine, code = make_engine(ds_config, "plain"), None
    preemption.follow(engine, folder, client_state=lambda: {"mine": 7})

    def signal_in(event: str) -> None:
        if when == event and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), number)

    if when != "step":
        carry(engine, "signal", Carried(save=lambda: signal_in("save"), load=lambda _: signal_in("load")))
        engine.save_checkpoint(f"{folder}/first")
        engine.load_checkpoint(f"{folder}/first")
    try:
        for step in range(steps):
            loss = engine(torch.ones(1, FEATURES, device=engine.device)).square().mean()
            if step == 1:
                signal_in("step")
            engine.backward(loss)
            engine.step()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else -1
    told = Told(engine.global_steps, code)
    engine.destroy()
    return told
