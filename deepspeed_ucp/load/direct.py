"""The direct load: checkpoint bytes into live buffers, all or nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..comm import Comm
from ..config import UniversalConfig
from ..engine.base import Target
from ..engine.finish import (
    check_scheduler,
    find_extra_states,
    pick_client_state,
    restore_counters,
    restore_helpers,
    restore_rates,
    restore_scaling,
)
from ..engine.guard import block_engine, guard_engine
from ..engine_state import KEY
from ..errors import MismatchError, Objections, UnsupportedError, pluralize, shorten
from ..extensions.registry import find_for_load, name_active
from ..formats.deepspeed.ownfiles import find_state_file
from ..formats.deepspeed.save import DEEPSPEEDS
from ..io.memory import pause_collection
from ..io.paths import is_url
from ..model.index import AtomicIndex
from ..model.storage import strip_compiled
from ..stream.reader import read_state_file, verify_records
from .client import EXTRA_STATES, make_objects
from .context import LoadContext
from .destinations import FillPlan
from .prepare import prepare
from .states import attach_states, describe_hyper
from .transfer import Transfer

logger = logging.getLogger("deepspeed_ucp")


def load_direct(context: LoadContext, index: AtomicIndex, target: Target) -> dict[str, Any]:
    """Fill a live engine from a checkpoint of any topology (collective).

    Call the optimizer's ``checkpoint_event_prologue`` before.

    Returns:
        The client state, as DeepSpeed's load returns it.

    Raises:
        UcpError: the same on every rank. The engine is unchanged, or blocked with a message about it.
    """
    engine, comm, report = context.engine, context.comm, context.report
    with_states = context.with_states and any(comm.gather(bool(target.flats)))
    context = replace(context, extensions=find_for_load(context, index, target, context.rules))
    report.extensions = name_active(context.extensions, report.extensions)
    fill_plan, saved = _prepare(context, index, target, with_states=with_states)
    report.state_bytes = fill_plan.state_bytes
    with report.phase("plan"), pause_collection():
        # A fresh engine has no state worth preserving, and allocating memory takes longer than a second pass, unless
        # that would read the same bytes from a store again.
        prefer_memory = engine.global_steps > 0 or reads_from_store(fill_plan.index, comm)
        transfer = Transfer(fill_plan, comm, context.config, prefer_memory=prefer_memory)
    extra = saved.pop(EXTRA_STATES, {})
    modules = _match_extra_states(context, index, target, extra)
    with _undo_on_error(engine, transfer, with_states=with_states):
        _read(context, transfer)
    with guard_engine(engine, with_states=with_states):
        # The code of others runs before the buffers change.
        with _undo_on_error(engine, transfer, with_states=with_states), report.phase("finish"):
            states = [(module, extra[key]) for key, module in modules.items()]
            comm.run(lambda: _restore_others(context, index, saved, states))
        # From here on the engine changes, and an error blocks it.
        for extension in context.extensions:
            extension.change_engine(context, target, fill_plan)
        _fill(context, target, transfer)
        with report.phase("finish"):
            comm.run(lambda: _finish(context, target, fill_plan, saved, with_states=with_states))
            differences = (extension.describe_differences(target) for extension in context.extensions)
            context.warn_all(index.state_file, lambda: filter(None, differences))
    return pick_client_state(
        saved,
        module_only=context.load_module_only,
        with_scheduler=context.load_lr_scheduler_states,
        with_optimizer=context.load_optimizer_states,
    )


@contextmanager
def _undo_on_error(engine: Any, transfer: Transfer, *, with_states: bool) -> Iterator[None]:
    """Undo the load after an exception; block the engine if that fails too."""
    try:
        yield
    except BaseException:
        try:
            transfer.undo()
        except BaseException as error:
            error.add_note(block_engine(engine, error, with_states=with_states))
            raise
        raise


def _read(context: LoadContext, transfer: Transfer) -> None:
    """Run pass 1 and verify; only reproducible values change (collective)."""
    report = context.report
    with report.phase("read"):
        report.add_reads(transfer.read())
    with report.phase("verify"):
        report.bytes_read += transfer.verify()
    for extension in context.extensions:
        extension.read_more(context, transfer.fill_plan)
    report.files, report.threads = transfer.files, transfer.threads


def _fill(context: LoadContext, target: Target, transfer: Transfer) -> None:
    """Fill the engine's memory, and copy its masters to 16 bit (collective)."""
    comm, report = context.comm, context.report
    with report.phase("fill"):
        again = transfer.fill()
        comm.run(target.commit)
    with report.phase("copies"):
        if transfer.fill_plan.touched:
            comm.run(target.refresh_copies)
            target.gather_copies()
    if context.config.verify == "crc":
        report.bytes_again = sum(check.nbytes for check in again)
    else:  # pass 1 has not read these bytes
        report.add_reads(again)


