"""Reads what is wanted of a checkpoint, each byte once, with the checksums of everything that was read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..atoms import ITEMSIZE, MASTER, Atom, AtomicIndex
from ..errors import MismatchError
from ..io.cast import average
from ..io.checksum import Checked
from ..io.memory import Scratch
from ..io.read import MemorySink, Sink
from ..plan.claims import list_requests
from ..plan.locate import Want
from ..plan.rounds import BLOCK
from .copies import CopyReader
from .full_tensors import FullTensor


@dataclass(frozen=True, slots=True)
class Item:
    """Elements [start, start + numel) of a flattened full tensor go into ``into``, C-contiguous bytes."""

    tensor: FullTensor
    start: int
    numel: int
    into: memoryview

    @property
    def is_mean(self) -> bool:
        """Whether the value is the mean of the shards (Partial)."""
        return self.tensor.view is not None and self.tensor.view.source.mean

    def want(self, buffer: int, shard: int | None = None) -> Want:
        """The same for ``plan.locate``; of one source shard if asked for."""
        return self.tensor.want(self.start, self.numel, buffer, shard)


class AtomReader(CopyReader):
    """Reads wants of one rank alone; several threads may use it at once.

    Args:
        index: the source.
        checksum: form the CRC32 of what is read.
    """

    def __init__(self, index: AtomicIndex, *, checksum: bool = True) -> None:
        super().__init__(index.stored, checksum=checksum)
        self.index = index

    def read_wants(self, wants: Iterable[Want], sinks: Sequence[Sink]) -> list[Checked]:
        """Read everything that is wanted, neighbours in a file at once.

        Args:
            sinks: by the wants' buffer numbers.

        Raises:
            CheckpointError: a file cannot be read.
        """
        return self.read(list_requests(wants), sinks)

    def read_all(self, wants: Iterable[Want], sinks: Sequence[Sink], threads: int) -> list[Checked]:
        """The same by several threads."""
        return self.read_parallel(list_requests(wants, BLOCK), sinks, threads)

    def read_items(self, items: Sequence[Item]) -> list[Checked]:
        """Read ranges of logical tensors.

        Raises:
            CheckpointError: a file cannot be read.
            MismatchError: replicas differ.
        """
        sinks = [MemorySink(item.into, item.tensor.itemsize) for item in items]
        plain = [item.want(number) for number, item in enumerate(items) if not item.is_mean]
        checks = self.read_wants(plain, sinks)
        for item in items:
            if item.is_mean:
                checks += self._read_mean(item)
            elif item.tensor.view is not None and item.tensor.view.source.replicated:
                checks += self._compare_replicas(item)
        return checks

    def read_elements(self, atom: Atom, shard: int, low: int, high: int) -> bytearray:
        """Elements [low, high) of a flattened shard of an atom.

        Raises:
            CheckpointError: a file cannot be read.
        """
        data = bytearray((high - low) * ITEMSIZE[atom.dtype])
        sink = MemorySink(memoryview(data), ITEMSIZE[atom.dtype])
        self.read_wants([Want(atom, low, high - low, 0, 0, shard=shard)], [sink])
        return data

    def _read_shard(self, item: Item, shard: int, into: memoryview) -> list[Checked]:
        return self.read_wants([item.want(0, shard)], [MemorySink(into, item.tensor.itemsize)])

    def _compare_replicas(self, item: Item) -> list[Checked]:
        checks: list[Checked] = []
        other = Scratch().take(item.into.nbytes)
        for shard in range(1, len(item.tensor.atom.shards)):
            checks += self._read_shard(item, shard, other)
            if other != item.into:
                raise MismatchError(
                    f"{_describe_difference(item, shard, other)}", path=os.path.dirname(self.index.run.state_file)
                )
        return checks

    def _read_mean(self, item: Item) -> list[Checked]:
        """The mean of the shards (Partial), which are read one after the other."""
        import torch

        checks: list[Checked] = []
        copy, dtype = Scratch().take(item.into.nbytes), getattr(torch, item.tensor.dtype)

        def read_shards() -> Iterator[torch.Tensor]:
            for shard in range(len(item.tensor.atom.shards)):
                checks.extend(self._read_shard(item, shard, copy))
                yield torch.frombuffer(copy, dtype=dtype)

        torch.frombuffer(item.into, dtype=dtype).copy_(average(read_shards()))
        return checks


def _describe_difference(item: Item, shard: int, other: memoryview) -> str:
    name, state = item.tensor.name, item.tensor.atom.state
    left, right = (np.frombuffer(data, np.uint8).reshape(item.numel, -1) for data in (item.into, other))
    element = item.start + int(np.flatnonzero((left != right).any(1))[0])
    advice = (
        f' If the mean is what counts, say so: {{"match": "{name}", "pattern": "partial"}}.' if state == MASTER else ""
    )
    return (
        f"{name} ({state}) is replicated over tensor-parallel ranks, but ranks 0 and {shard} saved different values, "
        f"first at element {element}.{advice}"
    )
