"""Writes weights and optimizer state for torch.distributed.checkpoint, which FSDP2 and torchtitan load.

Torch's own ``FileSystemWriter`` writes the files and the metadata; a planner of ours hands it chunks of rows that are
read only when they are written, so that memory stays bounded. No process group: every worker is a rank to torch.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ..atoms import ITEMSIZE, AtomicIndex, count
from ..comm import Comm
from ..errors import CheckpointError, ConfigError, UnsupportedError, shorten
from ..io.cast import cast
from ..io.checksum import Checked
from ..io.disk import explain_full
from ..patterns import RuleSet
from ..patterns.layout import Shape
from ..plan.conversion import ALIGNMENT
from ..sources.samples import check_samples
from .checks import verify_source
from .export import WEIGHTS, ExportOptions, ExportReport, Tensor, divide_window, select_tensors, warn_losses
from .output import list_sizes, stage_output
from .progress import Bar, Scratch, run_threads
from .reading import Item, RangeReader
from .statedict import LAYOUTS, make_tree

ITEM_OVERHEAD = 2048
"""Bytes that torch writes around a tensor, and a little."""


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


class _Writer(FileSystemWriter):
    """Names the final folder, not the staged one, in the metadata, and nothing that changes from run to run."""

    destination = ""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.destination)


def export_dcp(
    index: AtomicIndex,
    destination: str,
    comm: Comm | None = None,
    options: ExportOptions | None = None,
    *,
    rules: Sequence[RuleSet] = (),
    weights_only: bool = False,
    layout: str = "torch",
) -> ExportReport:
    """Write a checkpoint's weights and optimizer state for ``torch.distributed.checkpoint``; collective.

    Args:
        index: the checkpoint.
        destination: folder to be made.
        comm: the nodes that share the work; alone without it.
        rules: how tensor parallelism cuts parameters, by the user.
        weights_only: leave the optimizer out.
        layout: one of ``LAYOUTS``.

    Raises:
        UcpError: the same on every rank; the destination is as it was.
    """
    comm, options, begin = comm or Comm(), options or ExportOptions(tied="copy"), time.perf_counter()
    with comm.together():
        _check_arguments(index, weights_only, layout)
        wanted = WEIGHTS.__contains__ if weights_only else _accept
        selection = select_tensors(index, rules, options, states=wanted)
        tree, tensors = make_tree(index, selection, options, weights_only=weights_only, layout=layout)
    warn_losses(index, selection, comm)
    report = ExportReport("dcp", destination, tensors=len(tensors), nodes=comm.size)
    report.parameters = sum(tensor.numel for tensor in selection.tensors if tensor.whole.name not in index.buffers)
    report.dtypes = tuple(sorted({tensor.dtype for tensor in selection.tensors}))
    size = sum(tensor.nbytes + ITEM_OVERHEAD for tensor in tensors.values())
    with stage_output(index, destination, size, options.overwrite, comm) as folder:
        _fill(index, folder, tree, tensors, comm, options, report)
        report.files = list_sizes(folder)
    report.bytes_written = sum(report.files.values())
    report.seconds = time.perf_counter() - begin
    return report


def _accept(state: str) -> bool:
    return True


def _check_arguments(index: AtomicIndex, weights_only: bool, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ConfigError(f"layout: {layout!r} is none of {', '.join(LAYOUTS)}.")
    if index.irregular and not weights_only:
        listed = [f"{name} ({what})" for name, what in sorted(index.irregular.items())]
        raise UnsupportedError(
            f"{index.optimizer or 'The saved optimizer'} keeps states that are not element-wise: {shorten(listed)}. "
            "The weights alone can be exported (--weights-only)."
        )


class Reading:
    """Reads chunks into memory that each thread has of its own and uses again.

    torch keeps the last chunk of every name for as long as it writes a file: they are all views of the same memory.
    """

    def __init__(self, index: AtomicIndex) -> None:
        self.reader = RangeReader(index)
        self.bar: Bar | None = None
        self.checks: list[Checked] = []
        self.repeated: list[Checked] = []
        self._lock = threading.Lock()
        self._own = threading.local()

    def read(self, tensor: Tensor, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of a tensor of the output, flattened; good until the thread's next call."""
        dtype = getattr(torch, tensor.dtype)
        if not numel:
            return torch.empty(0, dtype=dtype)
        if not hasattr(self._own, "memory"):
            self._own.memory = Scratch()
        memory: Scratch = self._own.memory
        data = memory.take(numel * tensor.whole.itemsize)
        checks = self.reader.read_items((Item(tensor.whole, start, numel, data),))
        with self._lock:
            (self.repeated if tensor.again else self.checks).extend(checks)
        if self.bar is not None:
            self.bar.add(data.nbytes)
        if tensor.dtype != tensor.whole.dtype:
            into = memory.take_second(numel * ITEMSIZE[tensor.dtype])
            cast(data, tensor.whole.dtype, into, tensor.dtype)
            data = into
        return torch.frombuffer(data, dtype=dtype)

    def compare(self) -> None:
        """What was read a second time, for a tied name, has to be what was read first.

        Raises:
            CheckpointError: a file changed in between.
        """
        changed = set(self.repeated) - set(self.checks)
        if changed:
            record = self.reader.index.records[min(check.record for check in changed)]
            path = self.reader.index.files[record.file].path
            raise CheckpointError(f"{path}: was written to while it was exported.")


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


def _fill(
    index: AtomicIndex,
    folder: str,
    tree: dict[str, Any],
    tensors: Mapping[int, Tensor],
    comm: Comm,
    options: ExportOptions,
    report: ExportReport,
) -> None:
    """Plan, read and write this node's chunks, and hold the source against its checksums; collective."""
    report.workers, most = divide_window(options)
    reading = Reading(index)
    with comm.together():
        planner = Planner(tensors, reading.read, max(most // 2, ALIGNMENT))
        writer = _Writer(folder, thread_count=1, per_thread_copy_ahead=0, sync_files=False)
        writer.destination = os.path.abspath(report.folder)
        planner.set_up_planner(tree, is_coordinator=True)
        writer.set_up_storage_writer(True)
        shares = deal(planner, planner.create_local_plan(), comm.size * report.workers)
        plans, metadata = planner.create_global_plan(shares)
        plans = writer.prepare_global_plan(plans)
        mine = plans[comm.rank * report.workers : (comm.rank + 1) * report.workers]
    results: list[WriteResult] = []
    with comm.together(), reading.reader, options.bar(sum(map(planner.count_plan, mine))) as bar:
        reading.bar = bar
        with explain_full(folder):
            run_threads(mine, lambda each: results.extend(_write(writer, planner, each)), report.workers)
    with comm.together():
        # The chunks of a tied name may have been another rank's: then they are not compared.
        if comm.size == 1:
            reading.compare()
    written = comm.gather(results)
    with comm.together():
        if comm.rank == 0:
            writer.finish(metadata, written)
    report.bytes_read = reading.reader.nbytes + verify_source(index, reading.checks, comm, threads=report.workers)
    check_samples(index, [tensor.whole.atom for tensor in tensors.values()], comm)
    report.bytes_read = sum(comm.gather(report.bytes_read))


def _write(writer: FileSystemWriter, planner: Planner, plans: Iterator[SavePlan]) -> list[WriteResult]:
    """One thread: plan by plan, each a file."""
    written = []
    for plan in plans:
        if plan.items:
            written += writer.write_data(plan, planner).wait()
    return written
