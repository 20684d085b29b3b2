"""AutoEP's experts under other expert-parallel degrees, numbers of ranks, stages and precisions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.releases import find_reason
from tests.support.engines.driver import Engines, Refusal, edit, list_rows

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="DeepSpeed before 0.19 has no AutoEP")

from tests.support.engines.autoep import Spread

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


CHOSEN: dict[int, Sequence[int]] = {0: (4, 8, 14), 4: (0, 10), 8: (4, 14), 11: (0, 8)}
"""One of each kind."""
if find_reason("autoep/others"):
    CHOSEN = dict.fromkeys(range(4), range(4))


@pytest.mark.releases
@pytest.mark.parametrize(("target", "sources"), list_rows(TARGETS, SOURCES, CHOSEN))
def test_every_expert_comes_back(
    target: Spread, sources: tuple[Spread, ...], engines: Engines, subtests: pytest.Subtests
) -> None:
    engines.go_on(target, sources, subtests)


def test_frozen_experts_come_back(engines: Engines) -> None:
    """They are in the experts' files alone; at ZeRO 2 DeepSpeed would load rank 0's on every rank."""
    source = Spread(2, 2, "fp32", 2)
    saved = engines.save(source, frozen=True)
    for target in (Spread(2, 1, "fp32", 1), source):
        (outcome,) = engines.load(target, saved.folder, frozen=True)
        outcome.check(target, source, saved, direct=True)


MOVED = {0: 2, 1: 0, 2: 3, 3: 1}
"""New expert at each position of two ranks with two experts each."""


def move_experts(folder: Path) -> None:
    """Change the placement of experts in a save of two expert-parallel ranks."""

    def move(tree: Any) -> None:
        for layer in tree.get("ds_autoep_layers", ()):
            layer["affine_maps"] = {}
            for each in layer["expert_placement"]["ranks"]:
                each["experts"] = [MOVED[expert] for expert in each["experts"]]

    for path in folder.rglob("*_model_states.pt"):
        edit(path, move)


def test_the_placement_tells_where_an_expert_lies(tmp_path: Path, engines: Engines) -> None:
    source, target = Spread(4, 3, "fp32", 2), Spread(4, 2, "fp32", 4)
    saved = engines.save(source, tmp_path)
    move_experts(tmp_path)
    (outcome,) = engines.load(target, tmp_path)
    for (name, state), tensor in saved.states.items():
        param, dot, number = name.rpartition(".")
        moved = f"{param}{dot}{MOVED[int(number)]}" if number.isdigit() else name
        assert torch.equal(outcome.states[moved, state], tensor), (name, state)


MODEL = "zero_pp_rank_1_mp_rank_00_model_states.pt"
REFUSED = {
    "placement-that-the-copies-contradict": Refusal(
        Spread(4, 1, "bf16", 2),
        (Spread(4, 1, "bf16", 4),),
        ("its fp32 weights differ from the model states",),
        damage=move_experts,
    ),
    "rank-of-other-experts": Refusal(  # ZeRO 3 has no copies to compare
        Spread(4, 3, "bf16", 2),
        (Spread(4, 1, "bf16", 4),),
        ("is of expert-parallel rank 0",),
        damage=lambda folder: edit(
            next(folder.rglob(MODEL)), lambda tree: tree["ds_autoep_layers"][0].update(ep_rank=0)
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, engines: Engines, tmp_path: Path) -> None:
    REFUSED[name].check(engines, tmp_path)


MUON = [
    Spread(4, 1, "bf16", 2, muon=True),
    Spread(4, 2, "bf16", 4, tp=2, muon=True),
    Spread(2, 3, "bf16", 2, muon=True),
    Spread(2, 0, "bf16", 1, muon=True),
]


MUON_TARGETS = [*MUON, Spread(1, 2, "bf16", 1, muon=True)]


@pytest.mark.parametrize(("target", "sources"), list_rows(MUON_TARGETS, MUON, {0: (1,)}))
def test_momentum_of_experts_comes_back(
    target: Spread, sources: tuple[Spread, ...], engines: Engines, subtests: pytest.Subtests
) -> None:
    """ZeRO 1 and 2 keep the momentum of a whole tensor if the partition contains a part of its experts."""
    engines.go_on(target, sources, subtests)
    for source in sources:
        states = engines.saved(source).states
        assert any(state == "momentum_buffer" and ".experts." in name for name, state in states)
