"""A Megatron-style GPT of any size: headers of its checkpoint, and ranks of engines that load it.

Parameters, names and tensor-parallel dimensions are those of `examples/megatron_gpt`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from synthetic import (
    STEP,
    Group,
    Shape,
    SyntheticTarget,
    make_config,
    make_model_states,
    make_optimizer_states,
    make_tensors,
    split_groups,
)

from deepspeed_ucp.engine.parallel import Instance, ParallelState
from deepspeed_ucp.formats.deepspeed.headers import FileHeader
from deepspeed_ucp.model.storage import count

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "megatron_gpt"))
from config import Degrees, GPTConfig
from metadata import megatron_arguments, universal_checkpoint_info

TIED = "tied_modules.embed."


@dataclass(frozen=True)
class Parameter:
    """A parameter by its pipeline name.

    Attributes:
        layer: the pipeline's layer; -1 for the tied embedding.
        dim: the dimension that tensor parallelism cuts; None if it is replicated.
    """

    layer: int
    name: str
    shape: Shape
    dim: int | None

    def local_shape(self, tp: int) -> Shape:
        return tuple(size // tp if axis == self.dim else size for axis, size in enumerate(self.shape))


@dataclass(frozen=True)
class DenseSizes:
    """Depth, width, attention heads, vocabulary (with padding) and sequence length."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 51200
    sequence: int = 2048

    @property
    def parameters(self) -> int:
        """Count the elements of all parameters, the tied embedding once."""
        return sum(count(parameter.shape) for stage in self.list_stages(1) for parameter in stage)

    def list_stages(self, pp: int) -> list[list[Parameter]]:
        """Return the parameters of each pipeline stage; the first and the last one have the embedding.

        A stage's tied modules precede its layers, as `PipelineModule` registers them.
        """
        bounds = [self.layers * stage // pp for stage in range(pp + 1)]
        stages = [[p for i in range(low, high) for p in self._list_block(i + 2)] for low, high in pairwise(bounds)]
        stages[0] = [*self._list_embedding(), *stages[0]]
        stages[-1] += self._list_norm(self.layers + 2, "")
        if pp > 1:
            stages[-1] = [*self._list_embedding(), *stages[-1]]
        return stages

    def _list_embedding(self) -> list[Parameter]:
        return [
            Parameter(-1, f"{TIED}word_embeddings.weight", (self.vocabulary, self.hidden), 0),
            Parameter(-1, f"{TIED}position_embeddings.weight", (self.sequence, self.hidden), None),
        ]

    def _list_norm(self, layer: int, name: str) -> list[Parameter]:
        return [Parameter(layer, f"{layer}.{name}{kind}", (self.hidden,), None) for kind in ("weight", "bias")]

    def _list_block(self, layer: int) -> list[Parameter]:
        hidden = self.hidden
        columns = {"self_attention.query_key_value": 3 * hidden, "mlp.dense_h_to_4h": 4 * hidden}
        rows = {"self_attention.dense": hidden, "mlp.dense_4h_to_h": 4 * hidden}
        block = [*self._list_norm(layer, "input_layernorm."), *self._list_norm(layer, "post_attention_layernorm.")]
        for name, width in columns.items():
            block.append(Parameter(layer, f"{layer}.{name}.weight", (width, hidden), 0))
            block.append(Parameter(layer, f"{layer}.{name}.bias", (width,), 0))
        for name, width in rows.items():
            block.append(Parameter(layer, f"{layer}.{name}.weight", (hidden, width), 1))
            block.append(Parameter(layer, f"{layer}.{name}.bias", (hidden,), None))
        return block


@dataclass(frozen=True)
class DenseRanks:
    """`tp` × `pp` × `dp` ranks, numbered by stage, then data, then tensor, that save at ZeRO 1 or load.

    Attributes:
        sub_group: size of ZeRO-3's sub-groups, for a model without pipeline and with its names; None at ZeRO 1.
    """

    sizes: DenseSizes
    tp: int
    pp: int
    dp: int
    sub_group: int | None = None

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def find_state(self, rank: int) -> ParallelState:
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return ParallelState(tp_rank, self.tp, pp_rank, self.pp, dp_rank, self.dp)

    def _make_groups(self, stage: Sequence[Parameter]) -> list[Group]:
        return split_groups(((self._name(p), p.local_shape(self.tp)) for p in stage), self.dp)

    def make_headers(self) -> list[FileHeader]:
        """Return the headers of all files, the first rank's model states first."""
        stages = self.sizes.list_stages(self.pp)
        groups = [self._make_groups(stages[mp // self.tp]) for mp in range(self.pp * self.tp)]
        fields = {"degrees": (self.pp, self.tp), "hints": self._make_client_state()}
        headers = [
            make_model_states(mp, each, self.dp, self.tp * self.pp, None, 20_000, **fields)
            for mp, each in enumerate(groups)
        ]
        config = make_config(2 * self.dp)
        for mp, each in enumerate(groups):
            flats = [group.lay_out(0) for group in each]
            for rank in range(self.dp):
                parts = [(group, flat, rank) for group, flat in zip(each, flats, strict=True)]
                headers.append(make_optimizer_states(rank, mp, parts, config))
        return [*headers, *self._make_layers(stages)]

    def _make_client_state(self) -> dict[str, Any]:
        """Return the client state that Megatron-DeepSpeed saves, as the index keeps it."""
        sizes, degrees = self.sizes, Degrees(tp=self.tp, pp=self.pp, pipeline=True)
        config = GPTConfig(sizes.layers, sizes.hidden, sizes.heads, sizes.sequence, vocabulary=sizes.vocabulary)
        info = universal_checkpoint_info(config, degrees)
        arguments = vars(megatron_arguments(config, degrees))
        return {"args": arguments, "checkpoint_version": 3.0, "iteration": STEP, "universal_checkpoint_info": info}

    def _make_layers(self, stages: Sequence[Sequence[Parameter]]) -> Iterator[FileHeader]:
        layers: dict[int, list[Parameter]] = {}
        for parameter in (p for stage in stages for p in stage if p.layer >= 0):
            layers.setdefault(parameter.layer, []).append(parameter)
        layers[1] = layers[self.sizes.layers + 3] = [p for p in stages[0] if p.layer < 0]
        for layer, parameters in sorted(layers.items()):
            for tp in range(self.tp):
                names = [p.name.removeprefix(TIED).removeprefix(f"{layer}.") for p in parameters]
                shapes = [p.local_shape(self.tp) for p in parameters]
                tensors, end = make_tensors(zip(names, shapes, strict=True))
                yield FileHeader(f"layer_{layer:02d}-model_{tp:02d}-model_states.pt", end, layer=tensors)

    @property
    def patterns(self) -> dict[str, Any]:
        """The user's rules: a family, and at ZeRO 3 the names of the model without pipeline."""
        model = "language_model"
        renames = [
            {"from": r"tied_modules\.embed\.(?P<rest>.*)", "to": f"{model}.embedding.{{rest}}"},
            {"from": r"(?P<n>\d+)\.(?P<rest>.*\..*)", "to": f"{model}.encoder.layers.{{n-2}}.{{rest}}"},
            {"from": r"\d+\.(?P<rest>\w+)", "to": f"{model}.encoder.final_layernorm.{{rest}}"},
        ]
        return {"family": "megatron-gpt", **({"rename": renames} if self.sub_group else {})}

    def _name(self, parameter: Parameter) -> str:
        """Return the parameter's name in the target's model."""
        if not self.sub_group:
            return parameter.name
        if parameter.name.startswith(TIED):
            return f"language_model.embedding.{parameter.name.removeprefix(TIED)}"
        rest = parameter.name.partition(".")[2]
        if parameter.layer == self.sizes.layers + 2:
            return f"language_model.encoder.final_layernorm.{rest}"
        return f"language_model.encoder.layers.{parameter.layer - 2}.{rest}"

    def make_target(self, rank: int) -> SyntheticTarget:
        parallel = self.find_state(rank)
        stage = self.sizes.list_stages(self.pp)[parallel.pp_rank]
        instances = {}
        if self.pp > 1 and parallel.pp_rank in (0, self.pp - 1):
            number = int(parallel.pp_rank > 0)
            instances = {p.name: Instance(number, 2, "word" in p.name) for p in stage if p.layer < 0}
        return SyntheticTarget(
            parallel,
            self._make_groups(stage),
            sub_group=self.sub_group,
            marks={self._name(p): _mark(p) for p in stage},
            instances=instances,
        )


def _mark(parameter: Parameter) -> SimpleNamespace:
    """Make a live parameter with Megatron's attributes."""
    dim = -1 if parameter.dim is None else parameter.dim
    stride = 3 if ".query_key_value." in parameter.name else 1
    return SimpleNamespace(tensor_model_parallel=dim >= 0, partition_dim=dim, partition_stride=stride)
