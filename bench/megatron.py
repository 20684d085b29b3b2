"""Real engines of the GPT in `examples/megatron_gpt`, under any tensor, pipeline and data parallelism."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from engines import Made
from fingerprint import Part, sum_parts

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "megatron_gpt"))
import gpt
import layers
from config import PRESETS, Degrees, GPTConfig
from training import Trainer

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTEXT = 128  # tokens; a step need not take long, and positions are a small part of the parameters
_LAYERS = r"language_model\.encoder\.layers\.(\d+)\.(.*)"
RENAME = [
    {"from": r"tied_modules\.embed\.(?P<rest>.*)", "to": "language_model.embedding.{rest}"},
    {"from": r"(?P<n>\d+)\.(?P<rest>.+\..+)", "to": "language_model.encoder.layers.{n-2}.{rest}"},
    {"from": r"\d+\.(?P<rest>[^.]+)", "to": "language_model.encoder.final_layernorm.{rest}"},
]
"""From the pipeline's names to those of the plain build."""


@dataclass(frozen=True)
class Topology:
    """Ranks, their grid, ZeRO stage, and the `checkpoint` section of the configuration."""

    ranks: int
    tp: int = 1
    pp: int = 1
    stage: int = 1
    checkpoint: dict[str, Any] = field(default_factory=dict)

    @property
    def degrees(self) -> Degrees:
        return Degrees(tp=self.tp, pp=self.pp, pipeline=self.stage < 3)

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "steps_per_print": 1 << 30,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": self.stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}},
            "checkpoint": self.checkpoint,
        }

    def make(self, params_m: float, *, trains: bool) -> Made:
        """Make an engine; without ``trains`` all weights have a value that no load writes."""
        deepspeed.init_distributed("gloo")
        if not trains:
            for module in (gpt, layers):
                module.draw_weight = _fill_weight
        config = choose_sizes(params_m)
        trainer = Trainer(config, self.degrees, self.config())
        parts = partial(list_parts, trainer)
        return Made(trainer.engine, trainer.train_step, trainer.save, parts, count_parameters(config))


def choose_sizes(params_m: float) -> GPTConfig:
    """A GPT of about `params_m` million parameters; its vocabulary needs no padding under any of the degrees."""
    base = replace(PRESETS["gpt3-medium"], context=CONTEXT, vocabulary=1024, vocabulary_divisor=128)
    if params_m < 50:
        base = replace(base, hidden=256, heads=8)
    embedding = (base.vocabulary + base.context) * base.hidden
    return replace(base, layers=max(2, round((params_m * 1e6 - embedding) / (12 * base.hidden**2))))


def count_parameters(config: GPTConfig) -> int:
    """Elements of all parameters, the tied embedding counted once."""
    hidden, ffn = config.hidden, config.ffn_width
    block = 4 * hidden * (hidden + 1) + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    return config.layers * block + (config.vocabulary + config.context + 2) * hidden


def _fill_weight(_seed: int, _name: str, shape: Sequence[int], _std: float) -> torch.Tensor:
    return torch.full(tuple(shape), 0.5)


def list_parts(trainer: Trainer) -> list[Part]:
    """What this rank's optimizer holds, under the pipeline's names."""
    line, stage = trainer.parallel.tensor, trainer.parallel.pipe.rank
    sums = sum_parts(trainer.engine, lambda parameter: _find_places(parameter, line))
    parts = []
    for name, parameter in trainer.engine.module.named_parameters():
        if id(parameter) in sums:
            cut = parameter.tensor_model_parallel
            shard, mirror = (line.rank, 0) if cut else (0, line.rank)
            saved = name_in_pipeline(name, trainer.config.layers)
            parts.append(Part(saved, stage, shard, mirror, sums[id(parameter)]))
    return parts


def _find_places(parameter: Any, line: Any) -> torch.Tensor:
    """Of each element of a rank's parameter the place in the whole, by cutting the whole's places as the model does."""
    shape = list(getattr(parameter, "ds_shape", parameter.shape))
    if not parameter.tensor_model_parallel:
        return torch.arange(torch.Size(shape).numel())
    dim, stride = parameter.partition_dim, parameter.partition_stride
    shape[dim] *= line.size
    widths = [width * line.size for width in getattr(parameter, "partition_sizes", ())]
    widths = widths or [shape[dim] // stride] * stride
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    return layers.cut_weight(whole, line, dim, widths).flatten()


def name_in_pipeline(name: str, depth: int) -> str:
    """The pipeline's name of a parameter of either build."""
    if match := re.fullmatch(_LAYERS, name):
        return f"{int(match[1]) + 2}.{match[2]}"
    name = name.replace("language_model.embedding.", "tied_modules.embed.")
    return name.replace("language_model.encoder.final_layernorm.", f"{depth + 2}.")
