"""Writes weights and optimizer state for torch.distributed.checkpoint, which FSDP2 and torchtitan load.

Torch's own ``FileSystemWriter`` writes the files and the metadata; a planner of ours hands it chunks of rows that are
read only when they are written, so that memory stays bounded. No process group: every worker is a rank to torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..atoms import ITEMSIZE, AtomicIndex
from ..comm import Comm
from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..io.cast import cast
from ..io.disk import explain_full
from ..io.memory import Scratch
from ..io.threads import run_threads
from ..patterns import RuleSet
from ..plan.conversion import ALIGNMENT
from ..plan.limits import describe_irregular
from ..stream.checks import Checks
from ..stream.progress import divide_window
from ..stream.reader import AtomReader, Item
from ..stream.report import OutputReport
from ..stream.samples import check_samples
from .chunks import Planner, Writer, deal
from .output import list_sizes, stage_output
from .statedict import LAYOUTS, make_tree
from .tensors import WEIGHTS, ExportOptions, Selection, Tensor, select_tensors, start_report, warn_losses

ITEM_OVERHEAD = 2048
"""Bytes that torch writes around a tensor, and a little."""


def export_dcp(
    index: AtomicIndex,
    destination: str,
    comm: Comm | None = None,
    options: ExportOptions | None = None,
    *,
    rules: Sequence[RuleSet] = (),
    weights_only: bool = False,
    layout: str = "torch",
) -> OutputReport:
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
    comm, options = comm or Comm(), options or ExportOptions()

    def plan() -> tuple[Selection, dict[str, Any], Mapping[int, Tensor]]:
        _check_arguments(index, weights_only, layout)
        wanted = WEIGHTS.__contains__ if weights_only else _accept
        selection = select_tensors(index, rules, options, tied="copy", states=wanted)
        return selection, *make_tree(index, selection, options, weights_only=weights_only, layout=layout)

    selection, tree, tensors = comm.run(plan)
    warn_losses(index, selection, comm)
    report = start_report("dcp", index, destination, selection, len(tensors), comm.size)
    nbytes = sum(tensor.nbytes + ITEM_OVERHEAD for tensor in tensors.values())
    with report.timed(), stage_output(index, destination, nbytes, options.overwrite, comm) as folder:
        _fill(index, folder, tree, tensors, comm, options, report)
        report.files = list_sizes(folder)
    report.bytes_written = sum(report.files.values())
    return report


def _accept(state: str) -> bool:
    return True


def _check_arguments(index: AtomicIndex, weights_only: bool, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ConfigError(f"layout: {layout!r} is none of {', '.join(LAYOUTS)}.")
    if not weights_only and (text := describe_irregular(index)):
        raise UnsupportedError(f"{text} The weights alone can be exported (--weights-only).")


class Reading:
    """Reads chunks into memory that each thread has of its own and uses again.

    torch keeps the last chunk of every name for as long as it writes a file: they are all views of the same memory.
    """

    def __init__(self, index: AtomicIndex) -> None:
        self.reader = AtomReader(index)
        self.progress: Callable[[int], None] = lambda nbytes: None
        self.checks, self.repeated = Checks(), Checks()
        self._own = threading.local()

    def read(self, tensor: Tensor, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of a tensor of the output, flattened; good until the thread's next call."""
        dtype = getattr(torch, tensor.dtype)
        if not numel:
            return torch.empty(0, dtype=dtype)
        data = self._take(0, numel * tensor.whole.itemsize)
        checks = self.repeated if tensor.again else self.checks
        checks.add(self.reader.read_items((Item(tensor.whole, start, numel, data),)))
        self.progress(data.nbytes)
        if tensor.dtype != tensor.whole.dtype:
            into = self._take(1, numel * ITEMSIZE[tensor.dtype])
            cast(data, tensor.whole.dtype, into, tensor.dtype)
            data = into
        return torch.frombuffer(data, dtype=dtype)

    def _take(self, number: int, nbytes: int) -> memoryview:
        """Memory of the calling thread."""
        if not hasattr(self._own, "memory"):
            self._own.memory = Scratch(), Scratch()
        memory: tuple[Scratch, Scratch] = self._own.memory
        return memory[number].take(nbytes)

    def compare(self) -> None:
        """What was read a second time, for a tied name, has to be what was read first.

        Raises:
            CheckpointError: a file changed in between.
        """
        changed = set(self.repeated.read) - set(self.checks.read)
        if changed:
            record = self.reader.index.stored.records[min(changed).record]
            path = self.reader.index.stored.files[record.file].path
            raise CheckpointError(f"{path}: was written to while it was exported.")


def _fill(
    index: AtomicIndex,
    folder: str,
    tree: dict[str, Any],
    tensors: Mapping[int, Tensor],
    comm: Comm,
    options: ExportOptions,
    report: OutputReport,
) -> None:
    """Plan, read and write this node's chunks, and hold the source against its checksums; collective."""
    report.workers, most = divide_window(options.workers, options.window)
    reading = Reading(index)
    planner = Planner(tensors, reading.read, max(most // 2, ALIGNMENT))
    writer = Writer(folder, thread_count=1, per_thread_copy_ahead=0, sync_files=False)
    writer.destination = os.path.abspath(report.destination)

    def plan() -> tuple[list[SavePlan], Any]:
        planner.set_up_planner(tree, is_coordinator=True)
        writer.set_up_storage_writer(True)
        shares = deal(planner, planner.create_local_plan(), comm.size * report.workers)
        plans, metadata = planner.create_global_plan(shares)
        plans = writer.prepare_global_plan(plans)
        return plans[comm.rank * report.workers : (comm.rank + 1) * report.workers], metadata

    def write_share() -> list[WriteResult]:
        results: list[WriteResult] = []
        with reading.reader, options.bar(sum(map(planner.count_plan, mine))) as progress, explain_full(folder):
            reading.progress = progress
            run_threads(mine, lambda each: results.extend(_write(writer, planner, each)), report.workers)
        if comm.size == 1:  # the chunks of a tied name may have been another rank's: then they are not compared
            reading.compare()
        return results

    mine, metadata = comm.run(plan)
    written = comm.each(write_share)
    comm.once(lambda: writer.finish(metadata, written))
    nbytes = reading.checks.nbytes + reading.repeated.nbytes
    nbytes += reading.checks.verify(index, comm, threads=report.workers)
    check_samples(index, [tensor.whole.atom for tensor in tensors.values()], comm)
    report.bytes_read = sum(comm.gather(nbytes))


def _write(writer: FileSystemWriter, planner: Planner, plans: Iterator[SavePlan]) -> list[WriteResult]:
    """One thread: plan by plan, each a file."""
    written = []
    for plan in plans:
        if plan.items:
            written += writer.write_data(plan, planner).wait()
    return written
