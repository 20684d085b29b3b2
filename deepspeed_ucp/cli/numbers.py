"""Numbers of the command line: counts, speeds and durations, refused in one line where they are none."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile("".join(rf"(?:(?P<{unit}>\d+(?:\.\d+)?){unit})?" for unit in _UNITS), re.ASCII)


def _number(wanted: str, read: Callable[[str], float], most: float = float("inf")) -> Callable[[str], Any]:
    """An option's type: a number above 0 as ``read`` reads it, which refuses by a ValueError."""

    def parse(text: str) -> float:
        try:
            value = read(text)
        except (ValueError, OverflowError):
            value = 0
        if not 0 < value < most:
            raise argparse.ArgumentTypeError(f"{wanted}, found {text!r}")
        return value

    return parse


def _read_size(text: str) -> int:
    scale = _SUFFIXES.get(text[-1:].upper(), 1.0)
    return round(float(text[:-1] if scale > 1 else text) * scale)


def _read_duration(text: str) -> float:
    found = _DURATION.fullmatch(text)
    return sum(float(value) * _UNITS[unit] for unit, value in found.groupdict("0").items()) if found else 0.0


positive = _number("a positive integer is needed", lambda text: int(text) if text.isdecimal() else 0)
speed = _number("GB/s above 0 are needed", float)
size = _number("a number such as 70e9 or 175B is needed", _read_size, 1e18 + 1)
duration = _number("a time such as 8h, 30m, 1h30m or 2.5s is needed", _read_duration)
