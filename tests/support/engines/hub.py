"""Hugging Face's mixture-of-experts models under AutoEP and under plain ZeRO, and a pipeline of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
)

from tests.support.engines import kinds
from tests.support.engines.experts import ADAM
from tests.support.engines.kinds import mean_square, take_step
from tests.support.hub import SIZES

COMMON = {**SIZES, "max_position_embeddings": 32, "attention_dropout": 0.0, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
MODELS: dict[str, tuple[Any, Any]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**COMMON, num_local_experts=4)),
    "deepseek": (DeepseekV3ForCausalLM, DeepseekV3Config(**COMMON, **ROUTED, **LATENT, moe_intermediate_size=12)),
}
# DeepSpeed 0.19.8 expects a dict of recorders of router logits, which transformers 5.23 does not have.
TransformersTopLevelRouterLogitsAdapter.retarget_transformers_output_recorders = lambda *_args, **_options: None

TOKENS = torch.arange(24).remainder(31).view(2, 12)


@dataclass(frozen=True)
class Kind(kinds.Kind):
    """A model of the library by its name; with a degree AutoEP holds its experts."""

    model: str = "mixtral"
    ep: int = 0

    batch: ClassVar[int] = 4
    universal: ClassVar[Any] = True

    @property
    def ds_config(self) -> dict[str, Any]:
        experts = {"expert_parallel": {"enabled": True, "autoep_size": self.ep, "use_grouped_mm": False}}
        return self.make_config(optimizer=ADAM, **(experts if self.ep else {}))

    def join(self, ranks: Sequence[Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the first rank's state; all ranks have its logits."""
        first, *others = (local.state for local in ranks)
        for logits, _ in others:
            torch.testing.assert_close(logits, first[0], rtol=0, atol=1e-6)
        return first


def make(kind: Kind, seed: int) -> Any:
    model, config = MODELS[kind.model]
    module = model(config)
    return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=kind.ds_config)[0]


def step(engine: Any) -> float:
    tokens = torch.randint(0, 32, (Kind.batch, 12), generator=torch.Generator().manual_seed(engine.global_steps))
    own = tokens.chunk(dist.get_world_size())[dist.get_rank()].to(engine.device)
    return take_step(engine, engine(input_ids=own, labels=own).loss)


def read_states(engine: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of some tokens, and the state dict."""
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=TOKENS).logits.float()
    engine.train()
    return logits, {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


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


@dataclass(frozen=True)
class Stages(kinds.Kind):
    """A pipeline with a `Tower`, which stage 1 saves as old releases did."""

    batch: ClassVar[int] = 1

    @property
    def ds_config(self) -> dict[str, Any]:
        return self.make_config(optimizer=ADAM)

    def make(self, seed: int) -> Any:
        layers = [LayerSpec(Tower, self.stage == 1), LayerSpec(torch.nn.Linear, COMMON["hidden_size"], 1)]
        module = PipelineModule(layers, num_stages=2, loss_fn=mean_square, partition_method="uniform")
        return deepspeed.initialize(model=module, config=self.ds_config)[0]

    @staticmethod
    def step(engine: Any) -> float:
        return float(engine.train_batch(iter([(TOKENS[:1], TOKENS[:1])])))

    @staticmethod
    def read(engine: Any) -> int:
        return int(engine.global_steps)

    def join(self, ranks: Sequence[Any]) -> int:
        return ranks[0].state
