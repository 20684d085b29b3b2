"""Checkpoints that Megatron-Core's own models and optimizers have saved: what it reads of them, engines go on from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.atoms import COPY, MASTER, MODULE, AtomicIndex
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.sources import open_checkpoint
from deepspeed_ucp.stream.full_tensors import FullTensor
from deepspeed_ucp.stream.reader import AtomReader
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine
from tests.export.test_safetensors import check_same
from tests.stream.test_full_tensors import read_whole
from tests.support import mcore
from tests.support.engines import mcore as engines
from tests.support.engines.mcore_names import NORMS

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


def check_engine(state: CapturedEngine, tensors: dict[str, torch.Tensor], rows: int | None = None) -> None:
    """Masters, states and steps are what Megatron-Core reads, to the bit; of tables of words the first ``rows``."""
    wanted = name_each(tensors)
    live = {name: name for name, _ in wanted}
    for own, fused in NORMS.items():
        live = {name.replace(fused, own): saved for name, saved in live.items()}
    assert set(state.parameters) == set(live)
    for name, held in state.parameters.items():
        cut = slice(rows if "word_embeddings" in name or "output_layer" in name else None)
        kinds = {"fp32": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
        check_same(
            {"fp32": held.fp32, **held.tensors}, {key: wanted[live[name], kind][cut] for key, kind in kinds.items()}
        )
        assert held.scalars["step"] == 2
        assert (held.hyper["lr"], held.hyper["weight_decay"]) == (1e-2, 0.1)
    assert state.counters["global_steps"] == 2


def test_engines_go_on(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Engines of Megatron-Core's own model hold what was saved, and their losses are the next of the saved run."""
    tensors, losses = ucp_worlds.get(1).run(mcore.save, str(tmp_path), further=2)[0]
    for ranks, folder, stages in ((1, tmp_path, (1, 3)), (2, tmp_path / "iter_0000002", (3,))):
        found = ucp_worlds.get(ranks).run(engines.go_on, str(folder), "gpt", stages, range(2, 4))[0]
        for state, went_on, heard, (path, client) in found:
            check_engine(state, tensors)
            assert went_on == pytest.approx(losses[2:], rel=1e-5)
            assert (path, client) == (f"{tmp_path}/iter_0000002/.metadata", {})
            assert any("Megatron-Core → ZeRO-" in line for line in heard)
            assert any("not loaded" in line and "opt_param_scheduler" in line for line in heard)


@pytest.mark.parametrize("saver", ["gpt", "llama"])
def test_engines_of_two_tensor_parallel_ranks_go_on(tmp_path: Path, ucp_worlds: WorldPool, saver: str) -> None:
    """What one rank has saved is cut as Megatron-Core cuts it: the next losses are those of the saved run."""
    _, losses = ucp_worlds.get(1).run(mcore.save, str(tmp_path), saver, further=2)[0]
    how = {"tp": 2}
    for _, went_on, *_ in ucp_worlds.get(2).run(engines.go_on, str(tmp_path), saver, (0, 1), range(2, 4), **how)[0]:
        assert went_on == pytest.approx(losses[2:], rel=1e-5)


def test_experts_of_their_own_go_on(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """All experts of a layer are one tensor in a checkpoint, and modules of their own here."""
    _, losses = ucp_worlds.get(1).run(mcore.save, str(tmp_path), "moe", further=2)[0]
    ((_, went_on, *_),) = ucp_worlds.get(1).run(engines.go_on, str(tmp_path), "moe", (2,), range(2, 4))[0]
    assert went_on == pytest.approx(losses[2:], rel=1e-5)


def test_16_bits_of_pipelines_with_another_padding(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Four ranks' blocks are one rank's parameters; the vocabulary is as large as the arguments tell."""
    sizes = {"make_vocab_size_divisible_by": 64}
    tensors, _ = ucp_worlds.get(4).run(mcore.save, str(tmp_path), "llama", tp=2, pp=2, **BF16, **sizes)[0]
    assert len(tensors["output_layer.weight"]) == 128
    how = {"precision": "bf16", **sizes}
    ((state, _, heard, _),) = ucp_worlds.get(2).run(engines.go_on, str(tmp_path), "llama", (2,), range(2, 3), **how)[0]
    check_engine(state, tensors, rows=64)
    for held in state.parameters.values():
        check_same({"value": held.value}, {"value": held.fp32.bfloat16()})
    assert not any("matches no" in line for line in heard)


def test_states_without_names(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Refused with the way to save them; the weights alone can be had."""
    world = ucp_worlds.get(2)
    tensors, _ = world.run(mcore.save, str(tmp_path), sharding="dp_reshardable")[0]
    with pytest.raises(CheckpointError, match="dp_reshardable.*--dist-ckpt-optim-fully-reshardable"):
        world.run(engines.go_on, str(tmp_path), "gpt", (1,), range(0))
    world = ucp_worlds.get(2)
    how = {"load": {"load_optimizer_states": False}}
    ((state, *_),) = world.run(engines.go_on, str(tmp_path), "gpt", (1,), range(2, 3), **how)[0]
    weights = {name: tensor for (name, kind), tensor in name_each(tensors).items() if kind == MODULE}
    for name in ("embedding.word_embeddings.weight", "decoder.layers.1.mlp.linear_fc1.weight"):
        check_same({name: state.parameters[name].fp32}, {name: weights[name]})
