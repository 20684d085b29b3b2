"""The picture of the demo: the losses on the uninterrupted ones, the ranks over time, the seconds of each restart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

PHASES = ("detection", "rendezvous", "start of the processes", "load", "first step")
COLOURS = ("#d55e00", "#cc79a7", "#0072b2", "#009e73", "#e0b000")  # told apart by colour-blind readers too
BY_WORLD = ("#0072b2", "#d55e00", "#009e73")


@dataclass(frozen=True)
class Restart:
    """What happened, when (seconds of the job), and the seconds of each phase until training went on."""

    what: str
    began: float
    phases: Sequence[float]


def draw(
    reference: Mapping[int, Mapping[str, Any]],
    log: Sequence[Mapping[str, Any]],
    restarts: Sequence[Restart],
    began: float,
    path: Path,
) -> None:
    figure = Figure(figsize=(11, 9), dpi=130, layout="constrained")
    losses, worlds, phases = figure.subplots(3, 1, height_ratios=(3, 1.5, 1.3))
    steps = [each for each in log if each["event"] == "step"]
    _draw_losses(losses, reference, steps)
    _draw_worlds(worlds, steps, restarts, began)
    _draw_phases(phases, restarts)
    for axes in (losses, worlds, phases):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))


def _cut(steps: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Steps between two restarts; a restart is where the steps go back, or the ranks change."""
    runs: list[list[Mapping[str, Any]]] = []
    for each in steps:
        last = runs[-1][-1] if runs else None
        if last is None or each["step"] != last["step"] + 1 or each["world"] != last["world"]:
            runs.append([])
        runs[-1].append(each)
    return runs


def _find_colour(steps: Sequence[Mapping[str, Any]], world: int) -> str:
    return BY_WORLD[sorted({each["world"] for each in steps}).index(world) % len(BY_WORLD)]


def _draw_losses(axes: Axes, reference: Mapping[int, Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> None:
    numbers = sorted(reference)
    values = [reference[number]["loss"] for number in numbers]
    axes.plot(numbers, values, color="0.65", linewidth=5, label="uninterrupted", solid_capstyle="round")
    named: set[int] = set()
    for number, run in enumerate(_cut(steps)):
        world = run[0]["world"]
        label = None if world in named else f"{world} rank{'s' * (world > 1)}"
        named.add(world)
        colour = _find_colour(steps, world)
        axes.plot([e["step"] for e in run], [e["loss"] for e in run], color=colour, linewidth=1.4, label=label)
        if number:
            axes.axvline(run[0]["step"], color=colour, linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="A job that goes on whatever happens to its agents")
    axes.legend(frameon=False)


def _draw_worlds(axes: Axes, steps: Sequence[Mapping[str, Any]], restarts: Sequence[Restart], began: float) -> None:
    most = max(each["world"] for each in steps)
    for run in _cut(steps):
        world, times = run[0]["world"], [run[0]["time"] - began, run[-1]["time"] - began]
        axes.fill_between(times, world, color=_find_colour(steps, world), alpha=0.5)
    for number, restart in enumerate(restarts):
        axes.axvline(restart.began, color="black", linewidth=1.2)
        height = most * (1.22 if number % 2 else 1.05)  # neighbours are often close
        axes.annotate(restart.what, (restart.began, height), (3, 0), textcoords="offset points", fontsize=8)
    axes.set(xlabel="seconds", xlim=(0, None), ylabel="ranks that train", ylim=(0, most * 1.4), yticks=range(most + 1))


def _draw_phases(axes: Axes, restarts: Sequence[Restart]) -> None:
    for row, restart in enumerate(restarts):
        left = 0.0
        for name, colour, seconds in zip(PHASES, COLOURS, restart.phases, strict=True):
            axes.barh(row, seconds, left=left, color=colour, label=name if row == 0 else None)
            if seconds > 0.4:
                axes.text(
                    left + seconds / 2, row, f"{seconds:.1f}", ha="center", va="center", fontsize=8, color="white"
                )
            left += seconds
        load, first = restart.phases[-2:]
        axes.annotate(
            f"{left:.1f} s, of these {load:.2f} load, {first:.2f} first step",
            (left, row), (4, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.set_xlim(0, 1.35 * max(sum(restart.phases) for restart in restarts))
    axes.set_yticks(range(len(restarts)), [restart.what for restart in restarts])
    axes.invert_yaxis()
    axes.set(xlabel="seconds until training goes on")
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.28))
