"""DeepSpeed's own experts under other expert-parallel degrees, numbers of ranks, stages and precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_experts
import pytest
import torch
from engine_experts import Spread, States

from deepspeed_ucp.testing import WorldPool

SOURCES = [
    Spread(4, 1, "bf16", (2, 2)),
    Spread(4, 2, "fp32", (2, 1), data_first=True),
    Spread(2, 1, "fp32", (1, 1)),
    Spread(4, 0, "fp32", (4, 4)),
    Spread(4, 0, "bf16", (2, 2), data_first=True),
]

TARGETS = [
    Spread(4, 1, "bf16", (2, 2)),
    Spread(4, 2, "fp32", (4, 2)),
    Spread(2, 2, "bf16", (2, 1), data_first=True),
    Spread(1, 1, "fp32", (1, 1)),
    Spread(4, 0, "fp32", (2, 2)),
    Spread(2, 0, "bf16", (1, 1)),
]


def join(parts: list[States]) -> States:
    """What all ranks hold; replicas have to be equal."""
    joined: States = {}
    for part in parts:
        for key, tensor in part.items():
            assert torch.equal(joined.setdefault(key, tensor), tensor), key
    return joined


@pytest.fixture(scope="module")
def saved(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Spread, tuple[str, States, Any]]:
    """Each source's folder, what it held at the save, and its losses after it."""
    found = {}
    for number, spread in enumerate(SOURCES):
        folder = str(tmp_path_factory.mktemp("experts"))
        answers = ucp_worlds.get(spread.world).run(engine_experts.save, spread, folder, 10 * number)
        found[spread] = folder, join([states for states, _ in answers]), answers[0][1]
    return found


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_expert_comes_back(
    target: Spread, saved: dict[Spread, Any], ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    folders = [folder for folder, _, _ in saved.values()]
    answers = ucp_worlds.get(target.world).run(engine_experts.load_each, target, folders)
    for place, (source, (_, expected, losses)) in enumerate(saved.items()):
        with subtests.test(source=str(source)):
            parts = [answer[place] for answer in answers]
            if source.stage == 0 and len(set(target.degrees)) > 1:  # the param groups differ, and it names none
                assert all(isinstance(part, str) and "the param groups differ" in part for part in parts)
                continue
            assert not isinstance(parts[0], str), parts[0]
            assert all(direct == (source != target) for direct, _, _ in parts)
            states = join([states for _, states, _ in parts])
            assert states.keys() == expected.keys()
            for (name, state), tensor in states.items():
                wanted = expected[name, "fp32"].to(tensor.dtype) if state == "copy" else expected[name, state]
                assert torch.equal(tensor, wanted), (name, state)
            if source.precision == target.precision == "fp32":
                assert parts[0][2] == pytest.approx(losses, abs=1e-7)


def test_degrees_that_stage_0_does_not_save_are_refused(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Two layers of the same shapes with one degree each: nothing in the files tells which has which."""
    world, source = ucp_worlds.get(2), Spread(2, 0, "fp32", (2, 1))
    world.run(engine_experts.save, source, str(tmp_path), 1)
    for (told,) in world.run(engine_experts.load_each, Spread(2, 1, "fp32", (2, 1)), [str(tmp_path)]):
        assert told.startswith("MismatchError") and "several such degrees" in told


@pytest.mark.parametrize(
    "lost", ["layer_1_expert_2_mp_rank_00_model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt"]
)
def test_an_experts_file_that_is_missing_is_named(lost: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    world = ucp_worlds.get(2)
    world.run(engine_experts.save, Spread(2, 0, "bf16", (2, 2)), str(tmp_path), 1)
    next(tmp_path.rglob(lost)).unlink()
    for (told,) in world.run(engine_experts.load_each, Spread(2, 1, "bf16", (1, 1)), [str(tmp_path)]):
        assert told.startswith("CheckpointError") and f"{lost} is missing" in told
