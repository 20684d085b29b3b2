"""Engines that save by way of memory: their configuration, how they end, when their saves are complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.io.store import list_tree
from deepspeed_ucp.saves.publishing import WRITTEN
from tests.support.until import wait_until


def in_memory(memory: Path, **options: Any) -> dict[str, Any]:
    """Return the ``checkpoint`` section of a ds_config for saves into a memory folder."""
    return {"universal": {"save": {"memory": str(memory), "wait_s": 240, **options}}}


def close(engine: Any) -> None:
    """End an engine as a preempted process does: its saves stay in memory for the next load."""
    saver = find_state(engine).saver
    if saver is not None:
        saver.keeps_memory = True
        saver.close()
    engine.destroy()


def wait_for_marks(place: object) -> None:
    """Wait until the nodes' coordination files are gone, a moment after all saves are complete."""
    wait_until(lambda: not any(WRITTEN in name for name in list_tree(str(place))))
