"""Megatron-Core's models go on as Hugging Face's and as Megatron-DeepSpeed's: one function, and the same moments."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_ucp.cli import main
from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine
from deepspeed_ucp.testing.compare import compare
from tests.support.covering import params
from tests.support.engines.going_on import join as join_states
from tests.support.engines.parallel import Launch, Runs, join, training

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.engine

SAVE = "iter_0000002"
STATES = {"fp32": "", "exp_avg": "optimizer.state.exp_avg.", "exp_avg_sq": "optimizer.state.exp_avg_sq."}
"""Of what an engine keeps what Megatron-Core puts in front of a name."""

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 12,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def ranks() -> Any:
    """Imported late: every worker collects this module."""
    return importlib.import_module("tests.support.engines.mcore_names")


def list_layers(saved: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """What a checkpoint holds, each layer for itself: Megatron-Core puts them on top of each other."""
    found = {}
    for key, tensor in saved.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name.startswith("optimizer."):
            continue
        front, layers, rest = name.partition("decoder.layers.")
        if layers and not rest[0].isdigit():
            found.update({f"{front}decoder.layers.{n}.{rest}": one for n, one in enumerate(tensor)})
        else:
            found[name] = tensor
    return found


def name_llama(saved: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """By Hugging Face's names. A group's rows are 2 heads' queries, a key and a value, 4 rows each."""
    yield "model.embed_tokens.weight", saved["embedding.word_embeddings.weight"][:61]
    yield "lm_head.weight", saved["output_layer.weight"][:61]
    yield "model.norm.weight", saved["decoder.final_layernorm.weight"]
    for layer in range(2):
        own, other = f"decoder.layers.{layer}", f"model.layers.{layer}"
        qkv = saved[f"{own}.self_attention.linear_qkv.weight"]
        first, second = qkv[:16], qkv[16:]
        yield f"{other}.self_attn.q_proj.weight", torch.cat([first[:8], second[:8]])
        yield f"{other}.self_attn.k_proj.weight", torch.cat([first[8:12], second[8:12]])
        yield f"{other}.self_attn.v_proj.weight", torch.cat([first[12:], second[12:]])
        yield f"{other}.self_attn.o_proj.weight", saved[f"{own}.self_attention.linear_proj.weight"]
        yield f"{other}.input_layernorm.weight", saved[f"{own}.self_attention.linear_qkv.layer_norm_weight"]
        yield f"{other}.post_attention_layernorm.weight", saved[f"{own}.mlp.linear_fc1.layer_norm_weight"]
        if f"{own}.mlp.router.weight" in saved:
            yield f"{other}.mlp.gate.weight", saved[f"{own}.mlp.router.weight"]
            yield f"{other}.mlp.experts.gate_up_proj", saved[f"{own}.mlp.experts.experts.linear_fc1.weight"]
            yield f"{other}.mlp.experts.down_proj", saved[f"{own}.mlp.experts.experts.linear_fc2.weight"]
            continue
        yield f"{other}.mlp.gate_proj.weight", saved[f"{own}.mlp.linear_fc1.weight"][:24]
        yield f"{other}.mlp.up_proj.weight", saved[f"{own}.mlp.linear_fc1.weight"][24:]
        yield f"{other}.mlp.down_proj.weight", saved[f"{own}.mlp.linear_fc2.weight"]


def check(state: CapturedEngine, saved: Mapping[str, Tensor], name_all: Any) -> None:
    """Every weight and moment is there, to the bit."""
    for kind, prefix in STATES.items():
        expected = dict(name_all(list_layers(saved, prefix)))
        assert expected.keys() == state.parameters.keys()
        for name, tensor in expected.items():
            held = state.parameters[name]
            found = held.fp32 if kind == "fp32" else held.tensors[kind]
            assert torch.equal(found, tensor), (name, kind)
    assert {held.scalars["step"] for held in state.parameters.values()} == {2.0}


