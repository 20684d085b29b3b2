"""What a checkpoint says of its own layout: ``universal_checkpoint_info``, under the keys of DeepSpeed's constants.

Written by the training script (Megatron-DeepSpeed passes it in client_state) or by AutoTP. DeepSpeed's converter
(``deepspeed/checkpoint/ds_to_universal.py``) concatenates whatever is in no list on dimension 0. Here that is not
taken for a statement: a TP=1 source of Megatron-DeepSpeed writes no row-parallel patterns at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..atoms import count
from ..errors import MismatchError
from .affine import FORMAT, read_map
from .kinds import Partial, Pattern, Replicate, ShardH, ShardNC, ShardV
from .layout import Layout, Shape
from .regex import compile_prefix
from .rules import Rule, RuleSet, Spec

INFO = "universal_checkpoint_info"
"""Attribute of a module, and key of its model states; below, its keys (``deepspeed/checkpoint/constants.py``)."""

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

_LISTS: tuple[tuple[str, Pattern], ...] = (
    (REPLICATED, Replicate()),
    (AVERAGED, Partial()),
    (TWO_PARTS, ShardNC(parts=(1, 1))),
    (ROWS, ShardH(dim=1)),
)
"""Lists of expressions, and what each says of the parameters that it names."""


@dataclass(frozen=True, slots=True)
class Viewed(Pattern):
    """Sub-parameters along ``axis`` of a viewed shape (SubparamShape), each cut by rank.

    Attributes:
        view: logical sizes, -1 where the tensor's elements tell; the entry at ``axis`` is ignored.
        axis: the view's dimension that is cut.
        parts: sizes of the sub-parameters along it, or a number of equal ones.
        widths: per part and rank the width, where the metadata tells.
    """

    view: Shape
    axis: int
    parts: tuple[int, ...] | int
    widths: tuple[tuple[int, ...], ...] | None = None

    def _lay(self, shapes: Sequence[Shape]) -> Layout:
        for first, last in self._list_groups(len(shapes[0])):
            found = self._fit(shapes, first, last)
            if found is not None:
                return found.join(shapes)
        raise MismatchError(
            f"sub-parameters in the view {list(self.view)}, cut along its dimension {self.axis}, do not fit shards of "
            f"{list(shapes)}"
        )

    def _list_groups(self, dims: int) -> Iterator[tuple[int, int]]:
        """(first, last) view dimensions that make up the tensor's dimension that is cut; the others are its own."""
        spare = len(self.view) - dims
        for first in range(max(0, self.axis - spare), self.axis + 1):
            if spare >= 0 and first + spare >= self.axis and first < dims:
                yield first, first + spare

    def _fit(self, shapes: Sequence[Shape], first: int, last: int) -> ShardNC | None:
        others = (*self.view[:first], *self.view[last + 1 :])
        kept = (*shapes[0][:first], *shapes[0][first + 1 :])
        outer, inner = self.view[first : self.axis], self.view[self.axis + 1 : last + 1]
        if any(told not in (-1, size) for told, size in zip(others, kept, strict=True)) or -1 in outer + inner:
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
    """Rules of a ``universal_checkpoint_info``.

    Args:
        info: the dictionary as saved, of any version; None, or anything else than a dictionary, says nothing.
        by: "target" for a live engine's own.

    Raises:
        MismatchError: an affine map of a newer format, or an entry that is not of DeepSpeed's form.
    """
    name = "universal_checkpoint_info" if by != "target" else "the live engine's universal_checkpoint_info"
    if not isinstance(info, Mapping):
        return RuleSet(name)
    try:
        return _read_info(name, info, by)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise MismatchError(
            f"universal_checkpoint_info: an entry is of another form than DeepSpeed's ({type(error).__name__}: {error})"
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
        # AutoTP's own, before it wrote maps: it lists every parameter but those that it cuts on dimension 0.
        fallback=ShardV() if UNSUPPORTED in info and AFFINE not in info else None,
        by=by,
        shared=tuple(map(compile_prefix, _get_list(info, SHARED))),
        reported=True,
    )


