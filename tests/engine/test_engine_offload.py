"""Engines with states on unusual devices: restored states, and refusals."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.covering import params
from tests.support.engines.cases import Case, make_engine, train_engine
from tests.support.engines.driver import Engines
from tests.support.engines.kinds import ON_CPU
from tests.support.engines.ranks import Load
from tests.support.engines.standins import Stood

pytest.importorskip("deepspeed.runtime.zenflow", reason="DeepSpeed before ZenFlow and SuperOffload")
pytestmark = pytest.mark.timeout(600)  # DeepSpeed compiles an operator at the first time

WEIGHTS = {"load_optimizer_states": False}
PLAIN = {"model": "plain", "optimizer": "cpu_adam"}
CPU = {"device": "cpu"}
PARTIAL = Stood(3, 2, "bf16", "split", zero={"offload_optimizer": {**CPU, "ratio": 0.5}, "sub_group_size": 9})
SUPER = Stood(3, 2, "bf16", "superoffload", zero={**PARTIAL.zero, "offload_optimizer": {**CPU, "super_offload": True}})
MOMENTS = [(PARTIAL, "offload_optimizer.ratio", "ratio 0.5 kept it"), (SUPER, "SuperOffload", "SuperOffload kept it")]


@pytest.mark.parametrize(("kind", "engine", "words"), params(MOMENTS[:1], MOMENTS, lambda row: str(row[0])))
def test_moments_that_deepspeed_omits_are_refused(kind: Stood, engine: str, words: str, engines: Engines) -> None:
    """DeepSpeed neither saves nor loads them. Only the weights can be restored."""
    saved = engines.save(kind.on(), **PLAIN)
    (refused,) = engines.load(kind, saved.folder, **PLAIN)
    refused.check_refused("UnsupportedError", engine)
    loads = [Load(str(saved.folder)), Load(str(saved.folder), WEIGHTS)]
    refused, taken = engines.load(Case(1, 3, "bf16"), *loads, **PLAIN)
    refused.check_refused("MismatchError", words)
    taken.check(saved, direct=True, optimizer_states=False)


def save_offloaded(ds_config: dict[str, Any], folders: tuple[str, str], **options: Any) -> list[CapturedEngine]:
    """Save with offloaded states, and again after they are reloaded and the engine has trained further."""
    engine = make_engine(ds_config, **options)
    trained = train_engine(engine)
    train_steps(trained, 2)
    engine.offload_states()
    engine.save_checkpoint(folders[0])
    engine.reload_states()
    states = [capture(engine)]
    train_steps(trained, 1)
    engine.save_checkpoint(folders[1])
    states.append(capture(engine))
    for each in (held for state in states for held in state.parameters.values()):
        each.tensors = {name: tensor for name, tensor in each.tensors.items() if not name.endswith("_offload_buffer")}
    engine.destroy()
    return states


@pytest.mark.parametrize("stage", params([3], [2, 3]))
def test_a_save_with_offloaded_states_is_restored(stage: int, tmp_path: Path, engines: Engines) -> None:
    """`engine.offload_states` leaves copies in the states of ZeRO 3, which are stale after the next step."""
    options = {"model": "plain", "optimizer": "fused_adam"}
    folders = (str(tmp_path / "away"), str(tmp_path / "back"))
    states = engines.worlds.get(2).run(save_offloaded, Case(stage, 2).on().ds_config, folders, **options)[0]
    found = engines.load(Case(1, 3), Load(folders[0]), Load(folders[1], steps=2), **options)
    assert [compare(state, each.state)[1] for state, each in zip(states, found, strict=True)] == [[], []]
    for refused in engines.load(Stood(stage, 2, stand_in="offloaded"), *folders, **options):
        refused.check_refused("UnsupportedError", "reload_states()")


@pytest.mark.exhaustive
def test_quantized_frozen_weights_without_scales_are_refused(engines: Engines) -> None:
    """ZeRO++ saves them without their scales."""
    options = {"model": "table"}
    kind = Stood(3, 2, "fp16", "quantized", zero={"zero_quantized_nontrainable_weights": True})
    (refused,) = engines.load(kind, engines.saved(Case(1, 3, "fp16"), **options), **options)
    refused.check_refused("UnsupportedError", "table: a quantized parameter")
    (refused,) = engines.load(Case(2, 3, "fp16"), engines.save(kind.on(), **options), **options)
    refused.check_refused("UnsupportedError", "table (module): a frozen parameter saved quantized")


ZENFLOW = {"topk_ratio": 0.3, "update_interval": 2, "select_strategy": "step", "select_interval": 4}


def make_zenflow(stage: int) -> Stood:
    """Make an engine of ZenFlow. On a CPU it runs on one rank, under ZeRO 3 only before it selects columns."""
    zero = {**ON_CPU, "zenflow": {**ZENFLOW, "full_warm_up_rounds": 10 * (stage == 3)}}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "gradient_accumulation_steps": 2}
    return Stood(stage, 1, "bf16", "zenflow", zero=zero, config={**config, "train_batch_size": 120})


@pytest.mark.parametrize("stage", params([1], [1, 2, 3]))
def test_states_of_zenflow_are_refused(stage: int, engines: Engines) -> None:
    """Selected columns are newer than the masters. At ZeRO 1 and 2 the weights can be restored."""
    engines.build("cpu_adam")
    kind = make_zenflow(stage)
    saved = engines.save(kind.on(), steps=(5,))
    folder = str(saved.folder)
    (refused,) = engines.load(kind, folder)
    refused.check_refused("UnsupportedError", "runs ZenFlow")
    refused, weights = engines.load(Case(2, 3, "bf16"), Load(folder), Load(folder, WEIGHTS), model="a b c")
    for each in (refused, *[weights] * (stage == 3)):
        each.check_refused("UnsupportedError", "was saved by ZenFlow")
    if stage < 3:
        values = {name: state.value for name, state in weights.state.parameters.items()}
        before = saved.state.parameters
        assert all(torch.equal(state.value, values[name]) for name, state in before.items())
        assert any(
            each.fp32 is not None and not torch.equal(each.value, each.fp32.bfloat16()) for each in before.values()
        )


# --- stand-ins for operators


def step_twice(name: str, decoupled: bool) -> list[torch.Tensor]:
    """Return the parameter and the moments after two steps of one of DeepSpeed's Adams."""
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    tensors = [torch.randn(37, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    tensors += [torch.zeros(37), torch.zeros(37)]
    for number in (1, 2):
        if name == "cpu_adam":
            operator = CPUAdamBuilder().load()
            operator.create_adam(0, 0.0, 0.0, 0.0, 0.0, 0.0, decoupled, False)
            operator.adam_update(0, number, 0.1, 0.9, 0.99, 1e-6, 0.3, True, *tensors)
        else:
            param, grad, *moments = ([tensor] for tensor in tensors)
            lists = [grad, param, *moments]
            operator = FusedAdamBuilder().load()
            operator.multi_tensor_adam(0, torch.zeros(1), lists, 0.1, 0.9, 0.99, 1e-6, number, int(decoupled), 1, 0.3)
    return [tensors[0], *tensors[2:]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("name", ["cpu_adam", "fused_adam"])
def test_stand_ins_for_operators_compute_the_same_results(name: str, decoupled: bool, engines: Engines) -> None:
    engines.build(name)
    (real,) = engines.worlds.get(1).run(step_twice, name, decoupled)
    importlib.import_module("tests.support.operators")
    for tensor, expected in zip(step_twice(name, decoupled), real, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7)
