"""Optimizers, models, ZeRO options and checkpoint formats: each on a few routes between stages and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from engine_cases import Case, pair_id

from deepspeed_ucp.testing import ResumeReport
from tests.covering import all_turns, params

Resume = Callable[..., ResumeReport]

ROUTES = [
    (Case(1, 3), Case(3, 2)),
    (Case(3, 2), Case(0, 3)),
    (Case(0, 3), Case(2, 2)),
    (Case(2, 2), Case(1, 3)),
]
IDS = [pair_id(pair) for pair in ROUTES]
BELOW_3 = [(Case(1, 3), Case(0, 2)), (Case(0, 2), Case(2, 3)), (Case(2, 3), Case(1, 2))]

PERSISTENT = {"stage3_param_persistence_threshold": 100000}
SCATTERED = {"stage3_param_persistence_threshold": 0}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
OFFLOAD_ALL = {**OFFLOAD, "offload_param": {"device": "cpu"}, **SCATTERED}
BF16_OPTIMIZER = Case(1, 3, "bf16", config={"data_types": {"grad_accum_dtype": "fp32"}})


TENSORS = {"amsgrad": 3, "sgd": 0, "momentum": 1, "rmsprop": 3, "lion": 1, "adagrad_uniform": 1}


def route_id(row: tuple[Any, ...]) -> str:
    return f"{pair_id(row[1])}-{row[0]}"


@pytest.mark.parametrize(("optimizer", "route"), all_turns(list(TENSORS), ROUTES, 2, route_id))
def test_optimizer(optimizer: str, route: tuple[Case, Case], resume: Resume) -> None:
    report = resume(*route, model="plain", optimizer=optimizer)
    assert report.direct
    assert report.states == 4 * (2 + TENSORS[optimizer])


@pytest.mark.timeout(600)  # DeepSpeed may have to compile it first
@pytest.mark.parametrize("route", params([ROUTES[:1], ROUTES[2:3]], [[route] for route in ROUTES]))
def test_deepspeed_cpu_adam(route: tuple[Case, Case], resume: Resume, compiled_op: Callable[[str], None]) -> None:
    compiled_op("CPUAdamBuilder")
    cases = [case.but(zero=OFFLOAD) if case.stage else case for case in route]
    assert resume(*cases, model="mixed", optimizer="cpu_adam").direct


@pytest.mark.exhaustive  # a minute to compile, and the states of torch's own Lion
@pytest.mark.timeout(600)
def test_deepspeed_cpu_lion(resume: Resume, compiled_op: Callable[[str], None]) -> None:
    compiled_op("CPULionBuilder")
    assert resume(Case(2, 3, zero=OFFLOAD), Case(3, 2, zero=OFFLOAD), model="plain", optimizer="cpu_lion").direct


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "pair",
    [
        (Case(0, 3, "fp16"), Case(1, 2, "fp16")),
        (Case(2, 2, "bf16"), Case(0, 3, "fp16")),
        (Case(0, 3, "fp16"), Case(0, 2, "bf16")),
        (Case(0, 2, "bf16"), Case(3, 3, "bf16")),
        (Case(3, 3), Case(0, 2, "bf16")),
        (Case(0, 2, "fp16"), Case(0, 3)),
    ],
    ids=pair_id,
)
def test_fused_stage_0(pair: tuple[Case, Case], resume: Resume, compiled_op: Callable[[str], None]) -> None:
    """DeepSpeed's FusedAdam has a CPU build; with it stage 0 in 16 bits uses the flat FP16_Optimizer."""
    compiled_op("FusedAdamBuilder")
    assert resume(*pair, model="mixed", optimizer="fused_adam").direct


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "pair", [(Case(0, 2, "fp16"), Case(0, 2, "fp16")), (Case(0, 2, "bf16"), Case(0, 3, "bf16"))], ids=pair_id
)
def test_fused_to_unfused(pair: tuple[Case, Case], resume: Resume, compiled_op: Callable[[str], None]) -> None:
    """The same Adam, once in DeepSpeed's fused kernel and once in torch's: FP16_Optimizer to FP16_UnfusedOptimizer."""
    compiled_op("FusedAdamBuilder")
    report = resume(*pair, model="plain", optimizer="fused_adam", changes={"optimizer": "adam_like_fused"})
    assert report.direct


