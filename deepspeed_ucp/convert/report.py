"""What a conversion did."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class ConvertReport:
    """Figures of one conversion, over all nodes where not said otherwise.

    Attributes:
        source, destination: folders.
        reused: the destination held the same conversion already; nothing was written.
        atoms: logical atoms written.
        state_bytes: their bytes.
        bytes_read: bytes asked of the source's storage, each once (replicas once more for the comparison).
        bytes_written: bytes of the output.
        resumed_bytes: bytes that an earlier attempt had written.
        nodes, workers: ranks, and threads on each.
        phases: seconds on this rank.
        seconds: wall time.
    """

    source: str
    destination: str
    reused: bool = False
    atoms: int = 0
    state_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    resumed_bytes: int = 0
    nodes: int = 1
    workers: int = 1
    phases: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begin

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)
