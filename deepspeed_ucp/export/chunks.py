"""Plans for torch.distributed.checkpoint: chunks that are read when they are written, dealt to workers by bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ..atoms import ITEMSIZE, count
from ..patterns.layout import Shape
from .tensors import Tensor


class Planner(DefaultSavePlanner):
    """Plans chunks instead of whole tensors, and reads each when it is asked for.

    Args:
        tensors: what the placeholders (tensors on the meta device) in the state dict stand for, by their ``id``.
        read: fills a chunk of a tensor; several threads call it.
        most: bytes of a chunk at most, as far as one row is not larger.
    """

    def __init__(
        self, tensors: Mapping[int, Tensor], read: Callable[[Tensor, int, int], torch.Tensor], most: int
    ) -> None:
        super().__init__()
        self.tensors, self.read, self.most = tensors, read, most

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [chunk for item in plan.items for chunk in self._cut(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def find(self, index: MetadataIndex) -> Tensor | None:
        """What an item of the plan stands for; None where its value is in the state dict."""
        return self.tensors.get(id(self.state_dict[index.fqn]))

    def find_place(self, item: WriteItem) -> tuple[tuple[int, int], int]:
        """Where a chunk's first byte lies in the source, for the order: that of its tensor, then its own."""
        tensor, data = self.tensors[id(self.state_dict[item.index.fqn])], item.tensor_data
        return tensor.whole.place, 0 if data is None else locate_chunk(tensor.shape, data.chunk.offsets, data.size)[0]

    def count_bytes(self, item: WriteItem) -> int:
        """Bytes of the source that a chunk is made from; 0 where its value is in the state dict."""
        tensor, data = self.find(item.index), item.tensor_data
        return 0 if tensor is None or data is None else count(tuple(data.chunk.sizes)) * tensor.whole.itemsize

    def count_plan(self, plan: SavePlan) -> int:
        """Bytes of the source that a plan's chunks are made from."""
        return sum(map(self.count_bytes, plan.items))

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        tensor, data = self.find(item.index), item.tensor_data
        if tensor is None or data is None:
            yield item
            return
        for offsets, sizes in cut_chunks(tensor.shape, self.most // ITEMSIZE[tensor.dtype]):
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            index = MetadataIndex(item.index.fqn, torch.Size(offsets))
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, data.properties, data.size))

    def resolve_data(self, write_item: WriteItem) -> Any:
        tensor, data = self.find(write_item.index), write_item.tensor_data
        if tensor is None or data is None:
            return super().resolve_data(write_item)
        start, numel = locate_chunk(tensor.shape, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        return self.read(tensor, start, numel).view(data.chunk.sizes)


def cut_chunks(shape: Shape, most: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a tensor into blocks that are contiguous and have at most ``most`` elements: (offsets, sizes).

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


def locate_chunk(shape: Shape, offsets: Shape, sizes: Shape) -> tuple[int, int]:
    """(first element, elements) of a contiguous block of a flattened tensor."""
    start = 0
    for offset, size in zip(offsets, shape, strict=True):
        start = start * size + offset
    return start, count(sizes)


def deal(planner: Planner, plan: SavePlan, workers: int) -> list[SavePlan]:
    """Deal a plan's chunks to workers by bytes, each a run in the order of the source; the first takes the rest."""
    small = [item for item in plan.items if planner.find(item.index) is None]
    chunks = sorted((item for item in plan.items if planner.find(item.index) is not None), key=planner.find_place)
    sizes = [planner.count_bytes(item) for item in chunks]
    total, position = sum(sizes), 0
    dealt: list[list[WriteItem]] = [small, *([] for _ in range(workers - 1))]
    for item, size in zip(chunks, sizes, strict=True):
        dealt[min((2 * position + size) * workers // (2 * total), workers - 1) if total else 0].append(item)
        position += size
    mappings = [plan.planner_data, *({} for _ in range(workers - 1))]
    return [SavePlan(items, planner_data=told) for items, told in zip(dealt, mappings, strict=True)]


class Writer(FileSystemWriter):
    """Names the final folder, not the staged one, in the metadata, and nothing that changes from run to run."""

    destination = ""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.destination)
