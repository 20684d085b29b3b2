"""DeepSpeed's Muon with changed and unchanged stages, numbers of ranks and devices of its momentum."""

from __future__ import annotations

import pytest

from tests.support.engines.driver import Engines, Outcome, Row, Saved, choose
from tests.support.engines.muon import Kind

SOURCES = [
    Kind(1, 4),
    Kind(2, 2),
    Kind(1, 1, "fp32"),
    Kind(3, 4),
    Kind(3, 2, in_memory=True),
    Kind(1, 2, offload=True),
    Kind(3, 2, offload=True),
    Kind(1, 4, sums="fp32"),
    Kind(0, 2),
    Kind(0, 2, "fp32"),
]
TARGETS = [
    Kind(1, 4),
    Kind(2, 1),
    Kind(2, 2),
    Kind(2, 2, "fp32"),
    Kind(3, 1),
    Kind(3, 2),
    Kind(3, 2, in_memory=True),
    Kind(2, 4, offload=True),
    Kind(3, 4, offload=True, in_memory=True),
    Kind(0, 2),
    Kind(0, 1, "fp32"),
]
CHOSEN = {3: (4, 7), 6: (3,), 8: (8,), 9: (6,)}
"""One engine of each wrapper and device of the momentum."""
OWN = [Kind(3, 4), Kind(1, 2, offload=True), Kind(3, 2, "fp32"), Kind(3, 2, offload=True)]
"""Unchanged topologies. In bf16 DeepSpeed's load would cast ZeRO 3's momentum to the dtype of the masters."""


def check_momentum(saved: Saved, _outcome: Outcome) -> None:
    assert sum(state == "momentum_buffer" for _, state in saved.state) == 5


ROWS = choose(TARGETS, SOURCES, CHOSEN, check=check_momentum)
ROWS += [Row(kind, [kind], "own", exhaustive=kind == OWN[3]) for kind in OWN]


@pytest.mark.releases
@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_muons_momentum_is_restored(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)


def test_deepspeeds_load_loses_muons_momentum_in_memory(engines: Engines) -> None:
    """In the same topology the plugin restores it (tested above)."""
    kind = Kind(3, 2, in_memory=True)
    (alone,) = engines.load(kind, engines.saved(kind), plugin=False)
    assert alone.losses != engines.saved(kind).losses
