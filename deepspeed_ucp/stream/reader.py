"""Read requested elements of a checkpoint, each byte once, with checksums of the bytes read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import MismatchError
from ..io.cast import average
from ..io.checksum import Checked
from ..io.memory import Scratch
from ..io.read import MemorySink, Sink
from ..model import ITEMSIZE, MASTER, Atom, AtomicIndex
from ..plan.claims import list_requests
from ..plan.locate import Want
from ..plan.rounds import BLOCK
from .copies import CopyReader
from .full_tensors import FullTensor


@dataclass(frozen=True, slots=True)
class Item:
    """Read elements [start, start + numel) of a flattened full tensor into the bytes ``into``."""

    tensor: FullTensor
    start: int
    numel: int
    into: memoryview

    @property
    def is_mean(self) -> bool:
        """Whether the value is the mean of all shards (Partial)."""
        return self.tensor.view is not None and self.tensor.view.source.mean

    def want(self, buffer: int, shard: int | None = None) -> Want:
        """Return the request for ``plan.locate``, optionally of one source shard."""
        return self.tensor.want(self.start, self.numel, buffer, shard)


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
        return self.read(list_requests(wants), sinks)

    def read_all(self, wants: Iterable[Want], sinks: Sequence[Sink], threads: int) -> list[Checked]:
        """Read requests in several threads; as :meth:`read_wants`."""
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
        """Read elements [low, high) of a flattened shard of an atom.

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
        """Read the mean of the shards (Partial), one shard at a time."""
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
    advice = f' To load their mean, use: {{"match": "{name}", "pattern": "partial"}}.' if state == MASTER else ""
    return (
        f"{name} ({state}) is replicated over tensor-parallel ranks, but ranks 0 and {shard} saved different values, "
        f"first at element {element}.{advice}"
    )
