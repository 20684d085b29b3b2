"""The driver of engines; each of its runs is trained and saved once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_ucp.testing import WorldPool
from tests.support.engines.driver import Engines


@pytest.fixture(scope="session")
def engines(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(ucp_worlds, tmp_path_factory.mktemp("engines"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
