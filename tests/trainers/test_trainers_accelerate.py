"""Accelerate on gloo: a run resumed in any world equals the uninterrupted one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainers_common
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LambdaLR
from trainers_common import choose_gloo, finish_writes, gather_weights, hold_writes, list_saves, listen, make_config
from trainers_hf import Net, make_samples

from deepspeed_ucp.data import ElasticSampler, ElasticStream, Order
from deepspeed_ucp.errors import StorageError
from deepspeed_ucp.model.index import SavedJob
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.trainers import accelerating
from tests.support.covering import all_turns

pytest.importorskip("accelerate")

# --- on the ranks


@dataclass
class Trained(trainers_common.Trained):
    """One rank's part of a run.

    Attributes:
        steps: of the engine, at the end.
        custom: number that the registered object counts.
    """

    steps: int = 0
    custom: int = 0
    accumulation: int = 0


class Count:
    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


STEPS, SIZE, TOTAL = 12, 32, 8
"""Steps of a run of three epochs, samples, and samples of a step."""


def make_scheduler(kind: str, optimizer: Any, ranks: int) -> Any:
    """``scaled`` counts as Accelerate steps it, ``plain`` as two ranks step it, ``cosine`` is saved whole."""
    most = STEPS * (ranks if kind in ("scaled", "one-cycle") else 2)
    if kind == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=most)
    if kind == "one-cycle":
        return lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=most)
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / most))


def train(
    ds_config: dict[str, Any],
    *,
    micro: int,
    accumulation: int = 1,
    scheduler: str = "scaled",
    seed: int = 5,
    save: dict[int, str] | None = None,
    resume: str | None = None,
    **options: bool,
) -> Trained:
    """Train in a usual loop of Accelerate, which continues at the restored step.

    Args:
        save: by micro batch (of all epochs, from 1 on) a folder.
        options: of Accelerate's data loaders.
    """
    record, losses = Trained(), list[float]()
    with choose_gloo(), listen(record.warnings):
        accelerator, count, net, prepared = _prepare(ds_config, micro, accumulation, scheduler, seed, **options)
        model, optimizer, loader, schedule = prepared
        if resume is not None:
            accelerator.load_state(resume)
        per_step, per_epoch = accelerator.gradient_accumulation_steps, SIZE // TOTAL
        begin, done = count.steps, count.steps * per_step
        for epoch in range(begin // per_epoch, STEPS // per_epoch):
            loader.set_epoch(epoch)
            first = (begin % per_epoch) * per_step if epoch == begin // per_epoch else 0
            for batch in accelerator.skip_first_batches(loader, first) if first else loader:
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    accelerator.backward(loss)
                    optimizer.step()
                    rate = schedule.get_last_lr()[0]
                    schedule.step()
                    optimizer.zero_grad()
                done += 1
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    count.steps += 1
                    record.samples[count.steps], record.rates[count.steps] = list(net.seen), rate
                    record.losses[count.steps] = sum(losses) / len(losses)
                    net.seen.clear()
                    losses.clear()
                if save and done in save:
                    accelerator.save_state(save[done])
        record.steps, record.custom = model.global_steps, count.steps
        record.accumulation, record.weights = accelerator.gradient_accumulation_steps, gather_weights(model)
        model.destroy()
    return record


def _prepare(
    ds_config: dict[str, Any], micro: int, accumulation: int, scheduler: str, seed: int = 5, **options: bool
) -> tuple[Any, Count, Net, tuple[Any, ...]]:
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
    from accelerate.utils import set_seed

    set_seed(seed)
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, **options),
    )
    net, count = Net(), Count()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    batch = micro * accelerator.num_processes if options.get("split_batches") else micro
    loader = torch.utils.data.DataLoader(make_samples(SIZE), batch_size=batch, shuffle=True)
    made = make_scheduler(scheduler, optimizer, accelerator.num_processes)
    prepared = accelerator.prepare(net, optimizer, loader, made)
    accelerator.register_for_checkpointing(count)
    torch.manual_seed(100 + accelerator.process_index)
    return accelerator, count, net, prepared


def rotate(folder: str, ds_config: dict[str, Any]) -> tuple[list[dict[str, bool]], int]:
    """Save with automatic names and a limit of one; the writes of the second and third save are held back.

    Returns:
        The checkpoints after each save, and the steps that a load of the last one restores.
    """
    from accelerate.utils import ProjectConfiguration

    saves = list[dict[str, bool]]()
    with choose_gloo():
        accelerator, count, _, (model, optimizer, loader, scheduler) = _prepare(ds_config, 4, 1, "plain")
        naming = {"automatic_checkpoint_naming": True, "total_limit": 1}
        accelerator.project_configuration = ProjectConfiguration(folder, **naming)
        holding = hold_writes()
        for number, batch in enumerate(loader):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            count.steps += 1
            if number == 1:
                holding.__enter__()
            accelerator.save_state()
            saves.append(list_saves(os.path.join(folder, "checkpoints")))
            if number == 2:
                holding.__exit__(None, None, None)
                finish_writes()
                accelerator.wait_for_everyone()
        count.steps = 0
        accelerator.load_state()
        saves.append(list_saves(os.path.join(folder, "checkpoints")))
        model.destroy()
    return saves, count.steps


def save_twice(folder: str, ds_config: dict[str, Any]) -> None:
    """Save to a folder a second time, while writes are held back."""
    with choose_gloo():
        accelerator, _, _, prepared = _prepare(ds_config, 8, 1, "plain")
        accelerator.save_state(folder)
        with hold_writes(), pytest.raises(StorageError, match="not all saves are written after"):
            accelerator.save_state(folder)
        prepared[0].destroy()


def split(kind: type[Order], world: int) -> list[int]:
    """Return the samples that this rank gets from an order of ``world`` ranks, in a data loader of Accelerate."""
    from accelerate import Accelerator, DeepSpeedPlugin

    with choose_gloo():
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=make_config(1)))
        place: dict[str, Any] = {"rank": accelerator.process_index % world, "world": world, "shuffle": False}
        if kind is ElasticSampler:
            loader = torch.utils.data.DataLoader(range(16), 2, sampler=ElasticSampler(16, 8, **place))
        else:
            stream = ElasticStream([0], [16], lambda _, begin: range(begin, 16), 8, **place)
            loader = torch.utils.data.DataLoader(stream, 2)
        return [sample for batch in accelerator.prepare(loader) for sample in batch.tolist()]


# --- tests


def agree(whole: list[Trained], rest: list[Trained], first: int) -> None:
    trainers_common.agree(whole, rest, first, rate=1e-12)
    assert {(each.steps, each.custom) for each in rest} == {(STEPS, STEPS)}


Saved = tuple[Path, list[Trained]]


@pytest.fixture(scope="module")
def saved(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A run of two ranks with two micro batches of two samples; the last save is in the middle of a step."""
    folder = tmp_path_factory.mktemp("accelerate")
    save = {10: str(folder / "five"), 13: str(folder / "middle")}
    options: dict[str, Any] = {"micro": 2, "accumulation": 2, "save": save}
    return folder, ucp_worlds.get(2).run(train, make_config(2), **options)


