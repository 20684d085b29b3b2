"""State that saves and snapshots carry: samples, random states, steps; saves after signals; snapshots by step or time.

A snapshot is a save without a call of the script, from which a killed run resumes.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ucp import preemption, rng, snapshots
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.data import ElasticSampler
from deepspeed_ucp.engine_state import KEY, Carried, carry, find_state
from deepspeed_ucp.errors import StorageError
from deepspeed_ucp.formats.deepspeed.files import SEAL
from deepspeed_ucp.formats.open import survey_checkpoint
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.engines import ranks
from tests.support.engines.cases import BATCH, FEATURES, Case, make_engine, train_engine
from tests.support.engines.parallel import pipe
from tests.support.engines.ranks import Load

SAMPLES = 5 * BATCH - 7

# --- on the ranks


@contextmanager
def follow(engine: Any, folder: str, *, every: Any, **options: Any) -> Iterator[list[int]]:
    """Take snapshots of an engine until the block ends, unless `every` is 0. Yield the list of their steps."""
    steps, take = list[int](), snapshots._take_snapshot

    def record(followed: Any, argument: Any, client_state: Any) -> None:
        steps.append(followed.global_steps)
        take(followed, argument, client_state)

    with mock.patch.object(snapshots, "_take_snapshot", record):
        if every:
            snapshots.follow(engine, folder, every=every, **options)
        yield steps
    ranks.close(engine)


@dataclass
class Trained:
    """One rank's part of a run: its start; samples and random numbers of each step; states after steps; snapshots.

    Attributes:
        end: random numbers drawn after the last save.
    """

    step: int
    client_state: dict[str, Any]
    begun: CapturedEngine
    draws: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    states: dict[int, CapturedEngine] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)
    end: list[float] = field(default_factory=list)


def train(ds_config: dict[str, Any], folder: str, steps: int, *, seed: int, saves: Any = (), every: int = 0) -> Trained:
    """Load, and train on the sampler's batches; sampler and generators start from `seed`.

    Args:
        saves: by step the folder of a save after it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = make_engine(ds_config, "plain", seed=seed)
    sampler = ElasticSampler(SAMPLES, BATCH, rank=rank, world=world, seed=seed)
    sampler.follow(engine)
    rng.follow(engine)
    for generator in rng.list_generators().values():
        generator.seed(1000 * seed + rank)
    with follow(engine, folder, every=every, client_state=lambda: {"ended": engine.global_steps}) as taken:
        _, found = engine.load_checkpoint(folder)
        client_state = {name: value for name, value in (found or {}).items() if name in ("ended", "saved", KEY)}
        run = Trained(engine.global_steps, client_state, capture(engine), taken=taken)
        stream = chain.from_iterable(repeat(sampler))  # epoch after epoch
        for _ in range(steps):
            samples, noise = list(islice(stream, BATCH // world)), draw()  # before the engine is called
            run.draws[engine.global_steps] = samples, noise
            batch = torch.tensor(samples, dtype=torch.float32)[:, None].expand(-1, FEATURES) / SAMPLES + noise[2]
            batch = batch.to(engine.device)
            engine.backward(engine(batch).square().mean())
            engine.step()
            run.states[engine.global_steps] = capture(engine)
            if engine.global_steps in saves:
                engine.save_checkpoint(saves[engine.global_steps], client_state={"saved": engine.global_steps})
            with torch.no_grad():
                engine.eval()
                if rank == 0 and not engine.zero_optimization_partition_weights():  # alone
                    engine(batch)
                engine.train()
        run.end = draw()
    return run


def draw() -> list[float]:
    device = get_accelerator().current_device_name()
    drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]  # noqa: NPY002
    return [*drawn, torch.rand(1, device=device).item()]


def train_until_signaled(
    ds_config: dict[str, Any], folder: str, number: int = 0, when: str = "", *, every: int = 0, by_module: bool = False
) -> tuple[int, Any, list[int]]:
    """Train seven steps; the last rank gets a signal in its fourth step, or in a ``save`` or ``load`` before.

    Args:
        by_module: call `engine.module`, which does not report the begin of a step.

    Returns:
        The number of completed steps, the exit code or None, and the steps of snapshots.
    """
    engine, code = make_engine(ds_config, "plain"), None
    preemption.follow(engine, folder, client_state=lambda: {"mine": 7})

    def signal_in(event: str) -> None:
        if when == event and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), number)

    if when in ("save", "load"):
        carry(engine, "signal", Carried(save=lambda: signal_in("save"), load=lambda _: signal_in("load")))
        engine.save_checkpoint(f"{folder}/first")
        engine.load_checkpoint(f"{folder}/first")
    with follow(engine, folder, every=every) as taken:
        try:
            for step in range(7):
                batch = torch.ones(1, FEATURES, device=engine.device)
                loss = (engine.module if by_module else engine)(batch).square().mean()
                if step == 3:
                    signal_in("step")
                engine.backward(loss)
                engine.step()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else -1
        steps = engine.global_steps
    return steps, code, taken


def train_by_the_clock(ds_config: dict[str, Any], folder: str, seconds: dict[int, float], steps: int) -> list[int]:
    """List the steps of snapshots every 5 s, on ranks whose clocks differ; `seconds`: by first step."""
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
    clock = mock.patch.object(snapshots, "monotonic", side_effect=lambda: now)
    with clock, follow(engine, folder, every="5s") as taken:
        train_steps(trained, steps)
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


