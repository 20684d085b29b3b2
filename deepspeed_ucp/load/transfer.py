"""Transfer a checkpoint's bytes into a rank's buffers: plans, passes, checks."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..comm import Comm
from ..config import UniversalConfig
from ..errors import CheckpointError, UcpError, clear_frames
from ..io.memory import LargePages, Scratch, identify_host, measure_available, share_memory
from ..io.paths import count_readers
from ..io.read import JOINED, Checked, MemorySink, RecordReader, Sink
from ..io.threads import run_threads
from ..model.index import AtomicIndex
from ..model.records import Read
from ..plan.locate import list_claims
from ..plan.rounds import (
    BLOCK,
    MIN_DIRECT,
    WINDOW_PARTS,
    Answers,
    Blocks,
    LoadPlan,
    SameNode,
    Table,
    make_owner_plan,
    make_plan,
    split_claims_by_owner,
)
from ..plan.wants import Wants
from ..stream.duplicates import check_overlaps, check_replicas, check_samples
from ..stream.reader import AtomReader, verify_reads
from .destinations import Buffer, FillPlan, choose_device_copies

logger = logging.getLogger("deepspeed_ucp")

Bytes = npt.NDArray[Any]
Sinks = Sequence[Sink | None]
"""The sinks that a pass fills, by number; None for the others."""

Received = tuple[Read, memoryview, int]
"""A claim, memory that begins with its bytes, and the bytes between the starts of its runs there."""

MEMORY_FRACTION = 0.75
"""Share of a machine's free memory that a load may use for the bytes that it reads, fresh optimizer states included."""

_ATTEMPTS = 3
_PAUSE = 0.2
"""Seconds before the second attempt; each further pause is a second longer."""


