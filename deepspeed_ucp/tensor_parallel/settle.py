"""Determine how every parameter is cut on both sides.

If both sides have the same degree and shapes, shards are unchanged and no rule is needed. Else the first rule set with
a pattern counts. Without one, the shapes must prove replication, or the parameter is an error: nothing is guessed
(docs/design.md, invariant 5).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import MismatchError, fold_names
from ..model.storage import count
from .facts import Facts
from .kinds import SIDES, TABLE, Pattern, Replicate, SameShards, Unique, advise_vocabulary, check_shapes
from .layout import Layout, Run, Shape, copy_runs
from .resize import Resize, Resized, advise_resize, is_fused
from .rules import RuleSet, find_resize, list_families, suggest_rule

SAME = "the same shards"
SHAPES = "the shapes"
EQUAL = "the same bytes on every tensor-parallel rank"
_Sides = tuple[tuple[Pattern, str], tuple[Pattern, str]]  # (pattern, origin) of the source and of the target


@dataclass(slots=True)
class Settled:
    """How every parameter is cut.

    Attributes:
        layouts: name → (source layout, target layout or None).
        patterns: name → pattern of the source.
        wrong: name → error: different shapes, shapes that contradict a rule, rules that disagree.
        resizes: name → change of a parameter with another shape in the target, by a user's rule.
        reshaped: name → different logical shapes of both sides without such a rule.
        padded: the names among these whose shapes differ only in rows.
        unused: the user's rules that match no parameter.
        notes: the checkpoint's rules that match no parameter; scripts often list parameters of a model's variants.
    """

    layouts: dict[str, tuple[Layout, Layout | None]] = field(default_factory=dict)
    patterns: dict[str, Pattern] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    open: dict[str, Unsettled] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    resizes: dict[str, Resized] = field(default_factory=dict)
    reshaped: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    padded: list[str] = field(default_factory=list)
    sides: tuple[str, str] = SIDES
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return not (self.open or self.wrong)

    @property
    def pairs(self) -> dict[str, tuple[Layout, Layout]]:
        """Name → both layouts of the parameters that have two."""
        return {name: (source, target) for name, (source, target) in self.layouts.items() if target is not None}

    def require(self) -> Settled:
        """Return self; MismatchError with rules to paste if parameters are open or wrong."""
        texts = []
        if self.wrong:
            source, target = self.sides
            fact = f"{source[:1].upper()}{source[1:]} and {target} do not match: {_fold(self.wrong.items())}."
            resize = advise_resize(self.reshaped) if self.reshaped.keys() == self.wrong.keys() else ""
            texts.append(f"{fact}{resize}{advise_vocabulary(self.padded)}")
        if self.open:
            texts.append(_describe_open(self.open))
        if texts:
            raise MismatchError(" ".join(texts))
        return self


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A parameter without a pattern: both sides' local shapes and names, and hints."""

    name: str
    source: tuple[Shape, ...]
    target: tuple[Shape, ...] | None
    hints: tuple[str, ...]
    sides: tuple[str, str]

    def suggest(self) -> dict[str, Any]:
        rule = suggest_rule(self.name, self.source, self.target)
        return {**rule, "vocab": True} if TABLE.search(self.name) else rule

    @property
    def text(self) -> str:
        source, target = self.sides
        more = "" if self.target is None else f", {_describe_side(self.target)} in {target}"
        return "; ".join((f"{_describe_side(self.source)} in {source}{more}", *self.hints))


def settle(
    names: Sequence[str],
    source: Mapping[str, tuple[Shape, ...]],
    target: Mapping[str, tuple[Shape, ...]] | None,
    rule_sets: Sequence[RuleSet],
    hints: Mapping[str, Any] | None = None,
    *,
    degree: int | None = None,
    buffers: Mapping[str, bool] | None = None,
    sides: tuple[str, str] = SIDES,
) -> Settled:
    """Determine the layouts of parameters on both sides.

    Args:
        source, target: name → local shape per tensor-parallel rank; target None for a conversion.
        rule_sets: by precedence; the first with a pattern counts. A live engine's own rules (``source`` "target") come
            second for the target, after the user's, and last for the source.
        hints: facts of the checkpoint (``AtomicIndex.hints``): ``args``, ``checkpoint_version``.
        degree: tensor-parallel degree of a target without known shapes (``target`` is None).
        buffers: buffer → True if every rank has equal bytes: it is a replica if no rule differs.
        sides: names of source and target in messages.
    """
    if target is None and degree is None:
        sides = (sides[0], "the patterns")
    facts, settled = Facts.of(hints, source), Settled(sides=sides)
    settler = _Settler(source, target, rule_sets, facts, degree, buffers or {}, settled)
    for name in names:
        try:
            settler.settle(name)
        except MismatchError as error:
            settler.settled.wrong[name] = str(error)
    for rule_set in rule_sets:
        unused = settler.settled.unused if rule_set.source == "user" else settler.settled.notes
        unused.extend(rule_set.find_unused(names))
    return settler.settled


