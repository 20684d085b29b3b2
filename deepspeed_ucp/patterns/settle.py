"""Settle how every parameter is cut on both sides, in a fixed order and without guessing (DESIGN's invariant 5).

Where both sides have the same degree and each rank the same shape, rank r's shard stays rank r's and nothing needs to
be known. Else the first rule set that says something counts; what no set says is proven by the shapes or is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import MismatchError
from .facts import Facts
from .files import list_families
from .kinds import VOCABULARY_HINT, Pattern, Replicate, SameShards, Unique, check_shapes
from .layout import Layout, Shape
from .rules import RuleSet, suggest_rule

SHAPES = "the shapes"
EQUAL = "the same bytes on every tensor-parallel rank"
_TABLE = re.compile(r"embed|vocab|wte|lm_head|output_layer|final_linear|embd", re.IGNORECASE)


@dataclass(slots=True)
class Settled:
    """How every parameter is cut.

    Attributes:
        layouts: name → (source layout, target layout or None).
        patterns: name → pattern of the source.
        origin: name → what settled it.
        open: what nothing settles.
        wrong: name → in words: shapes that differ or contradict a rule, rules that disagree.
        unused: rules of the user's that match no parameter.
        notes: the same of the checkpoint's; often a script lists what a variant of its model would have.
    """

    layouts: dict[str, tuple[Layout, Layout | None]] = field(default_factory=dict)
    patterns: dict[str, Pattern] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    open: dict[str, Unsettled] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
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
        if not self.is_complete:
            raise MismatchError(" ".join((*_tell_wrong(self.wrong), *_tell_open(self.open))))
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
        return {**rule, "vocab": True} if _TABLE.search(self.name) else rule

    def __str__(self) -> str:
        text = f"{self.name}: {_tell_side(self.source)} in the checkpoint"
        if self.target is not None:
            text += f", {_tell_side(self.target)} in the model"
        return "; ".join((text, *self.why))


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
            its own shards (``side`` "target") counts for the target before all but the user's, and for the source last.
        hints: what the checkpoint tells (``AtomicIndex.hints``): ``args``, ``checkpoint_version``.
        replicas: what every rank holds alike, and is a replica where no rule says otherwise (equal buffers).
        degree: of a target whose shapes are not known (then ``target`` is None): the ones that the patterns give it.
    """
    orders = {side: _order(rule_sets, side) for side in ("source", "target")}
    return _Settler(source, target, rule_sets, orders, hints or {}, degree, replicas).run(names)


