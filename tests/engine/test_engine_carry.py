"""State that saves of an engine carry: order of samples and random states; and saves after signals."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ucp import preemption, rng
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.data import ElasticSampler
from deepspeed_ucp.engine_state import KEY, Carried, carry
from deepspeed_ucp.formats.deepspeed.files import SEAL
from deepspeed_ucp.formats.open import survey_checkpoint
from deepspeed_ucp.testing import WorldPool
from tests.support.engines.cases import BATCH, FEATURES, Case, make_engine

SAMPLES = 5 * BATCH - 7


@dataclass(frozen=True)
class Trained:
    """One rank's part of a run: the samples of each step, and random numbers drawn after the load and the save."""

    samples: list[list[int]]
    begin: list[float]
    end: list[float]


def train(ds_config: dict[str, Any], folder: str, steps: int, *, seed: int, load: bool = True) -> Trained:
    """Load, train on the sampler's batches and save; sampler and generators start from `seed`."""
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
    begin, samples, stream = draw(), list[list[int]](), chain.from_iterable(repeat(sampler))  # epoch after epoch
    for _ in range(steps):
        samples.append(share := list(islice(stream, BATCH // world)))
        batch = torch.tensor(share, dtype=torch.float32)[:, None].expand(-1, FEATURES) / SAMPLES
        engine.backward(engine(batch.to(engine.device, memory_format=torch.contiguous_format)).square().mean())
        engine.step()
    engine.save_checkpoint(folder, client_state={"mine": 7})
    engine.destroy()
    return Trained(samples, begin, draw())


def draw() -> list[float]:
    device = get_accelerator().current_device_name()
    drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]  # noqa: NPY002
    return [*drawn, torch.rand(1, device=device).item()]


@pytest.mark.parametrize("stages", [(1, 2), (3, 0)], ids=str)
def test_a_resume_continues_samples_and_rng(stages: tuple[int, int], tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The saves are from the same world, another stage and a third rank, and two ends of an epoch."""
    first, second = (Case(stage, 2).on().ds_config for stage in stages)
    plan = [(2, first, 3, False), (2, first, 2, True), (2, second, 2, True), (3, first, 4, True)]
    runs: list[list[Trained]] = [
        ucp_worlds.get(ranks).run(train, config, str(tmp_path), steps, seed=seed, load=load)
        for seed, (ranks, config, steps, load) in enumerate(plan, 1)
    ]
    for tag in tmp_path.glob("global_step*"):  # carried state may differ between ranks of one save
        findings = survey_checkpoint(str(tag), Comm()).findings
        assert [each.text for each in findings if each.kind != "unnamed"] == []  # stage 0 always has this finding
    for before, after in pairwise(runs):
        assert [each.begin for each in after[:2]] == [each.end for each in before]
    assert len({tuple(each.begin) for each in runs[-1]}) == 3
    taken = [
        list(chain.from_iterable(step)) for part in runs for step in zip(*(each.samples for each in part), strict=True)
    ]
    whole = ElasticSampler(SAMPLES, BATCH, rank=0, world=1, seed=1)
    expected = list(chain(whole, whole, whole))
    assert list(chain.from_iterable(taken)) == expected[: 11 * BATCH]


# --- signals


def train_until_signaled(ds_config: dict[str, Any], folder: str, number: int, when: str = "step") -> tuple[int, Any]:
    """Train five steps; the last rank gets a signal in its second step, or in a ``save`` or ``load`` before.

    Return the number of completed steps, and the exit code or None.
    """
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
        for step in range(5):
            loss = engine(torch.ones(1, FEATURES, device=engine.device)).square().mean()
            if step == 1:
                signal_in("step")
            engine.backward(loss)
            engine.step()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else -1
    steps = engine.global_steps
    engine.destroy()
    return steps, code


def signaled(case: Case) -> dict[str, Any]:
    return {**case.ds_config, "train_batch_size": 2}


@pytest.mark.parametrize(
    ("number", "when", "steps", "code"),
    [
        (signal.SIGTERM, "step", 2, 0),
        (signal.SIGUSR1, "step", 5, None),
        (signal.SIGTERM, "save", 1, 0),
        (signal.SIGTERM, "load", 1, 0),
    ],
)
def test_a_signal_to_one_rank_makes_all_ranks_save_once(
    number: int, when: str, steps: int, code: int | None, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """They save at the end of the current or next step. The job then ends or continues."""
    work = train_until_signaled, signaled(Case(1, 2).on()), str(tmp_path), int(number), when
    assert set(ucp_worlds.get(2).run(*work)) == {(steps, code)}
    saved = 1 + (when == "step")
    assert [path.name for path in tmp_path.glob("global_step*")] == [f"global_step{saved}"]
    state = torch.load(tmp_path / f"global_step{saved}" / "mp_rank_00_model_states.pt", weights_only=False)
    assert (state["global_steps"], state["mine"]) == (saved, 7)


@pytest.mark.exhaustive
def test_a_save_by_a_decoupled_writer_is_complete_when_the_ranks_exit(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    writer = {"type": "python", "data_parallel": "replica", "decoupled": True}
    case = Case(3, 2, config={"checkpoint": {"universal": {"seal": True}, "writer": writer}})
    work = train_until_signaled, signaled(case), str(tmp_path), int(signal.SIGTERM)
    assert set(ucp_worlds.get(2).run(*work)) == {(2, 0)}
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert (tmp_path / "global_step2" / SEAL).exists()
