"""examples/megatron_gpt: equal losses and gradients under every topology, and its checkpoints."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import hjson
import numpy as np
import pytest
import torch
import torch.distributed as dist
from config import PRESETS, Degrees, GPTConfig
from layers import cut_weight, draw_weight
from metadata import universal_checkpoint_info
from parallel import Line
from runs import Outcome, count_differing_bits, gather_atoms, merge_stages, plain_name
from training import Trainer

from deepspeed_ucp.tensor_parallel.rename import rename_names
from deepspeed_ucp.tensor_parallel.rules import from_config
from deepspeed_ucp.testing import WorldPool
from tests.support.covering import params

LLAMA_MOE = replace(PRESETS["tiny-moe"], layers=2, hidden=32, ffn=32, kv_heads=2, heads=4, context=16)
GPT = replace(PRESETS["tiny"], layers=2, hidden=32, heads=4, context=16, vocabulary=250)
SPREAD = replace(PRESETS["tiny-moe-ep"], layers=2, hidden=32, ffn=32, kv_heads=2, heads=4, context=16)
RANKS = 4
PLACES = {  # the first two have all kinds of degrees, the others are exhaustive
    "tp2-pp2-zero1": (Degrees(tp=2, pp=2), 1),
    "tp2-sp2-zero3": (Degrees(tp=2, sp=2, pipeline=False), 3),
    "tp2-dp2-zero2": (Degrees(tp=2, pipeline=False), 2),
    "sp2-dp2-zero1": (Degrees(sp=2, pipeline=False), 1),
}


BATCH, STEPS = 4, 3


def train_ranks(config: GPTConfig, degrees: Degrees, stage: int) -> tuple[list[float], dict[str, Any]]:
    """Train STEPS steps; return the losses and this rank's stage of the state."""
    clipping = {"gradient_clipping": 0.0} if config.deepspeed_moe else {}  # its norm depends on the degree
    trainer = Trainer(config, degrees, {**make_ds_config(stage), **clipping})
    losses = [trainer.train_step() for _ in range(STEPS)]
    return losses, {name: state["fp32"] for name, state in gather_atoms(trainer).items()}


def make_ds_config(stage: int) -> dict[str, Any]:
    # The steps of SGD are proportional to the gradients, so a wrong factor is visible.
    return {
        "train_batch_size": BATCH,
        "steps_per_print": 1 << 30,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
    }


def describe(config: GPTConfig, degrees: Degrees) -> dict[str, tuple[tuple[int, ...], bool, int, int]]:
    """Return shape and Megatron's attributes of this rank's parameters, without an engine."""
    from gpt import GPT, make_pipeline
    from parallel import ParallelState

    parallel = ParallelState(degrees.tp, degrees.pp, degrees.sp)
    model: torch.nn.Module = (
        make_pipeline(config, parallel, degrees.partition_method) if degrees.pipeline else GPT(config, parallel)
    )
    return {
        name: (tuple(p.shape), p.tensor_model_parallel, p.partition_dim, p.partition_stride)  # type: ignore[attr-defined]
        for name, p in model.named_parameters()
    }


def save_client_state(config: GPTConfig, degrees: Degrees, folder: str) -> None:
    trainer = Trainer(config, degrees, make_ds_config(1))
    trainer.train_step()
    trainer.save(folder)
    dist.barrier()


def train(worlds: WorldPool, config: GPTConfig, degrees: Degrees, stage: int) -> tuple[list[float], dict[str, Any]]:
    results = worlds.get(RANKS).run(train_ranks, config, degrees, stage)
    atoms = merge_stages(Outcome(atoms={n: {"fp32": a} for n, a in part.items()}) for _, part in results)
    return results[0][0], {name: state["fp32"] for (name, instance), state in atoms.items() if instance == 0}


@pytest.fixture(scope="module", params=[GPT, LLAMA_MOE], ids=["gpt", "llama-moe"])
def reference(request: pytest.FixtureRequest, ucp_worlds: WorldPool) -> tuple[GPTConfig, list[float], dict[str, Any]]:
    """The model on only data-parallel ranks, without parallel layers."""
    # The same padding of the vocabulary under tp 1 and 2: its rows are terms of the softmax.
    config = replace(request.param, vocabulary_divisor=64)
    return config, *train(ucp_worlds, config, Degrees(), 1)