def reads_from_store(index: AtomicIndex, comm: Comm) -> bool:
    """Return True if some rank reads from a store (collective if places differ)."""
    here = any(is_url(path) for file in index.files for path in file.copies[:1])
    if not index.access.is_partial and not any(file.places for file in index.files):
        return here  # the same on every rank
    return bool(comm.any_of(np.array([here]))[0])


def _prepare(
    context: LoadContext, index: AtomicIndex, target: Target, *, with_states: bool
) -> tuple[FillPlan, dict[str, Any]]:
    """Plan the fill and read the state file; all objections in one error (collective)."""
    comm, objections = context.comm, Objections()
    with objections:
        comm.run(lambda: _check_extensions(context, index, target))
    with objections:
        saved = _read_saved(context, index, target)
        if context.load_lr_scheduler_states and not context.load_module_only:
            comm.run(lambda: check_scheduler(context.engine, saved))
    with objections, context.report.phase("plan"), pause_collection():
        fill_plan = prepare(context, index, target, with_states=with_states)
    objections.settle()
    context.warn_all(index.state_file, lambda: describe_hyper(context, target, fill_plan.index, fill_plan.match))
    if index.foreign and with_states and (clip := context.engine.gradient_clipping()):
        context.warn(
            "%s: does not record its run's gradient clipping; this engine clips gradients at norm %s "
            "(gradient_clipping: 1.0 by default, 0 switches it off)",
            *(index.state_file, clip),
        )
    if context.config.verify == "crc" and not index.format:  # the reason of a foreign one's load names them
        _log_unchecked(context, index)
    return fill_plan, saved


def _check_extensions(context: LoadContext, index: AtomicIndex, target: Target) -> None:
    """Raise the objections of this rank's extensions to the load as one error."""
    objections = Objections()
    for extension in context.extensions:
        with objections:
            extension.refuse(context, index, target)
    objections.settle()


def _log_unchecked(context: LoadContext, index: AtomicIndex) -> None:
    files, nbytes, crcs = (
        np.array(column) for column in (index.records.files, index.records.nbytes, index.records.crcs)
    )
    names = [os.path.basename(index.files[number].path) for number in np.unique(files[(crcs < 0) & (nbytes > 0)])]
    if names:
        text = 'damage is not detected in %s without checksums: %s. "seal": true adds checksums of swap files.'
        context.warn(f"%s: {text}", os.path.dirname(index.state_file), pluralize(len(names), "file"), shorten(names, 3))


def _match_extra_states(
    context: LoadContext, index: AtomicIndex, target: Target, saved: dict[str, Any]
) -> dict[str, torch.nn.Module]:
    """Return this rank's modules whose extra state is restored, by key (collective).

    Warnings name extra states that are not restored or come from another rank; if ``load_module_strict``, one that only
    one side has is a MismatchError. A foreign checkpoint or a ``custom_load_fn`` restores none.
    """
    live, plain = find_extra_states(context.engine.module), {strip_compiled(key): key for key in saved}
    skips = bool(index.format) or context.custom_load_fn is not None

    def list_keys() -> tuple[list[str], list[str]]:
        used = [key for key, module in live.items() if not skips or module.get_extra_state() is not None]
        return used, [*plain]

    reports = zip(*context.comm.gather_results(list_keys), strict=True)  # stages of a pipeline have different modules
    used, stored = ({key for keys in side for key in keys} for side in reports)
    if skips:
        if kept := used | stored:
            context.warn("%s: extra states are not loaded: %s", index.state_file, shorten(sorted(kept), 3))
        return {}
    if one_sided := sorted(used ^ stored):
        fact = f"extra states that one side lacks: {shorten(one_sided)}"
        if context.load_module_strict:
            advice = "load_module_strict=False ignores missing and extra ones"
            raise context.comm.common(MismatchError(f"The model and the checkpoint differ: {fact}. {advice}."))
        context.warn("load_module_strict=False, passing over %s", fact)
    common = {plain[key]: live[key] for key in live if key in plain}
    if common and index.written_degrees[0] > 1 and not _has_saved_degrees(index, target):
        text = "%s: modules of all tensor-parallel ranks get the extra states of the first saved rank: %s"
        context.warn(text, index.state_file, shorten(common, 3))
    return common


