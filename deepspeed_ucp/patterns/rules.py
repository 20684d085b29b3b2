"""Rules: which parameter has which pattern. The user's, a family's, what live parameters carry.

A rule set is data: regular expressions with patterns. Every expression matches the whole name behind an optional prefix
that the set declares (``prefix``: what pipelines and wrappers put in front of a name). Two rules of one set that match
a parameter must say the same.

A rule, in YAML or JSON:

    match:    regular expression of the name behind the prefix
    pattern:  unique | replicate | partial | shard-v | shard-h | shard-hy | shard-nc | unsettled
    dim:      shard-h, shard-nc: the dimension that is cut (shard-h 1, shard-nc 0)
    grid:     shard-hy: ranks per dimension
    parts:    shard-nc: sizes of the parts along dim; ``rest``: equal shares of what the others leave.
              All 1: equal parts
    blocks:   shard-nc: equal blocks along dim, each made of the parts (fused experts)
    widths:   shard-nc: per part and rank the width, where the parts' widths do not follow from the shards' shapes
    unit:     each rank's widths are multiples of it (a head's or head group's rows)
    vocab:    true: dimension 0 is a vocabulary whose padding may differ (original_vocab_size)
    when:     an expression; the rule counts where it is true
    dims:     the rule counts for tensors of that many dimensions
    reason:   unsettled: why

Sizes are integers or expressions (see ``facts``) over ``variables`` of the set.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, ClassVar, Literal

from ..errors import ConfigError, MismatchError, advise, describe_faults
from .facts import Facts, UnknownError
from .files import SUFFIXES, list_families, read_packaged, read_rules
from .kinds import FUSED_QKV, Partial, Pattern, Replicate, ShardH, ShardHy, ShardNC, ShardV, Unique
from .layout import Shape
from .regex import Matcher, compile_regex
from .rename import Rename, parse_renames
from .resize import Resize

_FUSED_GATE = re.compile(r"h_to_4h|fc1|gate_up|weight1|w1", re.IGNORECASE)
KINDS: dict[str, frozenset[str]] = {
    "unique": frozenset(),
    "replicate": frozenset(),
    "partial": frozenset(),
    "shard-v": frozenset({"unit", "vocab"}),
    "shard-h": frozenset({"dim", "unit", "vocab"}),
    "shard-hy": frozenset({"grid", "vocab"}),
    "shard-nc": frozenset({"dim", "parts", "blocks", "unit", "widths", "vocab"}),
    "unsettled": frozenset({"reason"}),
}
"""Patterns, and the keys that a rule of each may have besides those of all rules."""
_RULE_KEYS = frozenset({"match", "pattern", "when", "dims"})
_AMBIGUOUS = (
    "its attributes tell the dimension, not how query, key and value are fused in it: per-rank [q; k; v] and "
    "interleaved per head group have the same shapes; name a family or give a rule"
)
_MAYBE_GATED = (
    "its attributes tell the dimension, not whether gate and up are fused in it, each cut on its own; name a family or "
    "give a rule"
)
_SECOND = {"dense_h_to_4h": "dense_4h_to_h.weight", "linear_fc1": "linear_fc2.weight"}
"""First matrix of a feed-forward layer in Megatron's names → the second, whose width tells whether gate is fused."""


Size = int | str
"""A number, or an expression."""


