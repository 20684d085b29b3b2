"""Models on four ranks, between tensor, pipeline, sequence and data parallelism and all ZeRO stages.

The example's GPT, as Megatron-DeepSpeed's releases save it, too; small pipelines of letters; Llamas under AutoTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from packaging.version import Version

from deepspeed_ucp.engine.parallel import Instance
from deepspeed_ucp.testing.compare import compare
from tests.releases import DEEPSPEED, find_reason
from tests.support.covering import params, turns
from tests.support.engines.driver import STEPS, Engines, Outcome, Row, Saved, Source
from tests.support.engines.gpt import LAYERS, MODELS
from tests.support.engines.parallel import Launch, count_copies, expect, join, pipe, plain, resume
from tests.synth.megatron import client_state, megatron_args

MOST = {"least": 81}
TP2_PP2, TP2_PP2_STAGE0, DP4 = pipe(2, 2), pipe(2, 2, 0), pipe()
TP2_PP2_BF16 = pipe(2, 2, precision="bf16", fp32_grads=True)  # BF16_Optimizer
LLAMA, LLAMA_BF16 = plain(2, 2, world=2, model="llama"), pipe(1, 2, precision="bf16", model="llama")
MOE = plain(2, 3, world=2, model="moe")


def go(source: Launch, target: Launch, patterns: Any = None, **more: Any) -> Row:
    source, target = resume(source, target, patterns)
    return Row(target, [source], **{"name": source.model, "compared": MOST, **more})


def check_weights(saved: Saved, outcome: Outcome, *, least: int = 26, by_modules: bool = False) -> None:
    """Compare a load of only weights, by the first loads of a fresh engine."""
    assert not outcome.errors and all(local.direct for local in outcome.ranks)
    expected = expect(saved.state, outcome.state)
    if by_modules:
        expected.counters = dict.fromkeys(expected.counters, 0)
    count, differences = compare(expected, outcome.state, optimizer_states=False)
    assert count >= least
    assert not differences, "\n".join(differences[:20])
    moments = [state.tensors.get("exp_avg") for state in outcome.state.parameters.values()]
    assert not any(moment is not None and moment.any() for moment in moments)


def list_weights(source: Launch, **more: Any) -> list[Source]:
    return [
        Source(source, arguments={"load_module_only": True}, check=partial(check_weights, by_modules=True, **more)),
        Source(source, arguments={"load_optimizer_states": False}, check=partial(check_weights, **more)),
    ]


# --- the example's GPT

ROUTES = [
    Row(pipe(1, 2, world=2), list_weights(TP2_PP2), "dense"),
    go(TP2_PP2, plain(1, 3, world=2)),
    Row(plain(1, 3, world=2, sp=2, model="llama"), [LLAMA], "llama", compared=MOST),
    # DeepSpeed loads an unchanged topology, unless it would not restore all parameters.
    go(TP2_PP2, TP2_PP2),
]
More = partial(go, exhaustive=True)
# Letters below have other partition methods and BF16_Optimizer; `tests/tensor_parallel` has the experts' pattern.
ROUTES += [
    More(TP2_PP2, pipe(1, 4, method="parameters")),
    More(MOE, pipe(2, 2)),
    Row(pipe(4), [*list_weights(TP2_PP2_STAGE0), TP2_PP2_BF16], "dense", compared=MOST, exhaustive=True),
    Row(plain(1, 3, sp=2, model="llama"), [*list_weights(LLAMA), LLAMA], "llama", compared=MOST, exhaustive=True),
    More(DP4, TP2_PP2_BF16),  # `test_engine_saves_pairs.py` saves after it
    More(TP2_PP2_STAGE0, TP2_PP2_STAGE0),  # `test_known.py` has the reason
    More(DP4, pipe(1, 4, 0, method="uniform")),
    More(LLAMA_BF16, plain(4, 2)),
    More(TP2_PP2_BF16, TP2_PP2_BF16),
    More(plain(2, 0), plain(2, 0)),
    More(TP2_PP2, plain(1, 1, sp=2)),
    More(TP2_PP2_BF16, plain(2, 3, precision="bf16")),
    More(plain(1, 1), pipe(2, 2, method="parameters")),
    More(LLAMA, pipe(1, 2)),
    More(pipe(1, 2, 0, "bf16"), pipe(2, precision="bf16")),
    More(DP4, TP2_PP2_STAGE0),
    More(MOE, plain(4, 3)),
]

# The padding of vocabularies: the loss depends on rows of padding.
WORDS = "language_model.embedding.word_embeddings.weight"
PADDED, PADDED_LLAMA = pipe(2, 2, model="padded"), plain(2, 2, model="padded-llama")
for number, (source, target) in enumerate(((PADDED, pipe(4)), (PADDED_LLAMA, plain(4, 3)), (PADDED, pipe(2)))):
    compared = {**MOST, "losses": source.tp == target.tp}
    ROUTES.append(go(source, target, compared=compared, exhaustive=number > 0))

# Frozen parameters and buffers.
SPAN = {"rules": [{"match": r"\d+\.span", "pattern": "shard-v"}]}
SPAN_PLAIN = {"rules": [{"match": r".*\.span", "pattern": "shard-v"}]}
EXTRAS = pipe(2, 2, model="extras")


def check_extras(saved: Saved, _outcome: Outcome) -> None:
    assert sorted(name.rpartition(".")[2] for name in saved.state.buffers) == ["passes"] * 3 + ["span"] * 3
    assert sum(each.fp32 is None for each in saved.state.parameters.values()) == 6


ROUTES += [
    go(EXTRAS, pipe(4), SPAN, check=check_extras),
    go(EXTRAS, pipe(1, 2), SPAN, check=check_extras, exhaustive=True),
    go(plain(2, 2, model="extras"), plain(1, 3), SPAN_PLAIN, check=check_extras, exhaustive=True),
]


def check_empty_stage(saved: Saved, outcome: Outcome) -> None:
    """DeepSpeed trains stages without parameters at stage 0 in fp32 only."""
    empty = [local for local in (*saved.ranks, *outcome.ranks) if not local.state.parameters]
    assert len(empty) == (4 in (saved.kind.pp, outcome.kind.pp))


Short = partial(pipe, stage=0, method="uniform", model="short")
SHORT = [(Short(1, 4), Short(2, 2)), (Short(2, stage=1), Short(1, 4))]
ROUTES += [
    go(*each, check=check_empty_stage, compared={"least": 16}, exhaustive=number > 0)
    for number, each in enumerate(SHORT)
]

# --- Megatron-DeepSpeed's metadata, fused layouts, nested modules


class Megatron(Launch):
    """A run that saves the `client_state` of `checkpointing.py`."""

    @property
    def client_state(self) -> dict[str, Any]:
        return client_state(make_arguments(self), STEPS[0], 256)


def make_arguments(launch: Launch) -> Any:
    sizes = MODELS[launch.model]
    heads, hidden, is_llama = sizes["heads"], sizes["hidden"], sizes.get("swiglu", False)
    return megatron_args(
        num_layers=LAYERS,
        hidden_size=hidden,
        ffn_hidden_size=sizes.get("ffn", 4 * hidden),
        num_attention_heads=heads,
        num_key_value_heads=sizes.get("kv_heads", heads),
        kv_channels=hidden // heads,
        padded_vocab_size=sizes["vocabulary"],
        tensor_model_parallel_size=launch.tp,
        pipeline_model_parallel_size=launch.pp,
        swiglu=is_llama,
        use_rotary_position_embeddings=is_llama,
    )


def megatron(launch: Launch, **more: Any) -> Megatron:
    return Megatron(**{**vars(launch), **more})


def check_client_state(saved: Saved, outcome: Outcome) -> None:
    found, saved_state = outcome.ranks[0].client_state, saved.kind.client_state
    expected = {key: saved_state[key] for key in saved_state if key != "universal_checkpoint_info"}
    assert {key: found.get(key) for key in expected} == expected
    assert found["args"].num_attention_heads == 8


TP2, PP2, TP2_STAGE0 = plain(2, 2, world=2), pipe(1, 2), plain(2, 0, world=2)
QKV = {"match": r".*\.self_attention\.query_key_value\.(?:weight|bias)", "pattern": "shard-nc", "parts": [32, 32, 32]}
SPAN_OF_FAMILY = {"family": "megatron-gpt", **SPAN_PLAIN}
FUSED = {"interleaved": "megatron-gpt-interleaved", "megatron-llama": "megatron-llama"}


def list_megatron() -> Iterator[Row]:
    four, described = megatron(TP2_PP2, model="megatron"), partial(go, check=check_client_state)
    yield described(four, pipe(1, 2, world=2), {"rules": [QKV]})
    yield go(TP2_PP2.but(model="megatron"), pipe(1, 2, world=2), {"rules": [QKV]})  # without metadata
    for target in (pipe(4), PP2):
        yield described(four, target, "megatron-gpt", exhaustive=True)
    for target, model in product((plain(1, 3, world=2), plain(4)), FUSED):
        is_more = target.world > 2 or model != "interleaved"
        yield described(megatron(TP2, model=model), target, FUSED[model], exhaustive=is_more)
    # Only the loading engine has attributes.
    yield described(megatron(PP2, model="unmarked"), TP2_PP2, "megatron-gpt")
    # Frozen parameters, buffers and the masters of stage 0 are read from the nested dict of the module.
    yield described(megatron(TP2, model="extras", nested=True), plain(1, 3, world=2), SPAN_OF_FAMILY)
    nested = megatron(TP2_STAGE0, model="megatron", nested=True)
    yield described(nested, plain(1, 2, world=2), SPAN_OF_FAMILY, exhaustive=True)


# --- pipelines of letters: other numbers of stages, layers on other stages, tied modules

GPT = "EBBBBBBH"
TWICE = "EBHBBBHB"  # at 4 stages the first, second and last have the tied module; at 2 the first uses it twice
NORM = "eBBBNh"  # without ZeRO a stage may be only a norm
EMPTY = "eBff"
SHIFT = "tied_modules.embed.shift"
Stages = partial(pipe, 1, method="uniform", model=GPT)
BF16_PIPELINE, FP16_PIPELINE = Stages(2, 1, "bf16", fp32_grads=True), Stages(2, 0, "fp16")
LETTERS = {"least": 11}


def check_losses(saved: Saved, outcome: Outcome) -> None:
    """Compare losses unless a stage uses another stage's untied parameters."""
    if len({count_copies(SHIFT, join(each.ranks, GPT).parameters) for each in (saved, outcome)}) == 1:
        assert outcome.losses == pytest.approx(saved.losses, rel=outcome.kind.find_tolerance(saved.kind))


