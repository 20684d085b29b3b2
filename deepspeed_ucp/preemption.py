"""A job that is told to go saves first: at the end of the step, once, all ranks together.

Schedulers send a signal some time before they take the machines (Slurm: ``--signal``, Kubernetes: SIGTERM), to one
process or to all. The ranks tell each other at every step whether one of them has been told. How they end is what the
platform takes for a job that is to go on (:mod:`deepspeed_ucp.platforms`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from .comm import Comm, connect
from .engine_state import Preemption, find_state
from .heartbeat import find_rank, has_passed_on, is_watched
from .platforms import ALONE, REQUEUED, RESTARTED, SLURM_JOB, Platform, find_platform
from .saves.saver import keep_memory
from .saves.saving import finish_saves
from .writer import end_writer, finish_save

logger = logging.getLogger("deepspeed_ucp")

_JIT = "transformers.trainer_jit_checkpoint"
"""Module of the Trainer's own save on SIGTERM (``enable_jit_checkpoint``)."""

_arrived: dict[int, bool] = {}
"""By signal that is waited for, whether it has come. A forked process waits for none."""

_handlers: dict[int, Any] = {}
"""What was set for each; somebody may have set another since."""

os.register_at_fork(after_in_child=_arrived.clear)


class Preempted(RuntimeError):
    """The job has saved because it was told to go: where an error has it started again, as with Ray."""


def follow(
    engine: Any,
    save_dir: str | os.PathLike[str],
    *,
    actions: Mapping[int, int | None] | None = None,
    requeue: bool = False,
    client_state: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Save at the end of the step in which any rank gets a signal; to be called in the main thread of every rank.

    A signal that comes again before that is the same one: launchers pass on what their ranks have been sent as well.
    In a process that this one forks it has its former effect. Of several engines one is to be followed, and
    ``client_state`` may save the others: with the first save the ranks end.

    Args:
        engine: whose steps end with a look at all ranks' signals (one reduction of some bytes).
        save_dir: as of ``engine.save_checkpoint``.
        actions: by signal the exit code with which every rank ends after the save, None to go on. By default SIGUSR1
            goes on, and SIGTERM ends with what the innermost platform takes for a job that is to go on; one log line
            tells which, and docs/guide.md all.
        requeue: in a Slurm job, SIGUSR1 ends too, and rank 0 has Slurm start the job again after the save (``scontrol
            requeue``), unless it is being cancelled.
        client_state: makes the client state of the save.

    Raises:
        ValueError: outside of the main thread; under Ray, whose Train library calls its function in another one, that
            is a warning, and no signal is heard.
    """
    platform, job = find_platform(os.environ), os.environ.get(SLURM_JOB) if requeue else None
    speaks = find_rank() <= 0
    if requeue and not job and speaks:
        logger.warning("requeue: this is no Slurm job, nothing is requeued")
    if platform.raises and threading.current_thread() is not threading.main_thread():
        if speaks:
            logger.warning("%s runs this in a thread that hears no signals: none is followed here", platform.name)
        return
    chosen, alone, why = _choose(platform, actions, job)
    for number in chosen:
        _wait_for(number, speaks=speaks)
    if speaks:
        logger.info("%s (%s)", "; ".join(_describe(number, alone[number]) for number in alone), why)
    raises = platform.raises and actions is None
    preemption = Preemption(os.fspath(save_dir), chosen, alone, client_state, requeue=job, raises=raises)
    find_state(engine).preemption = preemption


def _choose(
    platform: Platform, actions: Mapping[int, int | None] | None, job: str | None
) -> tuple[Mapping[int, int | None], Mapping[int, int | None], str]:
    """What each signal does: if a watcher has passed it on, and if not; and why, in words."""
    if actions is not None:
        return actions, actions, "as the script says"
    if job:
        return REQUEUED, REQUEUED, f"Slurm, which is to requeue job {job}"
    if is_watched():  # it would take 0 for the end of the run, and answers for it to what is around it
        return ALONE.ends, RESTARTED, "ds_ucp restarts the run; with 0 where the signal went to ds_ucp supervise"
    return platform.ends, platform.ends, f"{platform.name}{', as an error' if platform.raises else ''}"


def _describe(number: int, code: int | None) -> str:
    end = "goes on" if code is None else f"ends with {code}"
    return f"{signal.Signals(number).name}: saves and {end}"


def _wait_for(number: int, *, speaks: bool) -> None:
    former = signal.getsignal(number)
    if former is _handlers.get(number) and number in _arrived:
        return
    if getattr(type(getattr(former, "__self__", None)), "__module__", None) == _JIT and speaks:
        logger.warning("SIGTERM: this save takes the place of the Trainer's own (enable_jit_checkpoint)")

    def note(arrived: int, frame: FrameType | None) -> None:
        if arrived in _arrived:
            _arrived[arrived] = True
        elif callable(former):
            former(arrived, frame)
        else:
            signal.signal(arrived, former if former is not None else signal.SIG_DFL)
            signal.raise_signal(arrived)

    signal.signal(number, note)
    _handlers[number], _arrived[number] = note, False


def end_step(engine: Any) -> None:
    """At the end of a step: save where a rank has been told to go; collective.

    Raises:
        SystemExit: after the save, with the signal's exit code.
        Preempted: after it, where an error has the job started again.
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
        keep_memory()
        end_writer(engine)
        with contextlib.suppress(Exception):  # one that is gone is nobody to wait for
            comm.gather(None)  # else those that are done early close connections that others still use, which abort
        _end(asked, max(codes), comm, engine.global_steps)


def _end(asked: Preemption, code: int, comm: Comm, step: int) -> NoReturn:
    """End this rank when the job has been requeued, which ends those of all that have not."""
    if asked.requeue is not None:
        fault = comm.gather(_requeue(asked.requeue) if comm.rank == 0 else None)[0]
        if fault and comm.rank == 0:
            logger.error("job %s is not requeued: %s", asked.requeue, fault)
        code = code or int(fault is not None)
    if asked.raises:
        raise Preempted(f"told to go, and saved to {asked.save_dir} at step {step}")
    raise SystemExit(code)


def _requeue(job: str) -> str | None:
    """Have Slurm start a job again, which ends its steps at once; what was wrong, in words."""
    try:
        # An empty or relative entry of PATH would take a file of that name in the working directory.
        searched = os.pathsep.join(filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep)))
        program = shutil.which("scontrol", path=searched)
        if program is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "scontrol")
        for words in (["show", "job", "-o", job], ["requeue", job]):
            done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60, check=False)
            if done.returncode:
                return done.stderr.strip() or f"scontrol ended with {done.returncode}"
            state = re.search(r"\bJobState=(\w+)", done.stdout)
            if state and state[1] != "RUNNING":  # of scancel the ranks hear by SIGTERM too
                return f"it is {state[1]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None
