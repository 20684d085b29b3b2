"""Errors and how they are told."""

from __future__ import annotations

import pytest

import deepspeed_ucp
from deepspeed_ucp import errors
from deepspeed_ucp.errors import shorten


@pytest.mark.parametrize("name", ["CheckpointError", "ConfigError", "MismatchError", "UnsupportedError"])
def test_every_error_is_public_and_a_runtime_error(name: str) -> None:
    kind = getattr(errors, name)
    assert getattr(deepspeed_ucp, name) is kind
    assert issubclass(kind, errors.UcpError)
    assert issubclass(kind, RuntimeError)


def test_long_lists_are_shortened() -> None:
    assert shorten(["a", "b"]) == "a, b"
    assert shorten(range(5), 2) == "0, 1, … (5 in all)"
    assert shorten(range(2), 2) == "0, 1"
    assert shorten([]) == ""
