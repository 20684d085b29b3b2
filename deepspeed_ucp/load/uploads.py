"""Copies to the memory of a GPU: from page-locked memory, on separate streams."""

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
"""Bytes of page-locked memory per allocation; torch rounds each up to a power of two."""


class Uploads:
    """Synchronous copies.

    Attributes:
        pool: memory for bytes that are read before they are copied.
        is_async: copies are asynchronous, and may only read the pool's memory.
    """

    is_async = False

    def __init__(self) -> None:
        self.pool = ScratchPool()

    def open_stream(self) -> AbstractContextManager[object]:
        """Context manager for the copies of the calling thread."""
        return nullcontext()

    def begin(self) -> None:
        """Wait for earlier work on the destinations."""

    def finish(self) -> None:
        """Wait for all copies."""
        self.pool.settle()

    def close(self) -> None:
        """Wait for all copies, and free the pool's memory."""
        self.finish()
        self.pool.clear()


class GpuUploads(Uploads):
    """Copies to a GPU while the next bytes are read.

    Page-locked memory is reused when the copies from it are done. There is twice as much of it as there are threads: a
    thread reads into one piece while another piece is copied.

    CUDA's current device belongs to a thread, and is number 0 in a new one: all calls name the device. A stream or an
    event of another device would not track the copies, and memory would be reused too early.

    Args:
        device: of all destinations that are not on the host.
    """

    is_async = True

    def __init__(self, threads: int, device: torch.device) -> None:
        self.device, self.pieces = device, 2 * threads
        self.pool = ScratchPool(self._allocate, self._record, most=self.pieces)
        self._streams = deque[Any]()  # reused by threads: torch has 32, and keeps memory for each
        self._free, self._is_locked, self._lock = memoryview(b""), True, threading.Lock()

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
        self._free = memoryview(b"")
        _empty_cache()

    def _allocate(self, nbytes: int) -> memoryview:
        """Cut a piece from the current allocation."""
        with self._lock:
            if self._free.nbytes < nbytes:
                self._free = self._lock_pages(max(min(_LOCKED, self.pieces * nbytes), nbytes))
            piece, self._free = self._free[:nbytes], self._free[nbytes:]
            return piece

    def _lock_pages(self, nbytes: int) -> memoryview:
        """Allocate page-locked memory, or plain memory if the system locks none: its copies are synchronous."""
        if self._is_locked:
            try:
                return _allocate_pinned(nbytes)
            except RuntimeError as error:
                self._is_locked = False
                logger.warning("no page-locked memory for copies to %s, which take longer: %s", self.device, error)
        return allocate_large(nbytes)

    def _record(self) -> Mark:
        """Record the end of the calling thread's copies so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event


def choose_uploads(sinks: Iterable[TensorSink], threads: int) -> Uploads:
    """Choose by the destinations; memory of several GPUs is copied to synchronously, from memory that is not locked."""
    devices = {memory.device for sink in sinks if (memory := sink.buffer.memory).device.type == "cuda"}
    return GpuUploads(threads, devices.pop()) if len(devices) == 1 else Uploads()


def _allocate_pinned(nbytes: int) -> memoryview:
    return memoryview(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy())


def _empty_cache() -> None:
    """Make torch free unused page-locked memory, if its release can."""
    public = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    empty = public or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
