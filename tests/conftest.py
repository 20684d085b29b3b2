"""Configure pytest: the selection of `make test`, the order of tests, and their groups for xdist."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from deepspeed_ucp.platforms import PLATFORMS
from deepspeed_ucp.testing.world import PRELOAD
from tests.releases import find_reason
from tests.support.covering import is_exhaustive

PLUGIN = "deepspeed_ucp.testing.pytest_plugin"
EXHAUSTIVE = "exhaustive"
"""Mark of the tests that only ``make test-all`` runs: further rows of tables, restarted jobs, tests with a clock."""
APART = (
    "tests/examples/",
    "tests/trainers/",
    "tests/synth/test_against_deepspeed.py",
    *(f"tests/engine/test_engine_{name}.py" for name in ("carry", "launch", "nvme", "saves", "testing")),
    "tests/saves/test_processes.py",
    "tests/test_comm.py",
    "tests/test_meeting.py",
)
WORLDS = {**dict.fromkeys(APART, "worlds apart"), "tests/engine/": "worlds"}
"""Prefix of test ids → group. Tests with worlds and others that use a fork server take longest, so each group runs in
one worker. Tests of the group "worlds" share saved checkpoints."""
PATIENT = ("tests/platforms/", "tests/saves/")
"""Prefixes of tests that mostly wait for processes: they run early, in parallel to tests that need the processors."""


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment, the profile of drawn cases, and the modules that ranks preload."""
    for platform in PLATFORMS:  # results are equal inside a container or a job
        os.environ.pop(platform.variable, None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each core already has a process
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")  # else each process reads the metadata of all packages
    # Draw the same cases in every run, without a deadline; `make fuzz` and UCP_EXAMPLES draw new ones.
    fresh, slow = "UCP_EXAMPLES" in os.environ, [HealthCheck.too_slow]
    PRELOAD.extend(["tests.releases.settled", "tests.support.engines.driver"])
    PRELOAD.append("transformers.models.llama.modeling_llama")  # saves a second in each rank that trains a Llama
    if EXHAUSTIVE in config.option.markexpr:
        os.environ["UCP_EXHAUSTIVE"] = "1"  # read when tests are imported
    else:
        PRELOAD.append("tests.support.operators")
    count = 100 if is_exhaustive() else 20
    settings.register_profile(
        "suite", deadline=None, derandomize=not fresh, suppress_health_check=slow, max_examples=count
    )
    settings.load_profile("suite")
    plugin = importlib.import_module(PLUGIN)
    if not config.pluginmanager.is_registered(plugin):
        config.pluginmanager.register(plugin, PLUGIN)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, which would take a fifth of the time and free almost no memory."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect exhaustive tests unless requested; sort tests with worlds first, then tests that wait."""
    left_out = [item for item in items if item.get_closest_marker(EXHAUSTIVE)]
    if left_out and EXHAUSTIVE not in config.option.markexpr:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker(EXHAUSTIVE)]
    for item in items:
        if reason := find_reason(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=reason))
    with_worlds = [item.nodeid for item in items if "ucp_worlds" in getattr(item, "fixturenames", ())]
    stray = [nodeid for nodeid in with_worlds if not find_worlds(nodeid)]
    if stray:
        raise pytest.UsageError(f"WORLDS in tests/conftest.py has no group for a test with worlds: {stray[0]}")
    order = ["worlds", "worlds apart", None]
    items.sort(key=lambda item: (order.index(find_worlds(item.nodeid)), not item.nodeid.startswith(PATIENT)))


def pytest_collection_finish() -> None:
    """Exclude the collected tests and all modules from garbage collection, because they live until the end."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def find_worlds(nodeid: str) -> str | None:
    return next((group for place, group in WORLDS.items() if nodeid.startswith(place)), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Group tests by WORLDS, otherwise by their files, for `--dist loadgroup`.

    xdist 3.8 writes its groups into the names of tests, which pytest 9.2 does not parse. Without groups every worker
    would train every source.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return find_worlds(nodeid) or nodeid.partition("::")[0]  # the file

    return ByGroup(config, log)
