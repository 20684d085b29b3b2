"""How bytes reach the memory of a GPU: from page-locked memory, on streams beside the one that trains."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from ..io.memory import Mark, ScratchPool
from .destinations import TensorSink


class Uploads:
    """Copies of memory alone: what is told to be copied has been copied.

    Attributes:
        pool: memory that bytes are read into before they are copied.
        go_on: copies go on when they have been told; then they may be of the pool's memory alone.
    """

    go_on = False

    def __init__(self) -> None:
        self.pool = ScratchPool()

    def open_stream(self) -> AbstractContextManager[object]:
        """What the calling thread copies inside goes its own way."""
        return nullcontext()

    def begin(self) -> None:
        """Wait for what others do to the destinations."""

    def finish(self) -> None:
        """Wait for all copies."""
        self.pool.settle()


class GpuUploads(Uploads):
    """Copies to a GPU while the next bytes are read.

    Page-locked memory is lent again when the copies from it are done. There is twice as much of it as there are
    threads, so that a thread reads into one piece while another one's bytes travel.
    """

    go_on = True

    def __init__(self, threads: int) -> None:
        self.pool = ScratchPool(_allocate_pinned, _record, most=2 * threads)

    def open_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream())

    def begin(self) -> None:
        torch.cuda.synchronize()

    def finish(self) -> None:
        super().finish()
        torch.cuda.synchronize()


def choose_uploads(sinks: Iterable[TensorSink], threads: int) -> Uploads:
    """As the destinations need them."""
    on_gpu = any(sink.buffer.memory.device.type == "cuda" for sink in sinks)
    return GpuUploads(threads) if on_gpu else Uploads()


def _allocate_pinned(nbytes: int) -> memoryview:
    return memoryview(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy())


def _record() -> Mark:
    """The end of what the calling thread has told its stream to do so far."""
    event = torch.cuda.Event()
    event.record()
    return event
