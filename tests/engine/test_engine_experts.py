"""DeepSpeed's own experts under other expert-parallel degrees, numbers of ranks, stages and precisions."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from tests.releases import find_reason
from tests.support.covering import params
from tests.support.engines import experts as engine_experts
from tests.support.engines.experts import Spread
from tests.support.engines.going_on import States, join

BELOW = "expert_layer"
"""A module's name by which DeepSpeed takes all that is in it for experts."""

SOURCES = [
    Spread(4, 1, "bf16", (2, 2)),
    Spread(4, 2, "fp32", (2, 1), data_first=True),
    Spread(2, 1, "fp32", (1, 1)),
    Spread(4, 1, "fp32", (2, 4), shuffled=True),
    Spread(4, 0, "fp32", (4, 4)),
    Spread(4, 0, "bf16", (2, 2), data_first=True),
]
SOURCES = [each for each in SOURCES if not find_reason(f"experts/zero{each.stage}-{each.precision}")]

TARGETS = [
    Spread(4, 1, "bf16", (2, 2)),
    Spread(4, 2, "fp32", (4, 2), shuffled=True),
    Spread(2, 2, "bf16", (2, 1), data_first=True),
    Spread(1, 1, "fp32", (1, 1)),
    Spread(4, 0, "fp32", (2, 2)),
    Spread(2, 0, "bf16", (1, 1)),
]


@pytest.fixture(scope="module")
def saved(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Spread, tuple[str, States, Any]]:
    """Each source's folder, what it held at the save, and its losses after it."""
    found = {}
    for number, spread in enumerate(SOURCES):
        folder = str(tmp_path_factory.mktemp("experts"))
        answers = ucp_worlds.get(spread.world).run(engine_experts.save, spread, folder, 10 * number)
        found[spread] = folder, join([states for states, _ in answers]), answers[0][1]
    return found


CHOSEN = [(target, tuple(SOURCES[number % 2 :: 2])) for number, target in enumerate(TARGETS)]
EVERY = [*CHOSEN, *((target, tuple(SOURCES)) for target in TARGETS)]


