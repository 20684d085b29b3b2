"""Parameter names and local shapes of real models under tensor parallelism, from their published sizes."""

from __future__ import annotations

from dataclasses import dataclass

Shapes = dict[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Sizes:
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    gated: bool = False
    bias: bool = True
    experts: int = 0


GPT3_MEDIUM = Sizes(hidden=1024, heads=16, ffn=4096, vocab=50257)
LLAMA_70B = Sizes(hidden=8192, heads=64, ffn=28672, vocab=32000, kv_heads=8, gated=True, bias=False)
BLOOM_176B = Sizes(hidden=14336, heads=112, ffn=57344, vocab=250680)
NEOX_20B = Sizes(hidden=6144, heads=64, ffn=24576, vocab=50257)
MIXTRAL = Sizes(hidden=4096, heads=32, ffn=14336, vocab=32000, kv_heads=8, gated=True, bias=False, experts=8)


@dataclass(frozen=True)
class Names:
    """Names of a library's modules; ``first`` is the number of the first layer."""

    layer: str
    norms: tuple[str, ...]
    tables: tuple[str, ...]
    positions: str = ""
    attention: str = "self_attention"
    first: int = 0


PIPELINE = Names("", ("4",), ("tied_modules.embed.word_embeddings",), "tied_modules.embed.position_embeddings", first=2)
"""Megatron-DeepSpeed's GPTModelPipe."""
UNTIED_PIPELINE = Names("", ("4",), ("1.word_embeddings", "5.lm_head"), first=2)
BLOOM = Names("", ("5", "tied_modules.embed.word_embeddings.norm"), PIPELINE.tables, first=3)
"""BigScience's: a norm after the embedding, ALiBi instead of position embeddings."""
NEOX = Names(
    "sequential.",
    ("sequential.5.norm",),
    ("sequential.0.word_embeddings", "sequential.6.final_linear"),
    attention="attention",
    first=2,
)
_MODEL = "language_model.embedding."
PLAIN = Names(
    "language_model.encoder.layers.",
    ("language_model.encoder.final_layernorm",),
    (f"{_MODEL}word_embeddings",),
    f"{_MODEL}position_embeddings",
)
"""Megatron-DeepSpeed's GPTModel."""
UNTIED_PLAIN = Names(PLAIN.layer, PLAIN.norms, (*PLAIN.tables, "language_model.output_layer"))


def make(names: Names, sizes: Sizes, tp: int) -> Shapes:
    hidden, ffn = sizes.hidden, sizes.ffn
    rows = -(-sizes.vocab // (128 * tp)) * 128
    shapes: dict[str, tuple[int, ...]] = {f"{table}.weight": (rows, hidden) for table in names.tables}
    if names.positions:
        shapes[f"{names.positions}.weight"] = (2048, hidden)

    def add(name: str, weight: tuple[int, ...], bias: int = hidden) -> None:
        shapes[f"{name}.weight"] = weight
        if sizes.bias:
            shapes[f"{name}.bias"] = (bias,)

    for name in names.norms:
        add(name, (hidden,))
    qkv = (hidden + 2 * (sizes.kv_heads or sizes.heads) * (hidden // sizes.heads)) // tp
    inner = ffn * (2 if sizes.gated else 1) // tp
    for layer in (f"{names.layer}{number}" for number in (names.first, names.first + 1)):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{layer}.{norm}", (hidden,))
        add(f"{layer}.{names.attention}.query_key_value", (qkv, hidden), qkv)
        add(f"{layer}.{names.attention}.dense", (hidden, hidden // tp))
        if sizes.experts:
            shapes[f"{layer}.mlp.router.weight"] = (sizes.experts, hidden)
            shapes[f"{layer}.mlp.experts.weight1"] = (sizes.experts * inner, hidden)
            shapes[f"{layer}.mlp.experts.weight2"] = (sizes.experts * hidden, ffn // tp)
        else:
            add(f"{layer}.mlp.dense_h_to_4h", (inner, hidden), inner)
            add(f"{layer}.mlp.dense_4h_to_h", (hidden, ffn // tp))
    return {name: (shape,) * tp for name, shape in shapes.items()}