def letters(source: Launch, target: Launch, model: str = GPT, **more: Any) -> Row:
    source, target = (each.but(model=model) for each in (source, target))
    compared = {**LETTERS, "losses": False}
    return Row(target, [source], **{"name": model, "check": check_losses, "compared": compared, **more})


def check_pipeline_weights(saved: Saved, outcome: Outcome) -> None:
    """Only the saved masters have the last stage's values of untied parameters of a tied module."""
    assert all(local.direct for local in outcome.ranks)
    assert f"{SHIFT}#1" in outcome.state.parameters
    for name, state in outcome.state.parameters.items():
        assert state.value.equal(saved.state.parameters[name].value), name
        assert state.fp32 is None or state.fp32.to(state.value.dtype).equal(state.value), name


def list_letters() -> Iterator[Row]:
    alone = partial(Source, arguments={"load_optimizer_states": False}, check=check_pipeline_weights)
    two = BF16_PIPELINE.but(world=2)
    modules = Source(two, arguments={"load_module_only": True}, check=check_pipeline_weights)
    # DeepSpeed does not restore untied copies of a tied module: the plugin copies the masters. The head's buffers have
    # no file.
    exact = {**LETTERS, "ignored": "buffer", "tolerance": 0.0}
    yield Row(Stages(2), [alone(Stages(2)), Stages(2)], GPT, compared=exact)
    yield Row(two, [modules, alone(two), two], GPT, compared=exact)
    yield Row(FP16_PIPELINE, [alone(FP16_PIPELINE), FP16_PIPELINE], GPT, compared=exact, exhaustive=True)
    yield letters(Stages(2), Stages(2), NORM, compared=exact, exhaustive=True)
    ours = Stages(4, 0, "bf16")  # BF16_Optimizer without ZeRO: DeepSpeed's load of its saves fails
    yield Row(ours, [alone(ours), ours], GPT, compared={**LETTERS, "losses": False})
    more = partial(letters, exhaustive=True)
    yield more(Stages(2), Stages(2, method="type:embedding"))
    yield more(Stages(2), BF16_PIPELINE)
    yield more(Stages(1, 1, "bf16", fp32_grads=True), Stages(4, 1, "bf16"))
    yield letters(Stages(4, 0, "bf16"), Stages(2, 1, "bf16", method="parameters", world=2))
    yield letters(Stages(4), Stages(2, world=2), TWICE)
    yield more(Stages(4, 0), Stages(2, 1), NORM)
    yield letters(Stages(2, 1), Stages(4, 0), NORM)
    yield more(Stages(4, 0), Stages(1, 1), EMPTY)
    yield more(Stages(1, 1), Stages(2, 0), EMPTY)
    if find_reason("DualPipeV"):
        return
    # Under DualPipeV every rank holds two stages, whose layers are not contiguous.
    yield more(Stages(2, dual=True), Stages(2, dual=True), compared=exact)
    yield letters(Stages(2), Stages(2, dual=True, world=2))
    yield letters(Stages(2, dual=True), Stages(4))
    yield more(Stages(4, dual=True), Stages(2), TWICE)
    yield more(Stages(4), Stages(2, dual=True), TWICE)
    yield more(Stages(2, dual=True), Stages(2, 0, "bf16", dual=True))