@dataclass(frozen=True)
class Spec:
    """A rule as it is written (see this module's text)."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    match: str
    pattern: Literal["unique", "replicate", "partial", "shard-v", "shard-h", "shard-hy", "shard-nc", "unsettled"]
    when: Size = 1
    dims: int | None = None
    reason: str = ""
    dim: int | None = None
    grid: tuple[Size, ...] = ()
    parts: tuple[Size, ...] = (1,)
    blocks: Size = 1
    unit: Size = 1
    widths: tuple[tuple[int, ...], ...] | None = None
    vocab: bool = False

    def __post_init__(self) -> None:
        used = {each.name for each in fields(self) if getattr(self, each.name) != each.default}
        valid = _RULE_KEYS | KINDS[self.pattern]
        if unknown := used - valid:
            odd = sorted(unknown)
            raise ValueError(
                f"{self.match!r}: {self.pattern} has no {', '.join(map(repr, odd))}. {advise(odd[0], sorted(valid))}"
            )
        if self.pattern == "shard-hy" and not self.grid:
            raise ValueError(f"{self.match!r}: shard-hy needs a grid")

    def make(self, facts: Facts) -> Pattern | None:
        """The pattern that it says for the parameter ``facts.name``; None where its condition does not hold.

        Raises:
            MismatchError: a size cannot be told, or the rule says that it is not known.
        """
        if self.dims not in (None, len(facts.shapes.get(facts.name, ()))) or not facts.is_true(self.when):
            return None
        try:
            return self._build(facts)
        except UnknownError as error:
            raise MismatchError(f"the rule {self.match!r} {error.need}") from None

    def _build(self, facts: Facts) -> Pattern:
        if self.pattern == "unsettled":
            raise MismatchError(self.reason)
        if self.pattern in _PLAIN:
            return _PLAIN[self.pattern]()
        vocab = facts.values.get("vocab") if self.vocab else None
        if self.pattern == "shard-hy":
            return ShardHy(grid=tuple(map(facts.evaluate, self.grid)), vocab=vocab)
        if self.pattern == "shard-nc":
            return self._build_nc(facts, vocab)
        unit, dim = facts.evaluate(self.unit), 1 if self.dim is None else self.dim
        if self.pattern == "shard-v" or dim == 0:
            return ShardV(unit=unit, vocab=vocab)
        return ShardH(dim=dim, unit=unit, vocab=vocab)

    def _build_nc(self, facts: Facts, vocab: int | None) -> ShardNC:
        """Parts that are all 1 are equal parts; else they are sizes, and ``rest`` is what they leave."""
        dim, blocks = self.dim or 0, facts.evaluate(self.blocks)
        total = facts.values.get(f"total{dim}", 0) // blocks
        known = [_measure_part(part, facts) for part in self.parts]
        left = total - sum(size for size in known if size is not None)
        unknown = known.count(None)
        if unknown and (left < 0 or left % unknown):
            raise MismatchError(
                f"parts {list(self.parts)}: {left} of {total} places are left for {unknown} equal parts"
            )
        return ShardNC(
            parts=tuple(left // unknown if size is None else size for size in known),
            dim=dim,
            blocks=blocks,
            sized=any(part != 1 for part in self.parts),
            unit=facts.evaluate(self.unit),
            widths=self.widths,
            vocab=vocab,
        )


_PLAIN: dict[str, type[Pattern]] = {"unique": Unique, "replicate": Replicate, "partial": Partial}


def _measure_part(part: Size, facts: Facts) -> int | None:
    """Size of a part; None stands for ``rest``, also at the end of ``a or rest``."""
    text = str(part)
    if text == "rest":
        return None
    try:
        return int(facts.evaluate(text.removesuffix(" or rest")))
    except UnknownError:
        if text.endswith(" or rest"):
            return None
        raise


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameters whose name matches have a pattern.

    Attributes:
        text: as the user or the checkpoint wrote it.
        match: of the whole name, with the group ``stem`` for the prefix where there is one.
        says: the pattern, or the rule as data, evaluated for each parameter.
        rank: of several rules that say something, those of the lowest rank count.
        vocab: dimension 0 is a padded vocabulary.
    """

    text: str
    match: Matcher
    says: Pattern | Spec
    rank: int = 0
    vocab: bool = False

    def make(self, match: re.Match[str], facts: Facts) -> Pattern | None:
        """What it says of the parameter that it matches."""
        if isinstance(self.says, Pattern):
            return self.says
        return self.says.make(replace(facts, name=match.string, stem=match.groupdict().get("stem") or ""))


_ANY = re.compile(".*", re.DOTALL)


