"""Saves by real engines on gloo, to compare with the synthesiser: a small model with unusual parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from .description import Model, Param, Topology


@dataclass(frozen=True, slots=True)
class RealSave:
    """A save by real engines; subclasses `make` the engine on each rank of a world, and `step` it.

    `model` is the whole model with logical shapes, `scheduler` the saved state of the learning-rate scheduler,
    `samples` the samples of all steps (None: those of the topology's batch).
    """

    topology: Topology
    steps: int = 2
    client_state: Mapping[str, Any] = field(default_factory=lambda: {"epoch": 7})
    optimizer: str = "adamw"

    label: ClassVar[Any]
    model: ClassVar[Any]
    scheduler: ClassVar[Any] = None
    samples: ClassVar[Any] = None

    def ds_config(self) -> dict[str, Any]:
        return {**self.topology.ds_config(), "optimizer": OPTIMIZERS[self.optimizer], "steps_per_print": 10**6}

    def cut(self, name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
        """The tensor-parallel rank's part of a tensor."""
        raise NotImplementedError

    def save(self, folder: Path) -> Any:
        """Train and save. Return the engine."""
        engine = self.make()
        for _ in range(self.steps):
            self.step(engine)
        engine.save_checkpoint(str(folder), client_state=dict(self.client_state))
        return engine


@dataclass(frozen=True, slots=True)
class Case(RealSave):
    """A data-parallel save of `Net`."""

    steps: int = 3

    @property
    def net(self) -> Net:
        """ZeRO 3's forward cannot gather zero-element parameters (they can only be saved)."""
        return Net(hollow=self.topology.stage < 3 or self.steps == 0)

    @property
    def model(self) -> Model:
        net = self.net
        return describe(net, parameter_groups(net, self.optimizer))

    @property
    def scheduler(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.steps - 1}

    @property
    def label(self) -> str:
        return "-".join([self.topology.label, self.optimizer] + [f"step{self.steps}"] * (self.steps != 3))

    def ds_config(self) -> dict[str, Any]:
        scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
        return {**RealSave.ds_config(self), "scheduler": scheduler, "zero_allow_untested_optimizer": True}

    def make(self) -> Any:
        import deepspeed

        torch.manual_seed(0)
        net = self.net
        groups = parameter_groups(net, self.optimizer)
        return deepspeed.initialize(model=net, model_parameters=groups, config=self.ds_config())[0]

    def step(self, engine: Any) -> None:
        torch.manual_seed(100 * engine.global_steps + torch.distributed.get_rank())
        loss = engine(torch.randint(11, (4,))).float().pow(2).mean() * 1e-2  # no fp16 overflow
        engine.backward(loss)
        engine.step()

    def save(self, folder: Path) -> Any:
        """Train and save; `truth.pt` next to the checkpoint has the engine's state."""
        from deepspeed_ucp.testing.capture import capture

        engine = RealSave.save(self, folder)
        truth = capture(engine)
        if torch.distributed.get_rank() == 0:
            torch.save(truth, folder / "truth.pt")
        return engine


OPTIMIZERS: Mapping[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "fusedadam": {"type": "AdamW", "params": {"lr": 1e-2}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
}


class Net(torch.nn.Module):
    """Odd sizes, tied, frozen, zero-element, one-element and unused parameters, three buffers."""

    def __init__(self, hollow: bool = True) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.embed = torch.nn.Embedding(11, 7)
        self.up = torch.nn.Linear(7, 5)
        self.empty = torch.nn.Parameter(torch.zeros(0, 3)) if hollow else None
        self.norm = torch.nn.BatchNorm1d(5)
        self.unused = torch.nn.Parameter(torch.randn(3))
        self.down = torch.nn.Linear(5, 7)
        self.hollow = torch.nn.Parameter(torch.zeros(2, 0), requires_grad=False) if hollow else None
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.up.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.embed(tokens)) * self.gain
        return self.head(self.down(torch.tanh(hidden * self.norm.weight + self.norm.bias)))


def parameter_groups(net: torch.nn.Module, optimizer: str = "adamw") -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without, and a group of one element, fewer than ranks.

    They include frozen and zero-element parameters, as if the user had passed all of `parameters()`. ZeRO rebuilds
    Adagrad with all flat buffers in one group, and fails for several groups.
    """
    params = list(net.parameters())
    if optimizer == "adagrad":
        return [{"params": params}]
    rest = split_params(param for param in params if param is not net.gain)
    return [*rest, {"params": [net.gain], "weight_decay": 0.0, "lr": 1e-4}]


def split_params(params: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Return groups of matrices and of vectors, which may be empty on a pipeline stage."""
    params = list(params)
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def describe(net: torch.nn.Module, groups: Sequence[Mapping[str, Any]] = ()) -> Model:
    """Describe a torch module and its param groups; default: one group of all parameters."""
    groups = groups or [{"params": list(net.parameters())}]
    group_of = {id(param): index for index, group in enumerate(groups) for param in group["params"]}
    owners: dict[int, str] = {}
    params = []
    for name, param in net.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(param), name)
        alias = None if owner == name else owner
        params.append(Param(name, tuple(param.shape), group_of.get(id(param)), not param.requires_grad, alias))
    saved = net.state_dict()
    return Model(tuple(params), {name: buffer.clone() for name, buffer in net.named_buffers() if name in saved})


def save_all(cases: Sequence[RealSave], folder: Path) -> None:
    """Save several cases in `folder`/label; runs on every rank of a world."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    import deepspeed_ucp

    CPU_Accelerator.is_fp16_supported = lambda self: True
    deepspeed_ucp.uninstall()
    try:
        for case in cases:
            case.save(folder / case.label).destroy()
    finally:
        deepspeed_ucp.install()