# --- AutoTP: a Hugging Face Llama at another tensor-parallel degree, uneven heads and empty shards included

# Not stage 3 with empty shards: DeepSpeed's forward refuses parameters without elements.
Uneven = partial(plain, model="uneven")
UNEVEN_BF16 = Uneven(2, 3, precision="bf16")
UNEVEN = (
    [UNEVEN_BF16, Uneven(4, 0), Uneven(1, precision="bf16", fp32_grads=True)],
    [Uneven(1, 3, precision="bf16"), Uneven(4, precision="bf16"), Uneven(2, 3), Uneven(2, 2), Uneven(1, 0),
     Uneven(2, 0, precision="bf16")],
)  # fmt: skip


def list_autotp() -> Iterator[Row]:
    """Yield rows. Uneven models have all features of even ones."""
    chosen = [(UNEVEN_BF16, UNEVEN[1][1])]
    for source, target in [*turns(*UNEVEN, 2), *chosen]:
        if source != target:
            is_more = (source, target) not in chosen
            yield Row(target, [source], f"autotp-{source}", compared={"least": 21}, exhaustive=is_more)
    yield Row(plain(2, model="even"), [plain(2, model="even")], "autotp-same", exhaustive=True)


def list_rows() -> list[Row]:
    """List all rows, the chosen ones first, each once."""
    rows = [*ROUTES, *list_megatron(), *list_letters(), *(list_autotp() if Version("0.19") <= DEEPSPEED else ())]
    found: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.exhaustive):
        found.setdefault(f"{row.sources} {row.target} {row.target.patterns}", row)
    return list(found.values())


