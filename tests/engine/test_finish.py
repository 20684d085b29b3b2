"""Copies that DeepSpeed's own load leaves stale."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.engine.finish import refresh_after_own_load


@pytest.mark.parametrize(("engine", "refreshed"), [({"is_pipe_parallel": True}, True), ({}, False)])
def test_a_pipeline_of_one_stage_is_refreshed_too(engine: dict[str, bool], refreshed: bool) -> None:
    """A tied module has no layer file if all of its uses have a `forward_fn`."""
    target = Mock(engine=SimpleNamespace(**engine), place=SimpleNamespace(pp=1))
    target.unfiled.return_value = ["tied_modules.k.weight"]
    refresh_after_own_load(target, Comm(), with_states=True)
    assert (target.refresh_copies.called, target.gather_copies.called) == (refreshed, refreshed)