def name_rule(name: str, pattern: Pattern, rank: int = 0) -> Rule:
    """A rule for one parameter, kept by its name (``RuleSet.literal``): an expression for each would take long."""
    return Rule(name, _ANY.fullmatch, pattern, rank)


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules of one origin.

    Attributes:
        name: origin, for messages.
        rules: in any order: where several match they must agree.
        literal: rules that name one parameter, by that name (AutoTP names thousands).
        hints: why the set says nothing of a parameter, shown where no other set does.
        variables, refuse: of the YAML.
        vocab: rows of the vocabulary without padding, where the set tells them.
        renames: saved names → live names.
        resizes: parameters that may have another shape in the live model.
        by: ``user``: comes before what either side says of itself. ``target``: a live engine describes its own shards,
            of its own degree. Else ``checkpoint``.
        shared: parameters that several pipeline stages hold alike, by the checkpoint's word.
        fallback: the pattern of parameters (not buffers) that none of the rules names.
        reported: each rule that matches nothing is reported; else only that none does.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    literal: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, Sequence[Size]] = field(default_factory=dict)
    refuse: Sequence[Mapping[str, str]] = ()
    vocab: int | None = None
    renames: tuple[Rename, ...] = ()
    resizes: tuple[Resize, ...] = ()
    by: str = "checkpoint"
    shared: tuple[Matcher, ...] = ()
    fallback: Pattern | None = None
    reported: bool = False

    def find(self, name: str, facts: Facts) -> Pattern | None:
        """The pattern of a parameter, or None where no rule says.

        Raises:
            MismatchError: rules disagree, a rule asks for something that nothing tells or that is contradictory, or the
                set refuses the parameter.
        """
        facts = replace(facts, variables=self.variables)
        matching = [(r, match) for r in (*self.literal.get(name, ()), *self.rules) if (match := r.match(name))]
        matching.sort(key=_get_rank)
        found: dict[Pattern, Rule] = {}
        for _, group in groupby(matching, key=_get_rank):
            for rule, match in group:
                pattern = rule.make(match, facts)
                if pattern is not None:
                    found.setdefault(pattern, rule)
            if found:
                break
        if len(found) > 1:
            texts = " and ".join(f"{rule.text!r} says {pattern}" for pattern, rule in found.items())
            raise MismatchError(f"two rules of {self.name} disagree: {texts}")
        for pattern, rule in found.items():
            # A vocabulary's padding may differ, whatever list names the cut. An affine map (rank 0) tells all itself.
            if rule.rank and any(other.vocab for other, _ in matching):
                return replace(pattern, vocab=facts.values.get("vocab"))
            return pattern
        return None

    def follow(self, renamed: Mapping[str, str]) -> RuleSet:
        """The set for parameters under other names, of which it says what it says of their own.

        Args:
            renamed: its own name → the other.
        """
        literal = dict(self.literal)
        for name, new in renamed.items():
            if name != new:
                rules = (*literal.pop(name, ()), *self.rules)
                said = (rule for rule in rules if isinstance(rule.says, Pattern) and rule.match(name))
                literal[new] = tuple(replace(rule, match=_ANY.fullmatch) for rule in said)
        return replace(self, literal=literal)

    def check(self, facts: Facts) -> None:
        """Hold the set against what the checkpoint tells of itself.

        Raises:
            MismatchError: the checkpoint says that the set is not its own.
        """
        facts = replace(facts, variables=self.variables)
        for each in self.refuse:
            if facts.is_true(each["when"]):
                raise MismatchError(f"{self.name} contradicts the checkpoint ({each['when']}): {each['reason']}")

    def find_unused(self, names: Iterable[str]) -> list[str]:
        """Rules that match none of the names, as text."""
        names = list(names)
        idle = [rule.text for rule in self.rules if not any(rule.match(name) for name in names)]
        if self.reported:
            idle += [rule.text for name in sorted(set(self.literal) - set(names)) for rule in self.literal[name]]
            return [f"{self.name}: {text!r} matches no parameter" for text in idle]
        all_idle = self.rules and not self.literal and len(idle) == len(self.rules)
        return [f"{self.name}: no rule matches any parameter"] if all_idle else []


def _get_rank(matching: tuple[Rule, re.Match[str]]) -> int:
    return matching[0].rank