def _make_rule(text: str, says: Pattern | Spec, rank: int = 0, vocab: bool = False) -> Rule:
    name = _unescape(text)
    match = compile_prefix(text) if name is None else re.compile(re.escape(name)).fullmatch
    return Rule(text, match, says, rank, vocab)


def _refuse_rule(text: str, reason: str) -> Rule:
    """A rule by which a parameter is refused, whatever others say."""
    return _make_rule(text, Spec(match=text, pattern="unsettled", reason=reason), rank=-1)


def _unescape(text: object) -> str | None:
    """The one name that an expression ``^escaped name$`` matches, or None."""
    if not (isinstance(text, str) and text.startswith("^") and text.endswith("$")):
        return None
    name = re.sub(r"\\(.)", r"\1", text[1:-1])
    return name if re.escape(name) == text[1:-1] else None


def _get_list(info: Mapping[str, Any], key: str) -> Sequence[Any]:
    told = info.get(key) or []
    if not isinstance(told, (list, tuple)):
        raise MismatchError(f"universal_checkpoint_info: {key} is a list, found {told!r}")
    return told


def _read_lists(info: Mapping[str, Any]) -> Iterator[Rule]:
    for key, pattern in _LISTS:
        yield from (_make_rule(text, pattern, rank=2) for text in _get_list(info, key))
    yield from filter(None, map(_follow_rows, _get_list(info, ROWS)))
    yield from (_make_rule(text, ShardV(), rank=3, vocab=True) for text in _get_list(info, VOCABULARY))


def _follow_rows(text: str) -> Rule | None:
    """What a row-parallel second matrix of a feed-forward layer tells of the first, which no list names.

    The second takes its columns where the first's rows lie, so a first one of as many rows is cut along them. One of
    twice as many is fused of gate and up in an order that nothing tells.
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
            told = view[axis]
        except (KeyError, TypeError, IndexError, ValueError):
            raise MismatchError(
                f"universal_checkpoint_info: {PARTS} has an entry of unknown form: {entry!r:.200}"
            ) from None
        sizes = tuple(1 if dim == axis else _add(size) for dim, size in enumerate(view))
        for text in texts:
            known = tuple(tuple(map(int, part)) for part in widths.get(text) or ()) or None
            parts = _read_sizes(told, known, version)
            known_sizes = (*sizes, *((parts,) if isinstance(parts, int) else parts))
            if min(known_sizes) < -1 or 0 in known_sizes or len(known_sizes) > _MOST_PARTS:
                raise MismatchError(f"universal_checkpoint_info: {PARTS} has an entry of odd sizes: {entry!r:.200}")
            pattern = Viewed(sizes, axis, parts, known)
            yield _make_rule(text, pattern, rank=1)


def _read_sizes(told: Any, widths: Any, version: float) -> tuple[int, ...] | int:
    """Sizes of the sub-parameters. Before version 0.4 a plain number counts them; since then it is a width."""
    if widths:
        return tuple(sum(part) for part in widths)
    if isinstance(told, (list, tuple)):
        return tuple(int(size) for size in told)
    if version >= WIDTHS_SINCE:
        return (int(told),)
    if not 0 < int(told) <= _MOST_PARTS:
        raise MismatchError(f"universal_checkpoint_info: {PARTS} tells of {told} sub-parameters")
    return int(told)


def _add(size: Any) -> int:
    return sum(size) if isinstance(size, (list, tuple)) else int(size)


def _read_affine(name: str, info: Mapping[str, Any]) -> Iterator[Rule]:
    told = info.get(AFFINE) or {}
    if int(told.get("version", FORMAT)) > FORMAT:
        raise MismatchError(
            f"universal_checkpoint_info: affine_map has format {told['version']}, up to {FORMAT} is understood; "
            "update deepspeed_ucp"
        )
    for text, entry in (told.get("params") or {}).items():
        try:
            yield _make_rule(text, read_map(entry))
        except MismatchError as error:
            yield _refuse_rule(text, f"{name}: {error}")
