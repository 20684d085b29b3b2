"""Hide secrets in configurations, logs and environments, by their keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .errors import hide_secrets

HIDDEN = "(hidden)"
"""Replacement for a secret."""

STORES = "storage_options"
"""Key of stores' options, in which any text may be a secret."""

_WORDS = (
    r"secret|passw|passphrase|pwd|credential|auth(?!or)|(?:api|access|account|private|ssh)[_-]?key"
    r"|connection[_-]?string|cookie|signature|webhook"
)
_NAME = re.compile(rf"{_WORDS}|^(?:key|sas|sig)$|token$|_(?:sas|key)$", re.IGNORECASE)
_OPEN = frozenset({"endpoint_url", "region_name", "account_name", "project", "protocol"})
_NAMED = re.compile(
    rf"""((?:[\w.-]*(?:{_WORDS})[\w-]*|[\w.-]*token|\b(?:key|sas|sig))"""
    r"""(?:\\?["']?\s*[:=]\s*|(?<=[\w])\s+(?=[^\s-]\S{11})))"""
    r"""(?:b?\\?"[^"\n]*"|b?\\?'[^'\n]*'|(?:(?:Bearer|Basic)\s+)?[^\s"',;&)}\]]+)""",
    re.IGNORECASE,
)
_FLAG = re.compile(rf"(--[\w-]*(?:{_WORDS}|token)[\w-]*\s+)[^\s-]\S*", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\b(?:hf|ghp|gho|glpat|sk|xox[abp])[-_][A-Za-z0-9_-]{16,}|\bBearer\s+\S+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)


def hide_values(value: Any, name: str = "") -> Any:
    """Return a value without secrets, judged by its key ``name``, its keys and text."""
    if _NAME.search(name) and value not in (None, True, False):
        return HIDDEN
    if isinstance(value, Mapping):
        shown = {key: hide_values(part, str(key)) for key, part in value.items()}
        return {key: _hide_option(key, part) for key, part in shown.items()} if name == STORES else shown
    if isinstance(value, (list, tuple)):
        return [hide_values(part) for part in value]
    return hide_text(value) if isinstance(value, str) else value


def _hide_option(key: str, value: Any) -> Any:
    """Hide the text of a store's option, unless its key names a location or account."""
    if isinstance(value, Mapping):
        return {name: _hide_option(name, part) for name, part in value.items()}
    return HIDDEN if isinstance(value, str) and key not in _OPEN else value


def hide_text(text: str) -> str:
    """Return a text with its parts that look like secrets replaced by ``HIDDEN``."""
    for pattern in (_FLAG, _NAMED):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return hide_secrets(_SHAPES.sub(HIDDEN, text))


def hide_at(path: str, value: Any) -> Any:
    """Hide a value of a configuration by its path (``….storage_options.secret``)."""
    above, _, name = path.rpartition(".")
    if isinstance(value, str) and STORES in above.split(".") and name not in _OPEN:
        return HIDDEN
    return hide_values(value, name)
