"""Draws the map of a checkpoint: which rank's files hold which part of the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..atoms import COPY, ITEMSIZE, MASTER, MODULE, Atom, AtomicIndex, ParamKey, count
from ..errors import ConfigError, StorageError, count_of, hide_secrets
from ..flat import join_spans
from ..io.paths import is_url, normalize
from ..sources.files import NO_LAYER, sort_files
from .parameters import Parameter, sort_states, split_layer
from .printing import format_bytes, format_count
from .summary import name_others

if TYPE_CHECKING:
    from .survey import Survey

MASTERS, STATES, OTHERS, COPIES = KINDS = ("masters", "optimizer states", "frozen and buffers", "model copies")
COLOURS = {MASTERS: "#2f5d8a", STATES: "#e08e45", OTHERS: "#4a9d7c", COPIES: "#9db8d2"}
BACKGROUND, INK, FAINT_INK = "#f6f5f2", "#22262b", "#6b7178"

NAMED_ROWS = 64
"""Ranks that a heat map names; of more every n-th."""

_LINE = 0.17
"""Inches that a label is high."""


@dataclass(frozen=True, slots=True, order=True)
class MapRow:
    """One line of the map: the files of one rank, or of one role where no single rank can be named.

    Attributes:
        order: where it stands.
        block: what all rows of its pipeline stage and tensor-parallel rank have in common.
        label: its own label.
    """

    order: tuple[int, ...]
    block: str = field(compare=False)
    label: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Map:
    """The map as data.

    Attributes:
        rows: top to bottom.
        lanes: row and kind → what it holds: (from, to) in bytes from the map's left, and bytes of the file.
        width: bytes from left to right: every parameter once, with all its states and its copy.
        marks: layers as (start in bytes, end, label).
    """

    rows: tuple[MapRow, ...]
    lanes: dict[tuple[MapRow, str], list[tuple[float, float, int]]]
    width: float
    marks: tuple[tuple[float, float, str], ...]

    def sum_bytes(self, row: MapRow | None = None, kind: str | None = None) -> int:
        """Bytes of one row, of one kind, or of all."""
        held = (spans for (r, k), spans in self.lanes.items() if row in (r, None) and kind in (k, None))
        return sum(nbytes for spans in held for *_, nbytes in spans)


def make_map(index: AtomicIndex, parameters: Sequence[Parameter]) -> Map:
    """Lay the parameters out along the model and sort every fragment into its file's row."""
    places, width = _lay_out(parameters)
    whole = {row.param: row.numel for row in parameters}
    rows = _name_rows(index)
    lanes: dict[tuple[MapRow, str], list[tuple[float, float, int]]] = {}
    for key, atom in index.stored.atoms.items():
        kind = {MASTER: MASTERS, MODULE: OTHERS, COPY: COPIES}.get(key.state, STATES)
        start, end = places[key.param]
        for low, high, record, nbytes in _spread(atom, whole.get(key.param)):
            path = index.stored.files[index.stored.records[record].file].path
            span = (start + low * (end - start), start + high * (end - start), nbytes)
            lanes.setdefault((rows[os.path.basename(path)], kind), []).append(span)
    return Map(tuple(sorted({row for row, _ in lanes})), lanes, width, tuple(_mark_layers(places)))


def _lay_out(parameters: Sequence[Parameter]) -> tuple[dict[ParamKey, tuple[float, float]], float]:
    """Where every parameter starts and ends, in bytes of one copy of each of its states, and the end of all."""
    places, at = {}, 0.0
    for row in parameters:
        stored = sum(map(count, row.shards)) or 1
        share = (row.numel if row.numel is not None else stored) / stored
        places[row.param] = at, at + (row.nbytes + row.copy_bytes) * share
        at = places[row.param][1]
    return places, max(at, 1.0)


def _spread(atom: Atom, numel: int | None) -> list[tuple[float, float, int, int]]:
    """Fragments as (from, to) in parts of the parameter, with record and bytes.

    Shards lie side by side; where every one is the whole (replicas), over each other.
    """
    before, found = 0, []
    for shard in atom.shards:
        base, over = (0, numel) if shard.numel == numel else (before, atom.numel)
        for fragment in shard.pieces:
            low = (base + fragment.start) / (over or 1)
            nbytes = fragment.numel * ITEMSIZE[atom.dtype]
            found.append((low, low + fragment.numel / (over or 1), fragment.record, nbytes))
        before += shard.numel
    return found


