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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ..errors import ConfigError, MismatchError
from .facts import Facts, UnknownError
from .files import SUFFIXES, read_arguments, read_family, read_rules
from .kinds import Partial, Pattern, Replicate, ShardH, ShardHy, ShardNC, ShardV, Unique
from .layout import Shape
from .regex import PrefixRegex, compile_regex
from .rename import Rename, parse_renames

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
_RULE_KEYS = frozenset({"match", "pattern", "when", "dims"})
_SET_KEYS = frozenset({"family", "rules", "prefix", "variables", "original_vocab_size", "rename", "refuse", "about"})

FUSED_QKV = re.compile(r"query_key_value|qkv|c_attn|in_proj|attn\.W?pack|key_value|(^|\.)kv(_proj)?\.", re.IGNORECASE)
"""Names of fused attention projections: per-rank [q; k; v] and interleaved per head group have the same shapes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameters whose name ``regex`` matches have a pattern.

    Attributes:
        text: as the user or the checkpoint wrote it.
        regex: the whole name, with the group ``stem`` for the prefix where there is one.
        spec: the rule as data, evaluated for each parameter; or
        pattern: what it says, where that is known already.
        rank: of several rules that say something, those of the lowest rank count.
        vocab: dimension 0 is a padded vocabulary.
    """

    text: str
    regex: re.Pattern[str] | PrefixRegex
    spec: Mapping[str, Any] = field(default_factory=dict)
    pattern: Pattern | None = None
    rank: int = 0
    vocab: bool = False

    def match(self, name: str) -> re.Match[str] | None:
        """The whole name's match."""
        return self.regex.fullmatch(name)


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules of one origin.

    Attributes:
        name: origin, for messages.
        rules: in any order: where several match they must agree.
        literal: rules that name one parameter, by that name (AutoTP names thousands).
        refused: parameters that the set knows to be beyond description, with the reason.
        hints: why the set says nothing of a parameter, shown where no other set does.
        variables, refuse: of the YAML.
        vocab: rows of the vocabulary without padding, where the set tells them.
        renames: saved names → live names.
        side: "target" where a live engine describes its own shards, of its own degree.
        shared: parameters that several pipeline stages hold alike, by the checkpoint's word.
        fallback: the pattern of parameters (not buffers) that none of the rules names.
        reported: each rule that matches nothing is reported; else only that none does.
        user: the user's own; comes before what either side says of itself.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    literal: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    refused: tuple[tuple[Rule, str], ...] = ()
    hints: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    refuse: tuple[tuple[str, str], ...] = ()
    vocab: int | None = None
    renames: tuple[Rename, ...] = ()
    side: str | None = None
    shared: tuple[Rule, ...] = ()
    fallback: Pattern | None = None
    reported: bool = True
    user: bool = False

    def find(self, name: str, facts: Facts) -> Pattern | None:
        """The pattern of a parameter, or None where no rule says.

        Raises:
            MismatchError: rules disagree, a rule asks for something that nothing tells or that is contradictory, or the
                set refuses the parameter.
        """
        for rule, reason in self.refused:
            if rule.match(name):
                raise MismatchError(f"{self.name}: {reason}")
        matching = [(rule, rule.match(name)) for rule in (*self.literal.get(name, ()), *self.rules)]
        found: dict[Pattern, Rule] = {}
        for rule, match in sorted((each for each in matching if each[1]), key=lambda each: each[0].rank):
            if match is None or any(other.rank < rule.rank for other in found.values()):
                continue
            pattern = rule.pattern or self._make(rule, match, facts)
            if pattern is not None:
                found.setdefault(pattern, rule)
        if len(found) > 1:
            told = " and ".join(f"{rule.text!r} says {pattern}" for pattern, rule in found.items())
            raise MismatchError(f"two rules of {self.name} disagree: {told}")
        told_vocab = any(rule.vocab and match for rule, match in matching)
        return next((self._mark(pattern, rule, told_vocab, facts) for pattern, rule in found.items()), None)

    def _mark(self, pattern: Pattern, rule: Rule, is_vocab: bool, facts: Facts) -> Pattern:
        """Let a vocabulary's padding differ. A rule of rank 0 that is data already (an affine map) tells all itself."""
        if not is_vocab or (rule.rank == 0 and rule.pattern is not None):
            return pattern
        return replace(pattern, vocab=facts.values.get("vocab"))

    def _make(self, rule: Rule, match: re.Match[str], facts: Facts) -> Pattern | None:
        stem = match.groupdict().get("stem") or ""
        mine = replace(facts, variables=self.variables, name=match.string, stem=stem)
        return make_pattern(rule.spec, mine)

    def check(self, facts: Facts) -> None:
        """Hold the set against what the checkpoint tells of itself.

        Raises:
            MismatchError: the checkpoint says that the set is not its own.
        """
        for condition, reason in self.refuse:
            try:
                held = replace(facts, variables=self.variables).tell(condition)
            except UnknownError:
                continue
            if held:
                raise MismatchError(f"{self.name} contradicts the checkpoint ({condition}): {reason}")

    def find_unused(self, names: Iterable[str]) -> list[str]:
        """Rules that match none of the names, as text."""
        names = list(names)
        idle = [rule.text for rule in self.rules if not any(rule.match(name) for name in names)]
        idle += [rule.text for name in sorted(set(self.literal) - set(names)) for rule in self.literal[name]]
        if self.reported:
            return [f"{self.name}: {text!r} matches no parameter" for text in idle]
        all_idle = self.rules and not self.literal and len(idle) == len(self.rules)
        return [f"{self.name}: no rule matches any parameter"] if all_idle else []


