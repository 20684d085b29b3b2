"""Rules from ``universal_checkpoint_info``, a checkpoint's description of its own layout.

Training scripts (Megatron-DeepSpeed in client_state) or AutoTP write it. DeepSpeed's converter
(``deepspeed/checkpoint/ds_to_universal.py``) concatenates parameters that are in no list on dimension 0. This module
makes no rule for them, because Megatron-DeepSpeed writes no row-parallel patterns at TP=1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MismatchError
from ..model import count
from .affine import FORMAT, read_map
from .kinds import Partial, Pattern, Replicate, ShardH, ShardNC, ShardV
from .layout import Layout, Shape
from .rules import Matcher, Rule, RuleSet, Spec

INFO = "universal_checkpoint_info"
"""Attribute of a module and key of its model states. The following constants are its keys
(``deepspeed/checkpoint/constants.py``)."""

VERSION = "universal_checkpoint_version"
WIDTHS_SINCE = 0.4
SHARED = "pipeline_replicated_parameter_patterns"
VOCABULARY = "vocabulary_parameter_patterns"
REPLICATED = "tp_replicated_parameter_patterns"
AVERAGED = "parameter_to_average_patterns"
ROWS = "parameter_with_row_parallelism_patterns"
TWO_PARTS = "parameter_with_2_sub_params_cat_dim_0"
PARTS = "parameter_with_sub_params"
WIDTHS = "sub_param_shard_widths"
UNSUPPORTED = "autotp_unsupported_parameter_patterns"
AFFINE = "affine_map"
VOCAB_SIZE = "original_vocab_size"

_MOST_PARTS = 1 << 12

_SIMPLE = re.compile(r"[^*+?{}()|]*(?:[*+][^*+?{}()|]*)?")
"""Expressions that Python's engine matches in at most quadratic time: one repeat of one character, no alternatives."""

_LISTS: tuple[tuple[str, Pattern], ...] = (
    (REPLICATED, Replicate()),
    (AVERAGED, Partial()),
    (TWO_PARTS, ShardNC(parts=(1, 1))),
    (ROWS, ShardH(dim=1)),
)
"""Keys of lists of expressions, and the pattern of the parameters that match."""


@dataclass(frozen=True, slots=True)
class Viewed(Pattern):
    """Sub-parameters along ``axis`` of a viewed shape (SubparamShape), each cut by rank.

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
        for first, last in self._list_groups(len(shapes[0])):
            pattern = self._fit(shapes, first, last)
            if pattern is not None:
                return pattern.join(shapes)
        raise MismatchError(
            f"sub-parameters in the view {list(self.view)}, cut along its dimension {self.axis}, do not fit shards of "
            f"{list(shapes)}"
        )

    def _list_groups(self, dims: int) -> Iterator[tuple[int, int]]:
        """Yield the possible (first, last) view dimensions that form the tensor's cut dimension."""
        spare = len(self.view) - dims
        for first in range(max(0, self.axis - spare), self.axis + 1):
            if spare >= 0 and first + spare >= self.axis and first < dims:
                yield first, first + spare

    def _fit(self, shapes: Sequence[Shape], first: int, last: int) -> ShardNC | None:
        others = (*self.view[:first], *self.view[last + 1 :])
        kept = (*shapes[0][:first], *shapes[0][first + 1 :])
        outer, inner = self.view[first : self.axis], self.view[self.axis + 1 : last + 1]
        if any(known not in (-1, size) for known, size in zip(others, kept, strict=True)) or -1 in outer + inner:
            return None
        blocks, step, total = count(outer), count(inner), sum(shape[first] for shape in shapes)
        if isinstance(self.parts, int):
            return ShardNC(parts=(1,) * self.parts, dim=first, blocks=blocks, unit=step)
        if sum(self.parts) * blocks * step != total:
            return None
        widths = self.widths and tuple(tuple(width * step for width in part) for part in self.widths)
        parts = tuple(part * step for part in self.parts)
        return ShardNC(parts=parts, dim=first, blocks=blocks, sized=True, unit=step, widths=widths)


