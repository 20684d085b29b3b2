"""What tests of several commands need."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from deepspeed_ucp.cli.dispatch import main


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Runs a command with --json: its exit code, and the object that it prints."""

    def run(*argv: object) -> tuple[int, Any]:
        capsys.readouterr()
        code = main([*map(str, argv), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run
