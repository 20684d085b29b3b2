"""The example's GPT on four ranks, between tensor, pipeline, sequence and data parallelism and all ZeRO stages."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing.compare import compare
from tests.support.covering import params
from tests.support.engines.gpt import MODELS, renames, shift_master
from tests.support.engines.parallel import Launch, Route, Runs, expect, join
from tests.support.engines.ranks import Load, Local

Plain = partial(Launch, pipeline=False)

TP2_PP2 = Launch(2, 2)
TP2_PP2_BF16 = Launch(2, 2, precision="bf16", fp32_grads=True)  # BF16_Optimizer
TP2_PP2_STAGE0 = Launch(2, 2, 0)
DP4 = Launch()


def go(model: str, source: Launch, target: Launch, patterns: Any = None, **arguments: bool) -> Route:
    """Make a route, with rules that rename parameters if one side is a pipeline and the other is not."""
    if source.pipeline != target.pipeline and patterns is None:
        patterns = {"rename": renames(model, to_pipeline=target.pipeline)}
    return Route(model, source, target, patterns, arguments)


ROUTES = [
    replace(go("dense", TP2_PP2, Launch(1, 2)), saves=True),
    go("dense", TP2_PP2, Launch(2, 1)),
    go("dense", TP2_PP2, Launch(1, 4, method="parameters")),
    go("dense", TP2_PP2, Plain(1, stage=3)),
    replace(go("dense", TP2_PP2_BF16, Launch(4, 1)), saves=True),
    go("dense", TP2_PP2_STAGE0, Launch(1, 2)),
    replace(go("dense", DP4, TP2_PP2_BF16), saves=True),
    go("dense", DP4, Launch(1, 4, 0, method="uniform")),
    replace(go("llama", Plain(2, stage=2), Plain(1, stage=3, sp=2)), saves=True),
    go("llama", Launch(1, 2, precision="bf16"), Plain(4, stage=2)),
    go("moe", Plain(2, stage=3), Launch(2, 2)),
]
MORE = [
    go("dense", TP2_PP2, Plain(1, stage=1, sp=2)),
    go("dense", TP2_PP2_BF16, Plain(2, stage=3, precision="bf16")),
    go("dense", Plain(1, stage=1), Launch(2, 2, method="parameters")),
    go("llama", Plain(2, stage=2), Launch(1, 2)),
    go("dense", Launch(1, 2, 0, "bf16"), Launch(2, 1, precision="bf16")),
    go("dense", TP2_PP2, Launch(4, 1)),
    go("dense", TP2_PP2, Launch(1, 2, world=2)),
    go("dense", TP2_PP2, Plain(2, stage=2)),
    go("dense", TP2_PP2_BF16, Launch(1, 2, precision="bf16")),
    go("dense", TP2_PP2_STAGE0, Launch(1, 1, 0)),
    go("dense", DP4, TP2_PP2_STAGE0),
    replace(go("llama", Plain(2, stage=2), Plain(4, stage=1)), saves=True),
    go("llama", Launch(1, 2, precision="bf16"), Launch(2, 2, precision="bf16")),
    go("moe", Plain(2, stage=3), Plain(1, stage=1)),
    go("moe", Plain(2, stage=3), Plain(4, stage=3)),
]
"""Exhaustive ones."""

SAME = [
    go("dense", TP2_PP2, TP2_PP2),
    go("dense", TP2_PP2_BF16, TP2_PP2_BF16),
    go("dense", TP2_PP2_STAGE0, TP2_PP2_STAGE0),
    go("dense", Plain(2, stage=0), Plain(2, stage=0)),
    go("llama", Plain(2, stage=2), Plain(2, stage=2, sp=2)),  # sequence parallelism is folded into data parallelism
]
WEIGHTS = [
    replace(route, arguments=arguments)
    for route in (
        go("dense", TP2_PP2, Launch(1, 2)),
        go("dense", TP2_PP2_STAGE0, Launch(4, 1)),
        go("llama", Plain(2, stage=2), Plain(1, stage=3, sp=2)),
    )
    for arguments in ({"load_module_only": True}, {"load_optimizer_states": False})
]
EVERY = [*ROUTES, *SAME, *WEIGHTS, *(MORE if os.environ.get("UCP_EXHAUSTIVE") else ())]
POSITIONS = "language_model.embedding.position_embeddings.weight"
HEAD = "language_model.output_layer.weight"
WORDS = "language_model.embedding.word_embeddings.weight"


@pytest.mark.releases
@pytest.mark.parametrize("route", params(ROUTES, MORE, str))
def test_resumes(route: Route, runs: Runs) -> None:
    runs.check(route, EVERY)


@pytest.mark.parametrize("route", SAME, ids=str)
def test_same_topology_is_deepspeeds_own_load(route: Route, runs: Runs) -> None:
    """Unless it would not restore all parameters."""
    saved, resumed = runs.saved(route.model, route.source), runs.resumed(route, EVERY)
    assert [local.direct for local in resumed] == [route.source.loses_copies] * 4
    assert resumed[0].losses == pytest.approx(saved[0].losses, rel=route.tolerance)


def test_layers_move_between_stages(runs: Runs) -> None:
    """Other partition methods cut the layers elsewhere."""
    stages = {
        route.target.method: sorted({local.layers for local in runs.resumed(route, EVERY)})
        for route in ROUTES
        if route.target.pp == 4
    }
    assert [len(cut) for cut in stages.values()] == [4, 4]
    assert stages["parameters"] != stages["uniform"]


# --- tied modules


TIED = "tied_modules.embed.position_embeddings.weight"


@pytest.mark.parametrize(
    ("source", "target", "warned"),
    [
        (TP2_PP2, Launch(1, 2), []),  # each stage gets its copy back
        (TP2_PP2, Launch(2, 1), [1, 0, 0, 0]),  # the first stage's copy counts
        (TP2_PP2_STAGE0, Launch(1, 2), [1]),  # no file has the last stage's copy
    ],
    ids=["both", "first", "unsaved"],
)
def test_positions_of_stages(source: Launch, target: Launch, warned: list[int], runs: Runs) -> None:
    """DeepSpeed ties the word embeddings only: the last stage's positions decay without ever having a gradient."""
    saved = join(runs.saved("dense", source), "dense").parameters
    assert not saved[POSITIONS].fp32.equal(saved[f"{POSITIONS}#1"].fp32)
    assert saved[WORDS].fp32.equal(saved[f"{WORDS}#1"].fp32)
    resumed = runs.resumed(go("dense", source, target), EVERY)
    loaded = join(resumed, "dense").parameters
    assert loaded[POSITIONS].fp32.equal(saved[POSITIONS].fp32)
    assert (f"{POSITIONS}#1" in loaded) == (target.pp == 2)
    if target.pp == 2:
        assert loaded[f"{POSITIONS}#1"].fp32.equal(saved[POSITIONS if warned else f"{POSITIONS}#1"].fp32)
    counts = [len(local.list_messages("WARNING", TIED)) for local in resumed]
    assert counts[: len(warned)] == warned and (warned or not any(counts))
    assert not any(local.list_messages("WARNING", "word_embeddings") for local in resumed if source != TP2_PP2_STAGE0)


