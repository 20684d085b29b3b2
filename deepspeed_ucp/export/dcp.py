"""Export weights and optimizer state for torch.distributed.checkpoint, which FSDP, Accelerate and torchtitan load.

Torch's ``FileSystemWriter`` writes files and metadata. :class:`~.chunks.Planner` reads each chunk of rows when it is
written, which bounds the memory. Each worker thread counts as a rank; no process group is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..comm import Comm
from ..errors import ConfigError, UnsupportedError, advise
from ..io.disk import explain_full
from ..io.paths import join_path, normalize
from ..io.read import Checked
from ..io.threads import run_threads
from ..model import AtomicIndex
from ..plan.conversion import ALIGNMENT
from ..plan.settling import describe_irregular
from ..stream.report import OutputReport
from ..tensor_parallel import RuleSet
from .beside import write_beside
from .chunks import Planner, Writer, deal
from .output import Export, stage_export
from .statedict import LAYOUTS, Placeholders, Trees, make_trees
from .tensors import WEIGHTS, ExportOptions, Selection, select_tensors

ITEM_OVERHEAD = 2048
"""Upper bound of the bytes that torch writes around a tensor."""


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
        destination: folder to create.
        comm: the nodes that share the work (default: this one).
        rules: the user's patterns and renames.
        weights_only: omit the optimizer.
        layout: one of ``LAYOUTS``.

    Raises:
        UcpError: equal on all ranks; the destination is unchanged.
    """
    comm, options = comm or Comm(), options or ExportOptions()

    def plan() -> tuple[Selection, Trees, Placeholders]:
        _check_arguments(index, weights_only, layout)
        states = WEIGHTS.__contains__ if weights_only else lambda _: True
        selection = select_tensors(index, rules, options, tied="copy", states=states)
        return selection, *make_trees(selection, weights_only=weights_only, layout=layout)

    selection, trees, placeholders = comm.run(plan)
    nbytes = sum(tensor.nbytes + ITEM_OVERHEAD for tensor, _ in placeholders.values())
    with stage_export("dcp", destination, selection, options, comm, tensors=len(placeholders), nbytes=nbytes) as export:
        most = max(options.divide(export.report.source)[1] // 2, ALIGNMENT)
        checks, repeated = list[Checked](), list[Checked]()
        for folder, tree in trees.items():
            _write(export, folder, tree, Planner(selection.index, placeholders, most, checks, repeated))
        if layout == "accelerate":
            comm.once(lambda: write_beside(export))
        export.verify(
            [tensor for tensor, again in placeholders.values() if not again],
            checks,
            sum(check.nbytes for check in repeated),
        )
    return export.report


def _check_arguments(index: AtomicIndex, weights_only: bool, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ConfigError(f"layout: {layout!r} is unknown. {advise(layout, LAYOUTS)}")
    if not weights_only and (text := index.stateless or describe_irregular(index)):
        raise UnsupportedError(f"{text} Export only the weights (--weights-only).")


def _write(export: Export, folder: str, tree: dict[str, Any], planner: Planner) -> None:
    """Plan, read and write this node's chunks of one state dict; collective.

    Args:
        folder: subfolder of the export; empty for the export's folder.
    """
    comm, report = export.comm, export.report
    report.workers = export.options.divide(export.report.source)[0]
    writer = Writer(os.path.join(export.folder, folder), thread_count=1, per_thread_copy_ahead=0, sync_files=False)
    writer.destination = join_path(normalize(report.destination), folder).rstrip("/")

    def plan() -> tuple[list[SavePlan], Any]:
        os.makedirs(writer.path, exist_ok=True)
        planner.set_up_planner(tree, is_coordinator=True)
        writer.set_up_storage_writer(True)
        shares = deal(planner, planner.create_local_plan(), comm.size * report.workers)
        plans, metadata = planner.create_global_plan(shares)
        plans = writer.prepare_global_plan(plans)
        return plans[comm.rank * report.workers : (comm.rank + 1) * report.workers], metadata

    def write_share() -> list[WriteResult]:
        results: list[WriteResult] = []

        def write(turn: Iterator[SavePlan]) -> None:
            for bucket in turn:
                if bucket.items:
                    results.extend(writer.write_data(bucket, planner).wait())

        total = sum(map(planner.count_bytes, mine))
        with planner.reader, export.options.bar(total) as progress, explain_full(export.folder):
            planner.progress = progress
            run_threads(mine, write, report.workers)
        if comm.size == 1:  # on several ranks the chunks of a tied name may be read by different ranks
            planner.compare()
        return results

    mine, metadata = comm.run(plan)
    written = comm.each(write_share)
    comm.once(lambda: writer.finish(metadata, written))
