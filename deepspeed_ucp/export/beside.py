"""Copy or create the further files that Accelerate and Hugging Face's Trainer load, and log the missing ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..formats.deepspeed.files import scan_if_there
from ..formats.foreign.names import OPTIMIZER_FOLDER, SCALER, TRAINER_STATE, TRAINERS
from ..io.disk import explain_full
from ..io.paths import find_tag_folder, join_path
from ..io.store import read_small
from .output import Export

logger = logging.getLogger("deepspeed_ucp")

_SCHEDULER = "scheduler.pt"


def write_beside(export: Export) -> None:
    """Copy the trainer's files of a tag, create those that the tag can supply, and log the missing ones."""
    report, index = export.report, export.index
    source, step = os.path.dirname(find_tag_folder(report.source)), index.counters.get("global_steps", 0)
    names = [name for name in sorted(scan_if_there(source)) if TRAINERS.fullmatch(name)]
    for name in names:
        with explain_full(export.folder), open(os.path.join(export.folder, name), "xb") as stream:
            stream.write(read_small(join_path(source, name)))
    has_states = os.path.isdir(os.path.join(export.folder, OPTIMIZER_FOLDER))
    if has_states and index.scaler.get("dynamic") and SCALER not in names:
        _save(export, SCALER, make_scaler(index.scaler))
    is_trainers = TRAINER_STATE in names
    if has_states and is_trainers and _SCHEDULER not in names:  # the Trainer ignores the optimizer without it
        _save(export, _SCHEDULER, make_schedule(step, [group.hyper.get("lr") for group in index.groups]))
        text = "%s: the saved run's scheduler was DeepSpeed's; %s has only its step, %d, for this run's scheduler"
        logger.warning(text, report.destination, _SCHEDULER, step)
    wanted = ("rng_state",) if is_trainers else ("scheduler.bin", "random_states")
    lacking = [name for name in wanted if not any(present.startswith(name) for present in names)]
    if "scheduler.bin" in lacking:
        lacking[0] += f" (which load_state wants for a prepared scheduler: prepare it afterwards, at step {step})"
    if lacking:
        logger.warning("%s: not in the checkpoint's folder, so not copied: %s", report.destination, ", ".join(lacking))


def _save(export: Export, name: str, content: dict[str, Any]) -> None:
    with explain_full(export.folder), open(os.path.join(export.folder, name), "xb") as stream:
        torch.save(content, stream)


def make_schedule(step: int, rates: list[Any]) -> dict[str, Any]:
    """Return the state of a ``LambdaLR``, the class of the Trainer's schedulers, at a step with its learning rates."""
    return {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates, "lr_lambdas": [None] * len(rates)}


def make_scaler(scaler: Mapping[str, Any]) -> dict[str, Any]:
    """Convert DeepSpeed's ``DynamicLossScaler`` (``fp16/loss_scaler.py``) to the state of torch's ``GradScaler``."""
    factor, window = float(scaler.get("scale_factor", 2.0)), int(scaler.get("scale_window", 1000))
    since = int(scaler.get("cur_iter", 0)) - int(scaler.get("last_overflow_iter", -1)) - 1  # steps without an overflow
    return {
        "scale": float(scaler["cur_scale"]),
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "growth_interval": window,
        "_growth_tracker": (since - 1) % window if since else -1,  # DeepSpeed's first growth is one step later
    }
