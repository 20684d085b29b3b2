"""``ds_ucp report``: what loads told of themselves (``"report"`` in a ds_config): where the time of a restart went."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import count_of
from .common import add_command
from .loads import Rank, list_loads, list_phases, make_rank, read_load
from .printing import OK, emit, format_bytes, format_duration, format_table

if TYPE_CHECKING:
    from .common import Commands


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
