"""What a model holds that the user's ``rename`` rules lead to, where no live model tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..atoms import AtomicIndex
from ..errors import MismatchError
from ..flat import Shape
from ..patterns import Facts, Rename, RuleSet, list_renames
from .renames import Ends, RemappedIndex, apply_renames, list_shapes, unite_cut
from .settling import Shapes

_ASK = "of how many experts a layer is made only the model tells: give their number (experts)"


def predict_renames(index: AtomicIndex, rules: Sequence[RuleSet], experts: int | None = None) -> RemappedIndex:
    """The checkpoint as the ``rename`` rules make it for the model that they lead to.

    Args:
        rules: the user's.
        experts: as of :func:`predict_shapes`.

    Raises:
        MismatchError: the rules do not tell that model, or do not fit what was saved.
        ConfigError: a rule asks for what is not there.
    """
    renames = list_renames(rules)
    if not renames:
        return RemappedIndex(index)
    index = unite_cut(index, rules)
    saved = list_shapes(index)
    shapes = predict_shapes(saved, renames, experts, Facts.of(index.model.hints, saved))
    return apply_renames(index, shapes, rules)


def predict_shapes(
    saved: Shapes, renames: Sequence[Rename], experts: int | None = None, facts: Facts | None = None
) -> dict[str, tuple[Shape, ...]]:
    """Local shapes by tensor-parallel rank of what the rules make of saved parameters; what none matches stays.

    All rules about experts, or that leave out, are carried out; of those that take the same rows, and of the others,
    the first that matches.

    Args:
        saved: local shapes.
        experts: of a layer, where rules make another number of them; None: as many as are saved.
        facts: what rules may ask for.

    Raises:
        MismatchError: the rules do not tell how many experts there are, or layers; nothing tells a number that they
            need.
    """
    special, plain = ([rule for rule in renames if rule.is_plain == each] for each in (False, True))
    predicted = _Predicted(experts, facts or Facts())
    for name, shapes in saved.items():
        inside = f"{name}.0"
        found = [
            rule for rule in special if rule.match(name) is not None or (rule.counts_inside and rule.match(inside))
        ]
        alike: set[tuple[object, ...]] = set()
        for rule in found:
            if not rule.cuts or (rule.part, rule.into) not in alike:
                predicted.add(rule, name, shapes)
            alike.add((rule.part, rule.into))
        if not found:
            names = (new for rule in plain if (new := rule.apply(name)) is not None)
            predicted.shapes[next(names, name)] = shapes
    predicted.join()
    return predicted.shapes


@dataclass
class _Predicted:
    """Shapes, rule by rule.

    Attributes:
        experts, facts: see :func:`predict_shapes`.
        shapes: of new names.
        counted: by what surrounds an expert's number in a new name, the numbers of the saved ones.
        joined: by new name (experts, parts) so far, and the shape of one.
    """

    experts: int | None
    facts: Facts
    shapes: dict[str, tuple[Shape, ...]] = field(default_factory=dict)
    counted: dict[Ends, set[int]] = field(default_factory=lambda: defaultdict(set))
    joined: dict[str, tuple[int, int, tuple[Shape, ...]]] = field(default_factory=dict)

    def add(self, rule: Rename, name: str, shapes: tuple[Shape, ...]) -> None:
        groups = rule.match(name)
        if rule.template is None:
            return
        if groups is None:
            self._count_inside(rule, name, shapes)
        elif rule.cuts:
            part, into = rule.measure(replace(self.facts, name=name))
            rows = shapes[0][0] * part.size * sum(into.parts) // (sum(part.parts) * into.size)
            self.shapes[rule.fill(rule.template, groups, name)] = ((rows, *shapes[0][1:]),)
        elif rule.joins:
            new, number = rule.fill(rule.template, groups, name), int(groups["e"]) + 1
            self.joined[new] = max(number, self.joined.get(new, (0,))[0]), rule.part.count, shapes
        elif rule.source and not rule.counts_inside:
            raise MismatchError(
                f"rename: {rule.pattern!r}: how many new numbers {{{rule.number}}} there are only a live model tells; "
                "leave this rule out."
            )
        elif rule.source:
            held = self.counted[rule.split(groups, name)]
            held.add(rule.find_saved(groups))
            self._spread(rule.split(groups, name), self.experts or len(held), _cut(shapes, rule.part.count))
        else:
            count = self._count_fed(rule, name, shapes[0])
            whole = len(shapes[0]) == 3
            one = tuple(shape[1:] for shape in shapes) if whole else shapes
            parts = 1 if whole or rule.part.count == 1 else count
            self._spread(rule.split(groups, name), count, _cut(one, parts, rule.part.count))

    def _count_inside(self, rule: Rename, name: str, shapes: tuple[Shape, ...]) -> None:
        """A parameter that holds the experts: it stays one under its own name, and is cut under another."""
        if not shapes[0]:  # a rule that matches everything
            self.shapes[name] = shapes
            return
        ends = rule.split(rule.match(f"{name}.0") or {}, name)
        count = self.experts or shapes[0][0]
        if ends == (f"{name}.", ""):
            self.shapes[name] = tuple((count, *shape[1:]) for shape in shapes)
        else:
            self._spread(ends, count, _cut(tuple(shape[1:] for shape in shapes), rule.part.count))

    def _count_fed(self, rule: Rename, name: str, shape: Shape) -> int:
        """How many experts one saved parameter feeds."""
        if len(shape) == 3 and self.experts not in (None, shape[0]):
            raise MismatchError(
                f"rename: {name} {shape} holds {shape[0]} experts, not {self.experts}: which of them feed which a rule "
                "with arithmetic of {e} tells (docs/patterns.md)."
            )
        count = shape[0] if len(shape) == 3 else self.experts
        if count is None:
            raise MismatchError(f"rename: {rule.pattern!r} to {rule.template!r}, of {name} {shape}: {_ASK}.")
        return count

    def _spread(self, ends: Ends, count: int, one: tuple[Shape, ...]) -> None:
        self.shapes.update({f"{ends[0]}{expert}{ends[1]}": one for expert in range(count)})

    def join(self) -> None:
        """Add what several experts feed: [experts, …]."""
        for new, (experts, parts, shapes) in self.joined.items():
            inner = ((shape[0] * parts, *shape[1:]) if shape else shape for shape in shapes)
            self.shapes[new] = tuple((experts, *shape) for shape in inner)


def _cut(shapes: tuple[Shape, ...], *parts: int) -> tuple[Shape, ...]:
    """Shapes of one of so many equal parts of the rows."""
    for each in parts:
        shapes = tuple((shape[0] // each, *shape[1:]) if shape else shape for shape in shapes)
    return shapes