# --- the padding of vocabularies

ROWS = {1: 264, 2: 272, 4: 288}
PADDED = [
    go("padded", TP2_PP2, DP4),
    go("padded", TP2_PP2, Launch(4, 1)),
    go("padded", TP2_PP2, Launch(2, 1)),
    go("padded-llama", Plain(2, stage=2), Plain(4, stage=3)),
    go("padded-llama", Plain(2, stage=2), Plain(1, stage=1)),
]


@pytest.mark.parametrize("route", params([PADDED[1], PADDED[3]], PADDED, str))
def test_padding(route: Route, runs: Runs) -> None:
    model = route.model
    old, new = ROWS[route.source.tp], ROWS[route.target.tp]
    saved, resumed = runs.check(route, losses=new == old)
    untied = MODELS[model].get("untied", False)
    before, after = (join(locals_, model).parameters[HEAD if untied else WORDS] for locals_ in (saved, resumed))
    assert (len(before.fp32), len(after.fp32)) == (old, new)
    kept = slice(MODELS[model]["vocabulary"], min(old, new))  # rows of padding that both sides have
    assert before.tensors["exp_avg"][kept].abs().sum() > 0  # they are trained
    assert after.tensors["exp_avg"][kept].equal(before.tensors["exp_avg"][kept])
    messages = resumed[0].list_messages("INFO", f"padded to {new} rows")
    assert len(messages) == ((2 if untied else 1) if new > old else 0)


# --- frozen parameters and buffers

SPAN = {"rules": [{"match": r"\d+\.span", "pattern": "shard-v"}]}
EXTRAS = [
    go("extras", TP2_PP2, Launch(4, 1), SPAN),
    go("extras", TP2_PP2, Launch(1, 2), SPAN),
    go("extras", Plain(2, stage=2), Plain(1, stage=3), {"rules": [{"match": r".*\.span", "pattern": "shard-v"}]}),
]


