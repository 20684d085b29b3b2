"""Hugging Face's Trainer on gloo: a run resumed in any world equals the uninterrupted one."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainers_common
import trainers_hf
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LambdaLR
from trainers_common import make_config
from trainers_hf import Trained

from deepspeed_ucp import CheckpointError, MismatchError, beacon
from deepspeed_ucp.beacon import Listener
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.trainers import hffolders, huggingface
from tests.support.covering import params
from tests.support.damage import flip_largest

pytest.importorskip("accelerate")
V5 = Version(pytest.importorskip("transformers", "4.57").__version__) >= Version("5")

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


def train(worlds: WorldPool, ranks: int, folder: Path, config: dict[str, Any], **options: Any) -> list[Trained]:
    return worlds.get(ranks).run(trainers_hf.train, str(folder), config, **options)


def attempt(worlds: WorldPool, ranks: int, folder: Path, config: dict[str, Any], **options: Any) -> list[str]:
    return worlds.get(ranks).run(trainers_common.attempt, trainers_hf.train, str(folder), config, **options)


def agree(whole: list[Trained], rest: list[Trained], first: int) -> None:
    trainers_common.agree(whole, rest, first, loss=2e-6 if V5 else 1.1e-4)  # transformers 4 rounds losses
    assert all(rest[0].epochs[step] == whole[0].epochs[step] for step in rest[0].samples)


Saved = tuple[Path, list[Trained]]


@pytest.fixture(scope="module")
def saved(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A run of two ranks with a save every other step."""
    folder = tmp_path_factory.mktemp("hf")
    return folder, train(ucp_worlds, 2, folder, make_config(2), per_device_train_batch_size=4, **SAVES)


def make_resume(saved: Saved, **options: Any) -> dict[str, Any]:
    return {"per_device_train_batch_size": 4, "resume": str(saved[0] / "checkpoint-6"), **options}


@pytest.mark.releases
@pytest.mark.parametrize(
    ("stage", "config", "options"),
    [(3, {}, {}), (1, {"train_batch_size": 8}, {}), (2, {}, {"auto_find_batch_size": True})],
    ids=["auto", "written-out", "found"],
)
def test_one_rank_resumes_a_save_of_two(
    stage: int, config: dict[str, Any], options: dict[str, Any], saved: Saved, ucp_worlds: WorldPool
) -> None:
    """It resumes within an epoch, with another stage, and with arguments for half the total batch."""
    folder, whole = saved
    options = make_resume(saved, **options)
    if "auto_find_batch_size" in options and not V5:
        (error,) = attempt(ucp_worlds, 1, folder, make_config(stage), **options)
        assert re.match("UnsupportedError.*Resume without it, with per_device_train_batch_size=4", error)
        return
    rest = train(ucp_worlds, 1, folder, make_config(stage, **config), **options)
    agree(whole, rest, 7)
    assert (whole[0].sizes, rest[0].sizes) == ((4, 1, 8), (4, 2, 8))
    assert rest[0].random[7] == whole[0].random[7] != whole[1].random[7]


SPLIT = {"accelerator_config": {"split_batches": True}}


