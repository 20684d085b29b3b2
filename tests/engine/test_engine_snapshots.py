"""Snapshots: saves without a call of the script; a killed run resumes from them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_ucp import preemption, rng, snapshots
from deepspeed_ucp.data import ElasticSampler
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import StorageError
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.engines.cases import BATCH, FEATURES, Case, make_engine, train_engine
from tests.support.engines.parallel import pipe
from tests.support.engines.ranks import Load, close, load_each, wait_for_marks

SAMPLES = 3 * BATCH


# --- on the ranks


@contextmanager
def follow(engine: Any, folder: str, *, every: Any, **options: Any) -> Iterator[list[int]]:
    """Take snapshots of an engine until the block ends. Yield the list of their steps."""
    steps, take = list[int](), snapshots._take

    def record(followed: Any, argument: Any, client_state: Any) -> None:
        steps.append(followed.global_steps)
        take(followed, argument, client_state)

    with mock.patch.object(snapshots, "_take", record):
        snapshots.follow(engine, folder, every=every, **options)
        yield steps
    close(engine)


@dataclass
class Trained:
    """One rank's part of a run.

    Attributes:
        step, client_state: at the start.
        begun: state at the start.
        draws: samples of each step, and a random number drawn for them.
        states: at the end of each step.
        taken: steps with a snapshot.
    """

    step: int
    client_state: dict[str, Any]
    begun: CapturedEngine
    draws: dict[int, tuple[list[int], float]] = field(default_factory=dict)
    states: dict[int, CapturedEngine] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)


def train(
    ds_config: dict[str, Any], folder: str, steps: int, *, every: int, seed: int, saves: dict[int, str] | None = None
) -> Trained:
    """Load and train on the sampler's batches.

    Args:
        saves: by step the folder of a save after it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = make_engine(ds_config, "plain", seed=seed)
    sampler = ElasticSampler(SAMPLES, BATCH, rank=rank, world=world, seed=1)
    sampler.follow(engine)
    rng.follow(engine)
    torch.manual_seed(100 * seed + rank)
    with follow(engine, folder, every=every, client_state=lambda: {"ended": engine.global_steps}) as taken:
        _, found = engine.load_checkpoint(folder)
        client_state = {name: value for name, value in (found or {}).items() if name in ("ended", "saved")}
        run = Trained(engine.global_steps, client_state, capture(engine), taken=taken)
        for _ in range(steps):
            samples = list(islice(sampler, BATCH // world))
            noise = torch.rand(1)  # drawn for the batch, before the engine is called
            run.draws[engine.global_steps] = samples, noise.item()
            batch = torch.tensor(samples, dtype=torch.float32)[:, None].expand(-1, FEATURES) / SAMPLES + noise
            engine.backward(engine(batch).square().mean())
            engine.step()
            run.states[engine.global_steps] = capture(engine)
            if place := (saves or {}).get(engine.global_steps):
                engine.save_checkpoint(place, client_state={"saved": engine.global_steps})
            with torch.no_grad():
                engine.eval()
                if rank == 0 and not engine.zero_optimization_partition_weights():  # alone
                    engine(batch)
                engine.train()
    return run


def train_by_the_clock(ds_config: dict[str, Any], folder: str, seconds: dict[int, float], steps: int) -> list[int]:
    """List the steps of snapshots every 5 s, on ranks whose clocks differ.

    Args:
        seconds: duration of the steps from this step on.
    """
    engine, now = make_engine(ds_config), 1000.0 * dist.get_rank()
    trained, save_checkpoint, step = train_engine(engine), engine.save_checkpoint, engine.step

    def save_slowly(*args: Any, **more: Any) -> None:
        nonlocal now
        now += 0.5
        save_checkpoint(*args, **more)

    def step_slowly(*args: Any, **more: Any) -> None:
        nonlocal now
        now += max((at, took) for at, took in seconds.items() if at <= engine.global_steps)[1] - 0.01 * dist.get_rank()
        step(*args, **more)

    engine.save_checkpoint, engine.step = save_slowly, step_slowly
    with (
        mock.patch.object(snapshots, "monotonic", side_effect=lambda: now),
        follow(engine, folder, every="5s") as taken,
    ):
        train_steps(trained, steps)
    return taken


def train_until_signaled(ds_config: dict[str, Any], folder: str) -> list[int]:
    """List the steps of snapshots; a signal arrives in the step after which a snapshot is due."""
    engine = make_engine(ds_config, "plain")
    trained = train_engine(engine)
    preemption.follow(engine, folder)
    with follow(engine, folder, every=2) as taken:
        for number in range(7):
            if number == 3 and dist.get_rank():
                os.kill(os.getpid(), signal.SIGUSR1)
            train_steps(trained, 1)
    return taken


def call_the_module(ds_config: dict[str, Any], folder: str) -> list[int]:
    """List the steps of snapshots of a training by `engine.module`, which does not report the begin of a step."""
    engine = make_engine(ds_config, "plain")
    with follow(engine, folder, every=2) as taken:
        for _ in range(6):
            engine.backward(engine.module(torch.ones(1, FEATURES)).square().mean())
            engine.step()
    return taken


def train_without_room(ds_config: dict[str, Any], folder: str) -> tuple[list[int], list[str]]:
    """Return the steps of snapshots that at first do not fit into memory, and the warnings."""
    engine, warnings = make_engine(ds_config), list[str]()
    trained = train_engine(engine)
    warn = mock.patch.object(snapshots.logger, "warning", lambda text, *args: warnings.append(text % args))
    with warn, follow(engine, folder, every=2) as taken:
        with mock.patch("deepspeed_ucp.saves.budget.count_free", return_value=1000):
            train_steps(trained, 5)
        train_steps(trained, 2)
        if dist.get_rank():
            find_state(engine).snapshots.client_state = mock.Mock(side_effect=StorageError("the client's"))
        train_steps(trained, 4)
    return taken, warnings


def train_pipeline(make: Any, folder: str) -> tuple[list[int], dict[int, CapturedEngine]]:
    """Return the steps of snapshots of a pipeline, and the state at the end of each step."""
    trained, states = make(), dict[int, CapturedEngine]()
    engine = next(trained)
    with follow(engine, folder, every=2) as taken:
        for _ in range(5):
            next(trained)
            states[engine.global_steps] = capture(engine)
            if engine.global_steps == 2:
                engine.save_checkpoint(folder)
    return taken, states


# --- tests


@pytest.mark.parametrize(
    ("source", "target"),
    [(Case(3, 2), Case(2, 3)), pytest.param(Case(1, 2), Case(1, 2), marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_a_run_resumes_from_a_snapshot(source: Case, target: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Samples and random numbers continue, too. A save of the script to the folder replaces a snapshot."""
    folder, elsewhere = str(tmp_path / "saved"), str(tmp_path / "elsewhere")
    config, saves = source.saving(tmp_path / "memory").ds_config, {2: folder, 6: elsewhere}
    whole = ucp_worlds.get(2).run(train, config, folder, 7, every=2, seed=1, saves=saves)
    assert [each.taken for each in whole] == [[4, 6]] * 2
    wait_for_marks(folder)
    assert [path.name for path in (tmp_path / "saved").glob("*_step*")] == ["global_step2"]
    assert (tmp_path / "elsewhere" / "latest").read_text() == "global_step6"
    world, config = ucp_worlds.get(target.world), target.saving(tmp_path / "memory").ds_config
    for rank, each in enumerate(world.run(train, config, folder, 1, every=5, seed=2)):
        assert (each.step, each.client_state, each.taken) == (6, {"ended": 6}, [])
        assert compare(whole[0].states[6], each.begun)[1] == []
        if target.world == 2:
            assert each.draws[6] == whole[rank].draws[6]
            assert compare(whole[rank].states[7], each.states[7])[1] == []
    shutil.rmtree(tmp_path / "memory")
    for each in world.run(train, config, folder, 0, every=5, seed=3):
        assert (each.step, each.client_state) == (2, {"saved": 2})


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        pytest.param({0: 1.0}, [5, 10, 15], marks=pytest.mark.exhaustive),  # constant duration of steps
        ({0: 0.1, 10: 2.1}, [12, 14, 16]),  # at ten steps a second step 50 would be due
    ],
)
def test_all_ranks_take_snapshots_by_one_clock(
    seconds: dict[int, float], taken: list[int], tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    work = (
        train_by_the_clock,
        Case(1, 2).saving(tmp_path / "memory").ds_config,
        str(tmp_path / "saved"),
        seconds,
        taken[-1] + 1,
    )
    assert ucp_worlds.get(2).run(*work) == [taken] * 2


def test_a_signaled_job_saves_only_once(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    work = train_until_signaled, Case(1, 2).saving(tmp_path / "memory").ds_config, str(tmp_path / "saved")
    assert ucp_worlds.get(2).run(*work) == [[2, 6]] * 2
    assert (tmp_path / "saved" / "latest").read_text() == "global_step4"


def test_snapshots_are_taken_at_step_ends_if_the_engine_is_not_called(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    config = Case(1, 2).saving(tmp_path / "memory").ds_config
    assert ucp_worlds.get(2).run(call_the_module, config, str(tmp_path)) == [[3, 5]] * 2


def test_training_continues_if_a_snapshot_fails(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The folder remains empty, and each cause is logged once."""
    work = train_without_room, Case(1, 2).saving(tmp_path / "memory").ds_config, str(tmp_path / "saved")
    (taken, warnings), (_, others) = ucp_worlds.get(2).run(*work)
    assert taken == [2, 4, 6] and others == []
    assert len(warnings) == 2 and "no snapshot of step 2" in warnings[0] and "MiB are free" in warnings[0]
    assert "no snapshot of step 8" in warnings[1] and "the client's" in warnings[1]
    assert not (tmp_path / "saved").exists()


@pytest.mark.exhaustive
def test_stages_of_a_pipeline_take_snapshots_at_the_same_step(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    make = pipe(1, 2, method="uniform", world=2, model="EBBH").saving(tmp_path / "memory").training()
    world, folder = ucp_worlds.get(2), str(tmp_path / "saved")
    runs = world.run(train_pipeline, make, folder)
    for (taken, states), (local,) in zip(runs, world.run(load_each, make, [Load(folder)]), strict=True):
        assert (taken, local.state.counters["global_steps"]) == ([4], 4)
        assert compare(states[4], local.state)[1] == []
