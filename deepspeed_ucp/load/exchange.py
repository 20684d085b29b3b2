"""Executes plans, one per pass: reads, checksums, staging memory and the exchange between ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ..comm import Comm
from ..config import UniversalConfig
from ..errors import CheckpointError, UcpError, clear_frames
from ..io.checksum import Checked
from ..io.memory import LargePages, Scratch
from ..io.paths import count_readers
from ..io.read import JOINED, MemorySink, RecordReader, Sink
from ..io.threads import run_threads
from ..model import AtomicIndex, Read
from ..plan import LoadPlan, ReadSizes
from ..plan.rounds import BLOCK
from ..stream.checks import Checks
from ..stream.reader import CopyReader
from .destinations import Destinations
from .uploads import choose_uploads

logger = logging.getLogger("deepspeed_ucp")

Bytes = npt.NDArray[Any]
Sinks = Sequence[Sink | None]
"""The sinks that a pass fills, by number; None for the others."""

Received = tuple[Read, memoryview, int]
"""A claim, memory that begins with its bytes, and the bytes between the starts of its runs there."""

_ATTEMPTS = 3
_PAUSE = 0.2
"""Seconds before the second attempt; each further pause is a second longer."""


class CollectiveReader:
    """Executes one rank's plans, together with the other ranks.

    Args:
        destinations: memory to fill, and the blanks to zero first.
        passes: this rank's plan for each pass; a second one fills what the first leaves out.
        config: window, threads, verification.
        stages: each rank's staging memory, for two rounds; None for ranks whose memory is not visible.

    Attributes:
        checks: of the bytes that pass 1 has read.
        files: path → bytes read, and seconds that the threads waited for them.
    """

    def __init__(
        self,
        index: AtomicIndex,
        destinations: Destinations,
        passes: Sequence[LoadPlan],
        comm: Comm,
        config: UniversalConfig,
        stages: Sequence[memoryview | None],
    ) -> None:
        self.index, self.destinations, self.passes, self.comm, self.stages = index, destinations, passes, comm, stages
        window = config.window_mb << 20
        threads = config.threads or count_readers(index.run.state_file)
        self.threads = ReadSizes.from_window(window).limit_threads(threads, window)
        # Each thread buffers a read that is converted on the way. All threads share half of the window; staging has
        # the other half.
        self.joined = max(min(JOINED, window // (2 * self.threads)), BLOCK)
        self.checksum = config.verify == "crc"
        self.uploads = choose_uploads(destinations.sinks, self.threads)
        self.pages = LargePages()
        for memory in (buffer.memory for buffer in destinations.buffers if buffer.is_untouched):
            self.pages.add(memory.data_ptr(), memory.nbytes)
        # The page cache keeps the bytes that the second pass reads again.
        self.again = {(read.record, read.offset) for plan in passes[1:] for read in plan.reads if self.checksum}
        self.same_node = passes[0].same_node
        self.is_one_machine = self.same_node is not None and bool(self.same_node.all())  # the same on every rank
        self.checks = Checks()
        self.files: dict[str, tuple[int, float]] = {}

    def read_first(self) -> list[Checked]:
        """Pass 1: fill uncommitted memory and checksum everything (collective)."""
        read = self._run_pass(self.passes[0], uncommitted=True)
        self.checks.add(read)
        return read

    def read_rest(self) -> list[Checked]:
        """Pass 2, if there is one: fill the engine's memory after all ranks have agreed (collective).

        Its bytes must be the verified ones. Failed reads are retried, because network storage may fail temporarily.

        Raises:
            UcpError: bytes cannot be read, or a file changed in between; the buffers are partly filled then.
        """
        for attempt in range(_ATTEMPTS - 1):
            try:
                return self._read_again()
            except UcpError as error:  # the same on every rank
                logger.warning("a read into the engine's buffers failed, retrying: %s", error)
                clear_frames(error)
                time.sleep(attempt + _PAUSE)
        return self._read_again()

    def _read_again(self) -> list[Checked]:
        read = [check for plan in self.passes[1:] for check in self._run_pass(plan, uncommitted=False)]
        if self.passes[1:] and self.checksum:
            self.comm.run(lambda: self._compare(read))
        return read

    def _compare(self, again: Sequence[Checked]) -> None:
        """Check that pass 2 has read the verified bytes."""
        changed = set(again) - set(self.checks.read)
        if changed:
            path = self.index.stored.files[self.index.stored.records[min(changed).record].file].path
            raise CheckpointError("was written to while it was being loaded.", path=path)

    def _run_pass(self, plan: LoadPlan, *, uncommitted: bool) -> list[Checked]:
        """Execute a plan; bytes for the sinks of the other pass are read for their checksums."""
        steps = [(number, step) for number, round_ in enumerate(plan.rounds) for step in range(round_.steps)]
        shares = self._share_out(plan.direct, len(steps) + 1)
        sinks = self.destinations.pick_sinks(uncommitted=uncommitted)
        checks, received = list[Checked](), list[Received]()

        def begin() -> None:
            self.destinations.zero_blanks(uncommitted=uncommitted)
            self.uploads.begin()

        def is_read_again(read: Read) -> bool:
            return (read.record, read.offset) in self.again

        self.comm.run(begin)
        options = {"checksum": self.checksum, "pool": self.uploads.pool, "again": is_read_again, "joined": self.joined}
        with CopyReader(self.index.stored, **options) as reader:
            for turn, (number, step) in enumerate(steps):
                round_ = plan.rounds[number]
                reads = [*(() if step else round_.reads), *shares[turn]]
                sends, claims = round_.select_exchange(self.comm.rank, step, self.same_node)
                work = partial(self._take_step, reader, reads, received, sinks, number, sends, claims)
                more, packed, memory = self.comm.run(work)
                checks += more
                received = list(_list_sent(claims, self._swap(packed, sends, claims, memory)))
                for peer, place, claim in () if step else round_.list_local_copies(self.same_node):
                    received.append((claim, self._find_stage(peer, number)[place:], claim.step))
            checks += self.comm.run(partial(self._end, reader, shares[-1], received, sinks))
            for path, (nbytes, seconds) in reader.spent.items():
                before = self.files.get(path, (0, 0.0))
                self.files[path] = before[0] + nbytes, before[1] + seconds
        return checks

    def _share_out(self, direct: Sequence[Read], turns: int) -> list[Sequence[Read]]:
        """Distribute the direct reads over the turns.

        On one machine all turns get some, and storage stays busy while staged bytes are copied. Among several machines
        each exchange waits for the slowest read of all ranks: the direct reads come after the last exchange.
        """
        if self.is_one_machine:
            return [direct[len(direct) * turn // turns : len(direct) * (turn + 1) // turns] for turn in range(turns)]
        return [*([] for _ in range(turns - 1)), direct]

    def _end(
        self, reader: RecordReader, reads: Sequence[Read], received: Sequence[Received], sinks: Sinks
    ) -> list[Checked]:
        """Execute the last reads and copies of a pass."""
        checks = self._work(reader, reads, received, sinks)
        self.uploads.finish()
        return checks

    def _take_step(
        self,
        reader: RecordReader,
        reads: Sequence[Read],
        received: Sequence[Received],
        sinks: Sinks,
        number: int,
        sends: Sequence[Sequence[Read]],
        claims: Sequence[Sequence[Read]],
    ) -> tuple[list[Checked], Bytes, Bytes]:
        """Do the work between two exchanges: read, store received bytes, pack bytes to send, make room to receive.

        Rounds alternate between the two halves of the staging memory. Before a half is overwritten, every rank has
        confirmed that it has copied the bytes of two rounds ago.
        """
        stage = self._find_stage(self.comm.rank, number)
        checks = self._work(reader, reads, received, sinks, MemorySink(stage))
        return checks, _pack(stage, sends), np.empty(sum(_count_bytes(claims)), np.uint8)

    def _work(
        self,
        reader: RecordReader,
        reads: Sequence[Read],
        received: Sequence[Received],
        sinks: Sinks,
        stage: Sink | None = None,
    ) -> list[Checked]:
        """Execute reads and copies in the same threads, the reads first: they mostly wait."""
        with_stage = [*sinks, stage]  # STAGE is the last
        checks: list[Checked] = []

        def work(turn: Iterator[list[Read] | Received]) -> None:
            with self.uploads.open_stream():
                for job in turn:
                    begin = time.thread_time()
                    if isinstance(job, list):
                        nbytes = sum(read.nbytes for read in job)
                        checks.extend(reader.read_group(job, with_stage))
                    else:
                        nbytes = job[0].nbytes
                        self._store(*job, sinks)
                    self.pages.note(nbytes, time.thread_time() - begin)

        jobs: list[list[Read] | Received] = [*reader.group(reads), *received]
        if jobs:
            run_threads(jobs, work, self.threads)
        return checks

    def _store(self, claim: Read, memory: memoryview, step: int, sinks: Sinks) -> None:
        """Store the bytes of a claim, whose runs begin ``step`` bytes apart in memory."""
        with self.uploads.pool.lend() as scratch:
            data = memory[: claim.nbytes]
            if self.uploads.is_async or not (claim.count == 1 or step == claim.run):
                data = scratch.take(claim.nbytes)
                rows = np.frombuffer(data, np.uint8).reshape(claim.count, claim.run)
                rows[:] = _view_runs(memory, claim.run, step, claim.count)
            for item in claim.items:
                if (sink := sinks[item.destination]) is not None:
                    sink.store(item, data[: item.nbytes])
                data = data[item.nbytes :]

    def _find_stage(self, rank: int, number: int) -> memoryview:
        """Return the half of a rank's staging memory, on this node, that a round uses."""
        memory = self.stages[rank] or memoryview(b"")
        half = memory.nbytes // 2
        return memory[half * (number % 2) :][:half]

    def _swap(
        self, packed: Bytes, sends: Sequence[Sequence[Read]], claims: Sequence[Sequence[Read]], memory: Bytes
    ) -> memoryview:
        """Send bytes, in rank order, to ranks of other nodes that claimed them; returns received bytes (collective)."""
        if self.is_one_machine:
            return memoryview(b"")
        return memoryview(self.comm.swap(packed, _count_bytes(sends), _count_bytes(claims), memory))


def _count_bytes(reads: Sequence[Sequence[Read]]) -> list[int]:
    """Return the bytes for each rank."""
    return [sum(read.nbytes for read in row) for row in reads]


def _list_sent(claims: Sequence[Sequence[Read]], data: memoryview) -> Iterator[Received]:
    """Yield received bytes, in the order of the claims that they answer."""
    for claim in chain.from_iterable(claims):
        yield claim, data[: claim.nbytes], claim.run
        data = data[claim.nbytes :]


def _pack(stage: memoryview, sends: Sequence[Sequence[Read]]) -> Bytes:
    """Concatenate the bytes to send."""
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
