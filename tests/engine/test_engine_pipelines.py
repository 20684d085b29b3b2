"""Pipelines: other numbers of stages, layers on other stages, tied modules, stages without parameters."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest

from deepspeed_ucp.engine import Instance
from tests.releases import find_reason
from tests.support.covering import params
from tests.support.engines.parallel import Launch, Route, Runs, compare_joined, count_copies, join

GPT = "EBBBBBBH"
TWICE = "EBHBBBHB"  # at 4 stages the first, the second and the last hold the tied module; at 2 the first uses it twice
PLAIN = "eBBBNh"  # without ZeRO a norm alone may form a stage
EMPTY = "eBff"
SHIFT = "tied_modules.embed.shift"

Stages = partial(Launch, 1, method="uniform")
BF16_PIPELINE = Stages(2, 1, "bf16", fp32_grads=True)

ROUTES = [
    Route(GPT, Stages(2), Stages(4)),
    Route(GPT, Stages(2), Stages(1)),
    Route(GPT, Stages(2), Stages(2, method="type:embedding")),
    Route(GPT, Stages(2), BF16_PIPELINE),
    Route(GPT, Stages(1, 1, "bf16", fp32_grads=True), Stages(4, 1, "bf16")),
    Route(GPT, Stages(4, 0, "bf16"), Stages(2, 1, "bf16", method="parameters")),
    Route(TWICE, Stages(4), Stages(2)),
    Route(PLAIN, Stages(4, 0), Stages(2, 1)),
    Route(PLAIN, Stages(2, 1), Stages(4, 0)),
    Route(EMPTY, Stages(4, 0), Stages(1, 1)),
    Route(EMPTY, Stages(1, 1), Stages(2, 0)),
]
DUAL = [
    Route(GPT, Stages(2), Stages(2, dual=True)),
    Route(GPT, Stages(2, dual=True), Stages(4)),
    Route(TWICE, Stages(4, dual=True), Stages(2)),
]
MORE_DUAL = [
    Route(GPT, Stages(2, dual=True), Stages(1)),
    Route(TWICE, Stages(4), Stages(2, dual=True)),
    Route(GPT, Stages(2, dual=True), Stages(4, dual=True)),
    Route(GPT, Stages(2, dual=True), Stages(2, 0, "bf16", dual=True)),
]
SAME = [
    Route(GPT, Stages(2, dual=True), Stages(2, dual=True)),
    Route(PLAIN, Stages(2), Stages(2)),
    Route(GPT, Stages(2), Stages(2)),
    Route(GPT, BF16_PIPELINE, BF16_PIPELINE),
    Route(GPT, Stages(2, 0, "fp16"), Stages(2, 0, "fp16")),
]
OURS = Route(GPT, Stages(4, 0, "bf16"), Stages(4, 0, "bf16"))  # BF16_Optimizer, without ZeRO
WEIGHTS = [replace(route, arguments={"load_optimizer_states": False}) for route in (*SAME[2:], OURS)]
WEIGHTS.append(replace(SAME[3], arguments={"load_module_only": True}))
CHOSEN = [ROUTES[place] for place in (0, 2, 3, 5, 6, 8)]
EVERY = [*(ROUTES if os.environ.get("UCP_EXHAUSTIVE") else CHOSEN), *SAME, *DUAL, OURS, *WEIGHTS]
EVERY = [each for each in EVERY if not ((each.source.dual or each.target.dual) and find_reason("DualPipeV"))]


def check_route(route: Route, runs: Runs) -> None:
    """Compare losses unless a stage uses another stage's untied parameters."""
    saved, resumed = runs.check(route, EVERY, least=10, losses=False)
    left, right = (count_copies(SHIFT, join(each, route.model).parameters) for each in (saved, resumed))
    if left == right:
        assert resumed[0].losses == pytest.approx(saved[0].losses, rel=route.tolerance)


@pytest.mark.releases
@pytest.mark.parametrize("route", params(CHOSEN, ROUTES, str))
def test_resumes_on_other_stages(route: Route, runs: Runs) -> None:
    check_route(route, runs)


@pytest.mark.parametrize("route", params(DUAL, MORE_DUAL, str))
def test_two_stages_on_every_rank(route: Route, runs: Runs) -> None:
    """Under DualPipeV the layers of a rank are not contiguous."""
    check_route(route, runs)


@pytest.mark.parametrize("route", SAME, ids=str)
def test_same_stages_are_deepspeeds_own_load(route: Route, runs: Runs) -> None:
    """DeepSpeed does not restore untied copies of a tied module: they come from the masters."""
    saved, resumed = runs.saved(route.model, route.source), runs.resumed(route, EVERY)
    assert {local.direct for local in resumed} == {False}
    differences = compare_joined(saved, resumed, route.model)[1]
    assert not [each for each in differences if not each.startswith("buffer")]  # the head's have no file
    assert resumed[0].losses == saved[0].losses


def test_the_same_stages_that_deepspeeds_own_load_fails_on(runs: Runs) -> None:
    runs.check(OURS, EVERY, least=10)


@pytest.mark.parametrize("route", WEIGHTS, ids=str)
def test_weights_alone_of_the_same_stages(route: Route, runs: Runs) -> None:
    """Only the saved masters have the last stage's values of untied parameters of a tied module."""
    saved, resumed = (join(each, GPT) for each in (runs.saved(GPT, route.source), runs.resumed(route, EVERY)))
    assert {local.direct for local in runs.resumed(route, EVERY)} == {True}
    assert f"{SHIFT}#1" in resumed.parameters
    for name, state in resumed.parameters.items():
        assert state.value.equal(saved.parameters[name].value), name
        assert state.fp32 is None or state.fp32.to(state.value.dtype).equal(state.value), name


def test_a_rank_of_two_stages_holds_both_ends(runs: Runs) -> None:
    ranks = runs.saved(GPT, Stages(2, dual=True))
    layers = [{name.split(".")[0] for name in local.state.parameters} - {"tied_modules"} for local in ranks]
    assert sorted(map(sorted, layers)) == [["1", "6"], ["1", "6"], ["2", "3", "4", "5"], ["2", "3", "4", "5"]]


def test_instances_of_tied_modules(runs: Runs) -> None:
    found = [local.instances for local in runs.saved(TWICE, Stages(4))]
    weights = [each.get("tied_modules.embed.weight") for each in found]
    assert weights == [Instance(0, 3, True), Instance(1, 3, True), None, Instance(2, 3, True)]
    shifts = [each.get(SHIFT) for each in found]
    assert shifts == [Instance(0, 3, False), Instance(1, 3, False), None, Instance(2, 3, False)]


def test_copies_of_an_untied_parameter_differ(runs: Runs) -> None:
    """Otherwise the tests above would not notice a copy on the wrong stage."""
    parameters = join(runs.saved(GPT, Stages(2)), GPT).parameters
    assert not parameters[SHIFT].fp32.equal(parameters[f"{SHIFT}#1"].fp32)
