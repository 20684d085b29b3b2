"""Snapshots without an engine: what is asked for, and what counts as one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ucp import snapshots
from deepspeed_ucp.config import SaveOptions, UniversalConfig
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import ConfigError


class Engine(SimpleNamespace):
    """As much of an engine as is asked for."""

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
def test_what_every_is(every: Any, engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r'a number of steps \(20\) or seconds \("30s"\)'):
        snapshots.follow(engine, "folder", every=every)


@pytest.mark.parametrize("config", [None, UniversalConfig()])
def test_saves_have_to_go_into_memory(config: UniversalConfig | None, engine: Engine) -> None:
    engine._config.ucp_config = config
    with pytest.raises(ConfigError, match=r'"checkpoint.universal": \{"save": true\}'):
        snapshots.follow(engine, "folder", every=5)


def test_who_follows_again_has_the_last_word(engine: Engine) -> None:
    snapshots.follow(engine, "folder", every=1)
    snapshots.follow(engine, "folder", every=3, client_state=lambda: {"mine": engine.global_steps})
    for _ in range(8):
        step(engine)
    assert engine.saves == [("snapshot_step3", {"mine": 3}), ("snapshot_step6", {"mine": 6})]
    assert len(engine.hooks) == 1


def test_a_save_takes_the_place_of_one_where_a_load_finds_it(engine: Engine, tmp_path: Path) -> None:
    os.symlink(tmp_path, tmp_path / "link")
    snapshots.follow(engine, tmp_path / "link" / "folder", every=3)
    for folder, latest in (("folder", True), ("folder", False), ("elsewhere", True)):
        for _ in range(3):
            step(engine)
        snapshots.note_save(engine, str(tmp_path / folder), latest=latest)
    step(engine)
    assert [tag for tag, _ in engine.saves] == ["snapshot_step6", "snapshot_step9"]


def test_a_load_begins_anew(engine: Engine) -> None:
    """What was prepared is of another run."""
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
