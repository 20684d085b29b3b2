"""Hugging Face's Trainer, really launched on gloo: any world goes on as the uninterrupted run does."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainers_hf
from trainers_hf import Trained

from deepspeed_ucp import MismatchError
from deepspeed_ucp.atoms import SavedJob
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.trainers import huggingface

pytest.importorskip("accelerate")
pytest.importorskip("transformers", "5.0")

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SAVES = {"save_strategy": "steps", "save_steps": 2}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
DECAY = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    }
}
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,  # the first one is
}


def make_config(stage: int, universal: Any = True, **more: Any) -> dict[str, Any]:
    return {
        **dict.fromkeys(SIZES, "auto"),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": {"universal": universal},
        "steps_per_print": 1_000_000,
        **more,
    }


def agree(whole: list[Trained], rest: list[Trained], first: int) -> None:
    """Of all steps from ``first`` on."""
    assert list(rest[0].samples) == [step for step in whole[0].samples if step >= first]
    for step in rest[0].samples:
        taken, expected = (sorted(itertools.chain(*(each.samples[step] for each in run))) for run in (rest, whole))
        assert taken == expected, step
        mine, theirs = rest[0].log[step], whole[0].log[step]
        assert (mine["learning_rate"], mine["epoch"]) == (theirs["learning_rate"], theirs["epoch"]), step
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-6), step
    for name, weight in whole[0].weights.items():
        torch.testing.assert_close(rest[0].weights[name], weight, rtol=0, atol=2e-6)


@pytest.fixture(scope="module")
def shrunk(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trained]]:
    """A run of two ranks with a save every other step."""
    folder = tmp_path_factory.mktemp("hf")
    options = {"per_device_train_batch_size": 4, **SAVES}
    return folder, ucp_worlds.get(2).run(trainers_hf.train, str(folder), make_config(2), **options)


@pytest.mark.parametrize(
    ("stage", "config", "options"),
    [(3, {}, {}), (1, {"train_batch_size": 8}, {}), (2, {}, {"auto_find_batch_size": True})],
    ids=["auto", "written-out", "found"],
)
def test_one_rank_goes_on(
    stage: int,
    config: dict[str, Any],
    options: dict[str, Any],
    shrunk: tuple[Path, list[Trained]],
    ucp_worlds: WorldPool,
) -> None:
    """In the middle of an epoch; with another stage, and arguments that would give half the total batch."""
    folder, whole = shrunk
    chosen = {"per_device_train_batch_size": 4, "resume": str(folder / "checkpoint-6"), **options}
    rest = ucp_worlds.get(1).run(trainers_hf.train, str(folder), make_config(stage, **config), **chosen)
    agree(whole, rest, 7)
    assert (whole[0].sizes, rest[0].sizes) == ((4, 1, 8), (4, 2, 8))
    assert rest[0].random[7] == whole[0].random[7] != whole[1].random[7]


def test_two_ranks_go_on_with_lora_and_the_best_model(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Grown from one; the frozen base is in no file, the best model is one that the single rank saved."""
    config = {stage: make_config(stage, **ADAM, **DECAY) for stage in (3, 1)}
    options = {**SAVES, **BEST, "lora": True, "per_device_train_batch_size": 8}
    whole = ucp_worlds.get(1).run(trainers_hf.train, str(tmp_path), config[3], **options)
    resume = str(tmp_path / "checkpoint-4")
    rest = ucp_worlds.get(2).run(trainers_hf.train, str(tmp_path), config[1], resume=resume, **options)
    agree(whole, rest, 5)
    assert (whole[0].sizes, rest[0].sizes) == ((8, 1, 8), (4, 1, 8))
    assert rest[0].best == whole[0].best == str(tmp_path / "checkpoint-2")
    assert not [path for path in (tmp_path / "checkpoint-4").rglob("*.pt") if b"base.weight" in path.read_bytes()]


