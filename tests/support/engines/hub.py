"""Hugging Face's mixture-of-experts models under AutoEP, and under plain ZeRO; run on the ranks."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_presets.base import TransformersTopLevelRouterLogitsAdapter
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from deepspeed_ucp.errors import MismatchError
from tests.support.engines.kinds import forget_groups
from tests.support.hub import SIZES

COMMON = {**SIZES, "max_position_embeddings": 32, "attention_dropout": 0.0}
MODELS: dict[str, tuple[Any, Any]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **COMMON, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True
        ),
    ),
    "deepseek": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **COMMON,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        ),
    ),
}
# DeepSpeed 0.19.8 expects a dict of recorders of router logits, which transformers 5.23 does not have.
TransformersTopLevelRouterLogitsAdapter.retarget_transformers_output_recorders = lambda *_args, **_options: None

TOKENS = torch.arange(24).remainder(31).view(2, 12)


def make(name: str, stage: int, ep: int | None, checkpoint: Any) -> Any:
    forget_groups()
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "checkpoint": checkpoint,
    }
    if ep is not None:
        config["expert_parallel"] = {"enabled": True, "autoep_size": ep, "use_grouped_mm": False}
    torch.manual_seed(3)
    kind, hf_config = MODELS[name]
    module = kind(hf_config)
    return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]


def train(engine: Any, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(step))
        own = tokens.chunk(dist.get_world_size())[dist.get_rank()].to(engine.device)
        loss = engine(input_ids=own, labels=own).loss
        engine.backward(loss)
        engine.step()


def look(engine: Any) -> Tensor:
    engine.eval()
    with torch.no_grad():
        return engine(input_ids=TOKENS).logits.float()


def save(name: str, stage: int, ep: int | None, folder: str) -> Tensor:
    """Train and save. Returns the logits of some tokens."""
    engine = make(name, stage, ep, {"universal": True})
    train(engine, range(3))
    engine.save_checkpoint(folder)
    if dist.get_rank() == 0:
        MODELS[name][1].save_pretrained(f"{folder}/hf")
    logits = look(engine)
    engine.destroy()
    return logits


def load(name: str, stage: int, ep: int | None, folder: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Load. Returns the logits of the same tokens, and the state dict."""
    engine = make(name, stage, ep, {"universal": True})
    engine.load_checkpoint(folder)
    logits, held = look(engine), {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    engine.destroy()
    return logits, held


class Tower(torch.nn.Module):
    """A model of the library in a stage of a pipeline; ``old``: as old releases saved it."""

    def __init__(self, old: bool):
        super().__init__()
        sizes = {key: COMMON[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
        self.bert = BertModel(BertConfig(**sizes, num_hidden_layers=1), add_pooling_layer=False)
        held = self.bert.embeddings
        held.register_buffer("position_ids", held._buffers.pop("position_ids"), persistent=old)

    def forward(self, x: Tensor) -> Tensor:
        return self.bert(input_ids=x).last_hidden_state


def load_stages(folder: str) -> tuple[str, int]:
    """Load a pipeline's checkpoint at another stage. Returns the error, and the step after a lenient load."""

    def make_engine(stage: int) -> Any:
        layers = [LayerSpec(Tower, stage == 1), LayerSpec(torch.nn.Linear, COMMON["hidden_size"], 1)]
        module = PipelineModule(
            layers, num_stages=2, loss_fn=lambda out, _: out.square().mean(), partition_method="uniform"
        )
        config = {
            "train_batch_size": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "checkpoint": {"universal": True},
        }
        return deepspeed.initialize(model=module, config=config)[0]

    saved, live, message = make_engine(1), make_engine(0), ""
    saved.train_batch(iter([(TOKENS[:1], TOKENS[:1])]))
    saved.save_checkpoint(folder)
    try:
        live.load_checkpoint(folder)
    except MismatchError as error:
        message = str(error)
    live.load_checkpoint(folder, load_module_strict=False)
    return message, live.global_steps
