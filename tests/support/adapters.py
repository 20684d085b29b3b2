"""Small models with adapters of PEFT."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

LORAS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 4, "use_rslora": True, "target_modules": "all-linear"},
    "dora": {"r": 3, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "patterns": {
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 2},
        "alpha_pattern": {"v_proj": 32},
    },
    "saved": {"r": 4, "target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head", "norm"]},
    "biases": {"r": 4, "target_modules": ["q_proj"], "bias": "lora_only"},
    "all biases": {"r": 4, "target_modules": ["q_proj"], "bias": "all"},
}


def make_base(*, tied: bool = False) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=30, num_key_value_heads=1, attention_bias=True, tie_word_embeddings=tied, **sizes)
    )


def make_peft(*, tied: bool = False, **lora: Any) -> PeftModel:
    """Make a model with a non-zero adapter."""
    model = get_peft_model(make_base(tied=tied), LoraConfig(init_lora_weights=False, **lora))
    torch.manual_seed(1)
    for name, param in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            param.data = torch.randn_like(param) / 3
    return model
