"""Rules that assign patterns: a user's, a family's, live parameters' attributes.

A rule set is a list of regular expressions with patterns; ``docs/patterns.md`` describes the keys of a rule. Each
expression matches the whole name behind the set's optional ``prefix`` (added to names by pipelines and wrappers). Two
rules of one set that match a parameter must agree. Sizes are integers or expressions (see ``facts``) over ``variables``
of the set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib import resources
from typing import Any, ClassVar, Literal

import yaml

from ..errors import ConfigError, MismatchError, advise, describe_faults
from .facts import Facts, UnknownError, compile_regex
from .kinds import FUSED_QKV, Partial, Pattern, Replicate, ShardH, ShardHy, ShardNC, ShardV, Unique
from .layout import Shape
from .rename import Rename, parse_renames, rename_names
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
"""Pattern → keys that its rules may have in addition to those of all rules."""
_RULE_KEYS = frozenset({"match", "pattern", "when", "dims"})
_AMBIGUOUS = (
    "its attributes give the dimension, but not how query, key and value are fused in it: per-rank [q; k; v] and "
    "interleaved per head group have the same shapes; name a family or give a rule"
)
_MAYBE_GATED = (
    "its attributes give the dimension, but not whether gate and up are fused in it; name a family or give a rule"
)
_MAYBE_EXPERTS = (
    "its attributes give the dimension, but not whether it joins experts that are cut one by one; name a family or "
    "give a rule (shard-nc with blocks)"
)
_SECOND = {"dense_h_to_4h": "dense_4h_to_h.weight", "linear_fc1": "linear_fc2.weight"}
"""First matrix of a feed-forward layer in Megatron's names → the second, whose width shows whether a gate is fused."""

Size = int | str
"""A number or an expression."""

Matcher = Callable[[str], "re.Match[str] | None"]

_SUFFIXES = (".yaml", ".yml", ".json")  # suffixes of rule files


