"""One rank of a real launch (tests/convert/test_mpi.py): it converts in small ranges; one or all ranks may fail."""

from __future__ import annotations

import errno
import os
import signal
import sys

import pytest

from deepspeed_ucp.comm import join_launch
from deepspeed_ucp.convert import ConvertOptions, outputs
from deepspeed_ucp.errors import UcpError
from deepspeed_ucp.io.disk import explain_full
from deepspeed_ucp.plan import conversion
from deepspeed_ucp.stream import full_tensors
from tests.support.conversion import convert_checkpoint


def use_small_ranges(monkeypatch: pytest.MonkeyPatch, size: int = 4096) -> None:
    """Write atoms above ``size`` bytes in several ranges, and bundle smaller ones to that size."""
    monkeypatch.setattr(conversion, "ALIGNMENT", size)
    monkeypatch.setattr(full_tensors, "ALIGNMENT", size)


def fail(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this rank's first batch fail."""
    if kind == "die":
        monkeypatch.setattr(outputs.OutputFile, "write", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if kind == "full":
        monkeypatch.setattr(outputs, "write_at", _fail_full)
        monkeypatch.setattr(outputs, "write_parts", _fail_full)
    if kind == "bug":
        monkeypatch.setattr(outputs.OutputFile, "write", lambda *_: 1 // 0)


def _fail_full(*_: object) -> None:
    with explain_full("/scratch"):
        raise OSError(errno.ENOSPC, "No space left on device")


def main(source: str, destination: str, failure: str) -> None:
    monkeypatch = pytest.MonkeyPatch()
    use_small_ranges(monkeypatch)
    try:
        with join_launch() as comm:
            if comm.rank == 1:
                fail(failure, monkeypatch)
            for _ in range(2):
                report = convert_checkpoint(source, destination, comm=comm, options=ConvertOptions(workers=2))
                print(f"{comm.rank}/{comm.size} {report.reused}")
    except UcpError as error:
        if not error.echo:
            print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
