"""Rules for names that differ between two builds of a model, as with a pipeline.

A rule is a regular expression for the whole saved name, and a template for the live name. ``{group}`` is the text of a
named group; ``{group - 3}`` is integer arithmetic (+ - * // %) with it and the set's variables. A rule gives one saved
parameter one live name; it does not cut, join or copy (``docs/patterns.md`` has examples).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import ConfigError, MismatchError, shorten
from .facts import Facts, UnknownError, compile_regex

_FIELD = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"\{([^{}]*[A-Za-z_][^{}]*)\}")  # in a regular expression, where {2} and {1,3} repeat
_NAME = re.compile(r"[A-Za-z_]\w*")
_NEEDED = (
    '{"from": REGEX, "to": NAME} is needed: a rule gives one saved parameter one live name. It does not cut, join, '
    "copy or leave out"
)


@dataclass(frozen=True)
class Rename:
    """A saved name that ``pattern`` matches as a whole has the live name ``template``."""

    pattern: str
    template: str
    variables: Mapping[str, Sequence[int | str]] = field(default_factory=dict)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return compile_regex(self.pattern)

    def __post_init__(self) -> None:
        if number := _NUMBER.search(self.pattern):
            raise ConfigError(f"rename: {number[0]} in {self.pattern!r}: expressions are for templates. {_NEEDED}")
        _ = self._regex

    def match(self, name: str) -> Mapping[str, str] | None:
        match = self._regex.fullmatch(name)
        return match.groupdict() if match else None

    def apply(self, name: str) -> str | None:
        """Return the live name, or None if the rule does not match.

        Raises:
            ConfigError: the template names a group that does not exist, or an expression yields no number.
        """
        groups = self.match(name)
        if groups is None:
            return None

        def fill(field: re.Match[str]) -> str:
            if field[1] in groups and groups[field[1]] is not None:
                return groups[field[1]]
            return str(self._calculate(field[1], groups, name))

        return _FIELD.sub(fill, self.template)

    def _calculate(self, expression: str, groups: Mapping[str, str], name: str) -> int:
        numbers = {group: int(text) for group, text in groups.items() if text is not None and text.isdecimal()}
        try:
            result = Facts(values=numbers, variables=self.variables).evaluate(expression)
        except UnknownError as error:
            result = None
            if str(error) not in groups:
                raise ConfigError(
                    f"rename: {self.template!r} asks for {error}, {self.pattern!r} has no such group; {error.advice}"
                ) from None
        if type(result) is not int or result < 0:
            value = next((groups[group] for group in _NAME.findall(expression) if group in groups), result)
            raise ConfigError(
                f"rename: {{{expression}}} in {self.template!r} with {value!r}, from {name}: not a layer number"
            )
        return result


def parse_renames(value: object) -> tuple[Rename, ...]:
    """Parse rules: a list of ``{"from": …, "to": …}``, or an object regex → template.

    Raises:
        ConfigError: ``value`` is something else.
    """
    if isinstance(value, dict) and not set(value) >= {"from", "to"}:
        value = [{"from": saved, "to": live} for saved, live in value.items()]
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, (list, tuple)):
        raise ConfigError(f"rename: a list of rules is needed, found {value!r}. {_NEEDED}")
    return tuple(map(_parse, items))


def _parse(item: object) -> Rename:
    pair = item if isinstance(item, dict) and set(item) == {"from", "to"} else {}
    if not pair or not all(isinstance(text, (str, int)) for text in pair.values()):
        raise ConfigError(f"rename: {_NEEDED}; found {item!r}")
    return Rename(str(pair["from"]), str(pair["to"]))


def rename_names(names: Iterable[str], rules: Sequence[Rename], live: Container[str] | None = None) -> dict[str, str]:
    """Return saved name → live name by the first matching rule, or the same name.

    Args:
        live: if given, only a rule that yields one of these names counts.

    Raises:
        MismatchError: two names become one.
    """
    renamed = {}
    for name in names:
        candidates = (new for rule in rules if (new := rule.apply(name)) is not None)
        renamed[name] = next((new for new in candidates if live is None or new in live), name)
    owners: dict[str, list[str]] = {}
    for name, new in renamed.items():
        owners.setdefault(new, []).append(name)
    clashes = [f"{' and '.join(olds)} become {new}" for new, olds in owners.items() if len(olds) > 1]
    if clashes:
        raise MismatchError(f"rename: {shorten(clashes)}")
    return renamed


def find_idle(names: Iterable[str], rules: Sequence[Rename]) -> list[str]:
    """Describe rules that match no name; no error, as names may be the live ones."""
    names = list(names)
    idle = [rule for rule in rules if all(rule.match(n) is None for n in names)]
    return list(dict.fromkeys(f"rename: {rule.pattern!r} matches no parameter" for rule in idle))
