"""Saves by real engines with experts, DeepSpeed's own and AutoEP's, also under tensor and pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .description import ExpertLayer, Layer, Model, Param
from .engines import RealSave, describe
from .experts import find_layer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MICRO = 4


@dataclass(frozen=True, slots=True)
class CaseMoE(RealSave):
    """A data-parallel save of two layers of DeepSpeed's experts with degrees of their own; one layer is residual."""

    @property
    def label(self) -> str:
        return f"moe-{self.topology.label}"

    @property
    def model(self) -> Model:
        from tests.support.engines.experts import EXPERTS, Layers

        module = Layers((1, 1))
        model = describe(module, [{"params": list(module.parameters())}])
        return replace(model, experts=tuple(ExpertLayer(name, EXPERTS) for name in ("residual", "plain")))

    def ds_config(self) -> dict[str, Any]:
        return {**RealSave.ds_config(self), "train_micro_batch_size_per_gpu": MICRO}

    def save(self, folder: Path) -> None:
        import deepspeed

        from tests.support.engines.kinds import forget_groups

        forget_groups()
        module, params = self._make_groups()
        engine, *_ = deepspeed.initialize(model=module, model_parameters=params, config=self.ds_config())
        for step in range(self.steps):
            torch.manual_seed(100 * step + torch.distributed.get_rank())
            engine.backward(engine(torch.randn(MICRO, 4).to(self.topology.dtype)).float().pow(2).mean())
            engine.step()
        self.finish(engine, folder)

    def _make_groups(self) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        from tests.support.engines.experts import Layers

        torch.manual_seed(torch.distributed.get_rank())
        module = Layers((self.topology.ep[0], self.topology.ep[1]))
        whole = {"params": list(module.parameters()), "name": "dense-params"}
        limit = {"max_group_size": self.topology.max_group} if self.topology.max_group else {}
        params = split_params_into_different_moe_groups_for_optimizer(whole, **limit)
        params.sort(key=lambda group: group["name"])  # DeepSpeed makes them in the order of a set of strings
        if self.topology.shuffled and torch.distributed.get_rank() % 2:
            params[1:] = sorted(params[1:], key=lambda group: group["name"], reverse=True)
        return module, params


@dataclass(frozen=True, slots=True)
class CaseMoE3D(RealSave):
    """A save of an engine of `tests/engine` with two layers of experts of one degree; `fused`: AutoEP's experts."""

    fused: bool = False

    @property
    def label(self) -> str:
        return f"{'autoep' if self.fused else 'moe'}3d-{self.topology.label}"

    @property
    def samples(self) -> int:
        return self.steps * int(self._engines.Spread.batch)

    @property
    def model(self) -> Model:
        """In a pipeline the names start with the number of the layer."""
        found = describe_autoep() if self.fused else describe_blocks()
        name = _number_autoep if self.fused else _number_block
        return _rename(found, name) if self.topology.pp > 1 else found

    @property
    def _engines(self) -> Any:
        from tests.support.engines import autoep, experts_3d

        return autoep if self.fused else experts_3d

    @property
    def _spread(self) -> Any:
        """The engine in the terms of `tests/engine`."""
        top = self.topology
        world, ep = top.tp * top.pp * top.dp, top.ep[0]
        common: dict[str, Any] = {"tp": top.tp, "pp": top.pp, "ep": ep, "data_first": top.data_first}
        if self.fused:
            common["zero"] = {"sub_group_size": top.sub_group_size} if top.sub_group_size else {}
        else:
            common |= {"cut": top.cut_experts, "fp32_grads": top.kind == "bf16" and top.stage == 1}
        return self._engines.Spread(top.stage, world, top.precision, **common)

    def ds_config(self) -> dict[str, Any]:
        config: dict[str, Any] = self._spread.ds_config
        return config

    def cut(self, name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
        cuts = self._engines.CUT
        end = ".".join(name.split(".")[-3:]) if self.fused else name.rpartition(".")[2]
        whole = end not in cuts or (self.topology.folds_experts and find_layer(self.model, name) is not None)
        return tensor if whole else tensor.chunk(tp, cuts[end])[rank]

    def save(self, folder: Path) -> None:
        options = {"biased": False} if self.fused else {}  # that buffer is saved under two names, as no other is
        engine = self._engines.make(self._spread, 1, **options)
        for _ in range(self.steps):
            self._engines.step(engine)
        self.finish(engine, folder)


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


def describe_blocks() -> Model:
    """Describe two dense blocks with two layers of experts between them."""
    from tests.support.engines.experts_3d import EXPERTS, FEATURES, INNER

    block = {"up": (INNER, FEATURES), "up_bias": (INNER,), "down": (FEATURES, INNER), "down_bias": (FEATURES,)}
    params, layers = [], []
    for number in range(4):
        if number in (0, 3):
            params += [Param(f"layers.{number}.{name}", shape) for name, shape in block.items()]
            continue
        layer = ExpertLayer(f"layers.{number}.moe", EXPERTS)
        experts = [Param(f"{layer.prefix}{n}.{name}", shape) for n in range(EXPERTS) for name, shape in block.items()]
        params += [Param(f"{layer.name}.deepspeed_moe.gate.wg.weight", (EXPERTS, FEATURES)), *experts]
        layers.append(layer)
    return Model(tuple(params), experts=tuple(layers))


def _rename(model: Model, name: Callable[[str], str]) -> Model:
    """Rename the parameters to those of a pipeline of four layers."""
    params = [replace(param, name=name(param.name)) for param in model.params]
    params = [replace(param, alias_of=param.alias_of and name(param.alias_of)) for param in params]
    experts = tuple(replace(layer, name=name(layer.name)) for layer in model.experts)
    return Model(tuple(params), layers=(Layer(),) * 4, experts=experts)


def _number_block(name: str) -> str:
    return name.removeprefix("layers.")


def _number_autoep(name: str) -> str:
    """The first layer of the pipeline is empty."""
    if name.startswith("head."):
        return f"3.{name.removeprefix('head.')}"
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"{int(number) + 1}.{rest}"
