"""Read rule files: the package's families and users' YAML. No other module of this room reads files."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

from ..errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")


def list_families() -> list[str]:
    """List the families of the package."""
    folder = resources.files(__package__).joinpath("families")
    names = [entry.name for entry in folder.iterdir() if not entry.name.startswith("_")]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def read_packaged(name: str) -> Any:
    """Read rules of the package: a family's, or those for arguments of known training scripts (``_arguments``)."""
    return _parse(resources.files(__package__).joinpath("families", f"{name}.yaml").read_text("utf-8"), name)


def read_rules(path: str) -> Any:
    """Read a user's rule file; ConfigError if it is unreadable or not YAML."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"patterns: {path} cannot be read: {error}") from None
    return _parse(text, path)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"patterns: {where} is not YAML: {error}") from None
