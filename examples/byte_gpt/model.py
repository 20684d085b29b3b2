"""A small byte-level GPT: pre-norm transformer blocks, learned positions, output layer tied to the embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; `context` is in bytes of text."""

    vocabulary: int = 256
    context: int = 64
    width: int = 96
    layers: int = 3
    heads: int = 4
    tie_weights: bool = True


MULTIPLIES_BF16 = torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability().startswith("AVX512")


class Linear(nn.Linear):
    """Multiplies in fp32 if the processor has no bf16 products, which are then tens of times slower."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if MULTIPLIES_BF16 or x.dtype == torch.float32:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on a normalised copy of the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = Linear(config.width, 3 * config.width)
        self.projection = Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.expand = Linear(config.width, 4 * config.width)
        self.contract = Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))


class ByteGPT(nn.Module):
    """Predicts the next byte. Initialised from torch's global generator: seed it first."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialise)
        if config.tie_weights:
            self.head.weight = self.embedding.weight

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats (fp32 scalar) of `targets` given `tokens`, both int64 of shape (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()  # the loss in fp32: its rounding must not hide a difference
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
