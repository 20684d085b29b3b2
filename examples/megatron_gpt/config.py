"""Sizes and variants of the model, presets of them, and the topology."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and variants of the model.

    Attributes:
        layers, hidden, heads, context: depth, width, attention heads, sequence length in tokens.
        kv_heads: key and value heads (grouped-query attention); 0 takes `heads`.
        ffn: width of the feed-forward layer; 0: 4 · hidden, or with SwiGLU 8/3 · hidden rounded up to 64s.
        vocabulary: number of tokens (default: the 256 bytes).
        vocabulary_divisor: the embedding is padded to a multiple of this times the tensor-parallel degree.
        swiglu, rmsnorm, rotary, untied: replace GELU, LayerNorm, learned positions, an output tied to the embedding.
        bias: linear layers have biases.
        experts: feed-forward experts per layer, of which a token uses `top_k`; 0 makes a plain feed-forward layer.
        deepspeed_moe: use experts of `deepspeed.moe`, distributed over expert-parallel ranks. Otherwise all experts are
            in one tensor, which tensor parallelism cuts.
        seed: seed of the initial weights.
    """

    layers: int = 4
    hidden: int = 64
    heads: int = 8
    context: int = 32
    kv_heads: int = 0
    ffn: int = 0
    vocabulary: int = 256
    vocabulary_divisor: int = 32
    swiglu: bool = False
    rmsnorm: bool = False
    rotary: bool = False
    untied: bool = False
    bias: bool = True
    experts: int = 0
    top_k: int = 2
    deepspeed_moe: bool = False
    seed: int = 1

    init_std = 0.02

    @property
    def output_std(self) -> float:
        """Standard deviation of weights that write to the residual stream, as in GPT-2."""
        return self.init_std / math.sqrt(2 * self.layers)

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layer, or of each expert."""
        if self.ffn:
            return self.ffn
        return -(-8 * self.hidden // (3 * 64)) * 64 if self.swiglu else 4 * self.hidden

    def padded_vocabulary(self, tp: int) -> int:
        """Rows of the embedding, padding included, under `tp` tensor-parallel ranks."""
        multiple = self.vocabulary_divisor * tp
        return -(-self.vocabulary // multiple) * multiple


@dataclass(frozen=True)
class Degrees:
    """The topology; data parallelism uses the remaining ranks.

    Attributes:
        tp, pp, sp: tensor-parallel ranks, pipeline stages, sequence-parallel ranks.
        pipeline: build a PipelineModule, also if pp is 1.
        partition_method: DeepSpeed's partition of layers over stages.
        ep: expert-parallel ranks, a part of the data-parallel ones.
    """

    tp: int = 1
    pp: int = 1
    sp: int = 1
    pipeline: bool = True
    partition_method: str = "type:transformer"
    ep: int = 1

    def check(self, config: GPTConfig, stage: int) -> None:
        """Raise ValueError if DeepSpeed or the model does not support the topology."""
        if self.pipeline and (stage > 1 or self.sp > 1):
            raise ValueError(f"a pipeline needs ZeRO 0 or 1 and no sp, found ZeRO {stage}, sp {self.sp}")
        if not self.pipeline and self.pp > 1:
            raise ValueError(f"pp {self.pp} needs the pipeline build")
        if config.heads % (self.tp * self.sp) or config.key_heads % self.tp:
            raise ValueError(f"{config.heads}/{config.key_heads} heads cannot be cut by tp {self.tp} × sp {self.sp}")
        if config.deepspeed_moe and (self.pipeline or stage > 2 or self.tp * self.sp > 1):
            raise ValueError("experts of deepspeed.moe need the plain build and ZeRO 0 to 2, without tp and sp")
        if self.ep > 1 and (not config.deepspeed_moe or config.experts % self.ep):
            raise ValueError(f"ep {self.ep} does not divide the experts of deepspeed.moe ({config.experts})")
        if config.context % self.sp:
            raise ValueError(f"a context of {config.context} cannot be cut by sp {self.sp}")


LLAMA = {"swiglu": True, "rmsnorm": True, "rotary": True, "untied": True, "bias": False}

PRESETS: dict[str, GPTConfig] = {
    "tiny": GPTConfig(),  # 0.2 million parameters
    "tiny-llama": GPTConfig(kv_heads=4, **LLAMA),  # type: ignore[arg-type]
    "tiny-moe": GPTConfig(kv_heads=4, experts=4, ffn=64, **LLAMA),  # type: ignore[arg-type]
    "tiny-moe-ep": GPTConfig(kv_heads=4, experts=4, ffn=64, deepspeed_moe=True, **LLAMA),  # type: ignore[arg-type]
    "small": GPTConfig(layers=8, hidden=256, heads=8, context=256),  # 6 million
    "gpt3-small": GPTConfig(layers=12, hidden=768, heads=12, context=1024, vocabulary_divisor=128),  # 85 million
    "gpt3-medium": GPTConfig(layers=24, hidden=1024, heads=16, context=1024, vocabulary_divisor=128),  # 303 million
}