@dataclass(slots=True)
class _Settler:
    source: Mapping[str, tuple[Shape, ...]]
    target: Mapping[str, tuple[Shape, ...]] | None
    rule_sets: Sequence[RuleSet]
    orders: Mapping[str, Sequence[RuleSet]]
    hints: Mapping[str, Any]
    degree: int | None = None
    replicas: Collection[str] = ()
    settled: Settled = field(default_factory=Settled)
    checked: set[str] = field(default_factory=set)
    facts: Facts = field(default_factory=Facts)

    def run(self, names: Sequence[str]) -> Settled:
        args = self.hints.get("args")
        self.facts = Facts(
            args=args if isinstance(args, Mapping) else {},
            hints=self.hints,
            shapes={name: shapes[0] for name, shapes in self.source.items()},
        )
        for name in names:
            self._settle(name)
        for each in self.rule_sets:
            (self.settled.unused if each.user else self.settled.notes).extend(each.find_unused(names))
        return self.settled

    def _settle(self, name: str) -> None:
        source, target = self.source[name], None if self.target is None else self.target[name]
        try:
            if self.degree is not None:
                self._foresee(name, source, self.degree)
            elif target is None and len(source) == 1:
                self._note(name, source)
            elif target == source:
                self._keep(name, Unique() if len(source) == 1 else SameShards(), "the same shards", source, target)
            else:
                self._look_up(name, source, target)
        except MismatchError as error:
            self.settled.wrong[name] = str(error)

    def _note(self, name: str, source: tuple[Shape, ...]) -> None:
        """What is whole needs no pattern; what a rule says of it is kept for whoever cuts it later."""
        self.facts = replace(self.facts, values=self._measure(source))
        try:
            found = self._find(name)
            if found:
                self._keep(name, *found[0], source, None)
                return
        except MismatchError:
            if any(each.user for each in self.rule_sets):
                raise
        self._keep(name, Unique(), "the same shards", source, None)

    def _foresee(self, name: str, source: tuple[Shape, ...], degree: int) -> None:
        """Settle for a target of which only the degree is known."""
        if degree == len(source):
            self._keep(name, Unique() if degree == 1 else SameShards(), "the same shards", source, source)
            return
        self.facts = replace(self.facts, values=self._measure(source))
        found = self._find(name)
        if not found and name not in self.replicas:
            self._open(name, source, None)
            return
        (have, origin), (want, other) = found or ((Replicate(), EQUAL), (Replicate(), EQUAL))
        target = want.spread(have.join(source).shape, degree, self._pad_unit())
        self._store(name, (have, want), origin if origin == other else f"{origin}; {other}", source, target)

    def _pad_unit(self) -> int | None:
        """What Megatron pads the vocabulary to, times the degree."""
        unit = self.facts.args.get("make_vocab_size_divisible_by")
        return unit if isinstance(unit, int) and unit > 0 else None

    def _open(self, name: str, source: tuple[Shape, ...], target: tuple[Shape, ...] | None) -> None:
        why = tuple(f"{each.name}: {each.hints[name]}" for each in self.rule_sets if name in each.hints)
        self.settled.open[name] = Unsettled(name, source, target, why)

    def _keep(
        self, name: str, pattern: Pattern, origin: str, source: Sequence[Shape], target: Sequence[Shape] | None
    ) -> None:
        self._store(name, (pattern, pattern), origin, source, target)

    def _store(
        self,
        name: str,
        patterns: tuple[Pattern, Pattern],
        origin: str,
        source: Sequence[Shape],
        target: Sequence[Shape] | None,
    ) -> None:
        have = patterns[0].join(source)
        want = None if target is None else patterns[1].join(target)
        if want is not None:
            check_shapes(have.shape, want.shape, patterns[0].vocab or patterns[1].vocab)
        self.settled.layouts[name] = (have, want)
        self.settled.patterns[name] = patterns[0]
        self.settled.origin[name] = origin

    def _look_up(self, name: str, source: tuple[Shape, ...], target: tuple[Shape, ...] | None) -> None:
        self.facts = replace(self.facts, values=self._measure(source))
        found = self._find(name)
        if len(source) == 1 and target is not None and len(target) == 1:
            self._keep(
                name, _fit_whole(name, source[0], target[0], found), found[0][1] if found else SHAPES, source, target
            )
        elif found:
            (have, origin), (want, other) = found
            told = origin if origin == other else f"{origin}; {other}"
            self._store(name, (have, want), told, source, target)
        elif name in self.replicas and len({*source, *(target or ())}) == 1:
            self._keep(name, Replicate(), EQUAL, source, target)
        elif _prove_replicated(name, source, target):
            self._keep(name, Replicate(), SHAPES, source, target)
        else:
            self._open(name, source, target)

    def _measure(self, source: Sequence[Shape]) -> dict[str, int]:
        """Logical sizes if a dimension is cut, and the vocabulary: what expressions may ask for."""
        totals = {f"total{dim}": sum(shape[dim] for shape in source) for dim in range(len(source[0]))}
        vocab = next((each.vocab for each in self.rule_sets if each.vocab is not None), None)
        return totals if vocab is None else {**totals, "vocab": vocab}

    def _find(self, name: str) -> tuple[tuple[Pattern, str], ...]:
        """Patterns of the source and the target with their origins; empty where nothing says anything."""
        asked: dict[int, Pattern | None] = {}
        sides = []
        for side in ("source", "target"):
            for each in self.orders[side]:
                if id(each) not in asked:
                    asked[id(each)] = self._ask(each, name)
                if (pattern := asked[id(each)]) is not None:
                    sides.append((pattern, each.name))
                    break
        return tuple(sides)

    def _ask(self, rule_set: RuleSet, name: str) -> Pattern | None:
        pattern = rule_set.find(name, self.facts)
        if pattern is None and name not in self.replicas:
            pattern = rule_set.fallback
        if pattern is not None and rule_set.name not in self.checked:
            rule_set.check(self.facts)
            self.checked.add(rule_set.name)
        return pattern


