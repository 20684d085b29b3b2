"""Saves by real engines with experts of DeepSpeed and AutoEP, also under tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .description import ExpertLayer, Layer, Model, Param
from .engines import RealSave, describe
from .experts import find_layer


@dataclass(frozen=True, slots=True)
class CaseMoE(RealSave):
    """A save of an engine of `tests/engine` with two layers of experts.

    `fused`: AutoEP's experts, else DeepSpeed's.
    """

    fused: bool = False

    @property
    def label(self) -> str:
        return f"{'autoep' if self.fused else 'moe'}-{self.topology.label}"

    @property
    def samples(self) -> int:
        return self.steps * int(self._engines.Spread.batch)

    @property
    def model(self) -> Model:
        """In a pipeline the names start with the number of the layer."""
        found = describe_autoep() if self.fused else self._describe_blocks()
        if self.topology.pp == 1:
            return found
        return _rename(found, _number_autoep if self.fused else lambda name: name.removeprefix("layers."))

    def _describe_blocks(self) -> Model:
        """Describe two dense blocks with two layers of experts between them."""
        module = self._engines.make_module(replace(self._spread, ep=1, tp=1, pp=1))
        names = [f"layers.{number}.{layer.name}" for number, layer in enumerate(module.layers[1:3], 1)]
        return replace(describe(module), experts=tuple(ExpertLayer(name, self._engines.EXPERTS) for name in names))

    @property
    def _engines(self) -> Any:
        from tests.support.engines import autoep, experts

        return autoep if self.fused else experts

    @property
    def _spread(self) -> Any:
        """The engine in the terms of `tests/engine`."""
        top, zero = self.topology, self.topology.ds_config()["zero_optimization"]
        more: dict[str, Any] = {"data_first": top.data_first, "zero": zero, "tp": top.tp, "pp": top.pp, "ep": top.ep[0]}
        if not self.fused:
            more |= {"ep": top.ep, "shuffled": top.shuffled, "residual": "residual" * (top.tp == top.pp == 1)}
            more |= {"cut": top.cut_experts, "fp32_grads": top.kind == "bf16" and top.stage == 1}
        return self._engines.Spread(top.stage, top.tp * top.pp * top.dp, top.precision, **more)

    def ds_config(self) -> dict[str, Any]:
        config: dict[str, Any] = self._spread.ds_config
        return config

    def cut(self, name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
        cuts = self._engines.CUT
        end = ".".join(name.split(".")[-3:]) if self.fused else name.rpartition(".")[2]
        whole = end not in cuts or (self.topology.folds_experts and find_layer(self.model, name) is not None)
        return tensor if whole else tensor.chunk(tp, cuts[end])[rank]

    def make(self) -> Any:
        options: dict[str, Any] = {"max_group": self.topology.max_group} if self.topology.max_group else {}
        if self.fused:
            options["biased"] = False  # that buffer is saved under two names, as no other is
        return next(self._spread.training(1, **options)())

    def step(self, engine: Any) -> None:
        self._engines.step(engine)


def describe_autoep() -> Model:
    """Describe the module after AutoEP has replaced the blocks; its router has a second name."""
    from tests.support.engines.autoep import EXPERTS, HIDDEN, INNER
    from tests.support.engines.autoep import Model as Module

    params, layers = [], []
    for name, param in Module().named_parameters():
        if ".mlp.experts." in name:
            continue
        if not name.endswith(".mlp.gate.weight"):
            params.append(Param(name, tuple(param.shape)))
            continue
        layer = ExpertLayer(name.removesuffix(".gate.weight"), EXPERTS, fused=True)
        shapes = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
        router = Param(f"{layer.name}.router.gate.weight", (EXPERTS, HIDDEN))
        experts = [Param(f"{layer.prefix}{w}.{n}", shape) for w, shape in shapes.items() for n in range(EXPERTS)]
        alias = Param(f"{layer.name}.gate.gate.weight", router.shape, alias_of=router.name, untold=True)
        params += [router, *experts, alias]
        layers.append(layer)
    return Model(tuple(params), experts=tuple(layers))


def _rename(model: Model, name: Callable[[str], str]) -> Model:
    """Rename the parameters for a pipeline of four layers."""
    params = [replace(param, name=name(param.name)) for param in model.params]
    params = [replace(param, alias_of=param.alias_of and name(param.alias_of)) for param in params]
    experts = tuple(replace(layer, name=name(layer.name)) for layer in model.experts)
    return Model(tuple(params), layers=(Layer(),) * 4, experts=experts)


def _number_autoep(name: str) -> str:
    """The first layer of the pipeline is empty."""
    if name.startswith("head."):
        return f"3.{name.removeprefix('head.')}"
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"{int(number) + 1}.{rest}"
