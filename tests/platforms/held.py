"""examples/elastic_restart/job.py, whose ranks may be held behind a step (:meth:`tests.platforms.jobs.Run.hold`)."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "elastic_restart"))

import job

from deepspeed_ucp import preemption


def hold(engine: Any, told: Any, log: job.Log, log_step: Any = job.log_step) -> None:
    """Log a step, and wait as long as there is its file, or until this rank is told to go."""
    log_step(engine, told, log)
    while Path(f"{log.path}-{engine.global_steps + 1}").exists() and not any(preemption._arrived.values()):
        time.sleep(0.02)


if __name__ == "__main__":
    job.log_step = hold
    # DeepSpeed takes gloo alone then, and does not compile, for a minute on a fresh machine.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    job.main()
