"""Rules from ``universal_checkpoint_info``, a checkpoint's own layout.

Training scripts (Megatron-DeepSpeed in client_state) or AutoTP write it. DeepSpeed's converter
(``deepspeed/checkpoint/ds_to_universal.py``) concatenates parameters that are in no list on dimension 0. This module
makes no rule for them, because Megatron-DeepSpeed writes no row-parallel patterns at TP=1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..errors import MismatchError
from ..model.flat import find_gaps
from ..model.storage import count, make_strides
from .kinds import Partial, Pattern, Replicate, ShardH, ShardNC, ShardV
from .layout import Layout, Product, Shape, find_faults, measure, whole
from .rules import Matcher, Rule, RuleSet, Spec

INFO = "universal_checkpoint_info"
"""Attribute of a module and key of its model states. The following constants are its keys
(``deepspeed/checkpoint/constants.py``)."""

ROWS = "parameter_with_row_parallelism_patterns"
PARTS = "parameter_with_sub_params"
UNSUPPORTED = "autotp_unsupported_parameter_patterns"
AFFINE = "affine_map"

_MOST_PARTS = 1 << 12
_FORMAT = 1  # of affine maps

_SIMPLE = re.compile(r"[^*+?{}()|]*(?:[*+][^*+?{}()|]*)?")
"""Expressions that Python's engine matches in at most quadratic time: one repeat of one character, no alternatives."""

_LISTS: tuple[tuple[str, Pattern], ...] = (
    ("tp_replicated_parameter_patterns", Replicate()),
    ("parameter_to_average_patterns", Partial()),
    ("parameter_with_2_sub_params_cat_dim_0", ShardNC(parts=(1, 1))),
    (ROWS, ShardH(dim=1)),
)
"""Keys of lists of expressions, and the pattern of the parameters that match."""


@dataclass(frozen=True, slots=True)
class Viewed(Pattern):
    """Sub-parameters along an axis of a viewed shape (SubparamShape), cut by rank.

    Attributes:
        view: logical sizes, -1 for a size that follows from the number of elements; ``view[axis]`` is ignored.
        axis: the view's dimension that is cut.
        parts: sizes of the sub-parameters along it, or the number of equal ones.
        widths: width of each part on each rank, if the metadata has it.
    """

    view: Shape
    axis: int
    parts: tuple[int, ...] | int
    widths: tuple[tuple[int, ...], ...] | None = None

    def _lay(self, shapes: Sequence[Shape]) -> Layout:
        dims = len(shapes[0])
        spare = len(self.view) - dims  # the cut dimension is several of the view, with ``axis`` among them
        for first in range(max(0, self.axis - spare), min(self.axis + 1, dims)):
            pattern = self._fit(shapes, first, first + spare)
            if pattern is not None:
                return pattern.join(shapes)
        raise MismatchError(
            f"sub-parameters in the view {list(self.view)}, cut along its dimension {self.axis}, do not fit shards of "
            f"{list(shapes)}"
        )

    def _fit(self, shapes: Sequence[Shape], first: int, last: int) -> ShardNC | None:
        """Return the pattern if dimension ``first`` is the view's ``first`` to ``last``."""
        view_rest = (*self.view[:first], *self.view[last + 1 :])
        local_rest = (*shapes[0][:first], *shapes[0][first + 1 :])
        outer, inner = self.view[first : self.axis], self.view[self.axis + 1 : last + 1]
        if any(full not in (-1, size) for full, size in zip(view_rest, local_rest, strict=True)) or -1 in outer + inner:
            return None
        blocks, step, total = count(outer), count(inner), sum(shape[first] for shape in shapes)
        if isinstance(self.parts, int):
            return ShardNC(parts=(1,) * self.parts, dim=first, blocks=blocks, unit=step)
        if sum(self.parts) * blocks * step != total:
            return None
        widths = self.widths and tuple(tuple(width * step for width in part) for part in self.widths)
        parts = tuple(part * step for part in self.parts)
        return ShardNC(parts=parts, dim=first, blocks=blocks, sized=True, unit=step, widths=widths)


def from_universal_info(info: object, source: str = "checkpoint") -> RuleSet:
    """Make the rules of a ``universal_checkpoint_info``.

    Args:
        info: the dictionary as saved, of any version; other values, such as None, give no rules.
        source: "target" for a live engine's info.

    Raises:
        MismatchError: an affine map has a newer format, or an entry is malformed.
    """
    name = "universal_checkpoint_info" if source != "target" else "the live engine's universal_checkpoint_info"
    if not isinstance(info, Mapping):
        return RuleSet(name)
    try:
        return _read_info(name, info, source)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise MismatchError(
            f"universal_checkpoint_info: an entry is malformed ({type(error).__name__}: {error})"
        ) from None


