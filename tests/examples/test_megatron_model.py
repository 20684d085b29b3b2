"""examples/megatron_gpt: equal losses and gradients under every topology, and its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hjson
import numpy as np
import pytest
import torch
import torch.distributed as dist
from config import PRESETS, Degrees, GPTConfig
from layers import cut_weight, draw_weight
from metadata import megatron_arguments, universal_checkpoint_info
from parallel import Line
from runs import Outcome, count_differing_bits, gather_atoms, merge_stages
from training import Trainer

from deepspeed_ucp.tensor_parallel.metadata import from_universal_info
from deepspeed_ucp.tensor_parallel.rename import rename_names
from deepspeed_ucp.tensor_parallel.rules import from_attributes, from_config
from deepspeed_ucp.testing import WorldPool
from tests.support.covering import cover, params
from tests.tensor_parallel.shards import check_reshard, settle

ROOT = Path(__file__).parents[2]
SMALL = {"layers": 2, "hidden": 32, "heads": 4, "context": 16}
GPT = replace(PRESETS["tiny"], **SMALL, vocabulary=250)
LLAMA_MOE, SPREAD = (replace(PRESETS[name], **SMALL, ffn=32, kv_heads=2) for name in ("tiny-moe", "tiny-moe-ep"))
# The same padding of the vocabulary under tp 1 and 2: its rows are terms of the softmax.
REFERENCES = {
    "gpt": (replace(GPT, vocabulary_divisor=64), Degrees()),
    "llama-moe": (replace(LLAMA_MOE, vocabulary_divisor=64), Degrees()),
    "spread": (SPREAD, Degrees(pipeline=False)),
}
"""Models, and their topologies without parallel layers."""
RANKS, BATCH, STEPS = 4, 4, 3
PLACES = {  # the first two have all kinds of degrees, the others are exhaustive
    "tp2-pp2-zero1": (Degrees(tp=2, pp=2), 1),
    "tp2-sp2-zero3": (Degrees(tp=2, sp=2, pipeline=False), 3),
    "tp2-dp2-zero2": (Degrees(tp=2, pipeline=False), 2),
    "sp2-dp2-zero1": (Degrees(sp=2, pipeline=False), 1),
}
SPREAD_PLACES = {
    "ep2-zero1": (Degrees(ep=2, pipeline=False), 1),
    "ep4-zero2": (Degrees(ep=4, pipeline=False), 2),
}


def train_ranks(config: GPTConfig, degrees: Degrees, stage: int, folder: str) -> tuple[list[float], Outcome]:
    """Train STEPS steps and save; return the losses and this rank's stage of the state."""
    ds_config = {
        "train_batch_size": BATCH,
        "steps_per_print": 1 << 30,
        # The steps of SGD are proportional to the gradients, so a wrong factor is visible.
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0 if config.deepspeed_moe else 1.0,  # the norm of experts depends on the degree
    }
    trainer = Trainer(config, degrees, ds_config)
    losses = [trainer.train_step() for _ in range(STEPS)]
    trainer.save(folder)
    dist.barrier()
    return losses, Outcome(atoms={name: {"fp32": state["fp32"]} for name, state in gather_atoms(trainer).items()})


Trained = tuple[list[float], dict[str, Any]]


def train(worlds: WorldPool, folder: Path, config: GPTConfig, degrees: Degrees, stage: int) -> Trained:
    results = worlds.get(RANKS).run(train_ranks, config, degrees, stage, str(folder))
    atoms = merge_stages(outcome for _, outcome in results)
    return results[0][0], {name: state["fp32"] for (name, instance), state in atoms.items() if instance == 0}


