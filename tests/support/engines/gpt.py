"""The example's GPT and variants of it: engines, names of parameters, and how its shards form the model.

Names and cuts follow from the model's definition, independent of the plugin.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.synth.megatron import nested_module

if TYPE_CHECKING:
    from tests.support.engines.parallel import Launch

EXAMPLE = Path(__file__).parents[3] / "examples" / "megatron_gpt"
LAYERS = 3

_SIZES = {"layers": LAYERS, "hidden": 32, "heads": 8, "context": 16, "vocabulary": 256, "vocabulary_divisor": 8}
_LLAMA = {"kv_heads": 4, "ffn": 48, "swiglu": True, "rmsnorm": True, "rotary": True, "untied": True, "bias": False}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _SIZES,  # tied, learned positions, LayerNorm, GELU
    "llama": {**_SIZES, **_LLAMA},
    "moe": {**_SIZES, **_LLAMA, "experts": 4, "ffn": 16},
    "padded": {**_SIZES, "vocabulary": 257},  # 264, 272, 288 rows under tp 1, 2, 4
    "padded-llama": {**_SIZES, **_LLAMA, "vocabulary": 257},
    "short": {**_SIZES, "layers": 0},  # embedding, norm, output
    "megatron": _SIZES,  # with Megatron's attributes only
    "megatron-llama": {**_SIZES, **_LLAMA},
    "unmarked": _SIZES,  # without any attributes
    "interleaved": {**_SIZES, "kv_heads": 4},  # another fused query, key and value, grouped
    "extras": _SIZES,  # with frozen parameters and buffers
}


def make(launch: Launch, seed: int) -> Any:
    """Make an engine. The seed changes the weights, and not the text."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    from config import Degrees, GPTConfig
    from training import Trainer

    config = GPTConfig(**MODELS[launch.model], seed=seed)
    degrees = Degrees(launch.tp, launch.pp, launch.sp, launch.pipeline, launch.method)
    with _CHANGES.get(launch.model, nullcontext)():
        trainer = Trainer(config, degrees, launch.ds_config)
    trainer.config = replace(config, seed=1)
    if launch.nested:
        module = trainer.engine.module
        flat = module.state_dict
        module.state_dict = lambda *args, **options: nested_module(flat(*args, **options))
    trainer.engine.make_client_state = trainer.make_client_state
    trainer.engine.train_step = trainer.train_step
    return trainer.engine


def step(engine: Any) -> float:
    return engine.train_step()


@contextmanager
def _empty_stage() -> Iterator[None]:
    """Leave the second of four stages without layers; its optimizer has an empty group, which DeepSpeed drops."""
    import training
    from deepspeed.runtime import utils

    cuts = {4: [0, 2, 2, 3, 4], 2: [0, 2, 4], 1: [0, 4]}
    group = training.group_parameters
    with (
        mock.patch.object(training, "group_parameters", lambda *args: group(*args) or [{"params": []}]),
        mock.patch.object(utils, "partition_uniform", lambda num_items, num_parts: cuts[num_parts]),
    ):
        yield


@contextmanager
def _extras() -> Iterator[None]:
    """Add frozen parameters and buffers to layers, one cut and one replicated of each."""
    import gpt
    import torch

    class ParallelTransformerLayer(gpt.ParallelTransformerLayer):
        def __init__(self, config: Any, parallel: Any, index: int) -> None:
            super().__init__(config, parallel, index)
            self.mlp.dense_4h_to_h.weight.requires_grad_(False)
            self.mlp.dense_4h_to_h.bias.requires_grad_(False)
            line = parallel.tensor
            whole = torch.arange(config.hidden) * config.seed + index
            self.register_buffer("span", whole.float().chunk(line.size)[line.rank].clone())
            self.register_buffer("passes", torch.full((2,), index * config.seed))

        def forward(self, x: Any) -> Any:
            if self.training:
                self.passes += 1
            return super().forward(x)

    with mock.patch.object(gpt, "ParallelTransformerLayer", ParallelTransformerLayer):
        yield


@contextmanager
def _megatron(*, marked: bool = True) -> Iterator[None]:
    """Use Megatron's attributes, which do not describe fused parameters; or no attributes."""
    import gpt
    import layers

    make = layers.make_parameter

    def make_plainly(*args: Any, **options: Any) -> Any:
        parameter = make(*args, **options)
        parallel, dim = parameter.tensor_model_parallel, parameter.partition_dim
        vars(parameter).clear()
        if marked:
            vars(parameter).update(tensor_model_parallel=parallel, partition_dim=dim, partition_stride=1)
        return parameter

    with (
        mock.patch.object(layers, "make_parameter", make_plainly),
        mock.patch.object(gpt, "make_parameter", make_plainly),
    ):
        yield


