"""The reference run of all recipes."""

from __future__ import annotations

import pytest

from tests.platforms.jobs import Steps, run_reference


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """The steps of an uninterrupted run."""
    return run_reference(tmp_path_factory.mktemp("reference"))
