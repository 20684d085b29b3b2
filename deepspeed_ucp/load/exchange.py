"""Carries a plan out: reads, checksums, staging memory and the exchange between ranks, in two passes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..atoms import AtomicIndex
from ..comm import Comm
from ..config import UniversalConfig
from ..errors import CheckpointError, UcpError
from ..io.checksum import Checked
from ..io.memory import Scratch
from ..io.read import JOINED, MemorySink, RecordReader, Sink
from ..io.store import count_readers
from ..io.threads import count_threads
from ..plan import Claim, LoadPlan, Request, Send
from ..plan.claims import STAGE
from ..plan.rounds import BLOCK
from ..stream.checks import Checks
from .destinations import Destinations

logger = logging.getLogger("deepspeed_ucp")

Bytes = npt.NDArray[Any]

_ATTEMPTS = 3
_PAUSE = 0.2
"""Seconds before the second attempt; each further pause is a second longer."""


class CollectiveReader:
    """Reads what one rank's plan says, together with the other ranks.

    Args:
        into: where bytes go, and what is zeroed first.
        plan: of this rank.
        config: window, threads, verification.

    Attributes:
        checks: of what pass 1 has read.
        files: by path the bytes read of it and the seconds that its threads waited for them.
    """

    def __init__(
        self, index: AtomicIndex, into: Destinations, plan: LoadPlan, comm: Comm, config: UniversalConfig
    ) -> None:
        self.index, self.into, self.plan, self.comm = index, into, plan, comm
        self.sinks = into.sinks
        window = config.window_mb << 20
        threads = config.threads or count_readers(index.run.state_file, default_threads())
        self.threads = min(threads, max(window // (4 * BLOCK), 1))
        self.joined = max(min(JOINED, window // (2 * self.threads)), BLOCK)
        self.checksum = config.verify == "crc"
        self.two_passes = self.checksum and not all(sink.fresh for sink in into.sinks)
        self.pinned = any(sink.buffer.memory.device.type == "cuda" for sink in into.sinks)
        self.stage = Scratch()
        self.checks = Checks()
        self.files: dict[str, tuple[int, float]] = {}

    def read_fresh(self) -> list[Checked]:
        """Pass 1: fresh memory is filled, everything is checksummed; collective.

        Without checksums only what fresh memory needs is read.
        """
        read = self._run_pass(fresh=True, everything=self.checksum)
        self.checks.add(read)
        return read

    def fill_live(self) -> list[Checked]:
        """Pass 2: the live buffers; collective. Their bytes have to be the ones that were verified.

        What cannot be read is tried again: storage over a network may fail for a moment.

        Raises:
            UcpError: some of it cannot be read, or a file changed in between; the buffers hold a part of it then.
        """
        for attempt in range(_ATTEMPTS - 1):
            try:
                return self._fill_live()
            except UcpError as error:  # the same on every rank
                logger.warning("reading into the engine's buffers failed, trying again: %s", error)
                time.sleep(attempt + _PAUSE)
        return self._fill_live()

    def _fill_live(self) -> list[Checked]:
        read = self._run_pass(fresh=False, everything=False)
        self.comm.run(lambda: self._compare(read))
        return read

    def _compare(self, again: Sequence[Checked]) -> None:
        """What pass 2 has read is what was verified."""
        if not self.checksum:
            return
        changed = set(again) - set(self.checks.read)
        if changed:
            path = self.index.stored.files[self.index.stored.records[min(changed).record].file].path
            raise CheckpointError(f"{path}: was written to while it was being loaded.")

    def _run_pass(self, *, fresh: bool, everything: bool) -> list[Checked]:
        with self._open_reader() as reader:
            direct = [r for r in self.plan.direct if everything or self._feeds(r, fresh)]
            checks = self.comm.run(lambda: self._begin(reader, direct, fresh))
            arrived = partial(self._scatter, (), memoryview(b""))  # nothing has come yet
            for each, step in [(one, step) for one in self.plan.rounds for step in range(one.steps)]:
                sends, claims = each.pick_step(self.comm.rank, fresh, step)
                reads = [] if step else each.reads if everything else each.pick_reads(fresh)
                work = partial(self._take_step, reader, arrived, reads, fresh, each.staged, sends)
                more, packed = self.comm.run(work)
                checks += more
                arrived = partial(self._scatter, claims, self._swap(packed, sends, claims))
            self.comm.run(arrived)
            self._note_files(reader)
        return checks

    def _note_files(self, reader: RecordReader) -> None:
        for number, (nbytes, seconds) in reader.spent.items():
            path = self.index.stored.files[number].path
            before = self.files.get(path, (0, 0.0))
            self.files[path] = before[0] + nbytes, before[1] + seconds

    def _open_reader(self) -> RecordReader:
        stored, allocate = self.index.stored, _allocate_pinned if self.pinned else None
        options: dict[str, Any] = {"again": self._is_read_again, "joined": self.joined}
        return RecordReader(stored.records, stored.files, checksum=self.checksum, allocate=allocate, **options)

    def _is_read_again(self, request: Request) -> bool:
        """Whether pass 2 reads some of it: live buffers', or staged for some rank's."""
        return self.two_passes and any(
            part.buffer == STAGE or (part.buffer >= 0 and not self.sinks[part.buffer].fresh) for part in request.parts
        )

    def _begin(self, reader: RecordReader, requests: Sequence[Request], fresh: bool) -> list[Checked]:
        self.into.zero_blanks(fresh=fresh)
        return self._read(reader, requests, fresh)

    def _take_step(
        self,
        reader: RecordReader,
        arrived: Callable[[], None],
        reads: Sequence[Request],
        fresh: bool,
        staged: int,
        sends: Sequence[Sequence[Send]],
    ) -> tuple[list[Checked], Bytes]:
        """What a rank does between two exchanges: take what came, read, and pack what goes."""
        arrived()
        stage = self.stage.take(staged)
        return self._read(reader, reads, fresh, MemorySink(stage)), _pack(stage, sends)

    def _feeds(self, request: Request, fresh: bool) -> bool:
        """Whether some of the request's bytes go to fresh memory, or to live buffers."""
        return any(part.buffer >= 0 and self.sinks[part.buffer].fresh == fresh for part in request.parts)

    def _read(
        self, reader: RecordReader, requests: Sequence[Request], fresh: bool, stage: Sink | None = None
    ) -> list[Checked]:
        if self.pinned:  # the threads copy on the default stream
            torch.cuda.synchronize()
        sinks: list[Sink | None] = [sink if sink.fresh == fresh else None for sink in self.sinks]
        return reader.read_parallel(requests, [*sinks, stage, None], self.threads)  # STAGE and DISCARD are the last

    def _swap(self, packed: Bytes, sends: Sequence[Sequence[Send]], claims: Sequence[Sequence[Claim]]) -> memoryview:
        """Send bytes, in rank order, to those who claimed them; what came; collective."""
        counts = [[sum(one.nbytes for one in ones) for ones in each] for each in (sends, claims)]
        return memoryview(self.comm.swap(packed, *counts))

    def _scatter(self, claims: Sequence[Sequence[Claim]], data: memoryview) -> None:
        """Take bytes that came from other ranks, in the order of the claims that they answer."""
        position = 0
        for part in (part for one in claims for claim in one for part in claim.parts):
            self.sinks[part.buffer].store(part, data[position : position + part.nbytes])
            position += part.nbytes


def _pack(stage: memoryview, sends: Sequence[Sequence[Send]]) -> Bytes:
    """What is sent, one piece behind the other."""
    nbytes = sum(send.nbytes for one in sends for send in one)
    packed, staged = np.frombuffer(Scratch().take(nbytes), np.uint8), np.frombuffer(stage, np.uint8)
    position = 0
    for send in (send for one in sends for send in one):
        shape, strides = (send.count, send.run), (send.step, 1)
        rows = np.lib.stride_tricks.as_strided(staged[send.position :], shape, strides)
        packed[position : position + send.nbytes].reshape(shape)[:] = rows
        position += send.nbytes
    return packed


def _allocate_pinned(nbytes: int) -> memoryview:
    """Page-locked memory, where bytes are copied to a GPU."""
    return memoryview(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy())


def default_threads() -> int:
    """Reading threads per rank."""
    return count_threads(4, 8, 32)
