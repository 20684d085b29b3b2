"""Carries a plan out: reads, checksums, staging memory and the exchange between ranks, in two passes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from ..atoms import AtomicIndex
from ..comm import Comm
from ..config import UniversalConfig
from ..errors import CheckpointError
from ..io import ReadStats, read_requests
from ..io.memory import allocate
from ..plan import Claim, LoadPlan, Request, Round, Send
from .job import Job
from .negotiate import BLOCK
from .sinks import TensorSink


class Reader:
    """Reads what one rank's plan says.

    Args:
        plan: of this rank.
        config: window, threads, verification.
    """

    def __init__(self, index: AtomicIndex, job: Job, plan: LoadPlan, comm: Comm, config: UniversalConfig) -> None:
        self.index, self.job, self.plan, self.comm = index, job, plan, comm
        window = config.window_mb << 20
        self.threads = min(config.threads or default_threads(), max(window // (4 * BLOCK), 1))
        self.checksum = config.verify == "crc"
        self.pinned = any(sink.tensor.device.type == "cuda" for sink in job.sinks)
        self.stage: torch.Tensor | None = None
        self.crcs: dict[tuple[int, int], int] = {}
        """CRC32 of what pass 1 read, by record and offset."""

    def read_fresh(self) -> ReadStats:
        """Pass 1: fresh memory is filled, everything is checksummed; collective.

        Without checksums only what fresh memory needs is read.
        """
        return self._run_pass(fresh=True, everything=self.checksum)

    def fill_live(self) -> ReadStats:
        """Pass 2: the live buffers; collective. Their bytes have to be the ones that were verified.

        Raises:
            CheckpointError: a file changed in between.
        """
        return self._run_pass(fresh=False, everything=False)

    def checked(self) -> tuple[list[Request], list[int]]:
        """Requests of pass 1 and the CRC32 of each."""
        requests = [r for r in self.plan.requests if (r.record, r.offset) in self.crcs]
        return requests, [self.crcs[r.record, r.offset] for r in requests]

    def _run_pass(self, *, fresh: bool, everything: bool) -> ReadStats:
        stats = ReadStats(0, 0, [])
        with self.comm.together():
            for blank in self.job.blanks:
                if blank.fresh == fresh:
                    blank.tensor[blank.low : blank.high].zero_()
            direct = [r for r in self.plan.direct if everything or self._feeds(r, fresh)]
            stats = self._read(direct, fresh)
        for number, each in enumerate(self.plan.rounds):
            with self.comm.together():
                done = self._read(each.reads if everything else _pick_reads(each, fresh), fresh, staged=each.staged)
                stats = ReadStats(stats.nbytes + done.nbytes, stats.requests + done.requests, [])
            for step in range(each.steps):
                self._exchange(each, fresh, step)
            if number + 1 == len(self.plan.rounds):
                self.stage = None
        return stats

    def _feeds(self, request: Request, fresh: bool) -> bool:
        """Whether some of the request's bytes go to fresh memory, or to live buffers."""
        return any(part.buffer >= 0 and self.job.sinks[part.buffer].fresh == fresh for part in request.parts)

    def _read(self, requests: Sequence[Request], fresh: bool, *, staged: int = 0) -> ReadStats:
        if self.pinned:  # the threads copy on the default stream
            torch.cuda.synchronize()
        sinks: list[TensorSink | None] = [sink if sink.fresh == fresh else None for sink in self.job.sinks]
        stats = read_requests(
            requests,
            self.index.records,
            self.index.files,
            [*sinks, self._make_stage(staged)],
            threads=self.threads,
            make_scratch=self._make_scratch,
            checksum=self.checksum,
        )
        self._compare(requests, stats.crcs, first=fresh)
        return stats

    def _compare(self, requests: Sequence[Request], crcs: Sequence[int], *, first: bool) -> None:
        for request, crc in zip(requests, crcs, strict=False):
            key = request.record, request.offset
            if first:
                self.crcs[key] = crc
            elif self.crcs[key] != crc:
                raise CheckpointError(
                    "The checkpoint was written to while it was being loaded; the engine is half loaded."
                )

    def _make_scratch(self, nbytes: int) -> memoryview:
        """Scratch memory of one thread; page-locked where it is copied to a GPU."""
        return memoryview(_allocate(nbytes, self.pinned).numpy())

    def _make_stage(self, nbytes: int) -> TensorSink | None:
        if not nbytes:
            return None
        if self.stage is None or self.stage.numel() < nbytes:
            most = max(each.staged for each in self.plan.rounds)
            self.stage = _allocate(most)
        return TensorSink(self.stage, "uint8", fresh=True)

    def _exchange(self, each: Round, fresh: bool, step: int) -> None:
        """Send staged bytes to those who claimed them, and scatter what comes; collective.

        In each of a round's steps a rank sends to those whose distance from it falls to that step.
        """
        rank, size = self.comm.rank, self.comm.size
        now = [distance * each.steps // size == step for distance in range(size)]
        sends = [
            [send for send in one if send.fresh == fresh] if now[(peer - rank) % size] else []
            for peer, one in enumerate(each.sends)
        ]
        claims = [
            [claim for claim in one if claim.fresh == fresh] if now[(rank - peer) % size] else []
            for peer, one in enumerate(each.receives)
        ]
        data = self._pack(sends)
        receives = [sum(claim.nbytes for claim in one) for one in claims]
        received = self.comm.swap(data.numpy(), [sum(send.nbytes for send in one) for one in sends], receives)
        self._scatter([claim for one in claims for claim in one], memoryview(received))

    def _pack(self, sends: Sequence[Sequence[Send]]) -> torch.Tensor:
        packed = _allocate(sum(send.nbytes for one in sends for send in one))
        position = 0
        for send in (send for one in sends for send in one):
            if self.stage is None:
                raise CheckpointError("a plan sends bytes that were not staged")
            rows = self.stage.as_strided((send.count, send.run), (send.step, 1), send.position)
            packed[position : position + send.nbytes].view(send.count, send.run).copy_(rows)
            position += send.nbytes
        return packed

    def _scatter(self, claims: Sequence[Claim], data: memoryview) -> None:
        position = 0
        for claim in claims:
            for part in claim.parts:
                self.job.sinks[part.buffer].take(part, data[position : position + part.nbytes])
                position += part.nbytes


def _allocate(nbytes: int, pinned: bool = False) -> torch.Tensor:
    """Bytes of staging memory; page-locked where they are copied to a GPU."""
    if pinned or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    return torch.frombuffer(allocate(nbytes), dtype=torch.uint8)


def _pick_reads(each: Round, fresh: bool) -> list[Request]:
    """Those of a round's reads of which some bytes are sent to fresh memory, or to live buffers."""
    sends = [send for one in each.sends for send in one if send.fresh == fresh]
    lows = np.array([send.position for send in sends], np.int64)
    highs = np.array([send.position + (send.count - 1) * send.step + send.run for send in sends], np.int64)
    staged = [(read, read.parts[0].position) for read in each.reads]
    return [read for read, low in staged if ((lows < low + read.nbytes) & (highs > low)).any()]


def default_threads() -> int:
    """Reading threads per rank: four times its share of the cores, 8 to 32; most of their time is waiting."""
    cores = len(os.sched_getaffinity(0))
    told = [os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")]
    ranks = max(int(next((value for value in told if value), "1")), 1)
    return min(max(4 * cores // ranks, 8), 32)
