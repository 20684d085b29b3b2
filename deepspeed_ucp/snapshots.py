"""Saves into memory that no script asks for, every few steps or seconds.

A snapshot is due at the end of a step. What moves on before the next step (random states, places in the data, the
client state) is taken there; the engine's own state when the next step begins, and not if the script has saved
meanwhile. No rank goes by its own clock: in which step one is due, or the clock is looked at again, all agree on.
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
from .engine_state import collect, find_state, get_config
from .errors import ConfigError, UcpError
from .saves.memory import locate
from .targets.coverage import find_data_sampler

logger = logging.getLogger("deepspeed_ucp")

_FIRST = 3
"""Steps until the clock is first looked at."""

_TAG = "snapshot_step"
"""Of a snapshot's tag, which is none of a script's."""

_SECONDS = re.compile(r"(\d+(?:\.\d+)?)s")


class Prepared(dict[str, Any]):
    """The client state of a snapshot, which has what the engine carries in it."""


@dataclass(slots=True)
class Snapshots:
    """The snapshots of one engine.

    Attributes:
        save_dir: in which a load finds them.
        steps: between two of them; None where the clock counts.
        seconds: the same; 0 where steps count.
        client_state: makes their client state.
        at_once: they are taken at a step's end, as nobody tells when the next one begins.
        since, begun: the step and the time from which is counted: of the last save.
        due: the step at whose end a snapshot is due, or the clock is looked at.
        prepared: of one that is due and not taken yet, its client state.
        fails: the last one failed.
    """

    save_dir: str
    steps: int | None
    seconds: float
    client_state: Callable[[], Mapping[str, Any]] | None
    at_once: bool
    since: int = 0
    begun: float = 0.0
    due: int = 0
    prepared: Prepared | None = None
    fails: bool = False

    def restart(self, step: int, first: int = 1) -> None:
        """Count from a step on.

        Args:
            first: after so many steps the clock is looked at.
        """
        self.prepared, self.since, self.begun = None, step, monotonic()
        self.due = step + (self.steps or first)

    def is_due(self, step: int) -> bool:
        """Whether one is due at the end of a step; collective where the clock is looked at.

        That is done again when half of the time that is left will have passed, as steps may become longer, and within
        as many steps as there were until now.
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
    """Save into memory by itself from now on, where ``load_checkpoint(save_dir)`` finds it; to be called on every rank.

    Snapshots are no saves of the script's: they stay in memory, and go to the places that ``"save": {"to": …}`` names,
    not to ``save_dir``. One that fails is a warning. The script's own saves to ``save_dir`` count as well: none follows
    within ``every`` after one.

    Args:
        every: steps (``20``) or seconds (``"30s"``) between two snapshots.
        client_state: makes the client state of each, at the end of its step.

    Raises:
        ConfigError: ``every`` is none of these, or the engine does not save into memory.
    """
    config = get_config(engine)
    if config is None or config.save is None:
        raise ConfigError(f'snapshots lie in memory: write "{SECTION}": {{"save": true}} into the ds_config.')
    steps, seconds = _read_every(every)
    at_once = find_data_sampler(engine) is not None  # it moves on with the next batch, and is saved with the engine
    if find_state(engine).snapshots is None:
        engine.register_forward_pre_hook(lambda *_: _begin_forward(engine))
    asked = Snapshots(os.fspath(save_dir), steps, seconds, client_state, at_once)
    asked.restart(engine.global_steps, _FIRST)
    find_state(engine).snapshots = asked


def _read_every(every: object) -> tuple[int | None, float]:
    """Parse ``every`` as steps, or as None and seconds."""
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return every, 0.0
    if isinstance(every, str) and (match := _SECONDS.fullmatch(every)) and (seconds := float(match[1])):
        return None, seconds
    raise ConfigError(f'every={every!r}: give a number of steps (20) or seconds ("30s").')


def _begin_forward(engine: Any) -> None:
    if engine.module.training and torch.is_grad_enabled():  # not an evaluation, which a rank may do alone
        begin_step(engine)


def begin_step(engine: Any) -> None:
    """When a step begins: take the snapshot that is due; collective."""
    asked: Snapshots | None = find_state(engine).snapshots
    if asked is not None and asked.prepared is not None:
        _take(engine, asked, asked.prepared)


def end_step(engine: Any) -> None:
    """At the end of a step: prepare the snapshot that is due; collective."""
    asked: Snapshots | None = find_state(engine).snapshots
    if asked is None:
        return
    if asked.prepared is not None:  # the script calls the module, not the engine
        asked.prepared, asked.at_once = None, True
    if not asked.is_due(engine.global_steps):
        return
    try:
        own = connect().run(lambda: dict(asked.client_state()) if asked.client_state else {})
        asked.prepared = Prepared(collect(engine, own))
    except UcpError as error:
        _warn(asked, engine, error)
        asked.restart(engine.global_steps)
    else:
        if asked.at_once:
            _take(engine, asked, asked.prepared)


def _take(engine: Any, asked: Snapshots, client_state: Prepared) -> None:
    try:
        engine.save_checkpoint(asked.save_dir, f"{_TAG}{engine.global_steps}", client_state=client_state)
        asked.fails = False
    except UcpError as error:
        _warn(asked, engine, error)
    asked.restart(engine.global_steps)


def _warn(asked: Snapshots, engine: Any, error: UcpError) -> None:
    """Once until one succeeds: it would fail as often as they come."""
    if not is_shared(error):
        raise error
    if not asked.fails and connect().rank == 0:
        logger.warning("no snapshot of step %d, training goes on: %s", engine.global_steps, error)
    asked.fails = True


def note_save(engine: Any, save_dir: str, *, latest: bool) -> None:
    """The script has saved: where a load of the same folder finds it, that takes a snapshot's place."""
    asked: Snapshots | None = find_state(engine).snapshots
    if asked is not None and latest and locate(save_dir) == locate(asked.save_dir):
        asked.restart(engine.global_steps)


def note_load(engine: Any) -> None:
    """The engine is at another step."""
    asked: Snapshots | None = find_state(engine).snapshots
    if asked is not None:
        asked.restart(engine.global_steps, _FIRST)
