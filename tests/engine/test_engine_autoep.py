"""AutoEP's experts under other expert-parallel degrees, numbers of ranks, stages and precisions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from tests.releases import find_reason
from tests.support.covering import params
from tests.support.engines.going_on import Saves, States

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="DeepSpeed before 0.19 has no AutoEP")

from tests.support.engines import autoep as engine_autoep
from tests.support.engines.autoep import Spread, join

SOURCES = [
    Spread(4, 1, "bf16", 2),
    Spread(4, 2, "fp32", 4),
    Spread(2, 1, "fp32", 1),
    Spread(4, 2, "bf16", 2, data_first=True),
    Spread(4, 3, "bf16", 2),
    Spread(4, 3, "fp32", 4),
    Spread(2, 3, "fp32", 1, options=(("sub_group_size", 100),)),
    Spread(4, 1, "fp32", 2, tp=2),
    Spread(4, 2, "bf16", 4, tp=2),
    Spread(4, 3, "bf16", 2, tp=2),
    Spread(4, 0, "fp32", 4, tp=2),
    Spread(4, 0, "bf16", 2),
    Spread(4, 1, "bf16", 2, tp=4),  # every expert has files of two tensor-parallel ranks
    Spread(4, 0, "fp32", 2, tp=4),
    Spread(4, 1, "fp32", 2, pp=2),
    Spread(4, 0, "bf16", 2, pp=2),
    Spread(4, 0, "fp32", 2, pp=2),
]

TARGETS = [
    Spread(4, 1, "bf16", 2),
    Spread(4, 1, "fp32", 4),
    Spread(2, 2, "bf16", 2),
    Spread(1, 1, "fp32", 1),
    Spread(4, 3, "bf16", 2),
    Spread(4, 3, "fp32", 2, data_first=True),
    Spread(2, 3, "fp32", 2, options=(("stage3_param_persistence_threshold", 0),)),
    Spread(4, 3, "fp32", 1),
    Spread(4, 1, "bf16", 4, tp=2),
    Spread(4, 3, "fp32", 2, tp=2),
    Spread(4, 0, "bf16", 2, tp=2),
    Spread(2, 0, "fp32", 2),
    Spread(4, 2, "fp32", 4, tp=4),
    Spread(4, 1, "fp32", 1, pp=2),
    Spread(4, 0, "bf16", 2, pp=2),
]


CHOSEN = [
    (TARGETS[target], tuple(SOURCES[place] for place in places))
    for target, places in ((0, (4, 8, 14)), (4, (0, 10)), (8, (4, 14)), (11, (0, 8)))
]
"""One of each kind; the others are exhaustive."""
if find_reason("autoep/others"):
    CHOSEN = [(target, tuple(SOURCES[:4])) for target in TARGETS[:4]]

EVERY = [*CHOSEN, *((target, tuple(SOURCES)) for target in TARGETS)]


def name_row(row: tuple[Spread, tuple[Spread, ...]]) -> str:
    return f"{row[0]}-from-{len(row[1])}"


@pytest.fixture(scope="module")
def saved(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    def save(spread: Spread, number: int) -> tuple[str, States, list[float]]:
        folder = str(tmp_path_factory.mktemp("autoep"))
        answers = ucp_worlds.get(spread.world).run(engine_autoep.save, spread, folder, 10 * number)
        return folder, join([states for states, _ in answers], spread), answers[0][1]

    return Saves(save)


@pytest.mark.releases
@pytest.mark.parametrize(("target", "sources"), params(CHOSEN, EVERY, name_row))
def test_every_expert_comes_back(
    target: Spread, sources: tuple[Spread, ...], saved: Saves, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    folders = [saved[source][0] for source in sources]
    answers = ucp_worlds.get(target.world).run(engine_autoep.load_each, target, folders)
    for place, source in enumerate(sources):
        with subtests.test(source=str(source)):
            (_, expected, losses), parts = saved[source], [answer[place] for answer in answers]
            assert not isinstance(parts[0], str), parts[0]
            lost = target.stage == 0 and target.precision == "bf16" and target.pp > 1  # BF16_Optimizer, without ZeRO
            assert all(direct == (source != target or lost) for direct, _, _ in parts)
            states = join([states for _, states, _ in parts], target)
            assert states.keys() == expected.keys()
            for (name, state), tensor in states.items():
                wanted = expected[name, "fp32"].to(tensor.dtype) if state == "copy" else expected[name, state]
                assert torch.equal(tensor, wanted.to(tensor.dtype)), (name, state)
            if source.precision == target.precision == "fp32":
                assert parts[0][2] == pytest.approx(losses, abs=1e-7)


def test_frozen_experts_come_back(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """They are in the experts' files alone; at ZeRO 2 DeepSpeed's own load gives every rank the first one's."""
    source, folder = Spread(2, 2, "fp32", 2), str(tmp_path)
    answers = ucp_worlds.get(2).run(engine_autoep.save, source, folder, 1, frozen=True)
    expected = join([states for states, _ in answers], source)
    for target in (Spread(2, 1, "fp32", 1), source):
        answers = ucp_worlds.get(2).run(engine_autoep.load_each, target, [folder], frozen=True)
        assert all(not isinstance(answer, str) for (answer,) in answers), answers[0]
        states = join([states for ((_, states, _),) in answers], target)
        assert states.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in states.items())


