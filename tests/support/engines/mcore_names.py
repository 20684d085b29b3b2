"""What ranks do with Megatron-Core's checkpoints under other names: the truth of Megatron-Core itself, and engines."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups
from torch import Tensor

from deepspeed_ucp.targets import find_place
from deepspeed_ucp.testing.capture import capture
from tests.export.foreign_run import Lines
from tests.support import mcore

SIZES = mcore.SIZES
NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Of the modules, and as checkpoints have them."""
TOKENS = torch.arange(2 * SIZES["max_position_embeddings"]).mul(7).remainder(SIZES["vocab_size"]).view(2, -1)


def find_logits(model: str, weights: Mapping[str, Tensor], **changes: Any) -> Tensor:
    """What Megatron-Core's own model makes of :data:`TOKENS`, without the padding of the vocabulary.

    Args:
        weights: by the names that a checkpoint has, each layer for itself.
    """
    args = mcore.make_args(model, **changes)
    with mcore.on_cpu(), torch.no_grad():
        batch = mcore.make_batch(args, 0)
        logits = fill(args, weights)(TOKENS, batch["position_ids"], batch["attention_mask"])
    return logits[..., : SIZES["vocab_size"]].float()


def fill(args: Any, weights: Mapping[str, Tensor]) -> Any:
    """Megatron-Core's model with the weights of a checkpoint."""
    module = mcore.build(args).eval()
    state = {}
    for name, tensor in module.state_dict().items():
        if name.endswith("_extra_state"):
            continue
        saved = name
        for own, fused in NORMS.items():
            saved = saved.replace(own, fused) if saved.replace(own, fused) in weights else saved
        front, expert, back = saved.partition(".local_experts.")
        number, _, rest = back.partition(".")
        state[name] = weights[f"{front}.experts.{rest}"][int(number)] if expert else weights[saved]
        assert state[name].shape == tensor.shape, name
    module.load_state_dict(state, strict=False)
    return module


def start(kind: str, config: Mapping[str, Any], stage: int, patterns: Any, tp: int = 1, ep: int = 0) -> Any:
    """An engine of a model of Hugging Face; with ``ep`` AutoEP has its experts."""
    import transformers

    torch.manual_seed(3)
    made = getattr(transformers, kind)
    module = made(made.config_class(**config, attn_implementation="eager"))
    ds_config: dict[str, Any] = {
        "train_batch_size": 2 * dist.get_world_size() // tp,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"universal": {"patterns": patterns, "param_groups": "live"}},
    }
    if tp > 1:
        ds_config["tensor_parallel"] = {"autotp_size": tp}
    if ep:
        from tests.support.engines import hub  # noqa: F401 - lets AutoEP take transformers' models

        groups.mpu = None
        for known in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
            known.clear()  # named by the degree alone
        ds_config["expert_parallel"] = {"enabled": True, "autoep_size": ep, "use_grouped_mm": False}
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=ds_config)
    return engine


def look(engine: Any) -> tuple[Any, Tensor]:
    """What an engine holds, and its logits of :data:`TOKENS`."""
    held = SimpleNamespace(place=find_place(engine), state=capture(engine))
    engine.eval()
    with torch.no_grad():
        return held, engine(input_ids=TOKENS).logits.float()


def save_hf(folder: str, kind: str, config: Mapping[str, Any], stage: int) -> tuple[Any, Tensor]:
    """Train a step, save, look."""
    engine = start(kind, config, stage, None)
    tokens = TOKENS[:1].to(engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(folder)
    found = look(engine)
    engine.destroy()
    return found


def load(
    folder: str, kind: str, config: Mapping[str, Any], stage: int, patterns: Any, tp: int = 1, again: str = ""
) -> tuple[Any, Tensor, str]:
    """Load into an engine, and save there; what it holds, its logits, and what was said."""
    engine, heard = start(kind, config, stage, patterns, tp), Lines()
    try:
        with heard:
            engine.load_checkpoint(folder)
        if again:
            engine.save_checkpoint(again)
        return *look(engine), "\n".join(heard.lines)
    finally:
        engine.destroy()


def load_experts(
    folder: str, config: Mapping[str, Any], stage: int, ep: int, patterns: Any
) -> tuple[dict[tuple[str, str], Tensor], Tensor]:
    """Load into AutoEP's engine of a Mixtral; what this rank holds, experts one by one, and its logits."""
    from tests.support.engines import fused

    engine = start("MixtralForCausalLM", config, stage, patterns, ep=ep)
    try:
        engine.load_checkpoint(folder)
        states = fused.read_states(engine)
        engine.eval()
        with torch.no_grad():
            return states, engine(input_ids=TOKENS).logits.float()
    finally:
        engine.destroy()


def find_loss(model: str, weights: Mapping[str, Tensor], **changes: Any) -> float:
    """Megatron-Core's own loss of its first batch; changes of its sizes."""
    args = mcore.make_args(model, **changes)
    with mcore.on_cpu(), torch.no_grad():
        module = fill(args, weights)
        return float(module(**mcore.make_batch(args, 0)).float().mean())


def load_megatron(training: Any, folder: str, model: str, **changes: Any) -> tuple[Any, float, str]:
    """Load into an engine of the example's GPT: what it holds, without a pipeline its loss, and what was said."""
    engine = next(training())
    heard, args = Lines(), mcore.make_args(model, **changes)
    try:
        with heard:
            engine.load_checkpoint(folder)
        held = SimpleNamespace(place=find_place(engine), state=capture(engine))
        batch, loss = mcore.make_batch(args, 0), float("nan")
        if not isinstance(engine, PipelineEngine):
            with torch.no_grad():
                loss = float(engine(batch["input_ids"], batch["labels"]))
        return held, loss, "\n".join(heard.lines)
    finally:
        engine.destroy()