@pytest.mark.releases
@pytest.mark.parametrize("row", [row.param for row in list_rows()])
def test_resumes(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)


# --- check of the rows above: positions of layers, tied modules and shards

POSITIONS = "language_model.embedding.position_embeddings.weight"
TIED = "tied_modules.embed.position_embeddings.weight"


# The first stage's copy is restored, or no file has the last stage's copy.
@pytest.mark.parametrize(
    ("source", "target"), [(TP2_PP2, pipe(2, world=2)), (TP2_PP2_STAGE0, pipe(1, 2, world=2))], ids=["first", "unsaved"]
)
def test_untied_position_embeddings_of_stages_are_reported(source: Launch, target: Launch, engines: Engines) -> None:
    """DeepSpeed ties only the word embeddings: the last stage's positions decay and never have a gradient."""
    run = engines.saved(source)
    saved = join(run.ranks, "dense").parameters
    assert not saved[POSITIONS].fp32.equal(saved[f"{POSITIONS}#1"].fp32)
    assert saved[WORDS].fp32.equal(saved[f"{WORDS}#1"].fp32)
    (outcome,) = engines.load(target, run)
    outcome.check(run, **MOST)
    for name in {POSITIONS, f"{POSITIONS}#1"} & outcome.state.parameters.keys():
        assert outcome.state.parameters[name].fp32.equal(saved[POSITIONS].fp32)
    assert len(outcome.list_messages("WARNING", TIED)) == 1


