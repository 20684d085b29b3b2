"""What a load did, for logs, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..io.checksum import Checked
from ..stream.report import Report


@dataclass(slots=True)
class LoadReport(Report):
    """Kept as ``engine.ucp_report`` after every ``load_checkpoint`` of an engine that has the plugin on.

    Attributes:
        direct: our loader ran (False: DeepSpeed's own did).
        reason: why, in words.
        bytes_read: bytes that this rank asked storage for, each once.
        bytes_again: bytes that it took from the page cache a second time, after everything had been verified.
        requests: reads that it issued.
        state_bytes: bytes of state that all ranks together restored.
        converted: in mode "atomic", the :class:`~deepspeed_ucp.stream.report.OutputReport` of the conversion before.
    """

    direct: bool
    reason: str
    bytes_again: int = 0
    requests: int = 0
    state_bytes: int = 0
    converted: Any = None

    def count(self, checks: Sequence[Checked]) -> None:
        """Note what was read for the first time."""
        self.bytes_read += sum(check.nbytes for check in checks)
        self.requests += len(checks)
