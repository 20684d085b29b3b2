"""Swap files of ZeRO-Infinity: a load writes new files, and replaces DeepSpeed's files after verification."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..io.deletion import delete_own
from ..io.disk import explain_full, map_new_file, sync_file


@dataclass(slots=True)
class SwapFiles:
    """Swap files written by one rank's load; DeepSpeed's files are unchanged until :meth:`commit`.

    Attributes:
        written: path of each file, and of the file that it replaces.
        folders: folders of these files, ``<DeepSpeed's folder>.ucp``.
    """

    written: list[tuple[str, str]] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)

    def make(self, path: str, nbytes: int) -> memoryview:
        """Create and map a file that replaces the one at ``path`` later; DiskFullError if there is no room."""
        place, name = os.path.split(path)
        folder = f"{place}.ucp"
        if folder not in self.folders:
            self.folders.add(folder)
            delete_own(folder)  # left by a killed load
            os.makedirs(folder)
        aside = os.path.join(folder, name)
        self.written.append((aside, path))
        return map_new_file(aside, nbytes)

    def commit(self) -> None:
        """Replace DeepSpeed's files.

        Raises:
            DiskFullError: the disk is full.
            OSError: a file cannot be written or renamed.
        """
        for aside, _ in self.written:
            with explain_full(aside):
                sync_file(aside)  # DeepSpeed reads past the page cache
        while self.written:
            os.replace(*self.written.pop())

    def discard(self) -> None:
        """Delete files that have not replaced DeepSpeed's."""
        self.written.clear()
        for folder in self.folders:
            delete_own(folder)


@dataclass(frozen=True, slots=True)
class SwapPlace:
    """Swap file of a buffer.

    Attributes:
        files: the load's files.
        path: DeepSpeed's file of the masters or of the parameter; the file of an optimizer state has a longer name.
        dtype: dtype in the file.
        align: function from a number of elements to the aligned number of elements in a file.
    """

    files: SwapFiles
    path: str
    dtype: torch.dtype
    align: Callable[[int], int]

    def make(self, numel: int, state: str = "") -> torch.Tensor:
        """Map ``numel`` elements, 1-D, of a new file; DiskFullError if there is no room.

        Args:
            state: optimizer state; empty for the masters or the parameter.
        """
        folder, name = os.path.split(self.path)
        path = os.path.join(folder, f"{state}-{name}" if state else name)
        memory = self.files.make(path, self.align(numel) * self.dtype.itemsize)
        return torch.frombuffer(memory, dtype=self.dtype, count=numel)

    def copy(self, numel: int) -> torch.Tensor:
        """Like :meth:`make`, with the contents of DeepSpeed's file; OSError if it cannot be read."""
        made = self.make(numel)
        with open(self.path, "rb") as stream:
            stream.readinto(memoryview(made.view(torch.uint8).numpy()))
        return made
