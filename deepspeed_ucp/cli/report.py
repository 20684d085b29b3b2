"""``ds_ucp report``: what loads told of themselves (``"report"`` in a ds_config): where the time of a restart went."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, StorageError
from .common import add_command
from .printing import OK, count_of, emit, format_bytes, format_duration, format_table

if TYPE_CHECKING:
    from .common import Commands

VERSION = 1
START = "start"
"""The time of a process before its load: imports, process groups, the engine."""

COLOURS = ("#9db8d2", "#2f5d8a", "#d1a13b", "#e08e45", "#4a9d7c", "#a8577e", "#6b7178", "#77b5d9", "#c9c4b8")


def add_parser(commands: Commands) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "report",
        help="show where the time of loads went, by rank and phase",
        description='Show what loads wrote into DIR, as "checkpoint": {"universal": {"report": "DIR"}} has them do: '
        "every rank's phases, bytes and files; which rank and which file were the slowest.",
        examples="""
            ds_ucp report reports/
            ds_ucp report reports/ --plot restart.png
            ds_ucp report reports/load-20261122T104512-310.json --json
        """,
    )
    parser.add_argument("folder", metavar="DIR", help="the folder, of which the last load is shown, or one load's file")
    parser.add_argument("--plot", metavar="FILE", help="draw timeline, heat map and throughput (png, svg, pdf)")


def run(options: argparse.Namespace) -> int:
    """Show it."""
    loads = list_loads(options.folder)
    told = read_load(loads[-1])
    ranks = [make_rank(each) for each in told["ranks"]]
    if options.plot:
        from .timeline import draw

        draw(told, ranks, options.plot)
    emit(options, to_data(loads, told, ranks), describe(loads, told, ranks))
    return OK


def list_loads(path: str) -> list[str]:
    """The files of a folder's loads in their order, or the one file.

    Raises:
        ConfigError: there is none.
    """
    if os.path.isfile(path):
        return [path]
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    found = [os.path.join(path, name) for name in names if name.startswith("load-") and name.endswith(".json")]
    if not found:
        raise ConfigError(f'{path}: holds no report of a load; loads write them where the ds_config says "report".')
    return found


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank told.

    Attributes:
        spans: (phase, seconds since the epoch at which it began, seconds).
        floor: seconds that reading its bytes took with nothing else: those that its threads waited for storage, over
            the threads.
        slowest: the file that gave its bytes at the lowest rate, and that rate in bytes a second; None without any.
    """

    rank: int
    host: str
    spans: tuple[tuple[str, float, float], ...]
    nbytes: int
    requests: int
    floor: float
    slowest: tuple[str, float] | None

    def sum(self, phase: str | None = None) -> float:
        """Seconds of a phase, or of the load without the start of its process."""
        return sum(seconds for name, _, seconds in self.spans if name == phase or (phase is None and name != START))


def read_load(path: str) -> Mapping[str, Any]:
    """A load's file.

    Raises:
        StorageError: it cannot be read.
        ConfigError: it is of another form.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            told = json.load(stream)
        if told["version"] != VERSION or not told["ranks"]:
            raise ValueError(f"version {told['version']}")
        for each in told["ranks"]:
            make_rank(each)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is no report of a load that this release knows ({error!r}).") from None
    return told  # type: ignore[no-any-return]


def make_rank(told: Mapping[str, Any]) -> Rank:
    """A rank's part of a file."""
    spans = [(str(name), float(at), float(seconds)) for name, at, seconds in told["spans"]]
    if spans:
        spans.insert(0, (START, float(told["started"]), spans[0][1] - float(told["started"])))
    files = {str(path): (int(nbytes), float(seconds)) for path, (nbytes, seconds) in told["files"].items()}
    rates = {path: nbytes / seconds for path, (nbytes, seconds) in files.items() if nbytes and seconds}
    slowest = min(rates, key=rates.__getitem__, default=None)
    return Rank(
        rank=int(told["rank"]),
        host=str(told["host"]),
        spans=tuple(spans),
        nbytes=int(told["bytes_read"]),
        requests=int(told["requests"]),
        floor=sum(seconds for _, seconds in files.values()) / max(int(told["threads"]), 1),
        slowest=None if slowest is None else (slowest, rates[slowest]),
    )


def list_phases(ranks: Sequence[Rank]) -> list[str]:
    """All phases in the order in which they come."""
    return list(dict.fromkeys(name for rank in ranks for name, *_ in rank.spans))


def to_data(loads: Sequence[str], told: Mapping[str, Any], ranks: Sequence[Rank]) -> dict[str, Any]:
    """For ``--json``."""
    slowest = find_slowest(ranks)
    return {
        "file": loads[-1],
        "loads": len(loads),
        **{key: told[key] for key in ("time", "loaded", "step", "direct", "reason", "state_bytes")},
        "seconds": slowest.sum(),
        "slowest_rank": slowest.rank,
        "ranks": [
            {
                "rank": each.rank,
                "host": each.host,
                "phases": {phase: each.sum(phase) for phase in list_phases([each])},
                "bytes_read": each.nbytes,
                "requests": each.requests,
                "floor": each.floor,
                "slowest_file": each.slowest and each.slowest[0],
            }
            for each in ranks
        ],
    }


def find_slowest(ranks: Sequence[Rank]) -> Rank:
    """The rank whose load took longest."""
    return max(ranks, key=Rank.sum)


def describe(loads: Sequence[str], told: Mapping[str, Any], ranks: Sequence[Rank]) -> list[str]:
    """Lines for people: the load, a table of the ranks, the slowest ones."""
    slowest = find_slowest(ranks)
    by = "deepspeed_ucp" if told["direct"] else "DeepSpeed"
    lines = [
        f"{told['loaded']}: step {told['step']}, loaded by {by} on {count_of(len(ranks), 'rank')} in "
        f"{format_duration(slowest.sum())}",
        f"  {told['reason']}",
        f"  the last of {count_of(len(loads), 'load')}: {os.path.basename(loads[-1])}",
        "",
    ]
    phases = list_phases(ranks)
    rows = [
        [each.rank, each.host, *(f"{each.sum(p):.2f}" for p in phases), format_bytes(each.nbytes), each.requests]
        for each in ranks
    ]
    numbers = range(2, len(phases) + 4)
    lines += format_table(rows, ["rank", "host", *phases, "bytes", "requests"], right=[0, *numbers])
    lines += ["", f"slowest rank  {slowest.rank} on {slowest.host}: {format_duration(slowest.sum())}"]
    files = [each.slowest for each in ranks if each.slowest]
    if files:
        path, rate = min(files, key=lambda each: each[1])
        lines.append(f"slowest file  {path}: {format_bytes(rate)}/s while it was read")
        floor = max(each.floor for each in ranks)
        lines.append(f"reading alone {format_duration(floor)}, the load {slowest.sum() / (floor or 1):.2f} times that")
    return lines