@pytest.mark.releases
@pytest.mark.parametrize(
    ("ranks", "micro", "accumulation"), [(1, 4, 2), (1, 4, 1), (2, 2, 2)], ids=["1", "1-derived", "2"]
)
def test_accelerate_continues_in_another_world(
    ranks: int, micro: int, accumulation: int, saved: Saved, ucp_worlds: WorldPool
) -> None:
    (folder, whole), options = saved, dict[str, Any](micro=micro, accumulation=accumulation)
    for resume, first in (("five", 6), ("eight", 9)):  # the resumed run makes the second save
        options |= {"resume": str(folder / resume), "save": {16: str(folder / "eight")}}
        rest = ucp_worlds.get(ranks).run(train, make_config(3), **options)
        agree(whole, rest, first)
        assert rest[0].accumulation == 2
        kept = "total batch 8 kept on 1 rank: gradient accumulation 1 → 2"
        assert [kept in text for text in rest[0].warnings].count(True) == (accumulation == 1)


def wait_then_decay(step: int) -> float:
    """A schedule whose rate does not depend on the step for 80 steps."""
    return 1.0 if step < 80 else 0.5


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "changes later": lambda optimizer: LambdaLR(optimizer, wait_then_decay),
    "constant": lambda optimizer: LambdaLR(optimizer, lambda _: 1.0),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.9),
    "function inside": lambda optimizer: lr_scheduler.ChainedScheduler([LambdaLR(optimizer, wait_then_decay)]),
    "without functions": lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 2)]),
}
LATER, HALF = {"last_epoch": 20, "_last_lr": [0.1]}, {"last_epoch": 10, "_step_count": 11, "_ucp_rate": 2}