@dataclass(frozen=True)
class RuleFile:
    """Rules of a configuration or a YAML file, as they are written."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    about: str = ""
    family: str | None = None
    prefix: str = ""
    variables: dict[str, Size | tuple[Size, ...]] = field(default_factory=dict)
    original_vocab_size: Any = None
    rename: Any = ()
    resize: tuple[Resize, ...] = ()
    refuse: tuple[dict[str, str], ...] = ()
    rules: tuple[Spec, ...] = ()

    def __post_init__(self) -> None:
        vocab = self.original_vocab_size
        if vocab is not None and (type(vocab) is not int or vocab < 1):
            raise ValueError(f"original_vocab_size is a positive integer, found {vocab!r}")
        if any(set(each) != {"when", "reason"} for each in self.refuse):
            raise ValueError("refuse is a list of objects with when and reason")


def _read_file(value: object, name: str) -> RuleFile:
    from pydantic import TypeAdapter, ValidationError  # takes longer to import than a small folder to look at

    if isinstance(value, (list, tuple)):
        value = {"rules": value}
    if isinstance(value, Mapping):  # what YAML leaves empty is not there
        value = {key: each for key, each in value.items() if each is not None}
    try:
        return TypeAdapter(RuleFile).validate_python(value)
    except ValidationError as error:
        keys, rule_keys, others = ([each.name for each in fields(kind)] for kind in (RuleFile, Spec, Resize))
        needed = (
            f"A family, a path, a list of rules or an object with some of {', '.join(keys)} is needed; a rule has "
            f"match, pattern and some of {', '.join(rule_keys)}."
        )
        told = describe_faults(error, [*keys, *rule_keys, *others], needed)
        if not isinstance(value, Mapping):
            told = f"{told} {needed}"
        raise ConfigError(f"patterns: {name}: {told}") from None


def _parse_set(value: object, name: str) -> tuple[RuleSet, ...]:
    """The set that is written, and its family's."""
    file = _read_file(value, name)
    variables = {key: size if isinstance(size, tuple) else (size,) for key, size in file.variables.items()}
    mine = RuleSet(
        name=name,
        rules=tuple(_make_rule(spec, file.prefix) for spec in file.rules),
        variables=variables,
        refuse=file.refuse,
        vocab=file.original_vocab_size,
        renames=parse_renames(file.rename),
        resizes=tuple(
            replace(each, match=f"(?:{file.prefix})(?:{each.match})") if file.prefix else each for each in file.resize
        ),
        by="user",
        reported=True,
    )
    if file.family is None:
        return (mine,)
    family = load_family(file.family)
    # What the user says of a variable replaces what the family would ask for.
    return mine, replace(family, variables={**family.variables, **variables})


def list_renames(rules: Iterable[RuleSet]) -> list[Rename]:
    """The ``rename`` rules of all sets, in their order, each with its set's variables."""
    return [replace(rename, variables=each.variables) for each in rules for rename in each.renames]


def find_resize(rules: Iterable[RuleSet], name: str) -> Resize | None:
    """The first ``resize`` rule about a parameter."""
    return next((each for one in rules for each in one.resizes if each.fits(name)), None)


