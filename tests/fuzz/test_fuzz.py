"""Some cases of every kind, the same ones every time; `make fuzz` draws others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.kinds import KINDS
from tests.fuzz.worker import run_case

NUMBERS = 25


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reshard"])
def test_nothing_but_our_errors_comes_of_it(kind: str, tmp_path: Path) -> None:
    failures = [outcome for number in range(NUMBERS) if (outcome := run_case(kind, number, tmp_path)).error]
    assert not failures, "\n".join(f"{each.kind}:{each.number} {each.error}" for each in failures)