BF16_SOURCES = [Case(stage, 2, precision) for stage in range(4) for precision in ("bf16", "fp16")]
BF16_TARGETS = [Case(stage, 2, precision) for stage in range(4) for precision in ("bf16", "fp32")]


def test_to_the_bf16_optimizer(resume_each: Callable[..., None]) -> None:
    sources = [*BF16_SOURCES, BF16_OPTIMIZER.but(dp=4), Case(1, 3, "bf16")]
    resume_each(sources, BF16_OPTIMIZER, model="mixed", scheduler=True)


@pytest.mark.parametrize(
    "target",
    [
        *params([[BF16_TARGETS[2 * stage + stage % 2]] for stage in range(4)], [[target] for target in BF16_TARGETS]),
        BF16_OPTIMIZER.but(dp=2),
        Case(1, 3, "bf16"),
    ],
    ids=str,
)
def test_from_the_bf16_optimizer(target: Case, resume_each: Callable[..., None]) -> None:
    resume_each([BF16_OPTIMIZER, BF16_OPTIMIZER.but(dp=4)], target, model="mixed", scheduler=True)


@pytest.mark.parametrize("route", ROUTES, ids=IDS)
def test_lora(route: tuple[Case, Case], resume: Resume) -> None:
    assert resume(*(case.but(precision="bf16") for case in route), model="lora", optimizer="adamw_uniform").direct


@pytest.mark.parametrize(
    ("stage", "dp"), params([(1, 2), (2, 5), (3, 3), (3, 5)], product((1, 2, 3), (2, 3, 5))), ids=str
)
def test_fewer_elements_than_ranks(stage: int, dp: int, resume_each: Callable[..., None]) -> None:
    sources = [Case(other, 5 if dp < 5 else 2 + other % 2) for other in range(4)]
    resume_each(sources, Case(stage, dp), model="tiny")


@pytest.mark.parametrize("route", BELOW_3, ids=pair_id)
@pytest.mark.parametrize("model", ["empty", "compiled"])
def test_model_that_stage_3_cannot_train(model: str, route: tuple[Case, Case], resume: Resume) -> None:
    """Parameters without elements, and torch.compile'd modules: DeepSpeed's own stage 3 dies in their forward."""
    assert resume(*route, model=model).direct


@pytest.mark.parametrize("names", [("plain", "compiled"), ("compiled", "plain")], ids="->".join)
def test_compiled_on_one_side(names: tuple[str, str], resume: Resume) -> None:
    assert resume(Case(1, 3), Case(2, 2), model=names[0], changes={"model": names[1]}).direct


@pytest.mark.parametrize("route", [*ROUTES[:2], *ROUTES[3:]], ids=pair_id)
@pytest.mark.parametrize(
    "changes", [{"reverse_groups": True}, {"model": "reordered"}], ids=["groups-reversed", "parameters-reordered"]
)
def test_matched_by_name_not_position(changes: dict[str, Any], route: tuple[Case, Case], resume: Resume) -> None:
    """Not from stage 0, whose optimizer state has positions only."""
    assert resume(*route, model="plain", changes=changes).direct


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "changes", [{"reverse_groups": True}, {"model": "reordered"}], ids=["groups-reversed", "parameters-reordered"]
)
def test_order_alone_differs(changes: dict[str, Any], stage: int, resume: Resume) -> None:
    """DeepSpeed's own load would put the state of one parameter into another."""
    assert resume(Case(stage, 2), Case(stage, 2), model="plain", changes=changes).direct


@dataclass(frozen=True)
class Variant:
    """ZeRO options on either side of a resume."""

    name: str
    source: Case
    target: Case
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


