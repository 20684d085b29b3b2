"""The direct load: checkpoint bytes into live buffers.

Pass 1 reads every byte that is needed once, with its checksum. What goes to memory that is not part of the engine yet
(optimizer states of a fresh engine: two thirds of Adam's bytes) is put there; the rest is only checked. When all ranks
have agreed that every record is what training wrote, pass 2 fills the live buffers, from the page cache that pass 1
has warmed. So a damaged file leaves the engine as it was, without a second copy of anything in memory. Should a file
fail in pass 2 for good, the engine is marked as one that must not be used. One that has trained has something to lose:
where there is memory for it, its buffers are filled apart (``apart``), and pass 2 is a copy of memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..atoms import AtomicIndex, AtomKey, strip_compiled
from ..collection import pause_collection
from ..comm import Comm
from ..config import UniversalConfig
from ..errors import CheckpointError, MismatchError, UnsupportedError, shorten
from ..io.checksum import Checked
from ..plan.match import Match, match_groups, match_parameters
from ..stream.checks import Checks
from ..stream.samples import check_samples
from ..targets import Extra, Target
from ..targets.finish import (
    find_extra_states,
    pick_client_state,
    restore_clip,
    restore_counters,
    restore_helpers,
    restore_rates,
    restore_scaler,
)
from ..targets.optimizer import restore_hyper
from .apart import guard_engine, set_apart
from .census import Layouts, check_alike, find_renamed, read_rules, settle_layouts, take_census
from .client import EXTRA_STATES, read_client_objects
from .custom import run_custom_load
from .exchange import CollectiveReader
from .job import Job, make_job
from .negotiate import negotiate
from .replicas import check_instances, check_replicas
from .report import LoadReport

logger = logging.getLogger("deepspeed_ucp")


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """The arguments of ``engine.load_checkpoint`` that change what is loaded."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None

    @property
    def with_states(self) -> bool:
        """Optimizer states are wanted."""
        return self.load_optimizer_states and not self.load_module_only


def load_direct(
    engine: Any,
    index: AtomicIndex,
    target: Target,
    comm: Comm,
    config: UniversalConfig,
    arguments: LoadArguments,
    report: LoadReport,
) -> dict[str, Any]:
    """Fill a live engine from a checkpoint of any topology; collective.

    Args:
        engine: its optimizer's ``checkpoint_event_prologue`` has been called.
        index: the checkpoint.
        target: the engine's buffers.
        report: filled with phases and counts.

    Returns:
        The client state, as DeepSpeed's load returns it.

    Raises:
        UcpError: the same on every rank. The engine is as it was, or marked (``apart.BROKEN``) and the message says so.
    """
    with_states = arguments.with_states and has_masters(target, comm)
    with report.phase("plan"), pause_collection():
        work = _prepare(index, target, comm, config, arguments, with_states=with_states)
        job, window = work.job, config.window_mb << 20
        # A fresh engine's values are of no use to anybody, and memory costs more time than a second pass does.
        apart = engine.global_steps > 0 and set_apart(job.buffers, window, comm)
        plan = negotiate(job.wants, job.sinks, index, comm, window)
    report.state_bytes = sum(index.atoms[key].nbytes for key in work.touched)
    saved = _read_saved(index, comm, config, arguments)
    extra = saved.pop(EXTRA_STATES, {})
    with comm.together():
        modules = _match_extra_states(engine, extra, arguments)
    reader = CollectiveReader(index, job.sinks, job.blanks, plan, comm, config)
    with report.phase("read"):
        first = reader.read_fresh()
    report.count(first)
    with report.phase("verify"):
        report.bytes_read += _verify(index, reader, work, comm)
    with guard_engine(engine):
        with report.phase("finish"), comm.together():  # others' code, which may fail: before the buffers change
            if not arguments.load_module_only:
                restore_helpers(engine, saved, with_scheduler=arguments.load_lr_scheduler_states)
            for key, module in modules.items():
                module.set_extra_state(extra[key])
        if arguments.custom_load_fn is not None:
            with report.phase("custom"):
                run_custom_load(arguments.custom_load_fn, index, target, comm, config, masters_follow=not work.touched)
        with report.phase("fill"):
            again: list[Checked] = [] if apart else reader.fill_live()
            job.commit()
        with report.phase("copies"):
            if work.touched:
                target.refresh_copies()
        with report.phase("finish"), comm.together():
            if with_states:
                _attach(index, target, job, work.match)
            _finish(engine, index, saved, arguments, with_states=with_states)
    if config.verify == "crc":
        report.bytes_again = sum(check.nbytes for check in again)
    else:  # pass 1 has left these bytes alone
        report.count(again)
    return pick_client_state(
        saved,
        module_only=arguments.load_module_only,
        with_scheduler=arguments.load_lr_scheduler_states,
        with_optimizer=arguments.load_optimizer_states,
    )


