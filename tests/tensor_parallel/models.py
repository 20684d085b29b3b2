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
    divisor: int = 128
    kv_heads: int = 0
    layers: int = 2
    gated: bool = False
    bias: bool = True
    experts: int = 0

    def pad(self, tp: int) -> int:
        step = self.divisor * tp
        return -(-self.vocab // step) * step

    @property
    def qkv(self) -> int:
        return self.hidden + 2 * (self.kv_heads or self.heads) * (self.hidden // self.heads)


GPT3_MEDIUM = Sizes(hidden=1024, heads=16, ffn=4096, vocab=50257)
LLAMA_70B = Sizes(hidden=8192, heads=64, ffn=28672, vocab=32000, kv_heads=8, gated=True, bias=False)
BLOOM_176B = Sizes(hidden=14336, heads=112, ffn=57344, vocab=250680)
NEOX_20B = Sizes(hidden=6144, heads=64, ffn=24576, vocab=50257)
MIXTRAL = Sizes(hidden=4096, heads=32, ffn=14336, vocab=32000, kv_heads=8, gated=True, bias=False, experts=8)


def _norm(name: str, sizes: Sizes) -> Shapes:
    shapes: Shapes = {f"{name}.weight": ((sizes.hidden,),)}
    return shapes | {f"{name}.bias": ((sizes.hidden,),)} if sizes.bias else shapes


def _linear(name: str, shape: tuple[int, int], cut: int, sizes: Sizes, tp: int) -> Shapes:
    local = tuple(size // tp if dim == cut else size for dim, size in enumerate(shape))
    bias = (shape[0] // tp if cut == 0 else shape[0],)
    return {f"{name}.weight": (local,)} | ({f"{name}.bias": (bias,)} if sizes.bias else {})


def _layer(prefix: str, sizes: Sizes, tp: int, attention: str) -> Shapes:
    hidden = sizes.hidden
    shapes = _norm(f"{prefix}.input_layernorm", sizes) | _norm(f"{prefix}.post_attention_layernorm", sizes)
    shapes |= _linear(f"{prefix}.{attention}.query_key_value", (sizes.qkv, hidden), 0, sizes, tp)
    shapes |= _linear(f"{prefix}.{attention}.dense", (hidden, hidden), 1, sizes, tp)
    inner = sizes.ffn * (2 if sizes.gated else 1)
    if sizes.experts:
        rows = sizes.experts * inner // tp
        return shapes | {
            f"{prefix}.mlp.router.weight": ((sizes.experts, hidden),),
            f"{prefix}.mlp.experts.weight1": ((rows, hidden),),
            f"{prefix}.mlp.experts.weight2": ((sizes.experts * hidden, sizes.ffn // tp),),
        }
    shapes |= _linear(f"{prefix}.mlp.dense_h_to_4h", (inner, hidden), 0, sizes, tp)
    return shapes | _linear(f"{prefix}.mlp.dense_4h_to_h", (hidden, sizes.ffn), 1, sizes, tp)


def _spread(shapes: Shapes, tp: int) -> Shapes:
    return {name: shape * tp for name, shape in shapes.items()}


def megatron_pipeline(sizes: Sizes, tp: int, untied: bool = False, offset: int = 2) -> Shapes:
    """Names of Megatron-DeepSpeed's GPTModelPipe."""
    table = (sizes.pad(tp) // tp, sizes.hidden)
    embed = f"{offset - 1}" if untied else "tied_modules.embed"
    shapes: Shapes = {f"{embed}.word_embeddings.weight": (table,)}
    if sizes.bias:
        shapes["tied_modules.embed.position_embeddings.weight"] = ((2048, sizes.hidden),)
    for layer in range(offset, offset + sizes.layers):
        shapes |= _layer(str(layer), sizes, tp, "self_attention")
    shapes |= _norm(str(offset + sizes.layers), sizes)
    if untied:
        shapes[f"{offset + sizes.layers + 1}.lm_head.weight"] = (table,)
    return _spread(shapes, tp)


def megatron_plain(sizes: Sizes, tp: int, untied: bool = False) -> Shapes:
    """Names of Megatron-DeepSpeed's GPTModel."""
    table = (sizes.pad(tp) // tp, sizes.hidden)
    shapes: Shapes = {"language_model.embedding.word_embeddings.weight": (table,)}
    if sizes.bias:
        shapes["language_model.embedding.position_embeddings.weight"] = ((2048, sizes.hidden),)
    for layer in range(sizes.layers):
        shapes |= _layer(f"language_model.encoder.layers.{layer}", sizes, tp, "self_attention")
    shapes |= _norm("language_model.encoder.final_layernorm", sizes)
    if untied:
        shapes["language_model.output_layer.weight"] = (table,)
    return _spread(shapes, tp)


def bloom_pipeline(sizes: Sizes, tp: int) -> Shapes:
    """Names of BigScience's BLOOM: a norm after the embedding, ALiBi instead of position embeddings."""
    shapes = {
        name: shape[:1] for name, shape in megatron_pipeline(sizes, tp, offset=3).items() if "position" not in name
    }
    return _spread(shapes | _norm("tied_modules.embed.word_embeddings.norm", sizes), tp)


def neox_pipeline(sizes: Sizes, tp: int) -> Shapes:
    """Names of EleutherAI's GPT-NeoX."""
    table = ((sizes.pad(tp) // tp, sizes.hidden),)
    last = 2 + sizes.layers
    shapes: Shapes = {"sequential.0.word_embeddings.weight": table, f"sequential.{last + 2}.final_linear.weight": table}
    for layer in range(2, last):
        shapes |= _layer(f"sequential.{layer}", sizes, tp, "attention")
    return _spread(shapes | _norm(f"sequential.{last + 1}.norm", sizes), tp)
