"""Draws the map of a checkpoint: which rank's files hold which part of the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError
from .chart import COPIES, KINDS, MASTERS, OTHERS, STATES, FloatArray, Map, Row, make_map, rasterize, shade
from .figures import count_of, format_bytes, format_count
from .summary import name_others

if TYPE_CHECKING:
    from .survey import Survey

COLOURS = {MASTERS: "#2f5d8a", STATES: "#e08e45", OTHERS: "#4a9d7c", COPIES: "#9db8d2"}
BACKGROUND, RULE, RULE_INK, INK, FAINT_INK = "#f6f5f2", "#ffffff", "#b5b9be", "#22262b", "#6b7178"

_COLUMNS = 1600


def draw_map(survey: Survey, path: str) -> None:
    """Draw the map into a file whose ending names the format.

    Raises:
        ConfigError: matplotlib is not there, or does not know the format.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}): pip install 'deepspeed_ucp[plot]'.") from None
    figure = Figure(facecolor="white")
    if os.path.splitext(path)[1].lower().lstrip(".") not in figure.canvas.get_supported_filetypes():
        known = ", ".join(sorted(figure.canvas.get_supported_filetypes()))
        raise ConfigError(f"--plot: {path} does not end in a format that can be drawn ({known}).")
    _paint(figure, make_map(survey.index, survey.parameters), survey)
    figure.savefig(path, dpi=150)


def _paint(figure: Any, drawn: Map, survey: Survey) -> None:
    rows = len(drawn.rows)
    height = min(max(0.26 * rows, min(0.5 * rows, 2.4)), 11.0)
    figure.set_size_inches(13.0, height + 2.1)
    low, high = 0.75 / (height + 2.1), 1 - 1.35 / (height + 2.1)
    axes = figure.add_axes((0.15, low, 0.75, high - low), facecolor=BACKGROUND)
    axes.set_xlim(0, drawn.width)
    axes.set_ylim(rows, 0)
    for side in axes.spines.values():
        side.set_visible(False)
    _paint_rows(axes, drawn, height)
    _paint_layers(axes, drawn, rows)
    _paint_blocks(axes, drawn, rows, height)
    _paint_title(figure, survey, height + 2.1)
    _paint_legend(figure, drawn, survey, height + 2.1)


def _paint_rows(axes: Any, drawn: Map, height: float) -> None:
    """One image: per row a lane for each kind that it holds, as high as the kind's share of the row's bytes."""
    pixels = max(4, int(height * 150 / len(drawn.rows)))
    margin = 1 if pixels >= 8 else 0
    image = np.ones((len(drawn.rows) * pixels, _COLUMNS, 4))
    image[..., :3], image[..., 3] = _rgb(BACKGROUND), 0.0
    for number, row in enumerate(drawn.rows):
        top = number * pixels + margin
        for kind, lines in _share_lines(drawn, row, pixels - 2 * margin):
            cover = rasterize(drawn.lanes[row, kind], drawn.width, _COLUMNS)
            image[top : top + lines, :, :3] = _rgb(COLOURS[kind])
            image[top : top + lines, :, 3] = shade(cover)
            top += lines
    extent = (0, drawn.width, len(drawn.rows), 0)
    axes.imshow(image, aspect="auto", interpolation="antialiased", extent=extent, zorder=2)


