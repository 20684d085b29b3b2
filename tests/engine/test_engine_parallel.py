"""Models on four ranks, between tensor, pipeline, sequence and data parallelism and all ZeRO stages.

The example's GPT, as Megatron-DeepSpeed's releases save it, too; small pipelines of letters; Llamas under AutoTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from packaging.version import Version

from deepspeed_ucp.testing.compare import compare
from tests.releases import DEEPSPEED, find_reason
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


def check_weights(saved: Saved, outcome: Outcome, *, by_modules: bool = False) -> None:
    """Compare a load of only weights, by the first loads of a fresh engine."""
    assert not outcome.errors and all(local.direct for local in outcome.ranks)
    expected = expect(saved.state, outcome.state)
    if by_modules:
        expected.counters = dict.fromkeys(expected.counters, 0)
    count, differences = compare(expected, outcome.state, optimizer_states=False)
    assert count >= 26
    assert not differences, "\n".join(differences[:20])
    moments = [state.tensors.get("exp_avg") for state in outcome.state.parameters.values()]
    assert not any(moment is not None and moment.any() for moment in moments)


def list_weights(source: Launch) -> list[Source]:
    by_modules = partial(check_weights, by_modules=True)
    return [
        Source(source, arguments={"load_module_only": True}, check=by_modules),
        Source(source, arguments={"load_optimizer_states": False}, check=check_weights),
    ]


# --- the example's GPT

SPAN = {"rules": [{"match": r"\d+\.span", "pattern": "shard-v"}]}
SPAN_PLAIN = {"rules": [{"match": r".*\.span", "pattern": "shard-v"}]}
PADDED, PADDED_LLAMA = pipe(2, 2, model="padded"), plain(2, 2, model="padded-llama")
EXTRAS = pipe(2, 2, model="extras")


def check_extras(saved: Saved, _outcome: Outcome) -> None:
    """Check that the model has frozen parameters and buffers."""
    assert sorted(name.rpartition(".")[2] for name in saved.state.buffers) == ["passes"] * 3 + ["span"] * 3
    assert sum(each.fp32 is None for each in saved.state.parameters.values()) == 6


def check_empty_stage(saved: Saved, outcome: Outcome) -> None:
    """DeepSpeed trains stages without parameters at stage 0 in fp32 only."""
    empty = [local for local in (*saved.ranks, *outcome.ranks) if not local.state.parameters]
    assert len(empty) == (4 in (saved.kind.pp, outcome.kind.pp))


Short = partial(pipe, stage=0, method="uniform", model="short")
short, more = partial(go, check=check_empty_stage, compared={"least": 16}), partial(go, exhaustive=True)
padded = partial(go, compared={**MOST, "losses": False})  # the loss depends on rows of padding
ROUTES = [
    Row(pipe(1, 2, world=2), list_weights(TP2_PP2), "dense"),
    go(TP2_PP2, plain(1, 3, world=2)),
    Row(plain(1, 3, world=2, sp=2, model="llama"), [LLAMA], "llama", compared=MOST),
    go(TP2_PP2, TP2_PP2),  # DeepSpeed loads an unchanged topology, unless it would not restore all parameters
    padded(PADDED, pipe(4)),
    go(EXTRAS, pipe(4), SPAN, check=check_extras),
    short(Short(1, 4), Short(2, 2)),
    # `tests/tensor_parallel` has the experts' pattern, `test_base.py` the reason of a direct load at stage 0.
    more(MOE, pipe(2, 2)),
    Row(pipe(4), [*list_weights(TP2_PP2_STAGE0), TP2_PP2_BF16], "dense", compared=MOST, exhaustive=True),
    more(TP2_PP2_STAGE0, TP2_PP2_STAGE0),
    more(TP2_PP2_BF16, TP2_PP2_BF16),
    more(plain(2, 0), plain(2, 0)),
    more(LLAMA_BF16, plain(4, 2)),
    more(DP4, TP2_PP2_STAGE0),
    padded(PADDED_LLAMA, plain(4, 3), exhaustive=True),
    more(plain(2, 2, model="extras"), plain(1, 3), SPAN_PLAIN, check=check_extras),
    short(Short(2, stage=1), Short(1, 4), exhaustive=True),
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
    yield described(four, PP2, "megatron-gpt", exhaustive=True)
    yield described(megatron(TP2, model="interleaved"), plain(1, 3, world=2), FUSED["interleaved"])
    yield described(megatron(TP2, model="megatron-llama"), plain(4), FUSED["megatron-llama"], exhaustive=True)
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
    ours = Stages(4, 0, "bf16")  # BF16_Optimizer without ZeRO: DeepSpeed's load of its saves fails
    yield Row(ours, [alone(ours), ours], GPT, compared={**LETTERS, "losses": False})
    yield letters(ours, Stages(2, 1, "bf16", method="parameters", world=2))
    yield letters(Stages(4), Stages(2, world=2), TWICE)
    yield letters(Stages(2, 1), Stages(4, 0), NORM)
    more = partial(letters, exhaustive=True)
    yield more(Stages(2), Stages(2, method="type:embedding"))
    yield more(Stages(2), BF16_PIPELINE)
    yield more(Stages(4, 0), Stages(1, 1), EMPTY)
    yield more(Stages(1, 1), Stages(2, 0), EMPTY)
    if find_reason("DualPipeV"):
        return
    # Under DualPipeV every rank holds two stages, whose layers are not contiguous.
    yield letters(Stages(2), Stages(2, dual=True, world=2))
    yield letters(Stages(2, dual=True), Stages(4))
    yield more(Stages(2, dual=True), Stages(2, dual=True), compared=exact)
    yield more(Stages(4, dual=True), Stages(2), TWICE)


# --- AutoTP: a Hugging Face Llama at another tensor-parallel degree, uneven heads and empty shards included

# Not stage 3 with empty shards: DeepSpeed's forward refuses parameters without elements.
Uneven = partial(plain, model="uneven", precision="bf16")


def list_autotp() -> Iterator[Row]:
    """Yield rows. Uneven models have all features of even ones."""
    source, flat, even = Uneven(2, 3), Uneven(1, fp32_grads=True), plain(2, model="even")
    autotp = partial(Row, name="autotp", compared={"least": 21})
    yield autotp(Uneven(4), [source])
    yield autotp(Uneven(2, 3, precision="fp32"), [Uneven(4, 0, precision="fp32"), flat], exhaustive=True)
    yield autotp(Uneven(2, 0), [source, flat], exhaustive=True)
    yield Row(even, [even], "autotp-same", exhaustive=True)


# --- positions that DeepSpeed does not tie, and refused patterns

WORDS = "language_model.embedding.word_embeddings.weight"
POSITIONS = "language_model.embedding.position_embeddings.weight"
TIED = "tied_modules.embed.position_embeddings.weight"


def check_positions(saved: Saved, outcome: Outcome) -> None:
    """DeepSpeed ties only the word embeddings: the last stage's positions decay and never have a gradient."""
    parameters = join(saved.ranks, "dense").parameters
    first = parameters[POSITIONS].fp32
    assert not first.equal(parameters[f"{POSITIONS}#1"].fp32)
    assert parameters[WORDS].fp32.equal(parameters[f"{WORDS}#1"].fp32)
    for name in {POSITIONS, f"{POSITIONS}#1"} & outcome.state.parameters.keys():
        assert outcome.state.parameters[name].fp32.equal(first)
    assert len(outcome.list_messages("WARNING", TIED)) == 1


