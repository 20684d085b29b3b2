"""What the kernel counts for a process: bytes read and memory held."""

from __future__ import annotations

import os
import threading
from dataclasses import astuple, dataclass
from pathlib import Path

_SELF = Path("/proc/self")
_SAMPLED = 0.01  # seconds between two looks at a process's memory


@dataclass(frozen=True)
class Io:
    """Bytes: `storage` came from the storage, `requested` were asked of read calls (cached or not), `written` will
    go to the storage (the kernel counts a page when it becomes dirty). `busy`: seconds of processors.
    """

    storage: int
    requested: int
    written: int = 0
    busy: float = 0.0

    @classmethod
    def now(cls) -> Io:
        """The counters of this process and of the children that it has waited for."""
        fields = _fields("io")
        return cls(fields["read_bytes"], fields["rchar"], fields["write_bytes"], sum(os.times()[:4]))

    def __sub__(self, other: Io) -> Io:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Io(*(now - then for now, then in pairs))


def resident_bytes() -> int:
    return _fields("status")["VmRSS"] << 10


def peak_resident_bytes() -> int:
    """The highest resident size since `reset_peak`."""
    return _fields("status")["VmHWM"] << 10


def reset_peak() -> None:
    """Set the peak to the present resident size (proc(5), clear_refs)."""
    (_SELF / "clear_refs").write_text("5")


class AnonymousPeak:
    """The largest anonymous memory of a process while this is entered: neither files' nor what it shares.

    Attributes:
        before, peak: bytes.
    """

    def __init__(self, process: int | str = "self") -> None:
        self._folder, self._ended = Path("/proc", str(process)), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.before = self.peak = 0

    def __enter__(self) -> AnonymousPeak:
        self.before = self.peak = self._count()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_SAMPLED):
            self.peak = max(self.peak, self._count())

    def _count(self) -> int:
        return _fields("status", self._folder)["RssAnon"] << 10


def _fields(name: str, folder: Path = _SELF) -> dict[str, int]:
    fields = {}
    for line in (folder / name).read_text().splitlines():
        key, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdigit():
            fields[key] = int(number[0])
    return fields
