"""Engines whose model is Megatron-Core's own GPT, which go on from its checkpoints; run on the ranks of a world."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_ucp.testing.capture import CapturedEngine, capture
from tests.export.foreign_run import Lines, make_engine
from tests.support import mcore

LOCAL_NORMS = [
    {
        "from": r"(?P<layer>decoder\.layers\.\d+)\.self_attention\.linear_qkv\.layer_norm_(?P<kind>weight|bias)",
        "to": "{layer}.input_layernorm.{kind}",
    },
    {
        "from": r"(?P<layer>decoder\.layers\.\d+)\.mlp\.linear_fc1\.layer_norm_(?P<kind>weight|bias)",
        "to": "{layer}.pre_mlp_layernorm.{kind}",
    },
]
"""Norms are saved under the names that they have where Transformer Engine fuses them."""


def go_on(
    folder: str,
    model: str,
    stages: tuple[int, ...],
    steps: range,
    *,
    precision: str = "",
    load: dict[str, Any] | None = None,
    **changes: Any,
) -> list[tuple[CapturedEngine, list[float], list[str], tuple[Any, Any]]]:
    """Load into engines of some stages, and train; of each what it held, its losses, what was logged, what came back.

    Args:
        precision: section of the ds_config that is enabled.
        load: more of what ``load_checkpoint`` takes.
        changes: of the model's arguments.
    """
    found = []
    for stage in stages:
        with mcore.join_groups():
            dtype = {"bf16": torch.bfloat16}.get(precision, torch.float32)
            args = mcore.make_args(model, params_dtype=dtype, **changes)
            engine = start(args, stage, precision)
            with Lines() as heard:
                loaded = engine.load_checkpoint(folder, **(load or {}))
            state, losses = capture(engine), []
            for step in steps:
                loss = engine(**mcore.make_batch(args, step)).float().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            found.append((state, losses, heard.lines, loaded))
            engine.destroy()
    return found


def start(args: Any, stage: int, precision: str = "") -> Any:
    """An engine of a model with other weights, and Megatron's param groups."""
    module = mcore.build(args, seed=7)
    params = [*module.parameters()]
    groups = [{"params": [each for each in params if (each.dim() == 1) == is_vector]} for is_vector in (False, True)]
    optimizer = torch.optim.AdamW(groups, lr=1e-5)
    return make_engine(module, optimizer, stage, precision=precision, patterns={"rename": LOCAL_NORMS})
