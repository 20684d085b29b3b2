"""The direct load: checkpoint bytes into live buffers, in two passes.

Pass 1 reads every byte that is needed once, with its checksum. What goes to memory that is not part of the engine yet
(optimizer states of a fresh engine: two thirds of Adam's bytes) is put there; the rest is only checked. When all ranks
have agreed that every record is what training wrote, pass 2 fills the live buffers, from the page cache that pass 1
has warmed. So a damaged file leaves the engine as it was, without a second copy of anything in memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..atoms import AtomicIndex, strip_compiled
from ..comm import Comm
from ..config import UniversalConfig
from ..errors import CheckpointError, MismatchError, UnsupportedError, shorten
from ..io import ReadStats, read_requests
from ..io.checksum import join_checks, verify_records, verify_whole
from ..plan import LoadPlan, Request, plan_load
from ..plan.match import Match, match_groups, match_parameters
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
from .client import EXTRA_STATES, read_client_objects
from .custom import run_custom_load
from .exchange import exchange
from .job import Job, make_job
from .report import LoadReport
from .samples import check_samples

logger = logging.getLogger("deepspeed_ucp")

_CHUNK = 4 << 20


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
        UcpError: the same on every rank; nothing of the engine has changed then.
    """
    with_states = arguments.with_states and bool(target.flats)
    with report.phase("plan"), comm.together():
        job, match = _prepare(index, target, comm, arguments, with_states=with_states)
        plan = _plan(index, job, comm)
    report.state_bytes = job.state_bytes
    saved = _read_saved(index, comm, config, arguments)
    extra = saved.pop(EXTRA_STATES, {})
    with comm.together():
        modules = _match_extra_states(engine, extra, arguments)
    reader = _Reader(index, job, config)
    with report.phase("read"):
        first = _read_fresh(reader, plan, comm, config.verify == "crc")
    report.bytes_read, report.requests = first.nbytes, first.requests
    with report.phase("verify"):
        _verify(index, plan, first, comm)
        if config.verify == "crc":
            check_samples(index, job.touched.values(), comm)
    with report.phase("finish"), comm.together():  # others' code, which may fail: before the buffers change
        if not arguments.load_module_only:
            restore_helpers(engine, saved, with_scheduler=arguments.load_lr_scheduler_states)
        for key, module in modules.items():
            module.set_extra_state(extra[key])
    if arguments.custom_load_fn is not None:
        with report.phase("custom"):
            follow = not job.touched
            run_custom_load(
                arguments.custom_load_fn,
                index,
                target,
                comm,
                reader.threads,
                verify=config.verify == "crc",
                masters_follow=follow,
            )
    with report.phase("fill"):
        again = _fill_live(reader, plan, first, comm)
    if config.verify == "crc":
        report.bytes_again = again.nbytes
    else:  # pass 1 has left these bytes alone
        report.bytes_read, report.requests = report.bytes_read + again.nbytes, report.requests + again.requests
    with report.phase("exchange"):
        exchange(job.segments, job.sinks, comm, config.window_mb << 20)
        for sink in job.sinks:
            sink.settle()
    with report.phase("copies"):
        if job.touched:
            target.refresh_copies()
    with report.phase("finish"), comm.together():
        if with_states:
            _attach(index, target, job, match)
        _finish(engine, index, saved, arguments, with_states=with_states)
    return pick_client_state(
        saved,
        module_only=arguments.load_module_only,
        with_scheduler=arguments.load_lr_scheduler_states,
        with_optimizer=arguments.load_optimizer_states,
    )


def _prepare(
    index: AtomicIndex, target: Target, comm: Comm, arguments: LoadArguments, *, with_states: bool
) -> tuple[Job, Match]:
    if index.unreadable:
        listed = [f"{name}: {fault}" for name, fault in sorted(index.unreadable.items())]
        raise UnsupportedError(
            f"{index.state_file}: {shorten(listed)}. Resume in the topology that saved it and save again with "
            "contiguous tensors."
        )
    custom = arguments.custom_load_fn is not None
    if custom and not with_states:
        return Job(), Match()  # the weights are the user's business then
    extras: list[Extra] = [] if custom else target.extras()
    match = match_parameters(
        index,
        target.owned_shapes(),
        None if custom else {extra.name: extra.shape for extra in extras},
        target.aliases,
        strict=arguments.load_module_strict or custom,
        with_states=with_states,
    )
    if with_states:
        match_groups(index, target.group_members(), match)
    if match.skipped and comm.rank == 0:
        logger.warning("load_module_strict=False, passing over: %s", "; ".join(match.skipped))
    job = make_job(index, target, match, extras, with_states=with_states)
    job.take_share(comm.rank, comm.size)
    return job, match


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
    with comm.together():
        if config.verify == "crc" and comm.rank == 0:
            verify_whole(index.client_records, index.records, index.files)
    saved = read_client_objects(index.state_file, comm, trust_pickle=config.trust_pickle)
    if "global_steps" not in saved and not arguments.load_module_only:  # the same on every rank
        raise CheckpointError(
            f"{index.state_file}: has no global_steps; it was not saved by engine.save_checkpoint. For its "
            "weights use load_module_only=True."
        )
    return saved