def _read_info(name: str, info: Mapping[str, Any], source: str) -> RuleSet:
    unsupported = [_refuse_rule(text, f"{name}: {reason}") for text, reason in (info.get(UNSUPPORTED) or {}).items()]
    rules = [*unsupported, *_read_affine(name, info), *_read_parts(info), *_read_lists(info)]
    literal: dict[str, list[Rule]] = {}
    for rule in rules:
        if (whole_name := _unescape(rule.text)) is not None:
            literal.setdefault(whole_name, []).append(rule)
    vocab = info.get("original_vocab_size")
    if isinstance(vocab, int) and vocab < 1:
        raise MismatchError(f"universal_checkpoint_info: original_vocab_size is {vocab}")
    return RuleSet(
        name=name,
        rules=tuple(rule for rule in rules if _unescape(rule.text) is None),
        literal={whole_name: tuple(group) for whole_name, group in literal.items()},
        vocab=vocab if isinstance(vocab, int) else None,
        # AutoTP before it wrote maps: it lists every parameter except those cut on dimension 0.
        fallback=ShardV() if UNSUPPORTED in info and AFFINE not in info else None,
        source=source,
        shared=tuple(map(compile_prefix, _get_list(info, "pipeline_replicated_parameter_patterns"))),
        reported=True,
    )


def _make_rule(text: str, pattern: Pattern | Spec, rank: int = 0, vocab: bool = False) -> Rule:
    name = _unescape(text)
    match = compile_prefix(text) if name is None else re.compile(re.escape(name)).fullmatch
    return Rule(text, match, pattern, rank, vocab)


def _refuse_rule(text: str, reason: str) -> Rule:
    """Make a rule that refuses a parameter with precedence over all others."""
    return _make_rule(text, Spec(match=text, pattern="unsettled", reason=reason), rank=-1)


def compile_prefix(text: object) -> Matcher:
    """Compile a checkpoint's expression, which matches a prefix as in DeepSpeed.

    The file may be malicious, so RE2 matches the expression in linear time. Python's engine matches the simple
    expressions that scripts write, for which it is several times faster.

    Raises:
        MismatchError: the expression is invalid, or cannot be matched in linear time.
    """
    if not isinstance(text, str):
        raise MismatchError(f"universal_checkpoint_info: {text!r:.80} is not a regular expression")
    try:
        return re.compile(text).match if _SIMPLE.fullmatch(text) else _compile_linear(text)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise MismatchError(
            f"universal_checkpoint_info: the expression {text!r:.80} cannot be matched in linear time ({error})"
        ) from None


def _compile_linear(text: str) -> Matcher:
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(text, options)
    except re2.error as error:
        raise ValueError(error.args[0].decode() if error.args else "") from None
    return lambda name: compiled.match(name.encode("utf-8", "replace").decode())


def _unescape(text: object) -> str | None:
    """Return the name if an expression is ``^escaped name$``, else None."""
    if not (isinstance(text, str) and text.startswith("^") and text.endswith("$")):
        return None
    name = re.sub(r"\\(.)", r"\1", text[1:-1])
    return name if re.escape(name) == text[1:-1] else None


def _get_list(info: Mapping[str, Any], key: str) -> Sequence[Any]:
    listed = info.get(key) or []
    if not isinstance(listed, (list, tuple)):
        raise MismatchError(f"universal_checkpoint_info: {key} must be a list, found {listed!r}")
    return listed


def _read_lists(info: Mapping[str, Any]) -> Iterator[Rule]:
    for key, pattern in _LISTS:
        yield from (_make_rule(text, pattern, rank=2) for text in _get_list(info, key))
    yield from filter(None, map(_follow_rows, _get_list(info, ROWS)))
    for text in _get_list(info, "vocabulary_parameter_patterns"):
        yield _make_rule(text, ShardV(), rank=3, vocab=True)


def _follow_rows(text: str) -> Rule | None:
    """Make a rule for a feed-forward layer's unlisted first matrix from its second.

    The second is row-parallel. Its columns correspond to the first's rows, so a first matrix with as many rows is cut
    along them. A first matrix with twice as many rows is a fused gate and up in an unknown order.
    """
    front, second, _ = text.partition(_SECOND)
    if not second:
        return None
    try:
        regex = compile_prefix(rf"(?P<stem>{front})dense_h_to_4h\.(?:weight|bias)$")
    except MismatchError:
        return None
    first = f"{front}dense_h_to_4h"
    return Rule(first, regex, Spec(match=first, pattern="shard-v", when=_FITS), rank=4)


_SECOND = "dense_4h_to_h"
_FITS = f"own(0) == sibling('{_SECOND}.weight', 1)"