ZERO_OPTIONS = [
    Variant("round-robin-source", Case(2, 3, zero={"round_robin_gradients": True}), Case(2, 2)),
    Variant("round-robin-target", Case(1, 3), Case(2, 2, zero={"round_robin_gradients": True})),
    Variant("round-robin-alone", Case(2, 2), Case(2, 2, zero={"round_robin_gradients": True})),
    Variant("round-robin-to-zero3", Case(1, 4, zero={"round_robin_gradients": True}), Case(3, 3)),
    Variant("round-robin-bf16", Case(2, 4, "bf16", zero={"round_robin_gradients": True}), Case(0, 3, "bf16")),
    Variant("sub-groups-source", Case(3, 3, zero={"sub_group_size": 30}), Case(3, 2)),
    Variant("sub-groups-target", Case(3, 2), Case(3, 3, zero={"sub_group_size": 30})),
    Variant("sub-groups-alone", Case(3, 2), Case(3, 2, zero={"sub_group_size": 1})),
    Variant("sub-groups-both", Case(3, 2, zero={"sub_group_size": 50}), Case(3, 2, zero={"sub_group_size": 9})),
    Variant("sub-groups-to-zero1", Case(3, 2, "bf16", zero={"sub_group_size": 9}), Case(1, 3, "bf16")),
    Variant("zero2-to-sub-groups", Case(2, 2, "bf16"), Case(3, 3, "bf16", zero={"sub_group_size": 9})),
    Variant("persistent-target", Case(1, 2, "bf16"), Case(3, 3, "bf16", zero=PERSISTENT)),
    Variant("nothing-persistent-target", Case(1, 2, "bf16"), Case(3, 3, "bf16", zero=SCATTERED)),
    Variant("nothing-persistent-source", Case(3, 3, zero=SCATTERED), Case(2, 2)),
    Variant("offload-zero1", Case(1, 3), Case(1, 2, zero=OFFLOAD)),
    Variant("offload-zero2", Case(2, 3, "bf16", zero=OFFLOAD), Case(2, 2, "bf16", zero=OFFLOAD)),
    Variant("offload-off-zero2", Case(2, 3, "bf16", zero=OFFLOAD), Case(1, 2, "bf16")),
    Variant("offload-zero3", Case(3, 3, "bf16"), Case(3, 2, "bf16", zero=OFFLOAD)),
    Variant("offload-all-target", Case(0, 3, "bf16"), Case(3, 2, "bf16", zero=OFFLOAD_ALL)),
    Variant("offload-all-source", Case(3, 2, "bf16", zero=OFFLOAD_ALL), Case(2, 3, "bf16")),
    Variant("offload-all-fp32", Case(3, 2, zero=OFFLOAD_ALL), Case(3, 3, zero=OFFLOAD_ALL)),
    Variant("static-loss-scale", Case(1, 3, "fp16", config={"fp16": {"enabled": True, "loss_scale": 64}}), Case(3, 2)),
    Variant("clipping", Case(1, 3, config={"gradient_clipping": 0.1}), Case(3, 2, config={"gradient_clipping": 0.1})),
]


@pytest.mark.parametrize("variant", ZERO_OPTIONS, ids=str)
def test_zero_option(variant: Variant, resume: Resume) -> None:
    assert resume(variant.source, variant.target, model="mixed", scheduler=True).direct


@pytest.mark.parametrize("target", [Case(3, 2), Case(1, 2), Case(0, 3)], ids=str)
def test_elastic_checkpoint(target: Case, resume: Resume) -> None:
    """DeepSpeed's old elastic format keeps no param groups, so hyper-parameters stay those of the live optimizer."""
    assert resume(Case(1, 3, zero={"elastic_checkpoint": True}), target, model="mixed").direct


@pytest.mark.parametrize("pair", [(Case(1, 3), Case(3, 2)), (Case(3, 3, "bf16"), Case(3, 2, "bf16"))], ids=pair_id)
def test_model_built_partitioned(pair: tuple[Case, Case], resume: Resume) -> None:
    """Under `deepspeed.zero.Init`."""
    assert resume(*pair, model="mixed", changes={"zero_init": True}).direct


