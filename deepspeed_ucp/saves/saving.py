"""Saves into memory, by all ranks together: DeepSpeed's own save into another folder."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..comm import Comm, connect
from ..config import SaveOptions, UniversalConfig
from ..engine_state import find_state
from ..errors import ConfigError, StorageError
from ..io.memory import identify_host
from ..io.paths import is_below, is_url
from ..writer import is_decoupled
from .frozen import FrozenBase, choose_base
from .memory import count_free, find_root, list_jobs, name_job
from .neighbours import find_neighbours
from .saver import ADVICE, SPARE, Saver, list_first
from .states import count_saved
from .writer import list_late, list_refused

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
    frozen: bool = True,
) -> tuple[Any, bool]:
    """Save into memory, from where a process of its own writes to the places; collective.

    Args:
        write: DeepSpeed's own save, into a folder of tags, by which arguments.
        by_itself: no script has asked for it: it is not for ``save_dir``, and waits for nothing.
        frozen: it is to have frozen parameters.

    Returns:
        What that has returned, and whether it has gone into memory. Where there is no room, and with tags and
        writers that memory is not for, it has written to ``save_dir`` itself, with a warning: once what is pending
        has been written.

    Raises:
        StorageError: it cannot go into memory, and DeepSpeed cannot write to where it is to go, or has not been asked
            to; the same everywhere.
    """
    saver = _open_saver(engine, config)
    comm = connect(waits=False)  # training has brought all ranks here, as to DeepSpeed's own barriers
    saver.finish_copy()
    saver.mapped.tidy()
    saver.choose_copied(comm)
    saver.number, saver.failed = saver.number + 1, ""
    base = _choose_base(engine, saver, comm, wanted=frozen)
    if saver.needed is None or (base is not None and base.is_new):
        told = comm.each(lambda: (identify_host(), count_saved(engine)))
        saver.needed = int(SPARE * sum(count for host, count in told if host == identify_host()))

    def begin() -> str:
        saver.claim(save_dir, tag, engine.global_steps)
        return _find_obstacle(engine, saver, tag) or saver.begin(save_dir)

    if why := next(filter(None, comm.each(begin)), ""):
        _finish_others(engine, by_itself=by_itself)
        saver.mapped.tidy(everything=True)
        why = next(filter(None, comm.each(begin)), "")
    if not why:
        saved, why = _write_quickly(engine, saver, base, write, comm)
        if why:
            _finish_others(engine, by_itself=by_itself)
    if why:
        saver.number -= 1
        saved = _write_slowly(save_dir, why, write, comm, by_itself=by_itself)
        comm.run(lambda: saver.drop_dead(save_dir, by_itself=False) if saver.is_first and latest else None)
        return saved, False
    step = engine.global_steps

    def end() -> None:
        if saver.is_first:
            saver.job.drop_spare()
            saver.warn_late(step)
            saver.end(save_dir, tag, step, base, latest=latest, by_itself=by_itself)

    if saver.options.overlap:
        saver.end_behind(end, save_dir)
    else:
        comm.run(end)
        saver.map_behind()
    return saved, True


def _choose_base(engine: Any, saver: Saver, comm: Comm, *, wanted: bool) -> FrozenBase | None:
    """What has the frozen parameters of the save that is made; None where that has to have them; collective."""
    if not wanted or saver.options.frozen == "always":
        return None
    if _is_plain(engine.checkpoint_engine):
        base = choose_base(engine, saver.base, saver.job.folder, comm)
    else:
        base = f"a {type(engine.checkpoint_engine).__name__} writes its files"
    if isinstance(base, str):
        saver.tell_once(f'"frozen": "once": each save has all parameters, as {base}')
        return None
    return base


def _write_quickly(
    engine: Any, saver: Saver, base: FrozenBase | None, write: Callable[..., Any], comm: Comm
) -> tuple[Any, str]:
    """DeepSpeed's own save into memory, and why nothing has come of it, in words; collective."""
    saver.note_stable(engine)
    write_file = saver.write_file if base is None else partial(saver.write_split, base, engine)
    with _write_by(engine.checkpoint_engine, write_file), _copy_by(saver.copy):
        saved = write(saver.folder, **(base.arguments if base else {}))
    answers = comm.each(lambda: (saver.failed, base.files if base else {}))
    failed = next((failed for failed, _ in answers if failed), "")
    if failed:
        comm.run(saver.drop)
    if base is not None:
        saver.change_base(base, None if failed else [files for _, files in answers])
    return saved, f"memory is full by now: {failed}. {ADVICE}" if failed else ""


def _finish_others(engine: Any, *, by_itself: bool) -> None:
    """Before DeepSpeed's own save: `latest` would go back to what is written after it."""
    if not by_itself:
        finish_saves(engine)


def _write_slowly(save_dir: str, why: str, write: Callable[[str], Any], comm: Comm, *, by_itself: bool) -> Any:
    """DeepSpeed's own save, where it cannot go into memory; collective."""

    def check() -> None:
        if by_itself or is_url(save_dir):
            raise StorageError(f"cannot be saved to by way of memory: {why}", path=save_dir)

    comm.alike(check)
    if comm.rank == 0:
        logger.warning("%s: saved while training waits, as %s", save_dir, why)
    return write(save_dir)


