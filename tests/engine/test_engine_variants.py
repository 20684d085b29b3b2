"""Optimizers, models and precisions that the matrix lacks: each on a few routes between stages and sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing import ResumeReport, WorldPool
from tests.support.covering import all_turns, params
from tests.support.engines.cases import Case, directly, is_direct

ResumeEach = Callable[..., None]

STAGES = (0, 1, 2, 3)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16_OPTIMIZER = Case(1, 3, "bf16", config={"data_types": {"grad_accum_dtype": "fp32"}})
TENSORS = {"amsgrad": 3, "sgd": 0, "momentum": 1, "rmsprop": 3, "lion": 1, "adagrad_uniform": 1}


@pytest.mark.parametrize(("optimizer", "stage"), all_turns(list(TENSORS), STAGES, 1))
def test_optimizer(optimizer: str, stage: int, resume_each: ResumeEach) -> None:
    def check(source: Case, target: Case, report: ResumeReport) -> None:
        is_direct(source, target, report)
        assert report.states == 4 * (2 + TENSORS[optimizer])

    sources = [Case((stage + turn) % 4, 3) for turn in (2, 3)]
    resume_each(sources, Case(stage, 2), check, model="plain", optimizer=optimizer)


@pytest.mark.timeout(600)  # DeepSpeed compiles it at the first time
@pytest.mark.parametrize("stage", params([3, 2], [1, 2, 3]))
def test_deepspeed_cpu_adam(stage: int, resume_each: ResumeEach, compiled_op: Callable[[str], None]) -> None:
    compiled_op("CPUAdamBuilder")
    sources = [Case(1, 3, zero=OFFLOAD), Case(0, 3)]
    resume_each(sources, Case(stage, 2, zero=OFFLOAD), model="mixed", optimizer="cpu_adam")


def step(name: str, decoupled: bool) -> list[Any]:
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
@pytest.mark.timeout(600)
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize(("name", "builder"), [("cpu_adam", "CPUAdamBuilder"), ("fused_adam", "FusedAdamBuilder")])
def test_the_stand_ins_compute_what_the_operators_do(
    name: str, builder: str, decoupled: bool, ucp_worlds: WorldPool, compiled_op: Callable[[str], None]
) -> None:
    compiled_op(builder)
    (real,) = ucp_worlds.get(1).run(step, name, decoupled)
    importlib.import_module("tests.support.operators")
    for tensor, expected in zip(step(name, decoupled), real, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.exhaustive  # takes a minute to compile; states as of torch's Lion
@pytest.mark.timeout(600)
def test_deepspeed_cpu_lion(resume_each: ResumeEach, compiled_op: Callable[[str], None]) -> None:
    compiled_op("CPULionBuilder")
    resume_each([Case(2, 3, zero=OFFLOAD)], Case(3, 2, zero=OFFLOAD), model="plain", optimizer="cpu_lion")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("target", "saved"),
    [
        pytest.param(Case(1, 2, "fp16"), [Case(0, 3, "fp16")], id="to-zero1"),
        pytest.param(Case(0, 3, "fp16"), [Case(2, 2, "bf16")], id="from-zero2", marks=pytest.mark.exhaustive),
        pytest.param(Case(0, 2, "bf16"), [Case(0, 3, "fp16"), Case(3, 3)], id="to-bf16"),
        pytest.param(Case(3, 3, "bf16"), [Case(0, 2, "bf16")], id="to-zero3", marks=pytest.mark.exhaustive),
        pytest.param(Case(0, 3), [Case(0, 3, "fp16")], id="to-fp32"),
    ],
)
def test_fused_stage_0(
    target: Case, saved: list[Case], resume_each: ResumeEach, compiled_op: Callable[[str], None]
) -> None:
    """With FusedAdam, which has a CPU build, stage 0 in 16 bits uses the flat FP16_Optimizer."""
    compiled_op("FusedAdamBuilder")
    resume_each(saved, target, model="mixed", optimizer="fused_adam")


@pytest.mark.releases
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("source", "target"), [(Case(0, 2, "fp16"), Case(0, 2, "fp16")), (Case(0, 2, "bf16"), Case(0, 3, "bf16"))], ids=str
)
def test_fused_to_unfused(
    source: Case, target: Case, resume_each: ResumeEach, compiled_op: Callable[[str], None]
) -> None:
    """The same Adam, once in DeepSpeed's fused kernel and once in torch's: FP16_Optimizer to FP16_UnfusedOptimizer."""
    compiled_op("FusedAdamBuilder")
    live = {"optimizer": "adam_like_fused"}
    resume_each([source], target, directly, live=live, model="plain", optimizer="fused_adam")


BF16_SOURCES = [Case(stage, 2, precision) for stage in STAGES for precision in ("bf16", "fp16")]
BF16_TARGETS = [Case(stage, 2, precision) for stage in STAGES for precision in ("bf16", "fp32")]


@pytest.mark.releases
def test_to_the_bf16_optimizer(resume_each: ResumeEach) -> None:
    sources = [*BF16_SOURCES, BF16_OPTIMIZER.but(dp=4), Case(1, 3, "bf16")]
    resume_each(sources, BF16_OPTIMIZER, model="mixed", scheduler=True)


@pytest.mark.releases
@pytest.mark.parametrize(
    "target",
    params([BF16_TARGETS[0], BF16_TARGETS[7], BF16_OPTIMIZER.but(dp=2), Case(1, 3, "bf16")], BF16_TARGETS, str),
)
def test_from_the_bf16_optimizer(target: Case, resume_each: ResumeEach) -> None:
    resume_each([BF16_OPTIMIZER, BF16_OPTIMIZER.but(dp=4)], target, model="mixed", scheduler=True)


@pytest.mark.releases
@pytest.mark.parametrize("target", params([Case(3, 2, "bf16")], [Case(stage, 2, "bf16") for stage in STAGES], str))
def test_lora(target: Case, resume_each: ResumeEach) -> None:
    sources = [Case(stage, 3, "bf16") for stage in (1, 3, 0)]
    resume_each(sources, target, model="lora", optimizer="adamw_uniform")


@pytest.mark.parametrize(("stage", "dp"), params([(2, 3), (3, 5)], product((1, 2, 3), (2, 3, 5))), ids=str)
def test_fewer_elements_than_ranks(stage: int, dp: int, resume_each: ResumeEach) -> None:
    sources = [Case(other, 5 if dp < 5 else 2 + other % 2) for other in STAGES if other != stage]
    resume_each(sources, Case(stage, dp), model="tiny")


@pytest.mark.parametrize(("model", "stage"), all_turns(["empty", "compiled"], [0, 1, 2], 1))
def test_model_that_stage_3_cannot_train(model: str, stage: int, resume_each: ResumeEach) -> None:
    """Parameters without elements, and torch.compile'd modules, with the names of other modules."""
    sources: list[Any] = [Case((stage + 1) % 3, 3)]
    if model == "compiled":
        sources.append((Case(3, 3), {"model": "plain"}))
    resume_each(sources, Case(stage, 2), model=model)


