"""Regular expressions of rules: users' by Python's engine, those in checkpoints in linear time."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import ConfigError, MismatchError

Matcher = Callable[[str], "re.Match[str] | None"]
_SIMPLE = re.compile(r"[^*+?{}()|]*(?:[*+][^*+?{}()|]*)?")
"""Expressions that Python's engine matches in at most quadratic time: one repeat of one character, no alternatives."""


def compile_regex(expression: str) -> re.Pattern[str]:
    """Compile a regular expression of a user's rule; ConfigError if it is invalid."""
    try:
        return re.compile(expression)
    except re.error as error:
        raise ConfigError(f"patterns: {expression!r} is not a regular expression: {error}") from None


def compile_prefix(text: object) -> Matcher:
    """Compile an expression in a checkpoint, which matches a prefix of a name as in DeepSpeed's converter.

    The file may be malicious, so RE2 matches the expression in linear time. Python's engine matches the simple
    expressions that scripts write, for which it is several times faster.

    Raises:
        MismatchError: the expression is invalid, or cannot be matched in linear time.
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
