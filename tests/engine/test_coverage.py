"""Features of live engines that are refused in any topology, with fake engines."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ucp import rng
from deepspeed_ucp.engine.coverage import UnknownLayoutError, check_engine, list_pending, list_unsaved
from deepspeed_ucp.engine.engines import open_target
from deepspeed_ucp.errors import UnsupportedError
from tests.support.curriculum import make_sampler
from tests.support.reshard import FakeTarget
from tests.synth import Model, Param, Topology


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
