"""The base class of all targets; features of live engines that are refused in any topology, with fake engines."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ucp import rng
from deepspeed_ucp.engine import engines
from deepspeed_ucp.engine.base import flatten
from deepspeed_ucp.engine.coverage import UnknownLayoutError, check_engine, list_pending, list_unsaved
from deepspeed_ucp.engine.engines import OffloadOnlyTarget, Zero12Target, open_target
from deepspeed_ucp.errors import UnsupportedError
from deepspeed_ucp.extensions.nvme import Nvme
from tests.support.curriculum import make_sampler
from tests.support.reshard import FakeTarget
from tests.synth import Model, Param, Topology


def test_a_contiguous_tensor_becomes_a_view_of_one_dimension() -> None:
    tensor = torch.zeros(2, 3, requires_grad=True)
    flat = flatten(tensor)
    flat[4] = 1
    assert tensor[1, 1] == 1
    assert flatten(torch.zeros(3, 2).t()).shape == (2, 3)


def test_prefetched_partitions_are_released() -> None:
    """The load fills the file on NVMe. A partition in memory would replace it and is never written back."""
    target = FakeTarget(Model((Param("a", (2, 3)), Param("b", (4,)))), Topology(3), 0)
    released: list[Any] = []
    for status, param in zip(("AVAILABLE", "NOT_AVAILABLE"), target.params.values(), strict=True):
        swapper = SimpleNamespace(
            synchronize_reads=lambda: released.append("waited"), remove_partition_and_release_buffers=released.extend
        )
        param.nvme_swapper = swapper
        param.ds_tensor = SimpleNamespace(final_location="nvme", status=PartitionedParamStatus[status])
    target.extensions = [Nvme()]
    target.prepare()
    assert len(released) == 2 and released[0] == "waited" and released[1] is target.params["a"]


class Copies(TorchDispatchMode):
    """Records the number of elements of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_masters_are_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to a GPU needs memory for the conversion of one piece instead of a partition."""
    flat, master = torch.zeros(22, dtype=torch.bfloat16), torch.arange(11.0)
    target: Any = Zero12Target.__new__(Zero12Target)
    target.wrapper = "zero12"
    target.wrapped = SimpleNamespace(**{name: [None] for name in Zero12Target.attributes["zero12"]})
    target.wrapped.bit16_groups_flat, target.wrapped.single_partition_of_fp32_groups = [flat], [master]
    target.wrapped.parallel_partitioned_bit16_groups = [flat.view(2, 11)]
    monkeypatch.setattr(engines.ds_comm, "get_rank", lambda group: 1)
    monkeypatch.setattr(engines, "_PIECE", 4)
    with Copies() as copies:
        target.refresh_copies()
    assert flat.tolist() == [0.0] * 11 + master.tolist()
    assert copies.sizes == [4, 4, 3]


def test_copies_on_accelerators_are_gathered_by_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed moves them to the host if torch cannot gather an accelerator's tensors."""
    calls = list[Any]()
    monkeypatch.setattr(engines.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(engines.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(engines.ds_comm, "all_gather_into_tensor", lambda *args, group: calls.extend((*args, group)))
    flat = torch.zeros(6, device="meta")
    engines.gather_in_place(flat, "group")
    whole, part, group = calls
    assert (whole is flat, part.storage_offset(), part.numel(), group) == (True, 3, 3, "group")


def test_the_partitioning_degree_of_zero_3_for_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = OffloadOnlyTarget.__new__(OffloadOnlyTarget)
    target.wrapped = SimpleNamespace(dp_process_group="group")
    monkeypatch.setattr(engines.ds_comm, "get_world_size", lambda group: {"group": 2}[group])
    assert target.dp == 2


# --- features that are refused


class SuperOffloadOptimizer_Stage3:
    """DeepSpeed's wrapper by name."""


class ZenFlowZeroOptimizerParallel:
    """DeepSpeed's wrapper by name."""


def make_engine(optimizer: Any = None, *, zero: dict[str, Any] | None = None, **more: Any) -> Any:
    sections = {"offload_optimizer": None, "offload_param": None, **(zero or {})}
    config = SimpleNamespace(zero_config=SimpleNamespace(**sections))
    module = more.pop("module", torch.nn.Linear(2, 2))
    return SimpleNamespace(_config=config, module=module, optimizer=optimizer, **more)


def make_sharded_lora() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].lora_config, module[1].zero_shards = object(), 2
    return module


OFFLOADED = SimpleNamespace(offloaded_states=[SimpleNamespace(value="hp_params")])
PARTIAL = SimpleNamespace(backup_optimizer=object(), subgroup_to_device={0: "cuda", 1: "cpu"})


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        pytest.param(make_engine(ZenFlowZeroOptimizerParallel(), zenflow=True), ("ZenFlow",), id="zenflow"),
        pytest.param(make_engine(SuperOffloadOptimizer_Stage3()), ("SuperOffload", "another process"), id="super"),
        pytest.param(make_engine(OFFLOADED), ("offload_states", "(hp_params)", "reload_states()"), id="offloaded"),
        pytest.param(make_engine(PARTIAL), ("offload_optimizer.ratio", "(0)", "ratio 1"), id="partial offload"),
        pytest.param(make_engine(module=make_sharded_lora()), ("base_weight_sharding", "(1)"), id="lora"),
    ],
)
def test_state_that_no_load_restores_is_refused(engine: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        open_target(engine)
    assert not isinstance(caught.value, UnknownLayoutError)
    for word in (*words, '"universal": false'):
        assert word in str(caught.value)


def test_an_engine_of_an_unknown_layout_is_refused() -> None:
    with pytest.raises(UnknownLayoutError):
        open_target(make_engine(SimpleNamespace()))


def test_supported_engines_are_not_refused() -> None:
    muon = SimpleNamespace(use_muon=True, save_muon_momentum_buffer_in_memory=True)
    on_cpu = SimpleNamespace(backup_optimizer=object(), subgroup_to_device={0: "cpu"}, offloaded_states=set())
    check_engine(make_engine(on_cpu))
    for device in ("cpu", "nvme"):
        place = SimpleNamespace(device=SimpleNamespace(value=device))
        check_engine(make_engine(muon, zero={"offload_optimizer": place, "offload_param": place}, zenflow=False))


ONE_BIT = type("OnebitAdam", (), {})()


@pytest.mark.parametrize(
    ("engine", "listed"),
    [
        (make_engine(zero={"zero_quantized_nontrainable_weights": True}), ["zero_quantized_nontrainable_weights"]),
        (make_engine(zero={"zero_quantized_nontrainable_weights": False}), []),
        (make_engine(SimpleNamespace(optimizer=ONE_BIT)), ["1-bit optimizers"]),
        (make_engine(ONE_BIT), ["1-bit optimizers"]),
    ],
)
def test_unsaved_state_is_listed(engine: Any, listed: list[str]) -> None:
    assert [text.partition(":")[0] for text in list_unsaved(engine)] == listed


@pytest.mark.parametrize(("done", "boundary", "listed"), [(4, None, []), (5, None, ["1 of the 2"]), (5, True, [])])
def test_a_step_that_has_begun_is_listed(done: int, boundary: bool | None, listed: list[str]) -> None:
    """DeepSpeed keeps its gradients through a load, and ends the step one micro batch later."""
    engine = make_engine(micro_steps=done, gradient_accumulation_steps=lambda: 2)
    engine._is_gradient_accumulation_boundary = boundary
    assert [re.findall(r"\d of the \d", text) for text in list_pending(engine)] == [[each] for each in listed]
    assert list_pending(make_engine()) == []


def test_a_curriculum_sampler_is_listed_unless_it_is_followed(tmp_path: Path) -> None:
    engine = make_engine(training_dataloader=SimpleNamespace(data_sampler=make_sampler(tmp_path)))
    assert [text.partition(":")[0] for text in list_unsaved(engine)] == ["curriculum learning"]
    rng.follow(engine)
    assert list_unsaved(engine) == []


def test_secondary_copies_of_frozen_parameters_are_dropped() -> None:
    """DeepSpeed's ``invalidate_secondary_tensor`` drops only secondary copies of trained parameters."""
    target = FakeTarget(Model((Param("a", (2, 3)), Param("frozen", (4,), frozen=True))), Topology(3), 0)
    for param in target.params.values():
        param.ds_secondary_tensor = torch.ones(2)
    target.drop_secondary_copies()
    assert all(param.ds_secondary_tensor is None for param in target.params.values())