def name_launch(row: tuple[Launch]) -> str:
    return str(row[0])


CLOSE = {"rtol": 0, "atol": 1e-6}
"""Logits, which are up to 0.4: sums of at most 24 products in another order, 24 × 2^-24 of what is summed."""


@pytest.mark.parametrize("tp", [1, 2])
def test_llama_goes_on_as_hugging_face_s(ranks: Any, tp: int, ucp_worlds: WorldPool, tmp_path: Path) -> None:
    saved, _ = ucp_worlds.get(tp).run(ranks.mcore.save, str(tmp_path), "llama", tp=tp)[0]
    wanted = ucp_worlds.get(1).run(ranks.find_logits, "llama", list_layers(saved))[0]
    assert wanted.abs().max() > 0.1
    for stage in (0, 1, 2, 3) if tp == 1 else (3,):
        loaded = ucp_worlds.get(2).run(
            ranks.load, str(tmp_path / SAVE), "LlamaForCausalLM", LLAMA, stage, "mcore-llama"
        )
        for held, logits, _ in loaded:
            check(held.state, saved, name_llama)
            torch.testing.assert_close(logits, wanted, **CLOSE)
        assert "output_layer.weight: vocabulary padded to 64 rows, here to 61" in loaded[0][2]
    if tp == 1:  # of the same shapes
        other = {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2}
        with pytest.raises(MismatchError, match="other heads .num_attention_heads"):
            ucp_worlds.get(1).run(ranks.load, str(tmp_path / SAVE), "LlamaForCausalLM", other, 1, "mcore-llama")
    # AutoTP cuts what the rules make, and tells how: of the 61 rows of the output one rank has 31, the other one 30.
    loaded = ucp_worlds.get(2).run(ranks.load, str(tmp_path / SAVE), "LlamaForCausalLM", LLAMA, 1, "mcore-llama", 2)
    check(join([held for held, _, _ in loaded], "even"), saved, name_llama)
    assert all(torch.allclose(logits, wanted, **CLOSE) for _, logits, _ in loaded)


