"""A Megatron-style GPT, as a PipelineModule or as a plain module.

The two builds have the same parameters under different names, as in Megatron-DeepSpeed:

    pipeline                                      plain
    tied_modules.embed.word_embeddings.weight     language_model.embedding.word_embeddings.weight
    2.self_attention.query_key_value.weight       language_model.encoder.layers.0.self_attention.query_key_value.weight
    6.weight (the final norm, of 4 layers)        language_model.encoder.final_layernorm.weight
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import deepspeed.moe.layer
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from layers import (
    ColumnParallelLinear,
    Norm,
    RowParallelLinear,
    VocabParallelEmbedding,
    draw_weight,
    make_parameter,
    mark_parameter,
    vocab_parallel_cross_entropy,
)
from parallel import copy_to, exchange, reduce_from
from torch import nn

if TYPE_CHECKING:
    from config import GPTConfig
    from parallel import ParallelState

ROTARY_BASE = 10000.0


class PositionEmbeddings(nn.Module):
    """Learned positions; replicated."""

    def __init__(self, config: GPTConfig, parallel: ParallelState) -> None:
        super().__init__()
        shape = (config.context, config.hidden)
        whole = draw_weight(config.seed, "position_embeddings", shape, config.init_std)
        self.weight = make_parameter(whole, parallel.tensor)

    def forward(self, first: int, length: int) -> torch.Tensor:
        return self.weight[first : first + length]


class Embedding(nn.Module):
    """Tokens, (batch, length) integers of this rank's part of the sequence, to hidden states."""

    def __init__(self, config: GPTConfig, parallel: ParallelState) -> None:
        super().__init__()
        self.sequence_rank = parallel.sequence.rank
        self.word_embeddings = VocabParallelEmbedding(config, parallel, "word_embeddings")
        self.position_embeddings = None if config.rotary else PositionEmbeddings(config, parallel)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.word_embeddings(tokens)
        if self.position_embeddings is None:
            return hidden
        length = tokens.shape[1]
        return hidden + self.position_embeddings(self.sequence_rank * length, length)


