"""examples/elastic_restart/job.py with pauses after some steps (:meth:`tests.platforms.jobs.Run.hold`)."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "elastic_restart"))

import job

from deepspeed_ucp import preemption


def hold(engine: Any, record: Any, log: job.Log, log_step: Any = job.log_step) -> None:
    """Log a step, then wait while the file of the step exists and no signal has been received."""
    log_step(engine, record, log)
    while Path(f"{log.path}-{engine.global_steps + 1}").exists() and not any(preemption._arrived.values()):
        time.sleep(0.02)


if __name__ == "__main__":
    job.log_step = hold
    # DeepSpeed then uses gloo and compiles no operator.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    job.main()
