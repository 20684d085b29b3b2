"""``ds_ucp report --steps``: which ranks took longest for the steps of a run, by themselves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low
from typing import Any

from ..errors import ConfigError, StorageError, count_of
from .printing import OK, emit, format_duration, format_table

_SHOWN, _COLUMNS = 20, 1000
"""Ranks of the table, and columns of the heat map; of more steps neighbouring ones are one column."""


@dataclass(frozen=True, slots=True)
class RankSteps:
    """What one rank told of its steps.

    Attributes:
        work: seconds that it took by itself, by step.
        seconds: of the steps, with all waiting.
        median: of ``work``.
        factor: how many times the ranks' median that is.
        worst: the step that took it longest.
    """

    rank: int
    host: str
    work: Mapping[int, float]
    seconds: Mapping[int, float]
    median: float
    factor: float
    worst: int


def report_steps(options: argparse.Namespace) -> int:
    """Show the files, and draw them where that is asked for."""
    ranks = read_steps(options.steps)
    if options.plot:
        draw(ranks, options.plot)
    emit(options, _to_data(ranks), list(_to_text(ranks)))
    return OK


def read_steps(paths: Sequence[str]) -> list[RankSteps]:
    """The ranks of some files together, the slowest first; of a step that was done again the last time counts.

    A line that is not whole, as a full disk leaves it, is passed over.

    Raises:
        StorageError: a file cannot be read.
        ConfigError: there is no step in them.
    """
    work: dict[int, dict[int, float]] = {}
    seconds: dict[int, dict[int, float]] = {}
    hosts: dict[int, str] = {}
    for line in _read_lines(paths):
        try:
            told = json.loads(line)
            rank, step = int(told["rank"]), int(told["step"])
            both = float(told["work"]), float(told["seconds"])
            host = str(told["host"])
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            continue
        hosts[rank] = host
        work.setdefault(rank, {})[step], seconds.setdefault(rank, {})[step] = both
    if not work:
        raise ConfigError(
            f"{', '.join(paths)}: there are no steps in it; `ds_ucp supervise --steps FILE` writes those of ranks "
            "that have the plugin on (DEEPSPEED_UCP=1)."
        )
    medians = {rank: median(each.values()) for rank, each in work.items()}
    usual = max(median_low(medians.values()), 1e-6)
    found = [
        RankSteps(rank, hosts[rank], own, seconds[rank], own_median, own_median / usual, max(own, key=own.__getitem__))
        for rank, own in work.items()
        for own_median in (medians[rank],)
    ]
    return sorted(found, key=lambda each: (-each.median, each.rank))


def _read_lines(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="replace") as stream:
                yield from stream
        except OSError as error:
            raise StorageError(f"{error.strerror}", path=path) from None


def _to_data(ranks: Sequence[RankSteps]) -> dict[str, Any]:
    names = ("rank", "host", "median", "factor", "worst")
    listed = [{**{name: getattr(each, name) for name in names}, "steps": len(each.work)} for each in ranks]
    return {"steps": len({step for each in ranks for step in each.work}), "ranks": listed}


def _to_text(ranks: Sequence[RankSteps]) -> Iterator[str]:
    steps = {step for each in ranks for step in each.work}
    whole = median(seconds for each in ranks for seconds in each.seconds.values())
    yield (
        f"{count_of(len(ranks), 'rank')}, {count_of(len(steps), 'step')} ({min(steps)} to {max(steps)}), "
        f"{format_duration(whole)} a step in the median"
    )
    yield ""
    rows = [
        [
            each.rank,
            each.host,
            f"{each.median:.3f}",
            f"{each.factor:.2f}",
            f"{each.work[each.worst]:.3f}",
            each.worst,
        ]
        for each in ranks[:_SHOWN]
    ]
    headers = ["rank", "host", "alone s", "÷ median", "worst s", "at step"]
    yield from format_table(rows, headers, right=[0, 2, 3, 4, 5])
    if len(ranks) > _SHOWN:
        yield f"… and {len(ranks) - _SHOWN} ranks that are faster"


def draw(ranks: Sequence[RankSteps], path: str) -> None:
    """Draw the heat map: seconds that each rank took by itself, by step.

    Errors are those of :func:`~.plot.make_figure` and :func:`~.plot.save_figure`.
    """
    from .plot import FAINT_INK, INK, draw_heat, make_figure, save_figure

    figure = make_figure(path)
    shown = sorted(ranks, key=lambda each: each.rank)
    steps = sorted({step for each in ranks for step in each.work})
    width = -(-len(steps) // _COLUMNS)
    columns = [steps[at : at + width] for at in range(0, len(steps), width)]
    values = [[_mean(each.work, column) for column in columns] for each in shown]
    told = sorted(value for row in values for value in row if value == value)
    most = max(told[int(0.99 * (len(told) - 1))], 2 * median(each.median for each in ranks), 1e-9)
    figure.set_size_inches(11, min(max(0.3 * len(ranks), 1.6), 8.0) + 1.6)
    axes = figure.subplots()
    scale = figure.colorbar(draw_heat(axes, values, [each.rank for each in shown], most), ax=axes, extend="max")
    scale.set_label("seconds", fontsize=8, color=FAINT_INK)
    scale.ax.tick_params(labelsize=8, labelcolor=INK)
    every = max(len(columns) // 8, 1)
    ticks = range(0, len(columns), every)
    axes.set_xticks(list(ticks), [columns[at][0] for at in ticks], fontsize=8)
    axes.set_xlabel("step", fontsize=9, color=FAINT_INK)
    axes.set_title("seconds that each rank took by itself", fontsize=9, color=FAINT_INK, loc="left")
    slow = ranks[0]
    title = (
        f"{len(ranks)} ranks, {len(steps)} steps · slowest: rank {slow.rank} on {slow.host}, {slow.factor:.2f} × median"
    )
    figure.suptitle(title[:150], x=0.01, ha="left", color=INK, fontsize=11)
    save_figure(figure, path, dpi=130)


def _mean(work: Mapping[int, float], column: Sequence[int]) -> float:
    held = [work[step] for step in column if step in work]
    return fmean(held) if held else float("nan")
