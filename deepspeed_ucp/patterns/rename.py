"""Names that differ between two builds of one model: prefixes with and without a pipeline, ties, fused parameters.

A rule is a regular expression for the whole name as saved, and a template for the live name: ``{group}`` is what a
named group matched, ``{group - 3}`` and other integer arithmetic (+ - * // %) a number made of it and of the set's
variables.

    {"from": "(?P<layer>\\d+)\\.(?P<rest>(?:input_layernorm|mlp)\\..*)", "to": "encoder.layers.{layer-3}.{rest}"}
    {"from": "tied_modules\\.embed\\.(?P<rest>.*)", "to": "embedding.{rest}"}

A part of the saved parameter's rows feeds the live one, or the saved one is a part of it
(:mod:`deepspeed_ucp.plan.derive` carries these out):

    {"from": "(?P<x>.*)\\.fc1", "to": "{x}.up_proj", "part": "2/2"}                  the second half of the rows
    {"from": "(?P<x>.*)\\.up_proj", "to": "{x}.fc1", "into": "2/2"}                  the other way
    {"from": "(?P<x>.*)\\.qkv", "to": "{x}.q_proj", "part": {"number": 1, "parts": [4, 1, 1], "blocks": "groups"}}
                                                  in each of so many equal blocks the first of three parts

``e`` is the number of an expert:

    {"from": "(?P<x>.*)\\.experts\\.w1", "to": "{x}.experts.w1.{e}"}                one saved parameter feeds all
    {"from": "(?P<x>.*)\\.experts\\.w1\\.(?P<e>\\d+)", "to": "{x}.experts.w1"}       all feed one
    {"from": "(?P<x>.*)\\.experts\\.w1\\.{e % 4}", "to": "{x}.experts.w1.{e}"}       the new expert e is the saved e % 4
    {"from": "(?P<x>.*)\\.gate_up", "to": "{x}.w1.{e}", "part": "1/2"}             of two equal parts of each expert
    {"from": ".*\\.router\\.weight", "to": null}                                   nothing is taken over

Any other number is counted alike: of layers, say, of which the live model has more or fewer than were saved:

    {"from": "h\\.{n // 2}\\.(?P<x>.*)", "to": "h.{n}.{x}"}                         the new layer n is the saved n // 2
    {"from": "h\\.{[0, 1, 3][n]}\\.(?P<x>.*)", "to": "h.{n}.{x}"}                   the saved layer 2 is left out

A list under ``to`` is a rule for each of its templates, in this order.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..errors import ConfigError, MismatchError, shorten
from .facts import Facts, UnknownError
from .regex import compile_regex

EXPERT = "e"
"""The group, and the variable, that is an expert's number; rules with an expression in ``from`` choose their own."""

_FIELD = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"\{([^{}]*[A-Za-z_][^{}]*)\}")  # in a regular expression, where {2} and {1,3} repeat
_NAME = re.compile(r"[A-Za-z_]\w*")
_SAVED = "saved_expert_"
_PART = re.compile(r"([1-9]\d?)/([1-9]\d?)", re.ASCII)
_KEYS = {"from", "to"}
_PART_KEYS = {"number", "parts", "blocks"}
_PART_FORMS = '"1/2", the first of two equal ones, or {"number": 1, "parts": [2, 1, 1], "blocks": 4}'


@dataclass(frozen=True, slots=True)
class Rows:
    """Of a parameter's rows one part of each block; the blocks are equal and follow each other.

    Attributes:
        number: which part, from 0.
        parts: sizes of a block's parts as they relate to each other.
        blocks: how many.
    """

    number: int
    parts: tuple[int, ...]
    blocks: int

    @property
    def runs(self) -> int:
        """Equal runs of rows of which all parts of all blocks are made."""
        return self.blocks * sum(self.parts)

    @property
    def size(self) -> int:
        """Of its part, as the parts relate to each other."""
        return self.parts[self.number]


@dataclass(frozen=True)
class Part:
    """The same as a rule tells it: ``parts`` and ``blocks`` are numbers or expressions."""

    number: int = 0
    parts: tuple[int | str, ...] = (1,)
    blocks: int | str = 1

    @property
    def count(self) -> int:
        """Parts of a block."""
        return len(self.parts)

    @property
    def is_equal(self) -> bool:
        """Whether it is one of equal parts of one block, by the rule itself."""
        return self.blocks == 1 and all(size == 1 for size in self.parts)

    def measure(self, facts: Facts) -> Rows:
        """With numbers.

        Raises:
            UnknownError: nothing tells some of them; it has all.
            ConfigError: one is no positive integer.
        """
        numbers, unknown = dict[int | str, Any](), dict[str, None]()
        for size in (*self.parts, self.blocks):
            try:
                numbers[size] = facts.evaluate(size)
            except UnknownError as error:
                unknown[str(error)] = None
        if unknown:
            raise UnknownError(*unknown)
        if odd := [f"{size} is {number}" for size, number in numbers.items() if type(number) is not int or number < 1]:
            raise ConfigError(f"rename: parts and blocks are positive integers; {odd[0]}")
        return Rows(self.number, tuple(numbers[size] for size in self.parts), numbers[self.blocks])


