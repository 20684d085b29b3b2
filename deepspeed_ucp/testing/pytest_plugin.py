"""Pytest fixtures: `pytest_plugins = ["deepspeed_ucp.testing.pytest_plugin"]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from deepspeed_ucp.testing.resume import ResumeReport, assert_resume_equivalent
from deepspeed_ucp.testing.world import WorldPool


@pytest.fixture(scope="session")
def ucp_worlds() -> Iterator[WorldPool]:
    """A `WorldPool` that the whole session shares: `ucp_worlds.get(4).run(fn, ...)`."""
    with WorldPool() as worlds:
        yield worlds


@pytest.fixture
def resume_equivalence(ucp_worlds: WorldPool, tmp_path: Path) -> Callable[..., ResumeReport]:
    """`assert_resume_equivalent` with the session's worlds and a temporary folder."""
    return partial(assert_resume_equivalent, worlds=ucp_worlds, directory=tmp_path / "checkpoint")
