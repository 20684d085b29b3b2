"""Draws where the time of a load went: a timeline per rank, a heat map by phase, throughput against the floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from .loads import Rank, list_phases
from .plot import FAINT_INK, INK, make_figure, save_figure

COLOURS = ("#9db8d2", "#2f5d8a", "#d1a13b", "#e08e45", "#4a9d7c", "#a8577e", "#6b7178", "#77b5d9", "#c9c4b8")

_NOTED = 0.05
"""Of all seconds; what is less beyond the others' stays pale."""

_ROWS = 64
"""Ranks that are named; of more every n-th."""


def draw(told: Mapping[str, Any], ranks: Sequence[Rank], path: str) -> None:
    """Draw a load into a file; errors are those of :func:`make_figure` and :func:`save_figure`."""
    height = min(max(0.3 * len(ranks), 1.6), 6.0)
    figure = make_figure(path)
    figure.set_size_inches(13, 2 * height + 2.6)
    axes = figure.subplot_mosaic([["timeline", "timeline"], ["heat", "rates"]])
    phases = list_phases(ranks)
    _draw_timeline(axes["timeline"], ranks, phases)
    _draw_heat(axes["heat"], ranks, phases)
    _draw_rates(axes["rates"], ranks)
    for each in axes.values():
        _name_ranks(each, ranks)
    title = f"{told['loaded']}: step {told['step']}, {len(ranks)} ranks · {told['reason']}"
    figure.suptitle(title[:150], x=0.01, ha="left", color=INK, fontsize=11)
    save_figure(figure, path, dpi=130)


def _draw_timeline(axes: Any, ranks: Sequence[Rank], phases: Sequence[str]) -> None:
    """Phases from the first process's start on; a phase that a rank enters several times is one colour."""
    zero = min((at for each in ranks for _, at, _ in each.spans), default=0.0)
    for number, phase in enumerate(phases):
        colour = COLOURS[number % len(COLOURS)]
        for row, each in enumerate(ranks):
            bars = [(at - zero, seconds) for name, at, seconds in each.spans if name == phase]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=colour, label=phase if row == 0 else None)
    axes.set_xlabel("seconds since the first process began", color=FAINT_INK, fontsize=9)
    axes.legend(frameon=False, fontsize=8, ncols=len(phases) or 1, loc="lower left", bbox_to_anchor=(0, 1))


def _draw_heat(axes: Any, ranks: Sequence[Rank], phases: Sequence[str]) -> None:
    """Seconds by rank and phase; what is coloured are those beyond the phase's median, so that stragglers stand out."""
    seconds = [[each.sum(phase) for phase in phases] for each in ranks]
    usual = [median(column) for column in zip(*seconds, strict=True)]
    beyond = [[max(0.0, value - held) for value, held in zip(row, usual, strict=True)] for row in seconds]
    most = max(*map(max, beyond), _NOTED * sum(usual), 1e-9)
    axes.imshow(beyond, aspect="auto", cmap="OrRd", vmin=0, vmax=most)
    axes.set_xticks(range(len(phases)), phases, rotation=30, ha="right", fontsize=8)
    if len(ranks) <= _ROWS // 2:
        for row, values in enumerate(seconds):
            for column, value in enumerate(values):
                ink = "white" if beyond[row][column] > 0.6 * most else INK
                axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=7, color=ink)
    axes.set_title(
        "seconds by rank and phase; coloured: beyond the phase's median", fontsize=9, color=FAINT_INK, loc="left"
    )


def _draw_rates(axes: Any, ranks: Sequence[Rank]) -> None:
    """Bytes a second over the whole load, and those of reading alone."""
    for row, each in enumerate(ranks):
        mega = each.nbytes / 1e6
        if mega and each.floor and each.sum():
            axes.barh(row, mega / each.floor, height=0.8, color="#e4e0d8", label="reading alone" if row == 0 else None)
            axes.barh(row, mega / each.sum(), height=0.5, color="#2f5d8a", label="the load" if row == 0 else None)
    axes.set_xlabel("MB a second", color=FAINT_INK, fontsize=9)
    axes.set_title("bytes that each rank read, over its seconds", fontsize=9, color=FAINT_INK, loc="left")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


def _name_ranks(axes: Any, ranks: Sequence[Rank]) -> None:
    every = -(-len(ranks) // _ROWS)
    shown = range(0, len(ranks), every)
    axes.set_yticks(list(shown), [f"rank {ranks[at].rank}" for at in shown], fontsize=8)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, labelcolor=INK)
