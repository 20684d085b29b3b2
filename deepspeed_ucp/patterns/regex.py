"""Regular expressions of rules: the user's by Python's engine, a checkpoint's own in linear time."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import ConfigError, MismatchError

Matcher = Callable[[str], "re.Match[str] | None"]
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


def compile_prefix(text: object) -> Matcher:
    """Compile an expression of the checkpoint's. As in DeepSpeed's converter it need not reach to the end of a name.

    It comes from a file that anybody may have written, so it is matched in time linear in the name, by RE2. The simple
    ones that scripts write are left to Python's engine, which is several times faster for them.

    Raises:
        MismatchError: it is none, or one that cannot be matched in linear time.
    """
    if not isinstance(text, str):
        raise MismatchError(f"universal_checkpoint_info: {text!r:.80} is not a regular expression")
    try:
        return re.compile(text).match if _SIMPLE.fullmatch(text) else _compile_linear(text)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise MismatchError(
            f"universal_checkpoint_info: the expression {text!r:.80} cannot be matched in linear time ({error})"
        ) from None


def _compile_linear(text: str) -> Matcher:
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(text, options)
    except re2.error as error:
        raise ValueError(error.args[0].decode() if error.args else "") from None
    return lambda name: compiled.match(name.encode("utf-8", "replace").decode())
