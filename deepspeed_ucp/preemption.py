"""A job that is told to go saves first: at the end of the step, once, all ranks together.

Schedulers send a signal some time before they take the machines (Slurm: ``--signal``, Kubernetes: SIGTERM), to one
process or to all. The ranks tell each other at every step whether one of them has been told.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np

from .comm import connect
from .engine_state import Preemption, find_state
from .heartbeat import has_passed_on, is_watched
from .saves.saving import finish_saves
from .writer import end_writer, finish_save

logger = logging.getLogger("deepspeed_ucp")

_DEFAULT: Mapping[int, int | None] = {signal.SIGTERM: 0, signal.SIGUSR1: None}

_ALONE = {**_DEFAULT, signal.SIGTERM: 128 + signal.SIGTERM}
"""Where a watcher (:mod:`deepspeed_ucp.heartbeat`) has not been told itself: it would take 0 for the end of the run."""

_arrived: dict[int, bool] = {}
"""By signal that is waited for, whether it has come. A forked process waits for none."""

os.register_at_fork(after_in_child=_arrived.clear)


def follow(
    engine: Any,
    save_dir: str | os.PathLike[str],
    *,
    actions: Mapping[int, int | None] | None = None,
    client_state: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Save at the end of the step in which any rank gets a signal; to be called in the main thread of every rank.

    A signal that comes again before that is the same one: launchers pass on what their ranks have been sent as well.
    In a process that this one forks it has its former effect. Of several engines one is to be followed, and
    ``client_state`` may save the others: with the first save the ranks end.

    Args:
        engine: whose steps end with a look at all ranks' signals (one reduction of some bytes).
        save_dir: as of ``engine.save_checkpoint``.
        actions: by signal the exit code with which every rank ends after the save, None to go on; by default
            SIGUSR1 goes on and SIGTERM ends with 0, or with 143 under ``ds_ucp torchrun``, and under ``ds_ucp
            supervise`` where that has not been told itself: those that are left are then started again.
        client_state: makes the client state of the save.

    Raises:
        ValueError: outside of the main thread.
    """
    chosen = dict(_DEFAULT if actions is None else actions)
    alone = _ALONE if actions is None and is_watched() else chosen
    for number in chosen:
        _wait_for(number)
    find_state(engine).preemption = Preemption(os.fspath(save_dir), chosen, alone, client_state)


def _wait_for(number: int) -> None:
    if number in _arrived:
        return
    former = signal.getsignal(number)

    def note(arrived: int, frame: FrameType | None) -> None:
        if arrived in _arrived:
            _arrived[arrived] = True
        elif callable(former):
            former(arrived, frame)
        else:
            signal.signal(arrived, former if former is not None else signal.SIG_DFL)
            signal.raise_signal(arrived)

    signal.signal(number, note)
    _arrived[number] = False


def end_step(engine: Any) -> None:
    """At the end of a step: save where a rank has been told to go; collective.

    Raises:
        SystemExit: after the save, with the signal's exit code.
    """
    asked = find_state(engine).preemption
    if asked is None:
        return
    comm, numbers = connect(waits=False), sorted(asked.actions)
    told = comm.any_of(np.array([[_arrived[number], has_passed_on(number)] for number in numbers]))
    came = {number: for_all for number, (yes, for_all) in zip(numbers, told.tolist(), strict=True) if yes}
    if not came:
        return
    if comm.rank == 0:
        names = ", ".join(signal.Signals(number).name for number in came)
        logger.warning("%s: saving to %s at step %d", names, asked.save_dir, engine.global_steps)
    engine.save_checkpoint(asked.save_dir, client_state=dict(asked.client_state()) if asked.client_state else {})
    finish_save(engine)
    finish_saves(engine)
    for number in came:
        _arrived[number] = False
    ends = [(asked.actions if for_all else asked.alone)[number] for number, for_all in came.items()]
    if codes := [code for code in ends if code is not None]:
        end_writer(engine)
        raise SystemExit(max(codes))
