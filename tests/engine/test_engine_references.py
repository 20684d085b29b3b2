"""Objects that hold references to an optimizer still act on it after a resume, in the same topology too."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from deepspeed_ucp.testing import WorldPool
from tests.support.engines.cases import Case

pytest.importorskip("transformers")

from tests.support.engines import references

STAGES = (0, 1, 2, 3)
CASES = [(stage, (stage + 1) % 4, False) for stage in STAGES]
CASES += [pytest.param(*pair, True, marks=pytest.mark.exhaustive) for pair in product(STAGES, STAGES)]
"""Stages of the run that saves and of the other topology, and whether each scheduler is tried in every way."""
LOSS_TOLERANCE = 1e-4

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
"""Has a GradScaler of torch."""
ON_CPU = {"offload_optimizer": {"device": "cpu"}}
TRAINED = [Case(stage, 1, precision) for stage in STAGES for precision in ("fp32", "bf16", "fp16")]
TRAINED += [Case(stage, 1, config=AUTOCAST) for stage in STAGES]
TRAINED += [Case(stage, 1, zero=ON_CPU) for stage in (2, 3)]
TRAINED += [Case(1, 1, "bf16", config={"data_types": {"grad_accum_dtype": "fp32"}})]  # BF16_Optimizer


def list_rows(turn: int, every: bool) -> list[tuple[str, str]]:
    """List schedulers and how the script gives them: holders in every way, others in one that depends on the turn.

    Args:
        every: all schedulers in every way.
    """
    found = []
    for number, name in enumerate([*references.HOLDERS, *references.SCHEDULERS]):
        ways = references.list_ways(name)
        is_one = not every and name in references.SCHEDULERS
        found += [(name, way) for way in ([ways[(number + turn) % len(ways)]] if is_one else ways)]
    return found


@pytest.mark.parametrize(("stage", "other", "every"), CASES)
def test_schedulers_go_on_as_in_the_uninterrupted_run(
    stage: int,
    other: int,
    every: bool,
    tmp_path: Path,
    ucp_worlds: WorldPool,
    subtests: pytest.Subtests,
) -> None:
    """Their rates and betas, and the losses of five steps, in the same topology and in another one."""
    case, rows = Case(stage, 1), list_rows(stage, every)
    world = ucp_worlds.get(1)
    (expected,) = world.run(references.train_each, case, rows, str(tmp_path))
    for target in (case, Case(other, 2)):
        found = ucp_worlds.get(target.dp).run(references.resume_each, target, rows, str(tmp_path))[0]
        for (name, way), before, (is_direct, after) in zip(rows, expected, found, strict=True):
            with subtests.test(f"{name}-{way}-{case}→{target}"):
                assert is_direct is (target != case and (stage or other) != 0)
                assert after.hyper == [pytest.approx(each, rel=1e-6) for each in before.hyper]
                assert after.losses == pytest.approx(before.losses, rel=0 if target == case else LOSS_TOLERANCE)


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_a_load_replaces_no_object_of_an_engine_that_has_trained(
    case: Case, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """Param groups and their list, in each layer, parameters, masters, states, scheduler and loss scalers."""
    world = ucp_worlds.get(1)
    world.run(references.train_each, case, [("LambdaLR", "given")], str(tmp_path))
    for target in (case, case.but(stage=(case.stage + 1) % 4, zero={})):
        ((is_direct, replaced),) = world.run(references.list_replaced, target, str(tmp_path))
        assert (is_direct, replaced) == (target != case, [])
