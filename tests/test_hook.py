"""What runs in the place of DeepSpeed's methods; without an engine."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ucp import hook
from deepspeed_ucp.config import UniversalConfig


class FakeEngine(SimpleNamespace):
    """An engine that only has its configuration."""

    def load_universal_checkpoint(self) -> bool:
        return False


def call(engine: FakeEngine, *args: Any, **kwargs: Any) -> list[Any]:
    """What DeepSpeed's own load was called with."""
    seen: list[Any] = []

    def original(engine: Any, load_dir: Any, **options: Any) -> tuple[str, dict[str, Any]]:
        seen.append((load_dir, options))
        return "path", {"client": 1}

    assert hook._load_checkpoint(original, engine, *args, **kwargs) == ("path", {"client": 1})
    return seen


def test_with_the_plugin_off_deepspeeds_own_load_gets_every_argument() -> None:
    engine = FakeEngine(_config=SimpleNamespace(ucp_config=None))
    (seen,) = call(engine, "dir", "tag", load_module_strict=False, load_optimizer_states=False, new_option=3)
    assert seen == (
        "dir",
        {
            "tag": "tag",
            "load_module_strict": False,
            "load_optimizer_states": False,
            "load_lr_scheduler_states": True,
            "load_module_only": False,
            "custom_load_fn": None,
            "new_option": 3,
        },
    )
    assert not hasattr(engine, "ucp_report")


def test_an_engine_from_before_the_import_has_the_plugin_off() -> None:
    assert hook.get_config(FakeEngine(_config=SimpleNamespace())) is None


def test_nothing_to_resume_is_deepspeeds_business(tmp_path: Path) -> None:
    engine = FakeEngine(_config=SimpleNamespace(ucp_config=UniversalConfig()))
    assert len(call(engine, str(tmp_path))) == 1
    assert (engine.ucp_report.direct, engine.ucp_report.reason) == (False, "nothing to resume")


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
def test_who_loads_is_shown_unless_the_script_chose_a_level(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("deepspeed_ucp")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", False)
    before = log.level
    try:
        log.setLevel(level)
        for _ in range(2):
            hook.show_decisions()
            assert len(log.handlers) == 1
            assert log.isEnabledFor(logging.INFO) == (level == logging.NOTSET)
    finally:
        log.setLevel(before)
