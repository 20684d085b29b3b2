"""How bytes reach the memory of a GPU: from page-locked memory, on streams beside the one that trains."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..io.memory import Mark, ScratchPool, allocate_large
from .destinations import TensorSink

logger = logging.getLogger("deepspeed_ucp")

_LOCKED = 32 << 20
"""Bytes of page-locked memory that are asked for at once; torch rounds what it is asked for up to a power of two."""


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

    def close(self) -> None:
        """Wait for all copies, and give the pool's memory back."""
        self.finish()
        self.pool.clear()


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
        self.device, self.pieces = device, 2 * threads
        self.pool = ScratchPool(self._allocate, self._record, most=self.pieces)
        self._streams = deque[Any]()  # lent to one thread after another: torch has 32, and keeps memory for each
        self._left, self._is_locked, self._lock = memoryview(b""), True, threading.Lock()

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        try:
            stream = self._streams.pop()
        except IndexError:
            stream = torch.cuda.Stream(self.device)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                yield
        finally:
            self._streams.append(stream)

    def begin(self) -> None:
        torch.cuda.synchronize(self.device)

    def finish(self) -> None:
        super().finish()
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        super().close()
        self._left = memoryview(b"")
        _empty_cache()

    def _allocate(self, nbytes: int) -> memoryview:
        """A piece of what is asked for at once."""
        with self._lock:
            if self._left.nbytes < nbytes:
                self._left = self._lock_pages(max(min(_LOCKED, self.pieces * nbytes), nbytes))
            piece, self._left = self._left[:nbytes], self._left[nbytes:]
            return piece

    def _lock_pages(self, nbytes: int) -> memoryview:
        """Page-locked memory, or plain memory where the system locks none: its copies are done when they are told."""
        if self._is_locked:
            try:
                return _allocate_pinned(nbytes)
            except RuntimeError as error:
                self._is_locked = False
                logger.warning("no page-locked memory for copies to %s, which take longer: %s", self.device, error)
        return allocate_large(nbytes)

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


def _empty_cache() -> None:
    """Have torch give back the page-locked memory that nobody uses, where its release can."""
    public = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    empty = public or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
