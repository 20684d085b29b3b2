"""Comparison of records with their checksums after reads by any ranks, and of samples of masters and copies."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.io.read import Checked
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import FileRef, Record, Records
from deepspeed_ucp.model.storage import MASTER, Atoms
from deepspeed_ucp.model.topology import Topology
from deepspeed_ucp.stream import duplicates
from deepspeed_ucp.stream.duplicates import Pair
from deepspeed_ucp.stream.reader import verify_reads, verify_records
from tests.support.ranks import World, run_ranks
from tests.support.reshard import examples
from tests.synth import Model, Param, random_state, write_checkpoint
from tests.synth import Topology as SavedTopology

DATA = random.Random(1).randbytes(1000)
ABSENT = FileRef("absent.pt", 0)


def check(record: int, low: int, high: int, base: int = 0) -> Checked:
    return Checked(record, low, high - low, isal_zlib.crc32(DATA[base + low : base + high]))


def record_of(low: int, high: int) -> Record:
    return Record(low, high - low, isal_zlib.crc32(DATA[low:high]))


def make_index(records: list[Record], file: FileRef = ABSENT) -> Any:
    return AtomicIndex.of(
        (file,), Records.of([(0, *record) for record in records]), (), Topology(1, "zero12", "float32"), ""
    )


@pytest.fixture
def file(tmp_path: Path) -> FileRef:
    (tmp_path / "x.pt").write_bytes(DATA)
    return FileRef(str(tmp_path / "x.pt"), len(DATA))


@examples(100)
@given(cuts=st.lists(st.integers(1, 499), max_size=12), size=st.integers(1, 5), seed=st.integers(0, 5))
def test_checksums_of_parts_on_any_ranks_are_combined(cuts: list[int], size: int, seed: int) -> None:
    """The parts of two records are in any order on any ranks. A wrong part is an error on every rank."""
    index = make_index([record_of(0, 500), record_of(500, 1000)])
    edges = [0, *sorted(set(cuts)), 500]
    parts = [check(number, *span, 500 * number) for number in (0, 1) for span in pairwise(edges)]
    wrong = [replace(parts[0], crc=parts[0].crc ^ 1), *parts[1:]]
    random.Random(seed).shuffle(parts)
    assert run_ranks(size, lambda rank, comm: verify_reads(parts[rank::size], index, comm)) == [0] * size
    found = World(size).run(lambda rank, comm: verify_reads(wrong[rank::size], index, comm))
    assert len({str(error) for error in found}) == 1
    assert "absent.pt: the 500 bytes at 0 have CRC32" in str(found[0])


@pytest.mark.parametrize(
    ("spans", "more"),
    [
        ([(0, 30), (20, 50)], 50),
        ([(0, 50), (0, 50)], 50),
        ([(0, 30)], 20),
        ([(10, 50)], 10),
        ([(0, 20), (30, 50)], 10),
        ([(0, 0)], 50),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 3])
def test_gaps_and_overlaps_are_read_again(file: FileRef, spans: list[tuple[int, int]], more: int, size: int) -> None:
    """The record's owner reads them; the first two ranks have read parts."""
    record = record_of(100, 150)
    parts = [check(0, low, high, 100) for low, high in spans]
    index = make_index([record], file)
    assert run_ranks(size, lambda rank, comm: verify_reads(parts[rank::size], index, comm)) == [more, 0, 0][:size]
    with pytest.raises(CheckpointError, match="the file is damaged"):
        verify_reads(parts, make_index([record._replace(crc=1)], file), Comm())


def test_verification_of_whole_records_can_be_required(file: FileRef) -> None:
    index = make_index([record_of(0, 10), record_of(10, 40)._replace(crc=1), record_of(40, 50)], file)
    verify_records(index, [0, 2], Comm())
    found, stored = index.records[1].crc, isal_zlib.crc32(DATA[10:40])
    text = f"{file.path}: the 30 bytes at 10 have CRC32 {stored:08x}, the writer stored {found:08x}"
    with pytest.raises(CheckpointError, match=text):
        verify_records(index, [0, 1], Comm())


def test_records_without_a_checksum_and_unread_records_pass() -> None:
    assert verify_reads([Checked(0, 0, 20, 5)], make_index([Record(0, 20, None)]), Comm()) == 0
    assert verify_reads([], make_index([record_of(0, 10)]), Comm()) == 0


MODEL = Model(tuple(Param(f"w{number}", (7, 5)) for number in range(24)))


def list_pairs(index: AtomicIndex, monkeypatch: pytest.MonkeyPatch, rank: int = 0, size: int = 1) -> list[Pair]:
    """List the masters and copies that a rank compares."""
    found: list[Pair] = []
    comm = mock.Mock(rank=rank, size=size, run=lambda work: work())
    monkeypatch.setattr(duplicates, "compare_pairs", lambda _, pairs, *others: found.extend(pairs))
    duplicates.check_samples(index, index.atoms, comm)
    return found


def test_each_rank_creates_only_the_atoms_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0, precision="bf16"), SavedTopology(1, 6, "bf16"))
    index = open_checkpoint(str(folder), Comm())
    whole, compared, make = list_pairs(index, monkeypatch), list[Pair](), Atoms.__getitem__
    for rank in range(4):
        with mock.patch.object(Atoms, "__getitem__", autospec=True, side_effect=make) as made:
            pairs = list_pairs(index, monkeypatch, rank, 4)
        assert {key.param for (_, key), _ in made.call_args_list} == {here.atom.param for here, _ in pairs}
        assert len({here.atom.param for here, _ in pairs}) < len(MODEL.params) / 2
        parted = [part for each, _ in pairs for part in each.atom.shards[0].find(MASTER, each.start, each.end)]
        assert len({index.records.files[part.record] for part in parted}) == (2 if rank < 2 else 1)
        assert all(here.atom.state == MASTER and replace(here, atom=there.atom) == there for here, there in pairs)
        compared += pairs
    assert sorted(map(str, compared)) == sorted(map(str, whole))