@dataclass(frozen=True)
class Spec:
    """A rule as written (``docs/patterns.md``)."""

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
        used = {key.name for key in fields(self) if getattr(self, key.name) != key.default}
        valid = _RULE_KEYS | KINDS[self.pattern]
        if unknown := used - valid:
            keys = sorted(unknown)
            raise ValueError(
                f"{self.match!r}: {self.pattern} has no {', '.join(map(repr, keys))}. {advise(keys[0], sorted(valid))}"
            )
        if self.pattern == "shard-hy" and not self.grid:
            raise ValueError(f"{self.match!r}: shard-hy needs a grid")

    def make(self, facts: Facts) -> Pattern | None:
        """Make the pattern of the parameter ``facts.name``, or None if it does not apply.

        Raises:
            MismatchError: a size is unknown, or the rule's pattern is ``unsettled``.
        """
        if self.dims not in (None, len(facts.shapes.get(facts.name, ()))) or not facts.is_true(self.when):
            return None
        try:
            return self._build(facts)
        except UnknownError as error:
            needed = f"needs {' and '.join(error.args)}, which the checkpoint does not contain; {error.advice}"
            raise MismatchError(f"the rule {self.match!r} {needed}") from None

    def _build(self, facts: Facts) -> Pattern:
        if self.pattern == "unsettled":
            raise MismatchError(self.reason)
        if self.pattern in _PLAIN:
            return _PLAIN[self.pattern]()
        vocab = facts.values.get("vocab") if self.vocab else None
        if self.pattern == "shard-hy":
            return ShardHy(grid=tuple(self._evaluate(size, facts) for size in self.grid), vocab=vocab)
        if self.pattern == "shard-nc":
            return self._build_nc(facts, vocab)
        unit, dim = self._evaluate(self.unit, facts), 1 if self.dim is None else self.dim
        if self.pattern == "shard-v" or dim == 0:
            return ShardV(unit=unit, vocab=vocab)
        return ShardH(dim=dim, unit=unit, vocab=vocab)

    def _build_nc(self, facts: Facts, vocab: int | None) -> ShardNC:
        dim, blocks = self.dim or 0, self._evaluate(self.blocks, facts)
        total = facts.values.get(f"total{dim}", 0) // blocks
        sizes = [self._measure_part(part, facts) for part in self.parts]
        remaining = total - sum(size for size in sizes if size is not None)
        unknown = sizes.count(None)
        if unknown and (remaining < 0 or remaining % unknown):
            raise MismatchError(
                f"parts {list(self.parts)}: {remaining} of {total} places are left for {unknown} equal parts"
            )
        return ShardNC(
            parts=tuple(remaining // unknown if size is None else size for size in sizes),
            dim=dim,
            blocks=blocks,
            sized=any(part != 1 for part in self.parts),
            unit=self._evaluate(self.unit, facts),
            widths=self.widths,
            vocab=vocab,
        )

    def _measure_part(self, part: Size, facts: Facts) -> int | None:
        """Evaluate a part's size; None for ``rest``, and for ``a or rest`` without ``a``."""
        if part == "rest":
            return None
        is_optional = isinstance(part, str) and part.endswith(" or rest")
        try:
            return self._evaluate(str(part).removesuffix(" or rest") if is_optional else part, facts, least=0)
        except UnknownError:
            if is_optional:
                return None
            raise

    def _evaluate(self, size: Size, facts: Facts, least: int = 1) -> int:
        value = facts.evaluate(size)
        if not isinstance(value, int) or value < least:
            raise MismatchError(
                f"the rule {self.match!r}: {size!r} is {value!r}, a size is an integer from {least} on. Correct the "
                "rule, or the variables that it uses"
            )
        return value


_PLAIN: dict[str, type[Pattern]] = {"unique": Unique, "replicate": Replicate, "partial": Partial}


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern for the parameters whose names match.

    Attributes:
        text: the expression as the user or the checkpoint wrote it.
        match: matches whole names; its group ``stem`` is the prefix.
        pattern: the pattern, or the rule as data, which is evaluated for each parameter.
        rank: among rules with a pattern, those of the lowest rank count.
        vocab: dimension 0 is a padded vocabulary.
    """

    text: str
    match: Matcher
    pattern: Pattern | Spec
    rank: int = 0
    vocab: bool = False

    @property
    def is_plain(self) -> bool:
        """True if the rule is a pattern, or refuses every parameter."""
        return isinstance(self.pattern, Pattern) or (self.pattern.pattern == "unsettled" and self.pattern.when == 1)

    def make(self, match: re.Match[str], facts: Facts) -> Pattern | None:
        """Return the pattern of the matched parameter (see :meth:`Spec.make`)."""
        if isinstance(self.pattern, Pattern):
            return self.pattern
        return self.pattern.make(replace(facts, name=match.string, stem=match.groupdict().get("stem") or ""))


_ANY = re.compile(".*", re.DOTALL)


def name_rule(name: str, pattern: Pattern | Spec) -> Rule:
    """Make a rule for one parameter, for ``RuleSet.literal``."""
    return Rule(name, _ANY.fullmatch, pattern)


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules of one source.

    Attributes:
        name: source, for messages.
        rules: in any order; rules that match one parameter must agree.
        literal: parameter → rules for it alone (AutoTP has thousands).
        hints: parameter → reason why the set has no pattern for it, for the case that no other set has one.
        vocab: rows of the vocabulary without padding, or None if unknown.
        source: ``user``: has precedence over all others. ``target``: a live engine's description of its own shards at
            its own degree. Else ``checkpoint``.
        shared: expressions for parameters that the checkpoint declares equal on several pipeline stages.
        fallback: pattern of parameters (not buffers) without a rule.
        reported: report each rule that matches nothing; else only if no rule matches anything.
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
    source: str = "checkpoint"
    shared: tuple[Matcher, ...] = ()
    fallback: Pattern | None = None
    reported: bool = False

    def find(self, name: str, facts: Facts) -> Pattern | None:
        """Return the pattern of a parameter, or None without a rule.

        Raises:
            MismatchError: rules disagree, facts in a rule are unknown or contradictory, or the set refuses the
                parameter.
        """
        facts = replace(facts, variables=self.variables)
        matching = [(r, match) for r in (*self.literal.get(name, ()), *self.rules) if (match := r.match(name))]
        patterns: dict[Pattern, Rule] = {}
        for rank in sorted({rule.rank for rule, _ in matching}):
            for rule, match in matching:
                pattern = rule.make(match, facts) if rule.rank == rank else None
                if pattern is not None:
                    patterns.setdefault(pattern, rule)
            if patterns:
                break
        if len(patterns) > 1:
            texts = " and ".join(f"{rule.text!r} gives {pattern}" for pattern, rule in patterns.items())
            raise MismatchError(f"two rules of {self.name} disagree: {texts}")
        for pattern, rule in patterns.items():
            # A vocabulary's padding may differ with any pattern, except an affine map (rank 0), which is complete.
            if rule.rank and any(other.vocab for other, _ in matching):
                return replace(pattern, vocab=facts.values.get("vocab"))
            return pattern
        return None

    def follow(self, renamed: Mapping[str, str]) -> RuleSet:
        """Return the set with renamed parameters (this set's name → new name).

        Rules with expressions are left out, except refusals: expressions refer to other names of the set.
        """
        literal = dict(self.literal)
        for name, new in renamed.items():
            if name != new:
                rules = (*literal.pop(name, ()), *self.rules)
                matching = (rule for rule in rules if rule.is_plain and rule.match(name))
                literal[new] = tuple(replace(rule, match=_ANY.fullmatch) for rule in matching)
        return replace(self, literal=literal)

    def check(self, facts: Facts) -> None:
        """Raise MismatchError if facts of the checkpoint contradict the set (``refuse``)."""
        facts = replace(facts, variables=self.variables)
        for entry in self.refuse:
            if facts.is_true(entry["when"]):
                raise MismatchError(f"{self.name} contradicts the checkpoint ({entry['when']}): {entry['reason']}")

    def find_unused(self, names: Iterable[str]) -> list[str]:
        """Describe the rules that match none of the names."""
        names = list(names)
        idle = [rule.text for rule in self.rules if not any(rule.match(name) for name in names)]
        if self.reported:
            idle += [rule.text for name in sorted(set(self.literal) - set(names)) for rule in self.literal[name]]
            return [f"{self.name}: {text!r} matches no parameter" for text in idle]
        all_idle = self.rules and not self.literal and len(idle) == len(self.rules)
        return [f"{self.name}: no rule matches any parameter"] if all_idle else []


@dataclass(frozen=True)
class RuleFile:
    """Rules as written in a configuration or a YAML file."""

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
        if any(set(entry) != {"when", "reason"} for entry in self.refuse):
            raise ValueError("refuse is a list of objects with when and reason")


def _validate_file(value: object, name: str) -> RuleFile:
    from pydantic import TypeAdapter, ValidationError  # slow to import

    if isinstance(value, (list, tuple)):
        value = {"rules": value}
    if isinstance(value, Mapping):  # empty YAML entries are None
        value = {key: part for key, part in value.items() if part is not None}
    try:
        return TypeAdapter(RuleFile).validate_python(value)
    except ValidationError as error:
        keys, rule_keys, resize_keys = ([key.name for key in fields(kind)] for kind in (RuleFile, Spec, Resize))
        needed = (
            f"A family, a path, a list of rules or an object with some of {', '.join(keys)} is needed; a rule has "
            f"match, pattern and some of {', '.join(rule_keys)}."
        )
        text = describe_faults(error, [*keys, *rule_keys, *resize_keys], needed)
        if not isinstance(value, Mapping):
            text = f"{text} {needed}"
        raise ConfigError(f"patterns: {name}: {text}") from None


def _parse_set(value: object, name: str) -> tuple[RuleSet, ...]:
    """Parse rules as written; return their set, followed by their family's, if any."""
    file = _validate_file(value, name)
    variables = {key: size if isinstance(size, tuple) else (size,) for key, size in file.variables.items()}
    written = RuleSet(
        name=name,
        rules=tuple(_make_rule(spec, file.prefix) for spec in file.rules),
        variables=variables,
        refuse=file.refuse,
        vocab=file.original_vocab_size,
        renames=parse_renames(file.rename),
        resizes=tuple(
            replace(rule, match=f"(?:{file.prefix})(?:{rule.match})") if file.prefix else rule for rule in file.resize
        ),
        source="user",
        reported=True,
    )
    if file.family is None:
        return (written,)
    family = load_family(file.family)
    # The user's variables replace the family's.
    return written, replace(family, variables={**family.variables, **variables})


def list_renames(rules: Iterable[RuleSet]) -> list[Rename]:
    """List the ``rename`` rules of all sets in order, each with its set's variables."""
    return [replace(rename, variables=rule_set.variables) for rule_set in rules for rename in rule_set.renames]


def find_renamed(saved: Set[str], live: Set[str], rules: Iterable[RuleSet]) -> dict[str, str]:
    """Return live name → saved name of the saved parameters that rules rename."""
    renames = list_renames(rules)
    renamed = rename_names(sorted(saved - live), renames, live) if renames else {}
    return {new: old for old, new in renamed.items() if new in live}


def find_resize(rules: Iterable[RuleSet], name: str) -> Resize | None:
    """Return the first ``resize`` rule for a parameter, or None."""
    return next((resize for rule_set in rules for resize in rule_set.resizes if resize.matches(name)), None)


def from_config(value: object) -> tuple[RuleSet, ...]:
    """Parse ``checkpoint.universal.patterns``.

    Args:
        value: a family's name, the path of a YAML file, a list of rules, or an object with ``rules``, ``family``,
            ``original_vocab_size``, ``rename``, ``variables`` and ``prefix``. Its rules precede its family's.

    Raises:
        ConfigError: unknown family, key or pattern; the message suggests valid ones.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        if value.lower().endswith(_SUFFIXES):
            return _parse_set(read_rules(value), f"the rules in {value}")
        return (load_family(value),)
    return _parse_set(value, "the user's rules")


def list_families() -> list[str]:
    """List the families of the package."""
    names = [entry.name for entry in resources.files(__package__).joinpath("families").iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if re.fullmatch(r"[^_].*\.yaml", name))


def _read_packaged(name: str) -> Any:
    """Read a rule file of the package: a family's, or ``_arguments``."""
    return _parse_yaml(resources.files(__package__).joinpath("families", f"{name}.yaml").read_text("utf-8"), name)


def read_rules(path: str) -> Any:
    """Read a user's rule file; ConfigError if it is unreadable or not YAML."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"patterns: {path} cannot be read: {error}") from None
    return _parse_yaml(text, path)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"patterns: {where} is not YAML: {error}") from None


@lru_cache
def load_family(name: str) -> RuleSet:
    """Load a family of the package; ConfigError for an unknown name."""
    if name not in (known := list_families()):
        listed = f"Families: {', '.join(known)}; a rule file ends in {' or '.join(_SUFFIXES)}."
        raise ConfigError(f"patterns: there is no family {name!r}. {advise(name, known, listed)}")
    family, *bases = _parse_set(_read_packaged(name), f"family {name}")
    for base in bases:  # the family's own rules have precedence
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
    """Suggest the families whose renames yield most live names; empty if none does."""
    counts = {name: _count_renamed(load_family(name), saved, live) for name in list_families()}
    best = [name for name, count in counts.items() if count == max(counts.values()) > 0]
    listed = " or ".join(f'"{name}"' for name in best)
    return f' Rules for these names come with the plugin: "patterns": {listed} (docs/patterns.md).' if best else ""


def _count_renamed(family: RuleSet, saved: Collection[str], live: Collection[str]) -> int:
    renamed = set[str]()
    for rule in list_renames([family]):
        with suppress(ConfigError):  # the template needs a variable from the user
            renamed |= {rule.apply(name) or "" for name in saved} & {*live}
    return len(renamed)


@lru_cache
def from_arguments() -> RuleSet:
    """Load the rules that depend on the saved arguments of known training scripts."""
    (rules,) = _parse_set(_read_packaged("_arguments"), "the client's arguments")
    return replace(rules, reported=False, source="checkpoint")


def _make_rule(spec: Spec, prefix: str) -> Rule:
    compile_regex(spec.match)  # alone first, so that it cannot close the group below
    return Rule(spec.match, compile_regex(f"(?P<stem>{prefix})(?:{spec.match})").fullmatch, spec)


def from_attributes(attributes: Mapping[str, Mapping[str, Any]]) -> RuleSet:
    """Make rules from Megatron's attributes of live parameters (``partition_dim``, …).

    They settle a fused query/key/value only if they describe its parts (``partition_stride`` above 1, or
    ``partition_sizes``, the local sizes of unequal parts): per-rank [q; k; v] and interleaved heads have equal shapes.
    Megatron's ``partition_stride`` is 1 for a fused gate and up too; the second matrix decides.
    """
    literal: dict[str, tuple[Rule, ...]] = {}
    hints: dict[str, str] = {}
    for name, marks in attributes.items():
        pattern = _read_attributes(marks)
        if isinstance(pattern, ShardH) and FUSED_QKV.search(name):
            hints[name] = _AMBIGUOUS
        elif isinstance(pattern, ShardH) and _GATE_UP.search(name):
            hints[name] = _MAYBE_GATED
        elif isinstance(pattern, ShardH) and _joins_experts(name, pattern.dim):
            hints[name] = _MAYBE_EXPERTS
            literal[name] = (name_rule(name, Spec(match=name, pattern="shard-h", dim=pattern.dim, dims=3)),)
        elif pattern == ShardV() and (match := _FIRST.fullmatch(name)):
            hints[name] = _MAYBE_GATED
            second = f"sibling({_SECOND[match['first']]!r}, 1)"
            spec = Spec(match=name, pattern="shard-v", when=f"own(0) == {second}")
            literal[name] = (Rule(name, _FIRST.fullmatch, spec),)
        elif pattern is not None:
            literal[name] = (name_rule(name, pattern),)
    return RuleSet("the live parameters' attributes", literal=literal, hints=hints)


_GATE_UP = re.compile(r"(?<![a-z])(?:gate_?(?:and_?)?up|up_?gate|w13)(?![a-z0-9])", re.IGNORECASE)
"""Names of fused gate and up projections. [gate; up] per rank and blocks of the whole have the same shapes."""

_EXPERTS = re.compile(r"(?:^|\.)experts\.(?:mlp\.)?(?:weight1|w1|w3|v1|(?P<second>weight2|w2))(?:\.weight)?$")
"""Names of all experts' matrices in one parameter; with two dimensions each expert is cut separately."""


def _joins_experts(name: str, dim: int) -> bool:
    """Return True if a cut along ``dim`` may go through all experts of a parameter."""
    match = _EXPERTS.search(name)
    return match is not None and not (match["second"] and dim == 1)


_FIRST = re.compile(rf"(?P<stem>.*\.)(?P<first>{'|'.join(_SECOND)})\.(?:weight|bias)")


def _read_attributes(marks: Mapping[str, Any]) -> Pattern | None:
    parallel, dim = marks.get("tensor_model_parallel"), marks.get("partition_dim", -1)
    if parallel is None:
        return None
    if not parallel:
        return Replicate()
    if not isinstance(dim, int) or dim < 0:
        return None
    sizes, stride = marks.get("partition_sizes"), marks.get("partition_stride") or 1
    if sizes:
        return ShardNC(parts=tuple(int(size) for size in sizes), dim=dim)
    if stride > 1:
        return ShardNC(parts=(1,) * stride, dim=dim)
    return ShardV() if dim == 0 else ShardH(dim=dim)


def suggest_rule(name: str, source: Sequence[Shape], target: Sequence[Shape] | None) -> dict[str, Any]:
    """Suggest a rule by name and shapes; the user must complete texts in <…>."""
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
    """Return the only dimension along which both sides have the same sum, or None."""
    cut_dims = []
    for dim in range(min(len(shape) for side in sides for shape in side)):
        sums = {sum(shape[dim] for shape in side) for side in sides}
        rests = {shape[:dim] + shape[dim + 1 :] for side in sides for shape in side}
        if len(sums) == 1 == len(rests):
            cut_dims.append(dim)
    return cut_dims[0] if len(cut_dims) == 1 and len(sides) > 1 else None
