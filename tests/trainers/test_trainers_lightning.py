"""Lightning's Trainer with ``DeepSpeedStrategy``: a run resumed in any world equals the uninterrupted one."""

from __future__ import annotations

import importlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.data import ElasticSampler
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.trainers.lightning import _is_positioned, convert_counts, load_checkpoint

if find_spec("lightning") is None:
    pytest.skip("no lightning", allow_module_level=True)

import trainers_common

if TYPE_CHECKING:
    from trainers_lightning import Trained

STEPS, CUT = 13, 4


def training() -> Any:
    """Import Lightning at its first use: it takes a second, and every worker collects this module."""
    return importlib.import_module("trainers_lightning")


def agree(whole: list[Trained], rest: list[Trained], first: int) -> None:
    assert "".join(rank.error for rank in (*whole, *rest)) == ""
    trainers_common.agree(whole, rest, first)
    assert rest[0].counted.items() <= whole[0].counted.items()


@pytest.mark.parametrize(
    ("was", "now", "done", "lag", "expected"),
    [
        (1, 2, 7, 1, (14, 13, 0)),  # saved before Lightning counts the batch as completed
        (2, 1, 6, 0, (3, 3, 0)),
        (2, 2, 7, 1, (6, 5, 1)),  # later gradients were not saved
        (4, 2, 7, 0, (2, 2, 3)),
        (None, 3, 6, 0, (6, 6, 0)),
    ],
)
def test_batches_are_counted_in_whole_steps_of_this_run(
    was: int | None, now: int, done: int, lag: int, expected: tuple[int, int, int]
) -> None:
    counts = {"ready": done, "started": done, "processed": done, "completed": done - lag}
    progress: dict[str, Any] = {"total": dict(counts), "current": dict(counts), "is_last_batch": False}
    rest = convert_counts(progress, was, now)
    for held in (progress["total"], progress["current"]):
        assert held["ready"] == held["started"] == held["processed"]
        assert (held["processed"], held["completed"], rest) == expected


def test_data_without_saved_position_begins_anew() -> None:
    """These are a sampler that follows no engine, and a stateful loader without a saved state."""
    sampler = ElasticSampler(10, 2, rank=0, world=1)
    loader, stateful = SimpleNamespace(sampler=sampler), SimpleNamespace(state_dict=dict, load_state_dict=dict)
    assert [_is_positioned(stateful, restored=restored) for restored in (False, True)] == [False, True]
    assert not _is_positioned(loader, restored=True)
    sampler.follow(SimpleNamespace(global_samples=4, train_batch_size=lambda: 2))
    assert _is_positioned(loader, restored=False)


def test_a_checkpoint_in_a_file_may_have_the_positions_of_loaders(tmp_path: Path) -> None:
    """Such as full weights (``load_full_weights``), which Lightning loads itself."""
    engine = SimpleNamespace(_config=SimpleNamespace(ucp_config=UniversalConfig()))
    fitting = SimpleNamespace(trainer=SimpleNamespace(state=SimpleNamespace(fn="fit")))
    strategy = SimpleNamespace(model=engine, lightning_module=fitting)
    lists: list[Any] = [[{}], []]
    full, empty = ({"fit_loop": {"state_dict": {"combined_loader": each}}} for each in lists)
    for loops in (full, empty, full, {"fit_loop": {}}, full, {}, full, None):
        state = {"loops": loops}
        assert load_checkpoint(lambda *_, state=state: state, strategy, tmp_path / "file.ckpt") is state
        assert find_state(engine).loaders_restored is (loops is full)


