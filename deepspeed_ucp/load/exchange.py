"""Executes plans, one per pass: reads, checksums, staging memory and the exchange between ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..comm import Comm
from ..config import UniversalConfig
from ..errors import CheckpointError, UcpError, clear_frames
from ..io.checksum import Checked
from ..io.filesystems import count_readers
from ..io.memory import LargePages, Scratch
from ..io.read import JOINED, MemorySink, RecordReader, Sink
from ..io.threads import run_threads
from ..model import AtomicIndex
from ..plan import Claim, LoadPlan, ReadSizes, Request, Send
from ..plan.rounds import BLOCK
from ..stream.checks import Checks
from ..stream.copies import CopyReader
from .destinations import Destinations
from .uploads import choose_uploads

logger = logging.getLogger("deepspeed_ucp")

Bytes = npt.NDArray[Any]
Sinks = Sequence[Sink | None]
"""The sinks that a pass fills, by number; None for the others."""

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
        again = (request for plan in passes[1:] for request in plan.requests if self.checksum)
        # The page cache keeps the bytes that the second pass reads again.
        self.again = {(request.record, request.offset) for request in again}
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
        steps = [(number, step) for number, each in enumerate(plan.rounds) for step in range(each.steps)]
        shares = self._share_out(plan.direct, len(steps) + 1)
        # Bytes for other sinks are read for their checksums.
        sinks = self.destinations.pick_sinks(uncommitted=uncommitted)
        checks, arrived = list[Checked](), list[_Arrived]()

        def begin() -> None:
            self.destinations.zero_blanks(uncommitted=uncommitted)
            self.uploads.begin()

        def is_read_again(request: Request) -> bool:
            return (request.record, request.offset) in self.again

        self.comm.run(begin)
        pool, joined = self.uploads.pool, self.joined
        with CopyReader(
            self.index.stored, checksum=self.checksum, pool=pool, again=is_read_again, joined=joined
        ) as reader:
            for turn, (number, step) in enumerate(steps):
                each = plan.rounds[number]
                requests = [*(() if step else each.reads), *shares[turn]]
                sends, claims = each.select_exchange(self.comm.rank, step, self.same_node)
                work = partial(self._take_step, reader, requests, arrived, sinks, number, sends, claims)
                more, packed, into = self.comm.run(work)
                checks += more
                arrived = list(_list_sent(claims, self._swap(packed, sends, claims, into)))
                for peer, place, claim in () if step else each.list_local_copies(self.same_node):
                    arrived.append(_Arrived(claim, self._find_stage(peer, number)[place:], claim.step))
            checks += self.comm.run(partial(self._end, reader, shares[-1], arrived, sinks))
            for path, (nbytes, seconds) in reader.spent.items():
                before = self.files.get(path, (0, 0.0))
                self.files[path] = before[0] + nbytes, before[1] + seconds
        return checks

    def _share_out(self, direct: Sequence[Request], turns: int) -> list[Sequence[Request]]:
        """Distribute the direct reads over the turns.

        On one machine all turns get some, and storage stays busy while staged bytes are copied. Among several machines
        each exchange waits for the slowest read of all ranks: the direct reads come after the last exchange.
        """
        if self.is_one_machine:
            return [direct[len(direct) * turn // turns : len(direct) * (turn + 1) // turns] for turn in range(turns)]
        return [*([] for _ in range(turns - 1)), direct]

    def _end(
        self, reader: RecordReader, requests: Sequence[Request], arrived: Sequence[_Arrived], sinks: Sinks
    ) -> list[Checked]:
        checks = self._work(reader, requests, arrived, sinks)
        self.uploads.finish()
        return checks

    def _take_step(
        self,
        reader: RecordReader,
        requests: Sequence[Request],
        arrived: Sequence[_Arrived],
        sinks: Sinks,
        number: int,
        sends: Sequence[Sequence[Send]],
        claims: Sequence[Sequence[Claim]],
    ) -> tuple[list[Checked], Bytes, Bytes]:
        """Do the work between two exchanges: read, store received bytes, pack bytes to send, make room to receive.

        Rounds alternate between the two halves of the staging memory. Before a half is overwritten, every rank has
        confirmed that it has copied the bytes of two rounds ago.
        """
        stage = self._find_stage(self.comm.rank, number)
        checks = self._work(reader, requests, arrived, sinks, MemorySink(stage))
        return checks, _pack(stage, sends), np.empty(sum(_count_bytes(claims)), np.uint8)

    def _work(
        self,
        reader: RecordReader,
        requests: Sequence[Request],
        arrived: Sequence[_Arrived],
        sinks: Sinks,
        stage: Sink | None = None,
    ) -> list[Checked]:
        """Execute reads and copies in the same threads, the reads first: they mostly wait."""
        every = [*sinks, stage, None]  # STAGE and DISCARD are the last
        checks: list[Checked] = []

        def work(turn: Iterator[list[Request] | _Arrived]) -> None:
            with self.uploads.open_stream():
                for job in turn:
                    begin = time.thread_time()
                    if isinstance(job, _Arrived):
                        nbytes = job.claim.nbytes
                        with self.uploads.pool.lend() as scratch:
                            job.store(sinks, scratch, must_copy=self.uploads.is_async)
                    else:
                        nbytes = sum(request.nbytes for request in job)
                        checks.extend(reader.read_group(job, every))
                    self.pages.note(nbytes, time.thread_time() - begin)

        jobs: list[list[Request] | _Arrived] = [*reader.group(requests), *arrived]
        if jobs:
            run_threads(jobs, work, self.threads)
        return checks

    def _find_stage(self, rank: int, number: int) -> memoryview:
        """Return the half of a rank's staging memory, on this node, that a round uses."""
        memory = self.stages[rank] or memoryview(b"")
        half = memory.nbytes // 2
        return memory[half * (number % 2) :][:half]

    def _swap(
        self, packed: Bytes, sends: Sequence[Sequence[Send]], claims: Sequence[Sequence[Claim]], into: Bytes
    ) -> memoryview:
        """Send bytes, in rank order, to ranks of other nodes that claimed them; returns received bytes (collective)."""
        if self.is_one_machine:
            return memoryview(b"")
        return memoryview(self.comm.swap(packed, _count_bytes(sends), _count_bytes(claims), into))


