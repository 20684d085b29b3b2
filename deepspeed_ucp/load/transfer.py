"""Transfer of a checkpoint's bytes into a rank's buffers: planning, one or two passes, verification."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..comm import Comm
from ..config import UniversalConfig
from ..io.checksum import Checked
from ..io.memory import identify_host, measure_available, share_memory
from ..model import AtomicIndex, Read, Records
from ..plan import Blocks, LoadPlan, ReadSizes, address_claims, list_claims, make_owner_plan, make_plan
from ..plan.rounds import SameNode, Table
from ..plan.wants import Wants
from ..stream.duplicates import check_replicas, check_samples
from .destinations import Buffer
from .exchange import CollectiveReader
from .prepare import Work

logger = logging.getLogger("deepspeed_ucp")

SHARE = 0.75
"""Share of a machine's free memory that a load may use for the bytes that it reads, fresh optimizer states included."""


class Transfer:
    """One rank's part of a load; every step is collective, and they follow each other.

    Args:
        sizes: default: those for the configured window.
        prefer_memory: prefer separate memory to a second pass, for live buffers that cannot be filled in place.
    """

    def __init__(
        self,
        work: Work,
        comm: Comm,
        config: UniversalConfig,
        *,
        sizes: ReadSizes | None = None,
        prefer_memory: bool = False,
    ) -> None:
        window = config.window_mb << 20
        self.work, self.comm, self.config = work, comm, config
        self.two_passes = not choose_memory(work.destinations.buffers, window, comm, prefer_memory=prefer_memory)
        self.sizes = sizes or ReadSizes.from_window(window)
        self.stages = share_memory(2 * self.sizes.stage, comm.rank, comm.gather)
        same_node = np.array([stage is not None for stage in self.stages], np.bool_)
        self.plan = negotiate(work.wants, work.index, comm, self.sizes, same_node)
        passes = self._plan_passes(self.plan)
        # The reader allocates memory: an error of one rank reaches all ranks here.
        self.reader = comm.run(
            lambda: CollectiveReader(work.index, work.destinations, passes, comm, config, self.stages)
        )

    def _plan_passes(self, plan: LoadPlan) -> list[LoadPlan]:
        """Return the plan of each pass (collective if there are two).

        The first pass reads everything for its checksums, or without checksums what it fills; the second one the rest.
        """
        checked, destinations = self.config.verify == "crc", self.work.destinations
        sinks = [destinations.pick_sinks(uncommitted=uncommitted) for uncommitted in (True, False)]
        first, rest = ([sink is not None for sink in filled] for filled in sinks)
        if not self.two_passes:
            return [plan if checked else plan.filter_for_sinks(first)]
        needs = self.comm.run(lambda: plan.list_needs(first, rest))
        needed = self.comm.swap_tables(needs) if needs else []  # every rank has as many rounds
        now, then = ([columns[:, number] for columns in needed] for number in (0, 1))
        return [plan.filter_for_sinks(first, now, whole=checked), plan.filter_for_sinks(rest, then)]

    def read(self) -> list[Checked]:
        """Pass 1: read and checksum everything, and fill memory that is not part of the engine or can be recomputed."""
        return self.reader.read_first()

    def verify(self) -> int:
        """Compare the read bytes with the saved checksums, and replicas with each other.

        Returns:
            Bytes that this rank has read in addition for the records' checksums.

        Raises:
            CheckpointError: bytes are damaged, or belong to another run.
            MismatchError: replicas differ.
        """
        index, comm, reader = self.work.index, self.comm, self.reader
        nbytes = reader.checks.verify(index, comm, threads=reader.threads) if reader.checksum else 0
        check_replicas([index.stored.atoms[key] for key in self.work.replicated], index, comm)
        if reader.checksum:
            check_samples(index, self.work.touched, comm)
        return nbytes

    @contextmanager
    def undo_on_error(self) -> Iterator[None]:
        """Context manager that restores the values overwritten in place if an exception is raised inside.

        All reads up to the agreement run inside, and everything else that may fail before the engine changes.
        """
        try:
            yield
        except BaseException:
            self.reader.uploads.close()  # no copy may arrive after the undo
            self.work.destinations.undo()
            raise

    def fill(self) -> list[Checked]:
        """Pass 2: fill the live buffers, from the files or from separate memory; returns the second reads."""
        again = self.reader.read_rest()

        def commit() -> None:
            self.reader.uploads.close()
            self.work.destinations.commit()

        self.comm.run(commit)  # an error of one rank reaches all
        return again


def choose_memory(buffers: Sequence[Buffer], window: int, comm: Comm, *, prefer_memory: bool) -> bool:
    """Choose the memory in which live buffers are filled, such that a failed read changes no engine (collective).

    Values that can be recomputed are filled in place. The rest is filled in separate memory, if ``prefer_memory`` is
    set and every machine has enough, and copied after every rank has agreed.

    Args:
        buffers: all of this rank's.
        window: bytes of memory that reading needs in addition.

    Returns:
        True, on every rank, if one pass over the files suffices. Otherwise a second pass fills the rest.
    """
    others = comm.run(lambda: [buffer for buffer in buffers if buffer.uncommitted or not buffer.fill_in_place()])
    if not comm.any_of(np.array([not all(buffer.uncommitted for buffer in others)]))[0]:
        return True
    is_enough = prefer_memory and has_memory(others, window, comm)
    for buffer in others:
        if is_enough and not buffer.uncommitted:
            buffer.stage_aside()
    return is_enough


def has_memory(buffers: Sequence[Buffer], window: int, comm: Comm) -> bool:
    """Return True if every machine has memory to fill the live ones of these buffers separately (collective)."""
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
            logger.info("not enough memory to stage the engine's buffers: a second pass reads them")
        return False
    return True


def negotiate(
    wants: Wants, index: AtomicIndex, comm: Comm, sizes: ReadSizes, same_node: SameNode | None = None
) -> LoadPlan:
    """Exchange the wants of all ranks and plan the reads (collective).

    Args:
        wants: of this rank.
        same_node: ranks that see each other's staging memory.

    Raises:
        UcpError: a want cannot be located; the same on every rank.
    """
    records = index.stored.records
    blocks = Blocks.of(records, sizes.block, comm.size, index.stored.access)
    mask = np.zeros(len(records), np.bool_)

    def claim() -> tuple[list[Table], list[list[Read]]]:
        claims = list_claims(wants.wants, sizes.block)
        mask[[claim.record for claim in claims]] = True
        return address_claims(claims, blocks)

    tables, addressed = comm.run(claim)
    touched = np.flatnonzero(comm.any_of(mask))
    place, asked = comm.rank if same_node is None else int(np.argmax(same_node)), comm.swap_tables(tables)
    decision = comm.run(
        lambda: make_owner_plan(asked, blocks, blocks.owned(comm.rank, touched), sizes, same_node, place)
    )
    answers = comm.swap_tables(decision.answers)
    plan = comm.run(lambda: make_plan(addressed, answers, decision, comm.rank, Records.of(records).files))
    return plan.align(comm.gather(plan.count_exchanges(sizes.share)))
