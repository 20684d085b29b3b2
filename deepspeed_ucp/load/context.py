"""The shared context of a load: the engine, the arguments and the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..comm import Comm
from ..config import UniversalConfig
from ..extensions.registry import Extension
from ..io.paths import normalize
from ..io.read import Checked
from ..model.index import SavedJob
from ..stream.report import Report
from ..tensor_parallel.rules import RuleSet

logger = logging.getLogger("deepspeed_ucp")

Loaded = tuple[str | None, dict[str, Any] | None]
"""The result of ``load_checkpoint``: the path of the state file and the client state, or twice None."""


@dataclass(slots=True)
class LoadReport(Report):
    """The report of a load, kept as ``engine.ucp_report``.

    Attributes:
        direct: True if the direct load ran, False if DeepSpeed's did.
        reason: for the choice of the loader.
        extensions: names of the special cases that the save or the engine needed (:mod:`..extensions`).
        bytes_read: bytes that this rank read from storage, each counted once.
        bytes_again: bytes that it read a second time, after verification; usually from the page cache.
        requests: reads that it issued.
        state_bytes: bytes of state that all ranks together restored.
        files: path → bytes that this rank read, and seconds that its threads waited for them.
        threads: number of reading threads.
        saved: the saved run's job; None if no index was used.
        converted: in mode "atomic", the :class:`~deepspeed_ucp.stream.report.OutputReport` of the conversion.
    """

    direct: bool
    reason: str
    extensions: tuple[str, ...] = ()
    bytes_again: int = 0
    requests: int = 0
    state_bytes: int = 0
    files: dict[str, tuple[int, float]] = field(default_factory=dict)
    threads: int = 1
    saved: SavedJob | None = None
    converted: Any = None

    def add_reads(self, checks: Sequence[Checked]) -> None:
        self.bytes_read += sum(check.nbytes for check in checks)
        self.requests += len(checks)


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Constants of one ``load_checkpoint``, and arguments that select the state.

    Attributes:
        load_dir: the folder or URL with the tags: the caller's, or that of saves in memory.
        rules: the user's, as configured.
        deepspeed_load: DeepSpeed's load, with all arguments after the option ``arguments`` was applied.
        unknown: arguments that only DeepSpeed's load knows.
        extensions: special cases of a direct load.
    """

    engine: Any
    comm: Comm
    config: UniversalConfig
    report: LoadReport
    rules: Sequence[RuleSet] = ()
    load_dir: str = ""
    deepspeed_load: Callable[..., Loaded] = lambda **_: (None, None)
    unknown: Sequence[str] = ()
    extensions: Sequence[Extension] = ()
    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None

    @property
    def with_states(self) -> bool:
        return self.load_optimizer_states and not self.load_module_only

    @property
    def places(self) -> tuple[str, ...]:
        """Folders and URLs to search, each once: ``load_dir``, then the option ``also``."""
        named: dict[str, str] = {}
        for place in (self.load_dir, *self.config.also):
            named.setdefault(normalize(place), place)
        return tuple(named.values())

    @property
    def loads_universal(self) -> bool:
        """True if ds_config has ``load_universal``: DeepSpeed loads atomic checkpoints."""
        return bool(self.engine.load_universal_checkpoint())

    def warn(self, text: str, *arguments: object) -> None:
        """Log a warning on rank 0."""
        if self.comm.rank == 0:
            logger.warning(text, *arguments)

    def warn_all(self, path: str | None, find: Callable[[], Iterable[str]]) -> None:
        """Log the warnings that ``find`` returns on any rank, each once (collective)."""
        parts = self.comm.gather_results(lambda: [*find()])
        for note in dict.fromkeys(note for part in parts for note in part):
            self.warn("%s: %s", path, note)