def _is_plain(checkpoint_engine: Any) -> bool:
    """Whether DeepSpeed's files are what ``torch.save`` makes of them, and nothing else."""
    name = type(checkpoint_engine).__name__
    return name == "TorchCheckpointEngine" and bool(checkpoint_engine.zipfile_serialization)


@contextmanager
def _write_by(checkpoint_engine: Any, write: Callable[[Any, str], None]) -> Iterator[None]:
    """Have DeepSpeed's plain writer write in another way; what else it may be given writes in its own."""
    if not _is_plain(checkpoint_engine):
        yield
        return
    checkpoint_engine.save = write
    try:
        yield
    finally:
        del checkpoint_engine.save


@contextmanager
def _copy_by(copy: Callable[..., Any]) -> Iterator[None]:
    """Have DeepSpeed copy in another way what lies beside its own files: swap files on NVMe, scripts."""
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
    """Wait until all places have an engine's saves that are to have them, ``wait_s`` at most; collective.

    Args:
        required: what is not there by then is an error: a trainer removes older checkpoints next.

    Raises:
        StorageError: it is required, and is not there; the same on every rank.
    """
    saver = find_state(engine).saver

    def finish() -> None:
        saver.finish_copy()
        if saver.is_first and not saver.finish() and required:
            refused = list_refused(saver.job.list_saves())
            why = f"were not written within {saver.options.wait_s:.0f} s ({saver.job.folder}/log tells why)"
            if refused:
                why = f"cannot be written ({'; '.join(f'{tag}: {text}' for tag, text in refused.items())})"
            raise StorageError(
                f"its saves {why}. Older checkpoints, which would be removed now, stay; memory has the newest one.",
                path=", ".join(sorted(list_late(saver.job.list_saves()))),
            )

    if saver is not None:
        connect().run(finish)


def _find_obstacle(engine: Any, saver: Saver, tag: str) -> str:
    """Why a save cannot go by way of memory however much there is, in words; empty where it can."""
    if is_decoupled(engine):
        return 'its files come after it ("checkpoint": {"writer": {"decoupled": …}})'
    if not is_below(tag):
        return f"its tag {tag!r} is no path of a folder below that one"
    if saver.nodes > 1 and engine.use_node_local_storage():
        return "no node can tell when all have written to folders of their own (checkpoint.use_node_local_storage)"
    return ""


def _open_saver(engine: Any, config: UniversalConfig) -> Saver:
    """The engine's, made with its first save, and anew where somebody has removed what it had; collective."""
    state, comm = find_state(engine), connect()
    lost: Saver | None = state.saver
    if lost is not None and any(connect(waits=False).each(lost.is_lost)):  # as of the save
        if comm.rank == 0:
            logger.warning("%s: removed while the job lives, with all saves in it; new ones go on", lost.job.folder)
        lost.leave()
        state.saver = None
    if state.saver is None:
        name, first = comm.broadcast(name_job()), list_first(config, comm)
        saver = comm.run(partial(Saver, config, name, comm.rank, first))
        saver.made = lost.made if lost is not None else saver.made
        comm.run(lambda: saver.open() if saver.is_first else None)
        if saver.options.copies and not engine.use_node_local_storage():
            saver.neighbours = find_neighbours(saver.options, saver.job, list(dict.fromkeys(first)), comm)
        comm.run(lambda: saver.tell_writer() if saver.is_first else None)  # it starts while the first save is made
        state.saver = saver
    found: Saver = state.saver
    return found


def foresee_saves(engine: Any, config: UniversalConfig) -> None:
    """Say what saves of a new engine take of the nodes' memory, and what these have; collective.

    Raises:
        ConfigError: a node has no room for one; the same on every rank.
    """
    options, comm = config.save or SaveOptions(), connect()

    def look() -> tuple[str, int, int]:
        root = find_root(options.memory)
        left = sum(job.count_bytes() for job in list_jobs(root) if not job.is_owned())  # it goes where it is needed
        return identify_host(), count_saved(engine), count_free(root) + left

    nodes = dict[str, tuple[int, int]]()
    for host, needed, free in comm.each(look):
        known = nodes.get(host, (0, free))
        nodes[host] = known[0] + needed, min(known[1], free)
    needed, free = max(nodes.values(), key=lambda node: node[0] - node[1])
    needed = int(SPARE * needed)
    told = f"a save takes about {needed >> 20:,} MiB of {options.memory} on a node, where {free >> 20:,} MiB are free"
    if needed > free:
        raise ConfigError(f'{told}. {ADVICE}, or leave out "save".')
    if comm.rank == 0:
        wanted = (options.keep + 1) * needed * (1 + min(options.copies, len(nodes) - 1))
        few = "" if free >= wanted else "; older ones go before the next one is made"
        logger.info("%s%s", told, few)