MOVED = {0: 2, 1: 0, 2: 3, 3: 1}
"""By place among the experts that two ranks hold, two each, the expert that lies there."""


def move_experts(folder: Path) -> None:
    """Let a save of two expert-parallel ranks tell that other experts lie where they do."""
    for path in folder.rglob("*_model_states.pt"):
        tree = torch.load(path, weights_only=False)
        for layer in tree.get("ds_autoep_layers", ()):
            layer["affine_maps"] = {}
            for each in layer["expert_placement"]["ranks"]:
                each["experts"] = [MOVED[expert] for expert in each["experts"]]
        torch.save(tree, path)


def test_the_placement_tells_where_an_expert_lies(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    world = ucp_worlds.get(4)
    source = Spread(4, 3, "fp32", 2)
    answers = world.run(engine_autoep.save, source, str(tmp_path), 1)
    expected = join([states for states, _ in answers], source)
    move_experts(tmp_path)
    answers = world.run(engine_autoep.load_each, Spread(4, 2, "fp32", 4), [str(tmp_path)])
    states = join([states for ((_, states, _),) in answers], source)
    for (name, state), tensor in expected.items():
        param, dot, number = name.rpartition(".")
        moved = f"{param}{dot}{MOVED[int(number)]}" if number.isdigit() else name
        assert torch.equal(states[moved, state], tensor), (name, state)


def test_a_placement_that_the_copies_contradict_is_refused(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    world = ucp_worlds.get(4)
    world.run(engine_autoep.save, Spread(4, 1, "bf16", 2), str(tmp_path), 1)
    move_experts(tmp_path)
    for (told,) in world.run(engine_autoep.load_each, Spread(4, 1, "bf16", 4), [str(tmp_path)]):
        assert isinstance(told, str) and "its fp32 weights are not those of the model states" in told, told


def test_a_rank_of_other_experts_is_refused(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """ZeRO 3 has no copies to compare with."""
    world = ucp_worlds.get(4)
    world.run(engine_autoep.save, Spread(4, 3, "bf16", 2), str(tmp_path), 1)
    path = next(tmp_path.rglob("zero_pp_rank_1_mp_rank_00_model_states.pt"))
    tree = torch.load(path, weights_only=False)
    tree["ds_autoep_layers"][0]["ep_rank"] = 0
    torch.save(tree, path)
    for (told,) in world.run(engine_autoep.load_each, Spread(4, 1, "bf16", 4), [str(tmp_path)]):
        assert isinstance(told, str) and "is of expert-parallel rank 0" in told, told


MUON = [
    Spread(4, 1, "bf16", 2, muon=True),
    Spread(4, 2, "bf16", 4, tp=2, muon=True),
    Spread(2, 3, "bf16", 2, muon=True),
    Spread(2, 0, "bf16", 1, muon=True),
]


MUON_CHOSEN = [(MUON[0], (MUON[1],))]
MUON_ROWS = [(each, tuple(MUON)) for each in [*MUON, Spread(1, 2, "bf16", 1, muon=True)]]


@pytest.mark.parametrize(("target", "sources"), params(MUON_CHOSEN, [*MUON_CHOSEN, *MUON_ROWS], name_row))
def test_momentum_of_experts_comes_back(
    target: Spread, sources: tuple[Spread, ...], tmp_path: Path, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    """ZeRO 1 and 2 keep that of a rank's whole tensor where its partition touches one of the experts in it."""
    for source in sources:
        folder = str(tmp_path / str(source))
        answers = ucp_worlds.get(source.world).run(engine_autoep.save, source, folder, 1)
        expected = join([states for states, _ in answers], source)
        assert any(state == "momentum_buffer" and ".experts." in name for name, state in expected)
        answers = ucp_worlds.get(target.world).run(engine_autoep.load_each, target, [folder])
        with subtests.test(source=str(source)):
            if source.stage == 0 and target.tp > 1:  # Muon sorts by size, and cut matrices have another one
                assert all("the param groups differ" in told for (told,) in answers)
                continue
            assert all(not isinstance(answer, str) for (answer,) in answers), answers[0]
            states = join([states for ((_, states, _),) in answers], target)
            assert states.keys() == expected.keys()
            for (name, state), tensor in states.items():
                wanted = expected[name, "fp32"] if state == "copy" else expected[name, state]
                if state == "momentum_buffer" and target.stage == 3:
                    wanted = wanted.bfloat16()  # as ZeRO 3 keeps it, whatever dtype it is read in
                assert torch.equal(tensor, wanted.to(tensor.dtype)), (name, state)


def test_a_file_of_another_expert_parallel_rank_is_refused(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Under AutoTP every file tells the ranks that wrote it."""
    world = ucp_worlds.get(4)
    world.run(engine_autoep.save, Spread(4, 1, "fp32", 2, tp=2), str(tmp_path), 1)
    path = next(tmp_path.rglob("zero_pp_rank_1_mp_rank_01_optim_states.pt"))
    tree = torch.load(path, weights_only=False)
    tree["folding"]["ep_rank"] = 0
    torch.save(tree, path)
    for (told,) in world.run(engine_autoep.load_each, Spread(4, 1, "fp32", 4, tp=2), [str(tmp_path)]):
        assert isinstance(told, str) and f"{path.name}: is of tensor- and expert-parallel rank (1, 0)" in told, told
