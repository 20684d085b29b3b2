"""Kernel counters of a process: bytes read and written, and memory."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

_SELF = Path("/proc/self")
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Io:
    """Byte counters (proc(5), io).

    Attributes:
        storage: bytes read from the storage.
        written: bytes of pages that became dirty.
    """

    storage: int
    written: int

    @classmethod
    def now(cls) -> Io:
        """Read the counters of this process and of the children that it has waited for."""
        fields = read_fields(_SELF / "io")
        return cls(fields["read_bytes"], fields["write_bytes"])

    def __sub__(self, other: Io) -> Io:
        return Io(*(after - before for after, before in zip(astuple(self), astuple(other), strict=True)))


def resident_bytes() -> int:
    return read_fields(_SELF / "status")["VmRSS"] << 10


def peak_resident_bytes() -> int:
    """Return the highest resident size since `reset_peak`."""
    return read_fields(_SELF / "status")["VmHWM"] << 10


def reset_peak() -> None:
    """Set the peak to the present resident size (proc(5), clear_refs)."""
    (_SELF / "clear_refs").write_text("5")


def release_free_memory() -> None:
    """Return freed memory to the system, so that the resident size is the memory in use."""
    gc.collect()
    _libc.malloc_trim(0)


class Peak:
    """Context manager that samples a size in bytes every `period` seconds.

    Attributes:
        before, peak: the first and the largest sample.
    """

    def __init__(self, read: Callable[[], int], period: float) -> None:
        self._read, self._period, self._stop = read, period, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.before = self.peak = 0

    def __enter__(self) -> Peak:
        self.before = self.peak = self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._period):
            self.peak = max(self.peak, self._read())


def watch_anonymous(process: int | str = "self") -> Peak:
    """Sample the anonymous memory of a process, which excludes files and shared memory."""
    return Peak(lambda: read_fields(Path("/proc", str(process), "status"))["RssAnon"] << 10, 0.01)


def read_fields(file: Path) -> dict[str, int]:
    """Read the numbers of a file of lines `key: number`."""
    pairs = (line.partition(":")[::2] for line in file.read_text().splitlines())
    numbers = {key: value.split()[:1] for key, value in pairs}
    return {key: int(value[0]) for key, value in numbers.items() if value and value[0].isdigit()}
