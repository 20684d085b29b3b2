"""Reports of programs that read a checkpoint's bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Report:
    """Common figures of all programs.

    Attributes:
        phases: seconds per phase on this rank.
        spans: (phase, start in seconds since the epoch, seconds) in order.
        bytes_read: bytes read from storage, each once.
    """

    phases: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    bytes_read: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds that the context takes to a phase."""
        begin, at = time.perf_counter(), time.time()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            self.phases[name] = self.phases.get(name, 0.0) + seconds
            self.spans.append((name, at, seconds))


@dataclass(slots=True, kw_only=True)
class OutputReport(Report):
    """Figures of a conversion or export, over all nodes unless stated otherwise.

    Attributes:
        format: ``atomic``, ``safetensors`` or ``dcp``.
        reused: whether the destination was this conversion already and nothing was written.
        tensors: number of written tensors (conversion: atoms).
        parameters, dtypes, files: export: number of elements, their types, and bytes by file.
        state_bytes: conversion: bytes of the atoms.
        bytes_read: bytes read from the source, each once (replicas once more for the comparison).
        bytes_written: bytes of the output.
        nodes, workers: ranks, and threads on each.
    """

    format: str
    source: str
    destination: str
    reused: bool = False
    tensors: int = 0
    parameters: int = 0
    dtypes: tuple[str, ...] = ()
    files: dict[str, int] = field(default_factory=dict)
    state_bytes: int = 0
    bytes_written: int = 0
    nodes: int = 1
    workers: int = 1
    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds = time.perf_counter() - begin