def from_universal_info(info: object, by: str = "checkpoint") -> RuleSet:
    """Make the rules of a ``universal_checkpoint_info``.

    Args:
        info: the dictionary as saved, of any version; other values, such as None, give no rules.
        by: "target" for a live engine's info.

    Raises:
        MismatchError: an affine map has a newer format, or an entry is malformed.
    """
    name = "universal_checkpoint_info" if by != "target" else "the live engine's universal_checkpoint_info"
    if not isinstance(info, Mapping):
        return RuleSet(name)
    try:
        return _read_info(name, info, by)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise MismatchError(
            f"universal_checkpoint_info: an entry is malformed ({type(error).__name__}: {error})"
        ) from None


def _read_info(name: str, info: Mapping[str, Any], by: str) -> RuleSet:
    unsupported = [_refuse_rule(text, f"{name}: {why}") for text, why in (info.get(UNSUPPORTED) or {}).items()]
    rules = [*unsupported, *_read_affine(name, info), *_read_parts(info), *_read_lists(info)]
    literal: dict[str, list[Rule]] = {}
    for rule in rules:
        if (whole_name := _unescape(rule.text)) is not None:
            literal.setdefault(whole_name, []).append(rule)
    vocab = info.get(VOCAB_SIZE)
    if isinstance(vocab, int) and vocab < 1:
        raise MismatchError(f"universal_checkpoint_info: {VOCAB_SIZE} is {vocab}")
    return RuleSet(
        name=name,
        rules=tuple(rule for rule in rules if _unescape(rule.text) is None),
        literal={whole_name: tuple(group) for whole_name, group in literal.items()},
        vocab=vocab if isinstance(vocab, int) else None,
        # AutoTP before it wrote maps: it lists every parameter except those cut on dimension 0.
        fallback=ShardV() if UNSUPPORTED in info and AFFINE not in info else None,
        by=by,
        shared=tuple(map(compile_prefix, _get_list(info, SHARED))),
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
    """Compile an expression in a checkpoint, which matches a prefix of a name as in DeepSpeed's converter.

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
    """Return the only name that an expression ``^escaped name$`` matches, or None for other expressions."""
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
    yield from (_make_rule(text, ShardV(), rank=3, vocab=True) for text in _get_list(info, VOCABULARY))


def _follow_rows(text: str) -> Rule | None:
    """Make a rule for the first matrix of a feed-forward layer, which is in no list, from a row-parallel second.

    The second's columns correspond to the first's rows, so a first matrix with as many rows is cut along them. A first
    matrix with twice as many rows is a fused gate and up in an unknown order.
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
    version, widths = float(info.get(VERSION) or 0.0), info.get(WIDTHS) or {}
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
            known = tuple(tuple(map(int, part)) for part in widths.get(text) or ()) or None
            parts = _read_sizes(size_or_sizes, known, version)
            known_sizes = (*sizes, *((parts,) if isinstance(parts, int) else parts))
            if min(known_sizes) < -1 or 0 in known_sizes or len(known_sizes) > _MOST_PARTS:
                raise MismatchError(f"universal_checkpoint_info: {PARTS} has invalid sizes: {entry!r:.200}")
            pattern = Viewed(sizes, axis, parts, known)
            yield _make_rule(text, pattern, rank=1)


def _read_sizes(value: Any, widths: Any, version: float) -> tuple[int, ...] | int:
    """Read the sub-parameters' sizes. A plain number is their count before version 0.4, and a width since."""
    if widths:
        return tuple(sum(part) for part in widths)
    if isinstance(value, (list, tuple)):
        return tuple(int(size) for size in value)
    if version >= WIDTHS_SINCE:
        return (int(value),)
    if not 0 < int(value) <= _MOST_PARTS:
        raise MismatchError(f"universal_checkpoint_info: {PARTS} has {value} sub-parameters")
    return int(value)


def _read_affine(name: str, info: Mapping[str, Any]) -> Iterator[Rule]:
    section = info.get(AFFINE) or {}
    if int(section.get("version", FORMAT)) > FORMAT:
        raise MismatchError(
            f"universal_checkpoint_info: affine_map has format {section['version']}, this release supports up to "
            f"{FORMAT}; update deepspeed_ucp"
        )
    for text, entry in (section.get("params") or {}).items():
        try:
            yield _make_rule(text, read_map(entry))
        except MismatchError as error:
            yield _refuse_rule(text, f"{name}: {error}")
