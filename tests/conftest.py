"""What all tests share."""

from __future__ import annotations

import importlib

import pytest

PLUGIN = "deepspeed_ucp.testing.pytest_plugin"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine: launches real DeepSpeed engines on gloo")
    config.addinivalue_line("markers", "engine_smoke: the engine tests that also run on the oldest DeepSpeed")
    plugin = importlib.import_module(PLUGIN)
    if not config.pluginmanager.is_registered(plugin):  # the installed package brings it as an entry point
        config.pluginmanager.register(plugin, PLUGIN)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engine tests first and in one process, where they share worlds and source runs; the others beside them."""
    engines = [item for item in items if item.get_closest_marker("engine")]
    for item in engines:
        item.add_marker(pytest.mark.xdist_group("engines"))
    known = set(engines)
    items[:] = [*engines, *(item for item in items if item not in known)]
