"""Read requested elements of a checkpoint from any copy of its files, each byte once, with checksums."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import CheckpointError, MismatchError, UnsupportedError
from ..io.cast import average
from ..io.memory import Scratch
from ..io.opened import Stored
from ..io.read import Checked, MemorySink, RecordReader, Sink
from ..model import MASTER, AtomicIndex, FileRef, StoredAtoms
from ..plan import Want, list_reads
from ..plan.rounds import BLOCK
from ..torchsave.records import sum_directory


def refuse_scattered(index: AtomicIndex, reason: str) -> None:
    """Refuse a checkpoint with files that only other machines have.

    Args:
        reason: why all files are needed.

    Raises:
        UnsupportedError: this rank does not find all files.
    """
    if index.stored.access.is_partial and not all(file.places for file in index.stored.files):
        raise UnsupportedError(
            f"ranks see different files of this checkpoint, and {reason}. Copy all files to a place that every rank "
            'sees, or name a further place that has them all ("also", --also).',
            path=index.run.state_file,
        )


class CopyReader(RecordReader):
    """Reader of a checkpoint's records.

    If a file has copies, each is checked when it is first used: its zip directory must have the CRC32 in the index.

    Args:
        stored: the checkpoint.
        options: further options of :class:`~..io.read.RecordReader`.
    """

    def __init__(self, stored: StoredAtoms, **options: Any) -> None:
        super().__init__(stored.records, stored.files, failed=stored.failed, **options)

    def open_copy(self, path: str, file: FileRef) -> Stored:
        if file.places:
            check_copy(path, file)
        return super().open_copy(path, file)


def check_copy(path: str, file: FileRef) -> None:
    """Compare a copy of a file with the index.

    A copy without a zip directory passes if it is the only one, or if the index has no CRC32 of the directory.

    Raises:
        CheckpointError: the copy is another file, or cannot be read.
    """
    if file.header_crc is None:
        return
    crc = sum_directory(path)
    if crc is None and len(file.places) > 1:
        raise CheckpointError("has no directory with checksums, as the save's has; it is another file.", path=path)
    if crc not in (None, file.header_crc):
        raise CheckpointError(
            f"its directory has CRC32 {crc:08x}, the save's {file.header_crc:08x}; it is another file.", path=path
        )


class AtomReader(CopyReader):
    """Thread-safe reader of one rank's requests.

    Args:
        index: the source.
        checksum: compute the CRC32 of the bytes read.
    """

    def __init__(self, index: AtomicIndex, *, checksum: bool = True) -> None:
        super().__init__(index.stored, checksum=checksum)
        self.index = index

    def read_wants(self, wants: Iterable[Want], sinks: Sequence[Sink]) -> list[Checked]:
        """Read requests, adjacent ones together.

        Args:
            sinks: destination by buffer number.

        Raises:
            CheckpointError: a file cannot be read.
        """
        return self.read(list_reads(wants), sinks)

    def read_all(self, wants: Iterable[Want], sinks: Sequence[Sink], threads: int) -> list[Checked]:
        """Read requests in several threads; as :meth:`read_wants`."""
        return self.read_parallel(list_reads(wants, BLOCK), sinks, threads)

    def read_tensors(self, wants: Sequence[Want], memory: Sequence[memoryview]) -> list[Checked]:
        """Read ranges of full tensors; means of shards are computed, and replicas are compared.

        Args:
            memory: for each want.

        Raises:
            CheckpointError: a file cannot be read.
            MismatchError: replicas differ.
        """
        pairs = list(zip(wants, memory, strict=True))
        sinks = [MemorySink(data, want.itemsize) for want, data in pairs]
        plain = [replace(want, destination=number) for number, want in enumerate(wants) if not want.is_mean]
        checks = self.read_wants(plain, sinks)
        for want, data in pairs:
            if want.is_mean:
                checks += self._read_mean(want, data)
            elif want.view is not None and want.view.source.replicated:
                checks += self._compare_replicas(want, data)
        return checks

    def read_want(self, want: Want) -> bytearray:
        """Return the bytes of a want.

        Raises:
            CheckpointError: a file cannot be read.
        """
        data = bytearray(want.nbytes)
        self.read_wants([want], [MemorySink(memoryview(data), want.itemsize)])
        return data

    def _read_shard(self, want: Want, shard: int, data: memoryview) -> list[Checked]:
        return self.read_wants([want.pick_shard(shard)], [MemorySink(data, want.itemsize)])

    def _compare_replicas(self, want: Want, data: memoryview) -> list[Checked]:
        checks: list[Checked] = []
        other = Scratch().take(data.nbytes)
        for shard in range(1, len(want.atom.shards)):
            checks += self._read_shard(want, shard, other)
            if other != data:
                raise MismatchError(
                    _describe_difference(want, shard, data, other), path=os.path.dirname(self.index.run.state_file)
                )
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


def _describe_difference(want: Want, shard: int, data: memoryview, other: memoryview) -> str:
    name, state = want.atom.name, want.atom.state
    left, right = (np.frombuffer(values, np.uint8).reshape(want.numel, -1) for values in (data, other))
    element = want.start + int(np.flatnonzero((left != right).any(1))[0])
    advice = f' To load their mean, use: {{"match": "{name}", "pattern": "partial"}}.' if state == MASTER else ""
    return (
        f"{name} ({state}) is replicated over tensor-parallel ranks, but ranks 0 and {shard} saved different values, "
        f"first at element {element}.{advice}"
    )