def test_commands_make_hugging_face_s_model(
    ranks: Any, ucp_worlds: WorldPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exported as weights and with the optimizer: as the library itself loads it, and as ``diff`` does."""
    import transformers

    saved, _ = ucp_worlds.get(2).run(ranks.mcore.save, str(tmp_path), "llama", tp=2)[0]
    wanted = ucp_worlds.get(1).run(ranks.find_logits, "llama", list_layers(saved))[0]
    folder, like, out, again = (str(tmp_path / name) for name in (SAVE, "like", "out", "again"))
    transformers.LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"]).save_pretrained(like)
    names = ["--patterns", "mcore-llama"]
    assert main(["export", folder, out, "--to", "hf", "--like", like, *names]) == 0
    model = transformers.LlamaForCausalLM.from_pretrained(out, attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ranks.TOKENS).logits, wanted, **CLOSE)
    assert main(["export", folder, again, "--to", "dcp", *names]) == 0
    capsys.readouterr()
    assert main(["diff", folder, out, *names]) == 0
    assert "equal: 21 atoms" in capsys.readouterr().out
    main(["diff", folder, again, *names, "--json"])  # where the groups have an `initial_lr` more
    told = json.loads(capsys.readouterr().out)
    assert (told["tensors_compared"], told["tensors"]) == (63, [])
    assert main(["plan", folder, "--target", "tp=2,dp=1,zero=1", "--patterns", "mcore-megatron"]) == 0
    assert "1.0000 × state, each byte once" in capsys.readouterr().out


MOE = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": ROTARY}


def test_experts_go_on_as_mixtral_s(ranks: Any, ucp_worlds: WorldPool, tmp_path: Path) -> None:
    """Live, with experts as the library holds them; exported, as the hub does."""
    import transformers

    saved, _ = ucp_worlds.get(1).run(ranks.mcore.save, str(tmp_path), "moe", **MOE)[0]
    wanted = ucp_worlds.get(1).run(ranks.find_logits, "moe", list_layers(saved), **MOE)[0]
    ((held, logits, _),) = ucp_worlds.get(1).run(
        ranks.load, str(tmp_path / SAVE), "MixtralForCausalLM", MIXTRAL, 1, "mcore-llama"
    )
    check(held.state, saved, name_llama)
    torch.testing.assert_close(logits, wanted, **CLOSE)
    like, out = str(tmp_path / "like"), str(tmp_path / "out")
    transformers.MixtralConfig(**MIXTRAL, architectures=["MixtralForCausalLM"]).save_pretrained(like)
    command = ["export", str(tmp_path / SAVE), out, "--to", "hf", "--like", like, "--patterns", "mcore-mixtral"]
    assert main(command) == 0
    model, told = transformers.MixtralForCausalLM.from_pretrained(
        out, attn_implementation="eager", output_loading_info=True
    )
    assert not any(told.values()), told
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ranks.TOKENS).logits, wanted, **CLOSE)


GPT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mcore-gpt": (
        "GPTBigCodeForCausalLM",
        {
            "vocab_size": 61,
            "n_embd": 16,
            "n_inner": 24,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 12,
            "multi_query": False,
            "activation_function": "gelu",
        },
        {},
    ),
    "mcore-gpt-neox": (
        "GPTNeoXForCausalLM",
        {
            **{key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "rms_norm_eps")},
            "use_parallel_residual": False,
            "hidden_act": "gelu",
            "rope_parameters": {**ROTARY, "partial_rotary_factor": 1.0},
        },
        {"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True},
    ),
}


@pytest.mark.parametrize("family", GPT)
def test_gpt_goes_on_as_hugging_face_s(ranks: Any, family: str, ucp_worlds: WorldPool, tmp_path: Path) -> None:
    kind, config, changes = GPT[family]
    saved, _ = ucp_worlds.get(1).run(ranks.mcore.save, str(tmp_path), "gpt", **changes)[0]
    wanted = ucp_worlds.get(1).run(ranks.find_logits, "gpt", list_layers(saved), **changes)[0]
    ((_, logits, _),) = ucp_worlds.get(1).run(ranks.load, str(tmp_path / SAVE), kind, config, 2, family)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(logits, wanted, **CLOSE)


BLOCK_OF_EXPERTS = r"decoder\.layers\.(?P<n>\d+)\.mlp\."
TO_AUTOEP = [
    *(
        {
            "from": BLOCK_OF_EXPERTS + r"experts\.experts\.linear_fc1\.weight",
            "to": f"model.layers.{{n}}.mlp.experts.{name}.{{e}}",
            "part": part,
        }
        for name, part in (("w1", "1/2"), ("w3", "2/2"))
    ),
    {
        "from": BLOCK_OF_EXPERTS + r"experts\.experts\.linear_fc2\.weight",
        "to": "model.layers.{n}.mlp.experts.w2.{e}",
    },
    {"from": BLOCK_OF_EXPERTS + r"router\.weight", "to": "model.layers.{n}.mlp.router.gate.weight"},
]
"""As docs/patterns.md has them."""


@pytest.mark.parametrize("stage", params([(1,), (3,)], [(stage,) for stage in (0, 1, 2, 3)]))
def test_experts_go_on_under_autoep(ranks: Any, stage: int, ucp_worlds: WorldPool, tmp_path: Path) -> None:
    """Two ranks' experts, two each, become AutoEP's on two ranks."""
    pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="DeepSpeed before 0.19 has no AutoEP")
    take_apart = importlib.import_module("tests.support.engines.fused").take_apart
    saved, _ = ucp_worlds.get(2).run(ranks.mcore.save, str(tmp_path), "moe", ep=2, **MOE)[0]
    patterns = {"family": "mcore-llama", "rename": TO_AUTOEP}
    answers = ucp_worlds.get(2).run(ranks.load_experts, str(tmp_path / SAVE), MIXTRAL, stage, 2, patterns)
    states = join_states([held for held, _ in answers])
    for state, prefix in STATES.items():
        whole = name_llama(list_layers(saved, prefix))
        expected = {part: each for name, tensor in whole for part, each in take_apart(name, tensor)}
        found = {name: tensor for (name, kind), tensor in states.items() if kind == state}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    wanted = ucp_worlds.get(1).run(ranks.find_logits, "moe", list_layers(saved), **MOE)[0]
    for _, logits in answers:
        torch.testing.assert_close(logits, wanted, **CLOSE)


MEGATRON = {
    "num_layers": 3,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "max_position_embeddings": 16,
    "vocab_size": 256,
}
"""The sizes of the example's Llama."""


def name_megatron(saved: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """By Megatron-DeepSpeed's names without a pipeline, whole: [q; k; v] of 8 and 4 heads of 4 rows each."""
    yield "language_model.embedding.word_embeddings.weight", saved["embedding.word_embeddings.weight"]
    yield "language_model.output_layer.weight", saved["output_layer.weight"]
    yield "language_model.encoder.final_layernorm.weight", saved["decoder.final_layernorm.weight"]
    for layer in range(3):
        own, other = f"decoder.layers.{layer}", f"language_model.encoder.layers.{layer}"
        groups = saved[f"{own}.self_attention.linear_qkv.weight"].view(4, 16, 32)
        parts = groups[:, :8], groups[:, 8:12], groups[:, 12:]
        yield f"{other}.self_attention.query_key_value.weight", torch.cat([part.reshape(-1, 32) for part in parts])
        for name, fused in (
            ("input_layernorm", "self_attention.linear_qkv.layer_norm_"),
            ("post_attention_layernorm", "mlp.linear_fc1.layer_norm_"),
            ("self_attention.dense", "self_attention.linear_proj."),
            ("mlp.dense_h_to_4h", "mlp.linear_fc1."),
            ("mlp.dense_4h_to_h", "mlp.linear_fc2."),
        ):
            yield f"{other}.{name}.weight", saved[f"{own}.{fused}weight"]


def test_gpt_goes_on_in_megatron_deepspeed_cut(ranks: Any, ucp_worlds: WorldPool, tmp_path: Path) -> None:
    """With biases, learned positions and a tied output."""
    sizes = {**MEGATRON, "num_query_groups": 8, "ffn_hidden_size": 128}
    saved, _ = ucp_worlds.get(1).run(ranks.mcore.save, str(tmp_path), "gpt", **sizes)[0]
    checkpoint = {"universal": {"patterns": "mcore-megatron", "param_groups": "live"}}
    trained = training("dense", Launch(tp=2, world=2, pipeline=False), checkpoint)
    answers = ucp_worlds.get(2).run(ranks.load_megatron, trained, str(tmp_path / SAVE), "gpt", **sizes)
    wanted = ucp_worlds.get(1).run(ranks.find_loss, "gpt", list_layers(saved), **sizes)[0]
    assert [loss for _, loss, _ in answers] == pytest.approx([wanted] * 2, abs=1e-6)


LAUNCHES = [Launch(tp=2, world=2, pipeline=False), Launch(tp=2, world=2), Launch(pp=2, world=2)]
MORE = [*LAUNCHES, Launch(tp=2, pp=2), Launch(pp=2, stage=0, precision="bf16")]


@pytest.mark.parametrize("launch", params([(each,) for each in LAUNCHES], [(each,) for each in MORE], name_launch))
def test_llama_goes_on_in_megatron_deepspeed_cut(
    ranks: Any, launch: Launch, ucp_worlds: WorldPool, tmp_path: Path
) -> None:
    """Under tensor parallelism each rank with its share of [q; k; v] and of [gate; up]; in pipelines its layers."""
    saved, _ = ucp_worlds.get(1).run(ranks.mcore.save, str(tmp_path), "llama", **MEGATRON)[0]
    patterns = {"family": "mcore-megatron", "variables": {"final": 5}}
    trained = training("llama", launch, {"universal": {"patterns": patterns, "param_groups": "live"}})
    folder = str(tmp_path / SAVE)
    answers = ucp_worlds.get(launch.world).run(ranks.load_megatron, trained, folder, "llama", **MEGATRON)
    check(join([held for held, _, _ in answers], "llama"), saved, name_megatron)
    if not launch.pipeline:
        wanted = ucp_worlds.get(1).run(ranks.find_loss, "llama", list_layers(saved), **MEGATRON)[0]
        assert [loss for _, loss, _ in answers] == pytest.approx([wanted] * 2, abs=1e-6)


WIDTHS = ["args.num_attention_heads", "args.num_key_value_heads", "args.num_key_value_heads"]
BLOCK = r"language_model\.encoder\.layers\.(?P<n>\d+)\."
TO_HUGGING_FACE = [
    {"from": r"language_model\.embedding\.word_embeddings\.weight", "to": "model.embed_tokens.weight"},
    {"from": r"language_model\.output_layer\.weight", "to": "lm_head.weight"},
    {"from": r"language_model\.encoder\.final_layernorm\.weight", "to": "model.norm.weight"},
    {"from": BLOCK + r"(?P<x>\w+_layernorm)\.weight", "to": "model.layers.{n}.{x}.weight"},
    {"from": BLOCK + r"self_attention\.dense\.weight", "to": "model.layers.{n}.self_attn.o_proj.weight"},
    {"from": BLOCK + r"mlp\.dense_4h_to_h\.weight", "to": "model.layers.{n}.mlp.down_proj.weight"},
    *(
        {"from": BLOCK + "mlp.dense_h_to_4h.weight", "to": f"model.layers.{{n}}.mlp.{x}_proj.weight", "part": f"{k}/2"}
        for k, x in enumerate(("gate", "up"), 1)
    ),
    *(
        {
            "from": BLOCK + r"self_attention\.query_key_value\.weight",
            "to": f"model.layers.{{n}}.self_attn.{x}_proj.weight",
            "part": {"number": number, "parts": WIDTHS},
        }
        for number, x in enumerate("qkv", 1)
    ),
]


def test_what_ranks_of_megatron_deepspeed_share_is_split(ranks: Any, runs: Runs, ucp_worlds: WorldPool) -> None:
    """[q_r; k_r; v_r] and [gate_r; up_r] of two ranks feed Hugging Face's Llama, with the moments."""
    launch = Launch(tp=2, world=2, pipeline=False)
    saved = join(runs.saved("llama", launch), "llama").parameters
    config = {**LLAMA, "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    ((held, _, _),) = ucp_worlds.get(1).run(
        ranks.load, runs.folder("llama", launch), "LlamaForCausalLM", config, 2, {"rename": TO_HUGGING_FACE}
    )
    for layer in range(3):
        own, other = f"language_model.encoder.layers.{layer}", f"model.layers.{layer}"
        for name, size, parts in (
            ("self_attention.query_key_value", (32, 16, 16), ("self_attn.q", "self_attn.k", "self_attn.v")),
            ("mlp.dense_h_to_4h", (48, 48), ("mlp.gate", "mlp.up")),
            ("self_attention.dense", (32,), ("self_attn.o",)),
        ):
            whole = saved[f"{own}.{name}.weight"]
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                rows = (whole.fp32 if state == "fp32" else whole.tensors[state]).split(size)
                for part, tensor in zip(parts, rows, strict=True):
                    live = held.state.parameters[f"{other}.{part}_proj.weight"]
                    assert torch.equal(live.fp32 if state == "fp32" else live.tensors[state], tensor), (part, state)


PHI = r"model\.layers\.(?P<n>\d+)\."
WIDE = [4, 2, 2]
FUSE = [
    *(
        {
            "from": PHI + rf"self_attn\.{x}_proj\.weight",
            "to": "model.layers.{n}.self_attn.qkv_proj.weight",
            "into": {"number": number, "parts": WIDE},
        }
        for number, x in enumerate("qkv", 1)
    ),
    *(
        {"from": PHI + rf"mlp\.{x}_proj\.weight", "to": "model.layers.{n}.mlp.gate_up_proj.weight", "into": f"{k}/2"}
        for k, x in enumerate(("gate", "up"), 1)
    ),
]
"""From Llama to Phi-3, which is the same model fused; and back:"""
SPLIT = [
    {
        "from": rule["to"].replace(".", r"\.").replace("{n}", r"(?P<n>\d+)"),
        "to": rule["from"].replace(r"(?P<n>\d+)", "{n}").replace("\\", ""),
        "part": rule["into"],
    }
    for rule in FUSE
]


@pytest.mark.parametrize("stage", [1, 3])
def test_one_set_of_rules_serves_both_ways(ranks: Any, stage: int, ucp_worlds: WorldPool, tmp_path: Path) -> None:
    """Where nothing else changes, too; and once the run has saved under the names that it has."""
    world, rules = ucp_worlds.get(2), {"rename": [*FUSE, *SPLIT]}
    phi = {**LLAMA, "pad_token_id": 0, "rope_parameters": ROTARY}
    folders = [str(tmp_path / name) for name in ("llama", "phi")]
    saved, wanted = world.run(ranks.save_hf, folders[0], "LlamaForCausalLM", LLAMA, stage)[0]
    fused, logits, _ = world.run(ranks.load, folders[0], "Phi3ForCausalLM", phi, stage, rules, again=folders[1])[0]
    torch.testing.assert_close(logits, wanted, **CLOSE)
    own = fused.state.parameters["model.layers.1.mlp.gate_up_proj.weight"].tensors["exp_avg"]
    parts = [saved.state.parameters[f"model.layers.1.mlp.{x}_proj.weight"].tensors["exp_avg"] for x in ("gate", "up")]
    assert torch.equal(own, torch.cat(parts)) and own.any()
    again, _, _ = world.run(ranks.load, folders[1], "Phi3ForCausalLM", phi, stage, rules)[0]
    assert not compare(fused.state, again.state)[1]
    back, logits, _ = world.run(ranks.load, folders[1], "LlamaForCausalLM", LLAMA, stage, rules)[0]
    assert not compare(saved.state, back.state)[1]
    assert torch.equal(logits, wanted)


def test_uneven_shares_of_autotp_are_joined(ranks: Any, runs: Runs, ucp_worlds: WorldPool) -> None:
    """Of 6 heads in 3 groups one rank saves two groups and the other one, and they feed a whole Phi-3."""
    launch = Launch(tp=2, world=2, pipeline=False)
    saved = join(runs.saved("uneven", launch), "uneven").parameters
    sizes = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 22, "tie_word_embeddings": True}
    phi = {**LLAMA, **sizes, "num_attention_heads": 6, "num_key_value_heads": 3, "pad_token_id": 0}
    fuse = [{**rule, "into": {**rule["into"], "parts": [2, 1, 1]}} if "qkv" in rule["to"] else rule for rule in FUSE]
    rules = {"rename": [*fuse, {"from": ".*bias", "to": None}]}  # Phi-3 has none
    folder = runs.folder("uneven", launch)
    held, _, _ = ucp_worlds.get(1).run(ranks.load, folder, "Phi3ForCausalLM", phi, 2, rules)[0]
    for own, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
        live = held.state.parameters[f"model.layers.1.{own}_proj.weight"]
        whole = [saved[f"model.layers.1.{own.partition('.')[0]}.{part}_proj.weight"] for part in parts]
        assert live.fp32.equal(torch.cat([each.fp32 for each in whole]))
        for state, tensor in live.tensors.items():
            assert tensor.equal(torch.cat([each.tensors[state] for each in whole])), (own, state)
