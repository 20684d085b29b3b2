"""Draw losses on the uninterrupted ones, ranks over time, and the cost of each failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

PHASES = ("detection", "rendezvous", "start of the processes", "load", "first step")
COLOURS = ("#d55e00", "#cc79a7", "#0072b2", "#009e73", "#e0b000")  # distinguishable for colour-blind readers
BY_WORLD = ("#0072b2", "#d55e00", "#009e73")
LOST = "#444444"


@dataclass(frozen=True)
class Restart:
    """A restart and its cost.

    Attributes:
        event: its description.
        began: its time, in seconds of the job.
        prepared: seconds before it in which training continued.
        phases: seconds of each phase until training continued.
        start: the last step that was not repeated.
        lost: seconds of each step that was repeated.
        read: bytes that the ranks read, by place.
    """

    event: str
    began: float
    prepared: float
    phases: Sequence[float]
    start: int
    lost: Sequence[float]
    read: Mapping[str, int]


@dataclass(frozen=True)
class Scene:
    """A job: title, logged steps, restarts, start time, and number of steps between saves."""

    title: str
    steps: Sequence[Mapping[str, Any]]
    restarts: Sequence[Restart]
    began: float
    every: int


def draw(reference: Mapping[int, Mapping[str, Any]], scenes: Sequence[Scene], path: Path) -> None:
    figure = Figure(figsize=(15, 11.5), dpi=110, layout="constrained")
    figure.suptitle("Jobs that survive the loss of agents, ranks and nodes", fontsize=14)
    figure.get_layout_engine().set(hspace=0.06, wspace=0.03)
    axes = figure.subplots(3, 2, height_ratios=(2.6, 1.4, 1.9))
    for (losses, worlds), scene in zip(axes[:2].T, scenes, strict=True):
        _draw_losses(losses, reference, scene)
        _draw_worlds(worlds, scene)
    _draw_costs(*axes[2], scenes)
    for each in axes.flat:
        each.grid(alpha=0.25, axis="x" if each in axes[2] else "both")
        each.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))


def _cut(steps: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Split the steps at restarts, where the step number goes back or the number of ranks changes."""
    runs: list[list[Mapping[str, Any]]] = []
    for each in steps:
        last = runs[-1][-1] if runs else None
        if last is None or each["step"] != last["step"] + 1 or each["world"] != last["world"]:
            runs.append([])
        runs[-1].append(each)
    return runs


def _find_colour(steps: Sequence[Mapping[str, Any]], world: int) -> str:
    return BY_WORLD[sorted({each["world"] for each in steps}).index(world) % len(BY_WORLD)]


def _draw_losses(axes: Axes, reference: Mapping[int, Mapping[str, Any]], scene: Scene) -> None:
    numbers = range(1, max(each["step"] for each in scene.steps) + 1)
    values = [reference[number]["loss"] for number in numbers]
    axes.plot(numbers, values, color="0.65", linewidth=5, label="uninterrupted", solid_capstyle="round")
    named: set[int] = set()
    for number, run in enumerate(_cut(scene.steps)):
        world = run[0]["world"]
        label = None if world in named else f"{world} rank{'s' * (world > 1)}"
        named.add(world)
        colour = _find_colour(scene.steps, world)
        axes.plot([e["step"] for e in run], [e["loss"] for e in run], color=colour, linewidth=1.4, label=label)
        if number:
            axes.axvline(run[0]["step"], color=colour, linewidth=0.8, linestyle="--")
    axes.set(xlabel="step (dashed: training continues from here)", ylabel="loss (nats a byte)", title=scene.title)
    axes.legend(frameon=False)


def _draw_worlds(axes: Axes, scene: Scene) -> None:
    most = max(each["world"] for each in scene.steps)
    for run in _cut(scene.steps):
        world, times = run[0]["world"], [run[0]["time"] - scene.began, run[-1]["time"] - scene.began]
        axes.fill_between(times, world, color=_find_colour(scene.steps, world), alpha=0.5)
    for number, restart in enumerate(scene.restarts):
        axes.axvline(restart.began, color="black", linewidth=1.2)
        height = most * (1.04, 1.16, 1.28)[number % 3]  # consecutive restarts are often close
        axes.annotate(
            restart.event,
            (restart.began, height),
            (3, 0),
            textcoords="offset points",
            fontsize=8,
            backgroundcolor="white",
        )
    axes.set(xlabel="seconds", xlim=(0, None), ylabel="ranks that train", ylim=(0, most * 1.4), yticks=range(most + 1))


def _draw_costs(work: Axes, waiting: Axes, scenes: Sequence[Scene]) -> None:
    """Draw a row per restart below its job's title: lost work on the left, time without training on the right."""
    rows = [(scene, restart) for scene in scenes for restart in (None, *scene.restarts)]
    longest = max(sum(each.phases) for scene in scenes for each in scene.restarts)
    for row, (scene, restart) in enumerate(rows):
        if restart is None:
            work.annotate(scene.title, (0, row), (4, -4), textcoords="offset points", va="center", fontweight="bold")
        else:
            _draw_lost(work, row, scene, restart)
            _draw_phases(waiting, row, restart, longest)
    for axes in (work, waiting):
        axes.set_yticks(range(len(rows)), [each.event if each and axes is work else "" for _, each in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.set_axisbelow(True)
    most = max(max(_find_most(scene), *(sum(each.lost) for each in scene.restarts)) for scene in scenes)
    work.set(xlim=(0, 1.3 * most), xlabel="seconds of lost work: repeated steps (outline: all steps between two saves)")
    waiting.set(xlim=(0, 1.8 * longest), xlabel="seconds until training continues")
    handles = [Patch(color=colour, label=name) for name, colour in zip(PHASES, COLOURS, strict=True)]
    waiting.legend(handles=handles, frameon=False, fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _find_most(scene: Scene) -> float:
    """Return the seconds of the steps between two saves."""
    longest = max(_cut(scene.steps), key=len)
    return float(scene.every * (longest[-1]["time"] - longest[0]["time"]) / max(1, len(longest) - 1))


def _draw_lost(axes: Axes, row: int, scene: Scene, restart: Restart) -> None:
    most, steps, seconds = _find_most(scene), len(restart.lost), sum(restart.lost)
    axes.barh(row, most, facecolor="none", edgecolor="0.6", linestyle="--")
    axes.barh(row, seconds, color=LOST)
    text = f"{steps} step{'s' * (steps != 1)}, {seconds:.1f} s" if steps else "none"
    right = max(most, seconds)
    axes.annotate(text, (right, row), (4, 0), textcoords="offset points", va="center", fontsize=8)


def _draw_phases(axes: Axes, row: int, restart: Restart, longest: float) -> None:
    left = 0.0
    for colour, seconds in zip(COLOURS, restart.phases, strict=True):
        axes.barh(row, seconds, left=left, color=colour)
        if seconds > longest / 18:  # otherwise the text does not fit
            axes.text(left + seconds / 2, row, f"{seconds:.1f}", ha="center", va="center", fontsize=8, color="white")
        left += seconds
    load, first = restart.phases[-2:]
    text = f"{left:.1f} s: {load:.2f} load, {first:.2f} first step"
    if restart.prepared:
        text = f"{text}; before, {restart.prepared:.0f} s of preparation during training"
    axes.annotate(text, (left, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
