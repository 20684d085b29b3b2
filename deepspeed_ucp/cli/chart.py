"""The map of a checkpoint as data: which rank's files hold which part of the model."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..atoms import COPY, ITEMSIZE, MASTER, MODULE, Atom, AtomicIndex, ParamKey
from .parameters import Parameter, sort_states, split_layer

FloatArray = npt.NDArray[np.float64]
Widths = dict[ParamKey, float]

MASTERS, STATES, OTHERS, COPIES = KINDS = ("masters", "optimizer states", "frozen and buffers", "model copies")

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_\d+(?:-model_(\d+))?-model_states\.pt")


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """One line of the map: the files of one rank, or of one role where no single rank can be named.

    Attributes:
        order: where it stands.
        block: what stands at the left of all rows of its pipeline stage and tensor-parallel rank.
        label: its own label.
    """

    order: tuple[int, ...]
    block: str = field(compare=False)
    label: str = field(compare=False)


@dataclass(slots=True)
class Lane:
    """Intervals [low, high) of the model that a row holds of one kind, in bytes from the map's left; and its bytes."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Map:
    """The map as data.

    Attributes:
        rows: top to bottom.
        lanes: row and kind → what it holds.
        width: bytes from left to right: every parameter once, with all its states and its copy.
        marks: layers as (start in bytes, end, label).
    """

    rows: tuple[Row, ...]
    lanes: dict[tuple[Row, str], Lane]
    width: float
    marks: tuple[tuple[float, float, str], ...]


def make_map(index: AtomicIndex, parameters: Sequence[Parameter]) -> Map:
    """Lay the parameters out along the model and sort every fragment into its file's row."""
    starts, sizes, width = _lay_out(index, parameters)
    rows = {number: find_row(index, file.path) for number, file in enumerate(index.stored.files)}
    lanes: dict[tuple[Row, str], Lane] = {}
    whole = {row.param: row.numel for row in parameters}
    states = sort_states({key.state for key in index.stored.atoms})
    for (name, state, instance), atom in index.stored.atoms.items():
        param = ParamKey(name, instance)
        kind = _find_kind(state)
        for low, high, record, nbytes in _spread(atom, whole.get(param)):
            row = rows[index.stored.records[record].file]
            if index.run.topology.wrapper == "atomic":
                row = Row((states.index(state),), "", f"{state}.pt")
            lane = lanes.setdefault((row, kind), Lane())
            lane.spans.append((starts[param] + low * sizes[param], starts[param] + high * sizes[param]))
            lane.nbytes += nbytes
    ordered = tuple(sorted({row for row, _ in lanes}))
    return Map(ordered, lanes, width, tuple(_mark_layers([row.param for row in parameters], starts, sizes)))


def _find_kind(state: str) -> str:
    return {MASTER: MASTERS, MODULE: OTHERS, COPY: COPIES}.get(state, STATES)


def _lay_out(index: AtomicIndex, parameters: Sequence[Parameter]) -> tuple[Widths, Widths, float]:
    """Where every parameter starts and how wide it is, in bytes of one copy of each of its states."""
    starts, sizes, at = {}, {}, 0.0
    for row in parameters:
        stored = count_shards(row.shards) or 1
        share = (row.numel if row.numel is not None else stored) / stored
        starts[row.param], sizes[row.param] = at, (row.nbytes + row.copy_bytes) * share
        at += sizes[row.param]
    return starts, sizes, max(at, 1.0)


def count_shards(shards: Sequence[Sequence[int]]) -> int:
    """Elements of all shards together."""
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in shards)


def _spread(atom: Atom, numel: int | None) -> list[tuple[float, float, int, int]]:
    """Fragments as (from, to) in parts of the parameter, with record and bytes.

    Shards lie side by side; where every one is the whole (replicas), over each other.
    """
    width, total, before, found = ITEMSIZE[atom.dtype], atom.numel or 1, 0, []
    for shard in atom.shards:
        replica = numel is not None and shard.numel == numel
        base, over = (0, numel) if replica else (before, total)
        for fragment in shard.fragments:
            low = (base + fragment.start) / (over or 1)
            found.append((low, low + fragment.numel / (over or 1), fragment.record, fragment.numel * width))
        before += shard.numel
    return found


def find_row(index: AtomicIndex, path: str) -> Row:
    """The row of a file, by its name."""
    name, tp = os.path.basename(path), max(index.run.topology.tp, 1)
    if match := _OPTIM.fullmatch(name):
        return _make_row(index, int(match[2]), int(match[1]))
    if match := _MODEL.fullmatch(name):
        return _make_row(index, int(match[2]), int(match[1]) if match[1] else None)
    if match := _LAYER.fullmatch(name):
        rank = int(match[1] or 0)
        return Row((1, rank), "layer files", f"tp {rank}" if tp > 1 else "all layers")
    return Row((2,), "", name)


def _make_row(index: AtomicIndex, mp: int, dp: int | None) -> Row:
    topology = index.run.topology
    stage, rank = divmod(mp, max(topology.tp, 1))
    block = " · ".join(
        text for text, used in ((f"pp {stage}", topology.pp > 1), (f"tp {rank}", topology.tp > 1)) if used
    )
    return Row((0, stage, rank, -1 if dp is None else dp), block, "model states" if dp is None else f"dp {dp}")


def _mark_layers(params: Sequence[ParamKey], starts: Widths, sizes: Widths) -> list[tuple[float, float, str]]:
    """Neighbouring parameters of one layer, or of one top-level module without numbers, as one mark."""
    marks: list[tuple[float, float, str]] = []
    last: object = None
    for param in params:
        prefix, number = key = split_layer(param.name)
        label = str(number) if number >= 0 else prefix
        start, end = starts[param], starts[param] + sizes[param]
        if marks and key == last:
            marks[-1] = (marks[-1][0], end, label)
        else:
            marks.append((start, end, label))
        last = key
    return marks


def rasterize(lane: Lane, width: float, columns: int) -> FloatArray:
    """How much of each column of the map a lane covers, 0 to 1."""
    spans = np.array(sorted(lane.spans), np.float64).reshape(-1, 2) * (columns / width)
    covered = np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])])
    edges = np.arange(columns + 1, dtype=np.float64)
    at = np.searchsorted(spans[:, 0], edges, side="right")
    inside = np.zeros_like(edges)
    some = at > 0
    before = at[some] - 1
    inside[some] = covered[before] + np.minimum(edges[some], spans[before, 1]) - spans[before, 0]
    return np.clip(np.diff(inside), 0.0, 1.0)


def shade(cover: FloatArray) -> FloatArray:
    """Opacity by coverage. What is narrower than can be seen is widened to three columns, never paler than 0.55."""
    seen = cover > 1e-9
    opacity = np.where(seen, 0.55 + 0.45 * cover, 0.0)
    narrow = seen & (cover < 0.9) & ~_beside(cover >= 0.9)
    return np.asarray(np.maximum(opacity, np.where(_beside(narrow), 0.55, 0.0)))


def _beside(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """A mask with each place's neighbours."""
    wide = mask.copy()
    wide[1:] |= mask[:-1]
    wide[:-1] |= mask[1:]
    return wide
