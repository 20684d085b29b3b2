"""Saves into memory (collective): DeepSpeed's own save, directed to another folder."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import is_tensor
from torch.optim import Optimizer

from ..comm import Comm, connect
from ..config import SaveOptions, UniversalConfig
from ..engine_state import find_state
from ..errors import ConfigError, StorageError
from ..io.deletion import delete_own
from ..io.memory import identify_host
from ..io.paths import is_below, is_url
from ..model.wrappers import find_live
from ..writer import is_decoupled
from .memory import count_free, find_root, list_jobs, name_job
from .neighbours import find_neighbours
from .saver import ADVICE, SPARE, Saver, list_owners

logger = logging.getLogger("deepspeed_ucp")


def save_into_memory(
    engine: Any,
    config: UniversalConfig,
    save_dir: str,
    tag: str,
    write: Callable[..., Any],
    *,
    latest: bool,
    by_itself: bool = False,
) -> tuple[Any, bool]:
    """Save into memory; the writer process writes to the destinations (collective).

    If there is no room, or the tag or the engine's writer is not supported, pending saves are written first and then
    DeepSpeed saves to ``save_dir`` itself, with a warning.

    Args:
        write: DeepSpeed's save; takes the folder of tags.
        by_itself: it is a snapshot: it is not written to ``save_dir``, and waits for no pending save.

    Returns:
        The result of ``write``, and True if the save is in memory.

    Raises:
        StorageError: it cannot be saved into memory, and it is a snapshot or ``save_dir`` is a URL; on all ranks.
    """
    saver = _open_saver(engine, config)
    comm = connect(waits=False)  # all ranks get here together, as to DeepSpeed's barriers
    saver.mapped.tidy()
    saver.choose_copied(comm)
    saver.number, saver.failed = saver.number + 1, ""
    saver.lost.pop(tag, None)  # it is saved again
    if saver.needed is None:
        counts = comm.each(lambda: (identify_host(), _count_saved(engine)))
        saver.needed = int(SPARE * sum(count for host, count in counts if host == identify_host()))

    def begin(*, waits: bool = False) -> str:
        saver.claim(save_dir, tag, engine.global_steps)
        return _find_obstacle(engine, saver, tag) or saver.begin(waits=waits)

    if why := next(filter(None, comm.each(begin)), ""):
        saver.mapped.tidy(everything=True)  # mapped memory is not free
        why = next(filter(None, connect().each(partial(begin, waits=not by_itself))), "")
    if not why:
        saved, why = _write_quickly(engine, saver, write, comm)
    if why:
        saver.number -= 1
        saved = _write_slowly(saver, save_dir, tag, why, write, comm, by_itself=by_itself)
        comm.run(lambda: saver.drop_dead(save_dir, tag, by_itself=False) if saver.is_owner and latest else None)
        return saved, False
    step = engine.global_steps

    def end() -> None:
        if saver.is_owner:
            saver.job.drop_spare()
            saver.warn_late(step)
            saver.end(save_dir, tag, step, latest=latest, by_itself=by_itself)

    comm.run(end)
    saver.mapped.settle()
    return saved, True


def _write_quickly(engine: Any, saver: Saver, write: Callable[..., Any], comm: Comm) -> tuple[Any, str]:
    """Let DeepSpeed save into memory; return its result, and an error message or an empty string (collective)."""
    with _write_by(engine.checkpoint_engine, saver.write_file), _copy_by(saver.copy):
        saved = write(saver.folder)
    failed = next(filter(None, comm.each(lambda: saver.failed)), "")
    if failed:
        comm.run(lambda: delete_own(saver.folder) if saver.is_owner else None)
    return saved, f"memory is full by now: {failed}. {ADVICE}" if failed else ""


def _write_slowly(
    saver: Saver, save_dir: str, tag: str, why: str, write: Callable[[str], Any], comm: Comm, *, by_itself: bool
) -> Any:
    """Save without memory, while training waits (collective).

    Raises:
        StorageError: it is a snapshot, or DeepSpeed cannot write to the folder; the same on all ranks.
    """

    def check() -> None:
        if by_itself or is_url(save_dir):
            raise StorageError(f"{tag} cannot be saved through memory: {why}", path=save_dir)

    comm.alike(check)
    connect().run(lambda: saver.overtake(save_dir, tag))
    if comm.rank == 0:
        others = ", ".join(tier.place for tier in saver.options.to)
        only = f" (not to {others})" if others else ""
        logger.warning("%s: %s is saved there%s while training waits, as %s", save_dir, tag, only, why)
    return write(save_dir)


@contextmanager
def _write_by(checkpoint_engine: Any, write: Callable[[Any, str], None]) -> Iterator[None]:
    """Replace the ``save`` of a checkpoint engine that only calls ``torch.save``; other engines keep theirs."""
    is_plain = type(checkpoint_engine).__name__ == "TorchCheckpointEngine"
    if not (is_plain and checkpoint_engine.zipfile_serialization):
        yield
        return
    checkpoint_engine.save = write
    try:
        yield
    finally:
        del checkpoint_engine.save


@contextmanager
def _copy_by(copy: Callable[..., Any]) -> Iterator[None]:
    """Replace the functions that copy DeepSpeed's swap files and scripts."""
    copying = (shutil, "copytree"), (sys.modules.get("deepspeed.runtime.engine"), "copyfile")
    before = [(module, name, getattr(module, name)) for module, name in copying if hasattr(module, name)]
    for module, name, work in before:
        setattr(module, name, partial(copy, work))
    try:
        yield
    finally:
        for each in before:
            setattr(*each)


