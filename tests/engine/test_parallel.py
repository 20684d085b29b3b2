"""Ranks of live engines and live models' descriptions of their layout, with fake engines in one process."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.pipe import PipelineModule, TiedLayerSpec

from deepspeed_ucp.engine import parallel
from deepspeed_ucp.engine.coverage import UnknownLayoutError
from deepspeed_ucp.engine.parallel import ParallelState, find_parallel_state, live_attributes, live_universal_info
from deepspeed_ucp.errors import UnsupportedError
from deepspeed_ucp.extensions.experts import engine
from deepspeed_ucp.extensions.pipeline import TiedStages
from tests.support.direct import PLAIN
from tests.support.reshard import FakeTarget
from tests.synth import Topology


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Represent the data-parallel group by (rank, size)."""
    ranks = SimpleNamespace(get_rank=lambda group: group[0], get_world_size=lambda group: group[1])
    monkeypatch.setattr(parallel, "ds_comm", ranks)


def make_engine(mpu: Any = None, mp_world_size: int = 1, module: Any = None) -> Any:
    return SimpleNamespace(mpu=mpu, mp_world_size=mp_world_size, seq_data_parallel_group=(1, 3), module=module)


def make_mpu(**answers: int) -> Any:
    return SimpleNamespace(**{f"get_{name}": lambda value=value: value for name, value in answers.items()})


MEGATRON = make_mpu(
    model_parallel_rank=5,
    tensor_model_parallel_rank=1,
    tensor_model_parallel_world_size=2,
    pipeline_model_parallel_rank=2,
    pipeline_model_parallel_world_size=4,
)
SLICES = make_mpu(model_parallel_rank=1, slice_parallel_rank=1, slice_parallel_world_size=2)
OLDEST = make_mpu(model_parallel_rank=3, model_parallel_world_size=4)
STAGES = make_mpu(
    model_parallel_rank=1,
    slice_parallel_rank=0,
    slice_parallel_world_size=1,
    pipe_parallel_rank=1,
    pipe_parallel_world_size=2,
)


@pytest.mark.parametrize(
    ("mpu", "size", "mp_rank", "parallel"),
    [
        pytest.param(None, 1, 0, ParallelState(0, 1, 0, 1, 1, 3), id="none"),
        pytest.param(
            make_mpu(sequence_parallel_world_size=2), 1, 0, ParallelState(0, 1, 0, 1, 1, 3), id="sequence-only"
        ),
        pytest.param(MEGATRON, 8, 5, ParallelState(1, 2, 2, 4, 1, 3), id="megatron"),
        pytest.param(SLICES, 2, 1, ParallelState(1, 2, 0, 1, 1, 3), id="slices"),
        pytest.param(OLDEST, 4, 3, ParallelState(3, 4, 0, 1, 1, 3), id="oldest"),
        pytest.param(STAGES, 2, 1, ParallelState(0, 1, 1, 2, 1, 3), id="stages"),
    ],
)
def test_parallel_state_by_every_kind_of_mpu(mpu: Any, size: int, mp_rank: int, parallel: ParallelState) -> None:
    found = find_parallel_state(make_engine(mpu, size))
    assert found == parallel
    assert found.mp_rank == mp_rank


TENSOR_FIRST = SimpleNamespace(**{**vars(MEGATRON), "get_model_parallel_rank": lambda: 6})
"""An mpu that numbers tensor ranks before pipeline stages (axes model, pipe)."""

NO_STAGE = make_mpu(slice_parallel_rank=0, slice_parallel_world_size=1, pipe_parallel_world_size=2)


@pytest.mark.parametrize(
    ("mpu", "size", "words"),
    [
        (TENSOR_FIRST, 8, "rank 6 of 8 has pipeline stage 2 of 4 and tensor rank 1 of 2"),
        (NO_STAGE, 2, "get_pipeline_model_parallel_rank"),
    ],
)
def test_unsupported_mpus_are_refused(mpu: Any, size: int, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        find_parallel_state(make_engine(mpu, size))


def mark(parameter: torch.nn.Parameter, **marks: Any) -> torch.nn.Parameter:
    for name, value in marks.items():
        setattr(parameter, name, value)
    return parameter


def test_parameters_with_megatrons_attributes_are_found_without_autotps_mark() -> None:
    cut = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2, "partition_sizes": [1, 1]}
    whole = {"tensor_model_parallel": False}
    module, compiled = torch.nn.Module(), torch.nn.Module()
    module._orig_mod = compiled
    autotp = {"tensor_model_parallel": True, "ds_is_replaced_module": True}
    for name, marks in {"cut": cut, "whole": whole, "autotp": autotp, "plain": {}}.items():
        compiled.register_parameter(name, mark(torch.nn.Parameter(torch.zeros(2)), **marks))
    assert live_attributes(make_engine(module=module)) == {"cut": cut, "whole": whole}