def _name_rows(index: AtomicIndex) -> dict[str, MapRow]:
    """The row of every file, by the file's name."""
    names = [os.path.basename(file.path) for file in index.stored.files]
    if index.run.format:
        named = sorted(set(names), key=lambda name: (len(name), name))
        return {name: MapRow((at,), "", name) for at, name in enumerate(named)}
    rows = {name: MapRow((2,), "", name) for name in names}
    if index.run.topology.is_atomic:
        states = [f"{state}.pt" for state in sort_states({key.state for key in index.stored.atoms})]
        return {**rows, **{name: MapRow((order,), "", name) for order, name in enumerate(states)}}
    folder, state_file = os.path.split(index.run.state_file)
    listing = sort_files(folder, dict.fromkeys([*names, state_file], 0))
    rows |= {name: _name_rank(index, mp, None) for mp, name in listing.model.items()}
    rows |= {name: _name_rank(index, mp, dp) for (mp, dp), name in listing.model_zero3.items()}
    rows |= {name: _name_rank(index, mp, dp) for (_, mp, dp), name in listing.optim.items()}
    for (layer, _, _), name in listing.experts.items():
        rows[name] = MapRow((1, layer), "experts", "all layers" if layer == NO_LAYER else f"layer {layer}")
    for (mp, ep), name in listing.expert_optim.items():
        rows[name] = replace(_name_rank(index, mp, ep), label=f"ep {ep}")
    for (_, tp), name in listing.layers.items():
        label = f"tp {tp}" if index.run.topology.tp > 1 else "all layers"
        rows[name] = MapRow((1, max(tp, 0)), "layer files", label)
    return rows


def _name_rank(index: AtomicIndex, mp: int, dp: int | None) -> MapRow:
    topology = index.run.topology
    stage, rank = divmod(mp, max(topology.tp, 1))
    used = [f"pp {stage}"] * (topology.pp > 1) + [f"tp {rank}"] * (topology.tp > 1)
    order = (0, stage, rank, -1 if dp is None else dp)
    return MapRow(order, " · ".join(used), "model states" if dp is None else f"dp {dp}")


def _mark_layers(places: dict[ParamKey, tuple[float, float]]) -> list[tuple[float, float, str]]:
    """Neighbouring parameters of one layer, or of one top-level module without numbers, as one mark."""
    marks: list[tuple[float, float, str]] = []
    last: object = None
    for param, (start, end) in places.items():
        prefix, number = key = split_layer(param.name)
        begin = marks.pop()[0] if key == last else start
        marks.append((begin, end, str(number) if number >= 0 else prefix))
        last = key
    return marks


def make_figure(path: str) -> Any:
    """An empty figure that is to be saved as ``path``, whose ending names the format.

    Raises:
        ConfigError: matplotlib is not there, or does not know the format; ``path`` is a URL.
    """
    if is_url(path):
        raise ConfigError(f"--plot: {path} is a URL; a picture is written to a local file.")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib ({error}): pip install 'matplotlib>=3.8', or in a clone pip install -e '.[plot]'."
        ) from None
    figure = Figure(facecolor="white", layout="constrained")
    if os.path.splitext(path)[1].lower().lstrip(".") not in figure.canvas.get_supported_filetypes():
        known = ", ".join(sorted(figure.canvas.get_supported_filetypes()))
        raise ConfigError(f"--plot: {path} does not end in a format that can be drawn ({known}).")
    return figure


