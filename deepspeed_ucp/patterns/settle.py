"""Settle how every parameter is cut on both sides, in a fixed order and without guessing (DESIGN's invariant 5).

Where both sides have the same degree and each rank the same shape, rank r's shard stays rank r's and nothing needs to
be known. Else the first rule set that says something counts; what no set says is proven by the shapes or is an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import MismatchError, fold_names
from .facts import Facts
from .files import list_families
from .kinds import TABLE, Pattern, Replicate, SameShards, ShardNC, Unique, advise_vocabulary, check_shapes
from .layout import Layout, Shape
from .resize import Resize, Resized, advise_resize, is_fused
from .rules import RuleSet, find_resize, suggest_rule

SAME = "the same shards"
SHAPES = "the shapes"
EQUAL = "the same bytes on every tensor-parallel rank"
_Sides = tuple[tuple[Pattern, str], tuple[Pattern, str]]
"""Of source and target the pattern, and what told it."""


@dataclass(slots=True)
class Settled:
    """How every parameter is cut.

    Attributes:
        layouts: name → (source layout, target layout or None).
        patterns: name → pattern of the source.
        origin: name → what settled it.
        open: what nothing settles.
        wrong: name → in words: shapes that differ or contradict a rule, rules that disagree.
        resizes: name → what becomes of a parameter that has another shape in the target, by the user's rule.
        reshaped: name → the logical shapes of both sides, where they differ without such a rule.
        padded: of these the names that have other rows alone.
        unused: rules of the user's that match no parameter.
        notes: the same of the checkpoint's; often a script lists what a variant of its model would have.
    """

    layouts: dict[str, tuple[Layout, Layout | None]] = field(default_factory=dict)
    patterns: dict[str, Pattern] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    open: dict[str, Unsettled] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    resizes: dict[str, Resized] = field(default_factory=dict)
    reshaped: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    padded: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Everything is settled, and nothing is wrong."""
        return not (self.open or self.wrong)

    @property
    def pairs(self) -> dict[str, tuple[Layout, Layout]]:
        """Name → both layouts, of those that have two."""
        return {name: (have, want) for name, (have, want) in self.layouts.items() if want is not None}

    def require(self) -> Settled:
        """Itself.

        Raises:
            MismatchError: something is wrong or open; all in one message, with rules to paste.
        """
        texts = []
        if self.wrong:
            told = f"The model and the checkpoint cannot be brought together: {_fold(self.wrong.items())}."
            resize = advise_resize(self.reshaped) if self.reshaped.keys() == self.wrong.keys() else ""
            texts.append(f"{told}{resize}{advise_vocabulary(self.padded)}")
        if self.open:
            texts.append(_describe_open(self.open))
        if texts:
            raise MismatchError(" ".join(texts))
        return self


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A parameter that nothing settles: local shapes on both sides, and what rule sets had to say about that."""

    name: str
    source: tuple[Shape, ...]
    target: tuple[Shape, ...] | None
    why: tuple[str, ...]

    def suggest(self) -> dict[str, Any]:
        """A rule to be completed and pasted."""
        rule = suggest_rule(self.name, self.source, self.target)
        return {**rule, "vocab": True} if TABLE.search(self.name) else rule

    @property
    def text(self) -> str:
        """The shapes, and why."""
        model = "" if self.target is None else f", {_describe_side(self.target)} in the model"
        return "; ".join((f"{_describe_side(self.source)} in the checkpoint{model}", *self.why))


def settle(
    names: Sequence[str],
    source: Mapping[str, tuple[Shape, ...]],
    target: Mapping[str, tuple[Shape, ...]] | None,
    rule_sets: Sequence[RuleSet],
    hints: Mapping[str, Any] | None = None,
    *,
    degree: int | None = None,
    replicas: Collection[str] = (),
) -> Settled:
    """Layouts of all parameters on both sides, as far as something settles them.

    Args:
        names: the parameters.
        source, target: name → local shape per tensor-parallel rank; target None where there is none (converting).
        rule_sets: in order; the first that says something about a parameter counts. What the live engine says of
            its own shards (``by`` "target") counts for the target before all but the user's, and for the source last.
        hints: what the checkpoint tells (``AtomicIndex.hints``): ``args``, ``checkpoint_version``.
        replicas: what every rank holds alike, and is a replica where no rule says otherwise (equal buffers).
        degree: of a target whose shapes are not known (then ``target`` is None): the ones that the patterns give it.
    """
    settler = _Settler(source, target, rule_sets, Facts.of(hints, source), degree, replicas)
    for name in names:
        try:
            settler.settle(name)
        except MismatchError as error:
            settler.settled.wrong[name] = str(error)
    for each in rule_sets:
        idle = settler.settled.unused if each.by == "user" else settler.settled.notes
        idle.extend(each.find_unused(names))
    return settler.settled


@dataclass(slots=True)
class _Settler:
    source: Mapping[str, tuple[Shape, ...]]
    target: Mapping[str, tuple[Shape, ...]] | None
    rule_sets: Sequence[RuleSet]
    facts: Facts
    degree: int | None
    replicas: Collection[str]
    settled: Settled = field(default_factory=Settled)
    checked: set[str] = field(default_factory=set)

    def settle(self, name: str) -> None:
        source, target = self.source[name], None if self.target is None else self.target[name]
        if target == source or self.degree == len(source):
            self._keep(name, _twice(Unique() if len(source) == 1 else SameShards(), SAME), source, source)
            return
        ranks = self.degree or len(target or source)
        self.facts = replace(self.facts, values={"ranks": ranks, **self._measure(source)})
        if len(source) == 1 and target is None and self.degree is None:
            self._note(name, source)
            return
        sides, rule = self._find(name), None if target is None else find_resize(self.rule_sets, name)
        if rule is not None:
            _check_rows(name, rule, sides)
        if target is not None and len(source) == len(target) == 1:
            pattern = self._fit_whole(name, source[0], target[0], sides, rule)
            sides = _twice(pattern, sides[0][1] if sides else SHAPES)
        sides = sides or self._prove(name, source, target)
        if not sides:
            why = tuple(f"{each.name}: {each.hints[name]}" for each in self.rule_sets if name in each.hints)
            self.settled.open[name] = Unsettled(name, source, target, why)
            return
        if self.degree is not None:
            unit = self.facts.args.get("make_vocab_size_divisible_by")  # Megatron pads to it times the degree
            pad = unit if isinstance(unit, int) and unit > 0 else None
            target = sides[1][0].spread(sides[0][0].join(source).shape, self.degree, pad)
        self._keep(name, sides, source, target)

    def _note(self, name: str, source: tuple[Shape, ...]) -> None:
        """What is whole needs no pattern; what a rule says of it is kept for whoever cuts it later."""
        try:
            self._keep(name, self._find(name) or _twice(Unique(), SAME), source, None)
        except MismatchError:
            if any(each.by == "user" for each in self.rule_sets):
                raise
            self._keep(name, _twice(Unique(), SAME), source, None)

    def _keep(self, name: str, sides: _Sides, source: Sequence[Shape], target: Sequence[Shape] | None) -> None:
        (pattern, origin), (other, other_origin) = sides
        rule = None if target in (None, source) else find_resize(self.rule_sets, name)
        other = other if rule is None else replace(other, vocab=None)  # the model may have fewer rows
        have, want = pattern.join(source), None if target is None else other.join(target)
        if want is not None and rule is not None and have.shape != want.shape:
            have, self.settled.resizes[name] = rule.fit(have, want, pattern.vocab)
        elif want is not None:
            self.settled.reshaped[name] = have.shape, want.shape
            check_shapes(have.shape, want.shape, pattern.vocab or other.vocab)
            del self.settled.reshaped[name]
        self.settled.layouts[name] = (have, want)
        self.settled.patterns[name] = pattern
        self.settled.origin[name] = "; ".join(dict.fromkeys((origin, other_origin)))

    def _fit_whole(self, name: str, source: Shape, target: Shape, sides: _Sides | None, rule: Resize | None) -> Pattern:
        """No tensor parallelism on either side: without a rule only a vocabulary's padding may differ."""
        vocab = next((pattern.vocab for pattern, _ in sides or () if pattern.vocab), None)
        text = f"shape {source} in the checkpoint, {target} in the model"
        if rule is None and (vocab is None or not source or source[1:] != target[1:]):
            self.settled.reshaped[name] = source, target
            if source and source[1:] == target[1:]:
                self.settled.padded.append(name)
            raise MismatchError(text)
        return Unique(vocab=vocab)

    def _prove(self, name: str, source: Sequence[Shape], target: Sequence[Shape] | None) -> _Sides | None:
        """A parameter that no rule names is a replica where every rank holds the same bytes, or by its shapes.

        Ranks of two different degrees all hold the same shape: cut, one side would be a multiple of the other. A
        vocabulary is left out: padding can make any two of its sides alike.
        """
        if len({*source, *(target or ())}) > 1:
            return None
        if name in self.replicas:
            return _twice(Replicate(), EQUAL)
        if target is None or len(source) == len(target) or TABLE.search(name):
            return None
        return _twice(Replicate(), SHAPES)

    def _measure(self, source: Sequence[Shape]) -> dict[str, int]:
        """Logical sizes if a dimension is cut, and the vocabulary: what expressions may ask for."""
        totals = {f"total{dim}": sum(shape[dim] for shape in source) for dim in range(len(source[0]))}
        vocab = next((each.vocab for each in self.rule_sets if each.vocab is not None), None)
        return totals if vocab is None else {**totals, "vocab": vocab}

    def _find(self, name: str) -> _Sides | None:
        """Patterns of the source and the target with their origins; None where nothing says anything."""
        asked: dict[int, Pattern | None] = {}
        sides = []
        for side in ("source", "target"):
            # The user's sets; for the target what the live engine says of itself; the others; for the source that last.
            places = {"user": 0, "target": 1 if side == "target" else 3, "checkpoint": 2}
            for each in sorted(self.rule_sets, key=lambda each: places[each.by]):
                if id(each) not in asked:
                    asked[id(each)] = self._ask(each, name)
                if (pattern := asked[id(each)]) is not None:
                    sides.append((pattern, each.name))
                    break
        return (sides[0], sides[1]) if sides else None

    def _ask(self, rule_set: RuleSet, name: str) -> Pattern | None:
        pattern = rule_set.find(name, self.facts)
        if pattern is None and name not in self.replicas:
            pattern = rule_set.fallback
        if pattern is not None and rule_set.name not in self.checked:
            rule_set.check(self.facts)
            self.checked.add(rule_set.name)
        return pattern


