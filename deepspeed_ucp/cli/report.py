"""``ds_ucp report``: what loads told of themselves (``"report"`` in a ds_config): where the time of a restart went."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..errors import ConfigError, StorageError, count_of
from .common import Commands, add_command
from .printing import OK, emit, format_bytes, format_duration, format_table

VERSION = 1
WHOLE = ("time", "loaded", "step", "direct", "reason", "state_bytes")
"""What a file tells of the whole load."""

START = "start"
"""The time of a process before its load: imports, process groups, the engine."""

_NOTED = 0.05
"""Of all seconds; what is less beyond the others' stays pale in the heat map."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank told of a load.

    Attributes:
        phases: seconds by phase, in order; the start of its process first.
        floor: seconds that reading its bytes took with nothing else: those that its threads waited for storage, over
            the threads.
        slowest: the file that gave its bytes at the lowest rate, and that rate in bytes a second; None without any.
    """

    rank: int
    host: str
    phases: Mapping[str, float]
    nbytes: int
    requests: int
    floor: float
    slowest: tuple[str, float] | None

    @property
    def seconds(self) -> float:
        """Of the load, without the start of its process."""
        return sum(seconds for name, seconds in self.phases.items() if name != START)


def add_parser(commands: Commands) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "report",
        help="show where the time of loads went, by rank",
        description='Show what loads wrote into DIR, as "checkpoint": {"universal": {"report": "DIR"}} has them do: '
        "every rank's phases, bytes and files; which rank and which file were the slowest.",
        examples="""
            ds_ucp report reports/
            ds_ucp report reports/ --plot restart.png
            ds_ucp report reports/load-20261122T104512-310.json --json
        """,
    )
    text = "the folder, of which the last load is shown, or one load's file"
    parser.add_argument("folder", metavar="DIR", help=text)
    text = "draw a heat map of seconds by rank and phase (png, svg, pdf)"
    parser.add_argument("--plot", metavar="FILE", help=text)


def run(options: argparse.Namespace) -> int:
    """Show the report."""
    loads = list_loads(options.folder)
    load, ranks = read_load(loads[-1])
    if options.plot:
        draw(load, ranks, options.plot)
    emit(options, _to_data(loads, load, ranks), list(_to_text(loads, load, ranks)))
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


def read_load(path: str) -> tuple[Mapping[str, Any], list[Rank]]:
    """A load's file, and what its ranks told.

    Raises:
        StorageError: it cannot be read.
        ConfigError: it is of another form.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            load = json.load(stream)
        if load["version"] != VERSION or not load["ranks"] or not load.keys() >= {*WHOLE}:
            raise ValueError(f"version {load['version']}")
        return load, [_make_rank(each) for each in load["ranks"]]
    except OSError as error:
        raise StorageError(f"{error.strerror}", path=path) from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path}: is no report of a load that this release knows ({error!r}).") from None


def _make_rank(entry: Mapping[str, Any]) -> Rank:
    phases: dict[str, float] = {}
    if entry["spans"]:
        phases[START] = float(entry["spans"][0][1]) - float(entry["started"])
    for name, _, seconds in entry["spans"]:
        phases[str(name)] = phases.get(str(name), 0.0) + float(seconds)
    files = {str(path): (int(nbytes), float(seconds)) for path, (nbytes, seconds) in entry["files"].items()}
    rates = [(path, nbytes / seconds) for path, (nbytes, seconds) in files.items() if nbytes and seconds]
    return Rank(
        rank=int(entry["rank"]),
        host=str(entry["host"]),
        phases=phases,
        nbytes=int(entry["bytes_read"]),
        requests=int(entry["requests"]),
        floor=sum(seconds for _, seconds in files.values()) / max(int(entry["threads"]), 1),
        slowest=min(rates, key=lambda each: each[1], default=None),
    )


