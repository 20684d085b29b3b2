"""The distribution of tests to pytest's workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_xdist_make_scheduler

TESTS = [
    "tests/engine/test_a.py::test_x[1]",
    "tests/engine/test_a.py::test_x[2]",
    "tests/engine/test_b.py::test_y",
    "tests/engine/test_engine_nvme.py::test_z",
    "tests/synth/test_against_deepspeed.py::test_z",
    "tests/io/test_c.py::test_x[@]",
    "tests/io/test_c.py::test_y",
    "tests/io/test_c.py::test_z",
    "tests/io/test_d.py::test_x",
]


class Worker:
    """Records its tests."""

    def __init__(self, name: str):
        self.gateway, self.tests, self.shutting_down = SimpleNamespace(id=name), list[int](), False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.tests += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_worlds_live_in_two_groups(pytestconfig: pytest.Config) -> None:
    options = {"dist": "loadgroup", "numprocesses": 2, "tx": ["2*popen"], "loadscopereorder": False}
    config: Any = SimpleNamespace(getvalue=options.get, option=SimpleNamespace(**options))
    scheduler = pytest_xdist_make_scheduler(config, None)
    workers = [Worker("gw0"), Worker("gw1")]
    for worker in workers:
        scheduler.add_node(worker)
    for worker in workers:
        scheduler.add_node_collection(worker, TESTS)
    scheduler.schedule()
    assert workers[0].tests[:3] == [0, 1, 2]
    assert workers[1].tests[:2] == [3, 4]
