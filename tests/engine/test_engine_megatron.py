"""Checkpoints as Megatron-DeepSpeed's releases write them: metadata, fused layouts, nested modules."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from tests.support.covering import Row, params
from tests.support.engines.gpt import LAYERS, MODELS
from tests.support.engines.parallel import STEPS, Launch, Route, Runs
from tests.synth.megatron import client_state, megatron_args, old_universal_info, universal_info

RELEASES = ("newest", "2024-01", "2023-10", "none")


def make_client_states(model: str, launch: Launch) -> dict[str, dict[str, Any]]:
    """Return the `client_state` of `checkpointing.py` by release."""
    args = make_arguments(model, launch)
    infos = {
        "newest": universal_info(args, 256),
        "2024-01": old_universal_info(args, 256, pipeline_replicated=True),
        "2023-10": old_universal_info(args, 256),
        "none": None,
    }
    return {release: client_state(args, STEPS[0], infos[release]) for release in RELEASES}


def make_arguments(model: str, launch: Launch) -> Any:
    """Return Megatron-DeepSpeed's arguments for a model."""
    sizes = {"kv_heads": 0, "ffn": 0, "swiglu": False, "rmsnorm": False, "rotary": False, "untied": False, "bias": True}
    sizes.update(MODELS[model])
    return megatron_args(
        num_layers=LAYERS,
        hidden_size=sizes["hidden"],
        ffn_hidden_size=sizes["ffn"] or 4 * sizes["hidden"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"] or sizes["heads"],
        kv_channels=sizes["hidden"] // sizes["heads"],
        max_position_embeddings=sizes["context"],
        seq_length=sizes["context"],
        padded_vocab_size=sizes["vocabulary"],
        make_vocab_size_divisible_by=sizes["vocabulary_divisor"],
        tensor_model_parallel_size=launch.tp,
        pipeline_model_parallel_size=launch.pp,
        no_pipeline_parallel=not launch.pipeline,
        swiglu=sizes["swiglu"],
        normalization="rmsnorm" if sizes["rmsnorm"] else "layernorm",
        add_bias_linear=sizes["bias"],
        add_position_embedding=not sizes["rotary"],
        use_rotary_position_embeddings=sizes["rotary"],
        untie_embeddings_and_output_weights=sizes["untied"],
    )


Plain = partial(Launch, pipeline=False)

TP2_PP2, TP2, PP2 = Launch(2, 2), Plain(2, stage=2, world=2), Launch(1, 2)
TP2_STAGE0 = Plain(2, stage=0, world=2)
QKV_RULES = [
    {
        "match": r".*\.self_attention\.query_key_value\.(?:weight|bias)",
        "pattern": "shard-nc",
        "parts": [32, 32, 32],
    }
]
SPAN = {"family": "megatron-gpt", "rules": [{"match": r".*\.span", "pattern": "shard-v"}]}
ONE_DEGREE = [Plain(4, stage=1), Plain(1, stage=3, world=2)]
FUSED = {"interleaved": "megatron-gpt-interleaved", "megatron-llama": "megatron-llama"}


def name_row(row: Row) -> str:
    return "-".join(map(str, row))


def of_each(route: Route, releases: tuple[str, ...] = RELEASES) -> list[Route]:
    """Return the route for the save of each release."""
    return [replace(route, part=release) for release in releases]


@pytest.fixture(scope="module")
def runs(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    nested = [("extras", TP2), ("megatron", TP2_STAGE0)]
    return Runs(ucp_worlds, tmp_path_factory.mktemp("megatron"), make_client_states, nested)


def check_each(routes: list[Route], runs: Runs) -> None:
    """Check every bit and the losses of all routes, in one engine."""
    for route in routes:
        runs.check(route, routes)


PATTERNS = {"family": "megatron-gpt", "rules": {"rules": QKV_RULES}}


@pytest.mark.parametrize(
    ("target", "layout"),
    params([(Launch(4, 1), "family"), (PP2, "rules")], product([Launch(4, 1), PP2], PATTERNS), name_row),
)
def test_metadata_of_every_release(target: Launch, layout: str, runs: Runs) -> None:
    check_each(of_each(Route("megatron", TP2_PP2, target, PATTERNS[layout])), runs)


def test_client_state_comes_back(runs: Runs) -> None:
    routes = of_each(Route("megatron", TP2_PP2, Launch(4, 1), "megatron-gpt"))
    found = runs.resumed(routes[0], routes)[0].client_state
    expected = make_client_states("megatron", TP2_PP2)[RELEASES[0]]
    assert found is not None
    assert {key: found.get(key) for key in expected} == expected
    assert found["args"].num_attention_heads == 8


# --- the fused query, key and value


@pytest.mark.parametrize(
    ("target", "model"),
    params(list(zip(ONE_DEGREE, FUSED, strict=True)), product(ONE_DEGREE, FUSED), name_row),
)
def test_fused_layouts(target: Launch, model: str, runs: Runs) -> None:
    check_each(of_each(Route(model, TP2, target, FUSED[model]), ("newest", "none")), runs)


@pytest.mark.parametrize("model", FUSED)
def test_fused_layouts_are_not_guessed(model: str, runs: Runs) -> None:
    texts = "query_key_value.weight: (32, 32)", "per-rank [q; k; v]", "interleaved per head group", "megatron-gpt-"
    route = Route(model, TP2, Plain(4, stage=1), part="newest")
    ((refusal, *_),) = runs.check_refused(route, "MismatchError", *texts)
    assert "self_attention.dense" not in refusal.message


# --- metadata of a TP=1 source


def test_tp1_metadata_lacks_the_rows(runs: Runs) -> None:
    """Its metadata names no row-parallel parameters: upstream cuts them along the wrong dimension."""
    route = Route("unmarked", PP2, TP2_PP2, part="newest")
    names = (
        "self_attention.dense.weight",
        "mlp.dense_4h_to_h.weight",
        "query_key_value.weight",
        "dense_h_to_4h.bias",
    )
    ((refusal, *_),) = runs.check_refused(route, "MismatchError", *names)
    assert "layernorm" not in refusal.message
    check_each(of_each(replace(route, patterns="megatron-gpt"), ("newest", "none")), runs)


def test_live_attributes_tell_the_rows_of_a_tp1_source(runs: Runs) -> None:
    """The saving engine has no attributes, the loading one has them."""
    check_each(of_each(Route("megatron", PP2, TP2_PP2, {"rules": QKV_RULES}), ("2023-10", "none")), runs)


# --- the module dict without a pipeline


NESTED = [
    Route("extras", TP2, ONE_DEGREE[1], SPAN),  # frozen parameters and buffers come from the dict
    Route("megatron", TP2_STAGE0, Plain(1, stage=2, world=2), SPAN),  # and so do the masters
]
ALSO = Route("extras", TP2, Plain(4, stage=1), SPAN)


@pytest.mark.parametrize("route", params(NESTED, [ALSO], str))
def test_nested_module(route: Route, runs: Runs) -> None:
    check_each(of_each(route, ("newest", "none")), runs)


def test_the_dict_is_nested(runs: Runs) -> None:
    runs.saved("extras", TP2)
    (path,) = Path(runs.folder("extras", TP2, "newest")).glob("*/mp_rank_01_model_states.pt")
    module = torch.load(path, weights_only=False)["module"]
    assert sorted(module) == ["language_model"]
    assert sorted(module["language_model"]) == ["embedding", "encoder"]
