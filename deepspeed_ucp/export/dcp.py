"""Exports weights and optimizer state for ``torch.distributed.checkpoint``.

FSDP, Accelerate and torchtitan load the output. Torch's ``FileSystemWriter`` writes files and metadata.
:class:`~.chunks.Planner` reads each chunk of rows when it is written, which bounds the memory. Each worker thread
counts as a rank; no process group is needed. The layout ``accelerate`` adds files of Accelerate and Hugging Face's
Trainer.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..comm import Comm
from ..errors import ConfigError, UnsupportedError, advise
from ..formats.deepspeed.files import scan_if_there
from ..formats.foreign.names import OPTIMIZER_FOLDER, SCALER, TRAINER_STATE, TRAINERS
from ..io.disk import create_file, explain_full
from ..io.paths import find_tag_folder, join_path, normalize
from ..io.read import Checked
from ..io.store import read_small
from ..io.threads import run_threads
from ..model.index import AtomicIndex
from ..model.storage import WEIGHTS
from ..plan.conversion import ALIGNMENT
from ..plan.settling import describe_irregular
from ..stream.report import OutputReport
from ..tensor_parallel.rules import RuleSet
from .chunks import Planner, Writer, distribute_chunks
from .output import Export, stage_export
from .statedict import LAYOUTS, Placeholders, Trees, make_trees
from .tensors import ExportOptions, Selection, select_tensors

logger = logging.getLogger("deepspeed_ucp")

_SCHEDULER = "scheduler.pt"

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
    """Write weights and states for ``torch.distributed.checkpoint`` (collective).

    Raises:
        UcpError: equal on all ranks; the destination is unchanged.
    """
    comm, options = comm or Comm(), options or ExportOptions()

    def plan() -> tuple[Selection, Trees, Placeholders]:
        if layout not in LAYOUTS:
            raise ConfigError(f"layout: {layout!r} is unknown. {advise(layout, LAYOUTS)}")
        if not weights_only and (text := index.stateless or describe_irregular(index)):
            raise UnsupportedError(f"{text} Export only the weights (--weights-only).")
        states = WEIGHTS.__contains__ if weights_only else lambda _: True
        selection = select_tensors(index, rules, options, tied="copy", states=states)
        return selection, *make_trees(selection, weights_only=weights_only, layout=layout)

    selection, trees, placeholders = comm.run(plan)
    nbytes = sum(tensor.nbytes + ITEM_OVERHEAD for tensor, _ in placeholders.values())
    with stage_export("dcp", destination, selection, options, comm, tensors=len(placeholders), nbytes=nbytes) as export:
        most = max(options.split_window(export.report.source)[1] // 2, ALIGNMENT)
        checks, repeated = list[Checked](), list[Checked]()
        for folder, tree in trees.items():
            _write_tree(export, folder, tree, Planner(selection, placeholders, most, checks, repeated))
        if layout == "accelerate":
            comm.once(lambda: write_trainer_files(export))
        export.verify(
            [tensor for tensor, again in placeholders.values() if not again],
            checks,
            sum(check.nbytes for check in repeated),
        )
    return export.report


def _write_tree(export: Export, folder: str, tree: dict[str, Any], planner: Planner) -> None:
    """Plan, read and write this node's chunks of one state dict; collective."""
    comm, report = export.comm, export.report
    report.workers = export.options.split_window(export.report.source)[0]
    writer = Writer(os.path.join(export.folder, folder), thread_count=1, per_thread_copy_ahead=0, sync_files=False)
    writer.destination = join_path(normalize(report.destination), folder).rstrip("/")

    def plan() -> tuple[list[SavePlan], Any]:
        os.makedirs(writer.path, exist_ok=True)
        planner.set_up_planner(tree, is_coordinator=True)
        writer.set_up_storage_writer(True)
        shares = distribute_chunks(planner, planner.create_local_plan(), comm.size * report.workers)
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
        return results

    mine, metadata = comm.run(plan)
    written = comm.gather_results(write_share)
    planner.check_repeated(comm)
    comm.once(lambda: writer.finish(metadata, written))


def write_trainer_files(export: Export) -> None:
    """Copy or create the trainer's files of a tag, and log the missing ones."""
    report, run = export.report, export.selection.index
    source, step = os.path.dirname(find_tag_folder(report.source)), run.counters.get("global_steps", 0)
    names = [name for name in sorted(scan_if_there(source)) if TRAINERS.fullmatch(name)]
    for name in names:
        create_file(os.path.join(export.folder, name), read_small(join_path(source, name)))
    has_states = os.path.isdir(os.path.join(export.folder, OPTIMIZER_FOLDER))
    if has_states and run.scaler.get("dynamic") and SCALER not in names:
        _save_file(export, SCALER, make_scaler(run.scaler))
    is_trainers = TRAINER_STATE in names
    if has_states and is_trainers and _SCHEDULER not in names:  # the Trainer ignores the optimizer without it
        rates = [group.hyper.get("lr") for group in run.groups]
        state = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates, "lr_lambdas": [None] * len(rates)}
        _save_file(export, _SCHEDULER, state)  # of a LambdaLR, the class of the Trainer's schedulers
        text = "%s: the saved run's scheduler was DeepSpeed's; %s has only its step, %d, for this run's scheduler"
        logger.warning(text, report.destination, _SCHEDULER, step)
    wanted = ("rng_state",) if is_trainers else ("scheduler.bin", "random_states")
    lacking = [name for name in wanted if not any(present.startswith(name) for present in names)]
    if "scheduler.bin" in lacking:
        lacking[0] += f" (which load_state wants for a prepared scheduler: prepare it afterwards, at step {step})"
    if lacking:
        logger.warning("%s: not in the checkpoint's folder, so not copied: %s", report.destination, ", ".join(lacking))


def _save_file(export: Export, name: str, content: dict[str, Any]) -> None:
    torch.save(content, stream := io.BytesIO())
    create_file(os.path.join(export.folder, name), stream.getvalue())


def make_scaler(scaler: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state of a ``DynamicLossScaler`` to that of torch's ``GradScaler``."""
    factor, window = float(scaler.get("scale_factor", 2.0)), int(scaler.get("scale_window", 1000))
    since = int(scaler.get("cur_iter", 0)) - int(scaler.get("last_overflow_iter", -1)) - 1  # steps without an overflow
    return {
        "scale": float(scaler["cur_scale"]),
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "growth_interval": window,
        "_growth_tracker": (since - 1) % window if since else -1,  # DeepSpeed's first growth is one step later
    }