@contextmanager
def _interleaved() -> Iterator[None]:
    """Fuse the weight of attention as [q, k, v of head group 0; q, k, v of head group 1; …], as in Megatron-LM."""
    import gpt

    class SelfAttention(gpt.SelfAttention):
        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            share, width = self.config.heads // self.config.key_heads, self.config.head_width
            groups = self.query_key_value(x).view(batch, length, -1, share + 2, width)
            query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in groups.split((share, 1, 1), 3))
            key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
            attended = gpt.F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return self.dense(attended.transpose(1, 2).reshape(batch, length, -1))

    def build(config: Any, parallel: Any, name: str, blocks: Any) -> Any:
        fused = name.endswith("query_key_value")
        return column(config, parallel, name, (sum(blocks),) if fused else blocks)

    column = gpt.ColumnParallelLinear
    with (
        _megatron(),
        mock.patch.object(gpt, "ColumnParallelLinear", build),
        mock.patch.object(gpt, "SelfAttention", SelfAttention),
    ):
        yield


_CHANGES: dict[str, Callable[[], Any]] = {
    "extras": _extras,
    "short": _empty_stage,
    "megatron": _megatron,
    "megatron-llama": _megatron,
    "unmarked": partial(_megatron, marked=False),
    "interleaved": _interleaved,
}
"""Changes of the example while it builds a model."""


# --- one name for each parameter


def find_name(name: str, model: str) -> str:
    """Return the name in the plain build of a parameter of either build."""
    layers = MODELS[model]["layers"]
    if name.startswith("tied_modules.embed."):
        return name.replace("tied_modules.embed.", "language_model.embedding.")
    found = re.fullmatch(r"(\d+)\.(.*)", name)
    if found is None:
        return name
    number, rest = int(found[1]), found[2]
    if number == 1:
        return f"language_model.embedding.{rest}"
    if number == layers + 2:
        return f"language_model.encoder.final_layernorm.{rest}"
    if number == layers + 3:
        return f"language_model.output_layer.{rest.removeprefix('lm_head.')}"
    return f"language_model.encoder.layers.{number - 2}.{rest}"


def renames(model: str, *, to_pipeline: bool) -> list[dict[str, str]]:
    """Return rules that rename parameters from one build to the other."""
    layers, untied = MODELS[model]["layers"], MODELS[model].get("untied", False)
    pairs = [
        (rf"{layers + 2}\.(?P<rest>\w+)", "language_model.encoder.final_layernorm.{rest}"),
        (
            r"(?P<n>\d+)\.(?P<rest>(?:input_|post_attention_|self_attention|mlp).*)",
            "language_model.encoder.layers.{n-2}.{rest}",
        ),
        (rf"{layers + 3}\.lm_head\.weight", "language_model.output_layer.weight"),
        (r"1\.(?P<rest>.*_embeddings\.weight)", "language_model.embedding.{rest}"),
    ]
    back = [
        (r"language_model\.encoder\.final_layernorm\.(?P<rest>\w+)", f"{layers + 2}.{{rest}}"),
        (r"language_model\.encoder\.layers\.(?P<n>\d+)\.(?P<rest>.*)", "{n+2}.{rest}"),
        (r"language_model\.output_layer\.weight", f"{layers + 3}.lm_head.weight"),
        (r"language_model\.embedding\.(?P<rest>.*)", "1.{rest}"),
    ]
    chosen = back if to_pipeline else pairs
    if not untied:
        chosen = chosen[:2]
        tied = (r"tied_modules\.embed\.(?P<rest>.*)", "language_model.embedding.{rest}")
        chosen += [(r"language_model\.embedding\.(?P<rest>.*)", "tied_modules.embed.{rest}")] if to_pipeline else [tied]
    return [{"from": saved, "to": live} for saved, live in chosen]


# --- how parameters are cut


def find_blocks(name: str, model: str) -> tuple[int, tuple[int, ...]] | None:
    """Return the dimension along which a parameter is cut, and the widths of the blocks that are fused along it.

    Without widths the dimension is one block. None: replicated.
    """
    sizes = {"kv_heads": 0, "ffn": 0, "swiglu": False, "experts": 0, **MODELS[model]}
    hidden, heads = sizes["hidden"], sizes["heads"]
    width, parts = sizes["ffn"] or 4 * hidden, 2 if sizes["swiglu"] else 1
    keys = (sizes["kv_heads"] or heads) * (hidden // heads)
    if name.endswith(("word_embeddings.weight", "output_layer.weight", ".span")):
        return 0, ()
    if "query_key_value" in name:
        return 0, () if model == "interleaved" else (hidden, keys, keys)
    if "dense_h_to_4h" in name:
        return 0, (width,) * parts
    if name.endswith("experts.weight1"):
        return 0, (width,) * parts * sizes["experts"]
    if name.endswith(("dense.weight", "dense_4h_to_h.weight", "experts.weight2")):
        return 1, ()
    return None