@pytest.fixture(scope="module")
def references(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Train a model on only data-parallel ranks, once."""
    made: dict[str, Trained] = {}

    def find(name: str) -> Trained:
        if name not in made:
            made[name] = train(ucp_worlds, tmp_path_factory.mktemp(name), *REFERENCES[name], 1)
        return made[name]

    return find


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "place"),
    params(
        [
            *((name, place) for name in ("gpt", "llama-moe") for place in [*PLACES][:2]),
            *(("spread", place) for place in SPREAD_PLACES),
        ],
        [(name, place) for name in ("gpt", "llama-moe") for place in PLACES],
        "-".join,
    ),
)
def test_every_topology_trains_the_same_model(
    name: str, place: str, references: Callable[[str], Trained], ucp_worlds: WorldPool, tmp_path: Path
) -> None:
    """Also the losses of experts are equal at any degree. The client state has Megatron's keys."""
    (losses, weights), config = references(name), REFERENCES[name][0]
    degrees, stage = {**PLACES, **SPREAD_PLACES}[place]
    live = replace(config, vocabulary_divisor=config.vocabulary_divisor // degrees.tp)
    found_losses, found = train(ucp_worlds, tmp_path, live, degrees, stage)
    assert found.keys() == weights.keys()
    if name == "spread":
        assert sum(".deepspeed_experts.3." in each for each in found) == 2 * SPREAD.layers
    # fp32 sums have another order: the tolerance is a few units in the last place of a loss of 5.
    np.testing.assert_allclose(found_losses, losses, rtol=0, atol=4e-6)
    for each, value in weights.items():
        np.testing.assert_allclose(found[each], value, rtol=0, atol=2e-5, err_msg=each)
    if (name, degrees.pp) == ("gpt", 2):
        state = torch.load(tmp_path / f"global_step{STEPS}" / "mp_rank_03_model_states.pt", weights_only=False)
        assert (state["iteration"], state["checkpoint_version"]) == (STEPS, 3.0)
        assert (state["args"].padded_vocab_size, state["args"].tensor_model_parallel_size) == (256, 2)
        assert state["universal_checkpoint_info"]["original_vocab_size"] == 250


def describe(config: GPTConfig, degrees: Degrees) -> dict[str, tuple[bool, int, int]]:
    """Return Megatron's attributes of this rank's parameters, without an engine."""
    from gpt import GPT, make_pipeline
    from parallel import ParallelState

    parallel = ParallelState(degrees.tp, degrees.pp, degrees.sp)
    model: Any = (
        make_pipeline(config, parallel, degrees.partition_method) if degrees.pipeline else GPT(config, parallel)
    )
    attributes = ("tensor_model_parallel", "partition_dim", "partition_stride")
    return {name: tuple(getattr(p, each) for each in attributes) for name, p in model.named_parameters()}  # type: ignore[misc]


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
        for name, (is_cut, dim, stride) in described.items():
            matching = [kind for kind, patterns in kinds.items() if any(re.fullmatch(p, name) for p in patterns)]
            expected = {(False, -1): ["replicated"], (True, 1): ["row"]}.get((is_cut, dim))
            if expected is None:
                is_fused = stride > 1 or "query_key_value" in name
                expected = ["fused"] if is_fused else ["vocabulary"] if matching else []
            assert matching == expected, name
            assert matching or name.split(".")[-2] == "dense_h_to_4h", name


@pytest.mark.engine
@pytest.mark.parametrize("preset", ["tiny", "tiny-llama", "tiny-moe", "small"])
def test_the_name_rules_convert_between_the_builds(preset: str, ucp_worlds: WorldPool) -> None:
    file = str(ROOT / "examples" / "megatron_gpt" / "names.yaml")
    rules = [rename for rules in from_config(file) for rename in rules.renames]
    config = replace(PRESETS[preset], hidden=32, context=16, ffn=32)
    pipeline, plain = (
        set().union(*ucp_worlds.get(RANKS).run(describe, config, degrees))
        for degrees in (Degrees(pp=2), Degrees(pipeline=False))
    )
    assert set(rename_names(pipeline, rules, plain).values()) == plain
    assert set(rename_names(plain, rules, pipeline).values()) == pipeline


@cache
def build(preset: str, tp: int) -> list[dict[str, torch.nn.Parameter]]:
    """Build the model of every tensor-parallel rank in this process, without an engine."""
    from gpt import GPT

    one, lines = Line((0,), 0, None), [Line(tuple(range(tp)), rank, None) for rank in range(tp)]
    states: list[Any] = [SimpleNamespace(tensor=line, sequence=one, data=one, pipe=one) for line in lines]
    return [dict(GPT(PRESETS[preset], state).named_parameters()) for state in states]


FAMILIES = {"tiny": "megatron-gpt", "tiny-llama": "megatron-llama", "tiny-moe": "mixtral-moe"}
FACTORS: Any = (sorted(FAMILIES), ("family", "metadata", "attributes"), ((1, 2), (2, 4), (4, 1)))


@pytest.mark.parametrize(("preset", "origin", "degrees"), params(cover(*FACTORS), product(*FACTORS), str))
def test_rules_reshard_the_weights_to_other_degrees(preset: str, origin: str, degrees: tuple[int, int]) -> None:
    """Weights depend only on seed and name, so the expected shards of any degree are known."""
    config, (source, target) = PRESETS[preset], (build(preset, tp) for tp in degrees)
    saved = Degrees(tp=degrees[0], pipeline=False)
    attributes = from_attributes({name: vars(parameter) for name, parameter in target[0].items()})
    vocabulary = from_config({"original_vocab_size": config.vocabulary})
    rules = {
        "family": [*vocabulary, *from_config(FAMILIES[preset])],
        "metadata": [from_universal_info(universal_checkpoint_info(config, saved)), attributes],
        "attributes": [*vocabulary, attributes],
    }[origin]
    shapes = [{name: tuple(tuple(rank[name].shape) for rank in side) for name in side[0]} for side in (source, target)]
    settled = settle(list(source[0]), *shapes, rules, {"args": vars(megatron_arguments(config, saved))})
    assert settled.pairs.keys() == source[0].keys()
    for name, (have, want) in settled.pairs.items():
        sides = [[rank[name].detach().numpy() for rank in side] for side in (source, target)]
        check_reshard(have, sides[0], want, sides[1])


def test_padding_rounds_up_for_the_ranks_and_does_not_change_other_rows() -> None:
    config = GPTConfig(vocabulary=257, vocabulary_divisor=8)
    assert [config.padded_vocabulary(tp) for tp in (1, 2, 4)] == [264, 272, 288]
    rows = draw_weight(1, "word_embeddings", (250, 8), 0.02)
    assert torch.equal(draw_weight(1, "word_embeddings", (288, 8), 0.02)[:250], rows)
    assert not torch.equal(draw_weight(2, "word_embeddings", (250, 8), 0.02), rows)


def check(stage: int, **degrees: Any) -> Callable[[], None]:
    return partial(Degrees(**degrees).check, PRESETS["tiny-llama"], stage)


ATOMS = {("a", 0): {"fp32": np.array([1.0, 2.0], dtype=np.float32)}}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (check(2, pp=2), "a pipeline needs ZeRO 0 or 1"),
        (check(1, sp=2), "and no sp"),
        (check(1, pp=2, pipeline=False), "pp 2 needs the pipeline build"),
        (check(1, ep=2, pipeline=False), "ep 2 does not divide the experts of deepspeed.moe"),
        (check(1, tp=8), "8/4 heads cannot be cut by tp 8"),
        (check(1, sp=3, pipeline=False), "8/4 heads cannot be cut by tp 1 × sp 3"),
        (
            lambda: cut_weight(torch.zeros(14, 2), Line((0, 1), 0, None), 0, (8, 3, 3)),
            r"widths \(8, 3, 3\) along dimension 0 cannot be cut for 2 ranks",
        ),
        (lambda: count_differing_bits(ATOMS, {("b", 0): ATOMS["a", 0]}), "different parameters"),
    ],
)
def test_impossible_topologies_and_comparisons_are_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_differing_bits_are_counted() -> None:
    wrong = {("a", 0): {"fp32": np.array([1.0, -2.0], dtype=np.float32)}}
    assert (count_differing_bits(ATOMS, ATOMS), count_differing_bits(ATOMS, wrong)) == ((0, 1), (1, 1))


@pytest.mark.parametrize("name", ["zero1_pp", "zero1_pp_bf16", "zero2", "zero2_bf16", "zero3", "zero3_bf16"])
def test_configurations_match_the_builds_in_their_names(name: str) -> None:
    config = hjson.loads((ROOT / "ds_configs" / f"megatron_{name}.json").read_text())
    stage = config["zero_optimization"]["stage"]
    check(stage, tp=2, pp=2 if "pp" in name else 1, pipeline="pp" in name)()
    assert f"zero{stage}" in name and ("bf16" in config) == name.endswith("bf16")
