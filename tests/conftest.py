"""What all tests share."""

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
"""Mark of tests that ``make test-all`` runs and ``make test`` does not: rows of a family beyond a selection in which
every value of each factor occurs, signaled and restarted jobs under real launchers, and results that depend on a clock.
Sweeps and drawn cases are shortened by `tests.support.covering.stride`."""
APART = (
    "tests/examples/",
    "tests/trainers/",
    "tests/synth/test_against_deepspeed.py",
    *(f"tests/engine/test_engine_{name}.py" for name in ("launch", "muon", "nvme", "saves", "saves_pairs", "testing")),
    "tests/saves/test_processes.py",
    "tests/test_comm.py",
    "tests/test_meeting.py",
)
WORLDS = {**dict.fromkeys(APART, "worlds apart"), "tests/engine/": "worlds"}
"""Where tests with worlds, or with other processes of a fork server, are, and in which of two groups: they take
longest. The first group shares what its sources have saved; the second shares nothing with it."""
PATIENT = ("tests/platforms/", "tests/saves/")
"""Where tests wait for processes most of the time: they come next, beside what needs the processors."""


def pytest_configure(config: pytest.Config) -> None:
    for platform in PLATFORMS:  # in a container or a job as anywhere else
        os.environ.pop(platform.variable, None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as cores are at work already
    # Cases are drawn alike each time, and may take as long as they do: new ones are for `make fuzz` and UCP_EXAMPLES.
    fresh, slow = "UCP_EXAMPLES" in os.environ, [HealthCheck.too_slow]
    PRELOAD.append("tests.releases.settled")
    PRELOAD.append("transformers.models.llama.modeling_llama")  # a second in each rank that trains one
    if EXHAUSTIVE in config.option.markexpr:
        os.environ["UCP_EXHAUSTIVE"] = "1"  # how many cases are drawn is said where tests are imported
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
    """What is imported stays: a garbage collector that looks meanwhile takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Exhaustive tests only where they are asked for; tests with worlds first, then those that wait."""
    left_out = [item for item in items if item.get_closest_marker(EXHAUSTIVE)]
    if left_out and EXHAUSTIVE not in config.option.markexpr:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if reason := find_reason(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=reason))
    stray = [item.nodeid for item in items if uses_worlds(item) and not find_worlds(item.nodeid)]
    if stray:
        raise pytest.UsageError(f"tests with worlds are where tests/conftest.py's WORLDS says: {stray[0]}")
    order = ["worlds", "worlds apart", None]
    items.sort(key=lambda item: (order.index(find_worlds(item.nodeid)), not item.nodeid.startswith(PATIENT)))


def pytest_collection_finish() -> None:
    """The collected tests and all modules live to the end: the garbage collector need not walk them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def uses_worlds(item: pytest.Item) -> bool:
    return "ucp_worlds" in getattr(item, "fixturenames", ())


def find_worlds(nodeid: str) -> str | None:
    """The group of a test with worlds."""
    return next((group for place, group in WORLDS.items() if nodeid.startswith(place)), None)


def find_group(nodeid: str) -> str:
    """Tests of one group run in one worker, one after the other: those with worlds, others file by file."""
    return find_worlds(nodeid) or nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadgroup` by `find_group`.

    xdist 3.8 has its own marks written into the tests' names, where pytest 9.2 no longer looks: each test went to
    whichever worker was free, and each source was trained in all of them.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return find_group(nodeid)

    return ByGroup(config, log)