def test_the_rows_above_have_different_shards_and_copies(engines: Engines, subtests: pytest.Subtests) -> None:
    """Otherwise the tests above would not detect a copy on the wrong stage or rank."""
    saved = engines.saved(Stages(2)).state.parameters
    assert not saved[SHIFT].fp32.equal(saved[f"{SHIFT}#1"].fp32)
    run = engines.saved(Stages(4, model=TWICE))
    assert count_copies(SHIFT, run.state.parameters) == 3
    for name, is_tied in (("tied_modules.embed.weight", True), (SHIFT, False)):
        expected = [Instance(0, 3, is_tied), Instance(1, 3, is_tied), None, Instance(2, 3, is_tied)]
        found = [local.state.instances.get(name) for local in run.ranks]
        assert [each and replace(each, is_filed=True) for each in found] == expected
    if not find_reason("DualPipeV"):
        ranks = engines.saved(Stages(2, dual=True)).ranks
        layers = [{name.split(".")[0] for name in local.state.parameters} - {"tied_modules"} for local in ranks]
        assert sorted(map(sorted, layers)) == [["1", "6"], ["1", "6"], ["2", "3", "4", "5"], ["2", "3", "4", "5"]]


# --- refusals


BIASES = ["self_attention.dense.weight", "mlp.dense_4h_to_h.weight", "query_key_value.weight", "dense_h_to_4h.bias"]
LAYOUTS = ["query_key_value.weight: (32, 32)", "per-rank [q; k; v]", "interleaved per head group", "megatron-gpt-"]
UNSETTLED: dict[str, tuple[Launch, Launch, list[str], str]] = {
    "a-buffer": (EXTRAS, pipe(1, 2), [".span: (16,) on 2 ranks in the checkpoint"], "\0"),
    # Metadata of a TP=1 source names no row-parallel parameters: upstream cuts them along the wrong dimension.
    "rows": (megatron(PP2, model="unmarked"), TP2_PP2, BIASES, "layernorm"),
    **{f"fused-{model}": (megatron(TP2, model=model), plain(4), LAYOUTS, "self_attention.dense") for model in FUSED},
}
"""Source, target, words in the message, and a word that it lacks."""


@pytest.mark.parametrize("name", params([*UNSETTLED][:3], UNSETTLED))
def test_unknown_patterns_are_refused(name: str, engines: Engines) -> None:
    source, target, words, absent = UNSETTLED[name]
    (refused,) = engines.load(target.but(model=source.model), engines.saved(source).folder)
    assert absent not in refused.check_refused("MismatchError", *words)
