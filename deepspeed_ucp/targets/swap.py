"""Buffers that DeepSpeed keeps in swap files (ZeRO-Infinity): filled beside these, and put in their place at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..io.deletion import delete_own
from ..io.disk import explain_full, map_new_file, sync_file


@dataclass(slots=True)
class SwapFiles:
    """The swap files that a load of one rank writes; DeepSpeed's own stay as they are until :meth:`commit`.

    Attributes:
        written: path of each, and of the one that it is to replace.
        folders: that hold them, each beside the folder of DeepSpeed's.
    """

    written: list[tuple[str, str]] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)

    def make(self, path: str, nbytes: int) -> memoryview:
        """Memory for a file that is to replace the one at ``path``.

        Raises:
            DiskFullError: there is no room for it.
        """
        place, name = os.path.split(path)
        folder = f"{place}.ucp"
        if folder not in self.folders:
            self.folders.add(folder)
            delete_own(folder)  # of a load that was killed
            os.makedirs(folder)
        aside = os.path.join(folder, name)
        self.written.append((aside, path))
        return map_new_file(aside, nbytes)

    def commit(self) -> None:
        """Put all of them in the place of DeepSpeed's.

        Raises:
            DiskFullError: some of it turned out not to fit.
            OSError: a file cannot be written or renamed.
        """
        for aside, _ in self.written:
            with explain_full(aside):
                sync_file(aside)  # DeepSpeed reads past the page cache
        while self.written:
            os.replace(*self.written.pop())

    def discard(self) -> None:
        """Remove what has not been put in place."""
        self.written.clear()
        for folder in self.folders:
            delete_own(folder)


@dataclass(frozen=True, slots=True)
class SwapPlace:
    """Where DeepSpeed swaps a buffer to.

    Attributes:
        files: of the load.
        path: of the file of the masters, or of the parameter; an optimizer state's has a longer name.
        dtype: of what is in the files.
        align: elements that a file for so many holds.
    """

    files: SwapFiles
    path: str
    dtype: torch.dtype
    align: Callable[[int], int]

    def make(self, numel: int, state: str = "") -> torch.Tensor:
        """``numel`` elements, 1-D, in a file that takes the place of DeepSpeed's when all is verified.

        Args:
            state: of the optimizer; the masters or the parameter without.

        Raises:
            DiskFullError: there is no room for it.
        """
        folder, name = os.path.split(self.path)
        path = os.path.join(folder, f"{state}-{name}" if state else name)
        memory = self.files.make(path, self.align(numel) * self.dtype.itemsize)
        return torch.frombuffer(memory, dtype=self.dtype, count=numel)

    def copy(self, numel: int) -> torch.Tensor:
        """The same with what DeepSpeed's file holds of the masters or the parameter now.

        Raises:
            DiskFullError: there is no room for it.
            OSError: DeepSpeed's file cannot be read.
        """
        made = self.make(numel)
        with open(self.path, "rb") as stream:
            stream.readinto(memoryview(made.view(torch.uint8).numpy()))
        return made
