"""The warning about a lock of DeepSpeed's operators that no process holds."""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import getfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.file_baton import FileBaton

from deepspeed_ucp.compiling import jit_load

NAME = "deepspeed_shm_comm"
HOLD = f"import runpy, sys; runpy.run_path({getfile(FileBaton)!r})['FileBaton'](sys.argv[1]).try_acquire(); "
"""Code that holds torch's lock, without the seconds that an import of torch takes."""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path / NAME / "lock"


def load() -> Any:
    return jit_load(lambda builder, verbose: verbose, SimpleNamespace(name=NAME), verbose="loaded")


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_one_rank_of_a_node_warns_of_a_lock_that_no_process_holds(
    local_rank: str, lines: int, lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert load() == "loaded" and not caplog.messages
    lock.parent.mkdir(exist_ok=True)
    lock.touch()
    assert load() == "loaded" and len(caplog.messages) == lines
    assert not lines or (f"{lock}, which no process" in caplog.text and "remove that file" in caplog.text)


def test_a_lock_of_a_living_process_is_not_reported(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The test uses torch's lock. Its holder is killed before the second check."""
    lock.parent.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", f"{HOLD}print(flush=True); input()", str(lock)],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    with holder:
        assert holder.stdout is not None and holder.stdout.readline()
        load()
        assert not caplog.messages
        holder.kill()
        holder.wait()
    load()
    assert str(lock) in caplog.text
    assert not FileBaton(str(lock)).try_acquire()


def test_the_operator_builder_of_deepspeed_is_wrapped() -> None:
    import deepspeed

    import deepspeed_ucp

    deepspeed_ucp.install()
    builder = deepspeed.ops.op_builder.builder.OpBuilder
    assert os.path.basename(builder.jit_load.__wrapped__.__code__.co_filename) == "builder.py"
