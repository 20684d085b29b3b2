"""Tensors as destinations of bytes: what a rank wants, bound to memory.

Until all ranks have agreed that every record is what training wrote, bytes go to uncommitted memory alone: to what is
no part of the engine yet, to memory apart, and in place where the values that are filled over can be made again to the
bit (:meth:`Destinations.undo`). All other memory of the engine is written by :meth:`Destinations.commit`, which no
file can make fail, and by the second pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..atoms import AtomKey
from ..flat import Span, find_gaps
from ..io.cast import average
from ..io.memory import allocate
from ..plan import Part
from ..plan.wants import NewRows, Slot, Wants


class Buffer:
    """A destination tensor, and the 1-D memory that is filled for it.

    The memory is the tensor's own, or memory apart that :meth:`commit` brings to the tensor: where the tensor is not
    flat, and where it is part of the engine and has to stay as it is until every rank has agreed. What can be made
    again is filled in place all the same.

    Args:
        tensor: the destination, any shape and device.
        uncommitted: it is not part of the engine yet, so that it may be filled before all is verified.
        spans: ranges of elements [low, high) that will be filled.
        in_file: its memory is a file's.
        copies: 1-D, one after the other what the tensor's values may have been made from; none if unknown.

    Attributes:
        uncommitted: the same of ``memory``: until all ranks have agreed only such memory is written to.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        uncommitted: bool,
        spans: Iterable[Span] = (),
        *,
        in_file: bool = False,
        copies: Sequence[torch.Tensor] = (),
    ) -> None:
        is_flat, self.in_file = tensor.dim() == 1 and tensor.is_contiguous(), in_file
        self.tensor, self.uncommitted, self.spans = tensor, uncommitted or not is_flat, spans
        self._memory = tensor if is_flat else None
        self._bytes: memoryview | None = None
        self._copies = copies
        self._origin: Sequence[torch.Tensor] = ()

    @property
    def memory(self) -> torch.Tensor:
        """What is filled; the elements that nothing fills have the tensor's values."""
        if self._memory is None:
            self._memory = self._allocate()
        return self._memory

    @property
    def bytes(self) -> memoryview:
        """The bytes of the memory, which is the host's."""
        if self._bytes is None:
            self._bytes = memoryview(self.memory.view(torch.uint8).numpy())
        return self._bytes

    @property
    def is_untouched(self) -> bool:
        """Whether the memory is the host's, and is filled for the first time."""
        in_file = self.in_file and self.memory is self.tensor
        return self.uncommitted and not self._origin and not in_file and self.memory.device.type == "cpu"

    def fill_in_place(self) -> bool:
        """Fill the tensor's own memory before all is verified, if what it holds can be made again to the bit.

        So it is before the first step: masters are made from their copies, and states are zero.
        """
        if self._memory is not self.tensor or not self.tensor.numel():
            return False
        zeros = self.tensor.new_zeros(1).expand(self.tensor.numel())
        self._origin = next((made for made in ([zeros], self._copies) if _is_made_from(self.tensor, made)), ())
        self.uncommitted = bool(self._origin)
        return self.uncommitted

    def undo(self) -> None:
        """Give back the values that were filled over in place."""
        for values, origin in _pair(self.tensor, self._origin):
            values.copy_(origin.to(values.device))  # what travels is of 16 bits

    def stage_aside(self) -> None:
        """Fill other memory, of the host, instead of the tensor's own."""
        self._memory, self._bytes, self.uncommitted = None, None, True

    def _allocate(self) -> torch.Tensor:
        memory = allocate_tensor(self.tensor.numel(), self.tensor.dtype)
        for low, high in find_gaps(self.spans, self.tensor.numel()):
            memory[low:high].copy_(self.tensor.reshape(-1)[low:high])
        return memory

    def commit(self) -> None:
        """Bring what was filled to the tensor, and give the memory apart back; a copy of memory, nothing else."""
        if self._memory is not None and self._memory is not self.tensor:
            self.tensor.copy_(self._memory.view(self.tensor.shape))
            self._memory = self._bytes = None


_PIECE = 1 << 18
"""Elements that a processor's cache holds twice; a GPU is given more at once."""
_BITS = {2: torch.int16, 4: torch.int32}


def _is_made_from(tensor: torch.Tensor, origin: Sequence[torch.Tensor]) -> bool:
    """Whether a 1-D tensor's values are those of others, one after the other, to the bit, in memory of its own."""
    memory = {each.untyped_storage().data_ptr() for each in origin}
    if sum(each.numel() for each in origin) != tensor.numel() or tensor.untyped_storage().data_ptr() in memory:
        return False
    bits = _BITS.get(tensor.element_size())
    if bits is None:
        return False
    for values, made in _pair(tensor, origin):
        one, other = values.view(bits), made.to(values.device).to(values.dtype).view(bits)
        on_host = one.device.type == "cpu"  # numpy compares four times as fast as torch does
        if not (np.array_equal(one.numpy(), other.numpy()) if on_host else torch.equal(one, other)):
            return False
    return True