class Slotted:
    __slots__ = ("holders", "shape")

    def __init__(self) -> None:
        self.shape, self.holders = (2, 3), frozenset({1, 0})


@dataclass
class Model:
    info: Any

    def universal_checkpoint_info(self) -> Any:
        return self.info


def test_universal_checkpoint_info_becomes_plain_data() -> None:
    info = {
        "parameter_with_sub_params": [SubparamShape(patterns=["^qkv$"], shape=((4, 2), -1), partition_dim=0)],
        "affine_map": {"params": {"^w$": Slotted()}},
        "original_vocab_size": torch.tensor(67),
        "numpy": [np.int64(5), np.array([1, 2])],
        "sets": {3, 1, 2},
        "size": torch.Size([2, 3]),
    }
    plain = {
        "parameter_with_sub_params": [
            {"__class__": "SubparamShape", "patterns": ["^qkv$"], "shape": ((4, 2), -1), "partition_dim": 0}
        ],
        "affine_map": {"params": {"^w$": {"__class__": "Slotted", "shape": (2, 3), "holders": [0, 1]}}},
        "original_vocab_size": 67,
        "numpy": [5, [1, 2]],
        "sets": [1, 2, 3],
        "size": [2, 3],
    }
    attribute = SimpleNamespace(universal_checkpoint_info=info)
    assert live_universal_info(make_engine(module=attribute)) == plain
    assert live_universal_info(make_engine(module=Model(info))) == plain
    for module in (SimpleNamespace(), Model(None)):
        assert live_universal_info(make_engine(module=module)) is None


@pytest.mark.parametrize(
    ("ranks", "lane", "words"),
    [([0, 1, 3], [0, 2, 4], "not evenly spaced"), ([0, 3], [0, 1, 2], "side by side")],
)
def test_unsupported_orders_of_ranks_are_refused(ranks: list[int], lane: list[int], words: str) -> None:
    with pytest.raises(UnknownLayoutError, match=words):
        engine._number_ranks(ranks, lane, ParallelState(0, 2, 0, 1, 0, 3), over_tp=True)


class Stage(PipelineModule):
    """A stage of a pipeline with a tied layer; one letter per stage: only H has a ``forward_fn``."""

    def __init__(self, letters: str, stage: int) -> None:
        torch.nn.Module.__init__(self)
        functions = {"E": None, "H": torch.nn.functional.linear}
        self._layer_specs = [TiedLayerSpec("k", torch.nn.Linear, 2, 2, forward_fn=functions[each]) for each in letters]
        self.tied_modules, self.tied_weight_attrs = torch.nn.ModuleDict({"k": torch.nn.Linear(2, 2)}), {"k": ["weight"]}
        self.stage_id = stage

    def stage_owner(self, layer_idx: int) -> int:
        return layer_idx


@pytest.mark.parametrize(
    ("letters", "stage", "found"),
    [
        ("EH", 0, ""),
        ("EH", 1, "bias"),
        ("EEH", 1, ""),
        ("HE", 0, "bias weight"),
        ("HE", 1, "weight"),  # the first stage's file overwrites it
        ("H", 0, "bias weight"),
    ],
)
def test_tied_parameters_without_a_layer_file_are_found(letters: str, stage: int, found: str) -> None:
    module = Stage(letters, stage)
    target: Any = SimpleNamespace(engine=SimpleNamespace(module=module))
    instances = TiedStages().find_instances(target)
    unfiled = {name for name, instance in instances.items() if not instance.is_filed}
    assert unfiled == {f"tied_modules.k.{name}" for name in found.split()}


def test_pipelines_with_experts_have_no_layer_files() -> None:
    target = FakeTarget(PLAIN, Topology(1), 0)
    target.engine, target.owned = SimpleNamespace(module=Stage("H", 0)), {"tied_modules.k.weight"}
    target.extensions = [TiedStages()]
    assert target.unfiled() == ["tied_modules.k.weight"]
    target.engine.has_moe_layers = True
    assert target.unfiled() == []


def test_experts_without_a_recorded_placement_are_in_rank_order() -> None:
    """AutoEP of DeepSpeed up to 0.19.5 records no placement."""
    layer = SimpleNamespace(ep_rank=1, num_local_experts=2)
    assert [*engine._list_autoep_experts(layer)] == [2, 3]
    layer.expert_placement_descriptor = {"ranks": [{"rank": 1, "experts": [2, 0]}, {"rank": 0, "experts": [1, 3]}]}
    assert [*engine._list_autoep_experts(layer)] == [2, 0]
