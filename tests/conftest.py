"""What all tests share."""

from __future__ import annotations

import importlib
import os

import pytest

PLUGIN = "deepspeed_ucp.testing.pytest_plugin"
EXHAUSTIVE = "exhaustive"


def pytest_configure(config: pytest.Config) -> None:
    if EXHAUSTIVE in config.option.markexpr:
        os.environ["UCP_EXHAUSTIVE"] = "1"  # how many cases are drawn is said where tests are imported
    plugin = importlib.import_module(PLUGIN)
    if not config.pluginmanager.is_registered(plugin):
        config.pluginmanager.register(plugin, PLUGIN)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Exhaustive tests only where they are asked for; tests with worlds first, all in one worker.

    They take longest, and their ranks are processes of their own: the other workers take what they leave of the cores,
    file by file.
    """
    left_out = [item for item in items if item.get_closest_marker(EXHAUSTIVE)]
    if left_out and EXHAUSTIVE not in config.option.markexpr:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        group = "worlds" if uses_worlds(item) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: not uses_worlds(item))


def uses_worlds(item: pytest.Item) -> bool:
    return "ucp_worlds" in getattr(item, "fixturenames", ())