def _to_data(loads: Sequence[str], load: Mapping[str, Any], ranks: Sequence[Rank]) -> dict[str, Any]:
    slowest = max(ranks, key=lambda each: each.seconds)
    listed = [
        {
            **{key: getattr(each, key) for key in ("rank", "host", "phases", "requests", "floor")},
            "bytes_read": each.nbytes,
            "slowest_file": each.slowest and each.slowest[0],
        }
        for each in ranks
    ]
    whole = {key: load[key] for key in WHOLE}
    spent = {"seconds": slowest.seconds, "slowest_rank": slowest.rank}
    return {"file": loads[-1], "loads": len(loads), **whole, **spent, "ranks": listed}


def _to_text(loads: Sequence[str], load: Mapping[str, Any], ranks: Sequence[Rank]) -> Iterator[str]:
    """The load, a table of the ranks, the slowest ones."""
    slowest = max(ranks, key=lambda each: each.seconds)
    taken, by = format_duration(slowest.seconds), "deepspeed_ucp" if load["direct"] else "DeepSpeed"
    yield f"{load['loaded']}: step {load['step']}, loaded by {by} on {count_of(len(ranks), 'rank')} in {taken}"
    yield f"  {load['reason']}"
    yield f"  the last of {count_of(len(loads), 'load')}: {os.path.basename(loads[-1])}"
    yield ""
    phases = _list_phases(ranks)
    rows = [
        [
            each.rank,
            each.host,
            *(f"{each.phases.get(p, 0):.2f}" for p in phases),
            format_bytes(each.nbytes),
            each.requests,
        ]
        for each in ranks
    ]
    yield from format_table(rows, ["rank", "host", *phases, "bytes", "requests"], right=[0, *range(2, len(phases) + 4)])
    yield ""
    yield f"slowest rank  {slowest.rank} on {slowest.host}: {taken}"
    if files := [each.slowest for each in ranks if each.slowest]:
        path, rate = min(files, key=lambda each: each[1])
        yield f"slowest file  {path}: {format_bytes(rate)}/s while it was read"
        floor = max(each.floor for each in ranks)
        yield f"reading alone {format_duration(floor)}, the load {slowest.seconds / (floor or 1):.2f} times that"


def _list_phases(ranks: Sequence[Rank]) -> list[str]:
    """All phases in the order in which they come."""
    return list(dict.fromkeys(name for rank in ranks for name in rank.phases))


def draw(load: Mapping[str, Any], ranks: Sequence[Rank], path: str) -> None:
    """Draw the heat map of a load: seconds by rank and phase.

    What is coloured are those beyond the phase's median, so that stragglers stand out. Errors are those of
    :func:`~.plot.make_figure` and :func:`~.plot.save_figure`.
    """
    from .plot import FAINT_INK, INK, NAMED_ROWS, draw_heat, make_figure, save_figure

    figure, phases = make_figure(path), _list_phases(ranks)
    figure.set_size_inches(9, min(max(0.3 * len(ranks), 1.6), 6.0) + 1.6)
    axes = figure.subplots()
    seconds = [[each.phases.get(phase, 0.0) for phase in phases] for each in ranks]
    usual = [median(column) for column in zip(*seconds, strict=True)]
    beyond = [[max(0.0, value - held) for value, held in zip(row, usual, strict=True)] for row in seconds]
    most = max(*map(max, beyond), _NOTED * sum(usual), 1e-9)
    draw_heat(axes, beyond, [each.rank for each in ranks], most)
    axes.set_xticks(range(len(phases)), phases, rotation=30, ha="right", fontsize=8)
    for row, values in enumerate(seconds if len(ranks) <= NAMED_ROWS // 2 else ()):
        for column, value in enumerate(values):
            ink = "white" if beyond[row][column] > 0.6 * most else INK
            axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=7, color=ink)
    axes.set_title("seconds; coloured: beyond the phase's median", fontsize=9, color=FAINT_INK, loc="left")
    title = f"{load['loaded']}: step {load['step']}, {len(ranks)} ranks · {load['reason']}"
    figure.suptitle(title[:150], x=0.01, ha="left", color=INK, fontsize=11)
    save_figure(figure, path, dpi=130)