def _plan(index: AtomicIndex, job: Job, comm: Comm) -> LoadPlan:
    return plan_load(job.own, job.touched.values(), index.records, comm.rank, comm.size, _CHUNK)


class _Reader:
    """Runs requests of one job with its threads and scratch memory."""

    def __init__(self, index: AtomicIndex, job: Job, config: UniversalConfig) -> None:
        self.index, self.job = index, job
        window = config.window_mb << 20
        self.threads = min(config.threads or default_threads(), max(window // (2 * _CHUNK), 1))
        self.pinned = any(sink.tensor.device.type == "cuda" for sink in job.sinks)

    def make_scratch(self, nbytes: int) -> memoryview:
        """Scratch memory of one thread; page-locked where it is copied to a GPU."""
        return memoryview(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pinned).numpy())

    def run(self, requests: Sequence[Request], *, fresh_only: bool, checksum: bool) -> ReadStats:
        """Read; with ``fresh_only`` the live buffers' bytes are checked and discarded."""
        if self.pinned:  # the threads copy on the default stream
            torch.cuda.synchronize()
        sinks = [None if fresh_only and not sink.fresh else sink for sink in self.job.sinks]
        return read_requests(
            requests,
            self.index.records,
            self.index.files,
            sinks,
            threads=self.threads,
            make_scratch=self.make_scratch,
            checksum=checksum,
        )

    def is_live(self, request: Request) -> bool:
        """Whether some of the request's bytes go to a live buffer."""
        return any(part.buffer >= 0 and not self.job.sinks[part.buffer].fresh for part in request.parts)

    def is_fresh(self, request: Request) -> bool:
        """Whether some of the request's bytes go to fresh memory."""
        return any(part.buffer >= 0 and self.job.sinks[part.buffer].fresh for part in request.parts)


def default_threads() -> int:
    """Reading threads per rank: four times its share of the cores, 8 to 32; most of their time is waiting."""
    cores = len(os.sched_getaffinity(0))
    told = [os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")]
    ranks = max(int(next((value for value in told if value), "1")), 1)
    return min(max(4 * cores // ranks, 8), 32)


def _read_fresh(reader: _Reader, plan: LoadPlan, comm: Comm, checksum: bool) -> ReadStats:
    """Pass 1: fresh memory filled, everything checked. Without checks only what fresh memory needs is read."""
    stats = ReadStats(0, 0, [])
    with comm.together():
        requests = plan.requests if checksum else [r for r in plan.requests if reader.is_fresh(r)]
        stats = reader.run(requests, fresh_only=True, checksum=checksum)
        for blank in reader.job.blanks:
            if blank.fresh:
                blank.tensor[blank.low : blank.high].zero_()
    return stats


def _verify(index: AtomicIndex, plan: LoadPlan, stats: ReadStats, comm: Comm) -> None:
    checks = join_checks(plan.requests, stats.crcs) if stats.crcs else []
    gathered = [check for part in comm.gather(checks) for check in part]
    with comm.together():
        verify_records(gathered, index.records, index.files, comm.rank, comm.size)


def _fill_live(reader: _Reader, plan: LoadPlan, first: ReadStats, comm: Comm) -> ReadStats:
    """Pass 2: the live buffers. Their bytes have to be the ones that were verified.

    Raises:
        CheckpointError: a file changed in between.
    """
    again = [(i, request) for i, request in enumerate(plan.requests) if reader.is_live(request)]
    stats = ReadStats(0, 0, [])
    with comm.together():
        stats = reader.run([request for _, request in again], fresh_only=False, checksum=bool(first.crcs))
        for blank in reader.job.blanks:
            if not blank.fresh:
                blank.tensor[blank.low : blank.high].zero_()
        if first.crcs and stats.crcs != [first.crcs[i] for i, _ in again]:
            raise CheckpointError("The checkpoint was written to while it was being loaded; the engine is half loaded.")
    return stats


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