def _read_parts(info: Mapping[str, Any]) -> Iterator[Rule]:
    version, widths = float(info.get("universal_checkpoint_version") or 0.0), info.get("sub_param_shard_widths") or {}
    for entry in _get_list(info, PARTS):
        try:
            view, axis, texts = tuple(entry["shape"]), int(entry["partition_dim"]), entry["patterns"]
            size_or_sizes = view[axis]
        except (KeyError, TypeError, IndexError, ValueError):
            raise MismatchError(f"universal_checkpoint_info: {PARTS} has a malformed entry: {entry!r:.200}") from None
        sizes = tuple(
            1 if dim == axis else sum(size) if isinstance(size, (list, tuple)) else int(size)
            for dim, size in enumerate(view)
        )
        for text in texts:
            rank_widths = tuple(tuple(map(int, part)) for part in widths.get(text) or ()) or None
            parts = _read_sizes(size_or_sizes, rank_widths, version)
            known_sizes = (*sizes, *((parts,) if isinstance(parts, int) else parts))
            if min(known_sizes) < -1 or 0 in known_sizes or len(known_sizes) > _MOST_PARTS:
                raise MismatchError(f"universal_checkpoint_info: {PARTS} has invalid sizes: {entry!r:.200}")
            pattern = Viewed(sizes, axis, parts, rank_widths)
            yield _make_rule(text, pattern, rank=1)


def _read_sizes(value: Any, widths: Any, version: float) -> tuple[int, ...] | int:
    """Read sizes of parts; a plain number is their count before version 0.4."""
    if widths:
        return tuple(sum(part) for part in widths)
    if isinstance(value, (list, tuple)):
        return tuple(int(size) for size in value)
    if version >= 0.4:
        return (int(value),)
    if not 0 < int(value) <= _MOST_PARTS:
        raise MismatchError(f"universal_checkpoint_info: {PARTS} has {value} sub-parameters")
    return int(value)


def _read_affine(name: str, info: Mapping[str, Any]) -> Iterator[Rule]:
    section = info.get(AFFINE) or {}
    if int(section.get("version", _FORMAT)) > _FORMAT:
        raise MismatchError(
            f"universal_checkpoint_info: affine_map has format {section['version']}, this release supports up to "
            f"{_FORMAT}; update deepspeed_ucp"
        )
    for text, entry in (section.get("params") or {}).items():
        try:
            yield _make_rule(text, read_map(entry))
        except MismatchError as error:
            yield _refuse_rule(text, f"{name}: {error}")


# -- affine maps (``deepspeed/checkpoint/affine.py``, format 1) --------------------------------------------------------
#
# A map lists, per rank, blocks of the logical tensor with offsets and strides on both sides. AutoTP writes blocks of
# whole rows and columns in row-major order, which are interval lists. Other maps are refused.


@dataclass(frozen=True, slots=True)
class Mapped(Pattern):
    """A layout from an affine map; ``general`` is its pattern at other degrees."""

    layout: Layout
    general: Pattern | None = None

    def _lay(self, shapes: Sequence[Shape]) -> Layout:
        if tuple(shapes) == self.layout.local_shapes:
            return self.layout
        if len(shapes) == 1 and count(shapes[0]) == count(self.layout.shape):
            return whole(shapes[0])
        return self._find_general(f"ranks that hold {list(shapes)}").join(shapes)

    def is_in_parts(self, shapes: Sequence[Shape]) -> bool:
        return self.layout.is_in_parts

    def _spread(self, shape: Shape, degree: int) -> tuple[Shape, ...]:
        local = self.layout.local_shapes
        return local if len(local) == degree else self._find_general(f"{degree} ranks").spread(shape, degree)

    def _find_general(self, others: str) -> Pattern:
        if self.general is None:
            raise MismatchError(
                f"the affine map describes shards {list(self.layout.local_shapes)}; its layout has no counterpart for "
                f"{others}"
            )
        return self.general


def read_map(entry: Mapping[str, Any]) -> Mapped:
    """Convert a parameter's saved map (``ParamAffineMap.to_dict``).

    Raises:
        MismatchError: the map scales pieces, has pieces that are not row-major blocks, or does not cover each element.
    """
    shape = tuple(entry["logical_shape"])
    ranks = {int(rank): section for rank, section in entry["ranks"].items()}
    if sorted(ranks) != list(range(len(ranks))):
        raise MismatchError(f"the affine map describes ranks {sorted(ranks)}")
    local = tuple(tuple(ranks[rank]["shard_shape"]) for rank in range(len(ranks)))
    shards = tuple(_read_shard(ranks[rank]["pieces"], shape, local[rank]) for rank in range(len(ranks)))
    layout = _settle_overlap(Layout(shape, shape, shards, local))
    if faults := find_faults(layout):
        raise MismatchError(f"the affine map is not a tiling: {'; '.join(faults[:4])}")
    return Mapped(layout, generalise(layout))


