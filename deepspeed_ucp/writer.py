"""Saves that a process of its own writes (``checkpoint.writer.decoupled``).

``save_checkpoint`` only tells that process. DeepSpeed waits for it in the next step, before the weights change, and
then lets ``latest`` name the save; a pipeline's steps never do.
"""

from __future__ import annotations

import signal
from typing import Any

import torch

from .children import protect


def protect_writer(engine: Any) -> None:
    """Keep the writer that a new engine will start alive when a signal goes to all processes of the job."""
    config = getattr(engine._config, "checkpoint_config", {})  # DeepSpeed 0.16 has neither this nor such a writer
    writer = config.get("writer")
    if writer and writer.get("decoupled"):
        protect({signal.SIGTERM, signal.SIGUSR1})


def is_decoupled(engine: Any) -> bool:
    """Whether a process of its own writes an engine's saves."""
    ask = getattr(getattr(engine, "checkpoint_engine", None), "is_decoupled", None)
    return bool(ask and ask())


def find_other_writer(engine: Any) -> str:
    """What writes an engine's saves in the place of DeepSpeed and torch, by its module; empty where these do.

    It may do so after the save: an engine for checkpoints, or what stands in ``torch.save``'s place.
    """
    makers = (type(getattr(engine, "checkpoint_engine", None)), "deepspeed."), (torch.save, "torch.")
    odd = (each for each, own in makers if not f"{each.__module__}.".startswith((own, "builtins.")))
    return next((f"{each.__module__}.{getattr(each, '__qualname__', '')}" for each in odd), "")


def finish_save(engine: Any) -> None:
    """Wait until an engine's last save is written, named by ``latest`` and sealed; collective."""
    if is_decoupled(engine):
        engine._commit_decoupled_checkpoint()


def end_writer(engine: Any) -> None:
    """End the process that writes, for which this one would wait for ever at its own end."""
    if is_decoupled(engine):
        engine.checkpoint_engine.cleanup()
