"""Engines of thousands of ranks as the planner sees them: places and buffers of each rank, without memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from synthetic import TIED, Parameter, Sizes, pad_flat, split_groups

from deepspeed_ucp.engine.base import Target
from deepspeed_ucp.engine.parallel import Instance, Place
from deepspeed_ucp.model import count
from deepspeed_ucp.model.flat import FlatBuffer, join_parameters, join_reserved

SUB_GROUP = 1_000_000_000  # ZeRO 3's default sub_group_size
PER_NODE = 8
FAMILY = "megatron-gpt"


@dataclass(frozen=True)
class Grid:
    """A target: `tp` × `pp` × `dp` ranks, numbered stage first, then data, then tensor; ZeRO 1, or 3 without pp."""

    sizes: Sizes
    tp: int
    pp: int
    dp: int
    stage: int
    sub_group: int = SUB_GROUP

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> Place:
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return Place(tp_rank, self.tp, pp_rank, self.pp, dp_rank, self.dp)

    @property
    def patterns(self) -> dict[str, Any]:
        """The user's rules: a family, and at ZeRO 3 the names of the model that is no pipeline."""
        rules: dict[str, Any] = {"family": FAMILY}
        return {**rules, "rename": self._renames()} if self.stage == 3 else rules

    def _renames(self) -> list[dict[str, str]]:
        model = "language_model"
        return [
            {"from": r"tied_modules\.embed\.(?P<rest>.*)", "to": f"{model}.embedding.{{rest}}"},
            {"from": r"(?P<n>\d+)\.(?P<rest>.*\..*)", "to": f"{model}.encoder.layers.{{n-2}}.{{rest}}"},
            {"from": r"\d+\.(?P<rest>\w+)", "to": f"{model}.encoder.final_layernorm.{{rest}}"},
        ]

    def live_name(self, parameter: Parameter) -> str:
        """The parameter's name in the target's model."""
        if self.stage != 3:
            return parameter.name
        if parameter.name.startswith(TIED):
            return f"language_model.embedding.{parameter.name.removeprefix(TIED)}"
        rest = parameter.name.partition(".")[2]
        if parameter.layer == self.sizes.layers + 2:
            return f"language_model.encoder.final_layernorm.{rest}"
        return f"language_model.encoder.layers.{parameter.layer - 2}.{rest}"


class FakeTarget(Target):
    """One rank of a live engine as the planner sees it: names, shapes and flat buffers, on the meta device."""

    def __init__(self, grid: Grid, rank: int, held: Sequence[Parameter]) -> None:
        self.grid, self.place = grid, grid.place(rank)
        self.aliases, self.flats, self.layout = {}, [], []
        self.shapes = {grid.live_name(p): p.local_shape(grid.tp) for p in held}
        self.held = {grid.live_name(p): p for p in held}
        parameters = [(name, _mark(p)) for name, p in self.held.items()]
        self.engine = SimpleNamespace(module=SimpleNamespace(named_parameters=lambda: parameters, named_modules=tuple))
        self.collect()
        groups = defaultdict(list)
        for flat in self.flats:
            groups[flat.group].append(flat.tensor)
        self.wrapped = torch.optim.AdamW([{"params": groups[group]} for group in sorted(groups)], lr=1e-4)

    @property
    def dp(self) -> int:
        return self.place.dp

    def refresh_copies(self) -> None:
        """Nothing is loaded."""

    def owned_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shapes

    def list_names(self) -> dict[str, str]:
        return {name: name for name in self.shapes}

    def extras(self) -> list[Any]:
        """No tensor is without optimizer."""
        return []

    def instances(self) -> dict[str, Instance]:
        if self.place.pp == 1 or self.place.pp_rank not in (0, self.place.pp - 1):
            return {}
        last = int(self.place.pp_rank > 0)
        return {name: Instance(last, 2, "word" in name) for name in self.shapes if name.startswith(TIED)}

    def collect(self) -> None:
        for group, held in enumerate(split_groups(self.held.values())):
            names = [self.grid.live_name(p) for p in held]
            shapes = [p.local_shape(self.place.tp) for p in held]
            numels = [count(shape) for shape in shapes]
            if self.grid.stage == 3:
                for some in cut_sub_groups(numels, self.dp, self.grid.sub_group):
                    self._add(join_reserved(group, names[some], shapes[some], self.dp))
            else:
                partition = pad_flat(sum(numels), self.dp) // self.dp
                self._add(join_parameters(group, names, shapes, parts=self.dp, partition=partition))

    def _add(self, buffer: FlatBuffer) -> None:
        self.add_flat(buffer, self.place.dp_rank, torch.empty(buffer.partition, device="meta"))


def cut_sub_groups(numels: Sequence[int], dp: int, size: int) -> Iterator[slice]:
    """ZeRO 3 (stage3.py ``_create_fp16_sub_groups``): a sub-group ends with the parameter that reaches ``size``."""
    begin = held = 0
    for at, numel in enumerate(numels):
        held += -(-numel // dp)
        if held >= size or at == len(numels) - 1:
            yield slice(begin, at + 1)
            begin, held = at + 1, 0


def _mark(parameter: Parameter) -> SimpleNamespace:
    """A live parameter with Megatron's attributes."""
    dim = -1 if parameter.dim is None else parameter.dim
    stride = 3 if ".query_key_value." in parameter.name else 1
    return SimpleNamespace(tensor_model_parallel=dim >= 0, partition_dim=dim, partition_stride=stride)


def list_targets(grid: Grid) -> Callable[[int], FakeTarget]:
    stages = grid.sizes.stages(grid.pp)
    return lambda rank: FakeTarget(grid, rank, stages[grid.place(rank).pp_rank])
