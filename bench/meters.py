"""What the kernel counts for a process: bytes read and memory held."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path

_SELF = Path("/proc/self")


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


def _fields(name: str) -> dict[str, int]:
    fields = {}
    for line in (_SELF / name).read_text().splitlines():
        key, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdigit():
            fields[key] = int(number[0])
    return fields
