"""Small GPT-shaped checkpoints of any topology for the commands, written without engines; the parsers of commands."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from deepspeed_ucp.cli.dispatch import build_parser
from tests.properties.samples import PIPE
from tests.synth import Model, Param, Run, Topology, random_state, write_checkpoint

PATTERNS = json.dumps(
    [
        {"match": r".*(wte|query_key_value|dense_h_to_4h)\..*", "pattern": "shard-v"},
        {"match": r".*dense_4h_to_h\.weight", "pattern": "shard-h"},
        {"match": r".*(norm|ln_f|wpe)\..*|.*dense_4h_to_h\.bias", "pattern": "replicate"},
    ]
)
"""The rules for :func:`cut`."""

DOCS = Path(__file__).parents[2] / "docs"

DS_CONFIG = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
COLUMNS = ("query_key_value.weight", "dense_h_to_4h.weight", "wte.weight", "up", "word")


def make_gpt(layers: int = 4, width: int = 16, vocab: int = 64) -> Model:
    shapes = {
        "input_layernorm.weight": (width,),
        "attention.query_key_value.weight": (3 * width, width),
        "mlp.dense_h_to_4h.weight": (4 * width, width),
        "mlp.dense_4h_to_h.weight": (width, 4 * width),
        "mlp.dense_4h_to_h.bias": (width,),
    }
    params = [Param("wte.weight", (vocab, width)), Param("wpe.weight", (8, width), frozen=True)]
    for layer in range(layers):
        params += [Param(f"h.{layer}.{name}", shape, int(len(shape) == 1)) for name, shape in shapes.items()]
    params += [Param("ln_f.weight", (width,), group=1), Param("lm_head.weight", (vocab, width), alias_of="wte.weight")]
    return Model(tuple(params), {"mask": torch.ones(8, 8, dtype=torch.bool)})


def cut(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Cut like Megatron, except that query, key and value are cut like any column."""
    if name.endswith(COLUMNS):
        return tensor.chunk(tp, 0)[rank].clone()
    return tensor.chunk(tp, 1)[rank].clone() if name.endswith("dense_4h_to_h.weight") else tensor


def write_sample(folder: Path | str, topology: Topology, model: Model | None = None, **run: Any) -> Path:
    """Write a checkpoint under ``folder``; return the folder of the tag."""
    model = model or (PIPE if topology.pp > 1 else make_gpt())
    state = random_state(model, 0, precision=topology.precision, topology=topology)
    config = {**topology.ds_config(), **DS_CONFIG}
    options: dict[str, Any] = {"global_steps": 3, "ds_config": config, "client_state": {"epoch": 2}, **run}
    return write_checkpoint(folder, model, state, topology, cut=cut, run=Run(**options))


def find_parser(name: str) -> argparse.ArgumentParser:
    (commands,) = (a for a in build_parser((name,))._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices[name]  # type: ignore[no-any-return]
