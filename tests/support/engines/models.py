"""The models and optimizers of the engine tests. Imports torch, so only the ranks import it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 13


class Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.to(next(self.parameters()).dtype))

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Mixed(Base):
    """Odd shapes, a one-element parameter, a frozen layer, tied weights, buffers of several dtypes, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(7, 5)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)
        self.last = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("table", torch.arange(5, dtype=torch.int16))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def body(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.running += 0.5
            self.mask ^= True
            self.table += 3
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.again(torch.tanh(self.tied(x))))
        return self.last(torch.tanh(self.frozen(x))) * self.scale


class Plain(Base):
    """Two layers, optionally with another name of the second one or another dtype of the first one.

    Args:
        gain: add a factor.
        table: add a frozen table that is large enough for ZeRO++ to quantize it.
    """

    def __init__(
        self, width: int = 7, *, head: str = "last", gain: bool = False, table: bool = False, dtype: Any = torch.float32
    ) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width, dtype=dtype)
        self.add_module(head, nn.Linear(width, 1))
        self.gain = nn.Parameter(torch.ones(1)) if gain else None
        self.table = nn.Parameter(torch.randn(1024, 512) * 0.1, requires_grad=False) if table else None

    def body(self, x: Tensor) -> Tensor:
        last: Any = self.get_submodule("head" if hasattr(self, "head") else "last")
        y = last(torch.tanh(self.first(x)).to(last.weight.dtype))
        y = y if self.gain is None else y * self.gain
        return y if self.table is None else y + x @ self.table[: x.shape[1], :1]


class Layers(Base):
    """Equal layers that compute in alphabetical order, in any order of definition."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names.split():
            self.add_module(name, nn.Linear(FEATURES, FEATURES))

    def body(self, x: Tensor) -> Tensor:
        for _, layer in sorted(self.named_children()):
            x = torch.tanh(layer(x))
        return x.mean(-1, keepdim=True)


def plain(**layers: Any) -> nn.Module:
    """`Plain` with other layers or parameters, registered in this order."""
    module = Plain()
    for name, layer in layers.items():
        if hasattr(module, name):
            delattr(module, name)
        setattr(module, name, layer)
    return module


class Lora(Base):
    """Frozen layers with trainable low-rank adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList([nn.Linear(FEATURES, 11), nn.Linear(11, 1)])
        for parameter in self.base.parameters():
            parameter.requires_grad_(False)
        self.down = nn.ParameterList([nn.Parameter(torch.randn(2, n) * 0.1) for n in (FEATURES, 11)])
        self.up = nn.ParameterList([nn.Parameter(torch.randn(n, 2) * 0.1) for n in (11, 1)])

    def body(self, x: Tensor) -> Tensor:
        for layer, down, up in zip(self.base, self.down, self.up, strict=True):
            x = layer(x) + x @ down.T @ up.T
        return x


class Tiny(Base):
    """Fewer elements than ranks in every group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(2))
        self.shift = nn.Parameter(torch.full((1, 1), 0.1))

    def body(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.weight + self.bias.sum() + self.shift


def empty() -> nn.Module:
    """`Plain` with empty parameters between and after the others."""
    module = plain(empty=nn.Parameter(torch.zeros(0)))
    module.first.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    return module


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixed": Mixed,
    "plain": Plain,
    "bulk": lambda: Plain(1000),  # some ten thousand parameters
    # Two ranks hold multiples of eight elements.
    "aligned": lambda: plain(first=nn.Linear(FEATURES, 16, bias=False), last=nn.Linear(16, 1, bias=False)),
    "table": partial(Plain, table=True),
    "half": lambda: Plain().to(torch.bfloat16),
    "two_dtypes": partial(Plain, dtype=torch.bfloat16),
    "renamed": partial(Plain, head="head"),
    "wider": lambda: Plain(9),
    "deeper": partial(Plain, gain=True),
    "frozen": lambda: plain(first=nn.Linear(FEATURES, 7).requires_grad_(False), last=nn.Linear(7, 1)),
    "lora": Lora,
    "tiny": Tiny,
    "empty": empty,
    "compiled": lambda: torch.compile(Plain(), backend="eager"),  # adds the prefix `_orig_mod.`; eager is fast
    "reordered": lambda: plain(last=nn.Linear(7, 1), first=nn.Linear(FEATURES, 7)),
    **{names: partial(Layers, names) for names in ("b a c", "a b c", "c b a", "bb aa cc")},
    "sequential": lambda: nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 1)),
}


def param_groups(module: nn.Module, uniform: bool = False, by_dtype: bool = False) -> list[dict[str, Any]]:
    """Group matrices with weight decay and other parameters at another learning rate; one group if uniform."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    if uniform:
        return [{"params": trainable}]
    if by_dtype:
        return [{"params": [p for p in trainable if p.dtype == dtype]} for dtype in {p.dtype: None for p in trainable}]
    shapes = {id(p): getattr(p, "ds_shape", p.shape) for p in trainable}  # zero.Init leaves it an empty vector
    matrices = [p for p in trainable if len(shapes[id(p)]) > 1]
    others = [p for p in trainable if len(shapes[id(p)]) <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class Simple(torch.optim.Optimizer):
    """Updates parameters sequentially by a function of a parameter, its states and its group."""

    def __init__(self, params: Iterable[Any], update: Callable[[Tensor, dict[str, Tensor], dict[str, Any]], None]):
        super().__init__(params, {"lr": 1e-3, "weight_decay": 0.0})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group)


def update_lion(parameter: Any, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Lion (Chen et al. 2023) with betas 0.9 and 0.99: one state, whose name no other optimizer uses."""
    momentum = state.setdefault("lion_momentum", torch.zeros_like(parameter))
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(torch.lerp(parameter.grad, momentum, 0.9).sign_(), alpha=-group["lr"])
    momentum.lerp_(parameter.grad, 0.01)


def update_by_mean(parameter: Any, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """SGD with two numbers per parameter: a state that is not element-wise, as in Adafactor."""
    factored = state.setdefault("factored", torch.zeros(2, device=parameter.device))
    factored.lerp_(parameter.grad.abs().mean().expand(2), 0.1)
    parameter.add_(parameter.grad / (factored.mean() + 1e-8), alpha=-group["lr"])


def _deepspeed(module: str, name: str, **options: Any) -> Callable[[Any], Any]:
    return lambda groups: getattr(import_module(f"deepspeed.ops.{module}"), name)(groups, **options)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95)),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), fused=True),
    "adamw_capturable": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), capturable=True),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "lion": lambda groups: Simple(groups, update_lion),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=1e-2),
    "adam_like_fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "row_mean": lambda groups: Simple(groups, update_by_mean),
    "fused_adam": _deepspeed("adam", "FusedAdam", lr=1e-2),  # has a CPU build, and brings FP16_Optimizer with it
    "cpu_adam": _deepspeed("adam", "DeepSpeedCPUAdam", lr=1e-2),
    "cpu_adam_16": _deepspeed(
        "adam", "DeepSpeedCPUAdam", lr=1e-2, fp32_optimizer_states=False
    ),  # in the masters' dtype
    "cpu_lion": _deepspeed("lion", "DeepSpeedCPULion", lr=1e-3),
}
