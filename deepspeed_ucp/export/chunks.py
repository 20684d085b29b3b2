"""Plans, reads and distributes the chunks of an export for torch's checkpoints."""

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

from ..comm import Comm
from ..errors import CheckpointError
from ..io.memory import Scratch
from ..io.read import Checked
from ..model.storage import ITEMSIZE, count
from ..plan.conversion import assign_runs
from ..stream.reader import AtomReader
from ..tensor_parallel.layout import Shape
from .statedict import Placeholders
from .tensors import Selection, Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, start + numel) of a tensor; ``is_repeated`` under a tied name."""

    tensor: Tensor
    start: int
    numel: int
    is_repeated: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the source."""
        return self.numel * self.tensor.full.itemsize


class Planner(DefaultSavePlanner):
    """Planner of chunks instead of whole tensors, which reads each chunk on demand.

    Each thread reuses its memory: torch keeps the last chunk of every name until a file is written, and these are
    views of the same memory.

    Args:
        placeholders: tensors of the placeholders in the state dict.
        most: maximum bytes of a chunk, unless a row is larger.
        checks, repeated: receive the CRC32s of the bytes read, and of those read again for a tied name.
    """

    def __init__(
        self,
        selection: Selection,
        placeholders: Placeholders,
        most: int,
        checks: list[Checked],
        repeated: list[Checked],
    ) -> None:
        super().__init__()
        self.placeholders, self.most = placeholders, most
        self.reader, self.overflowed = AtomReader(selection.index), selection.overflowed
        self.progress: Callable[[int], None] = lambda nbytes: None
        self.chunks: dict[MetadataIndex, Chunk] = {}
        self.checks, self.repeated = checks, repeated
        self._local = threading.local()

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[part for item in plan.items for part in self._cut_item(item)])
        return self.plan

    def count_bytes(self, plan: SavePlan) -> int:
        return sum(self.chunks[item.index].nbytes for item in plan.items if item.index in self.chunks)

    def _cut_item(self, item: WriteItem) -> Iterator[WriteItem]:
        placeholder, data = self.placeholders.get(id(self.state_dict[item.index.fqn])), item.tensor_data
        if placeholder is None or data is None:
            yield item
            return
        tensor, again = placeholder
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
        """Return a chunk's elements as a 1-dim tensor, valid until the thread's next call."""
        dtype = getattr(torch, chunk.tensor.dtype)
        if not chunk.numel:
            return torch.empty(0, dtype=dtype)
        if not hasattr(self._local, "memory"):
            self._local.memory = Scratch(), Scratch()
        memory, scratch = self._local.memory
        data = memory.take(chunk.nbytes)
        checks = self.repeated if chunk.is_repeated else self.checks
        checks.extend(self.reader.read_tensors([chunk.tensor.full.want(chunk.start, chunk.numel)], [data]))
        self.progress(data.nbytes)
        return torch.frombuffer(chunk.tensor.convert(data, scratch, self.overflowed), dtype=dtype)

    def check_repeated(self, comm: Comm) -> None:
        """Raise an error if a tied tensor changed between its reads on any rank."""
        if not any(comm.gather(len(self.repeated))):
            return
        repeated = {check for part in comm.gather(self.repeated) for check in part}
        changed = set.intersection(*comm.gather(repeated.difference(self.checks)))
        if changed:
            index = self.reader.index
            path = index.files[index.records.files[min(changed).record]].path
            text = "was written to while it was exported. Export again when no save is under way."
            raise comm.common(CheckpointError(text, path=path))


def cut_chunks(shape: Shape, most: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a tensor into contiguous blocks (offsets, sizes) of at most ``most`` each.

    A block has several rows if they fit, else a part of a row.
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


def distribute_chunks(planner: Planner, plan: SavePlan, workers: int) -> list[SavePlan]:
    """Return a plan for each worker, with runs of chunks of about equally many bytes."""
    chunks = planner.chunks
    dealt: list[list[WriteItem]] = [[] for _ in range(workers)]
    dealt[0] += [item for item in plan.items if item.index not in chunks]
    cut = [item for item in plan.items if item.index in chunks]
    cut.sort(key=lambda item: (chunks[item.index].tensor.full.place, chunks[item.index].start))
    for item, worker in zip(cut, assign_runs([chunks[item.index].nbytes for item in cut], workers), strict=True):
        dealt[worker].append(item)
    mappings = [plan.planner_data, *({} for _ in range(workers - 1))]
    return [SavePlan(items, planner_data=mapping) for items, mapping in zip(dealt, mappings, strict=True)]


class Writer(FileSystemWriter):
    """Writer whose metadata names the final folder, and no value that differs by run."""

    destination = ""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.destination)
