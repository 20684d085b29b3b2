"""Sparse checkpoints of any size: DeepSpeed's files with holes instead of the tensors' bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.synth import Layer, Model, Param, Run, State, Topology, build_local_files, split, write_files

COLUMNS = {"self_attention.query_key_value": 3, "mlp.dense_h_to_4h": 4}
ROWS = {"self_attention.dense": 1, "mlp.dense_4h_to_h": 4}


def make_gpt(layers: int, hidden: int, vocabulary: int) -> Model:
    """Describe Megatron-DeepSpeed's GPT as a pipeline; biases and norms are in a second group."""
    held = [
        Param("tied_modules.embed.word_embeddings.weight", (vocabulary, hidden), tied=True),
        Param("tied_modules.embed.position_embeddings.weight", (2048, hidden)),
    ]
    for layer in range(1, layers + 1):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            held += [Param(f"{layer}.{norm}.{kind}", (hidden,), 1) for kind in ("weight", "bias")]
        for name, times in COLUMNS.items():
            held.append(Param(f"{layer}.{name}.weight", (times * hidden, hidden)))
            held.append(Param(f"{layer}.{name}.bias", (times * hidden,), 1))
        for name, times in ROWS.items():
            held.append(Param(f"{layer}.{name}.weight", (hidden, times * hidden)))
            held.append(Param(f"{layer}.{name}.bias", (hidden,), 1))
    held += [Param(f"{layers + 1}.{kind}", (hidden,), 1) for kind in ("weight", "bias")]
    ends = Layer("embed"), Layer("embed", file=False)
    return Model(tuple(held), {}, (ends[0], *[Layer()] * (layers + 1), ends[1]))


def cut_gpt(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Cut as Megatron does; only shapes count."""
    if "word_embeddings" in name or any(f".{column}." in name for column in COLUMNS):
        return tensor.chunk(tp, 0)[rank]
    if name.endswith("weight") and any(f".{row}." in name for row in ROWS):
        return tensor.chunk(tp, 1)[rank]
    return tensor


def write_gpt(folder: Path, model: Model, topology: Topology) -> Path:
    """Write `folder/global_step1000` and `latest`, as if AdamW had trained it."""
    (hidden,) = next(param.shape for param in model.params if param.name == "1.input_layernorm.weight")
    args = {"hidden_size": hidden, "num_attention_heads": hidden // 160, "make_vocab_size_divisible_by": 128}
    config = {**topology.ds_config(), "train_batch_size": 1536, "train_micro_batch_size_per_gpu": 1}
    client = {"args": args, "checkpoint_version": 3.0, "iteration": 1000}
    run = Run(global_steps=1000, ds_config=config, client_state=client)
    tag = folder / "global_step1000"
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        atoms = {p.name: {key: torch.empty(p.shape) for key in ("fp32", "exp_avg", "exp_avg_sq")} for p in model.params}
        scalars = {name: {"step": 1000} for name in atoms}  # a tensor's bytes would be missing
        groups = ({"lr": 1e-4}, {"lr": 1e-4, "weight_decay": 0.0})
        for rank, local in split(model, State(atoms, scalars, groups), topology, cut_gpt).items():
            write_files(tag, build_local_files({rank: local}, topology, run))
    (folder / "latest").write_text(tag.name)
    return folder