WHOLE = Part()
"""All rows."""


@dataclass(frozen=True)
class Rename:
    """A saved name that matches ``pattern`` as a whole is live as ``template``.

    Attributes:
        pattern: regular expression; None where nothing saved feeds what ``template``, then one as well, matches.
        template: of the live name; None where what matches feeds nothing.
        part: which of the saved parameter's rows; where a parameter holds several experts, of each expert's, on
            whichever side it is.
        into: which of the live parameter's rows they are.
        variables: of the set, for expressions.
    """

    pattern: str | None
    template: str | None
    part: Part = WHOLE
    into: Part = WHOLE
    variables: Mapping[str, Sequence[int | str]] = field(default_factory=dict)

    @cached_property
    def source(self) -> str:
        """The expression by which the saved expert's number is made of the new one's; empty without one."""
        found = _NUMBER.search(self.pattern or "")
        return found[1] if found else ""

    @cached_property
    def number(self) -> str:
        """What the template calls the number of the new expert, or of whatever is counted."""
        names: list[str] = _NAME.findall(self.source) or [EXPERT]
        return next((name for name in names if f"{{{name}}}" in (self.template or "")), names[0])

    @property
    def counts_inside(self) -> bool:
        """Whether a saved parameter of its name without a number may hold all of them, one behind the other."""
        return bool(self.source) and self.number == EXPERT

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return compile_regex(_NUMBER.sub(rf"(?P<{_SAVED}>\\d+)", self.pattern or "", count=1))

    @cached_property
    def _uses(self) -> frozenset[str]:
        """Names that the template asks for."""
        return frozenset(name for field in _FIELD.findall(self.template or "") for name in _NAME.findall(field))

    @property
    def feeds_all(self) -> bool:
        """Whether one saved parameter may feed several experts: the template counts them."""
        return self.number in self._uses and self.number not in self._regex.groupindex

    @property
    def joins(self) -> bool:
        """Whether several experts' saved parameters feed one: the template does not tell them apart."""
        return self.template is not None and EXPERT in self._regex.groupindex and EXPERT not in self._uses

    @property
    def is_plain(self) -> bool:
        """Whether it says nothing but another name for a parameter."""
        return not (self.pattern is None or self.template is None or self.feeds_all or self.joins or self.cuts)

    @property
    def cuts(self) -> bool:
        """Whether it cuts rows out of a saved parameter, or makes it a part of a live one; experts aside."""
        return {self.part, self.into} != {WHOLE} and not (self.feeds_all or self.joins)

    def measure(self, facts: Facts) -> tuple[Rows, Rows]:
        """``part`` and ``into`` with numbers.

        Raises:
            MismatchError: nothing tells one of them.
            ConfigError: one is no positive integer.
        """
        facts = replace(facts, variables=self.variables)
        try:
            return self.part.measure(facts), self.into.measure(facts)
        except UnknownError as error:
            raise MismatchError(f"rename: {self.pattern!r} {error.need}") from None

    def check(self) -> None:
        """Whether it is a rule at all.

        Raises:
            ConfigError: it is not.
        """
        _ = self._regex if self.pattern is not None else compile_regex(self.template or "")
        if self.source and not self.feeds_all:
            raise ConfigError(f'rename: {self.pattern!r}: the new number {{{self.number}}} has to be in "to"')
        if self.cuts:
            if None in (self.pattern, self.template):
                raise ConfigError(f'rename: {self.pattern or self.template!r}: "part" and "into" need "from" and "to"')
        elif self.into != WHOLE or not self.part.is_equal:
            raise ConfigError(
                f'rename: {self.pattern!r}: of an expert "part" tells one of equal parts, such as "1/2", on either side'
            )

    def match(self, name: str) -> Mapping[str, str] | None:
        """What the named groups matched in a saved name; None where the rule does not match."""
        found = self._regex.fullmatch(name) if self.pattern is not None else None
        return found.groupdict() if found else None

    def match_live(self, name: str) -> bool:
        """Whether a rule without saved parameters is about a live name."""
        return self.pattern is None and compile_regex(self.template or "").fullmatch(name) is not None

    def apply(self, name: str) -> str | None:
        """The live name, or None where the rule does not match.

        Raises:
            ConfigError: the template asks for a group that is not there, or makes of one no number.
        """
        groups = self.match(name)
        return None if groups is None else self.fill(self.template or "", groups, name)

    def split(self, groups: Mapping[str, str], name: str) -> tuple[str, str]:
        """What is in front of the expert's number in a live name, and what behind it.

        Raises:
            ConfigError: the template does not say ``{e}`` once.
        """
        parts = (self.template or "").split(f"{{{self.number}}}")
        if len(parts) != 2:
            raise ConfigError(f"rename: {self.template!r}: {{{self.number}}} has to be in it, as it is and once")
        return self.fill(parts[0], groups, name), self.fill(parts[1], groups, name)

    def find_saved(self, groups: Mapping[str, str]) -> int:
        """The expert's number in a saved name, of a rule with ``source``."""
        return int(groups[_SAVED])

    def choose(self, expert: int) -> int:
        """The saved expert that feeds a new one, of a rule with ``source``.

        Raises:
            ConfigError: its expression makes no number.
        """
        return self._calculate(self.source, {self.number: str(expert)}, f"number {expert}")

    def fill(self, template: str, groups: Mapping[str, str], name: str) -> str:
        """A template with what the groups matched in ``name``."""

        def fill(field: re.Match[str]) -> str:
            if field[1] in groups and groups[field[1]] is not None:
                return groups[field[1]]
            return str(self._calculate(field[1], groups, name))

        return _FIELD.sub(fill, template)

    def _calculate(self, expression: str, groups: Mapping[str, str], name: str) -> int:
        numbers = {group: int(text) for group, text in groups.items() if text is not None and text.isdecimal()}
        try:
            found = Facts(values=numbers, variables=self.variables).evaluate(expression)
        except UnknownError as error:
            found = None
            if str(error) not in groups:
                raise ConfigError(
                    f"rename: {self.template!r} asks for {error}, {self.pattern!r} has no such group; {error.advice}"
                ) from None
        if type(found) is not int or found < 0:
            value = next((groups[each] for each in _NAME.findall(expression) if each in groups), found)
            raise ConfigError(
                f"rename: {{{expression}}} in {self.template!r} with {value!r}, from {name}: not a layer number"
            )
        return found


