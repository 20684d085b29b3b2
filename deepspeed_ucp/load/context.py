"""One load as all its steps see it: the engine, what was asked for, and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..atoms import SavedJob
from ..comm import Comm
from ..config import UniversalConfig
from ..io.checksum import Checked
from ..stream.report import Report


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """The arguments of ``engine.load_checkpoint`` that change what is loaded."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None

    @property
    def with_states(self) -> bool:
        """Optimizer states are wanted."""
        return self.load_optimizer_states and not self.load_module_only


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
        files: by path the bytes that this rank read of it, and the seconds that its threads waited for them.
        threads: that read.
        saved: what ran around the engine when it was saved; None where nothing was loaded by its index.
        converted: in mode "atomic", the :class:`~deepspeed_ucp.stream.report.OutputReport` of the conversion before.
    """

    direct: bool
    reason: str
    bytes_again: int = 0
    requests: int = 0
    state_bytes: int = 0
    files: dict[str, tuple[int, float]] = field(default_factory=dict)
    threads: int = 1
    saved: SavedJob | None = None
    converted: Any = None

    def count(self, checks: Sequence[Checked]) -> None:
        """Note what was read for the first time."""
        self.bytes_read += sum(check.nbytes for check in checks)
        self.requests += len(checks)


@dataclass(frozen=True, slots=True)
class LoadContext:
    """One ``load_checkpoint``: into what, with whom, how, what of it, and what is told of it."""

    engine: Any
    comm: Comm
    config: UniversalConfig
    arguments: LoadArguments
    report: LoadReport