BIASES = ["self_attention.dense.weight", "mlp.dense_4h_to_h.weight", "query_key_value.weight", "dense_h_to_4h.bias"]
LAYOUTS = ["query_key_value.weight: (32, 32)", "per-rank [q; k; v]", "interleaved per head group", "megatron-gpt-"]


def unsettled(source: Launch, target: Launch, words: list[str], absent: str = "\0", **more: Any) -> Row:
    """Return a row of a load with unknown patterns, and a word that its refusal lacks."""

    def check(_saved: Saved, outcome: Outcome) -> None:
        assert absent not in outcome.check_refused("MismatchError", *words)

    return Row(target.but(model=source.model), [Source(source, check=check)], f"unsettled-{source.model}", **more)


def list_reported() -> Iterator[Row]:
    # The first stage's copy is restored, or no file has the last stage's copy.
    for source, target in ((TP2_PP2, pipe(2, world=2)), (TP2_PP2_STAGE0, pipe(1, 2, world=2))):
        yield Row(target, [source], "positions", compared=MOST, check=check_positions)
    yield unsettled(EXTRAS, pipe(1, 2), [".span: (16,) on 2 ranks in the checkpoint"])
    # Metadata of a TP=1 source names no row-parallel parameters: upstream cuts them along the wrong dimension.
    yield unsettled(megatron(PP2, model="unmarked"), TP2_PP2, BIASES, "layernorm")
    for model in FUSED:
        source, more = megatron(TP2, model=model), model != "interleaved"
        yield unsettled(source, plain(4), LAYOUTS, "self_attention.dense", exhaustive=more)


ROWS = [*ROUTES, *list_megatron(), *list_letters(), *list_reported()]
if Version("0.19") <= DEEPSPEED:
    ROWS += list_autotp()


@pytest.mark.releases
@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_resumes(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)
