"""Automatic snapshots, without an engine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

from deepspeed_ucp import snapshots
from deepspeed_ucp.config import SaveOptions, UniversalConfig
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import ConfigError


class Engine(SimpleNamespace):
    """The methods of an engine that snapshots use."""

    global_steps = 0

    def register_forward_pre_hook(self, hook: Any) -> None:
        self.hooks.append(hook)

    def save_checkpoint(self, save_dir: str, tag: str, client_state: dict[str, Any]) -> None:
        self.saves.append((tag, client_state))


@pytest.fixture
def engine() -> Engine:
    config = SimpleNamespace(ucp_config=UniversalConfig(save=SaveOptions()))
    return Engine(_config=config, hooks=[], saves=[], module=SimpleNamespace(training=True))


def step(engine: Engine) -> None:
    for hook in engine.hooks:
        hook(engine, ())
    engine.global_steps += 1
    snapshots.end_step(engine)


@pytest.mark.parametrize("every", [0, -1, True, 2.5, "5", "0s", "5 s", "5m", "often", "auto", None])
def test_an_invalid_interval_is_refused(every: Any, engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r'a number of steps \(20\) or seconds \("30s"\)'):
        snapshots.follow(engine, "folder", every=every)


@pytest.mark.parametrize("config", [None, UniversalConfig()])
def test_snapshots_require_saves_into_memory(config: UniversalConfig | None, engine: Engine) -> None:
    engine._config.ucp_config = config
    with pytest.raises(ConfigError, match=r'"checkpoint.universal": \{"save": true\}'):
        snapshots.follow(engine, "folder", every=5)


def test_a_second_follow_of_snapshots_replaces_the_first(engine: Engine) -> None:
    snapshots.follow(engine, "folder", every=1)
    snapshots.follow(engine, "folder", every=3, client_state=lambda: {"mine": engine.global_steps})
    for _ in range(8):
        step(engine)
    assert engine.saves == [("snapshot_step3", {"mine": 3}), ("snapshot_step6", {"mine": 6})]
    assert len(engine.hooks) == 1


def test_a_save_to_the_snapshots_folder_restarts_the_interval(engine: Engine, tmp_path: Path) -> None:
    os.symlink(tmp_path, tmp_path / "link")
    snapshots.follow(engine, tmp_path / "link" / "folder", every=3)
    for folder, latest in (("folder", True), ("folder", False), ("elsewhere", True)):
        for _ in range(3):
            step(engine)
        snapshots.note_save(engine, str(tmp_path / folder), latest=latest)
    step(engine)
    assert [tag for tag, _ in engine.saves] == ["snapshot_step6", "snapshot_step9"]


def test_a_load_restarts_the_interval(engine: Engine) -> None:
    """It also drops a prepared snapshot."""
    snapshots.follow(engine, "folder", every=2)
    step(engine)
    step(engine)
    engine.global_steps = 10
    snapshots.note_load(engine)
    step(engine)
    step(engine)
    assert find_state(engine).snapshots.prepared is not None and engine.saves == []
    step(engine)
    assert [tag for tag, _ in engine.saves] == ["snapshot_step12"]


def test_a_data_sampler_that_the_script_adds_is_saved_before_it_advances(engine: Engine) -> None:
    snapshots.follow(engine, "folder", every=1)
    step(engine)
    assert engine.saves == []
    sampler = object.__new__(DeepSpeedDataSampler)
    engine.training_dataloader = SimpleNamespace(data_sampler=sampler)
    step(engine)
    assert [tag for tag, _ in engine.saves] == ["snapshot_step1", "snapshot_step2"]