@pytest.mark.parametrize("stages", [(1, 2), (3, 0)], ids=str)
def test_a_resume_continues_samples_and_rng(stages: tuple[int, int], tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The saves are from the same world, another stage and a third rank, and two ends of an epoch."""
    first, second = (Case(stage, 2).on().ds_config for stage in stages)
    runs, step, folder = list[list[Trained]](), 0, str(tmp_path)
    for seed, (count, config, steps) in enumerate([(2, first, 3), (2, first, 2), (2, second, 2), (3, first, 4)], 1):
        work = train, config, folder, steps
        runs.append(ucp_worlds.get(count).run(*work, seed=seed, saves={step + steps: folder}))
        assert {str(each.client_state) for each in runs[-1]} == {str({"saved": step} if step else {})}
        step += steps
    for tag in tmp_path.glob("global_step*"):  # carried state may differ between ranks of one save
        findings = survey_checkpoint(str(tag), Comm()).findings
        assert [each.text for each in findings if each.kind != "unnamed"] == []  # stage 0 always has this finding
    for before, after in pairwise(runs):
        assert [each.draws[each.step][1] for each in after[:2]] == [each.end for each in before]
    assert len({str(each.draws[each.step][1]) for each in runs[-1]}) == 3
    taken = [sample for run in runs for at in run[0].draws for each in run for sample in each.draws[at][0]]
    whole = ElasticSampler(SAMPLES, BATCH, rank=0, world=1, seed=1)
    assert taken == list(chain(whole, whole, whole))[: 11 * BATCH]


DECOUPLED = {"type": "python", "data_parallel": "replica", "decoupled": True}
WRITER = Case(3, 2, config={"checkpoint": {"universal": {"seal": True}, "writer": DECOUPLED}})


@pytest.mark.parametrize(
    ("case", "number", "when", "every", "found"),
    [
        (Case(1, 2).on(), signal.SIGTERM, "step", 0, (4, 0, [])),
        (Case(1, 2), signal.SIGUSR1, "step", 2, (7, None, [2, 6])),  # a snapshot is due after the signal
        (Case(1, 2).on(), signal.SIGTERM, "save", 0, (1, 0, [])),
        (Case(1, 2).on(), signal.SIGTERM, "load", 0, (1, 0, [])),
        pytest.param(WRITER, signal.SIGTERM, "step", 0, (4, 0, []), marks=pytest.mark.exhaustive),
    ],
    ids=["end", "continue", "save", "load", "writer"],
)
def test_a_signal_to_one_rank_makes_all_ranks_save_once(
    case: Case, number: int, when: str, every: int, found: Any, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """They save at the end of the current or next step. The job then ends or continues."""
    kind = case.saving(tmp_path / "memory") if every else case
    work = train_until_signaled, {**kind.ds_config, "train_batch_size": 2}, str(tmp_path), int(number), when
    assert ucp_worlds.get(2).run(*work, every=every) == [found] * 2
    saved = 4 if when == "step" else 1
    assert (tmp_path / "latest").read_text() == f"global_step{saved}"
    (tag,) = tmp_path.glob("global_step*")
    state = torch.load(next(tag.glob("*model_states.pt")), weights_only=False)
    assert (state["global_steps"], state["mine"]) == (saved, 7)
    assert (tag / SEAL).exists() == (every > 0 or case == WRITER)


@pytest.mark.parametrize(
    ("source", "target"),
    [(Case(3, 2), Case(2, 3)), pytest.param(Case(1, 2), Case(1, 2), marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_a_run_resumes_from_a_snapshot(source: Case, target: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Samples and random numbers continue, too. A save of the script to the folder replaces a snapshot."""
    folder, elsewhere = str(tmp_path / "saved"), str(tmp_path / "elsewhere")
    config, saves = source.saving(tmp_path / "memory").ds_config, {2: folder, 6: elsewhere}
    whole = ucp_worlds.get(2).run(train, config, folder, 7, seed=1, saves=saves, every=2)
    assert [each.taken for each in whole] == [[4, 6]] * 2
    ranks.wait_for_marks(folder)
    assert [path.name for path in (tmp_path / "saved").glob("*_step*")] == ["global_step2"]
    assert (tmp_path / "elsewhere" / "latest").read_text() == "global_step6"
    world, config = ucp_worlds.get(target.world), target.saving(tmp_path / "memory").ds_config
    for rank, each in enumerate(world.run(train, config, folder, 1, seed=2, every=5)):
        assert (each.step, each.client_state, each.taken) == (6, {"ended": 6}, [])
        assert compare(whole[0].states[6], each.begun)[1] == []
        if target.world == 2:
            assert each.draws[6] == whole[rank].draws[6]
            assert compare(whole[rank].states[7], each.states[7])[1] == []
    shutil.rmtree(tmp_path / "memory")
    for each in world.run(train, config, folder, 0, seed=3, every=5):
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
    config = Case(1, 2).saving(tmp_path / "memory").ds_config
    work = train_by_the_clock, config, str(tmp_path / "saved"), seconds, taken[-1] + 1
    assert ucp_worlds.get(2).run(*work) == [taken] * 2


def test_snapshots_are_taken_at_step_ends_if_the_engine_is_not_called(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    config = {**Case(1, 2).saving(tmp_path / "memory").ds_config, "train_batch_size": 2}
    work = train_until_signaled, config, str(tmp_path)
    assert ucp_worlds.get(2).run(*work, every=2, by_module=True) == [(7, None, [3, 5, 7])] * 2


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
    for (taken, states), (local,) in zip(runs, world.run(ranks.load_each, make, [Load(folder)]), strict=True):
        assert (taken, local.state.counters["global_steps"]) == ([4], 4)
        assert compare(states[4], local.state)[1] == []
