"""Small Hugging Face models."""

from __future__ import annotations

from transformers import LlamaConfig, MixtralConfig, Qwen2MoeConfig

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TIED = LlamaConfig(**SIZES, tie_word_embeddings=True)
MIXTRAL = MixtralConfig(**SIZES, num_local_experts=3)
QWEN = Qwen2MoeConfig(**SIZES, num_experts=12, moe_intermediate_size=6, shared_expert_intermediate_size=6)
