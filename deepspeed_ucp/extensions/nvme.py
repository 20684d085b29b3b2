"""ZeRO-Infinity: write new swap files, and replace DeepSpeed's after verification."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus

from ..engine.base import Target, dtype_name
from ..io.deletion import try_delete_tree
from ..io.disk import explain_full, map_new_file, sync_file
from ..model.view import EngineBuffer
from .registry import Extension


@dataclass(frozen=True, slots=True)
class SwapPlace:
    """A buffer's swap file, and the factory of the file that replaces it.

    Attributes:
        nvme: keeps the load's files.
        path: DeepSpeed's file of the masters or of the parameter; the file of an optimizer state has a longer name.
        align: function from a number of elements to the aligned number of elements in a file.
    """

    nvme: Nvme
    path: str
    dtype: torch.dtype
    align: Callable[[int], int]

    def make(self, numel: int, state: str = "") -> torch.Tensor:
        """Map ``numel`` elements, 1-D, of a new file; DiskFullError if there is no room.

        Without an optimizer state the file is the masters' or the parameter's.
        """
        folder, name = os.path.split(self.path)
        path = os.path.join(folder, f"{state}-{name}" if state else name)
        memory = self.nvme.make_file(path, self.align(numel) * self.dtype.itemsize)
        return torch.frombuffer(memory, dtype=self.dtype, count=numel)

    def copy(self, numel: int) -> torch.Tensor:
        """Like :meth:`make`, filled from DeepSpeed's file; OSError if that is unreadable."""
        memory = self.make(numel)
        with open(self.path, "rb") as stream:
            nbytes = stream.readinto(memoryview(memory.view(torch.uint8).numpy()))
        if nbytes < memory.nbytes:
            raise OSError(f"{self.path}: has {nbytes} bytes, {memory.nbytes} are expected. The swap file is damaged.")
        return memory


class Nvme(Extension):
    """An engine that swaps to NVMe; :meth:`commit` replaces DeepSpeed's files.

    Attributes:
        written: path of each file that this rank's load has written, and of the file that it replaces.
        folders: folders of these files, ``<DeepSpeed's folder>.ucp``.
    """

    def __init__(self) -> None:
        self.written: list[tuple[str, str]] = []
        self.folders: set[str] = set()

    def make_file(self, path: str, nbytes: int) -> memoryview:
        """Map a new file that later replaces ``path``; DiskFullError if there is no room."""
        parent, name = os.path.split(path)
        folder = f"{parent}.ucp"
        if folder not in self.folders:
            self.folders.add(folder)
            try_delete_tree(folder)  # left by a killed load
            os.makedirs(folder)
        aside = os.path.join(folder, name)
        self.written.append((aside, path))
        return map_new_file(aside, nbytes)

    def complete_target(self, target: Target) -> None:
        """Attach swap files to the flat buffers; small sub-groups stay in memory."""
        for index, flat in enumerate(target.flats):
            if target.wrapped._swappable_optimizer_subgroup(index):
                swapper = target.wrapped.optimizer_swapper
                info = swapper.swap_params_info[swapper.parameter_id(flat.tensor)]
                target.flats[index] = self.map_swapped(flat, info.tensors[0].swap_path, swapper)

    def prepare(self, target: Target) -> None:
        """Release prefetched partitions, which hide swap files and are not written back."""
        for param in target.params.values():
            part: Any = getattr(param, "ds_tensor", None)
            if getattr(part, "final_location", None) == "nvme" and part.status != PartitionedParamStatus.NOT_AVAILABLE:
                param.nvme_swapper.synchronize_reads()
                param.nvme_swapper.remove_partition_and_release_buffers([param])

    def complete_extras(self, target: Target, extras: list[EngineBuffer]) -> list[EngineBuffer]:
        for index, extra in enumerate(extras):
            param: Any = target.params.get(extra.name)
            partition = getattr(param, "ds_tensor", None)
            if partition is not None and partition.status != PartitionedParamStatus.AVAILABLE:
                swapper = param.nvme_swapper
                extras[index] = self.map_swapped(extra, swapper.get_path(param, must_exist=True), swapper)
        return extras

    def map_swapped(self, buffer: EngineBuffer, path: str, swapper: Any) -> EngineBuffer:
        """Return a buffer whose contents are in a swap file of DeepSpeed's ``swapper``."""
        swap = SwapPlace(self, path, swapper.dtype, swapper._io_aligned_numel)
        return replace(buffer, dtype=dtype_name(swap.dtype), swap=swap)

    def commit(self) -> None:
        """Replace DeepSpeed's files; raise DiskFullError or OSError on failure."""
        for aside, _ in self.written:
            with explain_full(aside):
                sync_file(aside)  # DeepSpeed reads past the page cache
        while self.written:
            os.replace(*self.written.pop())

    @contextmanager
    def open_masters(self, target: Target, number: int) -> Iterator[None]:
        """Read one sub-group into memory as in a step, and release it afterwards."""
        timers, is_swapped = set[str](), target.flats[number].swap is not None
        if is_swapped:
            target.wrapped._prepare_sub_group(number, timers)
        yield
        if is_swapped:
            target.wrapped._release_sub_group(number, timers)

    def relink(self, target: Target) -> None:
        """Register the states and free their memory, as after a step."""
        swapped = [flat for flat in target.flats if flat.swap is not None]
        if swapped:
            swapper = target.wrapped.optimizer_swapper
            swapper.purge_state()
            for flat in swapped:
                swapper._get_param_swap_info(flat.tensor).release_memory()

    def discard(self) -> None:
        self.written.clear()
        for folder in self.folders:
            try_delete_tree(folder)