def _share_lines(drawn: Map, row: Row, lines: int) -> list[tuple[str, int]]:
    kinds = [kind for kind in KINDS if (row, kind) in drawn.lanes]
    total = sum(drawn.lanes[row, kind].nbytes for kind in kinds) or 1
    least = max(1, lines // 8)
    shares = [max(least, round(lines * drawn.lanes[row, kind].nbytes / total)) for kind in kinds]
    shares[shares.index(max(shares))] += lines - sum(shares)
    return list(zip(kinds, shares, strict=True))


def _sample_covers(drawn: Map) -> list[FloatArray]:
    lanes = list(drawn.lanes.values())
    return [rasterize(lane, drawn.width, _COLUMNS) for lane in lanes[:: max(1, len(lanes) // 16)]]


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))


def _paint_layers(axes: Any, drawn: Map, rows: int) -> None:
    """Thin lines between layers, and as many labels as there is room for."""
    axes.set_xticks([])
    room, last = drawn.width * 0.75 / 100, -drawn.width
    for low, high, label in drawn.marks:
        if low > 0:
            axes.plot([low, low], [0, rows], color=RULE, linewidth=0.8, zorder=3)
        middle, needed = (low + high) / 2, room * (len(label) + 1)
        if middle - last >= needed:
            _write(axes, label, (middle, rows), (0, -5), ha="center", va="top", color=FAINT_INK)
            last = middle + needed / 2
    axes.set_xlabel("the model in layer order, as wide as its bytes", fontsize=9, color=FAINT_INK, labelpad=20)


def _paint_blocks(axes: Any, drawn: Map, rows: int, height: float) -> None:
    """Labels and sizes: of rows where there is room for them, else of the blocks of a model-parallel rank's rows."""
    blocks = _find_blocks(drawn.rows)
    room = int(height / 0.17)
    axes.tick_params(length=0)
    axes.set_yticks([])
    for number, (start, _) in enumerate(blocks):
        if start:
            reach = -0.19 if number and room >= rows else 0.0
            axes.plot([reach * drawn.width, drawn.width], [start] * 2, color=RULE_INK, lw=0.5, zorder=4, clip_on=False)
    if rows <= room or len(blocks) == 1:
        _label_rows(axes, drawn, range(0, rows, 1 if rows <= room else -(-rows * 2 // room)))
        _label_blocks(axes, drawn, blocks, sizes=False)
    else:
        _label_blocks(axes, drawn, blocks[:: max(1, -(-len(blocks) // room))], sizes=True)


def _find_blocks(rows: Sequence[Row]) -> list[tuple[int, int]]:
    starts = [at for at in range(len(rows)) if not at or rows[at].block != rows[at - 1].block]
    return list(zip(starts, [*starts[1:], len(rows)], strict=True))


def _label_rows(axes: Any, drawn: Map, shown: Sequence[int]) -> None:
    axes.set_yticks([at + 0.5 for at in shown], [drawn.rows[at].label for at in shown], fontsize=8, color=INK)
    for at in shown:
        text = format_bytes(_sum_bytes(drawn, drawn.rows[at : at + 1]))
        _write(axes, text, (drawn.width, at + 0.5), (6, 0), va="center", color=FAINT_INK)


def _label_blocks(axes: Any, drawn: Map, blocks: Sequence[tuple[int, int]], *, sizes: bool) -> None:
    for start, end in blocks:
        rows, middle = drawn.rows[start:end], (start + end) / 2
        _write(axes, rows[0].block, (-0.19 * drawn.width, middle), (0, 0), va="center", fontweight="bold", color=INK)
        if sizes:
            ranks = rows[0].label if len(rows) == 1 else f"{rows[0].label} … {rows[-1].label}"
            _write(axes, ranks, (0, middle), (-6, 0), ha="right", va="center", color=INK)
            text = f"{format_bytes(_sum_bytes(drawn, rows))} in all"
            _write(axes, text, (drawn.width, middle), (6, 0), va="center", color=FAINT_INK)


def _sum_bytes(drawn: Map, rows: Sequence[Row]) -> int:
    return sum(drawn.lanes[row, kind].nbytes for row in rows for kind in KINDS if (row, kind) in drawn.lanes)


def _write(axes: Any, text: str, at: tuple[float, float], shift: tuple[float, float], **style: Any) -> None:
    """Text in the margin, ``shift`` points away from a place in the map."""
    axes.annotate(text, at, shift, textcoords="offset points", annotation_clip=False, **{"fontsize": 8, **style})


def _paint_title(figure: Any, survey: Survey, height: float) -> None:
    totals, topology = survey.totals, survey.index.run.topology
    elements = "" if totals.elements is None else f"{format_count(totals.elements)} parameters, "
    step = survey.index.run.counters.get("global_steps")
    kind = f"atomic, {topology.precision}" if topology.wrapper == "atomic" else topology.describe()
    text = f"{kind} · {elements}{format_bytes(totals.file_bytes)} in {count_of(totals.files, 'file')}"
    text += "" if step is None else f" · step {step}"
    name = "/".join(os.path.abspath(survey.folder).split("/")[-2:])
    figure.text(0.02, 1 - 0.3 / height, name, fontsize=14, fontweight="bold", color=INK, va="center")
    figure.text(0.02, 1 - 0.62 / height, text, fontsize=10, color=FAINT_INK, va="center")


def _paint_legend(figure: Any, drawn: Map, survey: Survey, height: float) -> None:
    from matplotlib.patches import Patch

    handles = []
    for kind in KINDS:
        nbytes = sum(lane.nbytes for (_, each), lane in drawn.lanes.items() if each == kind)
        if nbytes:
            name = name_others(survey.index) if kind == OTHERS else kind
            handles.append(Patch(color=COLOURS[kind], label=f"{name} {format_bytes(nbytes)}"))
    if any(np.mean((cover > 0) & (cover < 0.9)) > 0.05 for cover in _sample_covers(drawn)):
        handles.append(Patch(color="#b9bdc2", label="paler: slices narrower than this map can show"))
    figure.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(0.145, 1 - 1.0 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.1,
    )
