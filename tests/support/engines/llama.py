"""Hugging Face Llamas under AutoTP: the engines, and how tensor-parallel shards make up a parameter."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from packaging.version import Version

from deepspeed_ucp.engine.parallel import find_parallel_state
from tests.support.engines.letters import group

if TYPE_CHECKING:
    from tests.support.engines.parallel import Launch

VOCABULARY = 67  # odd: its rows are cut unevenly
CUTS_TIED = Version(version("transformers")) >= Version("5")
"""AutoTP cuts an embedding that is tied to the head; with the plan of transformers 4 it stays whole."""

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROWS = ("o_proj", "down_proj")

MODELS: dict[str, dict[str, Any]] = {
    "even": {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4},
    # 3 key-value heads on 2 ranks: 2 and 1; on 4 ranks the last one holds no attention. The tied embedding is cut.
    "uneven": {
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
}


def make(launch: Launch, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 22, "num_hidden_layers": 2, "max_position_embeddings": 16}
    module = LlamaForCausalLM(LlamaConfig(**{**sizes, **MODELS[launch.model]}))
    config = {**launch.ds_config, "gradient_accumulation_steps": 1}
    del config["train_micro_batch_size_per_gpu"]
    if launch.tp > 1:
        config["tensor_parallel"] = {"autotp_size": launch.tp}
    return deepspeed.initialize(model=module, model_parameters=group(module), config=config)[0]


def step(engine: Any) -> float:
    parallel = find_parallel_state(engine)
    generator = torch.Generator().manual_seed(1000 + engine.global_steps)
    tokens = torch.randint(0, VOCABULARY, (engine.train_batch_size(), 8), generator=generator)
    share = tokens.chunk(parallel.dp)[parallel.dp_rank].to(engine.device)
    loss = engine(input_ids=share, labels=share, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def find_blocks(name: str, model: str) -> tuple[int, tuple[int, ...]] | None:
    """Return the dimension along which AutoTP cuts a parameter, in one block of any widths; None: replicated."""
    layer, kind = name.split(".")[-2:]
    if layer in COLUMNS or (layer == "embed_tokens" and CUTS_TIED and MODELS[model].get("tie_word_embeddings")):
        return 0, ()
    return (1, ()) if layer in ROWS and kind == "weight" else None
