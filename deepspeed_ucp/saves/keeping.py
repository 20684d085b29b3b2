"""Postpones trainers' removals of checkpoints until a newer save is written.

A trainer removes folders on rank 0. A postponed removal is done by a later call, or at exit.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ..comm import Comm
from ..config import UniversalConfig
from ..errors import UcpError
from ..formats.latest import LATEST, find_age, read_tag
from ..io.paths import is_url
from ..io.store import exists
from .launch import finish_dead_jobs, wait_until_written
from .memory import find_root, list_dead, locate, owns_memory
from .saver import list_savers

logger = logging.getLogger("deepspeed_ucp")


_postponed, _times = dict[str, tuple[Callable[[], object], str]](), dict[str, float]()
"""Folder → function that removes it, and a trainer's file that every complete folder has; folder → time of its save."""


def begin_save(folder: str | os.PathLike[str], config: UniversalConfig, comm: Comm) -> bool:
    """Record a trainer's save to a folder; cancel its postponed removal (collective).

    Returns:
        True if the save is written to this folder, and the folder holds no save yet.
    """
    destination = locate(os.fspath(folder))
    _postponed.pop(destination, None)
    _times[destination] = time.time()
    is_there = config.save is not None and not config.save.to
    return is_there and comm.once(lambda: not exists(os.path.join(destination, LATEST)))


def restore_times() -> None:
    """Set folders' mtimes to their saves' times, by which trainers order them."""
    for folder, at in _times.items():
        with suppress(OSError):
            os.utime(folder, (at, at))


@contextmanager
def postpone_removals(module: ModuleType, marker: str, *, coming: bool = False) -> Iterator[None]:
    """Context in which a module's ``shutil.rmtree`` calls :func:`remove_when_safe`."""

    def rmtree(path: Any, *args: Any, **more: Any) -> None:
        def remove() -> None:
            if os.path.lexists(path):  # an earlier removal may have removed it too
                shutil.rmtree(path, *args, **more)

        remove_when_safe(path, remove, marker, coming=coming)

    if (former := vars(module).get("shutil")) is None:
        yield
        return
    vars(module)["shutil"] = SimpleNamespace(**{**vars(former), "rmtree": rmtree})
    try:
        yield
    finally:
        vars(module)["shutil"] = former


def can_postpone(module: ModuleType) -> bool:
    """Return True if a module imports ``shutil``, as :func:`postpone_removals` needs."""
    return vars(module).get("shutil") is shutil


def remove_when_safe(
    folder: str | os.PathLike[str], remove: Callable[[], object], marker: str = "", *, coming: bool = False
) -> None:
    """Remove a trainer's folder now, or later if it is still needed.

    It is needed while it is being written, or is the newest complete one.

    Args:
        marker: a trainer's file that every complete folder has.
        coming: a newer save follows at once.
    """
    destination = locate(os.fspath(folder))
    _postponed.pop(destination, None)
    remove_postponed()
    if _is_needed(destination, marker, coming=coming):
        _postponed[destination] = remove, marker
    else:
        remove()


def remove_postponed() -> None:
    """Remove the postponed folders that are no longer needed."""
    for folder, (remove, marker) in list(_postponed.items()):
        if _is_needed(folder, marker):
            continue
        del _postponed[folder]
        try:
            remove()
        except OSError as error:
            logger.warning("%s: cannot be removed: %s", folder, error)


atexit.register(remove_postponed)  # before savers are: it runs when they have finished


def _is_needed(folder: str, marker: str, *, coming: bool = False) -> bool:
    written = {destination for saver in list_savers() for destination in saver.list_pending()}
    beside = os.path.dirname(folder)
    if folder in written:
        return True
    if not coming and beside not in map(os.path.dirname, written):
        return False
    if is_url(folder):
        return True
    step = _find_step(folder, marker)
    others = (os.path.join(beside, name) for name in os.listdir(beside))
    return step is not None and not any(
        (other_step := _find_step(other, marker)) is not None and other_step >= step
        for other in others
        if locate(other) != folder and other not in written
    )


def _find_step(folder: str, marker: str) -> int | None:
    """Return the step of the complete save in a folder, or None."""
    try:
        named = os.path.join(folder, read_tag(os.path.join(folder, LATEST)))
        is_there = os.path.isdir(named) and os.path.exists(os.path.join(folder, marker))
        return find_age([named]).step if is_there else None
    except (UcpError, OSError):
        return None


def finish_local_saves() -> None:
    """Wait at most ``wait_s`` for this rank's saves; then remove postponed folders."""
    _finish_savers()
    remove_postponed()


def _finish_savers() -> None:
    for saver in list_savers():
        if saver.list_pending():  # only on a node's first rank
            saver.finish()


def finish_folders(config: UniversalConfig, folder: str | os.PathLike[str], comm: Comm) -> None:
    """Wait until saves to a folder and its subfolders are written (collective).

    Dead jobs' saves count too. Waits at most ``wait_s``, and only while a writer is running.
    """
    options = config.save
    if options is None:
        return
    is_owner, above = owns_memory(options.memory, comm), locate(os.fspath(folder))

    def is_wanted(destination: str) -> bool:
        return above in (destination, os.path.dirname(destination))

    def finish() -> None:
        _finish_savers()
        if is_owner:
            root = find_root(options.memory)
            finish_dead_jobs(root, config)
            wait_until_written(lambda: list_dead(root), options.wait_s, is_wanted=is_wanted)

    comm.run(finish)
