"""What all tests share."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

PLUGIN = "deepspeed_ucp.testing.pytest_plugin"
ENGINES = Path(__file__).parent / "engine"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine: launches real DeepSpeed engines on gloo")
    config.addinivalue_line("markers", "engine_smoke: the engine tests that also run on the oldest DeepSpeed")
    plugin = importlib.import_module(PLUGIN)
    if not config.pluginmanager.is_registered(plugin):  # the installed package brings it as an entry point
        config.pluginmanager.register(plugin, PLUGIN)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engine tests first: they take longest, and the others fill what they leave of the cores."""
    items.sort(key=lambda item: ENGINES not in item.path.parents)
