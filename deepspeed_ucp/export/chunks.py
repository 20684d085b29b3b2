"""Plans for torch.distributed.checkpoint: chunks that are read when they are written, dealt to workers by bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ..atoms import ITEMSIZE, AtomicIndex, count
from ..errors import CheckpointError
from ..io.memory import Scratch
from ..patterns.layout import Shape
from ..plan.conversion import deal_runs
from ..stream.checks import Checks
from ..stream.reader import AtomReader, Item
from .statedict import Placeholders
from .tensors import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, start + numel) of a flattened tensor of the output; ``again``: under a name tied to its own."""

    tensor: Tensor
    start: int
    numel: int
    again: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the source that it is made from."""
        return self.numel * self.tensor.full.itemsize


class Planner(DefaultSavePlanner):
    """Plans chunks instead of whole tensors, and reads each when it is asked for.

    It is read into memory that each thread has of its own and uses again: torch keeps the last chunk of every name for
    as long as it writes a file, and these are all views of the same memory.

    Args:
        index: the source.
        found: what the placeholders in the state dict stand for.
        most: bytes of a chunk at most, as far as one row is not larger.
        checks, repeated: take the CRC32s of what is read, and of what is read again for a tied name.
    """

    def __init__(self, index: AtomicIndex, found: Placeholders, most: int, checks: Checks, repeated: Checks) -> None:
        super().__init__()
        self.found, self.most = found, most
        self.reader = AtomReader(index)
        self.progress: Callable[[int], None] = lambda nbytes: None
        self.chunks: dict[MetadataIndex, Chunk] = {}
        self.checks, self.repeated = checks, repeated
        self._own = threading.local()

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[part for item in plan.items for part in self._cut(item)])
        return self.plan

    def count_bytes(self, plan: SavePlan) -> int:
        """Bytes of the source that a plan's chunks are made from."""
        return sum(self.chunks[item.index].nbytes for item in plan.items if item.index in self.chunks)

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        found, data = self.found.get(id(self.state_dict[item.index.fqn])), item.tensor_data
        if found is None or data is None:
            yield item
            return
        tensor, again = found
        start = 0
        for offsets, sizes in cut_chunks(tensor.shape, self.most // ITEMSIZE[tensor.dtype]):
            index = MetadataIndex(item.index.fqn, torch.Size(offsets))
            self.chunks[index] = Chunk(tensor, start, count(sizes), again)
            start += count(sizes)
            stored = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(stored, data.properties, data.size))

    def resolve_data(self, write_item: WriteItem) -> Any:
        chunk, data = self.chunks.get(write_item.index), write_item.tensor_data
        if chunk is None or data is None:
            return super().resolve_data(write_item)
        return self._read(chunk).view(data.chunk.sizes)

    def _read(self, chunk: Chunk) -> torch.Tensor:
        """A chunk's elements, flat; good until the thread's next call."""
        dtype = getattr(torch, chunk.tensor.dtype)
        if not chunk.numel:
            return torch.empty(0, dtype=dtype)
        if not hasattr(self._own, "memory"):
            self._own.memory = Scratch(), Scratch()
        memory, scratch = self._own.memory
        data = memory.take(chunk.nbytes)
        checks = self.repeated if chunk.again else self.checks
        checks.add(self.reader.read_items((Item(chunk.tensor.full, chunk.start, chunk.numel, data),)))
        self.progress(data.nbytes)
        return torch.frombuffer(chunk.tensor.convert(data, scratch), dtype=dtype)

    def compare(self) -> None:
        """What was read a second time, for a tied name, has to be what was read first.

        Raises:
            CheckpointError: a file changed in between.
        """
        changed = set(self.repeated.read) - set(self.checks.read)
        if changed:
            stored = self.reader.index.stored
            path = stored.files[stored.records[min(changed).record].file].path
            raise CheckpointError(
                "was written to while it was exported. Export again when no save is under way.", path=path
            )


def cut_chunks(shape: Shape, most: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a tensor into blocks of at most ``most`` elements: (offsets, sizes), each contiguous and behind the last one.

    Rows together where they fit, else parts of rows.
    """
    inner, axis = 1, len(shape)
    while axis and inner * shape[axis - 1] <= most:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield (0,) * len(shape), shape
        return
    axis -= 1
    width = max(most // max(inner, 1), 1)
    rest = shape[axis + 1 :]
    for place in product(*(range(size) for size in shape[:axis])):
        for low in range(0, shape[axis], width):
            size = min(width, shape[axis] - low)
            yield (*place, low, *(0,) * len(rest)), (*(1,) * axis, size, *rest)


def deal(planner: Planner, plan: SavePlan, workers: int) -> list[SavePlan]:
    """Deal a plan's chunks to workers by bytes, each a run in the order of the source; the first takes the rest."""
    chunks = planner.chunks
    dealt: list[list[WriteItem]] = [[] for _ in range(workers)]
    dealt[0] += [item for item in plan.items if item.index not in chunks]
    cut = [item for item in plan.items if item.index in chunks]
    cut.sort(key=lambda item: (chunks[item.index].tensor.full.place, chunks[item.index].start))
    for item, worker in zip(cut, deal_runs([chunks[item.index].nbytes for item in cut], workers), strict=True):
        dealt[worker].append(item)
    mappings = [plan.planner_data, *({} for _ in range(workers - 1))]
    return [SavePlan(items, planner_data=told) for items, told in zip(dealt, mappings, strict=True)]


class Writer(FileSystemWriter):
    """Names the final folder, not the staged one, in the metadata, and nothing that changes from run to run."""

    destination = ""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.destination)