class Transfer:
    """One rank's part of a load.

    Construction, then :meth:`read`, :meth:`verify` and :meth:`fill` are collective.

    Args:
        round_bytes: maximum bytes that a round stages or sends, if it has several blocks; default: by the window.
        block, min_direct: as :data:`~..plan.rounds.BLOCK` and :data:`~..plan.rounds.MIN_DIRECT`.
        prefer_memory: prefer separate memory to a second pass, for live buffers that cannot be filled in place.

    Attributes:
        staging: each rank's staging memory, for two rounds; None for ranks whose memory is not visible.
        passes: the plan of each pass; a second one fills what the first leaves out.
        checks: of the bytes that pass 1 has read.
        files: path → bytes read, and seconds that the threads waited for them.
    """

    def __init__(
        self,
        fill_plan: FillPlan,
        comm: Comm,
        config: UniversalConfig,
        *,
        round_bytes: int = 0,
        block: int = BLOCK,
        min_direct: int = MIN_DIRECT,
        prefer_memory: bool = False,
    ) -> None:
        window = config.window_mb << 20
        self.fill_plan, self.comm, self.checksum = fill_plan, comm, config.verify == "crc"
        one_pass = choose_memory(fill_plan.buffers, window, comm, prefer_memory=prefer_memory)
        round_bytes = round_bytes or max(window // WINDOW_PARTS, block)
        self.staging = share_memory(2 * round_bytes, comm.rank, comm.gather)
        self.same_node = np.array([memory is not None for memory in self.staging], np.bool_)
        self.is_one_machine = bool(self.same_node.all())  # the same on every rank
        self.plan = negotiate(
            fill_plan.wants, fill_plan.index, comm, round_bytes, self.same_node, block=block, min_direct=min_direct
        )
        self.passes = self._plan_passes(one_pass=one_pass)
        self.checks: list[Checked] = []
        self.files: dict[str, tuple[int, float]] = {}
        comm.run(lambda: self._configure(config.threads, window))  # an error of one rank reaches all

    def _plan_passes(self, *, one_pass: bool) -> list[LoadPlan]:
        """Return the plan of each pass (collective if there are two).

        Pass 1 reads all bytes if checksums are on, else those that it stores; pass 2 reads those for live memory.
        """
        plan = self.plan
        sinks = [self.fill_plan.pick_sinks(is_first_pass=is_first_pass) for is_first_pass in (True, False)]
        first, rest = ([sink is not None for sink in filled] for filled in sinks)
        if one_pass:
            return [plan if self.checksum else plan.filter_for_sinks(first)]
        needs = self.comm.run(lambda: plan.list_needs(first, rest))
        needed = self.comm.swap_tables(needs) if needs else []  # every rank has as many rounds
        now, then = ([columns[:, number] for columns in needed] for number in (0, 1))
        return [plan.filter_for_sinks(first, now, keep_reads=self.checksum), plan.filter_for_sinks(rest, then)]

    def _configure(self, threads: int, window: int) -> None:
        """Choose threads and sizes, allocate separate memory, list ranges to reread."""
        wanted = threads or count_readers(self.fill_plan.index.state_file)
        self.threads = min(wanted, max(window // (4 * BLOCK), 1))
        # Each thread buffers a read that is converted on the way. All threads share half of the window; staging has
        # the other half.
        self.joined = max(min(JOINED, window // (2 * self.threads)), BLOCK)
        self.device_copies = choose_device_copies(self.fill_plan.sinks, self.threads)
        self.pages = LargePages()
        for memory in (buffer.memory for buffer in self.fill_plan.buffers if buffer.is_fresh_host_memory):
            self.pages.add(memory.data_ptr(), memory.nbytes)
        # The page cache keeps the bytes that the second pass reads again.
        self.reread = {(read.record, read.offset) for plan in self.passes[1:] for read in plan.reads if self.checksum}

    def read(self) -> list[Checked]:
        """Run pass 1: read and verify; fill what may change before the verification ends."""
        self.checks = self._run_pass(self.passes[0], is_first_pass=True)
        return self.checks

    def verify(self) -> int:
        """Compare the read bytes with the saved checksums, and replicas with each other.

        Returns:
            Bytes that this rank has read in addition for the records' checksums.

        Raises:
            CheckpointError: bytes are damaged, or belong to another run.
            MismatchError: replicas differ.
        """
        index, comm = self.fill_plan.index, self.comm
        nbytes = verify_reads(self.checks, index, comm, threads=self.threads) if self.checksum else 0
        check_replicas([index.atoms[key] for key in self.fill_plan.replicated], index, comm)
        check_overlaps([(index.atoms[key], layout) for key, layout in self.fill_plan.overlapping], index, comm)
        if self.checksum:
            check_samples(index, self.fill_plan.touched, comm)
        return nbytes

    def undo(self) -> None:
        """Restore the values that :meth:`read` has overwritten in place."""
        self.device_copies.close()  # no copy may arrive after the undo
        self.fill_plan.undo()

    def fill(self) -> list[Checked]:
        """Run pass 2, if any; return its checksums. Copy separate memory to the engine."""
        second = self._run_second_pass()

        def commit() -> None:
            self.device_copies.close()
            self.fill_plan.commit()

        self.comm.run(commit)  # an error of one rank reaches all
        return second

    def _run_second_pass(self) -> list[Checked]:
        """Fill live memory from the files after all ranks have verified them (collective).

        A failed pass is repeated, because network storage may fail temporarily.

        Raises:
            UcpError: bytes cannot be read, or a file changed in between; the buffers are partly filled then.
        """
        for attempt in range(_ATTEMPTS - 1):
            try:
                return self._try_second_pass()
            except UcpError as error:  # the same on every rank
                logger.warning("a read into the engine's buffers failed, retrying: %s", error)
                clear_frames(error)
                time.sleep(attempt + _PAUSE)
        return self._try_second_pass()

    def _try_second_pass(self) -> list[Checked]:
        """Run pass 2 once, and check that it has read the bytes that pass 1 verified."""
        read = [check for plan in self.passes[1:] for check in self._run_pass(plan, is_first_pass=False)]

        def compare() -> None:
            if changed := set(read) - set(self.checks):
                index = self.fill_plan.index
                path = index.files[index.records.files[min(changed).record]].path
                raise CheckpointError("was written to while it was being loaded.", path=path)

        if self.passes[1:] and self.checksum:
            self.comm.run(compare)
        return read

    def _run_pass(self, plan: LoadPlan, *, is_first_pass: bool) -> list[Checked]:
        """Execute the plan of a pass.

        Bytes for the sinks of the other pass are only checksummed. Staged bytes stay at their announced offsets until
        every rank has copied them.
        """
        exchanges = [
            (number, exchange) for number, round_ in enumerate(plan.rounds) for exchange in range(round_.exchanges)
        ]
        batches = self._distribute(plan.own_reads, len(exchanges) + 1)
        sinks = self.fill_plan.pick_sinks(is_first_pass=is_first_pass)
        checks, received = list[Checked](), list[Received]()

        def begin() -> None:
            self.fill_plan.zero_blanks(is_first_pass=is_first_pass)
            self.device_copies.wait_for_earlier()

        def prepare(turn: int) -> tuple[Bytes, list[list[Read]], list[list[Read]], Bytes]:
            """Read, store received bytes, and pack bytes for other ranks.

            Rounds alternate between the two halves of the staging memory. Before a half is overwritten, every rank has
            confirmed that it has copied the bytes of two rounds ago.

            Returns:
                The packed bytes, the reads of staging memory that they answer, this rank's claims, and room to receive.
            """
            number, exchange = exchanges[turn]
            round_, stage = plan.rounds[number], self._find_staging(self.comm.rank, number)
            sends, claims = round_.select_exchange(self.comm.rank, exchange, self.same_node)
            reads = [*(() if exchange else round_.reads), *batches[turn]]
            checks.extend(self._execute(reader, reads, received, sinks, MemorySink(stage)))
            return _pack(stage, sends), sends, claims, np.empty(sum(_count_bytes(claims)), np.uint8)

        def end() -> list[Checked]:
            rest = self._execute(reader, batches[-1], received, sinks)
            self.device_copies.finish()
            return rest

        self.comm.run(begin)
        again, pool = (lambda read: (read.record, read.offset) in self.reread), self.device_copies.pool
        with AtomReader(
            self.fill_plan.index, checksum=self.checksum, again=again, pool=pool, joined=self.joined
        ) as reader:
            for turn, (number, exchange) in enumerate(exchanges):
                packed, sends, claims, memory = self.comm.run(partial(prepare, turn))
                received = list(_split_received(claims, self._swap(packed, sends, claims, memory)))
                for peer, offset, claim in () if exchange else plan.rounds[number].list_local_copies(self.same_node):
                    received.append((claim, self._find_staging(peer, number)[offset:], claim.step))
            checks += self.comm.run(end)
            for path, (nbytes, seconds) in reader.spent.items():
                before = self.files.get(path, (0, 0.0))
                self.files[path] = before[0] + nbytes, before[1] + seconds
        return checks

    def _distribute(self, own_reads: Sequence[Read], turns: int) -> list[Sequence[Read]]:
        """Distribute the own reads over the turns.

        On one machine all turns get some, and storage stays busy while staged bytes are copied. Among several machines
        each exchange waits for the slowest read of all ranks: the own reads come after the last exchange.
        """
        if self.is_one_machine:
            limits = [len(own_reads) * turn // turns for turn in range(turns + 1)]
            return [own_reads[low:high] for low, high in pairwise(limits)]
        return [*([] for _ in range(turns - 1)), own_reads]

    def _execute(
        self,
        reader: RecordReader,
        reads: Sequence[Read],
        received: Sequence[Received],
        sinks: Sinks,
        stage: Sink | None = None,
    ) -> list[Checked]:
        """Execute reads, then copies of received claims, in one pool of threads."""
        with_stage = [*sinks, stage]  # STAGING is the last
        checks: list[Checked] = []

        def work(turn: Iterator[list[Read] | Received]) -> None:
            with self.device_copies.open_stream():
                for item in turn:
                    begin = time.thread_time()
                    if isinstance(item, list):
                        nbytes = sum(read.nbytes for read in item)
                        checks.extend(reader.read_group(item, with_stage))
                    else:
                        nbytes = item[0].nbytes
                        self._store_claim(*item, sinks)
                    self.pages.note(nbytes, time.thread_time() - begin)

        items: list[list[Read] | Received] = [*reader.group(reads), *received]
        if items:
            run_threads(items, work, self.threads)
        return checks

    def _store_claim(self, claim: Read, memory: memoryview, step: int, sinks: Sinks) -> None:
        """Copy a claim's bytes to its sinks; its runs begin ``step`` bytes apart."""
        with self.device_copies.pool.lend() as scratch:
            data = memory[: claim.nbytes]
            if self.device_copies.is_async or not (claim.count == 1 or step == claim.run):
                data = scratch.take(claim.nbytes)
                rows = np.frombuffer(data, np.uint8).reshape(claim.count, claim.run)
                rows[:] = _view_runs(memory, claim.run, step, claim.count)
            for item in claim.items:
                if (sink := sinks[item.destination]) is not None:
                    sink.store(item, data[: item.nbytes])
                data = data[item.nbytes :]

    def _find_staging(self, rank: int, number: int) -> memoryview:
        """Return a rank's half of staging memory for round ``number``; empty if unseen."""
        memory = self.staging[rank] or memoryview(b"")
        half = memory.nbytes // 2
        return memory[half * (number % 2) :][:half]

    def _swap(
        self, packed: Bytes, sends: Sequence[Sequence[Read]], claims: Sequence[Sequence[Read]], memory: Bytes
    ) -> memoryview:
        """Send packed bytes to ranks that do not see the staging memory (collective).

        Returns:
            The received bytes.
        """
        if self.is_one_machine:
            return memoryview(b"")
        return memoryview(self.comm.swap(packed, _count_bytes(sends), _count_bytes(claims), memory))


def _count_bytes(reads: Sequence[Sequence[Read]]) -> list[int]:
    return [sum(read.nbytes for read in row) for row in reads]


def _split_received(claims: Sequence[Sequence[Read]], data: memoryview) -> Iterator[Received]:
    """Yield this rank's claims with their bytes, which arrive in this order."""
    for claim in chain.from_iterable(claims):
        yield claim, data[: claim.nbytes], claim.run
        data = data[claim.nbytes :]


def _pack(stage: memoryview, sends: Sequence[Sequence[Read]]) -> Bytes:
    """Copy the bytes of reads of staging memory, one read after the other."""
    packed = np.frombuffer(Scratch().take(sum(_count_bytes(sends))), np.uint8)
    position = 0
    for send in chain.from_iterable(sends):
        rows = _view_runs(stage[send.offset :], send.run, send.step, send.count)
        packed[position : position + send.nbytes].reshape(rows.shape)[:] = rows
        position += send.nbytes
    return packed


def _view_runs(memory: memoryview, run: int, step: int, count: int) -> Bytes:
    """View runs that begin ``step`` bytes apart as [count, run] bytes."""
    return np.lib.stride_tricks.as_strided(np.frombuffer(memory, np.uint8), (count, run), (step, 1))


def choose_memory(buffers: Sequence[Buffer], window: int, comm: Comm, *, prefer_memory: bool) -> bool:
    """Choose in which memory and pass each buffer is filled (collective).

    A failed read changes no engine. Values that can be recomputed are filled in place. The rest is filled in separate
    memory and copied at the end, if ``prefer_memory`` is set and every machine has enough; otherwise pass 2 fills it.

    Args:
        window: bytes of memory that reading needs in addition.

    Returns:
        True, on every rank, if no rank needs pass 2.
    """
    others = comm.run(lambda: [buffer for buffer in buffers if buffer.fill_first or not buffer.detect_recomputable()])
    if not comm.any_of(np.array([not all(buffer.fill_first for buffer in others)]))[0]:
        return True
    is_enough = prefer_memory and has_memory(others, window, comm)
    for buffer in others:
        if is_enough and not buffer.fill_first:
            buffer.use_separate()
    return is_enough


def has_memory(buffers: Sequence[Buffer], window: int, comm: Comm) -> bool:
    """Return True if each machine has enough memory (collective).

    It needs room for separate live buffers, new ones, and the window.
    """
    hosted = [
        buffer
        for buffer in buffers
        if not buffer.in_file and (buffer.is_separate or not buffer.fill_first or buffer.tensor.device.type == "cpu")
    ]
    answers = comm.gather(
        (identify_host(), sum(buffer.tensor.nbytes for buffer in hosted) + window, measure_available())
    )
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for host, nbytes, available in answers:
        needed[host] += nbytes
        free[host] = min(available, free.get(host, available))
    if any(needed[host] > MEMORY_FRACTION * free[host] for host in needed):
        if comm.rank == 0:
            logger.info(
                "too little free memory for a second copy of the state: the files are read twice, to verify and to fill"
            )
        return False
    return True


def negotiate(
    wants: Wants,
    index: AtomicIndex,
    comm: Comm,
    round_bytes: int,
    same_node: SameNode,
    *,
    block: int = BLOCK,
    min_direct: int = MIN_DIRECT,
) -> LoadPlan:
    """Plan this rank's reads: send claims to owners, receive answers (collective).

    Args:
        same_node: ranks that see each other's staging memory.
    """
    records = index.records
    blocks = Blocks.of(records, block, comm.size, index.access)
    mask = np.zeros(len(records), np.bool_)

    def claim() -> tuple[list[Table], list[list[Read]]]:
        claims = list_claims(wants.wants, block)
        mask[[claim.record for claim in claims]] = True
        return split_claims_by_owner(claims, blocks)

    tables, addressed = comm.run(claim)
    touched = np.flatnonzero(comm.any_of(mask))
    peer_claims, machine = comm.swap_tables(tables), int(np.argmax(same_node))

    def decide() -> tuple[LoadPlan, list[Answers]]:
        owned = blocks.owned(comm.rank, touched)
        return make_owner_plan(peer_claims, blocks, owned, round_bytes, same_node, machine, min_direct)

    owner_plan, given = comm.run(decide)
    answers = comm.swap_tables(given)
    plan = comm.run(lambda: make_plan(addressed, answers, owner_plan, comm.rank, records.files))
    return plan.align(comm.gather(plan.count_exchanges(round_bytes)))