@pytest.mark.releases
@pytest.mark.timeout(600)
def test_lightning_runs_resume_in_other_worlds(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """They resume within an epoch with fewer, equally many and more ranks. Errors and warnings follow."""
    one, two = (partial(ucp_worlds.get(ranks).run, training().train) for ranks in (1, 2))
    make, folder = training().Setting, str(tmp_path / "a")
    source = make(1, 2)
    whole = two(source, STEPS)
    assert [*whole[0].samples] == list(range(1, STEPS + 1))
    two(source, STEPS, save=(CUT, folder))
    agree(whole, one(make(3, 1, 2), STEPS, load=folder), CUT + 1)
    same = two(source, STEPS, load=folder)
    agree(whole, same, CUT + 1)
    assert [rank.drawn[CUT + 1] for rank in same] == [rank.drawn[CUT + 1] for rank in whole]
    one(make(3, 1, 2), STEPS, save=(7, str(tmp_path / "b")), load=folder)
    agree(whole, two(make(2, 2, 4), STEPS, load=str(tmp_path / "b")), 8)
    (wrong,) = one(make(1, 2, elastic=False), STEPS, load=folder)
    assert "MismatchError" in wrong.error and "accumulate_grad_batches=2" in wrong.error
    for rank in two(source, STEPS, load=folder, use_distributed_sampler=True):
        assert "ConfigError" in rank.error and "use_distributed_sampler=False" in rank.error
    (again,) = one(make(1, 1, 2, elastic=False), 5, load=folder)
    log = "\n".join(again.warnings)
    assert "it repeats the epoch's first batches, and skips its last 8" in log
    assert "an epoch has 13 batches, no multiple of accumulate_grad_batches=2" in log


def test_classes_of_the_script_need_trust_pickle(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Excluded frozen layers need `strict_loading = False`."""
    one, folder = partial(ucp_worlds.get(1).run, training().train), str(tmp_path / "checkpoint")
    setting, target = (training().Setting(each, each, script_class=True, frozen=True) for each in (2, 1))
    begun = ucp_worlds.get(2).run(training().train, setting, 3, save=(2, folder))
    assert (Path(folder) / "latest").read_text() == "checkpoint"
    (refused,) = one(target, 3, load=folder)
    assert "trainers_lightning.ScriptClass" in refused.error and "trust_pickle" in refused.error
    (resumed,) = one(target, 3, load=folder, default_on={"trust_pickle": True})
    assert (resumed.error, resumed.loaded, list(resumed.samples)) == ("", "ScriptClass", [3])
    assert not (set(begun[0].samples[1]) & set(resumed.samples[3]))


def test_the_last_complete_checkpoint_is_kept_during_newer_writes(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Training does not wait. At the end all saves are written and older ones removed."""
    folder, options = str(tmp_path / "out"), {"save": {"memory": str(tmp_path / "memory"), "wait_s": 240.0}}
    (saves, error), _ = ucp_worlds.get(2).run(training().rotate, training().Setting(1, 2), folder, options)
    assert error == ""
    assert saves[4:7] == [{"step=2.ckpt": True}] * 3  # when steps 5, 6 and 7 begin
    assert saves[-1] == {"step=8.ckpt": True}
    resumed = ucp_worlds.get(1).run(
        training().train, training().Setting(2, 1), 9, load=f"{folder}/step=8.ckpt", default_on=options
    )
    assert [list(rank.samples) for rank in resumed] == [[9]] and resumed[0].error == ""


def test_fabric(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    one, two, train = ucp_worlds.get(1), ucp_worlds.get(2), training().train_with_fabric
    (whole,) = one.run(train, 2, 8, 6, str(tmp_path / "whole"), load=False)
    begun = two.run(train, 1, 4, 3, str(tmp_path / "cut"), load=False)
    (resumed,) = one.run(train, 3, 8, 6, str(tmp_path / "cut"), load=True)
    assert [sum(pair) / 2 for pair in zip(*begun, strict=True)] + resumed == pytest.approx(whole, rel=1e-5)
    for error in two.run(trainers_common.attempt, training().split_with_fabric):
        assert error.startswith("ConfigError") and "setup_dataloaders use_distributed_sampler=False" in error
