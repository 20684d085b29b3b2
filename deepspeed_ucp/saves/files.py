"""``torch.save`` into memory, which copies and checksums each byte in one pass."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..torchsave.zipframe import RecordWriter

_PROTOCOL = 2
"""Pickle protocol of ``torch.save``."""

_PINNED = 16 << 20
"""Bytes of each of the two page-locked buffers through which a GPU's bytes are copied."""

_SMALL = 1 << 16
"""Size in bytes up to which a file is not mapped."""


class MappedFiles:
    """Memory maps of files in memory, by inode; empty unless ``wanted``.

    Overwriting a mapping copies once, a system call copies twice. A mapping keeps the memory of a file without a name
    until :meth:`release`.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted, self._new = wanted, list[int]()
        self._mapped = dict[tuple[int, int], tuple[int, NDArray[np.uint8]]]()

    def find(self, fd: int) -> NDArray[np.uint8] | None:
        status = os.fstat(fd)
        return self._mapped.get((status.st_dev, status.st_ino), (0, None))[1]

    def note(self, fd: int) -> None:
        """Register a large file, which :meth:`settle` will map."""
        if self._wanted and os.fstat(fd).st_size > _SMALL and self.find(fd) is None:
            self._new.append(os.dup(fd))

    def settle(self) -> None:
        """Map the registered files; writing to a mapping of existing pages cannot fail."""
        while self._new:
            fd = self._new.pop()
            status = os.fstat(fd)
            if status.st_nlink and status.st_blocks * 512 >= status.st_size:
                with suppress(OSError):
                    memory = mmap.mmap(fd, status.st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
                    self._mapped[status.st_dev, status.st_ino] = fd, np.frombuffer(memory, np.uint8)
                    continue
            os.close(fd)

    def release(self, *, everything: bool = False) -> None:
        """Release the mappings of files without a name, or all mappings."""
        for key, (fd, _) in list(self._mapped.items()):
            if everything or not os.fstat(fd).st_nlink:
                del self._mapped[key]
                os.close(fd)


class StateFile(RecordWriter):
    """A file that torch's serializer writes into."""

    def __init__(self, fd: int, mapped: MappedFiles) -> None:
        super().__init__(fd, mapped.find(fd))
        self._storages = dict[str, torch.UntypedStorage]()

    def write_record(self, name: str, data: Any, nbytes: int) -> None:
        if isinstance(data, torch.UntypedStorage):
            self.write_pieces(name, _read_pieces(data), data.nbytes())
        else:
            super().write_record(name, data.encode() if isinstance(data, str) else data, nbytes)

    def write_record_metadata(self, name: str, _: int) -> None:
        """Write a storage whose bytes torch skips.

        torch would copy a GPU's storage whole, and wait for the copy.
        """
        storage = self._storages[name.rpartition("/")[2]]
        self.write_pieces(name, _read_pieces(storage), storage.nbytes())

    def make_pickle(self) -> Any:
        """Return a stand-in for ``pickle`` whose pickler records storages by torch's keys."""
        storages = self._storages

        class Pickler(pickle.Pickler):
            def __init_subclass__(cls) -> None:
                name: Any = cls.persistent_id

                def persistent_id(self: Any, obj: Any) -> Any:
                    named = name(self, obj)
                    if named is not None:
                        storages[named[2]] = getattr(obj, "_untyped_storage", obj)
                    return named

                cls.persistent_id = persistent_id  # type: ignore[method-assign]

        return SimpleNamespace(Pickler=Pickler)


def save_in_place(value: Any, path: str, mapped: MappedFiles) -> None:
    """Save as ``torch.save(value, path)`` does, into the existing file's pages.

    Raises:
        OSError: the file cannot be written.
    """
    save: Any = getattr(torch.serialization, "_save", None)  # torch's serializer for any writer
    if save is None:
        torch.save(value, path)
        return
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.ftruncate(fd, _write(save, value, fd, mapped).close()[0])
        mapped.note(fd)
    finally:
        os.close(fd)


def _write(save: Any, value: Any, fd: int, mapped: MappedFiles) -> StateFile:
    file, skip_data = StateFile(fd, mapped), getattr(torch.serialization, "skip_data", None)
    if skip_data is not None and torch.cuda.is_available():
        with suppress(RuntimeError), skip_data():  # of tensors that are more than a storage and its shape
            save(value, file, file.make_pickle(), _PROTOCOL, False)
            return file
        file = StateFile(fd, mapped)
    save(value, file, pickle, _PROTOCOL, False)
    return file


def _read_pieces(storage: torch.UntypedStorage) -> Iterator[memoryview]:
    """Yield a storage's bytes; each piece is valid until the next one is requested."""
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if storage.device.type == "cpu":
        yield memoryview(data.numpy())
        return
    pinned, stream = _make_buffers(storage.device)
    pieces = data.split(_PINNED)

    def fetch(number: int) -> Any:
        if number == len(pieces):
            return None
        with torch.get_device_module(storage.device).stream(stream):
            pinned[number % 2][: pieces[number].numel()].copy_(pieces[number], non_blocking=True)
            return stream.record_event()

    event = fetch(0)
    for number, piece in enumerate(pieces):
        event.synchronize()
        event = fetch(number + 1)
        yield memoryview(pinned[number % 2][: piece.numel()].numpy())


@cache  # one set per device: storages are read one after the other
def _make_buffers(device: torch.device) -> tuple[list[torch.Tensor], Any]:
    """Return two page-locked buffers and a stream for copies from a device (cached)."""
    pinned = [torch.empty(_PINNED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    return pinned, torch.get_device_module(device).Stream(device)