@pytest.mark.parametrize("route", params([EXTRAS[0], EXTRAS[2]], EXTRAS, str))
def test_frozen_parameters_and_buffers(route: Route, runs: Runs) -> None:
    state = join(runs.check(route)[0], "extras")
    assert sorted(name.rpartition(".")[2] for name in state.buffers) == ["passes"] * 3 + ["span"] * 3
    assert sum(each.fp32 is None for each in state.parameters.values()) == 6


def test_a_buffer_that_nothing_settles_is_refused(runs: Runs) -> None:
    route = go("extras", TP2_PP2, Launch(1, 2))
    runs.check_refused(route, "MismatchError", ".span: (16,) on 2 ranks in the checkpoint")


# --- stages without parameters


Short = partial(Launch, stage=0, method="uniform")
SHORT = [
    go("short", Short(1, 2), Short(1, 4)),
    go("short", Short(1, 4), Short(2, 2)),
    go("short", Short(1, 4), Short(2, 1, stage=1)),
    go("short", Short(2, 1, stage=1), Short(1, 4)),
]


@pytest.mark.parametrize("route", params(SHORT[1:3], SHORT, str))
def test_stages_without_parameters(route: Route, runs: Runs) -> None:
    """DeepSpeed trains such stages at stage 0 in fp32 only."""
    saved, resumed = runs.check(route, least=15)
    empty = [local.layers for local in (*saved, *resumed) if not local.state.parameters]
    assert empty == [(2, 2)] * (4 in (route.source.pp, route.target.pp))


# --- saving


@pytest.mark.parametrize("route", params(*([each for each in routes if each.saves] for routes in (ROUTES, MORE)), str))
def test_a_save_after_the_resume_is_deepspeeds_own(route: Route, runs: Runs) -> None:
    resumed = runs.resumed(route, EVERY)
    loaded = [mend_copies(local) for local in runs.load(route.model, route.target, {}, runs.again(route), plugin=False)]
    count, differences = compare(join(resumed, route.model), join(loaded, route.model))
    assert count > 80
    assert not differences, "\n".join(differences[:20])
    assert loaded[0].losses == pytest.approx(resumed[0].losses, rel=route.tolerance)


def mend_copies(local: Local) -> Local:
    """Restore copies that DeepSpeed restores in the next step: a tied layer with a forward_fn has no file."""
    for name, state in local.state.parameters.items():
        if local.place.pp_rank and name.startswith("tied_modules.") and state.fp32 is not None:
            state.value = state.fp32.to(state.value.dtype)
    return local


# --- arguments of load_checkpoint


@pytest.mark.parametrize("route", WEIGHTS, ids=str)
def test_weights_only(route: Route, runs: Runs) -> None:
    resumed = runs.resumed(route, EVERY)
    saved, loaded = join(runs.saved(route.model, route.source), route.model), join(resumed, route.model)
    if route.source.loses_copies:
        saved.parameters = {name: state for name, state in saved.parameters.items() if "#" not in name}
    expected = expect(saved, loaded)
    if "load_module_only" in route.arguments:
        expected.counters = dict.fromkeys(expected.counters, 0)
    count, differences = compare(expected, loaded, optimizer_states=False)
    assert count > 25
    assert not differences, "\n".join(differences[:20])
    moments = [state.tensors.get("exp_avg") for state in loaded.parameters.values()]
    assert not any(moment is not None and moment.any() for moment in moments)


# --- one rank's error is all ranks' error


def test_one_ranks_error_is_the_same_on_all(runs: Runs) -> None:
    folder = runs.folder("dense", TP2_PP2)
    loads = Load(folder, unreadable="mp_rank_02"), Load(folder)
    _, loaded = runs.check_refused(go("dense", TP2_PP2, Launch(2, 1)), "", "mp_rank_02", loads=loads)
    assert loaded[0].error == ""


def test_replicas_that_differ_are_refused(runs: Runs, tmp_path: Path) -> None:
    """Rank 1 drifted; a rule can choose the mean."""
    source, target = Plain(2, stage=2), Plain(1, stage=1)
    before = join(runs.saved("llama", source), "llama")
    folder = tmp_path / "drifted"
    shutil.copytree(runs.folder("llama", source), folder)
    name = "language_model.encoder.final_layernorm.weight"
    shift_master(folder, name, 0.25)
    loads = [Load(str(folder))]
    runs.check_refused(go("llama", source, target), "MismatchError", name, "2.500e-01", loads=loads)
    mean = {"rules": [{"match": name.replace(".", r"\."), "pattern": "partial"}]}
    resumed = runs.load("llama", target, {"universal": {"patterns": mean}}, str(folder))
    expected = before.parameters[name].fp32 + 0.125
    torch.testing.assert_close(join(resumed, "llama").parameters[name].fp32, expected, rtol=0, atol=1e-7)
