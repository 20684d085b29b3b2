"""What must not be shown of configurations, logs and environments: values of keys that look like secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .errors import hide_secrets

HIDDEN = "(hidden)"
"""Stands for a secret."""

STORES = "storage_options"
"""Options of stores: whatever a store's library calls a secret, it is text in there."""

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
    """A configuration with what looks like a secret hidden, and URLs without what is secret in them.

    Args:
        value: mappings, lists and plain values.
        name: the key that it stands under.
    """
    if _NAME.search(name) and value not in (None, True, False):
        return HIDDEN
    if isinstance(value, Mapping):
        shown = {key: hide_values(each, str(key)) for key, each in value.items()}
        return _close(shown) if name == STORES else shown
    if isinstance(value, (list, tuple)):
        return [hide_values(each) for each in value]
    return hide_text(value) if isinstance(value, str) else value


def _close(value: Mapping[str, Any]) -> dict[str, Any]:
    """Options of stores: no text but where the store is."""

    def close(key: str, each: Any) -> Any:
        if isinstance(each, Mapping):
            return _close(each)
        return HIDDEN if isinstance(each, str) and key not in _OPEN else each

    return {key: close(key, each) for key, each in value.items()}


def hide_text(text: str) -> str:
    """Lines of a log, or a value, with what looks like a secret hidden."""
    for pattern in (_FLAG, _NAMED):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return hide_secrets(_SHAPES.sub(HIDDEN, text))


def hide_at(path: str, value: Any) -> Any:
    """A value of a configuration that is told by its path (``checkpoint.universal.storage_options.secret``)."""
    above, _, name = path.rpartition(".")
    if isinstance(value, str) and STORES in above.split(".") and name not in _OPEN:
        return HIDDEN
    return hide_values(value, name)
