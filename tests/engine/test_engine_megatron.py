"""Checkpoints as Megatron-DeepSpeed's releases write them: metadata, fused layouts, nested modules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_3d import Launch, Local, Runs, attempt, compare_joined
from engine_megatron import RELEASES, make_client_states, resume_each, save_each

from deepspeed_ucp.testing import LOSS_TOLERANCE, WorldPool

Plain = partial(Launch, pipeline=False)

TP2_PP2 = Launch(2, 2)
QKV_RULES = [
    {
        "match": r".*\.self_attention\.query_key_value\.(?:weight|bias)",
        "pattern": "shard-nc",
        "parts": [32, 32, 32],
    }
]


class Saves(Runs):
    """Runs that are saved once with each release's client state."""

    def each(self, model: str, launch: Launch, *, nested: bool = False) -> tuple[list[Local], list[str]]:
        """The ranks of a run, and the folders by release."""
        folder = self.folder(model, launch)
        if (model, launch) not in self._saved:
            states = make_client_states(model, launch)
            self._saved[model, launch] = self.run(launch, save_each, model, launch, folder, states, nested)
        return self._saved[model, launch], [f"{folder}/{release}" for release in RELEASES]


@pytest.fixture(scope="module")
def runs(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(ucp_worlds, tmp_path_factory.mktemp("megatron"))


def check(saved: Sequence[Local], resumed: Sequence[Sequence[Local]], model: str) -> None:
    """Every load of every release brought back every bit, and training goes on."""
    for number, _ in enumerate(resumed[0]):
        loaded = [each[number] for each in resumed]
        assert all(local.direct for local in loaded), loaded[0].reason
        count, differences = compare_joined(saved, loaded, model)
        assert count > 80
        assert not differences, "\n".join(differences[:20])
    assert resumed[0][-1].losses == pytest.approx(saved[0].losses, rel=LOSS_TOLERANCE["fp32"])


@pytest.mark.parametrize("patterns", ["megatron-gpt", {"rules": QKV_RULES}], ids=["family", "rules"])
@pytest.mark.parametrize("target", [Launch(4, 1), Launch(1, 2)], ids=str)
def test_metadata_of_every_release(target: Launch, patterns: Any, runs: Saves) -> None:
    saved, folders = runs.each("megatron", TP2_PP2)
    check(saved, runs.run(target, resume_each, "megatron", target, folders, patterns), "megatron")


def test_client_state_comes_back(runs: Saves) -> None:
    _, folders = runs.each("megatron", TP2_PP2)
    target = Launch(4, 1)
    resumed = runs.run(target, resume_each, "megatron", target, folders[:1], "megatron-gpt")
    expected = make_client_states("megatron", TP2_PP2)["newest"]
    found = resumed[0][0].client_state
    assert found is not None
    assert {key: found.get(key) for key in expected} == expected
    assert found["args"].num_attention_heads == 8


# --- the fused query, key and value


@pytest.mark.parametrize(
    ("model", "family"),
    [("interleaved", "megatron-gpt-interleaved"), ("megatron-llama", "megatron-llama")],
    ids=["interleaved", "blocks"],
)
@pytest.mark.parametrize("target", [Plain(4, stage=1), Plain(1, stage=3)], ids=str)
def test_fused_layouts(model: str, family: str, target: Launch, runs: Saves) -> None:
    saved, folders = runs.each(model, Plain(2, stage=2))
    check(saved, runs.run(target, resume_each, model, target, [folders[0], folders[3]], family), model)


@pytest.mark.parametrize("model", ["interleaved", "megatron-llama"])
def test_fused_layouts_are_not_guessed(model: str, runs: Saves) -> None:
    _, folders = runs.each(model, Plain(2, stage=2))
    target = Plain(4, stage=1)
    refusals = runs.run(target, attempt, model, target, folders[0])
    assert {refusal.error for refusal in refusals} == {"MismatchError"}
    assert len({refusal.message for refusal in refusals}) == 1
    for text in (
        "query_key_value.weight: (32, 32)",
        "per-rank [q; k; v]",
        "interleaved per head group",
        "megatron-gpt-",
    ):
        assert text in refusals[0].message
    assert "self_attention.dense" not in refusals[0].message
    assert all(refusal.changed == [] for refusal in refusals)


def test_fused_gate_and_up_are_not_guessed(runs: Saves) -> None:
    """Releases without `parameter_with_2_sub_params_cat_dim_0`; Megatron's attributes do not tell either."""
    _, folders = runs.each("megatron-llama", Plain(2, stage=2))
    target = Plain(4, stage=1)
    rules = {"rules": [{**QKV_RULES[0], "parts": [32, 16, 16]}]}
    newest, silent = folders[0], folders[3]
    assert runs.run(target, attempt, "megatron-llama", target, newest, rules)[0].error == ""
    refusal = runs.run(target, attempt, "megatron-llama", target, silent, rules)[0]
    assert refusal.error == "MismatchError"
    assert "dense_h_to_4h.weight: (48, 32)" in refusal.message
    assert "gate and up" in refusal.message


# --- what a TP=1 source does not say


def test_tp1_metadata_lacks_the_rows(runs: Saves) -> None:
    """Its metadata names no row-parallel parameters: upstream cuts them on the wrong dimension, silently."""
    source, target = Launch(1, 2), Launch(2, 2)
    saved, folders = runs.each("unmarked", source)
    refusal = runs.run(target, attempt, "unmarked", target, folders[0])[0]
    assert refusal.error == "MismatchError"
    for name in (
        "self_attention.dense.weight",
        "mlp.dense_4h_to_h.weight",
        "query_key_value.weight",
        "dense_h_to_4h.bias",
    ):
        assert name in refusal.message
    assert "layernorm" not in refusal.message
    assert refusal.changed == []
    check(saved, runs.run(target, resume_each, "unmarked", target, folders, "megatron-gpt"), "unmarked")


def test_live_attributes_tell_the_rows_of_a_tp1_source(runs: Saves) -> None:
    source, target = Launch(1, 2), Launch(2, 2)
    saved, folders = runs.each("unmarked", source)
    resumed = runs.run(target, resume_each, "megatron", target, folders, {"rules": QKV_RULES})
    check(saved, resumed, "megatron")


# --- the module dict without a pipeline


@pytest.mark.parametrize(
    ("model", "source", "target"),
    [
        ("extras", Plain(2, stage=2), Plain(1, stage=3)),  # frozen parameters and buffers come from the dict
        ("extras", Plain(2, stage=2), Plain(4, stage=1)),
        ("megatron", Plain(2, stage=0), Plain(1, stage=2)),  # and so do the masters
    ],
    ids=["zero2→zero3", "zero2→zero1", "zero0→zero2"],
)
def test_nested_module(model: str, source: Launch, target: Launch, runs: Saves) -> None:
    saved, folders = runs.each(model, source, nested=True)
    patterns = {"family": "megatron-gpt", "rules": [{"match": r".*\.span", "pattern": "shard-v"}]}
    check(saved, runs.run(target, resume_each, model, target, [folders[0], folders[3]], patterns), model)


def test_the_dict_is_nested(runs: Saves) -> None:
    import torch

    _, folders = runs.each("extras", Plain(2, stage=2), nested=True)
    (path,) = Path(folders[0]).glob("*/mp_rank_01_model_states.pt")
    module = torch.load(path, weights_only=False)["module"]
    assert sorted(module) == ["language_model"]
    assert sorted(module["language_model"]) == ["embedding", "encoder"]