def rotate(x: torch.Tensor, first: int) -> torch.Tensor:
    """Rotary positions of `x` (batch, heads, length, width), whose first token is at position `first`."""
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    positions = torch.arange(first, first + x.shape[2], device=x.device, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    left, right = x.float().chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


class SelfAttention(nn.Module):
    """Causal attention with heads distributed over tensor-parallel ranks; [q_r; k_r; v_r] are fused in one weight.

    Sequence parallelism (Ulysses) gives each rank the full sequence of a part of the heads.
    """

    def __init__(self, config: GPTConfig, parallel: ParallelState, name: str) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel
        width, keys = config.heads * config.head_width, config.key_heads * config.head_width
        self.query_key_value = ColumnParallelLinear(config, parallel, f"{name}.query_key_value", (width, keys, keys))
        self.dense = RowParallelLinear(config, parallel, f"{name}.dense", width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        tp, sequence = self.parallel.tensor.size, self.parallel.sequence
        heads = self.query_key_value(x).view(batch, length, -1, self.config.head_width).transpose(1, 2)
        keys = self.config.key_heads // tp
        query, key, value = heads.split((self.config.heads // tp, keys, keys), 1)
        if self.config.rotary:
            query, key = (rotate(part, sequence.rank * length) for part in (query, key))
        group = self.config.heads // self.config.key_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        query, key, value = (exchange(part, sequence, cut=1, join=2) for part in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = exchange(attended, sequence, cut=2, join=1)
        return self.dense(attended.transpose(1, 2).reshape(batch, length, -1))


def activate(x: torch.Tensor, swiglu: bool) -> torch.Tensor:
    """GELU, or SwiGLU of [gate_r; up_r] along the last dimension."""
    if not swiglu:
        return F.gelu(x)
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class MLP(nn.Module):
    """The feed-forward layer with its inner dimension cut; [gate_r; up_r] are fused in one weight for SwiGLU."""

    def __init__(self, config: GPTConfig, parallel: ParallelState, name: str) -> None:
        super().__init__()
        self.swiglu = config.swiglu
        blocks = (config.ffn_width,) * (2 if config.swiglu else 1)
        self.dense_h_to_4h = ColumnParallelLinear(config, parallel, f"{name}.dense_h_to_4h", blocks)
        self.dense_4h_to_h = RowParallelLinear(config, parallel, f"{name}.dense_4h_to_h", config.ffn_width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense_4h_to_h(activate(self.dense_h_to_4h(x), self.swiglu))


class Experts(nn.Module):
    """The weights of all experts in two tensors, [experts · out, in], cut along each expert's inner dimension."""

    def __init__(self, config: GPTConfig, parallel: ParallelState, name: str) -> None:
        super().__init__()
        self.count, self.swiglu, line = config.experts, config.swiglu, parallel.tensor
        blocks = (config.ffn_width,) * (config.experts * (2 if config.swiglu else 1))
        rows, columns = (sum(blocks), config.hidden), (config.experts * config.hidden, config.ffn_width)
        up = draw_weight(config.seed, f"{name}.weight1", rows, config.init_std)
        down = draw_weight(config.seed, f"{name}.weight2", columns, config.output_std)
        self.weight1 = make_parameter(up, line, dim=0, blocks=blocks)
        self.weight2 = make_parameter(down, line, dim=1)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's partial sum.

        Args:
            x: (tokens, hidden).
            chosen: (tokens, top_k), the experts of each token.
            weights: (tokens, top_k), the weights of these experts.
        """
        y = torch.zeros_like(x)
        pairs = zip(self.weight1.chunk(self.count), self.weight2.chunk(self.count), strict=True)
        for expert, (up, down) in enumerate(pairs):
            tokens, slots = (chosen == expert).nonzero(as_tuple=True)
            out = F.linear(activate(F.linear(x[tokens], up), self.swiglu), down)
            y = y.index_add(0, tokens, out * weights[tokens, slots, None])
        return y


class Router(nn.Module):
    """Scores of the experts, fp32; replicated."""

    def __init__(self, config: GPTConfig, parallel: ParallelState, name: str) -> None:
        super().__init__()
        whole = draw_weight(config.seed, name, (config.experts, config.hidden), config.init_std)
        self.weight = make_parameter(whole, parallel.tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight).float()


class MoE(nn.Module):
    """A feed-forward layer of experts, as in Mixtral: a replicated router sends each token to `top_k` of them.

    No expert parallelism, no capacity, no balancing loss.
    """

    def __init__(self, config: GPTConfig, parallel: ParallelState, name: str) -> None:
        super().__init__()
        self.top_k, self.line = config.top_k, parallel.tensor
        self.router = Router(config, parallel, f"{name}.router")
        self.experts = Experts(config, parallel, f"{name}.experts")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        scores, chosen = self.router(flat).topk(self.top_k, -1)
        weights = scores.softmax(-1).to(x.dtype)
        partial_sum = self.experts(copy_to(flat, self.line), chosen, copy_to(weights, self.line))
        return reduce_from(partial_sum, self.line).view_as(x)


class Expert(nn.Module):
    """One feed-forward expert, not cut; [gate; up] are fused in one weight for SwiGLU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        rows = config.ffn_width * (2 if config.swiglu else 1)
        self.weight1 = nn.Parameter(torch.empty(rows, config.hidden))
        self.weight2 = nn.Parameter(torch.empty(config.hidden, config.ffn_width))

    def draw(self, name: str) -> None:
        """Set the weights of the expert with this name."""
        weights = {"weight1": (self.weight1, self.config.init_std), "weight2": (self.weight2, self.config.output_std)}
        for kind, (weight, std) in weights.items():
            weight.data.copy_(draw_weight(self.config.seed, f"{name}.{kind}", weight.shape, std))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(activate(F.linear(x, self.weight1), self.config.swiglu), self.weight2)


class SpreadMoE(nn.Module):
    """A feed-forward layer of DeepSpeed's experts, distributed over expert-parallel ranks.

    No capacity, no random choice, no balancing loss: the experts of a token depend on the token alone.
    """

    def __init__(self, config: GPTConfig, parallel: ParallelState, name: str) -> None:
        super().__init__()
        self.moe = deepspeed.moe.layer.MoE(
            config.hidden,
            Expert(config),
            config.experts,
            ep_size=parallel.experts.size,
            k=config.top_k,
            drop_tokens=False,
            min_capacity=0,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        experts = self.moe.deepspeed_moe.experts.deepspeed_experts
        for place, expert in enumerate(experts):
            expert.draw(f"{name}.experts.{parallel.experts.rank * len(experts) + place}")
        router = self.moe.deepspeed_moe.gate.wg.weight
        router.data.copy_(draw_weight(config.seed, f"{name}.router", router.shape, config.init_std))
        for parameter in self.parameters():
            mark_parameter(parameter, parallel.tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)[0]


class ParallelTransformerLayer(nn.Module):
    """Attention and feed-forward layer, each on a normalised copy of the residual stream."""

    def __init__(self, config: GPTConfig, parallel: ParallelState, index: int) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.input_layernorm = Norm(config, parallel)
        self.self_attention = SelfAttention(config, parallel, f"{name}.self_attention")
        self.post_attention_layernorm = Norm(config, parallel)
        feed_forward = MLP if not config.experts else SpreadMoE if config.deepspeed_moe else MoE
        self.mlp = feed_forward(config, parallel, f"{name}.mlp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LMHead(nn.Module):
    """Hidden states to this rank's part of the logits, by a table that is not tied."""

    def __init__(self, config: GPTConfig, parallel: ParallelState) -> None:
        super().__init__()
        self.lm_head = VocabParallelEmbedding(config, parallel, "lm_head")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return compute_logits(hidden, self.lm_head)


def compute_logits(hidden: torch.Tensor, table: VocabParallelEmbedding) -> torch.Tensor:
    """Return the logits of this rank's rows of `table`."""
    return F.linear(copy_to(hidden, table.line), table.weight)


class GPT(nn.Module):
    """The plain build, for ZeRO 0 to 3 with tensor and sequence parallelism."""

    def __init__(self, config: GPTConfig, parallel: ParallelState) -> None:
        super().__init__()
        layers = [ParallelTransformerLayer(config, parallel, index) for index in range(config.layers)]
        encoder = nn.ModuleDict({"layers": nn.ModuleList(layers), "final_layernorm": Norm(config, parallel)})
        parts = {"embedding": Embedding(config, parallel), "encoder": encoder}
        if config.untied:
            parts["output_layer"] = VocabParallelEmbedding(config, parallel, "lm_head")
        self.language_model = nn.ModuleDict(parts)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in nats (fp32 scalar) over this rank's part of the sequence.

        Args:
            tokens: (batch, length) integers, this rank's part of the sequence.
            labels: the tokens that follow them.
        """
        model = self.language_model
        hidden = model["embedding"](tokens.long())
        for layer in model["encoder"]["layers"]:
            hidden = layer(hidden)
        hidden = model["encoder"]["final_layernorm"](hidden)
        table = model["output_layer"] if "output_layer" in model else model["embedding"].word_embeddings
        return vocab_parallel_cross_entropy(compute_logits(hidden, table), labels.long(), table.line)


def widen(tokens: torch.Tensor) -> torch.Tensor:
    """Convert tokens to int64, by which tables are indexed (first layer of the pipeline)."""
    return tokens.long()


def tied_logits(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return compute_logits(hidden, embedding.word_embeddings)


def make_pipeline(config: GPTConfig, parallel: ParallelState, partition_method: str) -> PipelineModule:
    """Make the pipeline build, for ZeRO 0 and 1 with tensor parallelism.

    The first and the last stage have a full tied embedding. Its positions are used only in the first one.
    """
    line = parallel.tensor
    blocks = [LayerSpec(ParallelTransformerLayer, config, parallel, index) for index in range(config.layers)]
    if config.untied:
        first, last = LayerSpec(Embedding, config, parallel), LayerSpec(LMHead, config, parallel)
    else:
        tied = partial(TiedLayerSpec, "embed", Embedding, config, parallel, tied_weight_attr="word_embeddings.weight")
        first, last = tied(), tied(forward_fn=tied_logits)
    return PipelineModule(
        layers=[widen, first, *blocks, LayerSpec(Norm, config, parallel), last],
        topology=PipeModelDataParallelTopology(num_pp=parallel.pipe.size, num_mp=line.size, num_dp=parallel.data.size),
        loss_fn=lambda logits, labels: vocab_parallel_cross_entropy(logits, labels.long(), line),
        partition_method=partition_method,
    )
