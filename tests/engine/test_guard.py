"""A broken engine neither steps nor saves until a load succeeds."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ucp.engine.guard import block_engine, release
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import CheckpointError


class Engine:
    """An engine with some of the blocked methods."""

    def step(self) -> str:
        return "stepped"

    def save_checkpoint(self, folder: str, **_: Any) -> str:
        return f"saved to {folder}"


def test_a_blocked_engine_raises_until_it_is_released() -> None:
    engine = Engine()
    assert block_engine(engine, OSError("gone."), with_states=True) == find_state(engine).broken
    for use in (engine.step, lambda: engine.save_checkpoint("here", tag="t")):
        with pytest.raises(CheckpointError, match="gone.*a part of the checkpoint"):
            use()
    assert not hasattr(engine, "train_batch")
    release(engine)
    assert engine.step() == "stepped"
    assert engine.save_checkpoint("here") == "saved to here"
    assert vars(engine).keys() <= {"_ucp_state"}


def test_release_restores_a_method_that_the_script_has_replaced() -> None:
    engine: Any = Engine()
    engine.step = script_step = lambda: "the script's"
    for text in ("once", "twice"):
        block_engine(engine, OSError(text), with_states=False)
    with pytest.raises(CheckpointError, match="twice"):
        engine.step()
    release(engine)
    assert engine.step is script_step