def make_pattern(spec: Mapping[str, Any], facts: Facts) -> Pattern | None:
    """The pattern that a rule's data says for the parameter ``facts.name``; None where its condition does not hold.

    Raises:
        MismatchError: a size cannot be told.
    """
    shape = facts.shapes.get(facts.name, ())
    if "dims" in spec and len(shape) != spec["dims"]:
        return None
    try:
        if "when" in spec and not facts.tell(spec["when"]):
            return None
        return _build(spec, facts)
    except UnknownError as error:
        if "when" in spec and not _can_tell(facts, spec["when"]):
            return None
        raise MismatchError(
            f"the rule {spec['match']!r} needs {error}, which the checkpoint does not tell; give it under variables"
        ) from None


def _can_tell(facts: Facts, expression: str) -> bool:
    try:
        facts.tell(expression)
    except UnknownError:
        return False
    return True


def _build(spec: Mapping[str, Any], facts: Facts) -> Pattern | None:
    kind = spec["pattern"]
    if kind == "unsettled":
        raise MismatchError(spec["reason"])
    vocab = facts.values.get("vocab") if spec.get("vocab") else None
    if kind == "unique":
        return Unique()
    if kind == "replicate":
        return Replicate()
    if kind == "partial":
        return Partial()
    if kind == "shard-v" or (kind == "shard-h" and spec.get("dim") == 0):
        return ShardV(unit=facts.tell(spec.get("unit", 1)), vocab=vocab)
    if kind == "shard-h" and spec.get("dim", 1) != 0:
        return ShardH(dim=spec.get("dim", 1), unit=facts.tell(spec.get("unit", 1)), vocab=vocab)
    if kind == "shard-hy":
        return ShardHy(grid=tuple(facts.tell(size) for size in spec["grid"]), vocab=vocab)
    return _build_nc(spec, facts, vocab)


