"""What all recipes are compared with."""

from __future__ import annotations

import pytest

from tests.platforms.jobs import Steps, run_reference


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """The losses of the run that nothing happens to."""
    return run_reference(tmp_path_factory.mktemp("reference"))
