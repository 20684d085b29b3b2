"""Muon's momentum, and states and parameters on NVMe, with changed and unchanged stages, devices and ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.covering import params
from tests.support.engines import nvme
from tests.support.engines.driver import Engines, Outcome, Row, Saved, Source, choose
from tests.support.engines.nvme import LEAST, Kind
from tests.support.engines.ranks import Load, load_each

# --- NVMe

Adam, Muon = nvme.Kind, partial(nvme.Kind, muon=True, small=True)
OPTIMIZER, PIPELINED = Adam(3, 2, optimizer="nvme"), Adam(3, 1, optimizer="nvme", pipelined="read")
BOTH = Adam(3, 2, optimizer="nvme", params="nvme")
FROZEN = BOTH.but(world=1, frozen=True)
SOURCES = [
    OPTIMIZER,
    PIPELINED,
    BOTH,
    Adam(3, 1, optimizer="cpu", params="nvme"),
    Adam(3, 2),
    Adam(1, 2),
    Adam(3, 1, "fp32", optimizer="nvme"),
]
TARGETS = [
    OPTIMIZER,
    Adam(3, 1, optimizer="nvme", params="nvme", pipelined="both"),
    Adam(3, 1),
    Adam(1, 4),
    Adam(3, 4, optimizer="nvme"),
    Adam(3, 2, optimizer="cpu", params="nvme"),
    BOTH,
    Adam(3, 1, "fp32", optimizer="nvme"),
    Adam(3, 2, optimizer="cpu"),
]


def check_placeholder(_saved: Saved, outcome: Outcome) -> None:
    """Check that frozen parameters, of which DeepSpeed saves only a placeholder, are refused."""
    outcome.check_refused("other.weight", "placeholder")


def list_featured(feature: str) -> list[Row]:
    """List rows of a feature: Muon's momentum has separate swap files; ``zero.Init`` gives parameters other ids."""

    kinds = [each.but(**{feature: True}) for each in (BOTH, Adam(3, 1, optimizer="nvme"), Adam(3, 1))]

    def check_files(saved: Saved, _outcome: Outcome) -> None:
        for names in ([state for _, state in saved.state], [path.name for path in saved.folder.rglob("*.swp")]):
            assert any("momentum_buffer" in name for name in names) == (feature == "muon")

    return [
        Row(kind, kinds[:2], check=check_files, exhaustive=feature == "muon" or number > 0)
        for number, kind in enumerate(kinds)
    ]


ROWS = [
    *choose(TARGETS, SOURCES, {0: (1, 4, 0), 1: (0,), 3: (1,)}),
    Row(FROZEN, [Adam(1, 2, frozen=True), Source(FROZEN, check=check_placeholder)]),
    *list_featured("early"),
    *list_featured("muon"),
]

# --- Muon

MUON_SOURCES = [
    Muon(1, 4),
    Muon(1, 1, "fp32"),
    Muon(3, 4),
    Muon(3, 2, in_memory=True),
    Muon(1, 2, optimizer="cpu"),
    Muon(3, 2, optimizer="cpu"),
    Muon(1, 4, sums="fp32"),
    Muon(0, 2),
    Muon(0, 2, "fp32"),
]
MUON_TARGETS = [
    Muon(1, 4),
    Muon(2, 1),
    Muon(2, 2),
    Muon(2, 2, "fp32"),
    Muon(3, 2),
    Muon(3, 2, in_memory=True),
    Muon(2, 4, optimizer="cpu"),
    Muon(3, 4, optimizer="cpu", in_memory=True),
    Muon(0, 2),
    Muon(0, 1, "fp32"),
]
MUON_CHOSEN = {3: (3, 6), 5: (2,), 7: (7,), 8: (5,)}
"""One engine of each wrapper and device of the momentum."""
OWN = [Muon(3, 4), Muon(1, 2, optimizer="cpu"), Muon(3, 2, "fp32"), Muon(3, 2, optimizer="cpu")]
"""Unchanged topologies. In bf16 DeepSpeed's load would cast ZeRO 3's momentum to the dtype of the masters."""


def check_momentum(saved: Saved, _outcome: Outcome) -> None:
    assert sum(state == "momentum_buffer" for _, state in saved.state) == 6


ROWS += choose(MUON_TARGETS, MUON_SOURCES, MUON_CHOSEN, "muon", check=check_momentum)
ROWS += [Row(kind, [kind], "muon-own", exhaustive=kind == OWN[3]) for kind in OWN]


@pytest.mark.releases
@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_states_on_nvme_and_muons_momentum_are_restored(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)


@pytest.mark.parametrize("kind", params([BOTH], [PIPELINED], str))
def test_a_save_after_a_resume_contains_the_swapped_states(kind: Kind, engines: Engines, tmp_path: Path) -> None:
    """They are only in swap files, as after a step, and separate from another engine's."""
    saved = engines.saved(Adam(3, 2))
    for each in (kind.but(world=3 - kind.world), kind):
        training = each.training(78, str(tmp_path / "shared"))
        loads = [Load(str(saved.folder), again=str(tmp_path / str(each)))]
        engines.get(each).run(load_each, training, loads, read=id)
    again = tmp_path / str(kind)
    for path in again.rglob("*optim_states.pt"):
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        held = state["optimizer_state_dict"]["state"].values()
        tensors = [*state["fp32_flat_groups"], *(each["exp_avg"] for each in held)]
        assert 4 * max(tensor.numel() for tensor in tensors) < LEAST
    assert len(list(again.rglob("rank00/*.swp"))) >= 3 * 3
    (outcome,) = engines.load(Adam(3, 1), again)
    outcome.check(saved)