def _read_shard(pieces: Sequence[Mapping[str, Any]], shape: Shape, local: Shape) -> Product:
    """Return a rank's intervals; MismatchError for pieces that are no ordered grid."""
    blocks = [_read_block(piece, shape, local) for piece in pieces if count(tuple(piece["shape"]))]
    if not blocks:
        return tuple(((0, size),) if width else () for size, width in zip(shape, local, strict=True))
    axes = [sorted({block[axis] for block in blocks}) for axis in range(len(shape))]
    if count(tuple(map(len, axes))) != len(blocks) or len(set(blocks)) != len(blocks):
        raise MismatchError("the affine map's pieces are not a grid of blocks")
    for axis, spans in enumerate(axes):
        ends = [position + high - low for position, low, high in spans]
        if [position for position, _, _ in spans] != [0, *ends[:-1]] or ends[-1] != local[axis]:
            raise MismatchError(f"the affine map's pieces leave gaps in a shard along dimension {axis}")
    return tuple(tuple((low, high) for _, low, high in spans) for spans in axes)


def _read_block(piece: Mapping[str, Any], shape: Shape, local: Shape) -> tuple[tuple[int, int, int], ...]:
    """Return (local position, low, high) for each dimension."""
    scale = float(piece.get("scale", 1.0))
    if scale != 1.0:
        raise MismatchError(f"the affine map scales a piece by {scale}; scaled optimizer states cannot be loaded")
    sizes = tuple(piece["shape"])
    source, target = (_find_corner(piece[side], sizes, full) for side, full in (("source", shape), ("dest", local)))
    return tuple((to, low, low + size) for to, low, size in zip(target, source, sizes, strict=True))


def _find_corner(side: Sequence[Any], sizes: Shape, shape: Shape) -> Shape:
    """Return the coordinates of a block's first element in a tensor of ``shape``."""
    offset, strides = int(side[0]), tuple(side[1])
    expected = make_strides(shape)
    if len(sizes) != len(shape) or any(
        size > 1 and stride != step for size, stride, step in zip(sizes, strides, expected, strict=True)
    ):
        raise MismatchError(f"the affine map's pieces are not row-major blocks of {shape}")
    corner = []
    for step in expected:
        coordinate, offset = divmod(offset, step)
        corner.append(coordinate)
    if offset or any(coordinate + size > full for coordinate, size, full in zip(corner, sizes, shape, strict=True)):
        raise MismatchError(f"the affine map's pieces reach beyond {shape}")
    return tuple(corner)


def _settle_overlap(layout: Layout) -> Layout:
    """Mark a replicated layout, or give each shared part to its lowest rank."""
    full = tuple(((0, size),) for size in layout.view)
    if len(layout.shards) > 1 and all(shard == full for shard in layout.shards):
        return replace(layout, replicated=True)
    axis = _find_cut_axis(layout)
    if axis is None:
        return layout
    claimed: list[tuple[int, int]] = []
    claims = []
    for shard in layout.shards:
        claim = tuple(
            part
            for low, high in shard[axis]
            for part in find_gaps([(first, last) for first, last in claimed if low < last and first < high], high, low)
        )
        claims.append((*shard[:axis], claim, *shard[axis + 1 :]))
        claimed += claim
    return layout if tuple(claims) == layout.shards else replace(layout, claims=tuple(claims))


def _find_cut_axis(layout: Layout) -> int | None:
    """Return the only axis along which the shards differ, or None."""
    cut = [axis for axis in range(len(layout.view)) if len({shard[axis] for shard in layout.shards}) > 1]
    return cut[0] if len(cut) == 1 else None


def generalise(layout: Layout) -> Pattern | None:
    """Return the pattern of a layout for any degree, or None."""
    if layout.replicated:
        return Partial() if layout.mean else Replicate()
    axis = _find_cut_axis(layout)
    if axis is None or layout.claims is not None or layout.view != layout.shape:
        return None
    pieces = [shard[axis] for shard in layout.shards]
    if _are_consecutive(interval for rank in pieces for interval in rank if interval[0] < interval[1]):
        return ShardV() if axis == 0 else ShardH(dim=axis)
    if len({len(rank) for rank in pieces}) != 1:
        return None
    parts = list(zip(*pieces, strict=True))
    if not _are_consecutive(interval for part in parts for interval in part):
        return None
    return ShardNC(parts=tuple(map(measure, parts)), dim=axis, sized=True)


def _are_consecutive(intervals: Iterable[tuple[int, int]]) -> bool:
    return all(end == start for (_, end), (start, _) in pairwise(intervals))
