"""Draw the losses of resumed runs on the uninterrupted curve, and the differences below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # distinguishable for colour-blind readers
SMALLEST = 1e-9  # height at which a difference of zero is drawn


@dataclass(frozen=True)
class Curve:
    """Losses by step. Steps after `kept_until` were lost with the run and repeated by the next one."""

    label: str
    losses: Mapping[int, float]
    kept_until: int
    was_killed: bool = False


def draw(reference: Curve, curves: Sequence[Curve], bound: float, path: Path) -> None:
    """Write the picture to `path` as PNG; `bound` is the maximum difference, in nats."""
    figure = Figure(figsize=(11, 7), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    above.plot(*_series(reference.losses), color="0.6", linewidth=5, label=reference.label, solid_capstyle="round")
    for curve, colour in zip(curves, COLOURS, strict=False):
        _draw_curve(above, below, reference, curve, colour)
    _mark_interruptions(above, below, curves)
    below.axhline(bound, color="black", linestyle="--", linewidth=1, label=f"bound: {bound:.1e}")
    above.set(ylabel="loss (nats a byte)", title="A run killed twice and resumed on other hardware")
    below.set(xlabel="step", ylabel="|difference|", yscale="log", ylim=(SMALLEST / 2, 1))
    below.text(0, SMALLEST * 2, "exactly equal", fontsize=8, color="0.4")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    above.legend(frameon=False)
    below.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    FigureCanvasAgg(figure).print_png(str(path))


def _draw_curve(above: Axes, below: Axes, reference: Curve, curve: Curve, colour: str) -> None:
    kept = {step: loss for step, loss in curve.losses.items() if step <= curve.kept_until}
    lost = {step: loss for step, loss in curve.losses.items() if step >= curve.kept_until}
    above.plot(*_series(kept), color=colour, linewidth=1.5, label=curve.label)
    above.plot(*_series(lost), color=colour, linewidth=1.5, linestyle=":")
    deltas = {step: max(SMALLEST, abs(loss - reference.losses[step])) for step, loss in kept.items()}
    below.plot(*_series(deltas), ".-", color=colour, linewidth=0.8, markersize=4)


def _mark_interruptions(above: Axes, below: Axes, curves: Sequence[Curve]) -> None:
    top = max(max(curve.losses.values()) for curve in curves)
    for curve, colour in zip(curves, COLOURS, strict=False):
        if not curve.was_killed:
            continue
        killed = max(curve.losses)
        for axes in (above, below):
            axes.axvspan(curve.kept_until, killed, color=colour, alpha=0.08, linewidth=0)
            axes.axvline(curve.kept_until, color="0.3", linewidth=1)
            axes.axvline(killed, color=colour, linewidth=1, linestyle="--")
        above.annotate(
            f"SIGKILL at {killed};\nresumed from {curve.kept_until}",
            (killed, top),
            (4, 0),
            textcoords="offset points",
            va="top",
            fontsize=9,
            color=colour,
        )


def _series(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(values)
    return steps, [values[step] for step in steps]
