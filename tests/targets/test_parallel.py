"""Where a rank stands, and what a live model tells: over stand-ins for engines, without processes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.pipe import PipelineModule, TiedLayerSpec

from deepspeed_ucp.errors import UnsupportedError
from deepspeed_ucp.targets import Place, find_place, live_attributes, live_universal_info, parallel
from deepspeed_ucp.targets.coverage import UnknownLayoutError
from deepspeed_ucp.targets.parallel import find_unfiled


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data-parallel group is a (rank, size) here."""
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
    ("mpu", "size", "mp_rank", "place"),
    [
        pytest.param(None, 1, 0, Place(0, 1, 0, 1, 1, 3), id="none"),
        pytest.param(make_mpu(sequence_parallel_world_size=2), 1, 0, Place(0, 1, 0, 1, 1, 3), id="sequence-only"),
        pytest.param(MEGATRON, 8, 5, Place(1, 2, 2, 4, 1, 3), id="megatron"),
        pytest.param(SLICES, 2, 1, Place(1, 2, 0, 1, 1, 3), id="slices"),
        pytest.param(OLDEST, 4, 3, Place(3, 4, 0, 1, 1, 3), id="oldest"),
        pytest.param(STAGES, 2, 1, Place(0, 1, 1, 2, 1, 3), id="stages"),
    ],
)
def test_every_kind_of_mpu_is_understood(mpu: Any, size: int, mp_rank: int, place: Place) -> None:
    found = find_place(make_engine(mpu, size))
    assert found == place
    assert found.mp_rank == mp_rank


def test_another_numbering_of_ranks_is_refused() -> None:
    """A topology with the axes model, pipe numbers tensor ranks first."""
    mpu = SimpleNamespace(**{**vars(MEGATRON), "get_model_parallel_rank": lambda: 6})
    with pytest.raises(UnsupportedError, match=r"rank 6 of 8 has pipeline stage 2 of 4 and tensor rank 1 of 2"):
        find_place(make_engine(mpu, 8))


def test_pipeline_stages_need_a_rank() -> None:
    mpu = make_mpu(slice_parallel_rank=0, slice_parallel_world_size=1, pipe_parallel_world_size=2)
    with pytest.raises(UnsupportedError, match="get_pipeline_model_parallel_rank"):
        find_place(make_engine(mpu, 2))


def mark(parameter: torch.nn.Parameter, **marks: Any) -> torch.nn.Parameter:
    for name, value in marks.items():
        setattr(parameter, name, value)
    return parameter


def test_megatrons_attributes_but_not_autotps_mark() -> None:
    module = torch.nn.Module()
    cut = mark(torch.nn.Parameter(torch.zeros(2)), tensor_model_parallel=True, partition_dim=0, partition_stride=2)
    cut = mark(cut, partition_sizes=[1, 1])
    whole = mark(torch.nn.Parameter(torch.zeros(2)), tensor_model_parallel=False)
    autotp = mark(torch.nn.Parameter(torch.zeros(2)), tensor_model_parallel=True, ds_is_replaced_module=True)
    for name, parameter in {"cut": cut, "whole": whole, "autotp": autotp}.items():
        module.register_parameter(name, parameter)
    module.register_parameter("plain", torch.nn.Parameter(torch.zeros(2)))
    assert live_attributes(make_engine(module=module)) == {
        "cut": {
            "tensor_model_parallel": True,
            "partition_dim": 0,
            "partition_stride": 2,
            "partition_sizes": [1, 1],
        },
        "whole": {"tensor_model_parallel": False},
    }


def test_names_are_those_of_atoms() -> None:
    module = torch.nn.Module()
    module._orig_mod = torch.nn.Module()
    module._orig_mod.weight = mark(torch.nn.Parameter(torch.zeros(2)), tensor_model_parallel=True, partition_dim=1)
    assert live_attributes(make_engine(module=module)) == {
        "weight": {"tensor_model_parallel": True, "partition_dim": 1}
    }


class Slotted:
    __slots__ = ("holders", "shape")

    def __init__(self) -> None:
        self.shape, self.holders = (2, 3), frozenset({1, 0})