def has_masters(target: Target, comm: Comm) -> bool:
    """Whether some rank's optimizer owns parameters (a pipeline stage may have none); collective."""
    return any(comm.gather(bool(target.flats)))


@dataclass(slots=True)
class _Work:
    """What a load has to do.

    Attributes:
        job: this rank's.
        match: its names.
        touched: atoms that some rank needs, the same list on every rank.
        replicated: those of which the source holds replicas that have to be equal.
    """

    job: Job
    match: Match
    touched: list[AtomKey]
    replicated: list[AtomKey]


def _prepare(
    index: AtomicIndex,
    target: Target,
    comm: Comm,
    config: UniversalConfig,
    arguments: LoadArguments,
    *,
    with_states: bool,
) -> _Work:
    """Match, settle patterns and build this rank's job; collective."""
    custom = arguments.custom_load_fn is not None
    extras: list[Extra] = []
    with comm.together():
        _refuse(index, target, custom=custom)
        extras = [] if custom else target.extras()
    if custom and not with_states:
        return _Work(Job(), Match(), [], [])  # the weights are the user's business then
    census = take_census(target, extras, comm)
    job, match, layouts = Job(), Match(), {}
    with comm.together():
        rules = read_rules(config.patterns)
        live = census.live(find_renamed(index, census, rules, tell=comm.rank == 0), with_extras=not custom)
        match = match_parameters(index, live, strict=arguments.load_module_strict or custom, with_states=with_states)
        check_alike(census, target, extras)
        if with_states:
            match_groups(index, target.group_members(), match)
        layouts = settle_layouts(index, census, match, rules, tell=comm.rank == 0)
        job = make_job(index, target, match, extras, layouts, with_states=with_states)
    touched = sorted(set().union(*comm.gather(_report_touched(target, job))))
    replicated = [key for key in touched if _is_replicated(layouts, index, key)]
    grown = comm.gather(job.grown)
    with comm.together():
        if comm.rank == 0:  # every rank would read the same elements
            _tell(match, index.dropped, grown)
            check_instances(index, census.everyone, touched)
    return _Work(job, match, touched, replicated)


def _refuse(index: AtomicIndex, target: Target, *, custom: bool) -> None:
    if index.unreadable:
        listed = [f"{name}: {fault}" for name, fault in sorted(index.unreadable.items())]
        raise UnsupportedError(
            f"{index.state_file}: {shorten(listed)}. What is only not contiguous can be resumed in the topology that "
            "saved it, and saved again with contiguous tensors; the rest is not in the checkpoint."
        )
    parallel = max(index.topology.tp, index.topology.pp, target.place.tp, target.place.pp) > 1
    if custom and parallel:
        raise UnsupportedError(
            "custom_load_fn is given the whole module; with tensor or pipeline parallelism no rank has it. Load "
            "without custom_load_fn, or in the topology that saved the checkpoint."
        )


def _report_touched(target: Target, job: Job) -> list[AtomKey]:
    """Data-parallel ranks need parts of the same atoms, so one of them tells."""
    return list(job.touched) if target.place.dp_rank == 0 else []


def _is_replicated(layouts: Layouts, index: AtomicIndex, key: AtomKey) -> bool:
    found = layouts.get(key.name)
    return found is not None and found[0].replicated and not found[0].mean and len(index.atoms[key].shards) > 1


