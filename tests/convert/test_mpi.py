"""Conversions by ranks of mpirun and torchrun: bytes equal one process's; one rank's failure ends all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.convert.conversions import convert, read_bytes
from tests.support.covering import params
from tests.support.mpi import needs_mpi, run_mpi, run_torch

CONVERTING = str(Path(__file__).parent / "converting.py")


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files of a conversion by one process."""
    convert(source, tmp_path / "expected" / "dst")
    return read_bytes(tmp_path / "expected" / "dst")


@needs_mpi
def test_two_ranks_of_mpirun_write_the_same_bytes(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    done = run_mpi(2, [CONVERTING, str(source), str(tmp_path / "dst"), ""])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0/2 False", "0/2 True", "1/2 False", "1/2 True"]
    assert read_bytes(tmp_path / "dst") == expected


@pytest.mark.exhaustive  # `tests/test_comm.py` tests ranks of torchrun
def test_two_ranks_of_torchrun_write_the_same_bytes(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    for code, _out, err in run_torch(2, [CONVERTING, str(source), str(tmp_path / "dst"), ""]):
        assert code == 0, err
    assert read_bytes(tmp_path / "dst") == expected


@needs_mpi
@pytest.mark.parametrize(
    ("failure", "message"),
    params(
        [("full", "[rank 1] /scratch: disk full")],
        [("bug", "[rank 1] ZeroDivisionError"), ("die", "(Killed)")],
        lambda row: row[0],
    ),
)
def test_one_ranks_failure_ends_a_conversion_with_one_message(
    failure: str, message: str, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    done = run_mpi(2, [CONVERTING, str(source), str(tmp_path / "dst"), failure])
    assert done.returncode not in (0, None)
    assert done.stderr.count(message) == 1, done.stderr
    assert not (tmp_path / "dst").exists()
    assert (tmp_path / ".dst.ucp-partial").exists() == (failure == "die")
    convert(source, tmp_path / "dst")
    assert read_bytes(tmp_path / "dst") == expected