def _count_bytes(pieces: Sequence[Sequence[Send]] | Sequence[Sequence[Claim]]) -> list[int]:
    """Return the bytes for each rank."""
    return [sum(one.nbytes for one in ones) for ones in pieces]


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Bytes of a claim that are in memory; its runs begin ``step`` bytes apart."""

    claim: Claim
    memory: memoryview
    step: int

    def store(self, sinks: Sinks, scratch: Scratch, *, must_copy: bool) -> None:
        """Store the bytes in their sinks."""
        data, position = self.collect(scratch, must_copy=must_copy), 0
        for part in self.claim.parts:
            if (sink := sinks[part.buffer]) is not None:
                sink.store(part, data[position : position + part.nbytes])
            position += part.nbytes

    def collect(self, scratch: Scratch, *, must_copy: bool) -> memoryview:
        """Return the contiguous runs: in ``scratch``, or in place if they are contiguous there."""
        run, count = self.claim.run, self.claim.count
        if not must_copy and (count == 1 or self.step == run):
            return self.memory[: run * count]
        data = scratch.take(run * count)
        np.frombuffer(data, np.uint8).reshape(count, run)[:] = _view_runs(self.memory, run, self.step, count)
        return data


def _list_sent(claims: Sequence[Sequence[Claim]], data: memoryview) -> Iterator[_Arrived]:
    """Yield received bytes, in the order of the claims that they answer."""
    position = 0
    for claim in (claim for one in claims for claim in one):
        yield _Arrived(claim, data[position : position + claim.nbytes], claim.run)
        position += claim.nbytes


def _pack(stage: memoryview, sends: Sequence[Sequence[Send]]) -> Bytes:
    """Concatenate the bytes to send."""
    nbytes = sum(send.nbytes for one in sends for send in one)
    packed, position = Scratch().take(nbytes), 0
    for send in (send for one in sends for send in one):
        rows = _view_runs(stage[send.position :], send.run, send.step, send.count)
        np.frombuffer(packed[position : position + send.nbytes], np.uint8).reshape(rows.shape)[:] = rows
        position += send.nbytes
    return np.frombuffer(packed, np.uint8)


def _view_runs(memory: memoryview, run: int, step: int, count: int) -> Bytes:
    """View runs that begin ``step`` bytes apart as [count, run] bytes."""
    return np.lib.stride_tricks.as_strided(np.frombuffer(memory, np.uint8), (count, run), (step, 1))