def test_batches_that_ranks_share_keep_their_size(
    saved: Saved, tmp_path: Path, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    """The trainer, the ds_config and DeepSpeed count such a batch once per rank."""
    whole = train(ucp_worlds, 2, tmp_path, make_config(2), per_device_train_batch_size=8, **SAVES, **SPLIT)
    agree(saved[1], whole, 1)
    split = {"resume": str(tmp_path / "checkpoint-6")}
    for ranks, options, sizes in (
        (1, {**split, **SPLIT, "per_device_train_batch_size": 8}, (8, 1, 8)),
        (1, {**split, "per_device_train_batch_size": 4}, (4, 2, 8)),
        (2, make_resume(saved, **SPLIT, per_device_train_batch_size=8), (8, 1, 16)),
        (2, {**split, "per_device_train_batch_size": 4}, (4, 1, 8)),
    ):
        with subtests.test(ranks=ranks, sizes=sizes):
            rest = train(ucp_worlds, ranks, tmp_path / "rest", make_config(1), **options)
            agree(whole, rest, 7)
            assert rest[0].sizes == sizes
    for options, accumulation in (
        ({**split, "per_device_train_batch_size": 8}, 1),
        (make_resume(saved, **SPLIT, per_device_train_batch_size=4), 2),
    ):
        advice = f"Set per_device_train_batch_size=4 and gradient_accumulation_steps={accumulation}"
        assert advice in attempt(ucp_worlds, 2, tmp_path, make_config(1), **options)[0]


def test_two_ranks_resume_lora_and_the_best_model(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """One rank saved the best model. No file contains the frozen base."""
    configs = [make_config(stage, **ADAM, **DECAY) for stage in (3, 1)]
    options = {**SAVES, **BEST, "lora": True, "per_device_train_batch_size": 8}
    whole = train(ucp_worlds, 1, tmp_path, configs[0], **options)
    rest = train(ucp_worlds, 2, tmp_path, configs[1], resume=str(tmp_path / "checkpoint-4"), **options)
    agree(whole, rest, 5)
    assert (whole[0].sizes, rest[0].sizes) == ((8, 1, 8), (4, 1, 8))
    assert rest[0].best == whole[0].best == str(tmp_path / "checkpoint-2")
    assert not [path for path in (tmp_path / "checkpoint-4").rglob("*.pt") if b"base.weight" in path.read_bytes()]


@pytest.mark.parametrize(("model", "count"), [("Means", 1), ("Sums", 0)], ids=str)
def test_losses_keep_their_scale_on_more_ranks(model: str, count: int, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """If a model ignores the number of items, the trainer adds its means over ranks and micro batches.

    Gradients are clipped, so their scale matters. The run then resumes on one rank again. The engine makes the
    optimizer and has torch's scheduler.
    """
    options = {**SAVES, "model": model, "per_device_train_batch_size": 8, "max_grad_norm": 0.5, "num_train_epochs": 2}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    whole = train(ucp_worlds, 1, tmp_path, make_config(1, **ADAM), **options)
    other, resume = tmp_path / "other", str(tmp_path / "checkpoint-4")
    rest = train(ucp_worlds, 2, other, make_config(2, **ADAM), resume=resume, **options)
    agree(whole, rest, 5)
    options["per_device_train_batch_size"], resume = 4, str(other / "checkpoint-6")
    again = train(ucp_worlds, 1, tmp_path, make_config(1, **ADAM), resume=resume, **options)
    agree(whole, again, 7)
    for run, warnings in ((rest, count), (again, count if V5 else 0)):  # transformers 4 takes the saved micro batch
        judged = {step: loss for step, loss in run[0].judged.items() if step > 4}
        assert judged == pytest.approx({step: whole[0].judged[step] for step in judged}, abs=2e-6)
        assert sum("does not use num_items_in_batch" in text for text in run[0].warnings) == warnings


@pytest.mark.parametrize(
    ("ranks", "config", "options", "advice"),
    [
        pytest.param(
            *(2, {}, {"per_device_train_batch_size": 2}),
            "per_device_train_batch_size=2 and gradient_accumulation_steps=2",
            marks=pytest.mark.skipif(not V5, reason="transformers 4 takes the saved micro batch"),
        ),
        (1, {"train_batch_size": 4}, {}, 'Write train_batch_size 8 or "auto"'),
        (1, {}, {"per_device_train_batch_size": 8, "size": 80}, "the saved run had 5 steps, this one's has 10"),
    ],
    ids=["same-world", "written-out", "other-data"],
)
def test_another_total_batch_is_refused(
    ranks: int, config: dict[str, Any], options: dict[str, Any], advice: str, saved: Saved, ucp_worlds: WorldPool
) -> None:
    for error in attempt(ucp_worlds, ranks, saved[0], make_config(2, **config), **make_resume(saved, **options)):
        assert error.startswith("MismatchError") and advice in error
        assert '"checkpoint.universal": {"total_batch": "live"}' in error


LENGTH, STRATEGY = "group_by_length orders an epoch", "train_sampling_strategy"


@pytest.mark.parametrize(
    ("saved", "live", "warning"),
    [
        ({}, {STRATEGY: "group_by_length"}, LENGTH),
        ({}, {"group_by_length": True}, LENGTH),
        ({}, {STRATEGY: "random", "seed": 4}, ""),  # the saved arguments are unknown
        ({"seed": 3}, {"seed": 4}, "seed 3 → 4"),
        ({"seed": 3}, {"seed": 3, "data_seed": 7}, "seed 3 → 7"),
        ({"seed": 3, "data_seed": 7}, {"seed": 4, "data_seed": 7}, ""),
        ({"seed": 3}, {"seed": 4, "ignore_data_skip": True}, ""),
        ({STRATEGY: "random", "seed": 3}, {STRATEGY: "sequential", "seed": 3}, f"{STRATEGY} random → sequential"),
        ({STRATEGY: "sequential", "seed": 3}, {STRATEGY: "sequential", "seed": 4}, ""),
    ],
    ids=str,
)
def test_another_order_of_samples_is_a_warning(
    saved: dict[str, Any], live: dict[str, Any], warning: str, tmp_path: Path, caplog: Any
) -> None:
    if saved:
        torch.save(SimpleNamespace(**saved), tmp_path / "training_args.bin")
    huggingface.check_order(SimpleNamespace(**{"ignore_data_skip": False, **live}), str(tmp_path))
    assert warning in caplog.text and len(caplog.records) == bool(warning)


@pytest.mark.parametrize(
    ("universal", "options", "sizes", "warning"),
    [
        (True, {}, (4, 2, 8), "total batch 8 kept on 1 rank: gradient accumulation 1 → 2$"),
        ({"total_batch": "live"}, {}, (4, 1, 4), "sample 24 of its data, but the saved run had reached sample 48,"),
        (True, {"size": 80, "ignore_data_skip": True}, (4, 2, 8), "had 5 steps, this one's has 10: epochs are counted"),
        (True, {"seed": 4}, (4, 2, 8), r"another order than in the saved run \(seed 3 → 4\)"),
    ],
    ids=["kept", "live", "other-data", "other-seed"],
)
def test_changed_arguments_are_warnings(
    universal: Any, options: Any, sizes: tuple[int, ...], warning: str, saved: Saved, ucp_worlds: WorldPool
) -> None:
    options = make_resume(saved, stop=7, **options)
    (rest,) = train(ucp_worlds, 1, saved[0], make_config(2, universal), **options)
    assert (rest.sizes, list(rest.samples)) == (sizes, [7])
    assert sum(re.search(warning, text) is not None for text in rest.warnings) == 1
    assert sum("total batch" in text for text in rest.warnings) == 1


@pytest.mark.skipif(not V5, reason="refused with transformers 4")
@pytest.mark.parametrize("plugin", params([True], [False], lambda plugin: "" if plugin else "without-the-plugin"))
def test_an_automatic_batch_size_of_the_trainer_is_kept(plugin: bool, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The trainer had memory for 3 instead of 4 samples per rank, which its ds_config does not record."""
    options = {"per_device_train_batch_size": 4, "auto_find_batch_size": True, "size": 48, "most": 3, **SAVES}
    options |= {"num_train_epochs": 2, "data_seed": 7}
    config = make_config(2, plugin)
    whole = train(ucp_worlds, 2, tmp_path, config, **options)
    assert (whole[0].sizes[1:], len(whole[0].samples[1])) == ((1, 6 if plugin else 8), 3)
    for ranks, most, sizes in [(2, 3, (3, 1, 6)), (2, 2, (1, 3, 6)), (1, 3, (3, 2, 6))]:
        chosen = {**options, "most": most, "resume": str(tmp_path / "checkpoint-4")}
        rest = train(ucp_worlds, ranks, tmp_path / "other", make_config(2), **chosen)
        agree(whole, rest, 5)
        assert rest[0].sizes == sizes


def test_a_resume_may_load_only_weights(saved: Saved, ucp_worlds: WorldPool) -> None:
    config = make_config(3, {"arguments": {"load_module_only": True}}, **ADAM)
    (first,) = train(ucp_worlds, 1, saved[0], config, **make_resume(saved, stop=1, learning_rate=0.0))
    weights = load_file(saved[0] / "checkpoint-6" / "model.safetensors")
    assert list(first.samples) == [1] and all(weights[name].equal(weight) for name, weight in first.weights.items())
    assert any("a new run starts from its weights" in text for text in first.warnings)


@pytest.mark.parametrize(
    ("more", "fraction"),
    [({}, 9 / 12), (ADAM, 8 / 12), ({**ADAM, **DECAY}, 9 / 12)],
    ids=["torch", "engine", "deepspeed"],
)
def test_the_schedule_of_the_script_continues(
    more: dict[str, Any], fraction: float, saved: Saved, ucp_worlds: WorldPool
) -> None:
    """Torch's schedule in the engine takes its step before the rate is logged."""
    states = {} if not more else {"load_optimizer_states": False}  # DeepSpeed's optimizer has other groups
    config = make_config(3, {"arguments": {"load_lr_scheduler_states": False, **states}}, **more)
    (rest,) = train(ucp_worlds, 1, saved[0], config, **make_resume(saved, stop=7, learning_rate=4e-2))
    assert list(rest.samples) == [7]
    assert any("load_lr_scheduler_states=False" in text and "caller" in text for text in rest.warnings)
    assert rest.rates[7] == pytest.approx(4e-2 * fraction)
    assert not any("hyper-parameters of this run" in text for text in rest.warnings)


def test_a_schedule_with_another_number_of_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a run under PEFT has one group. Partial functions have a state, as the schedules of transformers."""
    optimizers = [torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in range(count)], lr=1.0) for count in (2, 1)]
    saved, live = (LambdaLR(each, [partial(max, 1.0) for _ in each.param_groups]) for each in optimizers)
    monkeypatch.setattr(huggingface, "find_options", lambda _: UniversalConfig())
    with pytest.raises(MismatchError, match="more param groups than this run's.*load_lr_scheduler_states"):
        huggingface.load_scheduler(lambda *_: live.load_state_dict(saved.state_dict()), None, "checkpoint-2")


def test_a_folder_saved_with_save_only_model_has_only_weights(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-6"
    folder.mkdir()
    (folder / "trainer_state.json").write_text('{"global_step": 6}')
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="save_only_model leaves out"):
        choose(folder)
    assert choose(folder, arguments={"load_module_only": True}) == str(folder)


def choose(wanted: Any, output: Any = None, **config: Any) -> Any:
    args = SimpleNamespace(output_dir=str(output), hf_deepspeed_config=SimpleNamespace(config={}))
    return hffolders.choose_folder(args, wanted, UniversalConfig(**config))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_a_missing_folder_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    for fallback in (False, True):
        with pytest.raises(CheckpointError, match=r"checkpoint-6: does not exist. Check the path"):
            choose(str(tmp_path / "checkpoint-6"), fallback=fallback)
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(CheckpointError, match=r"checkpoint-6: does not exist. .* has checkpoint-4"):
        choose(str(tmp_path / "checkpoint-6"))


def test_fallback_is_recommended_if_an_older_folder_exists(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-6").mkdir()
    for recommended in (False, True):
        with pytest.raises(CheckpointError, match="was interrupted") as raised:
            choose(True, tmp_path)
        assert ('"fallback": true' in str(raised.value)) is recommended
        (tmp_path / "checkpoint-4").mkdir(exist_ok=True)


FAULTS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no-state": ("trainer_state.json", Path.unlink, "was interrupted"),
    "half-a-state": ("trainer_state.json", cut, "trainer_state.json: is no valid JSON"),
    "no-latest": ("latest", Path.unlink, "latest is missing"),
    "no-tag": ("global_step6", shutil.rmtree, "no checkpoint with tag 'global_step6'"),
    "no-engine": (
        "global_step6",
        lambda tag: (shutil.rmtree(tag), (tag.parent / "latest").unlink()),
        "which was saved with rng_state_0.pth",
    ),
    "no-shard": ("global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt", Path.unlink, "missing"),
    "half-a-shard": ("global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt", cut, "zero_pp_rank_1"),
    "damaged": ("global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt", flip_largest, "the writer stored"),
    "no-schedule": ("scheduler.pt", Path.unlink, "scheduler.pt: missing"),
    "half-a-schedule": ("scheduler.pt", cut, "scheduler.pt"),
    "half-of-random-states": ("rng_state_1.pth", cut, "rng_state_1.pth"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fallback_skips_an_incomplete_newest_folder(fault: str, saved: Saved, tmp_path: Path, caplog: Any) -> None:
    name, spoil, message = FAULTS[fault]
    older, newest = (shutil.copytree(saved[0] / each, tmp_path / each) for each in ("checkpoint-4", "checkpoint-6"))
    (tmp_path / "checkpoint-best").mkdir()
    assert choose(True, tmp_path, fallback=True) == choose(str(newest), fallback=True) == str(newest)
    assert not caplog.records
    spoil(newest / name)
    assert choose(True, tmp_path, fallback=True) == choose(str(newest), fallback=True) == str(older)
    assert f"{older}: resuming from it; skipped: {newest}" in caplog.text and message in caplog.text
    if not fault.startswith(("half-of", "half-a-sch", "no-sch", "half-a-shard", "damaged", "no-shard")):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            choose(True, tmp_path)
    shutil.rmtree(older)
    with pytest.raises(CheckpointError, match="neither it nor one before it is complete") as error:
        choose(True, tmp_path, fallback=True)
    assert "save_only_model" not in str(error.value) and error.value.shared


def test_a_restarted_run_skips_broken_folders(saved: Saved, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """It continues from the older folder, saves into the broken one, and resumes from there."""
    folder, whole = saved
    for name in ("checkpoint-4", "checkpoint-6"):
        shutil.copytree(folder / name, tmp_path / name)
    flip_largest(tmp_path / "checkpoint-6" / "global_step6" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    options = {"per_device_train_batch_size": 4, "resume": True, **SAVES}
    config = make_config(3, {"fallback": True})
    first = train(ucp_worlds, 1, tmp_path, config, stop=6, **options)
    assert list(first[0].samples) == [5, 6]
    assert sum("skipped: " in text for text in first[0].warnings) == 1
    rest = train(ucp_worlds, 1, tmp_path, config, **options)
    agree(whole, rest, 7)


@pytest.mark.exhaustive
def test_epochs_with_dropped_samples_keep_their_number_of_steps(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """44 samples make five steps of eight. With micro batches of four the trainer would take a sixth step."""
    config, resume = make_config(1), str(tmp_path / "checkpoint-6")
    options = {"size": 44, "dataloader_drop_last": True, "per_device_train_batch_size": 4, **SAVES}
    whole = train(ucp_worlds, 2, tmp_path, config, **options)
    agree(whole, train(ucp_worlds, 1, tmp_path, config, resume=resume, **options), 7)  # saves at step 8
    agree(whole, train(ucp_worlds, 1, tmp_path, config, resume=str(tmp_path / "checkpoint-8"), **options), 9)
    options["gradient_accumulation_steps"] = 2
    train(ucp_worlds, 1, tmp_path, config, stop=6, **options)
    errors = attempt(ucp_worlds, 2, tmp_path, config, resume=resume, **options)
    assert all("an epoch of the saved run had 6 steps, this one's has 5" in error for error in errors)


@pytest.mark.skipif(not V5, reason="with transformers 4 a save is written when it returns")
def test_the_last_complete_checkpoint_is_kept_during_newer_writes(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Training does not wait. At the end the limit is met, and the next run resumes from complete files."""
    save = {"memory": str(tmp_path / "memory"), "wait_s": 240}
    out, config = str(tmp_path / "out"), make_config(1, {"save": save})
    options = {"per_device_train_batch_size": 4, "save_total_limit": 1, **SAVES}
    run = train(ucp_worlds, 2, out, config, held=(4, 6), max_steps=8, **options)
    two, four, six = ("checkpoint-2", True), ("checkpoint-4", False), ("checkpoint-6", False)
    assert run[0].folders[4:6] == [dict([two, four])] * 2  # when steps 5 and 6 begin
    assert run[0].folders[6] == dict([two, four, six])
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-8"]
    assert list((tmp_path / "out" / "checkpoint-8").glob("*/ucp_seal.json"))
    assert any("checkpoint-4 still lacks" in text for text in run[0].warnings)
    options["per_device_train_batch_size"] = 8
    rest = train(ucp_worlds, 1, out, config, resume=True, max_steps=10, **options)
    assert list(rest[0].samples) == [9, 10]
    best = {**BEST, "greater_is_better": False, "resume": True, "max_steps": 12}
    rest = train(ucp_worlds, 1, out, config, **options, **best)
    assert rest[0].best == str(tmp_path / "out" / "checkpoint-12")


@pytest.mark.skipif(not V5, reason="with transformers 4 a save is written when it returns")
def test_the_last_complete_checkpoint_survives_the_loss_of_a_machine(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The limit is one, and the run has ended before the next checkpoint was written."""
    out, save = str(tmp_path / "out"), {"memory": str(tmp_path / "memory"), "wait_s": 240}
    options = {"save_total_limit": 1, **SAVES, "max_steps": 7}
    config = make_config(1, {"save": save, "fallback": True})
    run = train(ucp_worlds, 1, out, config, held=(4, 99), stop=7, per_device_train_batch_size=8, **options)
    assert run[0].folders[-1] == {"checkpoint-2": True, "checkpoint-4": False, "checkpoint-6": False}
    assert not list((tmp_path / "memory").rglob("*_states.pt"))
    rest = train(ucp_worlds, 1, out, config, resume=True, per_device_train_batch_size=8, **options)
    assert list(rest[0].samples) == [3, 4, 5, 6, 7]
    assert any("skipped" in text and "checkpoint-6" in text for text in rest[0].warnings)


@pytest.mark.skipif(not V5, reason="transformers 4 has no enable_jit_checkpoint")
def test_only_one_of_two_saves_on_a_signal_is_made(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The Trainer's save would follow 3 s later, on each rank separately."""
    options = {"enable_jit_checkpoint": True, "signal_at": 2, "per_device_train_batch_size": 4}
    run = train(ucp_worlds, 2, tmp_path, make_config(2), **options)
    assert [each.code for each in run] == [0, 0]
    assert (tmp_path / "preempted" / "latest").read_text() == "global_step2"
    assert not list(tmp_path.glob("checkpoint-*"))
    text = "this save replaces the Trainer's (enable_jit_checkpoint). It has no state of the Trainer"
    assert [sum(text in warning for warning in each.warnings) for each in run] == [1, 0]


def test_a_trainer_that_removes_folders_in_an_unknown_way_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example transformers 4, or a release that imports `shutil` differently."""
    parts = {"rotate_checkpoints": None, "Trainer": SimpleNamespace(_finalize_training=None), "shutil": shutil}
    monkeypatch.setitem(sys.modules, "transformers.trainer_utils", SimpleNamespace(shutil=shutil))  # type: ignore[misc]
    for lacking, known in ((None, True), *((name, False) for name in ("rotate_checkpoints", "shutil"))):
        module = SimpleNamespace(**{name: part for name, part in parts.items() if name != lacking})
        monkeypatch.setitem(sys.modules, "transformers.trainer", module)  # type: ignore[misc]
        assert huggingface._can_rotate() is known


@pytest.mark.skipif(not V5, reason="transformers 4 does not report to Kubeflow")
def test_the_plugin_does_not_report_to_kubeflow_if_the_trainer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.integration_utils import KubeflowCallback

    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://nowhere")
    monkeypatch.setattr(beacon, "_active", {"kubeflow": Listener(), "nvrx": Listener()})
    monkeypatch.setattr(huggingface, "find_options", lambda _: None)
    for callbacks, left in (([], ["kubeflow", "nvrx"]), ([KubeflowCallback()], ["nvrx"])):
        trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=callbacks))
        huggingface.train(lambda trainer: None, trainer)
        assert list(beacon._active or {}) == left