def _tell_wrong(wrong: Mapping[str, str]) -> Iterator[str]:
    if wrong:
        lines = _group([f"{name}: {text}" for name, text in wrong.items()])
        yield f"The model and the checkpoint cannot be brought together: {'; '.join(lines)}."


def _tell_open(unsettled: Mapping[str, Unsettled]) -> Iterator[str]:
    if not unsettled:
        return
    lines = [str(each) for each in unsettled.values()]
    rules = dict.fromkeys(json.dumps(each.suggest()) for each in unsettled.values())
    yield (
        f"How tensor parallelism cuts the following is not known ({len(lines)} "
        f"parameter{'s' * (len(lines) > 1)}): {'; '.join(_group(lines))}. Name the "
        'model\'s family ("checkpoint": {"universal": {"patterns": "<family>"}}; families: '
        f"{', '.join(list_families())}), or give rules; to be checked and pasted: "
        f'"checkpoint": {{"universal": {{"patterns": [{", ".join(rules)}]}}}}'
    )


def _order(rule_sets: Sequence[RuleSet], side: str) -> list[RuleSet]:
    """The user's sets; for the target what the live engine says of itself; the others; for the source that one last."""

    def rate(each: RuleSet) -> int:
        if each.side == "target":
            return 1 if side == "target" else 3
        return 0 if each.user else 2

    return sorted(rule_sets, key=rate)


def _fit_whole(name: str, source: Shape, target: Shape, found: Sequence[tuple[Pattern, str]]) -> Pattern:
    """No tensor parallelism on either side: only a vocabulary's padding may differ."""
    vocab = next((pattern.vocab for pattern, _ in found if pattern.vocab), None)
    text = f"shape {source} in the checkpoint, {target} in the model"
    if not source or source[1:] != target[1:]:
        raise MismatchError(text)
    if vocab is None and _TABLE.search(name):
        raise MismatchError(f"{text}; {VOCABULARY_HINT}")
    if vocab is None:
        raise MismatchError(text)
    return Unique(vocab=vocab)


def _prove_replicated(name: str, source: Sequence[Shape], target: Sequence[Shape] | None) -> bool:
    """Ranks of two different degrees all hold the same shape: cut, one side would be a multiple of the other.

    A vocabulary is left out: padding can make any two of its sides alike.
    """
    if target is None or len(source) == len(target) or _TABLE.search(name):
        return False
    return len({*source, *target}) == 1


def _tell_side(shapes: Sequence[Shape]) -> str:
    told = " and ".join(dict.fromkeys(map(str, shapes)))
    return f"{told} on {len(shapes)} rank{'s' * (len(shapes) > 1)}"


def _group(lines: Sequence[str]) -> list[str]:
    """Lines that differ in the numbers of the parameter's name only, as one line with all these numbers."""
    groups: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        name, _, rest = line.partition(": ")
        groups.setdefault((re.sub(r"\d+", "{}", name), rest), []).append(name)
    return [f"{_join_names(names)}: {rest}" for (_, rest), names in groups.items()]


def _join_names(names: Sequence[str]) -> str:
    places = list(zip(*(re.findall(r"\d+", name) for name in names), strict=True))
    varying = [at for at, numbers in enumerate(places) if len(set(numbers)) > 1]
    if len(names) == 1 or len(varying) != 1:
        return ", ".join(names)
    (place,) = varying
    numbers = iter(range(len(places)))
    spans = _join_numbers(sorted(map(int, places[place])))
    return re.sub(r"\d+", lambda found: f"{{{spans}}}" if next(numbers) == place else found[0], names[0])


def _join_numbers(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] + 1 == number:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