@pytest.mark.parametrize("pair", [*ROUTES, (Case(1, 3, "bf16"), BF16_OPTIMIZER.but(dp=2))], ids=pair_id)
def test_engine_that_has_trained(pair: tuple[Case, Case], resume: Resume) -> None:
    """Its optimizer has states already, linked to its parameters."""
    assert resume(*pair, model="mixed", scheduler=True, changes={"warm": 2, "seed": 7}).direct


@pytest.mark.parametrize(
    "options", [{"verify": "off"}, {"threads": 1, "window_mb": 16}, {"threads": 3}, {"mode": "direct"}], ids=str
)
def test_plugin_options(options: dict[str, Any], resume: Resume) -> None:
    target = Case(3, 2, "bf16", config={"checkpoint": {"universal": options}})
    assert resume(Case(1, 3, "bf16"), target, model="mixed").direct


OVERFLOWING = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}


@pytest.mark.parametrize("stages", [(1, 3), (3, 2), (2, 1), (3, 0), (0, 1)], ids=lambda s: f"zero{s[0]}->zero{s[1]}")
def test_loss_scaler_and_skipped_steps(stages: tuple[int, int], resume: Resume) -> None:
    """Steps that overflow are skipped and halve the loss scale; both come back."""
    cases = (Case(stages[0], 3, "fp16", config=OVERFLOWING), Case(stages[1], 2, "fp16", config=OVERFLOWING))
    assert resume(*cases, model="plain", steps=(10, 2)).direct


@pytest.mark.parametrize(
    "pair",
    params(
        [[(Case(s, 3), Case((s * 3 + 1) % 4, 2))] for s in range(4)],
        [[(Case(s, 3), Case(t, 2))] for s, t in product(range(4), range(4))],
        lambda row: pair_id(row[0]),
    ),
)
def test_saved_before_the_first_step(pair: tuple[Case, Case], resume: Resume) -> None:
    report = resume(*pair, model="mixed", steps=(0, 3))
    assert report.direct or pair[0].stage == pair[1].stage == 0


def test_saved_before_the_first_step_into_an_engine_that_has_trained(resume_each: Callable[..., None]) -> None:
    resume_each([Case(stage, 3) for stage in range(4)], Case(2, 2), model="mixed", steps=(0, 3))


REPLICA = {"type": "python", "data_parallel": "replica"}  # without it DeepSpeed's writer factory dies below stage 3


@pytest.mark.parametrize("route", [(Case(1, 3, "bf16"), Case(3, 2, "bf16")), (Case(3, 2), Case(2, 3))], ids=pair_id)
def test_legacy_format(route: tuple[Case, Case], resume: Resume) -> None:
    """Files that are no zips."""
    legacy = {"checkpoint": {"checkpoint_serialization": False}}
    assert resume(route[0].but(config=legacy), route[1], model="mixed").direct


@pytest.mark.parametrize("route", [(Case(1, 1, "bf16"), Case(3, 2, "bf16")), (Case(3, 2), Case(2, 3))], ids=pair_id)
def test_python_writer(route: tuple[Case, Case], resume: Resume) -> None:
    """Below stage 3 all data-parallel ranks write mp_rank_00_model_states.pt with it at once, and not the same bytes.

    So there is one rank in that case: what DeepSpeed leaves of several is at times no file that anything can read.
    """
    assert resume(route[0].but(config={"checkpoint": {"writer": REPLICA}}), route[1], model="mixed").direct


def test_decoupled_writer(resume: Resume) -> None:
    """Its process is sent the tensors themselves, which fails below stage 3, and reads them after the save.

    So the model must not change its buffers in the forward that follows.
    """
    source = Case(3, 2, config={"checkpoint": {"writer": {**REPLICA, "decoupled": True}}})
    assert resume(source, Case(2, 3), model="plain").direct
