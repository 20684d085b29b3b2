"""Optimizer states and parameters on NVMe, with changed and unchanged stages, devices and ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.covering import params
from tests.support.engines.driver import Engines, Outcome, Row, Saved, Source, choose
from tests.support.engines.nvme import LEAST, Kind
from tests.support.engines.ranks import Load, load_each

OPTIMIZER, PIPELINED = Kind(3, 2, optimizer="nvme"), Kind(3, 1, optimizer="nvme", pipelined="read")
BOTH, FROZEN = Kind(3, 2, optimizer="nvme", params="nvme"), Kind(3, 1, optimizer="nvme", params="nvme", frozen=True)
SOURCES = [
    OPTIMIZER,
    PIPELINED,
    BOTH,
    Kind(3, 1, optimizer="cpu", params="nvme"),
    Kind(3, 2),
    Kind(1, 2),
    Kind(2, 1, "fp32"),
    Kind(3, 4, optimizer="nvme"),
    Kind(3, 1, "fp32", optimizer="nvme"),
]
TARGETS = [
    OPTIMIZER,
    Kind(3, 1, optimizer="nvme", params="nvme", pipelined="both"),
    Kind(3, 1),
    Kind(1, 4),
    Kind(3, 2, optimizer="nvme", pipelined="both"),
    Kind(3, 4, optimizer="nvme"),
    Kind(3, 2, optimizer="cpu", params="nvme"),
    BOTH,
    Kind(3, 1, "fp32", optimizer="nvme"),
    Kind(2, 1, "fp32"),
    Kind(3, 2, optimizer="cpu"),
]


def check_placeholder(_saved: Saved, outcome: Outcome) -> None:
    """Check that frozen parameters, of which DeepSpeed saves only a placeholder, are refused."""
    outcome.check_refused("other.weight", "placeholder")


def list_featured(feature: str) -> list[Row]:
    """List rows of a feature: Muon's momentum has separate swap files; ``zero.Init`` gives parameters other ids."""

    kinds = [each.but(**{feature: True}) for each in (BOTH, Kind(3, 1, optimizer="nvme"), Kind(3, 1))]

    def check_files(saved: Saved, _outcome: Outcome) -> None:
        for names in ([state for _, state in saved.state], [path.name for path in saved.folder.rglob("*.swp")]):
            assert any("momentum_buffer" in name for name in names) == (feature == "muon")

    return [
        Row(kind, kinds[:2], check=check_files, exhaustive=feature == "muon" or number > 0)
        for number, kind in enumerate(kinds)
    ]


ROWS = [
    *choose(TARGETS, SOURCES, {0: (1, 4, 0), 1: (0,), 3: (1,)}),
    Row(FROZEN, [Kind(1, 2, frozen=True), Source(FROZEN, check=check_placeholder)]),
    *list_featured("early"),
    *list_featured("muon"),
]


@pytest.mark.releases
@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_states_on_nvme_are_restored(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)


@pytest.mark.parametrize("kind", [OPTIMIZER, PIPELINED], ids=str)
def test_deepspeeds_load_loses_states_on_nvme(kind: Kind, engines: Engines) -> None:
    """In the same topology the plugin restores them (tested above)."""
    (alone,) = engines.load(kind, engines.saved(kind), plugin=False)
    assert alone.losses != engines.saved(kind).losses


def test_pipelined_swapping_leaves_other_sub_groups_states_in_the_state_files(engines: Engines) -> None:
    (path,) = engines.saved(PIPELINED).folder.rglob("*optim_states.pt")
    held = torch.load(path, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"]
    swapped = [tensor.detach() for tensor in held if 4 * tensor.numel() >= LEAST]
    masters = [file for file in path.parent.rglob("*.tensor.swp") if "-" not in file.name]
    files = [torch.from_file(str(file), size=file.stat().st_size // 4) for file in masters]
    assert len(swapped) == len(files) == 3
    assert not all(any(file[: tensor.numel()].equal(tensor) for file in files) for tensor in swapped)


@pytest.mark.parametrize("kind", params([BOTH], [PIPELINED], str))
def test_a_save_after_a_resume_contains_the_swapped_states(kind: Kind, engines: Engines, tmp_path: Path) -> None:
    """They are only in swap files, as after a step, and separate from another engine's."""
    saved = engines.saved(Kind(3, 2))
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
    (outcome,) = engines.load(Kind(3, 1), again)
    outcome.check(saved)
