"""Checkpoints that Megatron-Core's own models and optimizers have saved: what it reads of them, engines go on from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.atoms import COPY, MASTER, MODULE, AtomicIndex
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.sources import open_checkpoint
from deepspeed_ucp.stream.full_tensors import FullTensor
from deepspeed_ucp.stream.reader import AtomReader
from deepspeed_ucp.testing import WorldPool
from tests.export.test_safetensors import check_same
from tests.stream.test_full_tensors import read_whole
from tests.support import mcore

pytestmark = pytest.mark.engine

BF16 = {"params_dtype": torch.bfloat16}

SAVERS: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt": (1, {}),
    "gpt of named layers": (1, {"metadata": {"non_homogeneous_layers": True}}),
    "llama in 16 bits": (2, {"model": "llama", **BF16}),
    "llama, whole states, common state among the blocks": (1, {"model": "llama", "distributed": False, "entry": True}),
    "llama in 16 bits, whole states": (1, {"model": "llama", "distributed": False, **BF16}),
    "llama tp2 pp2": (4, {"model": "llama", "tp": 2, "pp": 2}),
    "llama of single shards": (
        2,
        {"model": "llama", "tp": 2, "distributed": False, "metadata": {"singleton_local_shards": True}},
    ),
    "experts ep2": (2, {"model": "moe", "ep": 2}),
    "experts ep2 of a chain": (
        2,
        {"model": "moe", "ep": 2, "distributed": False, "metadata": {"chained_optim_avoid_prefix": False}},
    ),
}
"""By what is saved the ranks, and how :func:`mcore.save` is called."""


def open_it(folder: Path) -> AtomicIndex:
    return open_checkpoint(str(folder), Comm())


def name_each(tensors: dict[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
    """By name and state what Megatron-Core has read, layer by layer."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    has_masters = any(".state.param." in key or ".state.fp32_param." in key for key in tensors)
    trained = any("optimizer.state." in key for key in tensors)
    for key, tensor in tensors.items():
        state, name = COPY if has_masters else MASTER if trained else MODULE, key
        if match := re.fullmatch(r"(?:chained_\d\.)?optimizer\.state\.(\w+)\.(.*)", key):
            state, name = (MASTER if match[1] in ("param", "fp32_param") else match[1]), match[2]
        if name.endswith("_v"):
            continue
        if name.endswith("_w"):
            name, tensor = name.removesuffix("_w"), torch.cat([tensor, tensors[f"{key[:-1]}v"]])
        front, stacked, rest = name.partition("decoder.layers.")
        if stacked and not rest[0].isdigit():
            for layer, part in enumerate(tensor.unbind()):
                found[f"{front}{stacked}{layer}.{rest}", state] = part
        else:
            found[name, state] = tensor
    return found


@pytest.mark.parametrize("saver", SAVERS)
def test_what_megatron_core_reads(tmp_path: Path, ucp_worlds: WorldPool, saver: str) -> None:
    """Weights and states are to the bit what it reads itself; steps, rates and the iteration are there."""
    ranks, how = SAVERS[saver]
    tensors, _ = ucp_worlds.get(ranks).run(mcore.save, str(tmp_path), **how)[0]
    index = open_it(tmp_path / "iter_0000002")
    wanted = name_each(tensors)
    assert {(key.name, key.state) for key in index.stored.atoms} == wanted.keys()
    with AtomReader(index) as reader:
        for key, atom in index.stored.atoms.items():
            read = read_whole(reader, FullTensor(atom, atom.shards[0].shape))
            check_same({key.name: read}, {key.name: wanted[key.name, key.state]})
    names = {name for name, _ in wanted}
    assert {param.name: told for param, told in index.run.scalars.items()} == {name: {"step": 2.0} for name in names}
    assert {name for group in index.run.groups for name in group.names} == names
    for group in index.run.groups:
        assert len({wanted[name, "exp_avg"].dim() == 1 for name in group.names}) == 1
        assert group.hyper["lr"] == 1e-2 and group.hyper["step"] == 2 and "wd_mult" not in group.hyper
    assert index.run.counters == {"global_steps": 2}
    assert index.model.hints["args"]["num_attention_heads"] == mcore.SIZES["num_attention_heads"]
    assert index.model.hints["universal_checkpoint_info"]["original_vocab_size"] == mcore.SIZES["vocab_size"]
