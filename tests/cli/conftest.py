"""Fixtures of several commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from deepspeed_ucp.cli.dispatch import main


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Return a function that runs a command with --json and returns its exit code and the parsed object."""

    def run(*argv: object) -> tuple[int, Any]:
        capsys.readouterr()
        code = main([*map(str, argv), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run