def _read_saved(context: LoadContext, index: AtomicIndex, target: Target) -> dict[str, Any]:
    """Read and check a state file without the model's tensors (collective).

    At the saved tensor- and pipeline-parallel degrees each rank reads the file of its place (Megatron's random states),
    else all ranks take the content of ``index.state_file``. A foreign checkpoint has counters alone.
    """
    comm, added = context.comm, dict[str, Any]()
    if index.foreign and "global_steps" not in index.counters and not context.load_module_only:
        context.warn("%s: records no number of steps: global_steps begin at 0", index.state_file)
        added["global_steps"] = 0
    if index.format:
        return {**added, **index.counters}

    if context.config.verify == "crc":
        verify_records(index, index.client_records, comm)
    read, access = partial(_read_state_file, index, context.config), index.access
    paths = [file.path for file in index.files]

    def find_reader(path: str) -> int:
        """Return the first rank that can read a file; every rank computes the same."""
        return access.find_reader(paths.index(path)) if access.is_partial else 0

    saved = comm.once(lambda: read(index.state_file), find_reader(index.state_file))
    own_file = comm.run(lambda: _find_own_file(index, target))  # may access a store
    client = saved.keys() - {*DEEPSPEEDS, KEY, EXTRA_STATES}
    if comm.rank == 0 and client and _leaves_client_states(index, target):
        logger.info(
            "%s: other ranks' client states are not loaded if this run has no rank at their place: %s",
            *(index.state_file, shorten(sorted(map(str, client)), 3)),
        )
    others: list[dict[str, Any]] = []
    if access.is_partial:
        questions = [] if own_file is None else [(find_reader(own_file), paths.index(own_file))]
        others = comm.ask(questions, lambda number: read(paths[number]))

    def choose_content() -> dict[str, Any]:
        content = added | (saved if own_file is None else others.pop() if others else read(own_file))
        if "global_steps" not in content and not context.load_module_only:
            raise UnsupportedError(
                "has no global_steps; it was not saved by engine.save_checkpoint. For "
                "its weights use load_module_only=True.",
                path=own_file or index.state_file,
            )
        return content

    return comm.run(choose_content)


def _read_state_file(index: AtomicIndex, config: UniversalConfig, path: str) -> dict[str, Any]:
    header = read_state_file(index, path)
    checked = config.verify == "crc"
    return make_objects(header, trust_pickle=config.trust_pickle, checked=checked, has_option=True)


def _find_own_file(index: AtomicIndex, target: Target) -> str | None:
    """Return the state file for this rank's place, or None if there is only the first."""
    if not _has_saved_degrees(index, target):
        return None
    parallel = target.parallel
    return find_state_file(index, parallel.mp_rank, parallel.dp_rank if parallel.dp == index.topology.dp else 0)


def _leaves_client_states(index: AtomicIndex, target: Target) -> bool:
    """Return True if some saved rank's client state has no rank at its place here."""
    if index.topology.zero_stage == 3 and index.topology.dp not in (1, target.parallel.dp):
        return True
    return max(index.written_degrees) > 1 and not _has_saved_degrees(index, target)


def _has_saved_degrees(index: AtomicIndex, target: Target) -> bool:
    """Return True if the state files' writers had these TP and PP degrees."""
    return (target.parallel.tp, target.parallel.pp) == index.written_degrees


def _restore_others(
    context: LoadContext, index: AtomicIndex, saved: dict[str, Any], modules: Iterable[tuple[torch.nn.Module, Any]]
) -> None:
    """Restore LR scheduler, random-LTD, data sampler, and the (module, extra state)s."""
    if not context.load_module_only:
        notes = restore_helpers(context.engine, saved, with_scheduler=context.load_lr_scheduler_states)
        if notes:
            context.warn("%s: %s", index.state_file, " ".join(notes))
    for module, state in modules:
        module.set_extra_state(state)


def _finish(
    context: LoadContext, target: Target, fill_plan: FillPlan, saved: dict[str, Any], *, with_states: bool
) -> None:
    """Attach optimizer states; restore counters, loss scaler and learning rates."""
    engine, index = context.engine, fill_plan.index
    if with_states:
        attach_states(target, fill_plan.states, fill_plan.match)
    engine.loaded_checkpoint_dp_world_size = saved.get("dp_world_size")
    if context.load_module_only:
        return
    if with_states:
        restore_scaling(engine.optimizer, index)
    # Elastic saves have no hyper-parameters, and ds_to_universal keeps only the first pipeline stage's.
    saved_rates = index.groups and all("lr" in group.hyper for group in index.groups)
    takes_rates = saved_rates and context.config.param_groups == "saved"
    if with_states and context.load_lr_scheduler_states and not takes_rates:
        restore_rates(engine)
    restore_counters(engine, saved)