def save_figure(figure: Any, path: str, *, dpi: int) -> None:
    """Write a figure to its file.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        figure.savefig(path, dpi=dpi)
    except OSError as error:
        raise StorageError(f"--plot: {path} cannot be written ({error.strerror or error}); draw elsewhere.") from error


def draw_heat(axes: Any, values: Sequence[Sequence[float]], ranks: Sequence[int], most: float) -> Any:
    """Draw a heat map, a row for each rank, from 0 to ``most``; the picture, for a scale beside it."""
    image = axes.imshow(values, aspect="auto", cmap="OrRd", vmin=0, vmax=most, interpolation="nearest")
    shown = range(0, len(ranks), -(-len(ranks) // NAMED_ROWS))
    axes.set_yticks(list(shown), [f"rank {ranks[at]}" for at in shown], fontsize=8)
    axes.tick_params(length=0, labelcolor=INK)
    return image


def draw_map(survey: Survey, path: str) -> None:
    """Draw the map into a file; errors are those of :func:`make_figure` and :func:`save_figure`."""
    figure = make_figure(path)
    drawn = make_map(survey.index, survey.parameters)
    height = min(max(0.26 * len(drawn.rows), min(0.5 * len(drawn.rows), 2.4)), 11.0)
    figure.set_size_inches(13.0, height + 1.8)
    axes = figure.add_subplot(facecolor=BACKGROUND)
    axes.set(xlim=(0, drawn.width), ylim=(len(drawn.rows), 0))
    axes.spines[:].set_visible(False)
    _paint_rows(axes, drawn)
    _paint_layers(axes, drawn)
    _label_rows(axes, drawn, int(height / _LINE))
    figure.suptitle(_make_title(survey), x=0.01, ha="left", color=INK, fontsize=11)
    _paint_legend(figure, drawn, survey.index)
    save_figure(figure, path, dpi=150)


def _paint_rows(axes: Any, drawn: Map) -> None:
    """Per row a bar for each kind that it holds, as high as the kind's share of the row's bytes.

    An outline of a seventh of a point lets a slice be seen that is narrower than a dot; slices that leave gaps between
    them, too narrow to be drawn, make a paler bar.
    """
    for number, row in enumerate(drawn.rows):
        sizes = {kind: drawn.sum_bytes(row, kind) for kind in KINDS if (row, kind) in drawn.lanes}
        shares = {kind: max(nbytes / (sum(sizes.values()) or 1), 1 / 8) for kind, nbytes in sizes.items()}
        top = number + 0.04
        for kind, share in shares.items():
            height, colour = 0.92 * share / sum(shares.values()), COLOURS[kind]
            bars = [(low, high - low) for low, high in join_spans(span[:2] for span in drawn.lanes[row, kind])]
            axes.broken_barh(bars, (top, height), color=colour, linewidth=0.15, snap=False, rasterized=True)
            top += height


def _paint_layers(axes: Any, drawn: Map) -> None:
    """Thin lines between layers, and as many labels as there is room for."""
    axes.vlines([low for low, *_ in drawn.marks if low > 0], 0, len(drawn.rows), color="white", linewidth=0.8)
    ticks: list[tuple[float, str]] = []
    free = 0.0
    for low, high, label in drawn.marks:
        middle, half = (low + high) / 2, drawn.width * (len(label) + 1) / 300
        if middle - half >= free or not ticks:
            ticks.append((middle, label))
            free = middle + half
    axes.set_xticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=8, color=FAINT_INK)
    axes.set_xlabel("the model in layer order, as wide as its bytes", fontsize=9, color=FAINT_INK)


def _label_rows(axes: Any, drawn: Map, room: int) -> None:
    """The rank of every row and its bytes, or of every n-th where there is no room for all; lines between blocks."""
    shown = range(0, len(drawn.rows), -(-len(drawn.rows) // max(room, 1)))
    rows = [drawn.rows[at] for at in shown]
    sizes = axes.secondary_yaxis("right")
    sizes.set_yticks([at + 0.5 for at in shown], [format_bytes(drawn.sum_bytes(row)) for row in rows], fontsize=8)
    axes.set_yticks([at + 0.5 for at in shown], [f"{row.block}   {row.label}" for row in rows], fontsize=8)
    sizes.spines[:].set_visible(False)
    for each, ink in ((axes, INK), (sizes, FAINT_INK)):
        each.tick_params(length=0, labelcolor=ink)
    blocks = [at for at in range(1, len(drawn.rows)) if drawn.rows[at].block != drawn.rows[at - 1].block]
    axes.hlines(blocks, 0, drawn.width, color=FAINT_INK, linewidth=0.5)


def _make_title(survey: Survey) -> str:
    totals, topology = survey.data["totals"], survey.index.run.topology
    elements = "" if totals["elements"] is None else f"{format_count(totals['elements'])} parameters, "
    step = survey.index.run.counters.get("global_steps")
    told = survey.index.run.format or "atomic"
    kind = f"{told}, {topology.precision}" if topology.is_atomic else topology.describe()
    name = "/".join(hide_secrets(normalize(survey.data["folder"])).split("/")[-2:])
    text = f"{name}: {kind} · {elements}{format_bytes(totals['file_bytes'])} in {count_of(totals['files'], 'file')}"
    return text if step is None else f"{text} · step {step}"


def _paint_legend(figure: Any, drawn: Map, index: AtomicIndex) -> None:
    from matplotlib.patches import Patch

    sizes = {kind: drawn.sum_bytes(kind=kind) for kind in KINDS}
    names = {**dict(zip(KINDS, KINDS, strict=True)), OTHERS: name_others(index)}
    handles = [
        Patch(color=COLOURS[kind], label=f"{names[kind]} {format_bytes(nbytes)}")
        for kind, nbytes in sizes.items()
        if nbytes
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
