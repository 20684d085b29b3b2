"""Optimizer states and parameters on NVMe, under other stages, devices and ranks, and under the same ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from tests.support.covering import params
from tests.support.engines import nvme as engine_nvme
from tests.support.engines.going_on import States, join
from tests.support.engines.nvme import LEAST, Kind

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

CHOSEN = [
    (TARGETS[target], tuple(SOURCES[place] for place in places))
    for target, places in ((0, (1, 4, 0)), (1, (0, 4)), (3, (0, 1)))
]
"""The other pairs are exhaustive."""

Saved = tuple[str, States, list[list[float]]]
"""A folder, what its engine held at the save, and each rank's losses after it."""


def save(kind: Kind, folder: Path, worlds: WorldPool, seed: int = 1) -> Saved:
    answers = worlds.get(kind.world).run(engine_nvme.save, kind, str(folder), seed)
    return str(folder), join([states for states, _ in answers]), [losses for _, losses in answers]


@pytest.fixture(scope="module")
def saves(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Saved]:
    """Each source, saved when it is first asked for."""

    @functools.cache
    def get(kind: Kind) -> Saved:
        return save(kind, tmp_path_factory.mktemp("nvme"), ucp_worlds, SOURCES.index(kind))

    return get


def name_row(row: tuple[Kind, tuple[Kind, ...]]) -> str:
    return f"{row[0]}-from-{len(row[1])}"


@pytest.mark.releases
@pytest.mark.parametrize(
    ("target", "sources"), params(CHOSEN, [*CHOSEN, *((target, SOURCES) for target in TARGETS)], name_row)
)
def test_every_state_comes_back(
    target: Kind,
    sources: tuple[Kind, ...],
    saves: Callable[[Kind], Saved],
    tmp_path: Path,
    ucp_worlds: WorldPool,
    subtests: pytest.Subtests,
) -> None:
    saved = [saves(source) for source in sources]
    folders = [folder for folder, _, _ in saved]
    answers = ucp_worlds.get(target.world).run(engine_nvme.load_each, target, folders, str(tmp_path))
    for place, (source, (_, expected, losses)) in enumerate(zip(sources, saved, strict=True)):
        with subtests.test(source=str(source)):
            parts = [answer[place] for answer in answers]
            assert not isinstance(parts[0], str), parts[0]
            states = join([states for _, states, _ in parts])
            assert states.keys() == expected.keys()
            for (name, state), tensor in states.items():
                value = expected[name, state]
                if state == "copy" and source.precision != target.precision:  # made of the master, where there is one
                    value = expected.get((name, "fp32"), value)
                assert torch.equal(tensor, value.to(tensor.dtype)), (name, state)
            if (source.world, source.stage, source.precision) == (target.world, target.stage, target.precision):
                assert [losses for _, _, losses in parts] == losses
            on_nvme = "nvme" in (target.optimizer, target.params)
            assert all(direct == (on_nvme or source != target) for direct, _, _ in parts)


