"""The checkpoint that the tests of conversions read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.convert.conversions import write_source


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    write_source(root)
    return root
