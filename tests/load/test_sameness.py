"""What DeepSpeed's own load would not notice in an unchanged topology."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.load.job import LoadArguments
from deepspeed_ucp.load.resume import find_unnoticed
from deepspeed_ucp.targets.engines import Zero3Target
from tests.reshard import FakeTarget, open_for
from tests.synth import Model, Param, Topology, random_state, write_checkpoint


class ShardedTarget(FakeTarget):
    """What ZeRO 3 says itself."""

    list_lost_weights = Zero3Target.list_lost_weights
    _find_fresh = Zero3Target._find_fresh


MODEL = Model((Param("a", (7, 13)), Param("frozen", (4, 3), frozen=True)))
ALL = LoadArguments()


def find(folder: Path, saved: Model, live: Model, stage: int, optimizer: Any = None, arguments: Any = ALL) -> list[str]:
    """One rank's differences between a checkpoint and a target of the same topology."""
    topology = Topology(stage)
    path = write_checkpoint(folder, saved, random_state(saved, 0), topology)
    kind = ShardedTarget if stage == 3 else FakeTarget
    target = kind(live, topology, 0, optimizer or torch.optim.AdamW)
    return find_unnoticed(open_for(path, target), target, arguments)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_of_the_same_engine(stage: int, tmp_path: Path) -> None:
    assert find(tmp_path, MODEL, MODEL, stage) == []


def test_a_parameter_that_no_optimizer_owns_and_no_file_holds(tmp_path: Path) -> None:
    live = Model((*MODEL.params, Param("new", (3,), frozen=True)))
    assert find(tmp_path / "strict", MODEL, live, 3) == [
        "new is not in the checkpoint as a parameter without optimizer"
    ]
    assert find(tmp_path / "lenient", MODEL, live, 3, arguments=LoadArguments(load_module_strict=False)) == []


def test_a_frozen_parameter_of_equal_size_and_another_shape(tmp_path: Path) -> None:
    live = Model((Param("a", (7, 13)), Param("frozen", (3, 4), frozen=True)))
    assert find(tmp_path, MODEL, live, 3) == ["frozen has another shape"]


@pytest.mark.parametrize("key", ["load_optimizer_states", "load_module_only"])
def test_weights_alone_of_zero_3(key: str, tmp_path: Path) -> None:
    arguments = LoadArguments(**{key: key == "load_module_only"})
    assert find(tmp_path / "3", MODEL, MODEL, 3, arguments=arguments) == ["weights alone of ZeRO 3"]
    assert find(tmp_path / "2", MODEL, MODEL, 2, arguments=arguments) == []


def test_masters_in_a_load_of_the_weights_alone_without_zero(tmp_path: Path) -> None:
    """Under load_module_only DeepSpeed makes them of the loaded copies, else they stay what they are."""
    told = ["masters in a load of the weights alone"]
    for kind, expected in (("fused", told), ("unfused", told), ("raw", [])):
        topology = Topology(0, 1, "fp32" if kind == "raw" else "bf16", kind)
        path = write_checkpoint(tmp_path / kind, MODEL, random_state(MODEL, 0), topology)
        target = FakeTarget(MODEL, topology, 0)
        index = open_for(path, target)
        assert find_unnoticed(index, target, LoadArguments(load_optimizer_states=False)) == expected
        for arguments in (ALL, LoadArguments(load_module_only=True)):
            assert find_unnoticed(index, target, arguments) == []


def test_model_states_of_an_earlier_save(tmp_path: Path) -> None:
    """Of more tensor-parallel ranks: DeepSpeed's own load counts the files."""
    path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1))
    target = FakeTarget(MODEL, Topology(1), 0)
    assert find_unnoticed(open_for(path, target), target, ALL) == []
    shutil.copy(path / "mp_rank_00_model_states.pt", path / "mp_rank_01_model_states.pt")
    assert "of an earlier save" in find_unnoticed(open_for(path, target), target, ALL)[0]


def make_amsgrad(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, amsgrad=True)


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (make_amsgrad, ["optimizer states exp_avg, exp_avg_sq → exp_avg, exp_avg_sq, max_exp_avg_sq"]),
        (torch.optim.SGD, ["optimizer states exp_avg, exp_avg_sq → none"]),
        (torch.optim.RMSprop, ["optimizer states exp_avg, exp_avg_sq → square_avg"]),
        (torch.optim.Adam, []),
    ],
)
def test_an_optimizer_of_another_kind(optimizer: Any, told: list[str], tmp_path: Path) -> None:
    assert find(tmp_path, MODEL, MODEL, 1, optimizer) == told


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="torch 2.5")
def test_a_factored_state_of_one_row_is_no_other_optimizer(tmp_path: Path) -> None:
    """Its rows are one element, as a step is."""
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
    assert find_unnoticed(open_for(path, target), target, ALL) == []
