"""Draw losses of resumed runs on the curves of their sources, and the differences below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from figures import Panel, Row
    from matplotlib.axes import Axes

# Distinguishable for colour-blind readers.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#882255", "#999933")
SMALLEST = 1e-8  # height at which a difference of zero is drawn


def draw(title: str, panels: Sequence[Panel], path: Path) -> None:
    """Write the picture to `path` as PNG, with a column per model and precision."""
    figure = Figure(figsize=(6.5 * len(panels), 7.5), dpi=110, layout="constrained")
    grid = figure.subplots(2, len(panels), sharex=True, squeeze=False, height_ratios=(3, 2))
    for (above, below), panel in zip(grid.T, panels, strict=True):
        _draw_losses(above, panel)
        _draw_gaps(below, panel)
    for axes in grid.flat:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}: losses after a resume under another topology")
    FigureCanvasAgg(figure).print_png(str(path))


def _draw_losses(axes: Axes, panel: Panel) -> None:
    for number, losses in enumerate(panel.sources.values()):
        label = "" if number else "uninterrupted"
        axes.plot(*_series(losses), color="0.7", linewidth=5, label=label, solid_capstyle="round")
    for row, colour in zip(_resumes(panel), COLOURS, strict=False):
        label = row.target if len(panel.sources) == 1 else f"from {row.source}"
        axes.plot(*_series(row.losses), color=colour, linewidth=1, label=label)
    ends = set(panel.sources) if len(panel.sources) == 1 else {row.target for row in _resumes(panel)}
    arrow = "from" if len(panel.sources) == 1 else "to"
    axes.set(ylabel="loss (nats a byte)", title=f"{panel.model}, {panel.precision}, {arrow} {' '.join(ends)}")
    axes.legend(frameon=False, fontsize=8)


def _draw_gaps(axes: Axes, panel: Panel) -> None:
    for row, colour in zip(_resumes(panel), COLOURS, strict=False):
        axes.plot(*_series(_gaps(panel, row)), ".-", color=colour, linewidth=0.6, markersize=3)
    for row in panel.rows:
        if row.is_control:
            axes.plot(*_series(_gaps(panel, row)), color="0.5", linewidth=0.7, linestyle=":")
    axes.axhline(panel.bound, color="black", linestyle="--", linewidth=1, label=f"bound: {panel.bound:.1e}")
    axes.plot([], [], color="0.5", linewidth=0.7, linestyle=":", label="re-runs; moments forgotten")
    axes.set(xlabel="step", ylabel="|difference|", yscale="log", ylim=(SMALLEST / 2, 10))
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)


def _resumes(panel: Panel) -> list[Row]:
    return [row for row in panel.rows if not row.is_control]


def _gaps(panel: Panel, row: Row) -> dict[int, float]:
    source = panel.sources[row.source]
    return {step: max(SMALLEST, abs(loss - source[step])) for step, loss in row.losses.items()}


def _series(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(values)
    return steps, [values[step] for step in steps]
