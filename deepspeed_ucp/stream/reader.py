"""Reads ranges of logical atoms, each source byte once, with the checksums of everything that was read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ..atoms import MASTER, AtomicIndex
from ..errors import CheckpointError, MismatchError
from ..io.checksum import Checked, crc32
from ..io.read import allow_open_files, fill
from ..plan.locate import Piece, locate
from ..union.wholes import Whole

MAX_VIEWS = 512
"""Buffers in one ``preadv``; the kernel takes 1024."""


@dataclass(frozen=True, slots=True)
class Item:
    """Elements [start, start + numel) of a flattened logical tensor go into ``into``, C-contiguous bytes."""

    whole: Whole
    start: int
    numel: int
    into: memoryview


@dataclass(frozen=True, slots=True)
class _Row:
    """A contiguous read: bytes of a record at ``offset`` into ``view``; rows go on to their places from there."""

    record: int
    offset: int
    view: memoryview
    scatter: npt.NDArray[np.uint8] | None = None


class RangeReader:
    """Reads ranges of logical atoms; several threads may use it at once.

    Args:
        index: the source.
        checksum: compute CRC32s of what is read.
    """

    def __init__(self, index: AtomicIndex, *, checksum: bool = True) -> None:
        self.index, self.checksum = index, checksum
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._checks: list[Checked] = []
        self.nbytes = 0
        allow_open_files(len(index.files))

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._stack.close()
        self._fds.clear()

    def read(self, whole: Whole, start: int, numel: int, into: memoryview) -> int:
        """Read elements [start, start + numel) of a logical tensor; returns their CRC32 (0 without checksums).

        What was read is noted for :meth:`take_checks`.

        Raises:
            CheckpointError: a file cannot be read.
            MismatchError: replicas differ.
        """
        checks = self.read_items((Item(whole, start, numel, into),))
        with self._lock:
            self._checks += checks
        return crc32(into) if self.checksum else 0

    def take_checks(self) -> list[Checked]:
        """The checksums of the source bytes that :meth:`read` has read since the last call."""
        with self._lock:
            taken, self._checks = self._checks, []
        return taken

    def read_items(self, items: Sequence[Item]) -> list[Checked]:
        """Read several ranges together, neighbours in a file at once; returns the checksums of the source bytes.

        Raises:
            CheckpointError: a file cannot be read.
            MismatchError: replicas differ.
        """
        plain = [item for item in items if not item.whole.mean]
        rows = sorted(
            (row for item in plain for row in self._plan(item, None, item.into)),
            key=lambda row: (row.record, row.offset),
        )
        checks = self._read_rows(rows)
        for item in items:
            if item.whole.mean:
                checks += self._read_mean(item)
            elif item.whole.view is not None and item.whole.view.source.replicated:
                checks += self._compare_replicas(item)
        return checks

    def _plan(self, item: Item, shard: int | None, into: memoryview) -> Iterator[_Row]:
        for piece in locate(item.whole.want(item.start, item.numel, 0, shard)):
            yield from _lay_rows(piece, into)

    def _read_rows(self, rows: Sequence[_Row]) -> list[Checked]:
        checks: list[Checked] = []
        for group in _join_rows(rows):
            record, offset = self.index.records[group[0].record], group[0].offset
            path = self.index.files[record.file].path
            views = [row.view for row in group if row.view.nbytes]
            fill(self._open(record.file), list(views), record.offset + offset, path)
            nbytes = sum(view.nbytes for view in views)
            if self.checksum:
                crc = 0
                for view in views:
                    crc = crc32(view, crc)
                checks.append(Checked(group[0].record, offset, nbytes, crc))
            for row in group:
                if row.scatter is not None:
                    row.scatter[:] = np.frombuffer(row.view, np.uint8).reshape(row.scatter.shape)
            with self._lock:
                self.nbytes += nbytes
        return checks

    def _open(self, file: int) -> int:
        with self._lock:
            fd = self._fds.get(file)
            if fd is None:
                path = self.index.files[file].path
                try:
                    fd = self._fds[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointError(f"{path}: cannot be opened ({error.strerror or error}).") from error
                self._stack.callback(os.close, fd)
        return fd

    def _compare_replicas(self, item: Item) -> list[Checked]:
        checks: list[Checked] = []
        scratch = memoryview(bytearray(item.into.nbytes))
        for shard in range(1, len(item.whole.atom.shards)):
            checks += self._read_rows(list(self._plan(item, shard, scratch)))
            if scratch != item.into:
                raise MismatchError(_tell_difference(item, shard, scratch))
        return checks

    def _read_mean(self, item: Item) -> list[Checked]:
        """The mean of the shards (Partial), in double precision, so that equal shards give themselves."""
        import torch

        checks: list[Checked] = []
        dtype = getattr(torch, item.whole.dtype)
        scratch = memoryview(bytearray(item.into.nbytes))
        total = torch.zeros(item.numel, dtype=torch.float64)
        shards = len(item.whole.atom.shards)
        for shard in range(shards):
            checks += self._read_rows(list(self._plan(item, shard, scratch)))
            total += torch.frombuffer(scratch, dtype=dtype).double()
        torch.frombuffer(item.into, dtype=dtype).copy_(total / shards)
        return checks


def _lay_rows(piece: Piece, into: memoryview) -> Iterator[_Row]:
    """A piece's reads: straight into the destination, or rows that are scattered from one read."""
    run, size = piece.run, piece.itemsize
    if run.count == 1 or (piece.is_contiguous and run.dst_step == run.width):
        nbytes = run.width * run.count * size
        yield _Row(piece.record, run.src * size, into[run.dst * size : run.dst * size + nbytes])
    elif piece.is_contiguous:
        shape, strides = (run.count, run.width * size), (run.dst_step * size, 1)
        base = np.frombuffer(into, np.uint8)[run.dst * size :]
        rows = np.lib.stride_tricks.as_strided(base, shape, strides)
        yield _Row(piece.record, run.src * size, memoryview(bytearray(piece.nbytes)), rows)
    else:
        for number in range(run.count):
            low = (run.dst + number * run.dst_step) * size
            yield _Row(piece.record, (run.src + number * run.src_step) * size, into[low : low + run.width * size])


def _join_rows(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Rows that follow each other in a record, in groups that one read can fill."""
    group: list[_Row] = []
    end = 0
    for row in rows:
        if group and (row.record != group[0].record or row.offset != end or len(group) == MAX_VIEWS):
            yield group
            group = []
        group.append(row)
        end = row.offset + row.view.nbytes
    if group:
        yield group


def _tell_difference(item: Item, shard: int, other: memoryview) -> str:
    name, state = item.whole.name, item.whole.state
    left, right = (np.frombuffer(data, np.uint8).reshape(item.numel, -1) for data in (item.into, other))
    element = item.start + int(np.flatnonzero((left != right).any(1))[0])
    advice = (
        f' If the mean is what counts, say so: {{"match": "{name}", "pattern": "partial"}}.' if state == MASTER else ""
    )
    return (
        f"{name} ({state}) is replicated over tensor-parallel ranks, but ranks 0 and {shard} saved different values, "
        f"first at element {element}.{advice}"
    )
