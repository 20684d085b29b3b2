"""Engines with states in unusual places: states that come back, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.covering import params
from tests.support.engines.cases import Case, make_engine, train_engine
from tests.support.engines.models import MODELS, param_groups
from tests.support.engines.ranks import Attempt, Load, Local, attempt_each, differences, load_each, save

pytest.importorskip("deepspeed.runtime.zenflow", reason="DeepSpeed before ZenFlow, SuperOffload and torch_autocast")

ResumeEach = Callable[..., None]

ON_GPU = get_accelerator().device_name() == "cuda"
"""Stand-ins are for the CPU alone."""


def split() -> AbstractContextManager[Any]:
    """Rename the accelerator: partial offload then steps some sub-groups with a second optimizer."""
    if ON_GPU:
        return nullcontext()
    return mock.patch.object(get_accelerator(), "_name", "cpu:0")


@contextmanager
def superoffload() -> Iterator[None]:
    """Replace the stream, which a CPU does not have, and the check of the accelerator."""
    from deepspeed.runtime.superoffload import superoffload_stage3

    if ON_GPU:
        yield
        return
    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda _other: None)
    with (
        mock.patch.object(superoffload_stage3, "_validate_superoffload_accelerator"),
        mock.patch.object(get_accelerator(), "current_stream", return_value=stream),
    ):
        yield


class Quantizer:
    """Symmetric 8-bit quantization in plain torch; DeepSpeed's kernel has no CPU build."""

    Symmetric = 0

    def quantize(self, tensor: torch.Tensor, groups: int, bits: int, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = tensor.detach().float().view(groups, -1)
        scales = rows.abs().amax(dim=1).clamp(min=1e-8) / (2 ** (bits - 1) - 1)
        return (rows / scales.view(groups, 1)).round().to(torch.int8).view(tensor.shape), scales

    def dequantize(self, tensor: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int) -> torch.Tensor:
        return (tensor.view(groups, -1).float() * scales.view(groups, 1)).view(tensor.shape).half()


def quantized() -> AbstractContextManager[Any]:
    if ON_GPU:
        return nullcontext()
    partition_parameters.CUDAQuantizer.quantizer_cuda_module = Quantizer()
    return nullcontext()


STAND_INS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "split": split,
    "superoffload": superoffload,
    "quantized": quantized,
}


def train_with_stand_in(ds_config: dict[str, Any], stand_in: str, **options: Any) -> Generator[Any, None, None]:
    """Yields an engine with a stand-in, then the loss of each step."""
    with STAND_INS[stand_in]():
        engine = make_engine(ds_config, **options)
        yield engine
        yield from train_engine(engine)


def train_zenflow(ds_config: dict[str, Any]) -> Generator[Any, None, None]:
    """Yields an engine whose optimizers ZenFlow makes, then the loss of each step."""
    module = MODELS["columns"]()
    engine, *_ = deepspeed.initialize(model=module, model_parameters=param_groups(module), config=ds_config)
    yield engine
    yield from train_engine(engine)


def train_offloaded(ds_config: dict[str, Any], **options: Any) -> Generator[Any, None, None]:
    """Yields a trained engine with offloaded states, reloads them, and yields the loss of each step."""
    engine = make_engine(ds_config, **options)
    train_steps(train_engine(engine), 1)
    engine.offload_states()
    yield engine
    engine.reload_states()
    yield from train_engine(engine)


def save_offloaded(ds_config: dict[str, Any], folders: tuple[str, str], **options: Any) -> list[CapturedEngine]:
    """Save with offloaded states, and again when they are reloaded and the engine has trained on."""
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


# --- tests

HPZ = Case(3, 4, "bf16", zero={"zero_hpz_partition_size": 2})
PARTIAL = Case(3, 2, "bf16", zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "sub_group_size": 9})
SUPER = PARTIAL.but(zero={**PARTIAL.zero, "offload_optimizer": {"device": "cpu", "super_offload": True}})


def test_secondary_partitions(resume_each: ResumeEach) -> None:
    """ZeRO++'s hpZ keeps secondary copies of the partitions, which are stale in each load."""
    resume_each([Case(1, 3, "bf16"), HPZ.but(dp=2, zero={}), HPZ], HPZ, model="mixed")


@pytest.mark.exhaustive
def test_from_secondary_partitions(resume_each: ResumeEach) -> None:
    resume_each([HPZ], Case(2, 3, "bf16"), model="mixed")


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_partial_offload(resume_each: ResumeEach, compiled_op: Callable[[str], None]) -> None:
    """A CPU offloads all of it."""
    compiled_op("CPUAdamBuilder")
    resume_each([PARTIAL, PARTIAL.but(dp=3), Case(1, 3, "bf16")], PARTIAL, model="plain", optimizer="cpu_adam")


