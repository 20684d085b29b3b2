"""Regular expressions of rules: the user's by Python's engine, a checkpoint's own in linear time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, MismatchError

_SIMPLE = re.compile(r"[^*+?{}()|]*(?:[*+][^*+?{}()|]*)?")
"""Expressions that Python's engine matches in at most quadratic time: one repeat of one character, no alternatives."""


def compile_regex(expression: str) -> re.Pattern[str]:
    """A regular expression of a rule.

    Raises:
        ConfigError: it is not one.
    """
    try:
        return re.compile(expression)
    except re.error as error:
        raise ConfigError(f"patterns: {expression!r} is not a regular expression: {error}") from None


@dataclass(frozen=True, slots=True)
class PrefixRegex:
    """An expression that RE2 matches with the front of a name."""

    compiled: Any

    def fullmatch(self, name: str, /) -> re.Match[str] | None:
        """A match that begins with the name's first character."""
        return self.compiled.match(name.encode("utf-8", "replace").decode())  # type: ignore[no-any-return]


def compile_prefix(text: object) -> re.Pattern[str] | PrefixRegex:
    """Compile an expression of the checkpoint's. As in DeepSpeed's converter it need not reach to the end of a name.

    It comes from a file that anybody may have written, so it is matched in time linear in the name, by RE2. The simple
    ones that scripts write are left to Python's engine, which is several times faster for them.

    Raises:
        MismatchError: it is none, or one that cannot be matched in linear time.
    """
    if not isinstance(text, str):
        raise MismatchError(f"universal_checkpoint_info: {text!r:.80} is not a regular expression")
    try:
        return re.compile(f"(?:{text}).*") if _SIMPLE.fullmatch(text) else PrefixRegex(_compile(text))
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise MismatchError(
            f"universal_checkpoint_info: the expression {text!r:.80} cannot be matched in linear time ({error})"
        ) from None


def _compile(text: str) -> Any:
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as error:
        raise ValueError(error.args[0].decode() if error.args else "") from None
