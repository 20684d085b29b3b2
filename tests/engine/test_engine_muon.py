"""DeepSpeed's Muon under other stages, numbers of ranks and places of its momentum, and under the same ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from tests.support.covering import params
from tests.support.engines import muon as engine_muon
from tests.support.engines.going_on import States, join
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

CHOSEN = [(TARGETS[place], tuple(SOURCES[number % 3 :: 3])) for number, place in enumerate((0, 3, 6, 5, 7, 9))]
"""One of each kind, from every third source; the others are exhaustive."""

EVERY = [*CHOSEN, *((target, tuple(SOURCES)) for target in TARGETS)]


def name_row(row: tuple[Kind, tuple[Kind, ...]]) -> str:
    return f"{row[0]}-from-{len(row[1])}"


Saved = dict[Kind, tuple[str, States, list[list[float]]]]


def save(kind: Kind, folder: Path, worlds: WorldPool, seed: int = 1) -> tuple[str, States, list[list[float]]]:
    answers = worlds.get(kind.world).run(engine_muon.save, kind, str(folder), seed)
    return str(folder), join([states for states, _ in answers]), [losses for _, losses in answers]


@pytest.fixture(scope="module")
def saved(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Each source's folder, what it held at the save, and each rank's losses after it."""
    return {
        kind: save(kind, tmp_path_factory.mktemp("muon"), ucp_worlds, 10 * number)
        for number, kind in enumerate(SOURCES)
    }


@pytest.mark.releases
@pytest.mark.parametrize(("target", "sources"), params(CHOSEN, EVERY, name_row))
def test_momentum_comes_back(
    target: Kind, sources: tuple[Kind, ...], saved: Saved, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    folders = [saved[source][0] for source in sources]
    answers = ucp_worlds.get(target.world).run(engine_muon.load_each, target, folders)
    for place, source in enumerate(sources):
        _, expected, losses = saved[source]
        with subtests.test(source=str(source)):
            parts = [answer[place] for answer in answers]
            assert not isinstance(parts[0], str), parts[0]
            states = join([states for _, states, _ in parts])
            assert states.keys() == expected.keys()
            assert sum(state == "momentum_buffer" for _, state in states) == 5
            for key, tensor in states.items():
                assert torch.equal(tensor, expected[key].to(tensor.dtype)), key
            if are_alike(source, target) and source.world == target.world:
                assert [losses for _, _, losses in parts] == losses
            assert all(direct == (target.in_memory or not are_alike(source, target)) for direct, _, _ in parts)


def are_alike(source: Kind, target: Kind) -> bool:
    """Whether they are one topology: where ZeRO 3 has its momentum is none of it, nor are replicas."""
    alike = replace(source, in_memory=False, world=target.world) == replace(target, in_memory=False)
    return alike and (source.world == target.world or (source.stage, source.precision) == (0, "fp32"))


def test_deepspeeds_own_load_loses_the_momentum_in_memory(saved: Saved, ucp_worlds: WorldPool) -> None:
    """At the same topology ours goes on as the uninterrupted run does, which is tested above."""
    kind = Kind(2, 3, in_memory=True)
    folder, _, losses = saved[kind]
    assert ucp_worlds.get(2).run(engine_muon.load_by_deepspeed, kind, folder) != losses


@pytest.mark.parametrize("kind", [Kind(4, 3), Kind(2, 1, offload=True), Kind(2, 3, offload=True)], ids=str)
def test_deepspeeds_own_load_is_right_at_the_same_topology(kind: Kind, saved: Saved, ucp_worlds: WorldPool) -> None:
    folder, expected, losses = saved[kind]
    answers = ucp_worlds.get(kind.world).run(engine_muon.load_each, kind, [folder])
    for ((direct, states, own),), told in zip(answers, losses, strict=True):
        assert not direct and own == told
        assert all(torch.equal(tensor, expected[key].to(tensor.dtype)) for key, tensor in states.items())


@pytest.mark.parametrize("target", [Kind(2, 1, elastic=True), Kind(2, 3)], ids=str)
def test_elastic_saves_lack_momentum(target: Kind, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """DeepSpeed cuts the padding of a partition off what is none, and gives every rank the first one's."""
    folder, _, _ = save(Kind(2, 1, elastic=True), tmp_path, ucp_worlds)
    for (told,) in ucp_worlds.get(2).run(engine_muon.load_each, target, [folder]):
        assert told.startswith("MismatchError") and "momentum_buffer (shape" in told


def test_momentum_that_differs_between_two_ranks_is_refused(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """A parameter on the border of two partitions lies whole in the files of both ranks."""
    folder, _, _ = save(Kind(2, 1), tmp_path, ucp_worlds)
    path = next(tmp_path.rglob("*zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    tree = torch.load(path, weights_only=False)
    momentum = tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["momentum_buffer"]
    momentum[0] += 1  # of a parameter that begins on rank 0
    torch.save(tree, path)
    for (told,) in ucp_worlds.get(1).run(engine_muon.load_each, Kind(1, 3), [folder]):
        assert told.startswith("CheckpointError") and "square.weight (momentum_buffer)" in told and path.name in told
