"""Functions of a resume check that run on the ranks of a world."""

from __future__ import annotations

import copy
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

import deepspeed_ucp  # noqa: F401 - installs the hook in this process
from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.compare import compare

CLIENT_STATE = {"deepspeed_ucp_testing": {"note": "comes back", "numbers": [1, 2, 3]}}
_REFERENCE = "resume_reference.pt"


def run_source(train_fn: Any, ds_config: dict[str, Any], steps: tuple[int, int], folder: str) -> list[float]:
    """Train, save and continue; return the losses after the save."""
    training = train_fn(copy.deepcopy(ds_config))
    engine = next(training)
    train(training, steps[0])
    engine.save_checkpoint(folder, client_state=copy.deepcopy(CLIENT_STATE))
    state = capture(engine)
    if torch.distributed.get_rank() == 0:
        torch.save(state, Path(folder) / _REFERENCE)
    losses = train(training, steps[1])
    training.close()
    engine.destroy()
    return losses


def run_target(
    train_fn: Any, ds_config: dict[str, Any], steps: int, folder: str
) -> tuple[dict[str, Any], list[str], list[float]]:
    """Load the folder, compare with the state of its source, continue training.

    Returns:
        First fields of a ``ResumeReport``, differences, losses.
    """
    training = train_fn(copy.deepcopy(ds_config))
    engine = next(training)
    path, client_state = engine.load_checkpoint(folder)
    if path is None:
        raise AssertionError(f"load_checkpoint({folder!r}) found nothing to load and returned None")
    state = capture(engine)
    saved: CapturedEngine = torch.load(Path(folder) / _REFERENCE, weights_only=False)
    count, differences = compare(saved, state)
    for key, value in CLIENT_STATE.items():
        if client_state.get(key) != value:
            differences.append(f"client state {key}: saved {value!r}, loaded {client_state.get(key)!r}")
    report = getattr(engine, "ucp_report", None)
    direct = None if report is None else bool(report.direct)
    losses = [] if differences else train(training, steps)
    training.close()
    engine.destroy()
    return {"parameters": len(state.parameters), "states": count, "direct": direct}, differences, losses


def train(training: Generator[Any, None, None], steps: int) -> list[float]:
    """Train `steps` steps; return their losses."""
    return [float(next(training)) for _ in range(steps)]
