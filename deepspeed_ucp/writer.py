"""Saves by DeepSpeed's separate writer process (``checkpoint.writer.decoupled``).

``save_checkpoint`` only notifies that process. DeepSpeed waits for it in the next step, before the weights change, and
then updates ``latest``. Steps of a pipeline engine do not wait.
"""

from __future__ import annotations

import signal
from typing import Any

import torch

from .children import protect


def protect_writer(engine: Any) -> None:
    """Protect a decoupled writer (started later) from signals to all processes."""
    config = getattr(engine._config, "checkpoint_config", {})  # DeepSpeed 0.16 has neither this nor such a writer
    writer = config.get("writer")
    if writer and writer.get("decoupled"):
        protect({signal.SIGTERM, signal.SIGUSR1})


def is_decoupled(engine: Any) -> bool:
    """Return True if a separate process writes an engine's saves."""
    method = getattr(getattr(engine, "checkpoint_engine", None), "is_decoupled", None)
    return bool(method and method())


def find_other_writer(engine: Any) -> str:
    """Name another checkpoint engine, or a replaced ``torch.save``, that writes saves.

    It may write after the save has returned. Empty if DeepSpeed and torch write.
    """
    makers = (type(getattr(engine, "checkpoint_engine", None)), "deepspeed."), (torch.save, "torch.")
    others = (maker for maker, package in makers if not f"{maker.__module__}.".startswith((package, "builtins.")))
    return next((f"{maker.__module__}.{getattr(maker, '__qualname__', '')}" for maker in others), "")


def finish_save(engine: Any) -> None:
    """Wait until a decoupled writer has completed the last save (collective)."""
    if is_decoupled(engine):
        engine._commit_decoupled_checkpoint()


def end_writer(engine: Any) -> None:
    """End a decoupled writer, which exit would otherwise wait for without a timeout."""
    if is_decoupled(engine):
        engine.checkpoint_engine.cleanup()
