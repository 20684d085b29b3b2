"""Masters and moments in 16 bit, between each other and fp32; parameters of several dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine
from deepspeed_ucp.testing.ranks import saved_state
from deepspeed_ucp.testing.resume import LOSS_TOLERANCE
from tests.support.covering import params
from tests.support.engines.cases import Case
from tests.support.engines.ranks import Load, load_each

pytest.importorskip("deepspeed.runtime.keep_in_fp32", reason="DeepSpeed before masters in bf16 for all stages")

ResumeEach = Callable[..., None]

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
Kind = tuple[Case, dict[str, Any]]


def keep(stage: int, dp: int, precision: str, *, states: bool = False, offload: bool = True) -> Kind:
    """Masters in 16 bit, and with `states` the moments, too, without which DeepSpeed requires its CPUAdam."""
    section = {"enabled": True, f"{precision}_master_weights_and_grads": True}
    section |= {"bf16_optimizer_states": True} if states else {}
    section |= {"initial_scale_power": 8} if precision == "fp16" else {}
    optimizer = ("cpu_adam_16" if states else "cpu_adam") if offload else "adamw"
    case = Case(stage, dp, precision, zero=OFFLOAD if offload else {}, config={precision: section})
    return case, {"optimizer": optimizer}


def list_kinds(stage: int, dp: int) -> list[Kind]:
    return [
        keep(stage, dp, "bf16"),
        keep(stage, dp, "bf16", states=True),
        keep(stage, dp, "bf16", states=True, offload=False),
        keep(stage, dp, "fp16"),
    ]


def name_kind(row: tuple[Kind]) -> str:
    case, options = row[0]
    return f"zero{case.stage}-{case.precision}-dp{case.dp}-{options.get('optimizer', 'adamw')}"


WIDE: list[Kind] = [
    (Case(1, 3, "bf16", zero=OFFLOAD), {"optimizer": "cpu_adam"}),
    (Case(3, 3, "fp16", zero=OFFLOAD), {"optimizer": "cpu_adam"}),
    (Case(0, 3, "bf16"), {}),
    (Case(2, 3), {}),
]
"""With masters in fp32."""

TARGETS = [kind for stage in (1, 2, 3) for kind in list_kinds(stage, 2)]
CHOSEN = [TARGETS[5], TARGETS[10]]
"""Both kinds of moments in 16 bit, at two stages; the others are exhaustive."""


@pytest.mark.timeout(600)  # DeepSpeed compiles it at the first time
@pytest.mark.parametrize("target", params([(each,) for each in CHOSEN], [(each,) for each in TARGETS], name_kind))
def test_to_masters_in_16_bit(target: Kind, resume_each: ResumeEach, compiled_op: Callable[[str], None]) -> None:
    """32 bits are rounded once, 16 bits come back exactly; then the losses equal the saved run's."""
    compiled_op("CPUAdamBuilder")
    case, live = target
    low = list_kinds(1 + case.stage % 3, 3)
    sources = [WIDE[1], low[0], low[2], target] if target in CHOSEN else [*WIDE, *low, target]
    resume_each(sources, case, live=live, model="mixed")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", params([(WIDE[3],)], [(each,) for each in WIDE], name_kind))
def test_from_masters_in_16_bit(target: Kind, resume_each: ResumeEach, compiled_op: Callable[[str], None]) -> None:
    compiled_op("CPUAdamBuilder")
    case, live = target
    resume_each([TARGETS[3], *CHOSEN] if target == WIDE[3] else TARGETS, case, live=live, model="mixed")


def list_dtypes(state: CapturedEngine) -> set[tuple[str, torch.dtype]]:
    """Of masters and moments."""
    trained = [each for each in state.parameters.values() if each.fp32 is not None]
    masters = {("fp32", each.fp32.dtype) for each in trained if each.fp32 is not None}
    return masters | {(name, tensor.dtype) for each in trained for name, tensor in each.tensors.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", params([(TARGETS[5],)], [(each,) for each in (*TARGETS, *WIDE)], name_kind))
def test_what_is_rounded_is_told(
    target: Kind, sources: Any, ucp_worlds: WorldPool, compiled_op: Callable[[str], None]
) -> None:
    """Loaded states have the dtype of the optimizer's states."""
    compiled_op("CPUAdamBuilder")
    case, live = target
    loads = [Load(str(sources.get(each, **{"model": "mixed", **own}).folder)) for each, own in (WIDE[3], target)]
    training = case.on().training(model="mixed", **live)
    wide, own = ucp_worlds.get(case.dp).run(load_each, training, loads)[0]
    assert list_dtypes(wide.state) == list_dtypes(saved_state(loads[1].folder))
    rounded = {name for name, dtype in list_dtypes(wide.state) if dtype != torch.float32}
    assert {text.split()[0] for text in wide.list_messages("WARNING", "is rounded")} == rounded
    assert not [text for _, text in own.log if "is rounded" in text]


BF16 = LOSS_TOLERANCE["bf16"]

HALF = {"model": "half"}
"""A model in bf16 without any configuration of it."""

OWN_HALF: list[Kind] = [(Case(0, 2), HALF), (Case(1, 3), HALF), (Case(2, 2), HALF), (Case(3, 2), HALF)]


@pytest.mark.parametrize("target", params([(OWN_HALF[0],), (OWN_HALF[3],)], [(each,) for each in OWN_HALF], name_kind))
def test_a_model_in_16_bit_that_the_configuration_does_not_name(target: Kind, resume_each: ResumeEach) -> None:
    case, live = target
    resume_each(
        [*OWN_HALF, (Case(1, 3, "bf16"), {}), (Case(2, 3), {})], case, live=live, model="plain", loss_tolerance=BF16
    )


TWO: list[Kind] = [
    (Case(0, 2), {"model": "two_dtypes"}),
    (Case(1, 3), {"model": "two_dtypes"}),
    (Case(1, 2), {"model": "two_dtypes", "optimizer": "adamw_by_dtype"}),
    (Case(2, 3), {"model": "two_dtypes", "optimizer": "adamw_by_dtype"}),
]


@pytest.mark.parametrize("target", [TWO[0], TWO[2]], ids=lambda kind: name_kind((kind,)))
def test_a_model_of_several_dtypes(target: Kind, resume_each: ResumeEach) -> None:
    """In one flat buffer they become fp32; ZeRO 3 refuses them."""
    case, live = target
    sources = [(each, own) for each, own in TWO if own.get("optimizer") == live.get("optimizer")]
    plain = [] if "optimizer" in live else [(Case(3, 3, "bf16"), {"model": "plain"})]
    resume_each([*sources, *plain], case, live=live, loss_tolerance=BF16)


def test_buffers_that_stay_in_fp32(resume_each: ResumeEach) -> None:
    """DeepSpeed casts the others to the dtype that the configuration gives."""
    kept = {"data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["running"]}}
    target = Case(3, 2, "bf16", config=kept)
    resume_each([Case(1, 3, "bf16", config=kept), Case(2, 3, "bf16"), target], target, model="mixed")
