"""Some fixed cases of every kind; `make fuzz` draws others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import run_case
from tests.fuzz.kinds import KINDS
from tests.support.covering import few

NUMBERS = 25
MORE = {"manifest": 4 * NUMBERS, "values": 4 * NUMBERS}
"""Cases that change one of many values; a quarter of them except under `-m exhaustive`."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reshard"])
def test_fuzzed_checkpoints_raise_only_errors_of_the_package(kind: str, tmp_path: Path) -> None:
    numbers = few(range(MORE.get(kind, NUMBERS)), NUMBERS)
    failures = [outcome for number in numbers if (outcome := run_case(kind, number, tmp_path)).error]
    assert not failures, "\n".join(f"{each.kind}:{each.number} {each.error}" for each in failures)
