"""Engines of the GPT in `examples/megatron_gpt` under tensor, pipeline and data parallelism."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engines import Made, make_config
from fingerprint import Part, sum_parts

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "megatron_gpt"))
import gpt
import layers
from config import PRESETS, Degrees, GPTConfig
from training import Trainer

CONTEXT = 128  # tokens; a step is short, and positions are a small part of the parameters


@dataclass(frozen=True)
class MegatronEngine:
    """Ranks, their degrees, and the `checkpoint` section of the ds_config; at ZeRO 1."""

    ranks: int
    tp: int = 1
    pp: int = 1
    checkpoint: dict[str, Any] = field(default_factory=dict)

    def make(self, params_m: float, *, trains: bool) -> Made:
        """Make an engine; without `trains` all weights are 0.5, a value that no checkpoint has."""
        draw = [module.draw_weight for module in (gpt, layers)]
        if not trains:
            gpt.draw_weight = layers.draw_weight = lambda _seed, _name, shape, _std: torch.full(tuple(shape), 0.5)
        config = choose_sizes(params_m)
        trainer = Trainer(config, Degrees(tp=self.tp, pp=self.pp, pipeline=True), make_config(1, self.checkpoint))
        gpt.draw_weight, layers.draw_weight = draw
        parts = partial(list_parts, trainer)
        return Made(trainer.engine, trainer.train_step, trainer.save, parts, count_parameters(config))


def choose_sizes(params_m: float) -> GPTConfig:
    """Choose a GPT of about `params_m` million parameters, whose vocabulary needs no padding at degrees up to 4."""
    base = replace(PRESETS["gpt3-medium"], context=CONTEXT, vocabulary=1024, vocabulary_divisor=128)
    if params_m < 50:
        base = replace(base, hidden=256, heads=8)
    embedding = (base.vocabulary + base.context) * base.hidden
    return replace(base, layers=max(2, round((params_m * 1e6 - embedding) / (12 * base.hidden**2))))


def count_parameters(config: GPTConfig) -> int:
    """Count the elements of all parameters, the tied embedding once."""
    hidden, ffn = config.hidden, config.ffn_width
    block = 4 * hidden * (hidden + 1) + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    return config.layers * block + (config.vocabulary + config.context + 2) * hidden


def list_parts(trainer: Trainer) -> list[Part]:
    """List this rank's parts of the parameters in the optimizer."""
    tensor, stage = trainer.parallel.tensor, trainer.parallel.pipe.rank
    sums = sum_parts(trainer.engine, lambda parameter: _find_positions(parameter, tensor))
    named = [(name, p) for name, p in trainer.engine.module.named_parameters() if id(p) in sums]
    return [Part(name, stage, 0 if p.tensor_model_parallel else tensor.rank, sums[id(p)]) for name, p in named]


def _find_positions(parameter: Any, tensor: Any) -> torch.Tensor:
    """Return the positions of a rank's elements in the whole parameter, cut in the way of the model."""
    shape = list(parameter.shape)
    if not parameter.tensor_model_parallel:
        return torch.arange(parameter.numel())
    dim, stride = parameter.partition_dim, parameter.partition_stride
    shape[dim] *= tensor.size
    widths = [width * tensor.size for width in getattr(parameter, "partition_sizes", ())]
    widths = widths or [shape[dim] // stride] * stride
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    return layers.cut_weight(whole, tensor, dim, widths).flatten()