@pytest.mark.parametrize(
    ("scheduler", "saved", "split", "ranks", "changes", "warning"),
    [
        ("changes later", LATER, False, 2, HALF, "both"),
        ("constant", LATER, False, 2, HALF, ""),
        ("multiplicative", {}, False, 4, {}, ""),
        ("multiplicative", {}, False, 2, {"_ucp_rate": 4}, "has functions of this script"),
        ("function inside", {}, False, 2, {"_ucp_rate": 4}, "has functions of this script"),
        ("without functions", {}, False, 2, {"_ucp_rate": 4}, ""),
        ("without functions", {"_ucp_rate": 4}, True, 4, {"_ucp_rate": 4}, ""),
        ("without functions", {"_ucp_rate": 1}, False, 4, {"_ucp_rate": 1}, ""),
        ("without functions", {"_ucp_rate": 1}, True, 4, {}, ""),
        ("without functions", {"last_epoch": 20}, True, 4, {}, "another split_batches"),  # not recorded: 4 × 5 steps
        ("without functions", {"last_epoch": 5}, False, 4, {}, "another split_batches"),
        ("without functions", {"last_epoch": 5}, True, 4, {}, ""),
    ],
    ids=str,
)
def test_a_schedule_keeps_its_length_in_another_world(
    scheduler: str,
    saved: dict[str, Any],
    split: bool,
    ranks: int,
    changes: dict[str, int],
    warning: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The save is from 4 ranks after 5 steps. A warning reports functions that the saved rate cannot check."""
    inner = SCHEDULERS[scheduler](torch.optim.SGD([torch.zeros(1)], lr=0.1))
    wrapped = SimpleNamespace(scheduler=inner, step_with_optimizer=True, split_batches=split)
    state = {**inner.state_dict(), **saved}
    assert accelerating._adapt_steps(wrapped, state, SavedJob(4, 1, 5, 8, 1), ranks) == (inner, changes)
    assert warning in caplog.text and len(caplog.records) == bool(warning)


def test_a_schedule_of_deepspeed_with_another_length_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Accelerate divides the length of a ``DummyScheduler`` by the number of ranks."""
    for length, warns in ((100, False), (50, True)):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        saved, live = (WarmupDecayLR(optimizer, total, 0.0, 0.1, 10) for total in (100, length))
        for _ in range(20):
            saved.step()
        live.load_state_dict(saved.state_dict())
        accelerating.warn_rate(live, "folder")
        assert ("gives the learning rate 0.07" in caplog.text) is warns


@pytest.mark.parametrize(("split", "scheduler"), all_turns([True, False], ["plain", "cosine"], 1, str))
def test_split_batches_may_change(split: bool, scheduler: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The world is the same, so its numbers do not show the change."""
    world, saved = ucp_worlds.get(2), str(tmp_path / "four")
    options: dict[str, Any] = {"micro": 4, "scheduler": scheduler}
    whole = world.run(train, make_config(2), split_batches=split, save={4: saved}, **options)
    agree(whole, world.run(train, make_config(2), split_batches=not split, resume=saved, **options), 5)


@pytest.mark.parametrize(("scheduler", "ranks"), all_turns(["plain", "cosine", "one-cycle"], [(2, 1), (1, 2)], 1, str))
def test_schedules_continue_after_two_resumes(
    scheduler: str, ranks: tuple[int, int], tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    before, after = ({"micro": 8 // each, "scheduler": scheduler} for each in ranks)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    whole = ucp_worlds.get(ranks[0]).run(train, make_config(1), save={4: first}, **before)
    after |= {"resume": first, "save": {7: second}}
    agree(whole, ucp_worlds.get(ranks[1]).run(train, make_config(1), **after), 5)
    for world, options in zip(ranks, (before, after), strict=True):
        again = {**options, "resume": second, "save": None}
        agree(whole, ucp_worlds.get(world).run(train, make_config(1), **again), 8)


def test_a_partial_step_is_repeated_from_its_start(saved: Saved, ucp_worlds: WorldPool) -> None:
    """The gradient of the first micro batch was not saved."""
    folder, whole = saved
    for ranks, micro in ((2, 2), (1, 4)):
        options: dict[str, Any] = {"micro": micro, "accumulation": 2, "resume": str(folder / "middle")}
        rest = ucp_worlds.get(ranks).run(train, make_config(1), **options)
        agree(whole, rest, 7)
        assert ["repeat the last 1 micro batches" in text for text in rest[0].warnings].count(True) == 1
    assert ["saving after 1 of the 2 micro batches" in text for text in whole[0].warnings] == [True]
    assert not whole[1].warnings


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        (2, {"micro": 2}, "^Mismatch.*Use a data loader with batch_size=2 and gradient_accumulation_steps=2"),
        (1, {"micro": 3}, "^Mismatch.*Use a data loader with batch_size=2 and gradient_accumulation_steps=4"),
        (1, {"micro": 8, "use_stateful_dataloader": True}, "^Unsupported.*position of a stateful data loader"),
    ],
    ids=["same-world", "other-micro-batch", "stateful"],
)
def test_another_total_batch_or_a_stateful_position_is_refused(
    ranks: int, options: dict[str, Any], words: str, saved: Saved, ucp_worlds: WorldPool
) -> None:
    resume = {"resume": str(saved[0] / "five"), **options}
    for error in ucp_worlds.get(ranks).run(trainers_common.attempt, train, make_config(2), **resume):
        assert re.search(words, error)


def test_another_order_of_samples_is_a_warning(saved: Saved, ucp_worlds: WorldPool) -> None:
    options: dict[str, Any] = {"micro": 4, "accumulation": 2, "resume": str(saved[0] / "five")}
    for seed, warns in ((5, False), (6, True)):
        (rest,) = ucp_worlds.get(1).run(train, make_config(2), seed=seed, **options)
        assert any("another order than in the saved run (seed 5 → 6)" in text for text in rest.warnings) is warns


def test_preserved_batch_sizes_apply_to_the_loop(saved: Saved, ucp_worlds: WorldPool) -> None:
    config = make_config(2, {"preserve_batch_size": True}, train_batch_size=8)
    options: dict[str, Any] = {"micro": 4, "accumulation": 1, "resume": str(saved[0] / "five")}
    rest = ucp_worlds.get(1).run(train, config, **options)
    agree(saved[1], rest, 6)


@pytest.mark.parametrize("kind", [ElasticSampler, ElasticStream])
def test_samples_are_split_over_the_ranks_once(kind: type[Order], ucp_worlds: WorldPool) -> None:
    first, second = ucp_worlds.get(2).run(split, kind, 1)
    assert sorted(first + second) == list(range(16))
    for error in ucp_worlds.get(2).run(trainers_common.attempt, split, kind, 2):
        assert error.startswith("ConfigError") and "Make it with rank=0, world=1" in error


def test_the_last_complete_checkpoint_is_kept_during_newer_writes(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Accelerate removes older checkpoints before it saves. A checkpoint without Accelerate's files is refused."""
    config = make_config(1, {"save": {"memory": str(tmp_path / "memory"), "wait_s": 240}})
    (saves, steps), _ = ucp_worlds.get(2).run(rotate, str(tmp_path / "out"), config)
    first, second, third = ({f"checkpoint_{number}": number == 0} for number in range(3))
    assert saves[1] == first | second and saves[2] == first | second | third
    assert {"checkpoint_2": True} | {"checkpoint_3": saves[3]["checkpoint_3"]} == saves[3]
    assert (saves[4], steps) == ({"checkpoint_2": True, "checkpoint_3": True}, 4)
    folder = tmp_path / "out" / "checkpoints" / "checkpoint_3"
    (folder / accelerating.OWN).unlink()
    (error,) = ucp_worlds.get(1).run(trainers_common.attempt, train, config, micro=8, resume=str(folder))
    assert error.startswith("CheckpointError") and "the save was interrupted" in error


def test_a_save_over_an_existing_folder_is_written_at_once(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Otherwise a crash would leave engine state and Accelerate's files of different saves."""
    config = make_config(1, {"save": {"memory": str(tmp_path / "memory"), "wait_s": 240}})
    ucp_worlds.get(1).run(save_twice, str(tmp_path / "out"), config)
