"""Tensors as destinations: a rank's wants, bound to memory, and copies to a GPU.

Pass 1 runs before all ranks agree that every record is valid. It only writes memory that is not part of the engine
yet, separate memory, or memory whose values can be recomputed to the bit (:meth:`FillPlan.undo`). Pass 2 and
:meth:`FillPlan.commit`, which reads no file, write all other memory of the engine.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..io.cast import average
from ..io.memory import Event, ScratchPool, allocate, allocate_large
from ..model.flat import Span, find_gaps
from ..model.index import AtomicIndex
from ..model.records import CopyItem
from ..model.storage import AtomKey
from ..plan.match import Match
from ..plan.wants import NewRows, Wants
from ..tensor_parallel.layout import Layout
from .states import States

logger = logging.getLogger("deepspeed_ucp")


class Buffer:
    """A destination tensor, and the 1-D memory that is filled for it.

    The memory is the tensor's, or separate memory that :meth:`commit` copies to the tensor. It is separate if the
    tensor is not flat, or after :meth:`use_separate`.

    Args:
        tensor: the destination, any shape and device.
        fill_first: pass 1 may write the tensor, as it is not part of the engine yet.
        spans: ranges of elements [low, high) that will be filled.
        in_file: its memory is a file's.
        copies: the engine's 16-bit copies, 1-D and in order, which the tensor may equal; empty if there are none.

    Attributes:
        fill_first: pass 1 may write ``memory``: it is separate, not yet in the engine, or recomputable.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        fill_first: bool,
        spans: Iterable[Span] = (),
        *,
        in_file: bool = False,
        copies: Sequence[torch.Tensor] = (),
    ) -> None:
        is_flat, self.in_file = tensor.dim() == 1 and tensor.is_contiguous(), in_file
        self.tensor, self.fill_first, self.spans = tensor, fill_first or not is_flat, spans
        self._memory = tensor if is_flat else None
        self._bytes: memoryview | None = None
        self._copies = copies
        self._origin: Sequence[torch.Tensor] = ()

    @property
    def memory(self) -> torch.Tensor:
        """The memory to fill; the elements that are not filled have the tensor's values.

        Allocates separate memory at first use.
        """
        if self._memory is None:
            self._memory = self._allocate()
        return self._memory

    @property
    def is_separate(self) -> bool:
        return self._memory is not self.tensor

    @property
    def bytes(self) -> memoryview:
        """The bytes of the memory, which must be the host's."""
        if self._bytes is None:
            self._bytes = memoryview(self.memory.view(torch.uint8).numpy())
        return self._bytes

    @property
    def is_fresh_host_memory(self) -> bool:
        """True for host memory that is not yet the engine's; allocates it if needed."""
        in_file = self.in_file and self.memory is self.tensor
        return self.fill_first and not self._origin and not in_file and self.memory.device.type == "cpu"

    def detect_recomputable(self) -> bool:
        """Set and return ``fill_first``: True if the live values can be recomputed.

        This holds before the first step: masters equal their copies to the bit, and states are zero.
        """
        if self.is_separate or not self.tensor.numel():
            return False
        zeros = self.tensor.new_zeros(1).expand(self.tensor.numel())
        self._origin = next((made for made in ([zeros], self._copies) if _equals_cast(self.tensor, made)), ())
        self.fill_first = bool(self._origin)
        return self.fill_first

    def undo(self) -> None:
        """Recompute the values that :meth:`detect_recomputable` allowed to overwrite."""
        for values, origin in _pair_pieces(self.tensor, self._origin):
            values.copy_(origin.to(values.device))  # moved before it is converted: it has 16 bits

    def use_separate(self) -> None:
        """Switch to separate memory of the host, which is allocated at first use."""
        self._memory, self._bytes, self.fill_first = None, None, True

    def _allocate(self) -> torch.Tensor:
        """Allocate separate memory.

        Elements that the load does not fill have the tensor's values. When the memory is freed, it returns to the
        system.
        """
        numel, dtype = self.tensor.numel(), self.tensor.dtype
        memory = torch.empty(0, dtype=dtype)
        if numel:
            memory = torch.frombuffer(allocate(numel * dtype.itemsize), dtype=dtype)
        for low, high in find_gaps(self.spans, numel):
            memory[low:high].copy_(self.tensor.reshape(-1)[low:high])
        return memory

    def commit(self) -> None:
        """If the memory is separate, copy it to the tensor and free it."""
        if self._memory is not None and self.is_separate:
            self.tensor.copy_(self._memory.view(self.tensor.shape))
            self._memory = self._bytes = None


_PIECE = 1 << 18
"""Elements of a piece: two pieces fit into a processor's cache. A GPU processes more at once."""
_BITS = {2: torch.int16, 4: torch.int32}


