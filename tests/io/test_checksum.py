"""Checksums of ranges that follow each other."""

from __future__ import annotations

import random

from isal import isal_zlib

from deepspeed_ucp.io.checksum import Checked, merge_checks

DATA = random.Random(1).randbytes(1000)


def check(record: int, low: int, high: int) -> Checked:
    return Checked(record, low, high - low, isal_zlib.crc32(DATA[low:high]))


def test_neighbours_are_joined_and_others_stay_apart() -> None:
    checks = [check(0, 40, 42), check(0, 0, 10), check(1, 0, 5), check(0, 10, 30)]
    assert merge_checks(checks) == [check(0, 0, 30), check(0, 40, 42), check(1, 0, 5)]
