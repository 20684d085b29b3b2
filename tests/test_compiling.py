"""The log line before DeepSpeed compiles an operator, and the warning about a stale lock."""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import getfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.file_baton import FileBaton

from deepspeed_ucp.compiling import jit_load, report_compilation

NAME = "deepspeed_shm_comm"
HOLD = f"import runpy, sys; runpy.run_path({getfile(FileBaton)!r})['FileBaton'](sys.argv[1]).try_acquire(); "
"""Code that holds torch's lock, without the seconds that an import of torch takes."""


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ([], "compiling DeepSpeed's operator"),
        ([f"{NAME}.so"], ""),
        (["lock"], "remove that file"),
        (["lock", f"{NAME}.so"], "remove that file"),
    ],
    ids=["first", "compiled", "killed", "killed-again"],
)
def test_a_compilation_is_logged(files: list[str], text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in files:
        (tmp_path / name).touch()
    report_compilation(NAME, str(tmp_path))
    assert len(caplog.messages) == bool(text) and text in caplog.text


def test_a_lock_of_a_living_process_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The test uses torch's lock. Its holder is killed before the second check."""
    lock = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", f"{HOLD}print(flush=True); input()", str(lock)],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    with holder:
        assert holder.stdout is not None and holder.stdout.readline()
        report_compilation(NAME, str(tmp_path))  # another rank has begun to compile
        assert [text.split()[0] for text in caplog.messages] == ["compiling"]
        (tmp_path / f"{NAME}.so").touch()
        report_compilation(NAME, str(tmp_path))
        assert len(caplog.messages) == 1
        holder.kill()
        holder.wait()
    report_compilation(NAME, str(tmp_path))
    assert str(lock) in caplog.text
    assert not FileBaton(str(lock)).try_acquire()


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_one_rank_of_a_node_logs_a_compilation(
    local_rank: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert jit_load(lambda builder, verbose: verbose, SimpleNamespace(name=NAME), verbose=False) is False
    assert len(caplog.messages) == lines


def test_the_operator_builder_of_deepspeed_is_wrapped() -> None:
    import deepspeed

    import deepspeed_ucp

    deepspeed_ucp.install()
    builder = deepspeed.ops.op_builder.builder.OpBuilder
    assert os.path.basename(builder.jit_load.__wrapped__.__code__.co_filename) == "builder.py"