def _tell(match: Match, dropped: str, grown: list[dict[str, tuple[int, int]]]) -> None:
    if match.kept:
        logger.warning("%s: %s keep the values that the new model has", dropped, shorten(match.kept, 40))
    if match.skipped:
        logger.warning("load_module_strict=False, passing over: %s", "; ".join(match.skipped))
    for name, (old, new) in sorted({item for each in grown for item in each.items()}):
        logger.info(
            "%s: vocabulary padded to %d rows, saved with %d; the %d new ones are zero", name, new, old, new - old
        )


def _match_extra_states(engine: Any, saved: dict[str, Any], arguments: LoadArguments) -> dict[str, torch.nn.Module]:
    """Modules whose extra state is restored, by key.

    Raises:
        MismatchError: one side has extra states that the other lacks.
    """
    if arguments.custom_load_fn is not None:
        return {}
    live = find_extra_states(engine.module)
    plain = {strip_compiled(key): key for key in saved}
    if arguments.load_module_strict and set(plain) != set(live):
        raise MismatchError(
            f"The model and the checkpoint differ: extra states {sorted(plain)} saved, {sorted(live)} in the "
            "model. load_module_strict=False passes missing and extra ones over."
        )
    return {plain[key]: live[key] for key in live if key in plain}


def _read_saved(index: AtomicIndex, comm: Comm, config: UniversalConfig, arguments: LoadArguments) -> dict[str, Any]:
    """Everything of the state file but the model's tensors, checked; collective.

    Raises:
        CheckpointError: it is damaged, or no save of an engine.
    """
    if config.verify == "crc":
        checks = Checks()
        checks.touch(index.client_records if comm.rank == 0 else ())
        checks.verify(index, comm)
    saved = read_client_objects(index.state_file, comm, trust_pickle=config.trust_pickle)
    if "global_steps" not in saved and not arguments.load_module_only:  # the same on every rank
        raise CheckpointError(
            f"{index.state_file}: has no global_steps; it was not saved by engine.save_checkpoint. For its "
            "weights use load_module_only=True."
        )
    return saved


def _verify(index: AtomicIndex, reader: CollectiveReader, work: _Work, comm: Comm) -> int:
    """Hold what was read against what training wrote, and replicas against each other; collective.

    Returns:
        Bytes that this rank has read in addition for the records' checksums.

    Raises:
        CheckpointError: bytes are damaged, or of another run.
        MismatchError: replicas differ.
    """
    nbytes = reader.checks.verify(index, comm, threads=reader.threads) if reader.checksum else 0
    check_replicas([index.atoms[key] for key in work.replicated], index, comm)
    if reader.checksum:
        check_samples(index, [index.atoms[key] for key in work.touched], comm)
    return nbytes


def _attach(index: AtomicIndex, target: Target, job: Job, match: Match) -> None:
    """Hand states, scalars and hyper-parameters to the optimizer."""
    optimizer = target.optimizer
    for states in job.states:
        entry = {**states.scalars, **states.tensors}
        live = optimizer.state.get(states.flat.holder)
        if not entry:
            if states.lazy:
                optimizer.state.pop(states.flat.holder, None)
        elif live is None:
            optimizer.state[states.flat.holder] = entry
        else:
            live.clear()
            live.update(entry)
    for flat in target.flats:
        if flat.group in match.groups:
            group = optimizer.param_groups[target.param_group(flat)]
            restore_hyper(group, index.groups[match.groups[flat.group]].hyper)
    target.relink()


def _finish(
    engine: Any, index: AtomicIndex, saved: dict[str, Any], arguments: LoadArguments, *, with_states: bool
) -> None:
    engine.loaded_checkpoint_dp_world_size = saved.get("dp_world_size")
    if arguments.load_module_only:
        return
    if with_states:
        restore_scaler(engine.optimizer, index.scaler)
        restore_clip(engine.optimizer, index.clip_grad)
    if index.topology.elastic and with_states and arguments.load_lr_scheduler_states:
        restore_rates(engine)
    restore_counters(engine, saved)
