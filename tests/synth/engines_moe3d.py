"""Real saves of experts under tensor and pipeline parallelism: the engines of `tests/engine`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .description import ExpertLayer, Layer, Model, Param, Topology
from .engines import CLIENT_STATE
from .engines_moe import describe_autoep
from .experts import find_layer

if TYPE_CHECKING:
    from pathlib import Path

    import torch


@dataclass(frozen=True, slots=True)
class CaseMoE3D:
    """One real save of two layers of experts, spread alike, between two others; `fused`: AutoEP's."""

    topology: Topology
    fused: bool = False
    steps: int = 2
    client_state: dict[str, Any] = field(default_factory=lambda: dict(CLIENT_STATE))
    scheduler: None = None

    @property
    def label(self) -> str:
        return f"{'autoep' if self.fused else 'moe'}3d-{self.topology.label}"

    @property
    def samples(self) -> int:
        from tests.support.engines.experts_3d import BATCH

        return self.steps * BATCH

    @property
    def spread(self) -> Any:
        """As the engines' module describes it."""
        from tests.support.engines import autoep as engine_autoep
        from tests.support.engines import experts_3d as engine_experts_3d

        top = self.topology
        world, ep = top.tp * top.pp * top.dp, top.ep[0]
        if self.fused:
            return engine_autoep.Spread(world, top.stage, top.precision, ep, tp=top.tp, pp=top.pp)
        sums = top.kind == "bf16" and top.stage == 1
        return engine_experts_3d.Spread(
            world, top.tp, ep, top.stage, top.precision, top.pp, top.cut_experts, top.data_first, sums
        )

    @property
    def model(self) -> Model:
        """What is trained, whole; in a pipeline each layer has a number for its name."""
        found = describe_autoep() if self.fused else describe_blocks()
        name = _number_autoep if self.fused else _number_block
        return _rename(found, name) if self.topology.pp > 1 else found

    def ds_config(self) -> dict[str, Any]:
        return self._engines.make_config(self.spread)

    def save(self, folder: Path) -> None:
        """Trains and saves, on one rank of a world of the topology's size."""
        options = {"biased": False} if self.fused else {}
        engine = self._engines.make(self.spread, 1, **options)
        self._engines.train(engine, range(self.steps))
        engine.save_checkpoint(str(folder), client_state=dict(self.client_state))
        engine.destroy()

    def cut(self, name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
        """As these engines' layers are cut."""
        cuts = self._engines.CUT
        end = ".".join(name.split(".")[-3:]) if self.fused else name.rpartition(".")[2]
        whole = end not in cuts or (self.topology.folds_experts and find_layer(self.model, name) is not None)
        return tensor if whole else tensor.chunk(tp, cuts[end])[rank]

    @property
    def _engines(self) -> Any:
        from tests.support.engines import autoep as engine_autoep
        from tests.support.engines import experts_3d as engine_experts_3d

        return engine_autoep if self.fused else engine_experts_3d


def describe_blocks() -> Model:
    """Two dense blocks, and two layers of experts between them."""
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


def _rename(model: Model, name: Any) -> Model:
    """The same as a pipeline's."""
    params = [replace(param, name=name(param.name)) for param in model.params]
    params = [replace(param, alias_of=param.alias_of and name(param.alias_of)) for param in params]
    experts = tuple(replace(layer, name=name(layer.name)) for layer in model.experts)
    return Model(tuple(params), layers=(Layer(),) * 4, experts=experts)


def _number_block(name: str) -> str:
    return name.removeprefix("layers.")


def _number_autoep(name: str) -> str:
    """Behind a layer that holds nothing."""
    if name.startswith("head."):
        return f"3.{name.removeprefix('head.')}"
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"{int(number) + 1}.{rest}"