@pytest.mark.engine
@pytest.mark.parametrize("place", params([*PLACES][:2], PLACES))
def test_every_topology_trains_the_same_model(
    reference: tuple[GPTConfig, list[float], dict[str, Any]], place: str, ucp_worlds: WorldPool
) -> None:
    config, losses, weights = reference
    degrees, stage = PLACES[place]
    found_losses, found = train(ucp_worlds, replace(config, vocabulary_divisor=64 // degrees.tp), degrees, stage)
    assert found.keys() == weights.keys()
    # fp32 sums have another order: the tolerance is a few units in the last place of a loss of 5.
    np.testing.assert_allclose(found_losses, losses, rtol=0, atol=4e-6)
    for name, value in weights.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.engine
def test_losses_of_experts_are_equal_at_any_degree(ucp_worlds: WorldPool) -> None:
    losses, weights = train(ucp_worlds, SPREAD, Degrees(pipeline=False), 1)
    for ep, stage in ((2, 1), (4, 2)):
        found_losses, found = train(ucp_worlds, SPREAD, Degrees(ep=ep, pipeline=False), stage)
        assert found.keys() == weights.keys()
        assert sum(".deepspeed_experts.3." in name for name in found) == 2 * SPREAD.layers
        np.testing.assert_allclose(found_losses, losses, rtol=0, atol=4e-6)
        for name, value in weights.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-5, err_msg=f"ep {ep}: {name}")


@pytest.mark.engine
@pytest.mark.parametrize("config", [GPT, LLAMA_MOE], ids=["gpt", "llama-moe"])
@pytest.mark.parametrize("degrees", [Degrees(tp=2, pp=2), Degrees(tp=2, pipeline=False)], ids=["pipeline", "plain"])
def test_the_checkpoint_records_how_each_parameter_is_cut(
    config: GPTConfig, degrees: Degrees, ucp_worlds: WorldPool
) -> None:
    info = universal_checkpoint_info(config, degrees)
    kinds = {
        "vocabulary": info["vocabulary_parameter_patterns"],
        "replicated": info["tp_replicated_parameter_patterns"],
        "row": info["parameter_with_row_parallelism_patterns"],
        "fused": [pattern for rule in info["parameter_with_sub_params"] for pattern in rule["patterns"]],
    }
    for described in ucp_worlds.get(RANKS).run(describe, config, degrees):
        for name, (_, is_cut, dim, stride) in described.items():
            matching = [kind for kind, patterns in kinds.items() if any(re.fullmatch(p, name) for p in patterns)]
            expected = {(False, -1): ["replicated"], (True, 1): ["row"]}.get((is_cut, dim))
            if expected is None:
                is_fused = stride > 1 or "query_key_value" in name
                expected = ["fused"] if is_fused else ["vocabulary"] if matching else []
            assert matching == expected, name
            assert matching or name.split(".")[-2] == "dense_h_to_4h", name


@pytest.mark.engine
def test_the_client_state_has_megatrons_keys(ucp_worlds: WorldPool, tmp_path: Any) -> None:
    ucp_worlds.get(RANKS).run(save_client_state, GPT, Degrees(tp=2, pp=2), str(tmp_path))
    state = torch.load(tmp_path / "global_step1" / "mp_rank_03_model_states.pt", weights_only=False)
    assert state["iteration"] == 1
    assert state["checkpoint_version"] == 3.0
    assert state["args"].padded_vocab_size == 256
    assert state["args"].tensor_model_parallel_size == 2
    assert state["universal_checkpoint_info"]["original_vocab_size"] == 250


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_each_block_of_a_fused_tensor_is_cut_separately(tp: int, dim: int) -> None:
    whole = torch.arange(16 * 16).view(16, 16)
    parts = [cut_weight(whole, Line(tuple(range(tp)), rank, None), dim, (8, 4, 4)) for rank in range(tp)]
    query = torch.cat([part.narrow(dim, 0, 8 // tp) for part in parts], dim)
    value = torch.cat([part.narrow(dim, 12 // tp, 4 // tp) for part in parts], dim)
    assert torch.equal(query, whole.narrow(dim, 0, 8))
    assert torch.equal(value, whole.narrow(dim, 12, 4))


def test_a_width_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"widths \(8, 3, 3\) along dimension 0 cannot be cut for 2 ranks"):
        cut_weight(torch.zeros(14, 2), Line((0, 1), 0, None), 0, (8, 3, 3))


def test_padding_does_not_change_other_rows() -> None:
    rows = draw_weight(1, "word_embeddings", (250, 8), 0.02)
    assert torch.equal(draw_weight(1, "word_embeddings", (288, 8), 0.02)[:250], rows)
    assert not torch.equal(draw_weight(2, "word_embeddings", (250, 8), 0.02), rows)


@pytest.mark.parametrize(("tp", "rows"), [(1, 264), (2, 272), (4, 288)])
def test_the_vocabulary_is_padded_for_the_ranks(tp: int, rows: int) -> None:
    assert GPTConfig(vocabulary=257, vocabulary_divisor=8).padded_vocabulary(tp) == rows


@pytest.mark.parametrize(
    ("degrees", "stage", "message"),
    [
        (Degrees(pp=2), 2, "a pipeline needs ZeRO 0 or 1"),
        (Degrees(sp=2), 1, "and no sp"),
        (Degrees(pp=2, pipeline=False), 1, "pp 2 needs the pipeline build"),
        (Degrees(ep=2, pipeline=False), 1, "ep 2 does not divide the experts of deepspeed.moe"),
        (Degrees(tp=8), 1, "8/4 heads cannot be cut by tp 8"),
        (Degrees(sp=3, pipeline=False), 1, "8/4 heads cannot be cut by tp 1 × sp 3"),
    ],
)
def test_impossible_topologies_are_refused(degrees: Degrees, stage: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        degrees.check(PRESETS["tiny-llama"], stage)


@pytest.mark.parametrize(
    ("pipeline", "plain"),
    [
        ("tied_modules.embed.word_embeddings.weight", "language_model.embedding.word_embeddings.weight"),
        ("1.position_embeddings.weight", "language_model.embedding.position_embeddings.weight"),
        ("2.mlp.dense_h_to_4h.bias", "language_model.encoder.layers.0.mlp.dense_h_to_4h.bias"),
        ("6.weight", "language_model.encoder.final_layernorm.weight"),
        ("7.lm_head.weight", "language_model.output_layer.weight"),
    ],
)
def test_names_of_both_builds_are_parsed(pipeline: str, plain: str) -> None:
    assert plain_name(pipeline, layers=4) == plain_name(plain, layers=4)


def test_differing_bits_are_counted() -> None:
    saved = {("a", 0): {"fp32": np.array([1.0, 2.0], dtype=np.float32)}}
    wrong = {("a", 0): {"fp32": np.array([1.0, -2.0], dtype=np.float32)}}
    assert count_differing_bits(saved, saved) == (0, 1)
    assert count_differing_bits(saved, wrong) == (1, 1)
    with pytest.raises(ValueError, match="different parameters"):
        count_differing_bits(saved, {("b", 0): saved["a", 0]})


@pytest.mark.parametrize("name", ["zero1_pp", "zero1_pp_bf16", "zero2", "zero2_bf16", "zero3", "zero3_bf16"])
def test_configurations_match_the_builds_in_their_names(name: str, pytestconfig: pytest.Config) -> None:
    config = hjson.loads((pytestconfig.rootpath / "ds_configs" / f"megatron_{name}.json").read_text())
    stage = config["zero_optimization"]["stage"]
    Degrees(tp=2, pp=2 if "pp" in name else 1, pipeline="pp" in name).check(PRESETS["tiny"], stage)
    assert f"zero{stage}" in name
    assert ("bf16" in config) == name.endswith("bf16")


@pytest.mark.engine
@pytest.mark.parametrize("preset", ["tiny", "tiny-llama", "tiny-moe", "small"])
def test_the_name_rules_convert_between_the_builds(
    preset: str, ucp_worlds: WorldPool, pytestconfig: pytest.Config
) -> None:
    file = pytestconfig.rootpath / "examples" / "megatron_gpt" / "names.yaml"
    rules = [rename for rules in from_config(str(file)) for rename in rules.renames]
    config = replace(PRESETS[preset], hidden=32, context=16, ffn=32)
    pipeline, plain = (
        set().union(*ucp_worlds.get(RANKS).run(describe, config, degrees))
        for degrees in (Degrees(pp=2), Degrees(pipeline=False))
    )
    assert set(rename_names(pipeline, rules, plain).values()) == plain
    assert set(rename_names(plain, rules, pipeline).values()) == pipeline
