"""Save when a scheduler or launcher signals the job: at the end of a step, once, all ranks together.

Schedulers signal a job some time before they take the machines (Slurm: ``--signal``, Kubernetes: SIGTERM). The signal
goes to one process or to all. The ranks compare at the end of every step whether one of them has received a signal.
The exit code is one after which the platform restarts the job (:mod:`deepspeed_ucp.platforms`).

Between steps nothing is saved, although the signal handler could find out whether all ranks are outside a step:

* The script may be in the middle of anything, such as an evaluation with averaged weights in the place of the
  engine's own. A save there would be silently wrong.
* A rank may have started a collective that another rank, interrupted just before it, has not. The collectives of a save
  would then be matched with it.
* Random states and the place in the data have moved on since the last step.

So the handler only logs what will happen, and a script with long evaluations calls :func:`save_if_signaled` in them.
"""

from __future__ import annotations

import _thread
import atexit
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

from .children import list_unprotected, protect
from .comm import Comm, connect
from .engine_state import Preemption, find_state
from .platforms import REQUEUED, SLURM_JOB, Platform, find_platform, find_rank, is_first_of_node
from .saves.saver import keep_memory
from .saves.saving import finish_saves
from .writer import end_writer, finish_save

logger = logging.getLogger("deepspeed_ucp")

_JIT = "transformers.trainer_jit_checkpoint"
"""Module of the Trainer's own save on SIGTERM (``enable_jit_checkpoint``)."""

_arrived: dict[int, bool] = {}
"""By followed signal, whether it has been received. A forked process follows none."""

_handlers: dict[int, Any] = {}
"""Our handler for each followed signal; the script may have set another one since."""

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
    """Save at the end of the step in which any rank gets a signal. Call this in the main thread of every rank.

    A signal that is repeated before the save counts once: launchers forward signals that their ranks have got already.
    Processes that ``multiprocessing`` starts after this call, such as data-loader workers, survive the signals
    (:mod:`deepspeed_ucp.children`). Follow one of several engines, and save the others in ``client_state``: the ranks
    end with the first save.

    Args:
        engine: each of its steps ends with a comparison of all ranks' signals (one reduction of some bytes).
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
    chosen, why = _choose(platform, actions, job)
    if names := list_unprotected():
        logger.warning(
            "%s: started before preemption.follow, so a signal to the whole job ends it and may prevent the save. "
            "Call preemption.follow before you start processes or iterate over a DataLoader.",
            ", ".join(names),
        )
    for number in chosen:
        _wait_for(number, speaks=speaks)
    if speaks:
        logger.info("%s (%s)", "; ".join(_describe(number, chosen[number]) for number in chosen), why)
    raises = platform.raises and actions is None
    preemption = Preemption(os.fspath(save_dir), chosen, client_state, requeue=job, raises=raises)
    find_state(engine).preemption = preemption


def _choose(
    platform: Platform, actions: Mapping[int, int | None] | None, job: str | None
) -> tuple[Mapping[int, int | None], str]:
    """Choose the exit code of each signal; returns them with the reason for the log line."""
    if actions is not None:
        return actions, "as the script says"
    if job:
        return REQUEUED, f"Slurm, which is to requeue job {job}"
    return platform.ends, f"{platform.name}{', as an error' if platform.raises else ''}"


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
            if not _arrived[arrived] and is_first_of_node():
                # In a thread: this one may be interrupted in the middle of writing a log line.
                _thread.start_new_thread(logger.warning, (_RECEIVED, signal.Signals(arrived).name))
            _arrived[arrived] = True
        elif callable(former):
            former(arrived, frame)
        else:
            signal.signal(arrived, former if former is not None else signal.SIG_DFL)
            signal.raise_signal(arrived)

    signal.signal(number, note)
    _handlers[number], _arrived[number] = note, False
    protect({number})


_RECEIVED = (
    "%s received: all ranks save at the end of the next step, or in preemption.save_if_signaled. Most launchers and "
    "schedulers kill the ranks 30 s after the signal."
)


@atexit.register
def _report_missing_save() -> None:
    if names := [signal.Signals(number).name for number, arrived in _arrived.items() if arrived]:
        logger.warning("%s: no save was made, since no step ended after it", ", ".join(names))


def save_if_signaled(engine: Any) -> None:
    """Save if any rank has received a followed signal; collective.

    The end of each step of a followed engine calls this. Call it in a long evaluation too, at a place that all ranks
    pass equally often and where the engine holds the weights to be saved.

    Raises:
        SystemExit: after the save, with the signal's exit code.
        Preempted: after the save, on a platform that restarts a job after an error.
    """
    asked = find_state(engine).preemption
    if asked is None:
        return
    comm, numbers = connect(waits=False), sorted(asked.actions)
    told = comm.any_of(np.array([_arrived[number] for number in numbers]))
    came = [number for number, yes in zip(numbers, told.tolist(), strict=True) if yes]
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
    if codes := [code for number in came if (code := asked.actions[number]) is not None]:
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
