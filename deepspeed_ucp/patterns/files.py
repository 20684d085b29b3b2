"""Rule files: the families in the package and the user's own YAML. The one place of this room that reads files."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

from ..errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")


def list_families() -> list[str]:
    """Names of the families in the package."""
    folder = resources.files(__package__).joinpath("families")
    names = [entry.name for entry in folder.iterdir() if not entry.name.startswith("_")]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def read_packaged(name: str) -> Any:
    """Rules of the package as data: a family's, or those for the arguments of known clients (``_arguments``)."""
    return _parse(resources.files(__package__).joinpath("families", f"{name}.yaml").read_text("utf-8"), name)


def read_rules(path: str) -> Any:
    """A user's rule file as data.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
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
