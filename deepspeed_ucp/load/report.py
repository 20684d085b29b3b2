"""What a load did, for logs, tests and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..io.checksum import Checked


@dataclass(slots=True)
class LoadReport:
    """Kept as ``engine.ucp_report`` after every ``load_checkpoint`` of an engine that has the plugin on.

    Attributes:
        direct: our loader ran (False: DeepSpeed's own did).
        reason: why, in words.
        phases: seconds per phase on this rank.
        bytes_read: bytes that this rank asked storage for, each once.
        bytes_again: bytes that it took from the page cache a second time, after everything had been verified.
        requests: reads that it issued.
        state_bytes: bytes of state that all ranks together restored.
        converted: in mode "atomic", the :class:`~deepspeed_ucp.convert.ConvertReport` of the conversion before.
    """

    direct: bool
    reason: str
    phases: dict[str, float] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_again: int = 0
    requests: int = 0
    state_bytes: int = 0
    converted: Any = None

    def count(self, checks: Sequence[Checked]) -> None:
        """Note what was read for the first time."""
        self.bytes_read += sum(check.nbytes for check in checks)
        self.requests += len(checks)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begin