@pytest.mark.parametrize(
    ("ranks", "config", "options", "told"),
    [
        (2, {}, {"per_device_train_batch_size": 2}, "per_device_train_batch_size=2 and gradient_accumulation_steps=2"),
        (1, {"train_batch_size": 4}, {}, 'Write train_batch_size 8 or "auto"'),
        (1, {}, {"per_device_train_batch_size": 8, "size": 80}, "the saved run had 5 steps, this one's has 10"),
    ],
    ids=["same-world", "written-out", "other-data"],
)
def test_another_total_batch_is_refused(
    ranks: int,
    config: dict[str, Any],
    options: dict[str, Any],
    told: str,
    shrunk: tuple[Path, list[Trained]],
    ucp_worlds: WorldPool,
) -> None:
    chosen = {"per_device_train_batch_size": 4, "resume": str(shrunk[0] / "checkpoint-6"), **options}
    config = make_config(2, **config)
    errors = ucp_worlds.get(ranks).run(trainers_hf.attempt, str(shrunk[0]), config, **chosen)
    for name, text in errors:
        assert name == "MismatchError" and told in text
        assert '"checkpoint.universal": {"total_batch": "live"}' in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"train_sampling_strategy": "group_by_length"}, True),
        ({"group_by_length": True}, True),
        ({"train_sampling_strategy": "random"}, False),
        ({"group_by_length": False}, False),
    ],
    ids=str,
)
def test_an_order_that_no_resume_gives_again_is_told(
    options: dict[str, Any], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    huggingface.tell_order(SimpleNamespace(**options))
    assert ("goes on with other samples" in caplog.text) is told


def test_ranks_that_cannot_share_it_are_refused() -> None:
    with pytest.raises(MismatchError, match="8 samples, this run has 12 .*Take a number of ranks that divides it"):
        huggingface.choose_batch(SavedJob(2, 1, 6, 8, 1), "folder", 4, 3, 12, None)


def test_another_total_batch_is_taken_where_it_is_asked_for(
    shrunk: tuple[Path, list[Trained]], ucp_worlds: WorldPool
) -> None:
    """Step 6 then means its own sample 24, and not 48."""
    options = {"per_device_train_batch_size": 4, "resume": str(shrunk[0] / "checkpoint-6"), "stop": 7}
    config = make_config(2, {"total_batch": "live"})
    (rest,) = ucp_worlds.get(1).run(trainers_hf.train, str(shrunk[0]), config, **options)
    assert rest.sizes == (4, 1, 4)
    assert list(rest.samples) == [7]


def test_weights_alone_are_no_checkpoint(
    shrunk: tuple[Path, list[Trained]], tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    shutil.copytree(
        shrunk[0] / "checkpoint-6", tmp_path / "checkpoint-6", ignore=shutil.ignore_patterns("global_step*")
    )
    options = {"per_device_train_batch_size": 4, "resume": str(tmp_path / "checkpoint-6")}
    ((name, text),) = ucp_worlds.get(1).run(trainers_hf.attempt, str(tmp_path), make_config(2), **options)
    assert name == "CheckpointError" and "save_only_model" in text


@pytest.mark.parametrize("stages", list(itertools.product((1, 2, 3), repeat=2)), ids=str)
@pytest.mark.parametrize("ranks", [(4, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("scheduler", [{}, ADAM, {**ADAM, **DECAY}], ids=["torch", "callable", "deepspeed"])
@pytest.mark.exhaustive
def test_every_stage_on_any_world(
    stages: tuple[int, int], ranks: tuple[int, int], scheduler: dict[str, Any], tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """Twice: what has been resumed is resumed again on the first world."""
    before, after = (make_config(stage, **scheduler) for stage in stages)
    options = {"per_device_train_batch_size": 8 // ranks[0], **SAVES}
    whole = ucp_worlds.get(ranks[0]).run(trainers_hf.train, str(tmp_path), before, **options)
    other, resume = tmp_path / "other", str(tmp_path / "checkpoint-6")
    part = ucp_worlds.get(ranks[1]).run(trainers_hf.train, str(other), after, resume=resume, **options)
    agree(whole, part, 7)
    resume = str(other / "checkpoint-12")
    again = ucp_worlds.get(ranks[0]).run(trainers_hf.train, str(other), before, resume=resume, **options)
    agree(whole, again, 13)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=str)
@pytest.mark.exhaustive
def test_epochs_that_drop_their_last_samples(ranks: tuple[int, int], tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """44 samples are five steps of eight; with micro batches of four the trainer would make a sixth of what is left."""
    options = {"size": 44, "dataloader_drop_last": True, "per_device_train_batch_size": 4, **SAVES}
    if ranks == (2, 1):
        whole = ucp_worlds.get(2).run(trainers_hf.train, str(tmp_path), make_config(1), **options)
        for folder, first in (("checkpoint-6", 7), ("checkpoint-8", 9)):  # the second is of the resumed run
            resume = str(tmp_path / folder)
            rest = ucp_worlds.get(1).run(trainers_hf.train, str(tmp_path), make_config(1), resume=resume, **options)
            agree(whole, rest, first)
        return
    options["gradient_accumulation_steps"] = 2
    ucp_worlds.get(1).run(trainers_hf.train, str(tmp_path), make_config(1), stop=6, **options)
    resume = str(tmp_path / "checkpoint-6")
    errors = ucp_worlds.get(2).run(trainers_hf.attempt, str(tmp_path), make_config(1), resume=resume, **options)
    assert all("an epoch of the saved run had 6 steps, this one's has 5" in text for _, text in errors)


@pytest.mark.exhaustive
def test_to_another_precision(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The samples and rates are the same; losses are those of another precision."""
    options = {"per_device_train_batch_size": 4, **SAVES}
    whole = ucp_worlds.get(2).run(trainers_hf.train, str(tmp_path), make_config(2), bf16=True, **options)
    resume = str(tmp_path / "checkpoint-6")
    rest = ucp_worlds.get(1).run(trainers_hf.train, str(tmp_path), make_config(3), resume=resume, **options)
    for step in range(7, 16):
        assert sorted(rest[0].samples[step]) == sorted(whole[0].samples[step] + whole[1].samples[step])
        assert rest[0].log[step]["learning_rate"] == whole[0].log[step]["learning_rate"]
        assert rest[0].log[step]["loss"] == pytest.approx(whole[0].log[step]["loss"], abs=0.02)