def _pair(tensor: torch.Tensor, origin: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of a 1-D tensor with those of what it is made from."""
    begin = 0
    for each in origin:
        step = _PIECE if each.device.type == tensor.device.type == "cpu" else 64 * _PIECE
        for low in range(0, each.numel(), step):
            piece = each[low : low + step]
            yield tensor[begin + low :][: piece.numel()], piece
        begin += each.numel()


def allocate_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor of host memory that goes back to the system once it is freed."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(allocate(numel * dtype.itemsize), dtype=dtype)


class TensorSink:
    """A buffer whose bytes come as dtype ``stored``: straight into its memory, or converted on the way.

    Args:
        buffer: the destination.
        stored: dtype of the bytes in the file, as ``float32``.
    """

    def __init__(self, buffer: Buffer, stored: str) -> None:
        self.buffer, self.stored = buffer, getattr(torch, stored)
        self.itemsize = buffer.tensor.element_size()

    def view(self, position: int, nbytes: int) -> memoryview | None:
        """The tensor's memory from element ``position`` on, or None where bytes must be converted or moved."""
        tensor = self.buffer.tensor
        if tensor.dtype != self.stored or not tensor.numel() or self.buffer.memory.device.type != "cpu":
            return None
        low = position * self.itemsize
        return self.buffer.bytes[low : low + nbytes]

    def store(self, part: Part, data: memoryview) -> None:
        """Copy a part's bytes, converted where need be, to the elements from ``part.position`` on; rows to theirs."""
        view = None if part.run else self.view(part.position, part.nbytes)
        if view is not None:
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(data, np.uint8))  # other threads go on meanwhile
            return
        values, tensor = torch.frombuffer(data, dtype=self.stored), self.buffer.memory
        if not part.run:
            _copy(tensor.narrow(0, part.position, values.numel()), values)
            return
        rows = values.view(-1, part.run // self.stored.itemsize)
        base = tensor.storage_offset() + part.position
        _copy(tensor.as_strided(rows.shape, (part.stride, 1), base), rows)


def _copy(into: torch.Tensor, values: torch.Tensor) -> None:
    """To CUDA it may go on when this returns, from page-locked memory alone (:mod:`.uploads`).

    What other accelerators do with memory that is not is their own: there the copy is done when this returns.
    """
    into.copy_(values, non_blocking=into.device.type == "cuda")


@dataclass(slots=True)
class Destinations:
    """The memory that a load fills.

    Attributes:
        buffers: by the wants' buffer numbers.
        sinks: by the numbers that wants name.
        wants: what is zeroed before anything is read, and averaged when all is there.
        averages: the means of saved rows, [elements of a row], once they are known.
    """

    buffers: list[Buffer] = field(default_factory=list)
    sinks: list[TensorSink] = field(default_factory=list)
    wants: Wants = field(default_factory=Wants)
    averages: Mapping[AtomKey, Any] = field(default_factory=dict)

    def pick_sinks(self, *, uncommitted: bool) -> list[TensorSink | None]:
        """What a pass fills: the first one uncommitted memory, the second one all other."""
        return [sink if sink.buffer.uncommitted == uncommitted else None for sink in self.sinks]

    def zero_blanks(self, *, uncommitted: bool) -> None:
        """Zero what no atom fills, of what a pass fills."""
        for number, low, high in self.wants.blanks:
            if self.buffers[number].uncommitted == uncommitted:
                self.buffers[number].memory[low:high].zero_()

    def undo(self) -> None:
        """Give back what was filled in place; a view of another buffer, if any, was looked at after it."""
        for buffer in reversed(self.buffers):
            buffer.undo()

    def commit(self) -> None:
        """Take the means, and bring everything to where it belongs."""
        for mean in self.wants.means:
            replicas = (self.buffers[number].memory for number in mean.replicas)
            self.buffers[mean.buffer].memory[mean.low : mean.high].copy_(average(replicas))
        for each in self.wants.rows:
            row = _pick_columns(self.averages[each.key], each)
            for low, piece in _cut(self.buffers[each.buffer].memory, each.low, each.high):
                places = torch.arange(piece.numel()).add_(each.start + low - each.low).remainder_(row.numel())
                piece.copy_(row[places])
        for buffer in self.buffers:
            buffer.commit()


def _cut(memory: torch.Tensor, low: int, high: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Elements [low, high) of memory piece by piece, each with its first element."""
    for begin in range(low, high, _PIECE):
        yield begin, memory[begin : min(begin + _PIECE, high)]


def _pick_columns(row: Any, wanted: NewRows) -> torch.Tensor:
    """What a shard holds of a row, fp64."""
    found = torch.from_numpy(row).view(wanted.view)
    for axis, intervals in enumerate(wanted.columns):
        places = [place for low, high in intervals for place in range(low, high)]
        found = found.index_select(axis, torch.tensor(places, dtype=torch.int64))
    return found.reshape(-1)


def bind(
    wants: Wants, tensors: Mapping[Slot, torch.Tensor], copies: Mapping[Slot, Sequence[torch.Tensor]] | None = None
) -> Destinations:
    """Give every buffer of the wants its tensor.

    Args:
        tensors: the live ones, and new ones for states; memory that is not among them is made.
        copies: of the live ones what their values may have been made from.
    """
    buffers = []
    for spec, spans in zip(wants.buffers, wants.list_spans(), strict=True):
        known = tensors.get(spec.slot)
        tensor = torch.empty(spec.numel, dtype=getattr(torch, spec.dtype)) if known is None else known
        made_from = (copies or {}).get(spec.slot, ())
        buffers.append(Buffer(tensor, not spec.live, spans, in_file=spec.in_file, copies=made_from))
    sinks = [TensorSink(buffers[number], stored) for number, stored in wants.sinks]
    return Destinations(buffers, sinks, wants)
