"""DeepSpeed's own experts under tensor and pipeline parallelism."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from deepspeed_ucp.convert import convert_checkpoint
from deepspeed_ucp.testing import WorldPool
from tests.support.covering import params
from tests.support.engines import experts_3d as engine_experts_3d
from tests.support.engines.experts_3d import Spread, join
from tests.support.engines.going_on import Saves, States

SOURCES = [
    Spread(4, 2, 2, 1, "bf16"),
    Spread(4, 2, 4, 2),
    Spread(4, 2, 4, 1, data_first=True),
    Spread(4, 2, 2, 1, cut=True),
    Spread(4, 2, 1, 2, "bf16", cut=True, data_first=True),
    Spread(4, 2, 2, 0),
    Spread(4, 2, 4, 0, "bf16"),
    Spread(4, 2, 2, 0, "bf16", cut=True),
    Spread(4, 2, 2, 1, "bf16", fp32_grads=True),
    Spread(4, 1, 2, 1, "bf16", pp=2),
    Spread(4, 1, 2, 0, pp=2),
    Spread(4, 2, 2, 1, pp=2, cut=False),
    Spread(4, 2, 1, 1, "bf16", pp=2, cut=True, fp32_grads=True),
    Spread(2, 1, 2, 1),
    Spread(4, 2, 2, 1, "bf16", second=4),
    Spread(4, 1, 2, 0, "bf16", pp=2),
    Spread(4, 2, 2, 0, "bf16", pp=2),
]

TARGETS = [
    Spread(4, 2, 2, 1, "bf16"),
    Spread(4, 2, 1, 2),
    Spread(4, 2, 4, 1, data_first=True),
    Spread(4, 2, 2, 2, cut=True),
    Spread(4, 2, 4, 0),
    Spread(4, 2, 2, 0, "bf16", cut=True),
    Spread(4, 2, 2, 1, "bf16", fp32_grads=True),
    Spread(4, 1, 2, 1, pp=2),
    Spread(4, 2, 2, 1, "bf16", pp=2),
    Spread(4, 2, 1, 0, pp=2, cut=True),
    Spread(2, 1, 2, 2, "bf16"),
    Spread(1, 1, 1, 1),
    Spread(4, 2, 4, 2, second=2),
    Spread(4, 2, 2, 0, "bf16", pp=2),
    Spread(4, 1, 2, 0, pp=2),
    Spread(4, 1, 2, 1, "bf16", pp=2),
]

CHOSEN = [
    (TARGETS[target], tuple(SOURCES[place] for place in places))
    for target, places in ((0, (3, 9)), (3, (6, 12)), (8, (0, 3, 6)))
]
"""One of each kind; the others are exhaustive."""

EVERY = [*CHOSEN, *((target, tuple(SOURCES)) for target in TARGETS)]


def name_target(row: tuple[Spread]) -> str:
    return str(row[0])


def name_row(row: tuple[Spread, tuple[Spread, ...]]) -> str:
    return f"{row[0]}-from-{len(row[1])}"


@pytest.fixture(scope="module")
def saved(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    def save(spread: Spread, number: int) -> tuple[str, States, list[float]]:
        folder = str(tmp_path_factory.mktemp("experts3d"))
        answers = ucp_worlds.get(spread.world).run(engine_experts_3d.save, spread, folder, 7 * number + 1)
        return folder, join([states for states, _ in answers], spread), answers[0][1]

    return Saves(save)


@pytest.mark.releases
@pytest.mark.parametrize(("target", "sources"), params(CHOSEN, EVERY, name_row))
def test_every_expert_comes_back(
    target: Spread, sources: tuple[Spread, ...], saved: Saves, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    folders = [saved[source][0] for source in sources]
    answers = ucp_worlds.get(target.world).run(engine_experts_3d.load_each, target, folders)
    for place, source in enumerate(sources):
        with subtests.test(source=str(source)):
            (_, expected, losses), parts = saved[source], [answer[place] for answer in answers]
            nameless = source.stage == 0 and (source.pp == 1 or source.precision == "fp32")  # not of BF16_Optimizer
            if nameless and target.second:  # the param groups differ
                assert all(isinstance(part, str) and "in another order" in part for part in parts), parts[0]
                continue
            assert not isinstance(parts[0], str), parts[0]
            lost = target.stage == 0 and target.precision == "bf16" and target.pp > 1  # BF16_Optimizer, without ZeRO
            assert all(direct == (source != target or lost) for direct, _, _ in parts)
            states = join([states for _, states, _ in parts], target)
            assert states.keys() == expected.keys()
            for (name, state), tensor in states.items():
                wanted = expected[name, "fp32"].to(tensor.dtype) if state == "copy" else expected[name, state]
                assert torch.equal(tensor, wanted), (name, state)
            if source.precision == target.precision == "fp32":
                assert parts[0][2] == pytest.approx(losses, rel=1e-5)


def test_ranks_whose_model_states_deepspeed_does_not_save(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """One expert-parallel rank on two tensor-parallel ones: the second's file is never written."""
    world = ucp_worlds.get(4)
    world.run(engine_experts_3d.save, Spread(4, 2, 1, 1), str(tmp_path), 1)
    for spread in (Spread(4, 2, 1, 1), Spread(4, 2, 2, 2)):
        for (told,) in world.run(engine_experts_3d.load_each, spread, [str(tmp_path)]):
            assert isinstance(told, str) and told.startswith("CheckpointError"), told
            assert "mp_rank_01_model_states.pt is missing; DeepSpeed writes no model states" in told


