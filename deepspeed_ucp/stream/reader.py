"""Read elements of a checkpoint once, from any copy of its files, and verify them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from ..comm import Comm
from ..errors import CheckpointError, MismatchError, UnsupportedError, shorten
from ..io.cast import average
from ..io.interface import ReadableFile
from ..io.memory import Scratch
from ..io.read import Checked, MemorySink, RecordReader, merge_checks
from ..model.flat import find_gaps
from ..model.index import AtomicIndex
from ..model.records import FileRef, Read
from ..model.storage import MASTER
from ..plan.locate import View, Want, list_reads
from ..plan.rounds import BLOCK
from ..tensor_parallel.layout import list_repeats
from ..torchsave.records import checksum_directory
from ..torchsave.torchfile import TorchFile, read_header


def refuse_scattered(index: AtomicIndex, reason: str) -> None:
    """Refuse a checkpoint with files that only other machines have.

    Raises:
        UnsupportedError: this rank does not find all files; ``reason`` says why it needs them.
    """
    if index.access.is_partial and not all(file.places for file in index.files):
        raise UnsupportedError(
            f"ranks see different files of this checkpoint, and {reason}. Copy all files to a place that every rank "
            'sees, or name a further place that has them all ("also", --also).',
            path=index.state_file,
        )


class AtomReader(RecordReader):
    """Thread-safe reader of a checkpoint.

    If a file has copies, each is checked when it is first used: its zip directory must have the CRC32 in the index.
    """

    def __init__(self, index: AtomicIndex, **options: Any) -> None:
        super().__init__(index.records, index.files, failed=index.failed, **options)
        self.index = index

    def open_copy(self, path: str, file: FileRef) -> ReadableFile:
        """Open a copy of a file, checked against the index if there are several."""
        if file.places:
            check_copy(path, file)
        return super().open_copy(path, file)

    def read_tensors(self, wants: Sequence[Want], memory: Sequence[memoryview]) -> list[Checked]:
        """Read wants into memory; compute means, compare replicas and overlapping shards.

        Raises:
            CheckpointError: a file cannot be read.
            MismatchError: replicas or overlaps differ.
        """
        pairs = list(zip(wants, memory, strict=True))
        sinks = [MemorySink(data, want.itemsize) for want, data in pairs]
        plain = [replace(want, destination=number) for number, want in enumerate(wants) if not want.is_mean]
        checks = self.read(list_reads(plain), sinks)
        for want, data in pairs:
            if want.is_mean:
                checks += self._read_mean(want, data)
            elif want.view is not None and want.view.source.replicated:
                checks += self._compare_replicas(want, data)
            elif want.view is not None and want.view.source.claims is not None:
                checks += self._compare_overlaps(want, want.view, data)
        return checks

    def read_want(self, want: Want) -> bytearray:
        data = bytearray(want.nbytes)
        self.read(list_reads([want]), [MemorySink(memoryview(data), want.itemsize)])
        return data

    def _read_shard(self, want: Want, shard: int, data: memoryview) -> list[Checked]:
        return self.read(list_reads([want.pick_shard(shard)]), [MemorySink(data, want.itemsize)])

    def _compare_replicas(self, want: Want, data: memoryview) -> list[Checked]:
        checks: list[Checked] = []
        other = Scratch().take(data.nbytes)
        for shard in range(1, len(want.atom.shards)):
            checks += self._read_shard(want, shard, other)
            if other != data:
                name, state = want.atom.name, want.atom.state
                left, right = (np.frombuffer(values, np.uint8).reshape(want.numel, -1) for values in (data, other))
                element = want.start + int(np.flatnonzero((left != right).any(1))[0])
                advice = f' To load their mean, use: {{"match": "{name}", "pattern": "partial"}}.' * (state == MASTER)
                raise MismatchError(
                    f"{name} ({state}) is replicated over tensor-parallel ranks, but ranks 0 and {shard} saved "
                    f"different values, first at element {element}.{advice}",
                    path=os.path.dirname(self.index.state_file),
                )
        return checks

    def _compare_overlaps(self, want: Want, view: View, data: memoryview) -> list[Checked]:
        """Read the parts that a second shard has too, and compare them."""
        checks: list[Checked] = []
        other = Scratch().take(data.nbytes)
        for rank, shard, part in list_repeats(view.source):
            other[:] = data
            claims = tuple(part.shards[0] if at == shard else full for at, full in enumerate(view.source.shards))
            again = replace(want, view=replace(view, source=replace(view.source, claims=claims), shards=(shard,)))
            checks += self.read(list_reads([again]), [MemorySink(other, want.itemsize)])
            if other != data:
                first, second = (replace(want, view=replace(view, shards=(at,))) for at in (rank, shard))
                raise MismatchError(describe_overlap(first, second), path=os.path.dirname(self.index.state_file))
        return checks

    def _read_mean(self, want: Want, data: memoryview) -> list[Checked]:
        """Read the mean of the shards (Partial), one shard at a time."""
        import torch

        checks: list[Checked] = []
        copy, dtype = Scratch().take(data.nbytes), getattr(torch, want.atom.dtype)

        def read_shards() -> Iterator[torch.Tensor]:
            for shard in range(len(want.atom.shards)):
                checks.extend(self._read_shard(want, shard, copy))
                yield torch.frombuffer(copy, dtype=dtype)

        torch.frombuffer(data, dtype=dtype).copy_(average(read_shards()))
        return checks


def read_state_file(index: AtomicIndex, path: str) -> TorchFile:
    """Read the header of a checkpoint's file again, from a place where it can be read.

    Raises:
        CheckpointError: the file is damaged, or another save has replaced it since the index was made.
    """
    number = next((number for number, file in enumerate(index.files) if file.path == path), None)
    if number is None:
        return read_header(path)
    known = index.files[number]
    if known.places:
        with AtomReader(index) as reader:
            header = reader.read_file(number, lambda file: read_header(file.path))
    else:
        header = read_header(path)
    if known.header_crc not in (None, header.header_crc):
        raise CheckpointError("was replaced by another save while this one was read. Try again.", path=path)
    return header


def check_copy(path: str, file: FileRef) -> None:
    """Check that a copy of a file is the one in the index.

    A copy without a zip directory passes if it is the only one, or if the index has no CRC32 of the directory.

    Raises:
        CheckpointError: the copy is another file, or cannot be read.
    """
    if file.header_crc is None:
        return
    crc = checksum_directory(path)
    if crc is None and len(file.places) > 1:
        raise CheckpointError("has no directory with checksums, as the save's has; it is another file.", path=path)
    if crc not in (None, file.header_crc):
        raise CheckpointError(
            f"its directory has CRC32 {crc:08x}, the save's {file.header_crc:08x}; it is another file.", path=path
        )


def describe_overlap(one: Want, other: Want) -> str:
    """Describe a part of an atom that differs between the shards of two wants."""
    ranks = " and ".join(str(want.view.shards[0]) for want in (one, other) if want.view is not None)
    return (
        f"{one.atom.name} ({one.atom.state}): tensor-parallel ranks {ranks} have a part in common by its affine map, "
        "but saved different values of it. A file is of another run or step, or the ranks have diverged in training; "
        "with the saved tensor-parallel degree each rank keeps its values."
    )


def verify_reads(checks: Sequence[Checked], index: AtomicIndex, comm: Comm, *, threads: int = 4) -> int:
    """Verify the CRC32 of all records that any rank has read (collective).

    Each rank reads the unread parts of every ``size``-th record among those that it can read.

    Args:
        checks: of this rank's reads.

    Returns:
        Number of bytes that this rank has read in addition.

    Raises:
        CheckpointError: a record is damaged; equal on all ranks.
    """
    received = merge_checks(route_checks(merge_checks(checks), index, comm))
    return comm.run(lambda: _verify_rest(received, index, threads))


def verify_records(index: AtomicIndex, records: Iterable[int], comm: Comm) -> None:
    """Read whole records, each on one rank, and compare their checksums (collective).

    Raises:
        CheckpointError: a record is damaged; equal on all ranks.
    """
    verify_reads([Checked(record, 0, 0, 0) for record in (records if comm.rank == 0 else ())], index, comm)


def route_checks(checks: Sequence[Checked], index: AtomicIndex, comm: Comm) -> list[Checked]:
    """Send checks to the rank that verifies the record; return received (collective)."""
    rows = np.array([(c.record, c.offset, c.nbytes, c.crc) for c in checks], np.int64).reshape(-1, 4)
    owners = index.access.take_turns(index.records.files, comm.size)[rows[:, 0]]
    tables = comm.swap_tables([rows[owners == rank] for rank in range(comm.size)])
    return [Checked(*row) for table in tables for row in table.tolist()]


def _verify_rest(received: Sequence[Checked], index: AtomicIndex, threads: int) -> int:
    """Read and verify the rest of each record; return the number of bytes read."""
    records, gaps, joined = index.records, list[Read](), dict[int, list[Checked]]()
    for number, group in groupby(received, attrgetter("record")):
        if records[number].crc is None:
            continue
        checks = list(group)
        # A record whose checks overlap (bytes shared by two tensors) is read again.
        overlap = any(one.offset + one.nbytes > two.offset for one, two in pairwise(checks))
        joined[number] = [] if overlap else checks
        spans = [(check.offset, check.offset + check.nbytes) for check in joined[number]]
        for low, high in find_gaps(spans, records[number].nbytes):
            gaps += [Read.of(number, begin, min(begin + BLOCK, high)) for begin in range(low, high, BLOCK)]
    with AtomReader(index) as reader:
        for check in reader.read_parallel(gaps, (), threads):
            joined[check.record].append(check)
    empty = Checked(0, 0, 0, 0)  # a record without bytes has no checks
    for number, checks in joined.items():
        crc = next(iter(merge_checks(checks)), empty).crc
        if crc != records[number].crc:
            raise _describe_damage(index, number, crc)
    return sum(gap.nbytes for gap in gaps)


def _describe_damage(index: AtomicIndex, number: int, crc: int) -> CheckpointError:
    """Describe a record whose bytes have the CRC32 ``crc``."""
    record = index.records[number]
    file = index.files[index.records.files[number]]
    fact = f"the {record.nbytes} bytes at {record.offset} have CRC32 {crc:08x}, the writer stored {record.crc:08x}"
    if len(file.copies) > 1:  # each rank reads the nearest copy
        text = (
            f"{fact}; one of the copies {shorten(file.copies)} is damaged. Nothing was changed. `ds_ucp verify --also "
            "PLACE` names it: remove it, and another copy is read."
        )
    else:
        text = f"{fact}; the file is damaged. Nothing was changed. Restore the file from a copy, or load another tag."
    return CheckpointError(text, path=file.path)