@pytest.mark.releases
@pytest.mark.parametrize(("target", "sources"), params(CHOSEN, EVERY, lambda row: f"{row[0]}-from-{len(row[1])}"))
def test_every_expert_comes_back(
    target: Spread,
    sources: tuple[Spread, ...],
    saved: dict[Spread, Any],
    ucp_worlds: WorldPool,
    subtests: pytest.Subtests,
) -> None:
    folders = [saved[source][0] for source in sources]
    answers = ucp_worlds.get(target.world).run(engine_experts.load_each, target, folders)
    for place, source in enumerate(sources):
        _, expected, losses = saved[source]
        with subtests.test(source=str(source)):
            parts = [answer[place] for answer in answers]
            if source.stage == 0 and len(set(target.degrees)) > 1:  # the param groups differ, and it names none
                told = "in another order" if target.shuffled else "the param groups differ"
                assert all(isinstance(part, str) and told in part for part in parts)
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_among_all_parameters_in_one_group(
    precision: str, tmp_path: Path, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    """As ``AdamW(model.parameters())`` has them at stage 0."""
    world, source = ucp_worlds.get(2), Spread(2, 0, precision, (2, 2), together=True)
    expected = join([states for states, _ in world.run(engine_experts.save, source, str(tmp_path), 1)])
    targets = [source, Spread(2, 0, precision, (1, 1), together=True), Spread(2, 1, "bf16", (2, 2))]
    told = "ds_config" in torch.load(next(tmp_path.rglob("mp_rank_00_model_states.pt")), weights_only=False)
    for target in targets if precision == "fp32" else targets[:2]:
        with subtests.test(target=str(target)):
            parts = [part for (part,) in world.run(engine_experts.load_each, target, [str(tmp_path)])]
            assert not isinstance(parts[0], str), parts[0]
            ours = source != target or not (told or precision == "bf16")  # to 0.19.2 DeepSpeed's own load fails in fp32
            assert all(direct == ours for direct, _, _ in parts)
            states = join([states for _, states, _ in parts])
            assert states.keys() == expected.keys()
            assert all(torch.equal(states[key], expected[key]) for key in expected if key[1] != "copy")


def test_degrees_that_stage_0_does_not_save_are_refused(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Two layers of the same shapes with one degree each: nothing in the files tells which has which.

    In the same topology DeepSpeed's own load takes them by their order, which it makes anew at every start.
    """
    world, source = ucp_worlds.get(2), Spread(2, 0, "fp32", (2, 1))
    world.run(engine_experts.save, source, str(tmp_path), 1)
    for target in (Spread(2, 1, "fp32", (2, 1)), source):
        for (told,) in world.run(engine_experts.load_each, target, [str(tmp_path)]):
            assert told.startswith("MismatchError") and "several such degrees" in told
            assert "load_optimizer_states=False" in told


@pytest.mark.parametrize("shuffled", [False, True])
def test_degrees_whose_groups_have_another_order_at_every_start(
    shuffled: bool, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """DeepSpeed's own load of the same topology takes groups by their number."""
    world, source = ucp_worlds.get(4), Spread(4, 1, "bf16", (2, 4), shuffled=not shuffled)
    expected = join([states for states, _ in world.run(engine_experts.save, source, str(tmp_path), 1)])
    answers = world.run(engine_experts.load_each, replace(source, shuffled=shuffled), [str(tmp_path)])
    assert all(direct for ((direct, _, _),) in answers)
    states = join([states for ((_, states, _),) in answers])
    assert states.keys() == expected.keys()
    assert all(torch.equal(states[key], expected[key]) for key in expected if key[1] != "copy")


def test_a_custom_load_needs_all_experts_on_every_rank(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Every rank counts its own from 0, so that by these names all would take the first ones."""
    world = ucp_worlds.get(2)
    world.run(engine_experts.save, Spread(2, 1, "bf16", (1, 1)), str(tmp_path), 1)
    arguments = {"custom_load_fn": engine_experts.fill, "load_optimizer_states": False}
    for spread, refused in ((Spread(2, 1, "bf16", (2, 1)), True), (Spread(2, 2, "fp32", (1, 1)), False)):
        for (told,) in world.run(engine_experts.load_each, spread, [str(tmp_path)], None, **arguments):
            assert isinstance(told, str) == refused
            assert not refused or (told.startswith("UnsupportedError") and "expert parallelism" in told)


def test_an_expert_optimizer_of_another_step_is_refused(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """At stage 0 in fp32 no other file has what it holds."""
    world = ucp_worlds.get(2)
    world.run(engine_experts.save, Spread(2, 0, "fp32", (2, 2)), str(tmp_path), 1, True)
    name = "expp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "global_step5" / name, tmp_path / "global_step3" / name)
    for (told,) in world.run(engine_experts.load_each, Spread(2, 1, "bf16", (1, 1)), [str(tmp_path)], "global_step3"):
        assert told.startswith("CheckpointError") and f"{name}: the optimizer's step differs" in told


@pytest.mark.parametrize(
    "lost",
    ["layer_1_expert_2_mp_rank_00_model_states.pt", *(f"expp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))],
)
def test_an_experts_file_that_is_missing_is_named(lost: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    world = ucp_worlds.get(2)
    world.run(engine_experts.save, Spread(2, 0, "bf16", (2, 2)), str(tmp_path), 1)
    next(tmp_path.rglob(lost)).unlink()
    for (told,) in world.run(engine_experts.load_each, Spread(2, 1, "bf16", (1, 1)), [str(tmp_path)]):
        assert told.startswith("CheckpointError") and f"{lost} is missing" in told


@pytest.mark.parametrize(
    "source",
    [
        Spread(2, 1, "fp32", (2, 2), tied=True),
        Spread(2, 0, "fp32", (1, 1), tied=True),
        Spread(2, 1, "fp32", (2, 2), residual=BELOW),
    ],
    ids=str,
)
def test_layers_of_experts_that_deepspeed_loses(
    source: Spread, tmp_path: Path, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    """Of tied ones it saves the second name's experts with rank 0's model states, and loads these on every rank; it
    leaves the residual expert out of them where a module's name has "expert" in it, and cannot load what it has saved.
    """
    world, folder = ucp_worlds.get(2), str(tmp_path)
    answers = world.run(engine_experts.save, source, folder, 1)
    expected, losses = join([states for states, _ in answers]), answers[0][1]
    for target in (source, replace(source, stage=2, degrees=(1, 1)), replace(source, stage=0, degrees=(2, 2))):
        with subtests.test(target=str(target)):
            answers = world.run(engine_experts.load_each, target, [folder])
            assert all(isinstance(answer, tuple) and answer[0] for (answer,) in answers), answers[0]
            states = join([states for ((_, states, _),) in answers])
            assert states.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[key]) for key, tensor in states.items())
            assert answers[0][0][2] == pytest.approx(losses, abs=1e-7)


def test_a_residual_expert_that_no_file_holds_is_named(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """At stage 0 there are no masters in another file."""
    world, source = ucp_worlds.get(2), Spread(2, 0, "fp32", (2, 2), residual=BELOW)
    world.run(engine_experts.save, source, str(tmp_path), 1)
    for target in (source, replace(source, stage=1)):
        for (told,) in world.run(engine_experts.load_each, target, [str(tmp_path)]):
            assert told.startswith("MismatchError") and f"not in the checkpoint: {BELOW}.mlp.0.weight" in told
