"""Who loads, decided before anything is loaded; without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ucp import hook
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.errors import CheckpointError

STATES = "mp_rank_00_model_states.pt"


class Seat(Comm):
    """Rank 1 of 2; rank 0 has found another tag, or had an error."""

    rank, size = 1, 2

    def __init__(self, error: Any, tag: Any) -> None:
        self.heard = [error, tag]

    def gather(self, value: Any) -> list[Any]:
        return [self.heard.pop(0) if self.heard else None, value]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tags, the second is the latest."""
    for tag in ("global_step1", "global_step2"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / STATES).touch()
    (tmp_path / "latest").write_text("global_step2")
    return tmp_path


def test_the_tag_is_the_latest_or_the_given_one(folder: Path) -> None:
    assert hook._find_tag(str(folder), None, Comm()) == "global_step2"
    assert hook._find_tag(str(folder), "global_step1", Comm()) == "global_step1"
    with pytest.raises(CheckpointError, match="no checkpoint with tag '7'"):
        hook._find_tag(str(folder), 7, Comm())


def test_an_empty_folder_has_no_tag(tmp_path: Path) -> None:
    assert hook._find_tag(str(tmp_path), None, Comm()) is None
    assert hook._find_tag(str(tmp_path / "absent"), None, Comm()) is None


def test_a_latest_that_points_nowhere_is_refused(folder: Path) -> None:
    (folder / "latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match="no checkpoint with tag 'global_step9'.*global_step1, global_step2"):
        hook._find_tag(str(folder), None, Comm())


@pytest.mark.parametrize("other", ["global_step1", None])
def test_ranks_that_see_different_tags_are_refused(folder: Path, other: str | None) -> None:
    text = f"ranks see different checkpoints .rank 0: {other}, rank 1: global_step2.*shared file system"
    with pytest.raises(CheckpointError, match=text):
        hook._find_tag(str(folder), None, Seat(None, other))


def test_another_ranks_missing_folder_is_this_ranks_error(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^\[rank 0\] nothing there$"):
        hook._find_tag(str(folder), None, Seat((CheckpointError, "nothing there"), None))


class FakeEngine(SimpleNamespace):
    """An engine that only has its configuration."""


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
