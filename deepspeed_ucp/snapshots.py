"""Automatic saves into memory, every few steps or seconds.

A snapshot is prepared at the end of a step: random states, positions in the data and the client state are read there.
The engine's state is copied when the next step begins, unless the script has saved meanwhile. All ranks use the clock
of rank 0.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch

from .comm import connect, is_shared
from .config import SECTION
from .engine.coverage import find_data_sampler
from .engine_state import collect, find_state, get_config
from .errors import ConfigError, UcpError
from .saves.memory import locate

logger = logging.getLogger("deepspeed_ucp")

_FIRST = 3
"""Steps until the clock is first read."""


class Prepared(dict[str, Any]):
    """Client state of a snapshot, with the states that the engine carries."""


@dataclass(slots=True)
class Snapshots:
    """The snapshots of one engine.

    Attributes:
        save_dir: a load from this folder finds them.
        steps: steps between two snapshots; None if ``seconds`` is used.
        seconds: seconds between two snapshots; 0 if ``steps`` is used.
        client_state: makes their client state.
        at_once: take them at the end of a step, because the begin of the next one is not reported.
        since, begun: step and time of the last save.
        due: step at whose end a snapshot is due, or the clock is read.
        prepared: client state of a snapshot that is due and not taken yet.
        fails: the last snapshot failed.
    """

    save_dir: str
    steps: int | None
    seconds: float
    client_state: Callable[[], Mapping[str, Any]] | None
    at_once: bool = False
    since: int = 0
    begun: float = 0.0
    due: int = 0
    prepared: Prepared | None = None
    fails: bool = False

    def restart(self, step: int, first: int = 1) -> None:
        """Start the interval at ``step``.

        The clock, if the interval is a time, is first read ``first`` steps later.
        """
        self.prepared, self.since, self.begun = None, step, monotonic()
        self.due = step + (self.steps or first)

    def is_due(self, step: int) -> bool:
        """Return True if a snapshot is due at a step's end; collective to read the clock.

        The clock is read again after about half of the remaining time, because steps may become longer, and at the
        latest after as many steps as have been taken since the last save.
        """
        if step < self.due or self.steps is not None:
            return step >= self.due
        passed: float = max(connect(waits=False).broadcast(monotonic() - self.begun), 1e-9)
        left = (self.seconds - passed) / passed * (step - self.since)
        self.due = step + max(1, min(math.ceil(left / 2), step - self.since))
        return left < 0.5


def follow(
    engine: Any,
    save_dir: str | os.PathLike[str],
    *,
    every: int | str,
    client_state: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Save into memory automatically from now on.

    ``load_checkpoint(save_dir)`` finds the saves. Call this on every rank.

    Snapshots stay in memory. A failed one is a warning. A save of the script to ``save_dir`` restarts the interval.

    Args:
        every: steps (``20``) or seconds (``"30s"``) between two snapshots.
        client_state: makes the client state of a snapshot, at the end of its step.

    Raises:
        ConfigError: ``every`` is invalid, or the engine does not save into memory.

    Example:
        >>> engine, *_ = deepspeed.initialize(model=model, config=config)  # with {"save": true}
        >>> snapshots.follow(engine, "checkpoints", every="30s")
    """
    config = get_config(engine)
    if config is None or config.save is None:
        raise ConfigError(f'snapshots need saves into memory. Add "{SECTION}": {{"save": true}} to the ds_config.')
    steps, seconds = _read_every(every)
    if find_state(engine).snapshots is None:
        engine.register_forward_pre_hook(lambda *_: _begin_forward(engine))
    state = Snapshots(os.fspath(save_dir), steps, seconds, client_state)
    state.restart(engine.global_steps, _FIRST)
    find_state(engine).snapshots = state


def _read_every(every: object) -> tuple[int | None, float]:
    """Parse ``every`` as steps, or as None and seconds."""
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return every, 0.0
    if isinstance(every, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)s", every)) and (seconds := float(match[1])):
        return None, seconds
    raise ConfigError(f'every={every!r}: give a number of steps (20) or seconds ("30s").')


def _begin_forward(engine: Any) -> None:
    if engine.module.training and torch.is_grad_enabled():  # a single rank may evaluate
        begin_step(engine)


def begin_step(engine: Any) -> None:
    """Take the snapshot that is due, when a step begins (collective)."""
    state: Snapshots | None = find_state(engine).snapshots
    if state is not None and state.prepared is not None:
        _take_snapshot(engine, state, state.prepared)


def end_step(engine: Any) -> None:
    """Prepare the snapshot that is due, at the end of a step (collective)."""
    state: Snapshots | None = find_state(engine).snapshots
    if state is None:
        return
    if state.prepared is not None:  # the script calls the module, not the engine
        state.prepared, state.at_once = None, True
    if not state.is_due(engine.global_steps):
        return
    try:
        client_state = connect().run(lambda: dict(state.client_state()) if state.client_state else {})
        state.prepared = Prepared(collect(engine, client_state))
    except UcpError as error:
        _log_failure(state, engine, error)
        state.restart(engine.global_steps)
    else:
        # The next batch moves a data sampler, which the engine saves.
        if state.at_once or find_data_sampler(engine) is not None:
            _take_snapshot(engine, state, state.prepared)


def _take_snapshot(engine: Any, state: Snapshots, client_state: Prepared) -> None:
    try:
        tag = f"snapshot_step{engine.global_steps}"  # scripts do not use such a tag
        engine.save_checkpoint(state.save_dir, tag, client_state=client_state)
        state.fails = False
    except UcpError as error:
        _log_failure(state, engine, error)
    state.restart(engine.global_steps)


def _log_failure(state: Snapshots, engine: Any, error: UcpError) -> None:
    """Log the first of consecutive failures; re-raise an error of this rank alone."""
    if not is_shared(error):
        raise error
    if not state.fails and connect().rank == 0:
        logger.warning("no snapshot of step %d, training continues: %s", engine.global_steps, error)
    state.fails = True


def note_save(engine: Any, save_dir: str, *, latest: bool) -> None:
    """Restart the interval after a save that a load from the snapshots' folder finds."""
    state: Snapshots | None = find_state(engine).snapshots
    if state is not None and latest and locate(save_dir) == locate(state.save_dir):
        state.restart(engine.global_steps)


def note_load(engine: Any) -> None:
    """Restart the interval after a load."""
    state: Snapshots | None = find_state(engine).snapshots
    if state is not None:
        state.restart(engine.global_steps, _FIRST)