def parse_renames(value: object) -> tuple[Rename, ...]:
    """Rename rules of a configuration: a list of ``{"from": …, "to": …}``, or one object saved regex → template.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, dict) and not set(value) >= _KEYS:
        value = [{"from": saved, "to": live} for saved, live in value.items()]
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, (list, tuple)):
        raise ConfigError(f'rename: a list of {{"from": …, "to": …}} is needed, found {value!r}')
    return tuple(rule for item in items for rule in _parse(item))


def _parse(item: object) -> Iterator[Rename]:
    keys = {*_KEYS, "part", "into"}
    told = item if isinstance(item, dict) and _KEYS <= set(item) <= keys else {"to": []}
    templates = told["to"] if isinstance(told["to"], (list, tuple)) else [told["to"]]
    if not templates or told["from"] is None in templates:
        raise ConfigError(f'rename: {{"from": …, "to": …}} is needed, found {item!r}')
    part, into = (_parse_part(key, told.get(key, "1/1")) for key in ("part", "into"))
    for template in templates:
        saved, live = (None if each is None else str(each) for each in (told["from"], template))
        rule = Rename(saved, live, part, into)
        rule.check()
        yield rule


def _parse_part(key: str, value: Any) -> Part:
    if isinstance(value, Mapping) and set(value) <= _PART_KEYS:
        number, parts, blocks = value.get("number"), value.get("parts"), value.get("blocks", 1)
        sizes: list[Any] = [*parts, blocks] if isinstance(parts, (list, tuple)) else [None]
        if type(number) is int and 1 <= number < len(sizes) and all(type(size) in (int, str) for size in sizes):
            return Part(number - 1, tuple(sizes[:-1]), blocks)
    elif (short := _PART.fullmatch(str(value))) and int(short[1]) <= int(short[2]):
        return Part(int(short[1]) - 1, (1,) * int(short[2]))
    raise ConfigError(f'rename: "{key}" is such as {_PART_FORMS}; found {value!r}')


def rename_names(names: Iterable[str], rules: Sequence[Rename], live: Container[str] | None = None) -> dict[str, str]:
    """Saved name → live name, for all names; the first rule that matches counts, without one a name stays.

    Args:
        names: as saved.
        rules: tried in this order; those that say more than another name are passed over.
        live: where given, only a rule that makes one of these names counts.

    Raises:
        MismatchError: two names become one.
    """
    renamed, plain = {}, [rule for rule in rules if rule.is_plain]
    for name in names:
        candidates = (new for rule in plain if (new := rule.apply(name)) is not None)
        renamed[name] = next((new for new in candidates if live is None or new in live), name)
    owners: dict[str, list[str]] = {}
    for name, new in renamed.items():
        owners.setdefault(new, []).append(name)
    clashes = [f"{' and '.join(olds)} become {new}" for new, olds in owners.items() if len(olds) > 1]
    if clashes:
        raise MismatchError(f"rename: {shorten(clashes)}")
    return renamed


def find_idle(names: Iterable[str], rules: Sequence[Rename]) -> list[str]:
    """Rename rules that match none of the names, as text: a checkpoint may have the live names already."""
    names = list(names)
    idle = [rule for rule in rules if rule.pattern is not None and all(rule.match(n) is None for n in names)]
    return list(dict.fromkeys(f"rename: {rule.pattern!r} matches no parameter" for rule in idle))
