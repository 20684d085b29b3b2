"""Scripts in processes of the worlds' fork server, which has imported torch and DeepSpeed.

For whole jobs that do not need a fresh interpreter.
"""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

from deepspeed_ucp.testing.world import _choose_context

ROOT = Path(__file__).parents[2]


def start_script(
    script: Path,
    arguments: Sequence[object],
    log: Path,
    variables: Mapping[str, object],
    *,
    errors: Path | None = None,
) -> BaseProcess:
    """Start ``python SCRIPT ARGUMENTS`` with further environment variables; append its output to ``log``.

    Args:
        errors: file for its errors instead.
    """
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {name: str(value) for name, value in variables.items()}
    call = (str(script), [str(each) for each in arguments], [str(log), str(errors or log)], environment)
    process = _choose_context("cpu").Process(target=_run, args=call, name=script.name)
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):  # in case this starts the fork server
        process.start()
    assert isinstance(process, BaseProcess)
    return process


def _run(script: str, arguments: list[str], logs: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, log in enumerate(logs, 1):
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), number)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(ROOT))
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None  # as in worlds
    try:
        runpy.run_path(script, run_name="__main__")
    finally:  # like the exit of an interpreter; multiprocessing omits the second call
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
