"""Models, exports and comparisons of their content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.export.dcp import export_dcp
from deepspeed_ucp.export.tensors import ExportOptions
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.model.index import AtomicIndex
from tests.support import fsdp_run
from tests.synth import Model, Param, State, Topology, random_state, write_checkpoint
from tests.synth.engines import describe, split_params

MODEL = Model(
    (
        Param("a.weight", (3, 5)),
        Param("b.weight", (700, 11), group=1),
        Param("frozen", (4,), frozen=True),
        Param("scalar", ()),
        Param("head.weight", (3, 5), alias_of="a.weight"),
    ),
    {"count": torch.arange(5), "mask": torch.tensor([True, False]), "table": torch.randn(3)},
)
TOPOLOGIES = (
    Topology(0),
    Topology(0, precision="fp16", wrapper="fused"),
    Topology(1, 3, "bf16"),
    Topology(1, 2, "bf16", wrapper="bf16"),
    Topology(2, 2, "fp16", round_robin=True),
    Topology(3, 4, "bf16", sub_group_size=900),
)


def open_model(
    folder: Path, topology: Topology, model: Model = MODEL, state: State | None = None, **options: Any
) -> AtomicIndex:
    state = state or random_state(model, 0, precision=topology.precision)
    path = write_checkpoint(folder, model, state, topology, **options)
    return open_checkpoint(str(path), Comm(), Naming(model.live_groups))


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of an export by the safetensors library."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def read_all(folder: Path) -> dict[str, Any]:
    """Read all contents of a checkpoint of torch.distributed.checkpoint, nested like torch."""
    tree: dict[str, Any] = {}
    _load_state_dict(tree, dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return tree


def save_trained(folder: Path, topology: Topology, *, scheduled: bool = False, **options: Any) -> Path:
    """Save a run of :mod:`tests.support.fsdp_run`'s model in DeepSpeed's format, and export it."""
    model, optimizer = fsdp_run.build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None
    for step in range(3):
        fsdp_run.train(model, optimizer, [step])
        if scheduler is not None:
            scheduler.step()
    described = describe(model, split_params(model.parameters()))
    names = {param: name for name, param in model.named_parameters()}
    states = {names[param]: held for param, held in optimizer.state.items()}
    atoms = {
        name: {"fp32": param.detach(), **{key: value for key, value in states[name].items() if key != "step"}}
        for name, param in model.named_parameters()
    }
    scalars = {name: {"step": held["step"]} for name, held in states.items()}
    hyper = tuple({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    path = write_checkpoint(folder / "in", described, State(atoms, scalars, hyper), topology)
    export_dcp(open_checkpoint(str(path), Comm()), str(folder / "out"), options=ExportOptions(workers=3), **options)
    return folder / "out"


def make_gpt2(folder: Path, *, tied: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=12, n_layer=2, n_head=2, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(folder)
    return model
