"""Real saves of models with experts: DeepSpeed's own layers, one of them residual, and AutoEP's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from .description import ExpertLayer, Model, Param, Topology
from .engines import CLIENT_STATE, OPTIMIZERS, describe

if TYPE_CHECKING:
    from pathlib import Path

GROUP = "dense-params"  # as DeepSpeed calls the one that it makes of plain parameters
MICRO = 4


@dataclass(frozen=True, slots=True)
class CaseMoE:
    """One real save of a model with two layers of experts; `fused`: AutoEP's, which DeepSpeed makes itself."""

    topology: Topology
    fused: bool = False
    steps: int = 2
    client_state: dict[str, Any] = field(default_factory=lambda: dict(CLIENT_STATE))
    scheduler: None = None

    @property
    def label(self) -> str:
        return f"{'autoep' if self.fused else 'moe'}-{self.topology.label}"

    @property
    def model(self) -> Model:
        """What is trained, whole."""
        return describe_autoep() if self.fused else describe_native()

    def ds_config(self) -> dict[str, Any]:
        config = {**self.topology.ds_config(), "train_micro_batch_size_per_gpu": MICRO, "steps_per_print": 10**6}
        config["optimizer"] = OPTIMIZERS["adamw"]
        if self.fused:
            config["expert_parallel"] = {"enabled": True, "autoep_size": self.topology.ep[0], "use_grouped_mm": False}
        return config

    def save(self, folder: Path) -> None:
        """Trains and saves, on one rank of a world of the topology's size."""
        import deepspeed
        from deepspeed.utils import groups

        for known in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
            known.clear()  # named by the degree alone, whatever the order of the ranks
        module, params, width = make_autoep() if self.fused else make_native(self.topology)
        engine, *_ = deepspeed.initialize(model=module, model_parameters=params, config=self.ds_config())
        for step in range(self.steps):
            torch.manual_seed(100 * step + torch.distributed.get_rank())
            batch = torch.randn((MICRO, 1, width) if self.fused else (MICRO, width))
            loss = engine(batch.to(self.topology.dtype)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(str(folder), client_state=self.client_state)
        engine.destroy()


def make_native(topology: Topology) -> tuple[torch.nn.Module, list[dict[str, Any]], int]:
    """The module, its param groups, the width of its input."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    from tests.support.engines.experts import Layers

    torch.manual_seed(torch.distributed.get_rank())
    module = Layers(topology.ep)
    whole = {"params": list(module.parameters()), "name": GROUP}
    limit = {"max_group_size": topology.max_group} if topology.max_group else {}
    params = split_params_into_different_moe_groups_for_optimizer(whole, **limit)
    params.sort(key=lambda group: group["name"])  # DeepSpeed makes them in the order of a set of strings
    if topology.shuffled and torch.distributed.get_rank() % 2:
        params[1:] = sorted(params[1:], key=lambda group: group["name"], reverse=True)
    return module, params, 4


def make_autoep() -> tuple[torch.nn.Module, Any, int]:
    from tests.support.engines.autoep import HIDDEN, Model

    torch.manual_seed(0)
    module = Model(biased=False)  # that buffer is saved under two names, as no other is
    return module, module.parameters(), HIDDEN


def describe_native() -> Model:
    from tests.support.engines.experts import EXPERTS, Layers

    module = Layers((1, 1))
    model = describe(module, [{"params": list(module.parameters())}])
    return replace(model, experts=tuple(ExpertLayer(name, EXPERTS) for name in ("residual", "plain")))


def describe_autoep() -> Model:
    """As the module is once AutoEP has replaced the blocks; its router has a second name."""
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