def _twice(pattern: Pattern, origin: str) -> _Sides:
    return (pattern, origin), (pattern, origin)


def _describe_open(unsettled: Mapping[str, Unsettled]) -> str:
    rules = dict.fromkeys(json.dumps(each.suggest()) for each in unsettled.values())
    return (
        f"How tensor parallelism cuts the following is not known ({len(unsettled)} "
        f"parameter{'s' * (len(unsettled) > 1)}): {_fold((n, each.text) for n, each in unsettled.items())}. Name the "
        'model\'s family ("checkpoint": {"universal": {"patterns": "<family>"}}; families: '
        f"{', '.join(list_families())}), or give rules; to be checked and pasted: "
        f'"checkpoint": {{"universal": {{"patterns": [{", ".join(rules)}]}}}}'
    )


def _check_rows(name: str, rule: Resize, sides: _Sides | None) -> None:
    """Whether new rows at the end are what a rule means.

    Raises:
        MismatchError: the parameter is fused, by a pattern of several parts or, where none tells, by its name.
    """
    parts = any(isinstance(each, ShardNC) and each.dim == 0 for each, _ in sides or ())
    if parts or (sides is None and is_fused(name)):
        raise MismatchError(
            f"the resize rule {rule.match!r}: {name} is fused, so that new rows at its end would be the last part's; "
            "give a rule with the pattern shard-v where they follow each other"
        )


def _describe_side(shapes: Sequence[Shape]) -> str:
    told = " and ".join(dict.fromkeys(map(str, shapes)))
    return f"{told} on {len(shapes)} rank{'s' * (len(shapes) > 1)}"


def _fold(lines: Iterable[tuple[str, str]]) -> str:
    """(Name, text) as lines; those that differ in the numbers of the name only are one line."""
    return "; ".join(f"{name}: {texts[0]}" for name, texts in fold_names(lines, str))
