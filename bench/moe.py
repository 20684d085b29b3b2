"""A mixture of experts of any size (`deepspeed.moe`): headers of its checkpoint, and ranks of engines that load it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from synthetic import (
    Group,
    Shape,
    SyntheticTarget,
    make_config,
    make_group,
    make_model_states,
    make_optimizer_states,
    make_tensors,
    split_groups,
)

from deepspeed_ucp.engine.parallel import ParallelState
from deepspeed_ucp.extensions.experts.engine import LiveExperts, LocalExperts, share_out
from deepspeed_ucp.formats.deepspeed.headers import FileHeader
from deepspeed_ucp.model.storage import count

MAX_GROUP = 178_956_971
"""Maximal number of elements of a rank's param group of experts (`moe/utils.py`, `max_group_size`)."""

EXPERTS = "mlp.deepspeed_moe.experts.deepspeed_experts."


@dataclass(frozen=True)
class MoeSizes:
    """Depth, width, width and number of each layer's experts, and vocabulary."""

    layers: int
    hidden: int
    width: int
    experts: int
    vocabulary: int = 128_000

    @property
    def parameters(self) -> int:
        """Count the elements of all parameters."""
        dense = sum(count(shape) for _, shape in self.dense)
        return dense + self.layers * self.experts * 3 * self.hidden * self.width

    @cached_property
    def dense(self) -> list[tuple[str, Shape]]:
        """The parameters of every rank, in the module's order."""
        hidden = self.hidden
        tensors: list[tuple[str, Shape]] = [("embed.weight", (self.vocabulary, hidden))]
        for layer in range(self.layers):
            tensors += [(f"layers.{layer}.attention.{key}.weight", (hidden, hidden)) for key in "qkvo"]
            tensors += [(f"layers.{layer}.{norm}.weight", (hidden,)) for norm in ("norm1", "norm2")]
            tensors.append((f"layers.{layer}.mlp.deepspeed_moe.gate.wg.weight", (self.experts, hidden)))
        return [*tensors, ("norm.weight", (hidden,)), ("head.weight", (self.vocabulary, hidden))]

    def list_expert(self, layer: int, number: int) -> list[tuple[str, Shape]]:
        """Return the parameters of an expert with a number of the rank or of the layer."""
        shapes = {"w1": (self.width, self.hidden), "w2": (self.hidden, self.width), "w3": (self.width, self.hidden)}
        return [(f"layers.{layer}.{EXPERTS}{number}.{key}.weight", shape) for key, shape in shapes.items()]

    def make_groups(self, dp: int, ep: int) -> list[Group]:
        """Return the param groups of a rank."""
        hyper = {"weight_decay": 0.1, "moe": True, "name": f"ep_size_{ep}"}
        experts = [make_group(tensors, dp // ep, **hyper) for tensors in self._cut_experts(self.experts // ep)]
        return [*split_groups(self.dense, dp), *experts]

    def _cut_experts(self, local: int) -> Iterator[list[tuple[str, Shape]]]:
        """Cut a rank's experts into groups as DeepSpeed does (`moe/utils.py`)."""
        group, size = list[tuple[str, Shape]](), 0
        for layer in range(self.layers):
            for name, shape in (tensor for number in range(local) for tensor in self.list_expert(layer, number)):
                if group and size + count(shape) > MAX_GROUP:
                    yield group
                    group, size = [], 0
                group.append((name, shape))
                size += count(shape)
        yield group


@dataclass(frozen=True)
class MoeRanks:
    """`dp` ranks that save or load at ZeRO 1 in bf16; experts are distributed over `ep` of them."""

    sizes: MoeSizes
    dp: int
    ep: int

    @property
    def ranks(self) -> int:
        return self.dp

    def make_headers(self) -> list[FileHeader]:
        """Return the headers of all files, the first rank's model states first."""
        groups = self.sizes.make_groups(self.dp, self.ep)
        flats = [group.lay_out(number) for number, group in enumerate(groups)]
        module, end = make_tensors(self.sizes.dense)
        facts = {"experts": (self.sizes.experts,) * self.sizes.layers, "placements": {}}
        headers, config = (
            [make_model_states(0, groups, self.dp, 1, module, end, facts=facts)],
            make_config(2 * self.dp),
        )
        for rank in range(self.dp):
            parts = [(group, flat, rank // (self.dp // group.parts)) for group, flat in zip(groups, flats, strict=True)]
            headers.append(make_optimizer_states(rank, 0, parts, config))
        for layer in range(self.sizes.layers):
            for expert in range(self.sizes.experts):
                tensors, end = make_tensors(self.sizes.list_expert(layer, expert))
                name = f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
                headers.append(FileHeader(name, end, layer=tensors))
        return headers

    @property
    def patterns(self) -> dict[str, Any]:
        return {}

    def find_state(self, rank: int) -> ParallelState:
        return ParallelState(0, 1, 0, 1, rank, self.dp)

    def make_target(self, rank: int) -> SyntheticTarget:
        local = self.sizes.experts // self.ep
        numbers = range(rank % self.ep * local, (rank % self.ep + 1) * local)
        replicas = range(rank % self.ep, self.dp, self.ep)
        experts = LocalExperts(self.ep, replicas, unsharded=False, is_first_replica=rank < self.ep, numbers=numbers)
        groups, layers = self.sizes.make_groups(self.dp, self.ep), range(self.sizes.layers)
        shares = share_out(
            {f"layers.{layer}.{EXPERTS}": experts for layer in layers},
            (name for group in groups for name in group.tensors),
        )
        return SyntheticTarget(self.find_state(rank), groups, extensions=[LiveExperts()], shares=shares)