def test_compiled_there_alone(resume_each: ResumeEach) -> None:
    resume_each([(Case(1, 3), {"model": "compiled"})], Case(2, 2), model="plain")


OTHERWISE: dict[str, dict[str, Any]] = {
    "groups-reversed": {"reverse_groups": True},
    "parameters-reordered": {"model": "reordered"},
}


@pytest.mark.parametrize(("order", "stage"), all_turns(list(OTHERWISE), STAGES, 1))
def test_matched_by_name_not_position(order: str, stage: int, resume_each: ResumeEach) -> None:
    """Except from stage 0, which saves positions only. DeepSpeed's load would mix up the states."""
    sources = [Case(stage % 3 + 1, 3)] + [Case(stage, 2)] * (stage > 0)
    resume_each(sources, Case(stage, 2), directly, live=OTHERWISE[order], model="plain")


OVERFLOWING = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}


@pytest.mark.parametrize("stage", params([0, 3], STAGES))
def test_loss_scaler_and_skipped_steps(stage: int, resume_each: ResumeEach) -> None:
    """Steps that overflow are skipped and halve the loss scale; both come back."""
    sources = [Case(other, 3, "fp16", config=OVERFLOWING) for other in (*STAGES[stage + 1 :], *STAGES[: stage + 1])]
    resume_each(sources, Case(stage, 2, "fp16", config=OVERFLOWING), model="plain", steps=(10, 2))


def test_the_hybrid_engine_is_the_engine_below_it(resume_each: ResumeEach) -> None:
    """On a CPU without inference kernels; it generates with views of the same parameters."""
    hybrid = {"hybrid_engine": {"enabled": True}}
    resume_each([Case(1, 2, "bf16", config=hybrid), Case(3, 3)], Case(3, 2, "bf16", config=hybrid), model="plain")
