"""Saves by real 3D-parallel engines: pipelines with tied modules, and tensor parallelism through an mpu.

Tensor-parallel ranks compute with their local shards without communication: the trained values are meaningless, but
the files have the right form.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch

from .description import Layer, Model
from .engines import RealSave, describe, split_params

WIDTH = 6
ROWS = 12  # of the embedding
LENGTH = 5


@dataclass(frozen=True, slots=True)
class Case3D(RealSave):
    """A save of a pipeline, or of a model with an mpu if `pipeline` is False.

    `short` has fewer layers than 4 stages: the last ones have no parameters. DeepSpeed only trains such stages at
    stage 0 in fp32 without clipping (0.19: IndexError or an empty norm otherwise).
    """

    pipeline: bool = True
    method: str = "uniform"
    short: bool = False

    @property
    def label(self) -> str:
        options = [self.method.replace(":", "_")] * (self.method != "uniform") + ["short"] * self.short
        return "-".join(["pipe" if self.pipeline else "mpu", self.topology.label, *options])

    @property
    def model(self) -> Model:
        module, layers = _make_plain(1), ()
        if self.pipeline:
            blocks = {"1": Block(1)} if self.short else {"1": Block(1), "3": Block(1, 2)}
            module = torch.nn.ModuleDict({"tied_modules": torch.nn.ModuleDict({"embed": Embedding(1)}), **blocks})
            layers = (Layer("embed"), Layer(), Layer(file=False))
            layers += () if self.short else (Layer(), Layer(), Layer("embed", file=False))
        found = describe(module, split_params(module.parameters()))
        params = tuple(replace(param, tied=param.name == "tied_modules.embed.word") for param in found.params)
        return replace(found, params=params, layers=layers)

    def ds_config(self) -> dict[str, Any]:
        # The ranks' activations differ, so they are sent whole.
        pipeline = {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}} if self.pipeline else {}
        return {**RealSave.ds_config(self), **pipeline, "gradient_clipping": 0.0 if self.short else 1.0}

    def cut(self, name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
        """Rows of `word` and `up`, columns of `down`."""
        dim = {"word": 0, "up": 0, "down": 1}.get(name.rpartition(".")[2])
        return tensor if dim is None else tensor.chunk(tp, dim)[rank]

    def step(self, engine: Any) -> None:
        tokens = torch.randint(ROWS, (4, LENGTH))
        if self.pipeline:
            engine.train_batch(iter([(tokens, tokens)]))
        else:
            engine.backward(loss(engine(tokens), tokens))
            engine.step()

    def make(self) -> Any:
        import deepspeed
        from deepspeed.pipe import PipelineModule
        from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

        from tests.support.engines.experts import ParallelState

        torch.manual_seed(torch.distributed.get_rank())
        here, mpu, module = self.topology, None, None
        if self.pipeline:
            with_model = PipeModelDataParallelTopology(here.pp, here.tp, here.dp) if here.names_model_axis else None
            module = PipelineModule(
                _layers(here.tp, self.short),
                topology=with_model or PipeDataParallelTopology(here.pp, here.dp),
                loss_fn=loss,
                partition_method=self.method,
            )
        else:
            module, mpu = _make_plain(here.tp), ParallelState(here.tp).make_mpu()
        params = split_params(module.parameters())
        return deepspeed.initialize(model=module, model_parameters=params, config=self.ds_config(), mpu=mpu)[0]


def _sharded(*shape: int) -> torch.nn.Parameter:
    """A shard, which DeepSpeed's gradient norm counts on every tensor-parallel rank."""
    param = torch.nn.Parameter(torch.randn(shape))
    param.model_parallel = True  # type: ignore[attr-defined]  # Megatron's mark
    return param


class Embedding(torch.nn.Module):
    """A module with two parameters, of which DeepSpeed ties only `word` between stages."""

    scale: torch.Tensor

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.word = _sharded(ROWS // tp, WIDTH)
        self.position = torch.nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word[tokens % len(self.word)] * self.scale.to(self.word.dtype) + self.position


class Block(torch.nn.Module):
    """Column- and row-parallel matrices, a frozen and an unused vector."""

    def __init__(self, tp: int, heads: int = 4) -> None:
        super().__init__()
        self.up = _sharded(2 * heads // tp, WIDTH)
        self.down = _sharded(WIDTH, 2 * heads // tp)
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH))
        self.gain = torch.nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.norm = torch.nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(hidden @ self.up.T) @ self.down.T * self.gain + self.bias


def logits(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    """The forward_fn of the second use of the tied module: it leaves the position embedding without a gradient."""
    return hidden @ embedding.word.T + 0 * embedding.position.sum()


def double(hidden: torch.Tensor) -> torch.Tensor:
    return 2 * hidden


def loss(outputs: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    return outputs.float().pow(2).mean() * 1e-2


def _layers(tp: int, short: bool) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    first = TiedLayerSpec("embed", Embedding, tp, tied_weight_attr="word")
    if short:
        return [first, LayerSpec(Block, tp), double]
    last = TiedLayerSpec("embed", Embedding, tp, forward_fn=logits, tied_weight_attr="word")
    return [first, LayerSpec(Block, tp), double, LayerSpec(Block, tp, 2), LayerSpec(torch.nn.Tanh), last]


def _make_plain(tp: int) -> torch.nn.Module:
    return torch.nn.Sequential(OrderedDict(embedding=Embedding(tp), block=Block(tp)))