def from_config(value: object) -> tuple[RuleSet, ...]:
    """Rule sets of ``checkpoint.universal.patterns``.

    Args:
        value: a family's name, the path of a YAML file, a list of rules, or an object with ``rules``, ``family``,
            ``original_vocab_size``, ``rename``, ``variables`` and ``prefix``. Its rules come before its family's.

    Raises:
        ConfigError: unknown family, key or pattern; the valid one that it is like is named, or all are.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        if value.lower().endswith(SUFFIXES):
            return _parse_set(read_rules(value), f"the rules in {value}")
        return (load_family(value),)
    return _parse_set(value, "the user's rules")


@lru_cache
def load_family(name: str) -> RuleSet:
    """A family of the package.

    Raises:
        ConfigError: there is none of that name; the known ones are listed.
    """
    if name not in list_families():
        known = list_families()
        listed = f"Families: {', '.join(known)}; a rule file ends in {' or '.join(SUFFIXES)}."
        raise ConfigError(f"patterns: there is no family {name!r}. {advise(name, known, listed)}")
    family, *bases = _parse_set(read_packaged(name), f"family {name}")
    for base in bases:  # what it says itself counts first
        family = replace(
            family,
            rules=(*family.rules, *(replace(rule, rank=rule.rank + 1) for rule in base.rules)),
            variables=base.variables,
            refuse=(*family.refuse, *base.refuse),
            vocab=base.vocab if family.vocab is None else family.vocab,
            renames=(*family.renames, *base.renames),
            resizes=(*family.resizes, *base.resizes),
        )
    return replace(family, reported=False)


def advise_family(saved: Collection[str], live: Collection[str]) -> str:
    """Which families' ``rename`` rules lead from saved names to most of the live ones; empty where none's do."""
    fed = {name: _count_fed(load_family(name), saved, live) for name in list_families()}
    best = [name for name, count in fed.items() if count == max(fed.values()) > 0]
    listed = " or ".join(f'"{name}"' for name in best)
    return f' Rules for these names come with the plugin: "patterns": {listed} (docs/patterns.md).' if best else ""


def _count_fed(family: RuleSet, saved: Collection[str], live: Collection[str]) -> int:
    fed = set[str]()
    for rule in list_renames([family]):
        with suppress(ConfigError):  # its template has a variable that the user has to give
            fed |= {rule.apply(name) or "" for name in saved} & {*live}
    return len(fed)


@lru_cache
def from_arguments() -> RuleSet:
    """What the training script's arguments, kept in the checkpoint, tell of its model's layout."""
    (found,) = _parse_set(read_packaged("_arguments"), "the client's arguments")
    return replace(found, reported=False, by="checkpoint")


def _make_rule(spec: Spec, prefix: str) -> Rule:
    compile_regex(spec.match)  # by itself, so that it does not end the group
    return Rule(spec.match, compile_regex(f"(?P<stem>{prefix})(?:{spec.match})").fullmatch, spec)


def from_attributes(attributes: Mapping[str, Mapping[str, Any]]) -> RuleSet:
    """What live parameters carry (Megatron-Core's ``tensor_model_parallel``, ``partition_dim``, ``partition_stride``).

    A fused query/key/value is settled by them only where its parts are told (``partition_stride`` above 1, or
    ``partition_sizes``, the local sizes of unequal parts): per-rank [q; k; v] and interleaved heads look alike.
    Megatron leaves ``partition_stride`` at 1 for fused gate and up too: the second matrix tells whether there is one.
    """
    literal: dict[str, tuple[Rule, ...]] = {}
    hints: dict[str, str] = {}
    for name, told in attributes.items():
        pattern = _read_attributes(told)
        if isinstance(pattern, ShardH) and FUSED_QKV.search(name):
            hints[name] = _AMBIGUOUS
        elif pattern == ShardV() and (found := _FIRST.fullmatch(name)):
            hints[name] = _MAYBE_GATED
            second = f"sibling({_SECOND[found['first']]!r}, 1)"
            spec = Spec(match=name, pattern="shard-v", when=f"own(0) == {second}")
            literal[name] = (Rule(name, _FIRST.fullmatch, spec),)
        elif pattern is not None:
            literal[name] = (name_rule(name, pattern),)
    return RuleSet("the live parameters' attributes", literal=literal, hints=hints)


_FIRST = re.compile(rf"(?P<stem>.*\.)(?P<first>{'|'.join(_SECOND)})\.(?:weight|bias)")


def _read_attributes(told: Mapping[str, Any]) -> Pattern | None:
    parallel, dim = told.get("tensor_model_parallel"), told.get("partition_dim", -1)
    if parallel is None:
        return None
    if not parallel:
        return Replicate()
    if not isinstance(dim, int) or dim < 0:
        return None
    sizes, stride = told.get("partition_sizes"), told.get("partition_stride") or 1
    if sizes:
        return ShardNC(parts=tuple(int(size) for size in sizes), dim=dim)
    if stride > 1:
        return ShardNC(parts=(1,) * stride, dim=dim)
    return ShardV() if dim == 0 else ShardH(dim=dim)


def suggest_rule(name: str, source: Sequence[Shape], target: Sequence[Shape] | None) -> dict[str, Any]:
    """A rule to paste for a parameter that nothing settles, as far as shapes tell; <…> is for the user to decide."""
    match = re.sub(r"(?<=\.)\d+(?=\\|$)|^\d+(?=\\|$)", r"\\d+", name.replace(".", r"\."))
    sides = [source] if target is None else [source, target]
    if len({shape for side in sides for shape in side}) == 1 and len(sides) == 2:
        return {"match": match, "pattern": "<replicate, or shard-v with vocab>"}
    if FUSED_QKV.search(name):
        choice = "<shard-nc with parts [q, k, v] in rows, or shard-v where they are interleaved per head group>"
        return {"match": match, "pattern": choice}
    cut = _find_cut(sides)
    if cut == 0 and _FUSED_GATE.search(name):
        return {"match": match, "pattern": "<shard-v, or shard-nc with parts [1, 1] where gate and up are fused>"}
    if cut is None:
        return {"match": match, "pattern": f"<one of {', '.join(sorted(set(KINDS) - {'unsettled'}))}>"}
    return {"match": match, "pattern": "shard-v"} if cut == 0 else {"match": match, "pattern": "shard-h", "dim": cut}


def _find_cut(sides: Sequence[Sequence[Shape]]) -> int | None:
    """The only dimension along which shards of both sides add up to the same size, others being equal."""
    found = []
    for dim in range(min(len(shape) for side in sides for shape in side)):
        sums = {sum(shape[dim] for shape in side) for side in sides}
        rests = {shape[:dim] + shape[dim + 1 :] for side in sides for shape in side}
        if len(sums) == 1 == len(rests):
            found.append(dim)
    return found[0] if len(found) == 1 and len(sides) > 1 else None