@dataclass
class Model:
    """A model with the method that Megatron-DeepSpeed's have."""

    told: Any

    def universal_checkpoint_info(self) -> Any:
        return self.told


def test_information_becomes_plain_data() -> None:
    told = {
        "parameter_with_sub_params": [SubparamShape(patterns=["^qkv$"], shape=((4, 2), -1), partition_dim=0)],
        "affine_map": {"params": {"^w$": Slotted()}},
        "original_vocab_size": torch.tensor(67),
        "sets": {3, 1, 2},
        "size": torch.Size([2, 3]),
    }
    plain = {
        "parameter_with_sub_params": [
            {"__class__": "SubparamShape", "patterns": ["^qkv$"], "shape": ((4, 2), -1), "partition_dim": 0}
        ],
        "affine_map": {"params": {"^w$": {"__class__": "Slotted", "shape": (2, 3), "holders": [0, 1]}}},
        "original_vocab_size": 67,
        "sets": [1, 2, 3],
        "size": [2, 3],
    }
    attribute = SimpleNamespace(universal_checkpoint_info=told)
    assert live_universal_info(make_engine(module=attribute)) == plain
    assert live_universal_info(make_engine(module=Model(told))) == plain


@pytest.mark.parametrize("module", [SimpleNamespace(), Model(None)], ids=["no-attribute", "none"])
def test_models_without_information(module: Any) -> None:
    assert live_universal_info(make_engine(module=module)) is None


@pytest.mark.parametrize(
    ("ranks", "lane", "place", "over_tp", "expected"),
    [
        ([4, 6], [4, 6], Place(0, 2, 1, 2, 0, 2), False, [0, 2]),  # a lane's own, of the second stage
        ([5], [5, 7], Place(1, 2, 1, 2, 0, 2), False, [1]),
        ([0, 4], [0, 2, 4, 6], Place(0, 2, 0, 1, 0, 4), False, [0, 4]),
        ([5, 6], [5, 7], Place(1, 2, 1, 2, 0, 2), True, [1, 2]),  # across both
        ([0, 1, 2, 3], [1, 3], Place(1, 2, 0, 1, 0, 2), True, [0, 1, 2, 3]),
        ([3], [0, 2, 1, 3], Place(0, 1, 0, 1, 3, 4), False, [3]),  # in the group's own order
    ],
)
def test_ranks_are_numbered_through_their_stage(
    ranks: list[int], lane: list[int], place: Place, expected: list[int], *, over_tp: bool
) -> None:
    assert list(parallel._number_ranks(ranks, lane, place, over_tp=over_tp)) == expected


@pytest.mark.parametrize(
    ("ranks", "lane", "over_tp", "told"),
    [([0, 1, 3], [0, 2, 4], True, "not evenly spaced"), ([0, 3], [0, 1, 2], True, "side by side")],
)
def test_ranks_whose_order_is_not_known(ranks: list[int], lane: list[int], told: str, *, over_tp: bool) -> None:
    with pytest.raises(UnknownLayoutError, match=told):
        parallel._number_ranks(ranks, lane, Place(0, 2, 0, 1, 0, 3), over_tp=over_tp)


class Stage(PipelineModule):
    """A pipeline stage with a tied layer. H: a use with a ``forward_fn``, E: one without; a stage for each letter."""

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
        ("HE", 1, "weight"),  # the first stage's comes over it
        ("H", 0, "bias weight"),
    ],
)
def test_parameters_of_tied_modules_that_are_in_no_layer_file(letters: str, stage: int, found: str) -> None:
    module = Stage(letters, stage)
    assert find_unfiled(make_engine(module=module)) == {f"tied_modules.k.{name}" for name in found.split()}
    assert find_unfiled(SimpleNamespace(module=module, has_moe_layers=True)) == set()


def test_experts_of_a_layer_that_tells_no_placement_are_in_order() -> None:
    """AutoEP's to 0.19.5."""
    layer = SimpleNamespace(ep_rank=1, num_local_experts=2)
    assert [*parallel._list_fused(layer)] == [2, 3]
    layer.expert_placement_descriptor = {"ranks": [{"rank": 1, "experts": [2, 0]}, {"rank": 0, "experts": [1, 3]}]}
    assert [*parallel._list_fused(layer)] == [2, 0]
