"""Names that differ between two builds of one model: layer prefixes with and without a pipeline, ties.

A rule is a regular expression for the whole name as saved, and a template for the live name: ``{group}`` is what a
named group matched, ``{group+3}`` and ``{group-3}`` shift a layer number.

    {"from": "(?P<layer>\\d+)\\.(?P<rest>(?:input_layernorm|mlp)\\..*)", "to": "encoder.layers.{layer-3}.{rest}"}
    {"from": "tied_modules\\.embed\\.(?P<rest>.*)", "to": "embedding.{rest}"}
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from ..errors import ConfigError, MismatchError, shorten
from .regex import compile_regex

_FIELD = re.compile(r"\{(?P<group>[A-Za-z_]\w*)(?P<shift>[+-]\d+)?\}")


@dataclass(frozen=True, slots=True)
class Rename:
    """A saved name that matches ``pattern`` as a whole is live as ``template``."""

    pattern: str
    template: str

    def apply(self, name: str) -> str | None:
        """The live name, or None where the rule does not match.

        Raises:
            ConfigError: the template asks for a group that is not there, or shifts one that is not a number.
        """
        found = compile_regex(self.pattern).fullmatch(name)
        if found is None:
            return None
        groups = found.groupdict()

        def fill(part: re.Match[str]) -> str:
            value = groups.get(part["group"])
            if value is None:
                raise ConfigError(
                    f"rename: {self.template!r} asks for {part['group']}, {self.pattern!r} has no such group"
                )
            if part["shift"] is None:
                return value
            if not value.isdecimal() or int(value) + int(part["shift"]) < 0:
                raise ConfigError(
                    f"rename: {part[0]} in {self.template!r} with {value!r}, from {name}: not a layer number"
                )
            return str(int(value) + int(part["shift"]))

        return _FIELD.sub(fill, self.template)


def parse_renames(value: object) -> tuple[Rename, ...]:
    """Rename rules of a configuration: a list of ``{"from": …, "to": …}``, or one object saved regex → template.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, dict) and set(value) != {"from", "to"}:
        value = [{"from": saved, "to": live} for saved, live in value.items()]
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, (list, tuple)):
        raise ConfigError(f'rename: a list of {{"from": …, "to": …}} is needed, found {value!r}')
    rules = []
    for item in items:
        if not isinstance(item, dict) or set(item) != {"from", "to"}:
            raise ConfigError(f'rename: {{"from": …, "to": …}} is needed, found {item!r}')
        compile_regex(str(item["from"]))
        rules.append(Rename(str(item["from"]), str(item["to"])))
    return tuple(rules)


def rename_names(names: Iterable[str], rules: Sequence[Rename], live: Container[str] | None = None) -> dict[str, str]:
    """Saved name → live name, for all names; the first rule that matches counts, without one a name stays.

    Args:
        names: as saved.
        rules: tried in this order.
        live: where given, only a rule that makes one of these names counts.

    Raises:
        MismatchError: two names become one.
    """
    renamed = {}
    for name in names:
        candidates = (new for rule in rules if (new := rule.apply(name)) is not None)
        renamed[name] = next((new for new in candidates if live is None or new in live), name)
    _check_distinct(renamed)
    return renamed


def find_idle(names: Iterable[str], rules: Sequence[Rename]) -> list[str]:
    """Rename rules that match none of the names, as text: a checkpoint may have the live names already."""
    names = list(names)
    idle = [rule for rule in rules if not any(compile_regex(rule.pattern).fullmatch(name) for name in names)]
    return [f"rename: {rule.pattern!r} matches no parameter" for rule in idle]


def _check_distinct(renamed: dict[str, str]) -> None:
    owners: dict[str, list[str]] = {}
    for name, new in renamed.items():
        owners.setdefault(new, []).append(name)
    clashes = [f"{' and '.join(olds)} become {new}" for new, olds in owners.items() if len(olds) > 1]
    if clashes:
        raise MismatchError(f"rename: {shorten(clashes)}")
