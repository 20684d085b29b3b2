"""How bytes reach the memory of a GPU: from page-locked memory, on streams beside the one that trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

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

    CUDA's current device is each thread's own, and number 0 in a new one: whatever is told here names the device. A
    stream or an event of another one would say nothing of the copies, and memory be lent before they are done.

    Args:
        device: of all destinations that are not the host's.
    """

    go_on = True

    def __init__(self, threads: int, device: torch.device) -> None:
        self.device = device
        self.pool = ScratchPool(_allocate_pinned, self._record, most=2 * threads)

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream(self.device)):
            yield

    def begin(self) -> None:
        torch.cuda.synchronize(self.device)

    def finish(self) -> None:
        super().finish()
        torch.cuda.synchronize(self.device)

    def _record(self) -> Mark:
        """The end of what the calling thread has told its stream to do so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event


def choose_uploads(sinks: Iterable[TensorSink], threads: int) -> Uploads:
    """As the destinations need them; memory of several GPUs is copied to at once, from memory that is not locked."""
    devices = {memory.device for sink in sinks if (memory := sink.buffer.memory).device.type == "cuda"}
    return GpuUploads(threads, devices.pop()) if len(devices) == 1 else Uploads()


def _allocate_pinned(nbytes: int) -> memoryview:
    return memoryview(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy())
