"""What both kinds of ``ds_ucp plan`` share: bandwidths, and the seconds that they make."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .printing import format_bytes, format_count, format_duration, format_table

if TYPE_CHECKING:
    from ..forecast.estimate import Bandwidths, Times


def add_bandwidths(parser: argparse.ArgumentParser) -> None:
    """The options."""
    group = parser.add_argument_group("bandwidths, in GB/s of 10^9 bytes")
    group.add_argument("--read-gbs", type=speed, metavar="GBS", help="what the storage gives all ranks together")
    group.add_argument("--rank-gbs", type=speed, metavar="GBS", help="what it gives one rank at most")
    group.add_argument("--net-gbs", type=speed, metavar="GBS", help="what a rank sends or receives")


def read_bandwidths(options: argparse.Namespace) -> Bandwidths | None:
    """What is given; None without a bandwidth of reading.

    Raises:
        ConfigError: one is given that counts beside it alone.
    """
    from ..forecast.estimate import Bandwidths

    if options.read_gbs is not None:
        return Bandwidths(options.read_gbs, options.rank_gbs, options.net_gbs)
    if options.rank_gbs is not None or options.net_gbs is not None:
        raise ConfigError("--rank-gbs and --net-gbs count beside the storage's bandwidth: give --read-gbs too.")
    return None


def positive(text: str) -> int:
    """An option's number, which is above 0."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"a positive integer is needed, found {text!r}")
    return value


def speed(text: str) -> float:
    """An option's GB/s."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"GB/s above 0 are needed, found {text!r}")
    return value


def tell_both(nbytes: int) -> str:
    """Binary units as elsewhere, and decimal ones, which bandwidths are told in."""
    return format_bytes(nbytes) + (f" ({format_count(nbytes)}B)" if nbytes >= 1_000_000_000 else "")


def tell_seconds(speeds: Bandwidths, times: Times) -> list[str]:
    """The seconds of a load as lines."""
    most = "" if speeds.rank is None else f", at most {speeds.rank:g} GB/s"
    rows = [
        ["the whole checkpoint once", format_seconds(times.checkpoint), "every byte of every file"],
        ["what the resume reads", format_seconds(times.aggregate), "all ranks together"],
        ["the rank that reads most", format_seconds(times.slowest), f"at an equal share of the bandwidth{most}"],
    ]
    if times.exchange is not None:
        rows.append(["exchange", format_seconds(times.exchange), f"at {speeds.net:g} GB/s per rank"])
    rows.append(["resume", format_seconds(times.load), "reading" if times.exchange is None else "reading and exchange"])
    return [f"at {speeds.read:g} GB/s", *(f"  {line}" for line in format_table(rows, right=(1,)))]


def format_seconds(seconds: float) -> str:
    """A little finer than durations are told elsewhere."""
    return f"{seconds:.1f} s" if 10 <= seconds < 120 else format_duration(seconds)