@dataclass(slots=True)
class _Settler:
    """Arguments, caches and results of :func:`settle`."""

    source: Mapping[str, tuple[Shape, ...]]
    target: Mapping[str, tuple[Shape, ...]] | None
    rule_sets: Sequence[RuleSet]
    facts: Facts
    degree: int | None
    buffers: Mapping[str, bool]
    settled: Settled = field(default_factory=Settled)
    checked: set[str] = field(default_factory=set)

    def settle(self, name: str) -> None:
        source, target = self.source[name], None if self.target is None else self.target[name]
        ranks = self.degree or len(target or source)
        self.facts = replace(self.facts, values={"ranks": ranks, **self._measure(source)})
        if target == source or self.degree == len(source):
            if len(source) > 1 and any(rule_set.source == "target" for rule_set in self.rule_sets):
                self._compare_orders(name, source)
            self._record(name, _twice(Unique() if len(source) == 1 else SameShards(), SAME), source, source)
            return
        if len(source) == 1 and target is None and self.degree is None:
            self._record_uncut(name, source)
            return
        sides, rule = self._find_sides(name), None if target is None else find_resize(self.rule_sets, name)
        if rule is not None and (any(pattern.is_in_parts(source) for pattern, _ in sides) if sides else is_fused(name)):
            raise MismatchError(
                f"the resize rule {rule.match!r}: {name} is fused, so that new rows at its end would belong to its "
                "last part. If it is not fused, give a rule with the pattern shard-v"
            )
        if target is not None and len(source) == len(target) == 1:
            pattern = self._fit_whole(name, source[0], target[0], sides, rule)
            sides = _twice(pattern, sides[0][1] if sides else SHAPES)
        sides = sides or self._prove(name, source, target)
        if not sides:
            hints = tuple(f"{rules.name}: {rules.hints[name]}" for rules in self.rule_sets if name in rules.hints)
            self.settled.open[name] = Unsettled(name, source, target, hints, self.settled.sides)
            return
        if self.degree is not None:
            unit = self.facts.args.get("make_vocab_size_divisible_by")  # Megatron pads to it times the degree
            pad = unit if isinstance(unit, int) and unit > 0 else None
            target = sides[1][0].spread(sides[0][0].join(source).shape, self.degree, pad)
        self._record(name, sides, source, target)

    def _compare_orders(self, name: str, shapes: tuple[Shape, ...]) -> None:
        """Raise MismatchError if both sides' patterns order the same shards differently."""
        try:
            (pattern, origin), (other, other_origin) = self._find_sides(name) or _twice(SameShards(), SAME)
            old, new = replace(pattern.join(shapes), claims=None), other.join(shapes)
            sizes = [count(shape) for shape in shapes]
            runs = [copy_runs(old, rank, new, rank, 0, size) for rank, size in enumerate(sizes)]
        except MismatchError:  # unchanged shards need no description
            return
        if old.shape == new.shape and runs != [(Run(0, 0, size),) if size else () for size in sizes]:
            raise MismatchError(
                f"{origin} and {other_origin} give its shards {_describe_side(shapes)} different orders of elements. "
                f"Give a rule for it if {' and '.join(self.settled.sides)} have the same layout, else build the model "
                "with the saved one"
            )

    def _record_uncut(self, name: str, source: tuple[Shape, ...]) -> None:
        """Record an uncut parameter with its rule's pattern, for its later cut."""
        try:
            self._record(name, self._find_sides(name) or _twice(Unique(), SAME), source, None)
        except MismatchError:
            if any(rule_set.source == "user" for rule_set in self.rule_sets):
                raise
            self._record(name, _twice(Unique(), SAME), source, None)

    def _record(self, name: str, sides: _Sides, source: Sequence[Shape], target: Sequence[Shape] | None) -> None:
        """Record a parameter's layouts; MismatchError if no rule allows their difference."""
        (pattern, origin), (other, other_origin) = sides
        rule = None if target in (None, source) else find_resize(self.rule_sets, name)
        other = other if rule is None else replace(other, vocab=None)  # the model may have fewer rows
        old, new = pattern.join(source), None if target is None else other.join(target)
        if new is not None and rule is not None and old.shape != new.shape:
            old, self.settled.resizes[name] = rule.fit(old, new, pattern.vocab)
        elif new is not None:
            self.settled.reshaped[name] = old.shape, new.shape
            check_shapes(old.shape, new.shape, pattern.vocab or other.vocab, self.settled.sides)
            if old.shape != new.shape and (old.mean or old.is_in_parts or new.is_in_parts):
                source_name, target_name = self.settled.sides
                raise MismatchError(
                    f"vocabulary of {old.shape[0]} rows in {source_name}, {new.shape[0]} in {target_name}: padding "
                    "of parameters in parts, or averaged over replicas, cannot differ"
                )
            del self.settled.reshaped[name]
        self.settled.layouts[name] = (old, new)
        self.settled.patterns[name] = pattern
        self.settled.origin[name] = "; ".join(dict.fromkeys((origin, other_origin)))

    def _fit_whole(self, name: str, source: Shape, target: Shape, sides: _Sides | None, rule: Resize | None) -> Pattern:
        """Return whole tensors' pattern; MismatchError if no rule allows a difference."""
        patterns = [pattern for pattern, _ in sides or () if pattern.vocab and not pattern.is_in_parts([source])]
        vocab = patterns[0].vocab if patterns else None
        source_name, target_name = self.settled.sides
        text = f"shape {source} in {source_name}, {target} in {target_name}"
        if rule is None and (vocab is None or not source or source[1:] != target[1:]):
            self.settled.reshaped[name] = source, target
            if source and source[1:] == target[1:]:
                self.settled.padded.append(name)
            raise MismatchError(text)
        return Unique(vocab=vocab)

    def _prove(self, name: str, source: Sequence[Shape], target: Sequence[Shape] | None) -> _Sides | None:
        """Prove replication by equal bytes or equal shapes; None if that is impossible.

        With two different degrees, equal local shapes exclude a cut. Not for a vocabulary: padding can make its shapes
        equal.
        """
        if len({*source, *(target or ())}) > 1:
            return None
        if self.buffers.get(name):
            return _twice(Replicate(), EQUAL)
        if target is None or len(source) == len(target) or TABLE.search(name):
            return None
        return _twice(Replicate(), SHAPES)

    def _measure(self, source: Sequence[Shape]) -> dict[str, int]:
        """Return values for expressions: logical sizes if cut, and the vocabulary's rows."""
        totals = {f"total{dim}": sum(shape[dim] for shape in source) for dim in range(min(map(len, source)))}
        vocab = next((rules.vocab for rules in self.rule_sets if rules.vocab is not None), None)
        return totals if vocab is None else {**totals, "vocab": vocab}

    def _find_sides(self, name: str) -> _Sides | None:
        """Return the patterns of source and target with origins, or None without any."""
        patterns: dict[int, Pattern | None] = {}
        sides = []
        for side in ("source", "target"):
            precedence = {"user": 0, "target": 1 if side == "target" else 3, "checkpoint": 2}
            for rule_set in sorted(self.rule_sets, key=lambda one: precedence[one.source]):
                if id(rule_set) not in patterns:
                    patterns[id(rule_set)] = self._find_pattern(rule_set, name)
                if (pattern := patterns[id(rule_set)]) is not None:
                    sides.append((pattern, rule_set.name))
                    break
        return (sides[0], sides[1]) if sides else None

    def _find_pattern(self, rule_set: RuleSet, name: str) -> Pattern | None:
        """Return a set's pattern or fallback; check a set that has one by the facts."""
        pattern = rule_set.find(name, self.facts)
        if pattern is None and name not in self.buffers:
            pattern = rule_set.fallback
        if pattern is not None and rule_set.name not in self.checked:
            rule_set.check(self.facts)
            self.checked.add(rule_set.name)
        return pattern


def _twice(pattern: Pattern, origin: str) -> _Sides:
    return (pattern, origin), (pattern, origin)


def _describe_open(unsettled: Mapping[str, Unsettled]) -> str:
    rules = dict.fromkeys(json.dumps(param.suggest()) for param in unsettled.values())
    return (
        f"How tensor parallelism cuts the following is not known ({len(unsettled)} "
        f"parameter{'s' * (len(unsettled) > 1)}): {_fold((n, param.text) for n, param in unsettled.items())}. Give the "
        'model\'s family or rules as "patterns" in "checkpoint": {"universal": …} or as --patterns. Families: '
        f"{', '.join(list_families())}. Rules to check and paste: [{', '.join(rules)}]"
    )


def _describe_side(shapes: Sequence[Shape]) -> str:
    return f"{' and '.join(dict.fromkeys(map(str, shapes)))} on {len(shapes)} rank{'s' * (len(shapes) > 1)}"


def _fold(lines: Iterable[tuple[str, str]]) -> str:
    """Join (name, text) pairs; names that differ only in numbers are folded."""
    return "; ".join(f"{name}: {texts[0]}" for name, texts in fold_names(lines, str))
