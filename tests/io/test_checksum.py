"""Checksums of records from those of their parts."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from deepspeed_ucp.atoms import FileRef, Record
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.io.checksum import Checked, join_checks, verify_records
from deepspeed_ucp.plan import Request
from tests.reshard import examples

DATA = random.Random(1).randbytes(1000)


def check(record: int, low: int, high: int, base: int = 0) -> Checked:
    return Checked(record, low, high - low, isal_zlib.crc32(DATA[base + low : base + high]))


def record_of(low: int, high: int) -> Record:
    return Record(0, low, high - low, isal_zlib.crc32(DATA[low:high]))


@pytest.fixture
def files(tmp_path: Path) -> list[FileRef]:
    (tmp_path / "x.pt").write_bytes(DATA)
    return [FileRef(str(tmp_path / "x.pt"), len(DATA))]


def test_neighbours_are_joined_and_others_stay_apart() -> None:
    requests = [Request(0, 0, 10, ()), Request(1, 0, 5, ()), Request(0, 10, 20, ()), Request(0, 40, 2, ())]
    crcs = [isal_zlib.crc32(DATA[r.offset : r.offset + r.nbytes]) for r in requests]
    assert join_checks(requests, crcs) == [check(0, 0, 30), check(0, 40, 42), check(1, 0, 5)]


@examples(200)
@given(cuts=st.lists(st.integers(1, 499), max_size=12), size=st.integers(1, 5), seed=st.integers(0, 5))
def test_any_cut_over_any_ranks_adds_up(cuts: list[int], size: int, seed: int) -> None:
    """Two records, each cut anywhere, the parts in any order from any rank; a wrong part is always found."""
    records = [record_of(0, 500), record_of(500, 1000)]
    edges = [0, *sorted(set(cuts)), 500]
    parts = [check(number, *span, 500 * number) for number in (0, 1) for span in pairwise(edges)]
    random.Random(seed).shuffle(parts)
    for rank in range(size):
        verify_records(parts, records, [FileRef("absent.pt", 0)], rank, size)
    wrong = replace(parts[0], crc=parts[0].crc ^ 1)
    guilty = wrong.record % size
    for rank in range(size):
        if rank != guilty:
            verify_records([wrong, *parts[1:]], records, [FileRef("absent.pt", 0)], rank, size)
    with pytest.raises(CheckpointError, match=r"absent.pt: the 500 bytes at (0|500) have CRC32"):
        verify_records([wrong, *parts[1:]], records, [FileRef("absent.pt", 0)], guilty, size)


def test_the_message_names_file_place_and_both_checksums(files: list[FileRef]) -> None:
    with pytest.raises(CheckpointError) as error:
        verify_records([Checked(0, 0, 20, 0x1234)], [record_of(30, 50)], files, 0, 1)
    stored = isal_zlib.crc32(DATA[30:50])
    assert f"{files[0].path}: the 20 bytes at 30 have CRC32 00001234, the writer stored {stored:08x}" in str(
        error.value
    )


@pytest.mark.parametrize(
    "spans", [[(0, 30), (20, 50)], [(0, 30)], [(10, 50)], [(0, 20), (30, 50)], [(0, 50), (0, 50)]], ids=str
)
def test_parts_that_do_not_add_up_make_the_record_be_read_once_more(
    files: list[FileRef], spans: list[tuple[int, int]]
) -> None:
    record = record_of(100, 150)
    parts = [check(0, low, high, 100) for low, high in spans]
    verify_records(parts, [record], files, 0, 1)
    with pytest.raises(CheckpointError, match="the file is damaged"):
        verify_records(parts, [replace(record, crc=1)], files, 0, 1)


def test_records_without_a_checksum_pass() -> None:
    verify_records([Checked(0, 0, 20, 5)], [Record(0, 0, 20, None)], [FileRef("absent.pt", 0)], 0, 1)


def test_records_that_nobody_read_are_no_ones_business() -> None:
    verify_records([], [record_of(0, 10)], [FileRef("absent.pt", 0)], 0, 1)
