"""Reasons in a save not to leave an unchanged topology to DeepSpeed's load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.engine.known import _list_other_frozen
from tests.support.reshard import FakeTarget, open_for
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (7, 13)), Param("frozen", (4, 3), frozen=True)))


def find(folder: Path, stage: int, optimizer: Any) -> list[str]:
    """Describe how an optimizer differs from the saved one."""
    topology = Topology(stage)
    path = write_checkpoint(folder, MODEL, random_state(MODEL, 0), topology)
    target = FakeTarget(MODEL, topology, 0, optimizer)
    return list(target.find_other_kinds(open_for(path, target)))


def test_files_of_another_writer(tmp_path: Path) -> None:
    """DeepSpeed's other writers use other file names, or files that its load does not read."""
    path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1))
    files = {file: torch.load(file, weights_only=False) for file in path.glob("*_states.pt")}
    target = FakeTarget(MODEL, Topology(1), 0)
    assert open_for(path, target).unnoticed == ()
    for config in ({"checkpoint": {"writer": {"type": "fast"}}}, {"datastates_ckpt": {"host_cache_size": 1}}):
        for file, tree in files.items():
            torch.save({**tree, "ds_config": {**tree["ds_config"], **config}}, file)
        assert len(open_for(path, target).unnoticed) == 1


def test_model_states_of_an_earlier_save(tmp_path: Path) -> None:
    """An earlier save had more tensor-parallel ranks: DeepSpeed's load counts the files."""
    path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1))
    target = FakeTarget(MODEL, Topology(1), 0)
    assert open_for(path, target).unnoticed == ()
    shutil.copy(path / "mp_rank_00_model_states.pt", path / "mp_rank_01_model_states.pt")
    assert "of an earlier save" in open_for(path, target).unnoticed[0]


OPEN = (
    "The checkpoint does not record whether the saved run's Adam decoupled its weight decay (0.01), as AdamW does; "
    "this run's Adam does not. Use the same kind of Adam as the saved run."
)
"""For groups of torch before 2.7."""


def make_amsgrad(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, amsgrad=True)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (make_amsgrad, ["optimizer states exp_avg, exp_avg_sq → exp_avg, exp_avg_sq, max_exp_avg_sq"]),
        (torch.optim.SGD, ["optimizer states exp_avg, exp_avg_sq → none"]),
        (torch.optim.RMSprop, ["optimizer states exp_avg, exp_avg_sq → square_avg"]),
        (torch.optim.AdamW, []),
        (torch.optim.Adam, [OPEN]),  # the direct load reports it
        (torch.optim.RAdam, ["the saved param groups are like those of Adam, this run's optimizer is RAdam"]),
    ],
)
def test_an_optimizer_of_another_kind(optimizer: Any, expected: list[str], tmp_path: Path) -> None:
    assert find(tmp_path, 1, optimizer) == expected


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="torch 2.5")
def test_a_factored_state_of_one_row_is_no_other_optimizer(tmp_path: Path) -> None:
    """Its rows have one element, like a step."""
    model, topology = Model((Param("token", (1, 3)), Param("a", (4, 3)))), Topology(0)
    path = write_checkpoint(tmp_path, model, random_state(model, 0), topology)
    params = [torch.nn.Parameter(torch.ones(param.shape)) for param in model.params]
    optimizer = torch.optim.Adafactor(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    (file,) = path.glob("*model_states.pt")
    torch.save({**torch.load(file, weights_only=False), "optimizer": optimizer.state_dict()}, file)
    target = FakeTarget(model, topology, 0, torch.optim.Adafactor)
    assert list(target.find_other_kinds(open_for(path, target))) == []


def test_parameters_that_were_not_frozen_in_the_save(tmp_path: Path) -> None:
    """DeepSpeed's load only compares the sizes of ZeRO 3's frozen parameters."""
    topology = Topology(3)
    index = open_for(
        write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), topology), FakeTarget(MODEL, topology, 0)
    )
    found = {}
    for name, param in {"saved": (4, 3), "shape": (3, 4)}.items():
        target = FakeTarget(Model((MODEL.params[0], Param("frozen", param, frozen=True))), topology, 0)
        found[name] = list(_list_other_frozen(target, index))
    thawed = FakeTarget(Model((Param("a", (7, 13), frozen=True), Param("frozen", (4, 3)))), topology, 0)
    assert found == {"saved": [], "shape": ["frozen, which was saved in another shape"]}
    assert list(_list_other_frozen(thawed, index)) == ["a, which was not saved as a parameter without optimizer"]
