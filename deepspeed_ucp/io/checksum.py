"""Checksums of records from the checksums of their parts, wherever these were read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from isal import isal_zlib

Buffer = bytes | bytearray | memoryview


def crc32(data: Buffer, crc: int = 0) -> int:
    """CRC32 of ``data``, going on from ``crc``."""
    return int(isal_zlib.crc32(data, crc))


def combine_crc32(first: int, second: int, nbytes: int) -> int:
    """CRC32 of two parts one behind the other; ``nbytes`` are the second's."""
    return int(isal_zlib.crc32_combine(first, second, nbytes))


@dataclass(frozen=True, slots=True, order=True)
class Checked:
    """CRC32 of bytes [offset, offset + nbytes) of a record."""

    record: int
    offset: int
    nbytes: int
    crc: int


def merge_checks(checks: Iterable[Checked]) -> list[Checked]:
    """Checks in order, neighbours in a record joined into one."""
    merged: list[Checked] = []
    for check in sorted(checks, key=lambda c: (c.record, c.offset)):
        last = merged[-1] if merged else None
        if last and last.record == check.record and last.offset + last.nbytes == check.offset:
            crc = isal_zlib.crc32_combine(last.crc, check.crc, check.nbytes)
            merged[-1] = Checked(last.record, last.offset, last.nbytes + check.nbytes, crc)
        else:
            merged.append(check)
    return merged
