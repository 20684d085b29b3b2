"""What accelerators measure before a start (CUDA, ROCm): products that have to be right, and the same; copies."""

from __future__ import annotations

import glob
import os
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from .judging import Figure
from .links import time_once

LARGEST = 15
"""Of whole numbers in matrices: every sum of products is exact in fp32, and so the same whoever adds in what order."""

_SIZE, _SECONDS = 4096, 0.5
"""Rows and columns of the matrices, and how long they are multiplied."""


def count_devices(faults: list[str]) -> int:
    """Accelerators that torch sees; torch is imported only where the system has some."""
    if os.environ.get("DS_ACCELERATOR", "cuda") != "cuda" or not glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/kfd"):
        return 0
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    is_built = torch.version.cuda is not None or torch.version.hip is not None
    if not found and is_built and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        faults.append("devices: the system has some, and torch finds none")
    return found


def measure_devices(count: int) -> tuple[list[Figure], list[str]]:
    """All at once, as in training: figures, and what is wrong."""
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(lambda at: Device(f"cuda:{at}").measure(), range(count)))
    return [figure for figures, _ in results for figure in figures], [each for _, faults in results for each in faults]


class Device:
    """One that is tested.

    Args:
        name: as torch has it; ``cpu`` can be, too.
        size: rows and columns of the matrices.
        seconds: that they are multiplied for.
    """

    def __init__(self, name: str, *, size: int = _SIZE, seconds: float = _SECONDS) -> None:
        self.name, self.size, self.seconds = name, size, seconds
        self.figures, self.faults = list[Figure](), list[str]()
        self._is_cuda = name.startswith("cuda")

    def measure(self) -> tuple[list[Figure], list[str]]:
        """Run all tests: figures, and what is wrong."""
        import torch

        torch.backends.cuda.matmul.allow_tf32 = True  # whole numbers of this size are exact in it as well
        if self._is_cuda:
            self._add("free device memory", torch.cuda.mem_get_info(self.name)[0] / 1e6)
        numbers = torch.arange(2 * self.size**2, device=self.name, dtype=torch.int64)
        numbers = (numbers * 2654435761 >> 16) % (1 << 16)
        self._check_sums(numbers)
        self._repeat_product(numbers)
        self._copy(numbers)
        return self.figures, self.faults

    def _check_sums(self, numbers: Any) -> None:
        """A product of whole numbers, against their sums in another order, which fp64 has exactly, too."""
        import torch

        a, b = (numbers % (2 * LARGEST + 1) - LARGEST).float().view(2, self.size, self.size)
        weights = torch.arange(1, self.size + 1, device=self.name, dtype=torch.float64)
        if not torch.equal((a @ b).double() @ weights, a.double() @ (b.double() @ weights)):
            self._blame("a sum of whole numbers is wrong")

    def _repeat_product(self, numbers: Any) -> None:
        """A product of fractions, again and again: one speed, and the same bits."""
        import torch

        a, b = (numbers.float() / 32768 - 1).half().view(2, self.size, self.size)
        bits, rates = set[str](), list[float]()
        until = time.perf_counter() + self.seconds
        while len(rates) < 2 or time.perf_counter() < until:
            rates.append(2e-9 * self.size**3 / self._time(lambda: a @ b))
            product = (a @ b).view(torch.int16)
            sums = [product.sum(side, dtype=torch.int64).cpu().numpy().tobytes() for side in (0, 1)]
            bits.add(f"{zlib.crc32(b''.join(sums)):08x}")
        if len(bits) > 1:
            self._blame("the same product has other bits each time")
        self._add("device product", median(rates), min(bits))

    def _copy(self, numbers: Any) -> None:
        """Within its memory, and from the host's."""
        import torch

        copy = torch.zeros_like(numbers)
        self._add("device memory", numbers.nbytes / self._time(lambda: copy.copy_(numbers)) / 1e6)
        if not torch.equal(copy, numbers):
            self._blame("a copy differs from what was copied")
        if not self._is_cuda:
            return
        part = numbers[: numbers.numel() // 4]
        held, copy = part.cpu().pin_memory(), torch.zeros_like(part)
        self._add("host to device", held.nbytes / self._time(lambda: copy.copy_(held, non_blocking=True)) / 1e6)
        if not torch.equal(copy, part):
            self._blame("a copy from the host differs from what was copied")

    def _time(self, work: Callable[[], Any]) -> float:
        import torch

        def run() -> None:
            work()
            if self._is_cuda:
                torch.cuda.synchronize(self.name)

        run()
        return min(time_once(run) for _ in range(3))

    def _add(self, what: str, value: float, bits: str | None = None) -> None:
        import torch

        kind = f"{torch.cuda.get_device_name(self.name) if self._is_cuda else 'cpu'}, torch {torch.__version__}"
        self.figures.append(Figure(what, value, kind, self.name, bits))

    def _blame(self, what: str) -> None:
        self.faults.append(f"{self.name}: {what}")
