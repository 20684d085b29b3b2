"""Compare ds_configs of saves or files, and hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ConfigError
from ..io.interface import explain_failure
from ..io.store import read_small
from ..model.index import AtomicIndex
from .values import ABSENT, ValueDifference, describe_value, differ_in_keys, is_same, join_alike

AUTO = "auto"
"""Value that a trainer replaces; a save has the replaced value."""

_MOST = 16 << 20
"""Maximum bytes of a ds_config's file."""


def read_config(path: str) -> dict[str, Any]:
    """Read a ds_config from a file, which may have comments."""
    import hjson

    try:
        config = hjson.loads(read_small(path, _MOST).decode(), object_pairs_hook=dict)
    except OSError as error:
        raise explain_failure(path, "read", error) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no ds_config in JSON ({str(error).partition(chr(10))[0]}).") from None
    if not isinstance(config, dict):
        raise ConfigError(f'{path}: is no ds_config: an object is wanted, such as {{"train_batch_size": 8}}.')
    return config


def compare_configs(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[list[ValueDifference], list[str]]:
    """Compare two ds_configs key by key; return differences, and notes on \"auto\"."""
    differences, notes = [], []
    for path, *values in differ_in_keys(dict(_flatten(left)), dict(_flatten(right))):
        a, b = (describe_value(path, value) for value in values)
        if AUTO in values:
            notes.append(f"ds_config {path}: {a}, {b}; a trainer replaces {AUTO}")
        else:
            differences.append(ValueDifference("ds_config", path, a, b))
    return differences, notes


def _flatten(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        path = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, path)
        else:
            yield path, value


def compare_hyper(index: AtomicIndex, config: Mapping[str, Any], *, is_left: bool) -> list[ValueDifference]:
    """Compare hyper-parameters of a save (A if ``is_left``) and of a ds_config."""
    optimizer = config.get("optimizer")
    given = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    params = given if isinstance(given, Mapping) else {}
    differences = []
    for group in index.groups:
        saved = {**group.hyper, "lr": group.hyper.get("initial_lr", group.hyper.get("lr", ABSENT))}
        for key in [key for key in params if key in group.hyper and params[key] != AUTO]:
            if not is_same(saved[key], params[key]):
                pair = (saved[key], params[key]) if is_left else (params[key], saved[key])
                differences.append(ValueDifference("hyper-parameter", key, *pair, tuple(group.names)))
    return join_alike(differences)
