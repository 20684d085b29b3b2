"""What this rank does, told to whoever the environment names: its steps, and the phase that it is in.

``ds_ucp supervise`` and ``ds_ucp torchrun`` listen by way of :mod:`deepspeed_ucp.heartbeat`. Of engines that have the
plugin off it is told too. Nothing that a listener does, or fails to do, stops training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import heartbeat

_phases: list[str] = []
"""The phases that this rank is in, the innermost last."""


def report_step(step: int) -> None:
    """Tell that this rank has got as far as ``step``."""
    heartbeat.report_step(step)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside, this rank is in a phase: ``forward``, ``backward``, ``step``, ``save`` or ``load``, or a pipeline's
    ``train_batch``, which has others within; at its end in the one around it, or in none."""
    _phases.append(name)
    heartbeat.report_phase(name)
    try:
        yield
    finally:
        _phases.pop()
        heartbeat.report_phase(_phases[-1] if _phases else None)
