"""Facts of the saved job that several trainers need, without a trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ucp import ConfigError, MismatchError, UnsupportedError
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.model.index import BATCH_SIZES, SavedJob
from deepspeed_ucp.trainers import accelerating, lightning
from deepspeed_ucp.trainers.batches import BatchSizes
from deepspeed_ucp.trainers.huggingface import _record_initial_sizes, find_loss_factor, find_state


def test_float_batch_sizes_under_sequence_parallelism_are_accepted() -> None:
    sizes = {"train_batch_size": 12.0, "train_micro_batch_size_per_gpu": 3.0, "gradient_accumulation_steps": 2.0}
    live = BatchSizes.of(SimpleNamespace(**{name: partial(float, size) for name, size in sizes.items()}))
    assert repr(live) == "BatchSizes(micro=3, accumulation=2, ranks=2)" and live.total == 12
    assert live.fit("folder", SavedJob(4, 1, 5, 24, 1)) == (3, 4)


def test_ranks_that_cannot_share_the_total_batch_are_refused() -> None:
    with pytest.raises(MismatchError, match="8 samples, this run has 12 .*Use a number of ranks that divides it"):
        BatchSizes(4, 1, 3).fit("folder", SavedJob(2, 1, 6, 8, 1))


COUNTERS = {"dp_world_size": 4, "global_steps": 5, **dict(zip(BATCH_SIZES, (8, 2, 2), strict=True))}


@pytest.mark.parametrize(("saved", "live", "warns"), [(2, 2, False), (1, 1, False), (2, 1, True), (1, 2, True)])
def test_another_sequence_parallel_degree_is_a_warning(saved: int, live: int, warns: bool, caplog: Any) -> None:
    """The Trainer averages the losses of ranks but adds the losses of micro batches."""
    job = SavedJob.read({**COUNTERS, "train_batch_size": 16 // saved})
    assert job.replicas == 4 // saved
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config={}))
    trainer = SimpleNamespace(
        args=SimpleNamespace(gradient_accumulation_steps=2, average_tokens_across_devices=True),
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)),
        get_sp_size=lambda: live,
        get_total_train_batch_size=lambda _: 16 // live,
        _train_batch_size=2,
    )
    _record_initial_sizes(trainer, job, (4 // live, 2))
    assert find_state(trainer).initial_sizes is None
    assert ("under sequence parallelism" in caplog.text) is warns
    assert find_loss_factor(trainer, (8, 1), training=True) == (0.5 if live == 2 else 1.0)


def test_lightning_refuses_the_position_of_a_stateful_loader_in_another_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts the batches of one rank, which are other samples if the number of ranks differs."""
    engine = SimpleNamespace(_config=SimpleNamespace(ucp_config=UniversalConfig(total_batch="live")))
    engine.gradient_accumulation_steps = lambda: 1
    trainer = SimpleNamespace(trainer=SimpleNamespace(state=SimpleNamespace(fn="fit")))
    strategy = SimpleNamespace(model=engine, deepspeed_engine=engine, lightning_module=trainer)
    loop = {"state_dict": {"combined_loader": [{"position": 3}]}, "epoch_loop.batch_progress": None}
    monkeypatch.setattr(lightning, "convert_counts", lambda *_: pytest.fail("the position was accepted"))
    monkeypatch.setattr(lightning, "find_checkpoint", lambda folder: folder)
    monkeypatch.setattr(lightning, "holds_foreign", lambda _: False)
    monkeypatch.setattr(lightning.BatchSizes, "of", lambda _: BatchSizes(1, 1, 1))
    for ranks, error in ((2, UnsupportedError), (1, pytest.fail.Exception)):
        monkeypatch.setattr(lightning, "read_saved_job", lambda _, ranks=ranks: SavedJob(ranks, 1, 6, 8, 1))
        with pytest.raises(error, match="position"):
            lightning.load_checkpoint(lambda *_: {"loops": {"fit_loop": loop}}, strategy, str(tmp_path))


def test_a_load_of_accelerate_needs_a_folder_with_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for automatic, words in ((False, "pass a folder, or set automatic_checkpoint_naming"), (True, "has no checkpoint")):
        project = SimpleNamespace(automatic_checkpoint_naming=automatic)
        accelerator = SimpleNamespace(project_configuration=project, project_dir=tmp_path)
        with pytest.raises(ConfigError, match=words):
            accelerating._find_folder(accelerator, None)
