"""Bytes of a checkpoint into a rank's buffers: who reads what, both passes, verification."""

from __future__ import annotations

from ..atoms import AtomicIndex
from ..comm import Comm
from ..config import UniversalConfig
from ..io.checksum import Checked
from ..plan.resolve import BLOCK, MIN_DIRECT
from ..stream.samples import check_samples
from ..targets import Target
from .apart import set_apart
from .exchange import CollectiveReader
from .negotiate import negotiate
from .prepare import Work
from .replicas import check_replicas
from .states import attach_states


class Transfer:
    """One rank's part of a load whose work is known; every step is collective, and they follow each other.

    Args:
        apart: fill live buffers apart where there is memory for it, so that one pass over the files is enough.
        window: bytes of staging memory; None takes the configured.
        block, min_direct: see ``plan``.
    """

    def __init__(
        self,
        index: AtomicIndex,
        work: Work,
        comm: Comm,
        config: UniversalConfig,
        *,
        apart: bool = False,
        window: int | None = None,
        block: int = BLOCK,
        min_direct: int = MIN_DIRECT,
    ) -> None:
        window = window or config.window_mb << 20
        self.index, self.work, self.comm = index, work, comm
        self.apart = apart and set_apart(work.into.buffers, window, comm)
        self.plan = negotiate(
            work.wants.wants, work.into.sinks, index, comm, window, block=block, min_direct=min_direct
        )
        self.reader = CollectiveReader(index, work.into, self.plan, comm, config)

    def read(self) -> list[Checked]:
        """Pass 1: read everything, with its checksums, and fill what is not part of the engine."""
        return self.reader.read_fresh()

    def verify(self) -> int:
        """Hold what was read against what training wrote, and replicas against each other.

        Returns:
            Bytes that this rank has read in addition for the records' checksums.

        Raises:
            CheckpointError: bytes are damaged, or of another run.
            MismatchError: replicas differ.
        """
        index, comm, reader = self.index, self.comm, self.reader
        nbytes = reader.checks.verify(index, comm, threads=reader.threads) if reader.checksum else 0
        check_replicas([index.stored.atoms[key] for key in self.work.replicated], index, comm)
        if reader.checksum:
            check_samples(index, [index.stored.atoms[key] for key in self.work.touched], comm)
        return nbytes

    def fill(self) -> list[Checked]:
        """Pass 2: fill the live buffers, from the files or from memory apart; what was read again."""
        again = [] if self.apart else self.reader.fill_live()
        self.comm.run(self.work.into.commit)  # a rank without memory for it must not leave the others waiting
        return again

    def attach(self, target: Target) -> None:
        """Hand states, scalars and hyper-parameters to the optimizer; of this rank alone."""
        attach_states(target, self.work.states, self.work.match)
