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


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engine tests first and in one process, where they share worlds and source runs; the others beside them."""
    engines = [item for item in items if item.get_closest_marker("engine") or ENGINES in item.path.parents]
    for item in engines:
        item.add_marker(pytest.mark.xdist_group("engines"))
    known = set(engines)
    items[:] = [*engines, *(item for item in items if item not in known)]
