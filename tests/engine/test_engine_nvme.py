"""Optimizer states and parameters on NVMe, under other stages, devices and ranks, and under the same ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from tests.support.covering import params
from tests.support.engines.driver import Engines, list_rows
from tests.support.engines.nvme import LEAST, Kind
from tests.support.engines.ranks import Load, load_each

SOURCES = (
    Kind(2, optimizer="nvme"),
    Kind(1, optimizer="nvme", pipelined="read"),
    Kind(2, optimizer="nvme", params="nvme"),
    Kind(1, optimizer="cpu", params="nvme"),
    Kind(2, 3),
    Kind(2, 1),
    Kind(1, 2, "fp32"),
    Kind(4, optimizer="nvme"),
    Kind(1, optimizer="nvme", precision="fp32"),
)

TARGETS = [
    Kind(2, optimizer="nvme"),
    Kind(1, optimizer="nvme", params="nvme", pipelined="both"),
    Kind(1, 3),
    Kind(4, 1),
    Kind(2, optimizer="nvme", pipelined="both"),
    Kind(4, optimizer="nvme"),
    Kind(2, optimizer="cpu", params="nvme"),
    Kind(2, optimizer="nvme", params="nvme"),
    Kind(1, optimizer="nvme", precision="fp32"),
    Kind(1, 2, "fp32"),
    Kind(2, optimizer="cpu"),
]


@pytest.mark.releases
@pytest.mark.parametrize(("target", "sources"), list_rows(TARGETS, SOURCES, {0: (1, 4, 0), 1: (0, 4), 3: (0, 1)}))
def test_every_state_comes_back(
    target: Kind, sources: tuple[Kind, ...], engines: Engines, subtests: pytest.Subtests
) -> None:
    engines.go_on(target, sources, subtests)


@pytest.mark.parametrize("kind", [Kind(2, optimizer="nvme"), Kind(1, optimizer="nvme", pipelined="read")], ids=str)
def test_deepspeeds_own_load_loses_states(kind: Kind, engines: Engines) -> None:
    """In the same topology, where the plugin continues like the uninterrupted run (tested above)."""
    saved = engines.saved(kind)
    assert engines.load_by_deepspeed(kind, saved.folder) != saved.losses


def test_pipelined_swapping_leaves_other_sub_groups_states_in_the_state_files(engines: Engines) -> None:
    (path,) = Path(engines.saved(Kind(1, optimizer="nvme", pipelined="read")).folder).rglob("*optim_states.pt")
    held = torch.load(path, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"]
    swapped = [tensor.detach() for tensor in held if 4 * tensor.numel() >= LEAST]
    masters = [file for file in path.parent.rglob("*.tensor.swp") if "-" not in file.name]
    files = [torch.from_file(str(file), size=file.stat().st_size // 4) for file in masters]
    assert len(swapped) == len(files) == 3
    assert not all(any(file[: tensor.numel()].equal(tensor) for file in files) for tensor in swapped)


@pytest.mark.parametrize(
    "kind", [Kind(2, optimizer="nvme", params="nvme"), Kind(1, optimizer="nvme", pipelined="read")]
)
def test_a_save_right_after_a_resume(kind: Kind, engines: Engines, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Swapped states are in swap files alone, as after a step, and separate from another engine's."""
    source, plain = Kind(2, 3), Kind(1, 3)
    saved = engines.saved(source)
    other = ucp_worlds.get(3 - kind.world)
    for world, each in ((other, replace(kind, world=3 - kind.world)), (ucp_worlds.get(kind.world), kind)):
        training = each.training(78, str(tmp_path / "shared"))
        world.run(load_each, training, [Load(saved.folder, again=str(tmp_path / str(each)))], read=id)
    again = tmp_path / str(kind)
    for path in again.rglob("*optim_states.pt"):
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        held = state["optimizer_state_dict"]["state"].values()
        tensors = [*state["fp32_flat_groups"], *(each["exp_avg"] for each in held)]
        assert 4 * max(tensor.numel() for tensor in tensors) < LEAST
    assert len(list(again.rglob("rank00/*.swp"))) >= 3 * 3
    (outcome,) = engines.load(plain, again)
    outcome.check(plain, source, saved)


def test_frozen_parameters_on_nvme(engines: Engines) -> None:
    """They are loaded; a save of them has only a placeholder, and is refused."""
    source, target = Kind(2, 1, frozen=True), Kind(1, optimizer="nvme", params="nvme", frozen=True)
    saved = engines.saved(source)
    taken, refused = engines.load(target, saved.folder, engines.saved(target).folder)
    taken.check(target, source, saved)
    refused.check_refused("other.weight", "placeholder")


@pytest.mark.parametrize("feature", params(["early"], ["early", "muon"]))
def test_muon_and_models_that_are_made_partitioned(feature: str, engines: Engines, subtests: pytest.Subtests) -> None:
    """Muon's momentum has separate swap files; ``zero.Init`` gives parameters other ids."""
    kinds = [
        replace(kind, **{feature: True})
        for kind in (Kind(2, optimizer="nvme", params="nvme"), Kind(1, optimizer="nvme"), Kind(1, 3))
    ]
    for target in kinds:
        engines.go_on(target, kinds[:2], subtests)
    saved = engines.saved(kinds[0])
    assert any(state == "momentum_buffer" for _, state in saved.states) == (feature == "muon")
    files = Path(saved.folder).rglob("*.swp")
    assert any("momentum_buffer" in path.name for path in files) == (feature == "muon")
