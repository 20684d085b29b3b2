"""What ranks do in the tests of snapshots. Imported on the ranks only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from deepspeed_ucp import preemption, rng, snapshots
from deepspeed_ucp.data import ElasticSampler
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import StorageError
from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.engines.cases import BATCH, FEATURES, make_engine, train_engine
from tests.support.engines.saves import close_saver

SAMPLES = 3 * BATCH


@dataclass
class Trained:
    """One rank's part of a run.

    Attributes:
        found, begun: the step and the client state that it began with, and what was held then.
        draws: by step the samples that it took and a random number that was drawn for them.
        states: by step what was held at its end.
        taken: the steps of which there was a snapshot.
    """

    found: tuple[int, Any]
    begun: CapturedEngine
    draws: dict[int, tuple[list[int], float]] = field(default_factory=dict)
    states: dict[int, CapturedEngine] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)


def go_on(
    ds_config: dict[str, Any], folder: str, steps: int, *, every: Any, saves: dict[int, str], seed: int
) -> Trained:
    """Load, train on what the sampler gives; save after some steps, by step into which folder."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = make_engine(ds_config, "plain", seed=seed)
    sampler = ElasticSampler(SAMPLES, BATCH, rank=rank, world=world, seed=1)
    sampler.follow(engine)
    rng.follow(engine)
    torch.manual_seed(100 * seed + rank)
    snapshots.follow(engine, folder, every=every, client_state=lambda: {"ended": engine.global_steps})
    _, found = engine.load_checkpoint(folder)
    own = {name: value for name, value in (found or {}).items() if name in ("ended", "saved")}
    told = Trained((engine.global_steps, own), begun=capture(engine))
    with note_taken(told.taken):
        for _ in range(steps):
            samples = next(_take(sampler, BATCH // world))
            noise = torch.rand(1)  # of what makes a batch, before the engine is called
            told.draws[engine.global_steps] = samples, noise.item()
            batch = torch.tensor(samples, dtype=torch.float32)[:, None].expand(-1, FEATURES) / SAMPLES + noise
            engine.backward(engine(batch).square().mean())
            engine.step()
            told.states[engine.global_steps] = capture(engine)
            if (place := saves.get(engine.global_steps)) is not None:
                engine.save_checkpoint(place, client_state={"saved": engine.global_steps})
            with torch.no_grad():
                engine.eval()
                if rank == 0 and not engine.zero_optimization_partition_weights():  # alone
                    engine(batch)
                engine.train()
    _end(engine)
    return told


def _take(sampler: ElasticSampler, share: int) -> Iterator[list[int]]:
    held: list[int] = []
    for sample in sampler:
        held.append(sample)
        if len(held) == share:
            yield held


def note_taken(taken: list[int]) -> Any:
    """Inside, notes of which step each snapshot is."""
    own = snapshots._take

    def note(engine: Any, asked: Any, client_state: Any) -> None:
        taken.append(engine.global_steps)
        own(engine, asked, client_state)

    return mock.patch.object(snapshots, "_take", note)


def _end(engine: Any) -> None:
    saver = find_state(engine).saver
    if saver is not None:
        close_saver(saver)
    engine.destroy()


def by_the_clock(ds_config: dict[str, Any], folder: str, seconds: dict[int, float], steps: int) -> list[int]:
    """The steps of which there is a snapshot every 5 s, on ranks whose clocks differ.

    Args:
        seconds: that a step takes, from which step on.
    """
    engine, taken, now = make_engine(ds_config), list[int](), 1000.0 * dist.get_rank()
    trained, saves, steps_on = train_engine(engine), engine.save_checkpoint, engine.step

    def look() -> float:
        return now

    def save(*args: Any, **more: Any) -> None:
        nonlocal now
        now += 0.5
        saves(*args, **more)

    def step(*args: Any, **more: Any) -> None:
        nonlocal now
        now += max((at, took) for at, took in seconds.items() if at <= engine.global_steps)[1] - 0.01 * dist.get_rank()
        steps_on(*args, **more)

    engine.save_checkpoint, engine.step = save, step
    with mock.patch.object(snapshots, "monotonic", look), note_taken(taken):
        snapshots.follow(engine, folder, every="5s")
        train_steps(trained, steps)
    _end(engine)
    return taken


def be_told(ds_config: dict[str, Any], folder: str) -> list[int]:
    """A signal in the step after which a snapshot is due; the steps of which there is one."""
    engine, taken = make_engine(ds_config), list[int]()
    trained = train_engine(engine)
    preemption.follow(engine, folder)
    snapshots.follow(engine, folder, every=2)
    with note_taken(taken):
        for number in range(7):
            if number == 3 and dist.get_rank():
                os.kill(os.getpid(), signal.SIGUSR1)
            train_steps(trained, 1)
    _end(engine)
    return taken


def call_the_module(ds_config: dict[str, Any], folder: str) -> list[int]:
    """Train by `engine.module`, so that nobody tells when a step begins."""
    engine, taken = make_engine(ds_config, "plain"), list[int]()
    snapshots.follow(engine, folder, every=2)
    with note_taken(taken):
        for _ in range(6):
            engine.backward(engine.module(torch.ones(1, FEATURES)).square().mean())
            engine.step()
    _end(engine)
    return taken


def fail(ds_config: dict[str, Any], folder: str) -> tuple[list[int], list[str]]:
    """Snapshots that find no room at first; of which steps there were any, and what was told."""
    engine, taken, told = make_engine(ds_config), list[int](), list[str]()
    trained = train_engine(engine)
    snapshots.follow(engine, folder, every=2)
    with (
        note_taken(taken),
        mock.patch.object(snapshots.logger, "warning", lambda text, *args: told.append(text % args)),
    ):
        with mock.patch("deepspeed_ucp.saves.saver.count_free", return_value=1000):
            train_steps(trained, 5)
        train_steps(trained, 2)
        if dist.get_rank():
            find_state(engine).snapshots.client_state = mock.Mock(side_effect=StorageError("the client's"))
        train_steps(trained, 4)
    _end(engine)
    return taken, told


def pipeline(training: Any, folder: str) -> tuple[list[int], dict[int, CapturedEngine]]:
    """Snapshots of a pipeline: of which steps, and what was held at the end of each step."""
    trained, taken, states = training(), list[int](), dict[int, CapturedEngine]()
    engine = next(trained)
    snapshots.follow(engine, folder, every=2)
    with note_taken(taken):
        for _ in range(5):
            next(trained)
            states[engine.global_steps] = capture(engine)
            if engine.global_steps == 2:
                engine.save_checkpoint(folder)
    _end(engine)
    return taken, states


def load(training: Any, folder: str) -> tuple[int, CapturedEngine]:
    """What a load finds."""
    engine = next(training())
    engine.load_checkpoint(folder)
    found = engine.global_steps, capture(engine)
    engine.destroy()
    return found
