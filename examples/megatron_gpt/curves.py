"""The pictures: resumed curves on the source's own, and the differences below, for every source and precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from figures import Curves, Row
    from matplotlib.axes import Axes

# Told apart by colour-blind readers too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#882255", "#999933")
SMALLEST = 1e-8  # where a difference of exactly zero is drawn


def draw(title: str, curves: Sequence[Curves], path: Path) -> None:
    """Write the picture to `path` as PNG: a column for each source, model and precision."""
    figure = Figure(figsize=(6.5 * len(curves), 7), dpi=110, layout="constrained")
    rows = figure.subplots(2, len(curves), sharex=True, squeeze=False, height_ratios=(3, 2))
    for (above, below), curve in zip(rows.T, curves, strict=True):
        _draw_curves(above, below, curve)
    for axes in rows.flat:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}: losses after a resume under another topology")
    FigureCanvasAgg(figure).print_png(str(path))


def _draw_curves(above: Axes, below: Axes, curve: Curves) -> None:
    above.plot(*_series(curve.losses), color="0.6", linewidth=5, label="source, uninterrupted", solid_capstyle="round")
    resumes = [row for row in curve.rows if row.bound is not None]
    for row, colour in zip(resumes, COLOURS, strict=False):
        above.plot(*_series(row.losses), color=colour, linewidth=1, label=row.target)
        below.plot(*_series(_gaps(curve, row)), ".-", color=colour, linewidth=0.6, markersize=3)
    for row in curve.rows:
        if row.bound is None:
            below.plot(*_series(_gaps(curve, row)), color="0.5", linewidth=0.6, linestyle=":")
    below.axhline(curve.bound, color="black", linestyle="--", linewidth=1, label=f"bound: {curve.bound:.1e}")
    below.plot([], [], color="0.5", linewidth=0.6, linestyle=":", label="re-runs, moments forgotten")
    above.set(ylabel="loss (nats a byte)", title=curve.title)
    below.set(xlabel="step", ylabel="|difference|", yscale="log", ylim=(SMALLEST / 2, 1))
    above.legend(frameon=False, fontsize=8)
    below.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)


def _gaps(curve: Curves, row: Row) -> dict[int, float]:
    return {step: max(SMALLEST, abs(loss - curve.losses[step])) for step, loss in row.losses.items()}


def _series(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(values)
    return steps, [values[step] for step in steps]