ALONE = [SOURCES[0], SOURCES[6], SOURCES[7], SOURCES[9]]
"""Folded and cut experts and a pipeline, whose weights are loaded without an optimizer's states."""


@pytest.mark.parametrize("target", params([(TARGETS[0],)], [(TARGETS[place],) for place in (0, 3, 8, 10)], name_target))
def test_weights_alone(target: Spread, saved: Saves, ucp_worlds: WorldPool, subtests: pytest.Subtests) -> None:
    """They are the model's own, which lie in the files of single experts."""
    folders, options = [saved[source][0] for source in ALONE], {"load_optimizer_states": False}
    answers = ucp_worlds.get(target.world).run(engine_experts_3d.load_each, target, folders, **options)
    for place, source in enumerate(ALONE):
        with subtests.test(source=str(source)):
            parts = [answer[place] for answer in answers]
            assert not isinstance(parts[0], str), parts[0]
            states, expected = join([states for _, states, _ in parts], target), saved[source][1]
            found = {name: tensor for (name, state), tensor in states.items() if state == "copy"}
            assert {name for name, state in expected if state == "copy"} == found.keys()
            assert all(torch.equal(tensor, expected[name, "copy"].to(tensor.dtype)) for name, tensor in found.items())


def test_an_experts_copy_of_another_save_is_found(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The masters of folded experts lie on all ranks of the stage; the copy of one is put there from a later save."""
    world, source = ucp_worlds.get(4), Spread(4, 2, 2, 1)
    world.run(engine_experts_3d.save, source, str(tmp_path), 1, True)
    name = "layer_1_expert_2_mp_rank_01_model_states.pt"
    shutil.copy(tmp_path / "global_step5" / name, tmp_path / "global_step3" / name)
    for (told,) in world.run(engine_experts_3d.load_each, Spread(4, 2, 4, 1), [str(tmp_path)], "global_step3"):
        assert isinstance(told, str) and "its fp32 weights are not those of the model states" in told, told


@pytest.mark.parametrize("source", params([(SOURCES[9],)], [(SOURCES[each],) for each in (1, 9, 12)], name_target))
def test_older_releases_do_not_tell_the_degrees(
    source: Spread, tmp_path: Path, saved: Saves, ucp_worlds: WorldPool
) -> None:
    folder, expected, _ = saved[source]
    shutil.copytree(folder, tmp_path / "old")
    for path in (tmp_path / "old").rglob("mp_rank_*_model_states.pt"):
        tree = torch.load(path, weights_only=False)
        del tree["checkpoint_parallel_dimensions"]
        torch.save(tree, path)
    target = TARGETS[10]
    answers = ucp_worlds.get(target.world).run(engine_experts_3d.load_each, target, [str(tmp_path / "old")])
    assert not isinstance(answers[0][0], str), answers[0][0]
    states = join([states for ((_, states, _),) in answers], target)
    assert all(torch.equal(states[key], expected[key]) for key in expected if key[1] != "copy")


ATOMIC = [(SOURCES[place],) for place in (0, 3, 9, 12)]


@pytest.mark.parametrize("source", params(ATOMIC[:1], ATOMIC, name_target))
def test_an_atomic_checkpoint_of_experts(source: Spread, tmp_path: Path, saved: Saves, ucp_worlds: WorldPool) -> None:
    (folder, expected, _), target = saved[source], TARGETS[3]
    replicas = {"match": r".*(\.down_bias|\.wg\.weight)", "pattern": "replicate"}
    patterns = {"rules": [*engine_experts_3d.RULES["rules"], replicas]}
    convert_checkpoint(folder, str(tmp_path / "step_universal"), patterns=patterns)
    answers = ucp_worlds.get(target.world).run(engine_experts_3d.load_each, target, [str(tmp_path)], "step_universal")
    assert not isinstance(answers[0][0], str), answers[0][0]
    states = join([states for ((_, states, _),) in answers], target)
    assert states.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in states.items() if key[1] != "copy")


DUAL = Spread(4, 1, 2, 1, pp=2, turns=True, dual=True)


THERE = [Spread(4, 1, 2, 1, pp=2, turns=True), Spread(4, 2, 4, 2, "bf16", turns=True)]
WAYS = [(DUAL, (DUAL, *THERE)), (THERE[0], (DUAL,)), (THERE[1], (DUAL,))]


@pytest.mark.parametrize(("source", "targets"), params(WAYS[:1], WAYS, lambda row: str(row[0])))
def test_experts_of_a_bidirectional_pipeline(
    source: Spread, targets: tuple[Spread, ...], tmp_path: Path, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    pytest.importorskip("deepspeed.runtime.pipe.dualpipev", reason="DeepSpeed before DualPipeV")
    world, folder = ucp_worlds.get(4), str(tmp_path)
    answers = world.run(engine_experts_3d.save, source, folder, 3)
    expected, losses = join([states for states, _ in answers], source), answers[0][1]
    for target in targets:
        with subtests.test(target=str(target)):
            parts = [part for (part,) in world.run(engine_experts_3d.load_each, target, [folder])]
            assert not isinstance(parts[0], str), parts[0]
            assert all(direct == (source != target) for direct, _, _ in parts)
            states = join([states for _, states, _ in parts], target)
            assert states.keys() == expected.keys()
            for (name, state), tensor in states.items():
                wanted = expected[name, "fp32"].to(tensor.dtype) if state == "copy" else expected[name, state]
                assert torch.equal(tensor, wanted), (name, state)
            if source.precision == target.precision == "fp32":
                assert parts[0][2] == pytest.approx(losses, rel=1e-5)


def test_degrees_that_stage_0_does_not_save_beside_tensor_parallelism(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    world = ucp_worlds.get(4)
    world.run(engine_experts_3d.save, Spread(4, 2, 2, 0, second=4), str(tmp_path), 1)
    for (told,) in world.run(engine_experts_3d.load_each, Spread(4, 2, 2, 1), [str(tmp_path)]):
        assert isinstance(told, str) and "several such degrees" in told, told
