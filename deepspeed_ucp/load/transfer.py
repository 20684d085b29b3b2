"""Bytes of a checkpoint into a rank's buffers: who reads what, in one pass or two, and verification."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..atoms import AtomicIndex, Records
from ..comm import Comm
from ..config import UniversalConfig
from ..io.checksum import Checked
from ..io.memory import identify_host, measure_available
from ..io.shared import share_memory
from ..plan import Blocks, Claim, LoadPlan, ReadSizes, address_claims, decide, list_claims, make_plan
from ..plan.claims import Table
from ..plan.rounds import SameNode
from ..plan.wants import Wants
from ..stream.duplicates import check_replicas, check_samples
from .destinations import Buffer
from .exchange import CollectiveReader
from .prepare import Work

logger = logging.getLogger("deepspeed_ucp")

SHARE = 0.75
"""Of a machine's free memory that a load may use for what it reads, fresh optimizer states included."""


class Transfer:
    """One rank's part of a load whose work is known; every step is collective, and they follow each other.

    Args:
        sizes: None takes those for the configured window.
        apart: where live buffers cannot be filled in place, have memory apart rather than a second pass over the files.
    """

    def __init__(
        self,
        work: Work,
        comm: Comm,
        config: UniversalConfig,
        *,
        sizes: ReadSizes | None = None,
        apart: bool = False,
    ) -> None:
        window = config.window_mb << 20
        self.work, self.comm, self.config = work, comm, config
        self.two_passes = not spare_engine(work.into.buffers, window, comm, apart=apart)
        self.sizes = sizes or ReadSizes.within(window)
        self.stages = share_memory(2 * self.sizes.stage, comm.rank, comm.gather)
        self.plan = negotiate(work.wants, work.index, comm, self.sizes, find_same_node(self.stages))
        passes = self._plan_passes(self.plan)
        # The reader allocates memory. A rank that has too little says so in this agreement, and no other waits for it.
        self.reader = comm.run(lambda: CollectiveReader(work.index, work.into, passes, comm, config, self.stages))

    def _plan_passes(self, plan: LoadPlan) -> list[LoadPlan]:
        """The plan of each pass; collective where there are two.

        The first one reads everything for its checksums, without these what it fills; the second one what is left.
        """
        checked, into = self.config.verify == "crc", self.work.into
        sinks = [into.pick_sinks(uncommitted=each) for each in (True, False)]
        first, rest = ([sink is not None for sink in filled] for filled in sinks)
        if not self.two_passes:
            return [plan if checked else plan.narrow(first)]
        needs = self.comm.run(lambda: plan.list_needs(first, rest))
        needed = self.comm.swap_tables(needs) if needs else []  # as many rounds on every rank
        now, then = ([each[:, number] for each in needed] for number in (0, 1))
        return [plan.narrow(first, now, whole=checked), plan.narrow(rest, then)]

    def read(self) -> list[Checked]:
        """Pass 1: read everything, with its checksums, and fill what is not part of the engine or can be made again."""
        return self.reader.read_first()

    def verify(self) -> int:
        """Hold what was read against what training wrote, and replicas against each other.

        Returns:
            Bytes that this rank has read in addition for the records' checksums.

        Raises:
            CheckpointError: bytes are damaged, or of another run.
            MismatchError: replicas differ.
        """
        index, comm, reader = self.work.index, self.comm, self.reader
        nbytes = reader.checks.verify(index, comm, threads=reader.threads) if reader.checksum else 0
        check_replicas([index.stored.atoms[key] for key in self.work.replicated], index, comm)
        if reader.checksum:
            check_samples(index, self.work.touched, comm)
        return nbytes

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """Inside, what fails leaves the engine as it was: what was filled in place is made again.

        All reading up to the agreement about it goes on inside, and whatever else may fail before the engine changes.
        """
        try:
            yield
        except BaseException:
            self.reader.uploads.close()  # what is still on its way would arrive afterwards
            self.work.into.undo()
            raise

    def fill(self) -> list[Checked]:
        """Pass 2: fill the live buffers, from the files or from memory apart; what was read again."""
        again = self.reader.read_rest()

        def commit() -> None:
            self.reader.uploads.close()
            self.work.into.commit()

        self.comm.run(commit)  # a rank without memory for it must not leave the others waiting
        return again


def spare_engine(buffers: Sequence[Buffer], window: int, comm: Comm, *, apart: bool) -> bool:
    """Choose where live buffers are filled, so that whatever fails while files are read changes no engine; collective.

    What can be made again is filled in place. The rest is filled apart, if that is asked for and every machine has the
    memory, and reaches the engine by copies of memory when every rank has agreed.

    Args:
        buffers: all of this rank's.
        window: bytes of memory that reading needs besides.

    Returns:
        The same on every rank: whether one pass over the files is enough. Otherwise what is left is filled by another.
    """
    others = comm.run(lambda: [buffer for buffer in buffers if buffer.uncommitted or not buffer.fill_in_place()])
    if not comm.any_of(np.array([not all(buffer.uncommitted for buffer in others)]))[0]:
        return True
    is_enough = apart and has_memory(others, window, comm)
    for buffer in others:
        if is_enough and not buffer.uncommitted:
            buffer.stage_aside()
    return is_enough


def has_memory(buffers: Sequence[Buffer], window: int, comm: Comm) -> bool:
    """Whether every machine has memory to fill the live ones of these buffers apart; collective."""
    in_memory = [buffer for buffer in buffers if not buffer.in_file]
    hosted = [buffer for buffer in in_memory if not buffer.uncommitted or buffer.tensor.device.type == "cpu"]
    answers = comm.gather(
        (identify_host(), sum(buffer.tensor.nbytes for buffer in hosted) + window, measure_available())
    )
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for host, nbytes, available in answers:
        needed[host] += nbytes
        free[host] = min(available, free.get(host, available))
    if any(needed[host] > SHARE * free[host] for host in needed):
        if comm.rank == 0:
            logger.info("not enough free memory to fill the engine's buffers apart: they are read in a second pass")
        return False
    return True


def find_same_node(stages: Sequence[memoryview | None]) -> SameNode:
    """Which ranks' staging memory this one sees."""
    return np.array([stage is not None for stage in stages], np.bool_)


def negotiate(
    wants: Wants, index: AtomicIndex, comm: Comm, sizes: ReadSizes, same_node: SameNode | None = None
) -> LoadPlan:
    """Ranks tell each other what they want and agree who reads it; collective.

    Args:
        wants: of this rank.
        same_node: ranks that see each other's staging memory.

    Raises:
        UcpError: a want cannot be located; the same on every rank.
    """
    records = index.stored.records
    blocks = Blocks.of(records, sizes.block, comm.size, index.stored.access)
    mask = np.zeros(len(records), np.bool_)

    def claim() -> tuple[list[Table], list[list[Claim]]]:
        claims = list_claims(wants.wants, sizes.block)
        mask[[claim.record for claim in claims]] = True
        return address_claims(claims, blocks)

    tables, addressed = comm.run(claim)
    touched = np.flatnonzero(comm.any_of(mask))
    place, asked = comm.rank if same_node is None else int(np.argmax(same_node)), comm.swap_tables(tables)
    decision = comm.run(lambda: decide(asked, blocks, blocks.owned(comm.rank, touched), sizes, same_node, place))
    answers = comm.swap_tables(decision.answers)
    plan = comm.run(lambda: make_plan(addressed, answers, decision, comm.rank, Records.of(records).files))
    return plan.agree(comm.gather(plan.count_steps(sizes.share)))