def average_losses(answers: list[list[Local]]) -> list[float]:
    """Return the losses of one load as means over the ranks."""
    return [sum(each) / len(each) for each in zip(*(local.losses for (local,) in answers), strict=True)]


def try_each(case: Case, training: Any, loads: list[Load], worlds: WorldPool) -> list[Attempt]:
    """Return one rank's attempts; refusals do not change the engine."""
    attempts = worlds.get(case.dp).run(attempt_each, training, loads)[0]
    assert all(attempt.changed == [] for attempt in attempts if attempt.error)
    return attempts  # type: ignore[no-any-return]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "stand_in", "engine", "words"),
    [
        pytest.param(PARTIAL, "split", "offload_optimizer.ratio", "ratio 0.5 kept it", id="partial"),
        pytest.param(
            SUPER, "superoffload", "SuperOffload", "SuperOffload kept it", id="super", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_moments_of_another_optimizer(
    case: Case,
    stand_in: str,
    engine: str,
    words: str,
    tmp_path: Path,
    ucp_worlds: WorldPool,
    compiled_op: Callable[[str], None],
) -> None:
    """DeepSpeed neither saves nor loads them; only the weights come back."""
    compiled_op("CPUAdamBuilder")
    options = {"model": "plain", "optimizer": "cpu_adam"}
    own = partial(train_with_stand_in, case.on().ds_config, stand_in, **options)
    saved = ucp_worlds.get(2).run(save, own, str(tmp_path))[0].state
    (refused,) = try_each(case, own, [Load(str(tmp_path))], ucp_worlds)
    assert refused.error == "UnsupportedError" and engine in refused.message
    target = Case(1, 3, "bf16").on()
    weights = {"load_optimizer_states": False}
    (refused, taken) = try_each(
        target, target.training(**options), [Load(str(tmp_path)), Load(str(tmp_path), weights)], ucp_worlds
    )
    assert refused.error == "MismatchError" and words in refused.message and not taken.error
    (local,) = ucp_worlds.get(3).run(load_each, target.training(**options), [Load(str(tmp_path), weights)])[0]
    assert compare(saved, local.state, optimizer_states=False)[1] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", params([3], [2, 3]))
def test_states_that_are_away(
    stage: int, tmp_path: Path, ucp_worlds: WorldPool, compiled_op: Callable[[str], None]
) -> None:
    """`engine.offload_states` leaves copies in the states of ZeRO 3, which are stale after the next step."""
    compiled_op("FusedAdamBuilder")
    options = {"model": "plain", "optimizer": "fused_adam"}
    folders = (str(tmp_path / "away"), str(tmp_path / "back"))
    case, target = Case(stage, 2).on(), Case(1, 3).on()
    states = ucp_worlds.get(2).run(save_offloaded, case.ds_config, folders, **options)[0]
    loads = [Load(folders[0]), Load(folders[1], steps=2)]
    found = ucp_worlds.get(3).run(load_each, target.training(**options), loads)[0]
    assert [compare(state, local.state)[1] for state, local in zip(states, found, strict=True)] == [[], []]
    for attempt in try_each(
        case,
        partial(train_offloaded, case.ds_config, **options),
        [Load(each) for each in folders],
        ucp_worlds,
    ):
        assert attempt.error == "UnsupportedError" and "reload_states()" in attempt.message


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", params([Case(3, 2)], [Case(stage, 2) for stage in (1, 2, 3)], str))
def test_steps_that_fused_adam_counts_for_a_group(
    target: Case, sources: Any, ucp_worlds: WorldPool, compiled_op: Callable[[str], None]
) -> None:
    """At stage 0 in fp32 the files have step 0 for all parameters of a group except the last one."""
    compiled_op("FusedAdamBuilder")
    options = {"model": "mixed", "optimizer": "fused_adam"}
    run = sources.get(Case(0, 3), **options)
    loads = [Load(str(run.folder), steps=len(run.losses))]
    answers = ucp_worlds.get(2).run(load_each, target.on().training(**options), loads)
    for (local,) in answers:
        found = differences(run.folder, local.state)
        assert len(found) == 6 and all(text.endswith("state step: saved 0.0, loaded 3.0") for text in found)
    assert average_losses(answers) == pytest.approx(run.losses, rel=1e-4)


AUTOCAST = {
    dtype: {"torch_autocast": {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": ["torch.nn.Linear"]}}
    for dtype in ("float16", "bfloat16")
}


AUTOCAST_TARGETS = [
    Case(3, 2, config=AUTOCAST["bfloat16"]),
    Case(0, 2, config=AUTOCAST["float16"]),
    Case(1, 2),
    Case(2, 2, "fp16"),
]


@pytest.mark.releases
@pytest.mark.parametrize("target", params(AUTOCAST_TARGETS[:1], AUTOCAST_TARGETS, str))
def test_torch_autocast(target: Case, resume_each: ResumeEach) -> None:
    """The weights are in fp32; the configuration of this run controls casts."""
    sources = [
        Case(stage, 3, config=AUTOCAST[dtype]) for stage, dtype in [(0, "float16"), (1, "bfloat16"), (3, "float16")]
    ]
    resume_each(sources, target, model="mixed", loss_tolerance=0.05)


QUANTIZED = Case(3, 2, "fp16", zero={"zero_quantized_weights": True})


def test_quantized_communication(sources: Any, ucp_worlds: WorldPool) -> None:
    """ZeRO++'s qwZ gathers weights in 8 bit; it does not change the states or files."""
    options = {"model": "aligned"}
    run = sources.get(Case(1, 3, "fp16"), **options)
    training = partial(train_with_stand_in, QUANTIZED.on().ds_config, "quantized", **options)
    answers = ucp_worlds.get(2).run(load_each, training, [Load(str(run.folder), steps=len(run.losses))])
    for (local,) in answers:
        found = differences(run.folder, local.state)
        assert all(", state value:" in text for text in found)  # the gather for the comparison quantizes them
    assert average_losses(answers) == pytest.approx(run.losses, rel=0.05)


@pytest.mark.exhaustive
def test_quantized_frozen_weights(sources: Any, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """ZeRO++ saves them without their scales."""
    options = {"model": "table"}
    case = Case(3, 2, "fp16", zero={"zero_quantized_nontrainable_weights": True}).on()
    own = partial(train_with_stand_in, case.ds_config, "quantized", **options)
    ucp_worlds.get(2).run(save, own, str(tmp_path))
    whole = Load(str(sources.get(Case(1, 3, "fp16"), **options).folder))
    (refused,) = try_each(case, own, [whole], ucp_worlds)
    assert refused.error == "UnsupportedError" and "table: a quantized parameter" in refused.message
    target = Case(2, 3, "fp16").on()
    (refused,) = try_each(target, target.training(**options), [Load(str(tmp_path))], ucp_worlds)
    assert refused.error == "UnsupportedError" and "table: a frozen parameter saved quantized" in refused.message


ZENFLOW = {"topk_ratio": 0.3, "update_interval": 2, "select_strategy": "step", "select_interval": 4}


def make_zenflow(stage: int) -> Case:
    """On a CPU ZenFlow runs on one rank, under ZeRO 3 only before it selects columns."""
    zenflow = {**ZENFLOW, "full_warm_up_rounds": 10 * (stage == 3)}
    zero = {"offload_optimizer": {"device": "cpu"}, "zenflow": zenflow}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "gradient_accumulation_steps": 2}
    return Case(stage, 1, "bf16", zero=zero, config={**config, "train_batch_size": 120}).on()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", params([1], [1, 2, 3]))
def test_columns_of_zenflow(
    stage: int, tmp_path: Path, ucp_worlds: WorldPool, compiled_op: Callable[[str], None]
) -> None:
    """Selected columns are newer than the masters; at ZeRO 1 and 2 only the weights come back."""
    compiled_op("CPUAdamBuilder")
    case, target = make_zenflow(stage), Case(2, 3, "bf16").on()
    own = partial(train_zenflow, case.ds_config)
    saved = ucp_worlds.get(1).run(save, own, str(tmp_path), (5,))[0].state
    (refused,) = try_each(case, own, [Load(str(tmp_path))], ucp_worlds)
    assert refused.error == "UnsupportedError" and "runs ZenFlow" in refused.message
    weights = Load(str(tmp_path), {"load_optimizer_states": False})
    training = target.training(model="columns")
    loads = [Load(str(tmp_path))] + [weights] * (stage == 3)
    for refused in try_each(target, training, loads, ucp_worlds):
        assert refused.error == "UnsupportedError" and "was saved by ZenFlow" in refused.message
    if stage < 3:
        (local,) = ucp_worlds.get(3).run(load_each, training, [weights])[0]
        values = {name: state.value for name, state in local.state.parameters.items()}
        assert all(torch.equal(state.value, values[name]) for name, state in saved.parameters.items())
        masters = [state.fp32 for state in saved.parameters.values() if state.fp32 is not None]
        assert any(
            not torch.equal(state.value, master.bfloat16())
            for state, master in zip(saved.parameters.values(), masters, strict=True)
        )
