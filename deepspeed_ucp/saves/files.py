"""``torch.save`` into memory: torch pickles, a writer of ours copies and sums in one pass, at once or later."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..torchsave.zipframe import RecordWriter

_PROTOCOL = 2
"""Of pickles, as ``torch.save`` has it."""

_PINNED = 16 << 20
"""Bytes of page-locked memory, of which there are two pieces, through which a GPU's bytes come."""

_SMALL = 1 << 16
"""Bytes of a storage that is copied at once."""


class Stable:
    """Tensors that nothing changes before the optimizer's next step, so that they may be copied until then.

    Args:
        changing: what shares memory with these is not among them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = (), changing: Iterable[torch.Tensor] = ()) -> None:
        self._held = [(each, each._version) for each in tensors if not each.is_inference()]
        self._storages = {each.untyped_storage().data_ptr() for each, _ in self._held}
        self._storages -= {each.untyped_storage().data_ptr() for each in changing}

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage.nbytes() > _SMALL and storage.data_ptr() in self._storages

    def is_unchanged(self) -> bool:
        """Whether nothing has written to them, as far as autograd counts: what goes past it (``.data``) it does not."""
        return all(each._version == version for each, version in self._held)


class MappedFiles:
    """Memory of files that a process has mapped: to write over them there is one copy, where a system call takes two.

    A mapping keeps the memory of a file that has lost its name until :meth:`tidy`.

    Args:
        wanted: there are any.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted, self._new = wanted, list[int]()
        self._held = dict[tuple[int, int], tuple[int, NDArray[np.uint8]]]()

    def find(self, fd: int) -> NDArray[np.uint8] | None:
        """A file's bytes, as far as they are mapped."""
        found = os.fstat(fd)
        return self._held.get((found.st_dev, found.st_ino), (0, None))[1]

    def note(self, fd: int) -> None:
        """Have a file mapped by :meth:`settle`."""
        if self._wanted and os.fstat(fd).st_size > _SMALL and self.find(fd) is None:
            self._new.append(os.dup(fd))

    def settle(self) -> None:
        """Map what is to be; its memory is there, so that writing to it cannot fail. In any thread."""
        while self._new:
            fd = self._new.pop()
            found = os.fstat(fd)
            if found.st_nlink and found.st_blocks * 512 >= found.st_size:
                with suppress(OSError):
                    memory = mmap.mmap(fd, found.st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
                    self._held[found.st_dev, found.st_ino] = fd, np.frombuffer(memory, np.uint8)
                    continue
            os.close(fd)

    def tidy(self, *, everything: bool = False) -> None:
        """Let go of files that have lost their names, or of all."""
        for key, (fd, _) in list(self._held.items()):
            if everything or not os.fstat(fd).st_nlink:
                del self._held[key]
                os.close(fd)


class StateFile(RecordWriter):
    """A file that is written by ``torch.save``; storages are copied at once, or left until :meth:`copy_left`.

    Args:
        stable: what is left.
    """

    def __init__(self, fd: int, stable: Stable, mapped: MappedFiles) -> None:
        super().__init__(fd, mapped.find(fd))
        self._file, self._stable, self._mapped = fd, stable, mapped
        self._storages = dict[str, torch.UntypedStorage]()
        self._left = list[tuple[int, torch.UntypedStorage]]()

    def copy_left(self) -> None:
        """Copy what is left, in any thread; the file is none before.

        Raises:
            OSError: as the system tells it.
        """
        try:
            for number, storage in self._left:
                self.fill_record(number, _read_pieces(storage))
            self.close()
            self._mapped.note(self._file)
        finally:
            self.abandon()

    def renew(self) -> StateFile:
        """The same file, with nothing in it yet."""
        return StateFile(self._file, self._stable, self._mapped)

    def has_left(self) -> bool:
        """Whether something is."""
        return bool(self._left)

    def abandon(self) -> None:
        """Let go of it as it is."""
        self._left.clear()
        os.close(self._file)

    def lay_out(self) -> int:
        """What follows the records, behind them; all of it has its room then, so that nothing fails for lack of it."""
        size = super().lay_out()
        os.ftruncate(self._file, size)
        if self._left and os.fstat(self._file).st_blocks * 512 < size:
            os.posix_fallocate(self._file, 0, size)
        return size

    def write_record(self, name: str, data: Any, nbytes: int) -> None:
        if isinstance(data, torch.UntypedStorage):
            self._take(name, data)
        else:
            super().write_record(name, data.encode() if isinstance(data, str) else data, nbytes)

    def write_record_metadata(self, name: str, _: int) -> None:
        """Torch leaves the bytes to us: it would copy a GPU's storage whole, and wait for it."""
        self._take(name, self._storages[name.rpartition("/")[2]])

    def _take(self, name: str, storage: torch.UntypedStorage) -> None:
        number = self.reserve_record(name, storage.nbytes())
        if storage in self._stable:
            self._left.append((number, storage))
        else:
            self.fill_record(number, _read_pieces(storage))

    def make_pickle(self) -> Any:
        """The module ``pickle``, whose pickler notes storages as torch names them."""
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


def save_over(value: Any, path: str, stable: Stable, mapped: MappedFiles) -> StateFile | None:
    """What ``torch.save(value, path)`` does, over the bytes of a file that is there: its pages need not be found anew.

    Args:
        stable: what may be copied later.
        mapped: by this process; the file is to be, once it is whole.

    Returns:
        The file, where something is left to be copied into it.

    Raises:
        OSError: it cannot be written.
    """
    save: Any = getattr(torch.serialization, "_save", None)  # torch's own, with a writer of its own behind it
    if save is None:
        torch.save(value, path)
        return None
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        file = _write(save, value, StateFile(fd, stable, mapped))
        file.lay_out()
        if file.has_left():
            return file
        file.copy_left()
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        raise
    return None


def _write(save: Any, value: Any, file: StateFile) -> StateFile:
    skip_data: Any = getattr(torch.serialization, "skip_data", None)
    if skip_data is not None and torch.cuda.is_available():
        with suppress(RuntimeError), skip_data():  # of tensors that are more than a storage and its shape
            save(value, file, file.make_pickle(), _PROTOCOL, False)
            return file
        file = file.renew()
    save(value, file, pickle, _PROTOCOL, False)
    return file


def _read_pieces(storage: torch.UntypedStorage) -> Iterator[memoryview]:
    """A storage's bytes; a piece is good until the next one is asked for."""
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if storage.device.type == "cpu":
        yield memoryview(data.numpy())
        return
    pinned, stream = _prepare(storage.device)
    pieces = data.split(_PINNED)

    def fetch(number: int) -> Any:
        if number == len(pieces):
            return None
        with torch.get_device_module(storage.device).stream(stream):
            pinned[number % 2][: pieces[number].numel()].copy_(pieces[number], non_blocking=True)
            return stream.record_event()

    mark = fetch(0)
    for number, piece in enumerate(pieces):
        mark.synchronize()
        mark = fetch(number + 1)
        yield memoryview(pinned[number % 2][: piece.numel()].numpy())


@cache
def _prepare(device: torch.device) -> tuple[list[torch.Tensor], Any]:
    """What a device's bytes come through, one storage after the other."""
    pinned = [torch.empty(_PINNED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    return pinned, torch.get_device_module(device).Stream(device)
