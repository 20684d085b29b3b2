"""Pipelines: other numbers of stages, layers on other stages, tied modules, stages without parameters."""

from __future__ import annotations

import pytest
from engine_pipeline_targets import RANKS, Launch, Local, Runs, find_differences, join

from deepspeed_ucp.testing import LOSS_TOLERANCE, WorldPool

GPT = "EBBBBBBH"
TWICE = (
    "EBHBBBHB"  # at 4 stages the first, the second and the last hold the tied module, the first two use it twice at 2
)
PLAIN = "eBBBNh"  # a norm may be a stage of its own where ZeRO does not wait for equal numbers of param groups
EMPTY = "eBff"
BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}

BF16_PIPELINE = Launch(GPT, 2, 1, "bf16", config=BF16_OPTIMIZER)

ROUTES = [
    (Launch(GPT, 2), Launch(GPT, 4)),
    (Launch(GPT, 2), Launch(GPT, 1)),
    (Launch(GPT, 2), Launch(GPT, 2, method="type:embedding")),
    (Launch(GPT, 2), BF16_PIPELINE),
    (Launch(GPT, 1, 1, "bf16", config=BF16_OPTIMIZER), Launch(GPT, 4, 1, "bf16")),
    (Launch(GPT, 4, 0, "bf16"), Launch(GPT, 2, 1, "bf16", method="parameters")),
    (Launch(TWICE, 4), Launch(TWICE, 2)),
    (Launch(PLAIN, 4, 0), Launch(PLAIN, 2, 1)),
    (Launch(PLAIN, 2, 1), Launch(PLAIN, 4, 0)),
    (Launch(EMPTY, 4, 0), Launch(EMPTY, 1, 1)),
    (Launch(EMPTY, 1, 1), Launch(EMPTY, 2, 0)),
]


@pytest.fixture(scope="module")
def runs(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ucp_worlds, tmp_path_factory.mktemp("pipelines"))


@pytest.mark.parametrize(
    ("source", "target"), [pytest.param(*route, id=f"{route[0].layers}-{route[0]}->{route[1]}") for route in ROUTES]
)
def test_resumes_on_other_stages(source: Launch, target: Launch, runs: Runs) -> None:
    saved, resumed = runs.saved(source), runs.resumed(source, target)
    assert all(local.direct for local in resumed)
    differences = find_differences(join(saved), join(resumed))
    assert not differences, "\n".join(differences)
    if _same_copies(saved, resumed):  # else a stage computes with another one's untied parameters
        tolerance = LOSS_TOLERANCE["bf16" if "bf16" in (source.precision, target.precision) else "fp32"]
        assert resumed[0].losses == pytest.approx(saved[0].losses, rel=tolerance)


def _same_copies(saved: list[Local], resumed: list[Local]) -> bool:
    left, right = ({name: len(copies) for name, copies in join(each).parameters.items()} for each in (saved, resumed))
    return left == right or "tied_modules.embed.shift" not in left


@pytest.mark.parametrize("source", [Launch(PLAIN, 2), Launch(GPT, 2), BF16_PIPELINE], ids=lambda s: f"{s.layers}-{s}")
def test_same_stages_are_deepspeeds_own_load(source: Launch, runs: Runs) -> None:
    """Which leaves the untied copies of a tied module as constructed: they have to come from the masters."""
    saved, resumed = runs.saved(source), runs.resumed(source, source)
    assert [local.direct for local in resumed] == [False] * RANKS
    differences = find_differences(join(saved), join(resumed), buffers=False)  # the head's have no file
    assert not differences, "\n".join(differences)
    assert resumed[0].losses == saved[0].losses


def test_instances_of_tied_modules(runs: Runs) -> None:
    found = [local.ordinals for local in runs.saved(Launch(TWICE, 4))]
    weights = [each.get("tied_modules.embed.weight") for each in found]
    shifts = [each.get("tied_modules.embed.shift") for each in found]
    assert weights == [(0, 3, True), (1, 3, True), None, (2, 3, True)]
    assert shifts == [(0, 3, False), (1, 3, False), None, (2, 3, False)]


def test_copies_of_an_untied_parameter_differ(runs: Runs) -> None:
    """Else the tests above would not see a copy that went to the wrong stage."""
    first, last = join(runs.saved(Launch(GPT, 2))).parameters["tied_modules.embed.shift"]
    assert not first.fp32.equal(last.fp32)