def finish_saves(engine: Any, *, required: bool = False) -> None:
    """Wait until every destination has an engine's saves, ``wait_s`` at most (collective).

    Args:
        required: raise an error if a destination lacks a save of the script; a trainer removes older ones next.

    Raises:
        StorageError: a required save is missing; the same on every rank.
    """
    saver = find_state(engine).saver

    def finish() -> None:
        if saver.is_owner:
            saver.finish()
        if required and (missing := saver.list_missing()):
            named = "; ".join(f"{tag}: {why}" for tag, why in missing.items())
            raise StorageError(
                f"not all saves are written after {saver.options.wait_s:.0f} s: {named}. Older checkpoints are not "
                "removed. Unwritten saves stay in memory: repair the destination, or save again.",
                path=", ".join(missing),
            )

    if saver is not None:
        connect().run(finish)


def _find_obstacle(engine: Any, saver: Saver, tag: str) -> str:
    """Return why a save cannot go through memory for a reason other than room, or an empty string."""
    if is_decoupled(engine):
        return 'another process writes its files later ("checkpoint": {"writer": {"decoupled": …}})'
    if not is_below(tag):
        return f"its tag {tag!r} is not a path below the folder"
    if saver.nodes > 1 and engine.use_node_local_storage():
        return "no node sees when the others have written (checkpoint.use_node_local_storage)"
    return ""


def _open_saver(engine: Any, config: UniversalConfig) -> Saver:
    """Return the engine's saver; create it for the first save and after its folder was deleted (collective)."""
    state, comm = find_state(engine), connect()
    lost: Saver | None = state.saver
    if lost is not None and any(connect(waits=False).each(lost.is_lost)):  # as in a save
        if comm.rank == 0:
            logger.warning(
                "%s: was deleted with all saves in it while the job runs; new saves continue", lost.job.folder
            )
        lost.release()
        state.saver = None
    if state.saver is None:
        name, owners = comm.broadcast(name_job()), list_owners(config, comm)
        saver = comm.run(partial(Saver, config, name, comm.rank, owners))
        if lost is not None:
            saver.made = lost.made
            saver.lost |= lost.list_missing()
        comm.run(lambda: saver.open() if saver.is_owner else None)
        if saver.options.copies and not engine.use_node_local_storage():
            saver.neighbours = find_neighbours(saver.options, saver.job, list(dict.fromkeys(owners)), comm)
        comm.run(lambda: saver.notify_writer() if saver.is_owner else None)  # it starts while the first save is made
        state.saver = saver
    found: Saver = state.saver
    return found


def foresee_saves(engine: Any, config: UniversalConfig) -> None:
    """Log the memory that a save of a new engine takes and the memory that is free (collective).

    Raises:
        ConfigError: a node has no room for a save; the same on all ranks.
    """
    options, comm = config.save or SaveOptions(), connect()

    def look() -> tuple[str, int, int]:
        root = find_root(options.memory)
        removable = sum(job.count_bytes() for job in list_jobs(root) if not job.is_owned())  # of dead jobs
        return identify_host(), _count_saved(engine), count_free(root) + removable

    nodes = dict[str, tuple[int, int]]()
    for host, needed, free in comm.each(look):
        known = nodes.get(host, (0, free))
        nodes[host] = known[0] + needed, min(known[1], free)
    needed, free = max(nodes.values(), key=lambda node: node[0] - node[1])
    needed = int(SPARE * needed)
    text = f"a save takes about {needed >> 20:,} MiB of {options.memory} on a node, where {free >> 20:,} MiB are free"
    if needed > free:
        raise ConfigError(f'{text}. {ADVICE}, or leave out "save".')
    if comm.rank == 0:
        wanted = (options.keep + 1) * needed * (1 + min(options.copies, len(nodes) - 1))
        few = "" if free >= wanted else "; older ones go before the next one is made"
        logger.info("%s%s", text, few)


def _count_saved(engine: Any) -> int:
    """Estimate the bytes of the tensors that a rank saves, with states that the first step creates."""
    inner, masters, states = _list_states(engine)
    has_weights = engine.save_non_zero_checkpoint and not engine.zero_optimization_partition_weights()
    model = list(engine.module.parameters()) if has_weights else []  # ZeRO 3 saves masters only
    kept = [param for param in engine.module.parameters() if not param.requires_grad]
    model += [param.ds_tensor for param in kept if hasattr(param, "ds_tensor")]  # of ZeRO 3, by each rank
    groups = getattr(inner, "param_groups", ())
    later = max((len(group.get("betas", ())) or bool(group.get("momentum")) for group in groups), default=0)
    unmade = [each for each in masters if not inner.state.get(each)] * later
    return sum(int(each.numel() * each.element_size()) for each in [*masters, *states, *unmade, *model])


def _list_states(engine: Any) -> tuple[Any, list[Any], list[Any]]:
    """Return torch's optimizer, also from within a wrapper, the masters and the states; empty for unknown kinds."""
    optimizer, row = engine.optimizer, find_live(engine.optimizer)
    inner = getattr(optimizer, "optimizer", optimizer)
    if row is not None and row.masters:
        groups = [each if isinstance(each, list) else [each] for each in getattr(optimizer, row.masters)]
        masters = [each for group in groups for each in group]
    elif isinstance(optimizer, Optimizer):
        masters = [each for group in optimizer.param_groups for each in group["params"]]
    else:
        return inner, [], []
    states = [each for state in inner.state.values() for each in dict(state).values()]
    return inner, [*filter(is_tensor, masters)], [*filter(is_tensor, states)]
