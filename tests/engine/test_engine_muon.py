"""DeepSpeed's Muon under other stages, numbers of ranks and places of its momentum, and under the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.driver import Engines, Refusal, edit, list_rows
from tests.support.engines.muon import Kind

SOURCES = [
    Kind(4, 1),
    Kind(2, 2),
    Kind(1, 1, "fp32"),
    Kind(4, 3),
    Kind(2, 3, in_memory=True),
    Kind(2, 1, offload=True),
    Kind(2, 3, offload=True),
    Kind(4, 1, sums="fp32"),
    Kind(2, 0),
    Kind(2, 0, "fp32"),
]

TARGETS = [
    Kind(4, 1),
    Kind(1, 2),
    Kind(2, 2),
    Kind(4, 2, "fp32"),
    Kind(1, 3),
    Kind(2, 3),
    Kind(2, 3, in_memory=True),
    Kind(4, 2, offload=True),
    Kind(4, 3, offload=True, in_memory=True),
    Kind(2, 0),
    Kind(1, 0, "fp32"),
]

CHOSEN = {place: range(number % 3, len(SOURCES), 3) for number, place in enumerate((0, 3, 6, 5, 7, 9))}
"""One of each kind, from every third source."""


@pytest.mark.releases
@pytest.mark.parametrize(("target", "sources"), list_rows(TARGETS, SOURCES, CHOSEN))
def test_momentum_comes_back(
    target: Kind, sources: tuple[Kind, ...], engines: Engines, subtests: pytest.Subtests
) -> None:
    engines.go_on(target, sources, subtests)
    for source in sources:
        assert sum(state == "momentum_buffer" for _, state in engines.saved(source).states) == 5


def test_deepspeeds_own_load_loses_the_momentum_in_memory(engines: Engines) -> None:
    """In the same topology the plugin continues like the uninterrupted run (tested above)."""
    kind = Kind(2, 3, in_memory=True)
    saved = engines.saved(kind)
    assert engines.load_by_deepspeed(kind, saved.folder) != saved.losses


@pytest.mark.parametrize("kind", [Kind(4, 3), Kind(2, 1, offload=True), Kind(2, 3, offload=True)], ids=str)
def test_deepspeeds_own_load_is_right_at_the_same_topology(kind: Kind, engines: Engines) -> None:
    saved = engines.saved(kind)
    (outcome,) = engines.load(kind, saved.folder)
    outcome.check(kind, kind, saved, direct=False)


def add_to_momentum(folder: Path) -> None:
    """Change the momentum of a parameter that starts on rank 0."""

    def add(tree: Any) -> None:
        tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["momentum_buffer"][0] += 1

    edit(next(folder.rglob(f"*{BORDER}")), add)


BORDER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
REFUSED = {
    # DeepSpeed truncates the momentum like a padded partition, and loads rank 0's on every rank.
    "elastic": Refusal(
        Kind(2, 1, elastic=True),
        (Kind(2, 1, elastic=True), Kind(2, 3)),
        ("MismatchError", "momentum_buffer (shape"),
    ),
    # The files of both ranks have the whole momentum of a parameter on the border of two partitions.
    "momentum-that-differs-between-two-ranks": Refusal(
        Kind(2, 1),
        (Kind(1, 3),),
        ("CheckpointError", "square.weight (momentum_buffer)", BORDER),
        damage=add_to_momentum,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, engines: Engines, tmp_path: Path) -> None:
    REFUSED[name].check(engines, tmp_path)
