"""Draws how often to save: the share of time that trains, by interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..forecast.interval import judge_interval
from .plot import BACKGROUND, FAINT_INK, INK, make_figure, save_figure
from .printing import format_duration

if TYPE_CHECKING:
    from ..forecast.interval import Interval, Way

_STYLES = (("#6b7178", "-"), ("#e08e45", "-"), ("#4a9d7c", "-"), ("#2f5d8a", "--"))
_STALLS, _LOST = "#9db8d2", "#c8b6a0"
_TICKS = {1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 36000: "10 h", 360000: "100 h"}


def draw_intervals(path: str, found: Sequence[tuple[Way, Interval]], mtbf: float) -> None:
    """Left how much of the time trains, by interval; right what takes the rest at the intervals of the table."""
    figure = make_figure(path)
    figure.set_size_inches(13.0, 5.0)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(left, found, mtbf)
    _draw_bars(right, found, mtbf)
    for axes in (left, right):
        axes.set_facecolor(BACKGROUND)
        axes.tick_params(labelsize=8, labelcolor=FAINT_INK, length=0)
        axes.spines[:].set_visible(False)
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower center" if axes is left else "lower right")
    title = f"How often to save, with a failure every {format_duration(mtbf)} on the mean"
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11)
    save_figure(figure, path, dpi=150)


def _draw_curves(axes: Any, found: Sequence[tuple[Way, Interval]], mtbf: float) -> None:
    ways = list(dict.fromkeys(way for way, _ in found))
    shortest, longest = min(each.seconds for _, each in found) / 12, max(each.seconds for _, each in found) * 6
    steps = [shortest * (longest / shortest) ** (step / 200) for step in range(201)]
    for way, (colour, line) in zip(ways, _STYLES, strict=False):
        shares = [100 * judge_interval(way, each, mtbf).trains for each in steps]
        kept_up = [share if each >= way.least else None for each, share in zip(steps, shares, strict=True)]
        axes.plot(steps, shares, ":", color=colour)
        axes.plot(steps, kept_up, line, color=colour, label=f"{way.saves}; a failure leaves {way.leaves}")
        for each in (each for of, each in found if of == way):
            axes.plot(each.seconds, 100 * each.trains, "o", color=colour, clip_on=False)
    if any(way.least > shortest for way in ways):
        axes.plot([], [], ":", color=FAINT_INK, label="shorter than storage or neighbour keep up with")
    ticks = {tick: label for tick, label in _TICKS.items() if shortest <= tick <= longest}
    axes.set(xscale="log", ylim=(0, 100))
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.grid(color="white")
    axes.set_xlabel("training between two saves", fontsize=9, color=FAINT_INK)
    axes.set_ylabel("% of time that trains", fontsize=9, color=FAINT_INK)


def _draw_bars(axes: Any, found: Sequence[tuple[Way, Interval]], mtbf: float) -> None:
    names = [f"{way.saves}, every {format_duration(each.seconds)};\n{way.leaves} is left" for way, each in found]
    stalls, lost = [100 * each.stalls for _, each in found], [100 * each.lost / mtbf for _, each in found]
    axes.barh(names, stalls, color=_STALLS, label="training stands still for saves")
    bars = axes.barh(names, lost, left=stalls, color=_LOST, label="failures: restarts, and work done again")
    axes.bar_label(bars, [f"trains {each.trains:.1%}" for _, each in found], fontsize=8, color=INK, padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlabel("% of time that does not train", fontsize=9, color=FAINT_INK)