def _build_nc(spec: Mapping[str, Any], facts: Facts, vocab: int | None) -> ShardNC:
    """Parts that are all 1 are equal parts; else they are sizes, and ``rest`` is what they leave."""
    dim, blocks = spec.get("dim", 0), facts.tell(spec.get("blocks", 1))
    told = spec.get("parts", [1])
    widths = spec.get("widths")
    sized = any(part != 1 for part in told)
    total = facts.values.get(f"total{dim}", 0) // blocks
    known = [None if part == "rest" else _tell_part(part, facts) for part in told]
    left = total - sum(size for size in known if size is not None)
    unknown = sum(size is None for size in known)
    if unknown and (left < 0 or left % unknown):
        raise MismatchError(f"parts {list(told)}: {left} of {total} places are left for {unknown} equal parts")
    parts = tuple(left // unknown if size is None else size for size in known)
    return ShardNC(
        parts=parts,
        dim=dim,
        blocks=blocks,
        sized=sized,
        unit=facts.tell(spec.get("unit", 1)),
        widths=None if widths is None else tuple(tuple(part) for part in widths),
        vocab=vocab,
    )


def _tell_part(part: str | int, facts: Facts) -> int | None:
    """Size of a part; None stands for ``rest``, also at the end of ``a or rest``."""
    if isinstance(part, str) and part.endswith(" or rest"):
        try:
            return int(facts.tell(part.removesuffix(" or rest")))
        except UnknownError:
            return None
    return int(facts.tell(part))


def from_config(value: object) -> tuple[RuleSet, ...]:
    """Rule sets of ``checkpoint.universal.patterns``.

    Args:
        value: a family's name, the path of a YAML file, a list of rules, or an object with ``rules``, ``family``,
            ``original_vocab_size``, ``rename``, ``variables`` and ``prefix``. Its rules come before its family's.

    Raises:
        ConfigError: unknown family, key or pattern; what is valid is listed.
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
        ConfigError: there is none of that name.
    """
    (family,) = _parse_set(read_family(name), f"family {name}")
    return replace(family, reported=False)


@lru_cache
def from_arguments() -> RuleSet:
    """What the training script's arguments, kept in the checkpoint, tell of its model's layout."""
    (found,) = _parse_set(read_arguments(), "the client's arguments")
    return replace(found, reported=False, user=False)


def _parse_set(value: object, name: str) -> tuple[RuleSet, ...]:
    if isinstance(value, (list, tuple)):
        value = {"rules": list(value)}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"patterns: {name}: a family, a path, a list of rules or an object with rules is needed, found {value!r}"
        )
    if unknown := set(value) - _SET_KEYS:
        raise ConfigError(
            f"patterns: {name}: unknown {', '.join(sorted(map(repr, unknown)))}; valid: {', '.join(sorted(_SET_KEYS))}"
        )
    vocab = value.get("original_vocab_size")
    if vocab is not None and (not isinstance(vocab, int) or isinstance(vocab, bool) or vocab < 1):
        raise ConfigError(f"patterns: {name}: original_vocab_size is a positive integer, found {vocab!r}")
    variables = _parse_variables(value.get("variables") or {}, name)
    mine = RuleSet(
        name=name,
        rules=tuple(_parse_rule(item, value.get("prefix") or "", name) for item in _as_list(value.get("rules"), name)),
        variables=variables,
        refuse=tuple((item["when"], item["reason"]) for item in _as_list(value.get("refuse"), name)),
        vocab=vocab,
        renames=parse_renames(value.get("rename") or []),
        user=True,
    )
    if value.get("family") is None:
        return (mine,)
    family = load_family(value["family"])
    # What the user says of a variable replaces what the family would ask for.
    return mine, replace(family, variables={**family.variables, **variables})


def _as_list(value: object, name: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"patterns: {name}: a list is needed, found {value!r}")
    return list(value)


def _parse_variables(value: object, name: str) -> dict[str, Sequence[str | int]]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"patterns: {name}: variables is an object name → expression, found {value!r}")
    return {key: told if isinstance(told, (list, tuple)) else [told] for key, told in value.items()}


def _parse_rule(item: object, prefix: str, name: str) -> Rule:
    if not isinstance(item, Mapping) or not {"match", "pattern"} <= set(item):
        raise ConfigError(f'patterns: {name}: a rule is {{"match": …, "pattern": …}}, found {item!r}')
    kind = item["pattern"]
    if kind not in KINDS:
        raise ConfigError(f"patterns: {name}: unknown pattern {kind!r}; valid: {', '.join(KINDS)}")
    if unknown := set(item) - _RULE_KEYS - KINDS[kind]:
        valid = ", ".join(sorted(_RULE_KEYS | KINDS[kind]))
        raise ConfigError(
            f"patterns: {name}: {item['match']!r}: {kind} has no {', '.join(sorted(map(repr, unknown)))}; "
            f"valid: {valid}"
        )
    if kind == "shard-hy" and "grid" not in item:
        raise ConfigError(f"patterns: {name}: {item['match']!r}: shard-hy needs a grid")
    regex = compile_regex(f"(?P<stem>{prefix})(?:{item['match']})")
    compile_regex(str(item["match"]))
    return Rule(text=str(item["match"]), regex=regex, spec=dict(item))


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
            spec = {"match": name, "pattern": "shard-v", "when": f"own(0) == {second}"}
            literal[name] = (Rule(name, _FIRST, spec=spec),)
        elif pattern is not None:
            literal[name] = (Rule(name, re.compile(re.escape(name)), pattern=pattern),)
    return RuleSet("the live parameters' attributes", literal=literal, hints=hints, reported=False)


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