@pytest.mark.parametrize("kind", [Kind(2, optimizer="nvme"), Kind(1, optimizer="nvme", pipelined="read")], ids=str)
def test_deepspeeds_own_load_loses_states(
    kind: Kind, saves: Callable[[Kind], Saved], tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """At the same topology; ours goes on as the uninterrupted run does, which is tested above."""
    folder, _, losses = saves(kind)
    assert ucp_worlds.get(kind.world).run(engine_nvme.load_by_deepspeed, kind, folder, str(tmp_path)) != losses


def test_pipelined_swapping_leaves_other_sub_groups_states_in_the_state_files(
    saves: Callable[[Kind], Saved],
) -> None:
    folder, _, _ = saves(Kind(1, optimizer="nvme", pipelined="read"))
    (path,) = Path(folder).rglob("*optim_states.pt")
    held = torch.load(path, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"]
    swapped = [tensor.detach() for tensor in held if 4 * tensor.numel() >= LEAST]
    masters = [file for file in path.parent.rglob("*.tensor.swp") if "-" not in file.name]
    files = [torch.from_file(str(file), size=file.stat().st_size // 4) for file in masters]
    assert len(swapped) == len(files) == 3
    assert not all(any(file[: tensor.numel()].equal(tensor) for file in files) for tensor in swapped)


@pytest.mark.parametrize(
    "kind", [Kind(2, optimizer="nvme", params="nvme"), Kind(1, optimizer="nvme", pipelined="read")]
)
def test_a_save_right_after_a_resume(
    kind: Kind, saves: Callable[[Kind], Saved], tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """As after a step what is swapped is in swap files alone. Those of another engine beside it do no harm."""
    folder, expected, _ = saves(Kind(2, 3))
    other = ucp_worlds.get(3 - kind.world)
    for world, each in ((other, replace(kind, world=3 - kind.world)), (ucp_worlds.get(kind.world), kind)):
        world.run(engine_nvme.load_and_save, each, folder, str(tmp_path / str(each)), str(tmp_path / "swap"))
    again = tmp_path / str(kind)
    for path in again.rglob("*optim_states.pt"):
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        held = state["optimizer_state_dict"]["state"].values()
        tensors = [*state["fp32_flat_groups"], *(each["exp_avg"] for each in held)]
        assert 4 * max(tensor.numel() for tensor in tensors) < LEAST
    assert len(list(again.rglob("rank00/*.swp"))) >= 3 * 3
    (((_, states, _),),) = ucp_worlds.get(1).run(engine_nvme.load_each, Kind(1, 3), [str(again)], str(tmp_path))
    assert all(torch.equal(tensor, expected[key]) for key, tensor in states.items())


def test_frozen_parameters_on_nvme(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """They are filled; a save of theirs has a placeholder alone, and is refused."""
    target = Kind(1, optimizer="nvme", params="nvme", frozen=True)
    sources = [save(kind, tmp_path / str(kind), ucp_worlds) for kind in (Kind(2, 1, frozen=True), target)]
    folders, swap = [folder for folder, _, _ in sources], str(tmp_path / "swap")
    (((direct, states, _), refused),) = ucp_worlds.get(1).run(engine_nvme.load_each, target, folders, swap)
    assert direct and all(torch.equal(tensor, sources[0][1][key]) for key, tensor in states.items())
    assert "other.weight" in refused and "placeholder" in refused


@pytest.mark.parametrize("feature", params([("early",)], [("early",), ("muon",)]))
def test_muon_and_models_that_are_made_partitioned(feature: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Muon's momentum is in swap files of its own; ``zero.Init`` gives parameters other ids."""
    kinds = [
        replace(kind, **{feature: True})
        for kind in (Kind(2, optimizer="nvme", params="nvme"), Kind(1, optimizer="nvme"), Kind(1, 3))
    ]
    saved = [save(kind, tmp_path / str(kind), ucp_worlds, seed) for seed, kind in enumerate(kinds[:2])]
    for target in kinds:
        answers = ucp_worlds.get(target.world).run(
            engine_nvme.load_each, target, [folder for folder, _, _ in saved], str(tmp_path / "swap")
        )
        for place, (_, expected, losses) in enumerate(saved):
            parts = [answer[place] for answer in answers]
            assert not isinstance(parts[0], str), parts[0]
            states = join([states for _, states, _ in parts])
            assert states.keys() == expected.keys() and all(direct for direct, _, _ in parts)
            assert all(torch.equal(tensor, expected[key]) for key, tensor in states.items()), (target, place)
            if target.world == kinds[place].world:
                assert [own for _, _, own in parts] == losses
    held = {state for _, state in saved[0][1]}
    assert ("momentum_buffer" in held) == (feature == "muon")
    assert any("momentum_buffer" in path.name for path in tmp_path.rglob("*.swp")) == (feature == "muon")
