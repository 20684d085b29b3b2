"""Save once on all ranks, at the end of a step, when the job is signaled.

The signal may reach one process or all: the ranks compare at the end of every step. The exit code makes the platform
restart the job (:mod:`deepspeed_ucp.platforms`). The signal handler itself never saves, because the script may have put
averaged weights into the engine for an evaluation, and other ranks may be in a collective. A script with long
evaluations calls :func:`save_if_signaled` in them.
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
from .platforms import REQUEUED, SLURM_JOB, find_platform, find_rank, is_first_of_node
from .saves.saver import finish_saves, keep_memory
from .writer import end_writer, finish_save

logger = logging.getLogger("deepspeed_ucp")

_JIT = "transformers.trainer_jit_checkpoint"
"""Module of the Trainer's save on SIGTERM (``enable_jit_checkpoint``)."""

_arrived: dict[int, bool] = {}
"""Followed signal → whether it has been received; empty in a forked process."""

_handlers: dict[int, Any] = {}
"""Followed signal → our handler; the script may have set another one since."""

os.register_at_fork(after_in_child=_arrived.clear)


class Preempted(RuntimeError):
    """The job has saved on a signal and ends by an error, so that Ray restarts it."""


def follow(
    engine: Any,
    save_dir: str | os.PathLike[str],
    *,
    actions: Mapping[int, int | None] | None = None,
    requeue: bool = False,
    client_state: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Save at the end of the step in which any rank gets a signal.

    Call this in the main thread of every rank.

    A repeated signal counts once, because launchers forward signals that their ranks have received already. Processes
    that ``multiprocessing`` starts after this call, such as data-loader workers, survive the signals
    (:mod:`deepspeed_ucp.children`). If there are several engines, follow one and save the others in ``client_state``.

    Args:
        engine: each of its steps ends with a reduction of a few bytes, to compare the signals of all ranks.
        save_dir: as for ``engine.save_checkpoint``.
        actions: signal → exit code of every rank after the save; None continues training. By default SIGUSR1 continues,
            and SIGTERM exits with a code after which the platform restarts the job (docs/restarts.md).
        requeue: in a Slurm job, exit on SIGUSR1 too, and let rank 0 requeue the job after the save (``scontrol
            requeue``) unless it is being cancelled.
        client_state: makes the client state of the save.

    Raises:
        ValueError: outside the main thread. Under Ray Train, which uses another thread, this is a warning, and signals
            are ignored.

    Example:
        >>> engine, *_ = deepspeed.initialize(model=model, config=config)
        >>> preemption.follow(engine, "checkpoints")  # SIGTERM: save after this step, then exit
    """
    platform, job = find_platform(), os.environ.get(SLURM_JOB) if requeue else None
    logs = find_rank() <= 0
    if requeue and not job and logs:
        logger.warning("requeue: this process is not in a Slurm job, so nothing is requeued")
    if platform.raises and threading.current_thread() is not threading.main_thread():
        if logs:
            logger.warning("%s runs this in a thread that receives no signals: none is followed here", platform.name)
        return
    if actions is not None:
        chosen, reason = actions, "set by the script"
    elif job:
        chosen, reason = REQUEUED, f"Slurm, job {job} will be requeued"
    else:
        chosen, reason = platform.ends, f"{platform.name}{', as an error' if platform.raises else ''}"
    if names := list_unprotected():
        logger.warning(
            "%s: started before preemption.follow, so a signal to the whole job ends it and may prevent the save. "
            "Call preemption.follow before you start processes or iterate over a DataLoader.",
            ", ".join(names),
        )
    for number in chosen:
        _install_handler(number, logs=logs)
    if logs:
        ends = {number: "continues" if code is None else f"exits with {code}" for number, code in chosen.items()}
        lines = (f"{signal.Signals(number).name}: saves and {end}" for number, end in ends.items())
        logger.info("%s (%s)", "; ".join(lines), reason)
    raises = platform.raises and actions is None
    preemption = Preemption(os.fspath(save_dir), chosen, client_state, requeue=job, raises=raises)
    find_state(engine).preemption = preemption


def _install_handler(number: int, *, logs: bool) -> None:
    former = signal.getsignal(number)
    if former is _handlers.get(number) and number in _arrived:
        return
    if getattr(type(getattr(former, "__self__", None)), "__module__", None) == _JIT and logs:
        logger.warning(
            "SIGTERM: this save replaces the Trainer's (enable_jit_checkpoint). It has no state of the Trainer, which "
            "resumes from its last checkpoint-N."
        )

    def handle(arrived: int, frame: FrameType | None) -> None:
        if arrived in _arrived:
            if not _arrived[arrived] and is_first_of_node():
                # In a thread: the signal may have interrupted this one while it was logging.
                _thread.start_new_thread(logger.warning, (_RECEIVED, signal.Signals(arrived).name))
            _arrived[arrived] = True
        elif callable(former):
            former(arrived, frame)
        else:
            signal.signal(arrived, former if former is not None else signal.SIG_DFL)
            signal.raise_signal(arrived)

    signal.signal(number, handle)
    _handlers[number], _arrived[number] = handle, False
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
    """Save if any rank has received a followed signal (collective).

    The plugin calls this at the end of each step of a followed engine. Call it in a long evaluation too, equally often
    on all ranks, while the engine holds the weights to be saved.

    Raises:
        SystemExit: after the save, with the signal's exit code.
        Preempted: after the save, on a platform that restarts a job after an error.
    """
    preemption = find_state(engine).preemption
    if preemption is None:
        return
    comm, numbers = connect(waits=False), sorted(preemption.actions)
    on_any_rank = comm.any_of(np.array([_arrived[number] for number in numbers]))
    received = [number for number, arrived in zip(numbers, on_any_rank.tolist(), strict=True) if arrived]
    if not received:
        return
    if comm.rank == 0:
        names = ", ".join(signal.Signals(number).name for number in received)
        logger.warning("%s: saving to %s at step %d", names, preemption.save_dir, engine.global_steps)
    client_state = connect().run(lambda: dict(preemption.client_state()) if preemption.client_state else {})
    engine.save_checkpoint(preemption.save_dir, client_state=client_state)
    finish_save(engine)
    finish_saves(engine)
    for number in received:
        _arrived[number] = False
    if codes := [code for number in received if (code := preemption.actions[number]) is not None]:
        keep_memory()
        end_writer(engine)
        with contextlib.suppress(Exception):  # a rank may have exited
            comm.gather(None)  # a rank that exits early would close connections that others still use
        _end_rank(preemption, max(codes), comm, engine.global_steps)


def _end_rank(preemption: Preemption, code: int, comm: Comm, step: int) -> NoReturn:
    """Requeue the Slurm job if requested, then raise SystemExit or :class:`Preempted`."""
    if preemption.requeue is not None:
        fault = comm.gather(_requeue(preemption.requeue) if comm.rank == 0 else None)[0]
        if fault and comm.rank == 0:
            logger.error("job %s is not requeued: %s", preemption.requeue, fault)
        code = code or int(fault is not None)
    if preemption.raises:
        raise Preempted(f"saved to {preemption.save_dir} at step {step} on a signal, and ends")
    raise SystemExit(code)


def _requeue(job: str) -> str | None:
    """Requeue a running Slurm job, which ends its steps; return an error or None."""
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
            if state and state[1] != "RUNNING":  # scancel sends SIGTERM too
                return f"it is {state[1]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None