def _equals_cast(tensor: torch.Tensor, origin: Sequence[torch.Tensor]) -> bool:
    """Return True if a 1-D tensor equals the joined ``origin``, cast, to the bit.

    It is False if they share memory, since a write would change them too, and for elements of 1 or 8 bytes.
    """
    memory = {part.untyped_storage().data_ptr() for part in origin}
    if sum(part.numel() for part in origin) != tensor.numel() or tensor.untyped_storage().data_ptr() in memory:
        return False
    bits = _BITS.get(tensor.element_size())
    if bits is None:
        return False
    for values, made in _pair_pieces(tensor, origin):
        one, other = values.view(bits), made.to(values.device).to(values.dtype).view(bits)
        on_host = one.device.type == "cpu"  # numpy compares four times as fast as torch does
        if not (np.array_equal(one.numpy(), other.numpy()) if on_host else torch.equal(one, other)):
            return False
    return True


def _pair_pieces(tensor: torch.Tensor, origin: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (piece of a 1-D tensor, equal range of the joined ``origin``)."""
    begin = 0
    for part in origin:
        step = _PIECE if part.device.type == tensor.device.type == "cpu" else 64 * _PIECE
        for low in range(0, part.numel(), step):
            piece = part[low : low + step]
            yield tensor[begin + low :][: piece.numel()], piece
        begin += part.numel()


class TensorSink:
    """A buffer whose bytes arrive as dtype ``stored``, and are converted if needed."""

    def __init__(self, buffer: Buffer, stored: str) -> None:
        self.buffer, self.stored = buffer, getattr(torch, stored)
        self.itemsize = buffer.tensor.element_size()

    def view(self, position: int, nbytes: int) -> memoryview | None:
        """Return the bytes of the buffer's memory from element ``position`` on.

        Returns:
            None if bytes must be cast or copied to a device.
        """
        tensor = self.buffer.tensor
        if tensor.dtype != self.stored or not tensor.numel() or self.buffer.memory.device.type != "cpu":
            return None
        low = position * self.itemsize
        return self.buffer.bytes[low : low + nbytes]

    def store(self, item: CopyItem, data: memoryview) -> None:
        """Copy packed bytes to an item's runs, ``stride`` elements apart; cast if needed."""
        view = None if item.stride else self.view(item.position, item.nbytes)
        if view is not None:
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(data, np.uint8))  # releases the GIL
            return
        values, tensor = torch.frombuffer(data, dtype=self.stored), self.buffer.memory
        if not item.stride:
            _copy(tensor.narrow(0, item.position, values.numel()), values)
            return
        rows = values.view(-1, item.run // self.stored.itemsize)
        base = tensor.storage_offset() + item.position
        _copy(tensor.as_strided(rows.shape, (item.stride, 1), base), rows)


def _copy(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values; to CUDA asynchronously if they are in page-locked memory.

    Other accelerators may treat such memory differently: there the copy is complete on return.
    """
    into.copy_(values, non_blocking=into.device.type == "cuda")


@dataclass(slots=True)
class FillPlan:
    """This rank's wants with their buffers, and the atoms that all ranks need.

    Attributes:
        index: the only index of the checkpoint from here on: its parameters are named and cut as in the live model;
            only those that ``rename`` rules match keep their saved names.
        wants: of this rank; ``resized`` and ``averaged`` of all ranks. Blanks are zeroed when the pass that fills their
            memory begins; means are computed in :meth:`commit`.
        buffers: by the wants' buffer numbers.
        sinks: by the numbers in the wants.
        states: optimizer states to attach after verification.
        match: this rank's parameters and param groups with their saved counterparts.
        touched: atoms that some rank needs, the same list on every rank once the ranks have exchanged theirs.
        replicated: those of them whose saved shards are replicas that must be equal.
        overlapping: those of them whose saved shards have parts in common, with the source's layout.
        state_bytes: bytes of all touched atoms.
        averages: the means of saved rows, [elements of a row], once they are known.
    """

    index: AtomicIndex
    wants: Wants = field(default_factory=Wants)
    buffers: list[Buffer] = field(default_factory=list)
    sinks: list[TensorSink] = field(default_factory=list)
    states: list[States] = field(default_factory=list)
    match: Match = field(default_factory=Match)
    touched: list[AtomKey] = field(default_factory=list)
    replicated: list[AtomKey] = field(default_factory=list)
    overlapping: list[tuple[AtomKey, Layout]] = field(default_factory=list)
    state_bytes: int = 0
    averages: Mapping[AtomKey, Any] = field(default_factory=dict)

    def pick_sinks(self, *, is_first_pass: bool) -> list[TensorSink | None]:
        """Return the sinks of pass 1 or of pass 2, by number; None for the others."""
        return [sink if sink.buffer.fill_first == is_first_pass else None for sink in self.sinks]

    def zero_blanks(self, *, is_first_pass: bool) -> None:
        """Zero padding, absent states and new rows (``Wants.blanks``) that a pass fills."""
        for number, low, high in self.wants.blanks:
            if self.buffers[number].fill_first == is_first_pass:
                self.buffers[number].memory[low:high].zero_()

    def undo(self) -> None:
        """Restore the memory that was filled in place.

        The last buffer comes first: a later buffer may be recomputed from an earlier one.
        """
        for buffer in reversed(self.buffers):
            buffer.undo()

    def commit(self) -> None:
        """Compute means and new rows, then copy separate memory to the tensors."""
        for mean in self.wants.means:
            replicas = (self.buffers[number].memory for number in mean.replicas)
            self.buffers[mean.buffer].memory[mean.low : mean.high].copy_(average(replicas))
        for rows in self.wants.rows:
            row, memory = _pick_columns(self.averages[rows.key], rows), self.buffers[rows.buffer].memory
            for low in range(rows.low, rows.high, _PIECE):
                piece = memory[low : min(low + _PIECE, rows.high)]
                indices = torch.arange(piece.numel()).add_(rows.start + low - rows.low).remainder_(row.numel())
                piece.copy_(row[indices])
        for buffer in self.buffers:
            buffer.commit()


def _pick_columns(row: Any, wanted: NewRows) -> torch.Tensor:
    """Return the columns of a mean row that a shard has, flattened, in fp64."""
    columns = torch.from_numpy(row).view(wanted.view)
    for axis, intervals in enumerate(wanted.columns):
        indices = [index for low, high in intervals for index in range(low, high)]
        columns = columns.index_select(axis, torch.tensor(indices, dtype=torch.int64))
    return columns.reshape(-1)


_PINNED_CHUNK = 32 << 20
"""Bytes of page-locked memory per allocation; torch rounds each up to a power of two."""


class SyncCopies:
    """Synchronous copies of read bytes to their destinations.

    Attributes:
        pool: memory for bytes that are read before they are copied.
        is_async: copies are asynchronous, and may only read the pool's memory.
    """

    is_async = False

    def __init__(self) -> None:
        self.pool = ScratchPool()

    def open_stream(self) -> AbstractContextManager[object]:
        """Use the calling thread's stream for its copies; synchronous copies have none."""
        return nullcontext()

    def wait_for_earlier(self) -> None:
        """Wait until the device has done queued work; synchronous copies queue none."""

    def finish(self) -> None:
        """Wait for the copies from the pool's memory."""
        self.pool.settle()

    def close(self) -> None:
        """Wait for all copies, and free the pool's memory."""
        self.finish()
        self.pool.clear()


class AsyncGpuCopies(SyncCopies):
    """Copies to a GPU while the next bytes are read.

    Page-locked memory is reused when the copies from it are done. There are two pieces per thread: one is read into
    while the other is copied.

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
        self._free, self._can_pin, self._lock = memoryview(b""), True, threading.Lock()

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

    def wait_for_earlier(self) -> None:
        torch.cuda.synchronize(self.device)

    def finish(self) -> None:
        super().finish()
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        super().close()
        self._free = memoryview(b"")
        _empty_host_cache()

    def _allocate(self, nbytes: int) -> memoryview:
        """Cut a piece from the page-locked chunk; allocate a chunk if it is too small."""
        with self._lock:
            if self._free.nbytes < nbytes:
                self._free = self._allocate_pinned_chunk(max(min(_PINNED_CHUNK, self.pieces * nbytes), nbytes))
            piece, self._free = self._free[:nbytes], self._free[nbytes:]
            return piece

    def _allocate_pinned_chunk(self, nbytes: int) -> memoryview:
        """Allocate page-locked memory; if that fails, plain memory (synchronous copies)."""
        if self._can_pin:
            try:
                return _allocate_pinned(nbytes)
            except RuntimeError as error:
                self._can_pin = False
                logger.warning("no page-locked memory for copies to %s, which take longer: %s", self.device, error)
        return allocate_large(nbytes)

    def _record(self) -> Event:
        """Record a CUDA event after the calling thread's copies."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event


def choose_device_copies(sinks: Iterable[TensorSink], threads: int) -> SyncCopies:
    """Return asynchronous copies if all CUDA destinations are on one GPU.

    Otherwise return synchronous copies.
    """
    devices = {memory.device for sink in sinks if (memory := sink.buffer.memory).device.type == "cuda"}
    return AsyncGpuCopies(threads, devices.pop()) if len(devices) == 1 else SyncCopies()


def _allocate_pinned(nbytes: int) -> memoryview:
    return memoryview(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy())


def _empty_host_cache() -> None:
    """Free unused page-locked memory of torch, if its release has a function for it."""
    public = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    empty = public or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
