"""Jobs of thousands of ranks for `scale.py`: checkpoints as headers in memory, and what each rank of a target holds.

A dense GPT of 10^12 parameters under tensor and pipeline parallelism (`synthetic`), and a mixture of experts of as
many, whose experts are spread over ranks (DeepSpeed's own layers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from grid import SUB_GROUP, Grid, list_targets
from synthetic import HYPER, STEP, Shape, Sizes, Source, make_optimizer, make_tensors, pad_flat

from deepspeed_ucp.engine.base import Target
from deepspeed_ucp.engine.parallel import LocalExperts, Place
from deepspeed_ucp.formats.deepspeed.headers import FileHeader, ModelHeader
from deepspeed_ucp.model import count
from deepspeed_ucp.model.flat import FlatBuffer, join_parameters

MAX_GROUP = 178_956_971
"""Elements of a rank's param group of experts at most (``moe/utils.py``, ``max_group_size``)."""

EXPERTS = "mlp.deepspeed_moe.experts.deepspeed_experts."


@dataclass(frozen=True)
class Group:
    """A param group of one rank: its own parameters, and over how many ranks it is cut."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    parts: int
    hyper: Mapping[str, Any]


@dataclass(frozen=True)
class MoeSizes:
    """Depth, width, experts of each layer with their width, and vocabulary of a mixture of experts."""

    layers: int
    hidden: int
    width: int
    experts: int
    vocabulary: int = 128_000

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        dense = sum(count(shape) for _, shape in self.dense)
        return dense + self.layers * self.experts * 3 * self.hidden * self.width

    @cached_property
    def dense(self) -> list[tuple[str, Shape]]:
        """What every rank holds, in the module's order."""
        hidden = self.hidden
        found: list[tuple[str, Shape]] = [("embed.weight", (self.vocabulary, hidden))]
        for layer in range(self.layers):
            found += [(f"layers.{layer}.attention.{key}.weight", (hidden, hidden)) for key in "qkvo"]
            found += [(f"layers.{layer}.{norm}.weight", (hidden,)) for norm in ("norm1", "norm2")]
            found.append((f"layers.{layer}.mlp.deepspeed_moe.gate.wg.weight", (self.experts, hidden)))
        return [*found, ("norm.weight", (hidden,)), ("head.weight", (self.vocabulary, hidden))]

    def expert(self, layer: int, number: int) -> list[tuple[str, Shape]]:
        """One expert's parameters, by a rank's own number or by that of the whole layer."""
        shapes = {"w1": (self.width, self.hidden), "w2": (self.hidden, self.width), "w3": (self.width, self.hidden)}
        return [(f"layers.{layer}.{EXPERTS}{number}.{key}.weight", shape) for key, shape in shapes.items()]

    def groups(self, dp: int, ep: int) -> list[Group]:
        """The param groups of each of `dp` ranks; experts' are cut as DeepSpeed does (`moe/utils.py`)."""
        sides = [[each for each in self.dense if (len(each[1]) > 1) == matrix] for matrix in (True, False)]
        found = [_make_group(side, dp, {"weight_decay": decay}) for side, decay in zip(sides, (0.1, 0.0), strict=True)]
        own = [self.expert(layer, at) for layer in range(self.layers) for at in range(self.experts // ep)]
        moe = {"weight_decay": 0.1, "moe": True, "name": f"ep_size_{ep}"}
        return [*found, *(_make_group(piece, dp // ep, moe) for piece in _cut_pieces(list(chain(*own))))]


def _make_group(held: Sequence[tuple[str, Shape]], parts: int, hyper: Mapping[str, Any]) -> Group:
    return Group(tuple(name for name, _ in held), tuple(shape for _, shape in held), parts, {**HYPER, **hyper})


def _lay_group(number: int, group: Group) -> FlatBuffer:
    partition = pad_flat(sum(map(count, group.shapes)), group.parts) // group.parts
    return join_parameters(number, group.names, group.shapes, parts=group.parts, partition=partition)


def _cut_pieces(held: Sequence[tuple[str, Shape]]) -> Iterator[list[tuple[str, Shape]]]:
    piece: list[tuple[str, Shape]] = []
    for each in held:
        if piece and sum(count(shape) for _, shape in piece) + count(each[1]) > MAX_GROUP:
            yield piece
            piece = []
        piece.append(each)
    yield piece


@dataclass(frozen=True)
class MoeSource:
    """A ZeRO-1 bf16 checkpoint of a mixture of experts by `dp` ranks, over `ep` of which experts are spread."""

    sizes: MoeSizes
    dp: int
    ep: int

    @property
    def ranks(self) -> int:
        return self.dp

    def headers(self) -> list[FileHeader]:
        """Of all files, the first rank's model states in front."""
        groups = self.sizes.groups(self.dp, self.ep)
        flats = [_lay_group(number, group) for number, group in enumerate(groups)]
        optims = [self._optimizer(rank, groups, flats) for rank in range(self.dp)]
        return [self._model(groups), *optims, *self._experts()]

    @property
    def _config(self) -> dict[str, Any]:
        return {
            "train_batch_size": self.dp,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }

    def _model(self, groups: Sequence[Group]) -> FileHeader:
        module, end = make_tensors(self.sizes.dense)
        counters = {"global_steps": STEP, "global_samples": STEP * self.dp, "skipped_steps": 0}
        model = ModelHeader(
            module=module,
            nested=False,
            buffers=(),
            param_shapes=tuple(tuple(zip(group.names, group.shapes, strict=True)) for group in groups),
            frozen_shapes={},
            frozen={},
            shared={},
            counters={**counters, "dp_world_size": self.dp, "mp_world_size": 1},
            optim=None,
            experts=(self.sizes.experts,) * self.sizes.layers,
        )
        return FileHeader("mp_rank_00_model_states.pt", end, model=model, config=self._config)

    def _optimizer(self, rank: int, groups: Sequence[Group], flats: Sequence[FlatBuffer]) -> FileHeader:
        parts = [
            (flat, rank if flat.parts == self.dp else rank // self.ep, group.hyper)
            for flat, group in zip(flats, groups, strict=True)
        ]
        return make_optimizer(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", parts, self._config)

    def _experts(self) -> Iterator[FileHeader]:
        for layer in range(self.sizes.layers):
            for expert in range(self.sizes.experts):
                held, end = make_tensors(self.sizes.expert(layer, expert))
                yield FileHeader(f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt", end, layer=held)


class MoeTarget(Target):
    """One rank of a live engine with experts, on the meta device."""

    def __init__(self, sizes: MoeSizes, dp: int, ep: int, rank: int) -> None:
        self.place, self.aliases, self.flats, self.layout = Place(0, 1, 0, 1, rank, dp), {}, [], []
        self.sizes, self.degree = sizes, ep
        own = sizes.experts // ep
        numbers, ranks = range(rank % ep * own, (rank % ep + 1) * own), range(rank % ep, dp, ep)
        held = LocalExperts(numbers, ep, ranks, over_tp=False, is_first_replica=rank < ep)
        self.experts = {f"layers.{layer}.{EXPERTS}": held for layer in range(sizes.layers)}
        self.engine = SimpleNamespace(module=SimpleNamespace(named_parameters=tuple, named_modules=tuple))
        self.collect()
        groups = [[flat.tensor] for flat in self.flats]
        self.wrapped = torch.optim.AdamW([{"params": params} for params in groups], lr=1e-4)

    @property
    def dp(self) -> int:
        return self.place.dp

    def refresh_copies(self) -> None:
        """Nothing is loaded."""

    def extras(self) -> list[Any]:
        return []

    def instances(self) -> dict[str, Any]:
        return {}

    def list_names(self) -> dict[str, str]:
        return {name: name for name in self.owned_shapes()}

    def owned_shapes(self) -> dict[str, Shape]:
        return {n: s for flat in self.flats for n, s in zip(flat.buffer.names, flat.buffer.shapes, strict=True)}

    def collect(self) -> None:
        for number, group in enumerate(self.sizes.groups(self.dp, self.degree)):
            buffer = _lay_group(number, group)
            part = self.place.dp_rank if group.parts == self.dp else self.place.dp_rank // self.degree
            self.add_flat(buffer, part, torch.empty(buffer.partition, device="meta"))


@dataclass(frozen=True)
class Job:
    """A load: the saved checkpoint and the engine that resumes it.

    Attributes:
        make_target: makes the engine of a rank.
        reporters: ranks that report tensors of which other ranks hold replicas.
        patterns: the user's rules.
    """

    name: str
    title: str
    source: Any
    ranks: int
    make_target: Callable[[int], Target]
    reporters: Sequence[int]
    patterns: Mapping[str, Any]

    @property
    def parameters(self) -> int:
        return int(self.source.sizes.parameters)


def make_dense(name: str, source: Source, grid: Grid) -> Job:
    title = f"dense, {source.ranks:,} → {grid.ranks:,} ranks {'ZeRO-3' if grid.stage == 3 else 'ZeRO-1'}"
    reporters = [rank for rank in range(grid.ranks) if not grid.place(rank).dp_rank]
    return Job(name, title, source, grid.ranks, list_targets(grid), reporters, grid.patterns)


def make_moe(name: str, source: MoeSource, dp: int) -> Job:
    sizes, ep = source.sizes, source.ep
    title = f"{sizes.experts} experts, {source.ranks:,} → {dp:,} ranks ZeRO-1, EP{ep}"
    return Job(name, title, source, dp, lambda rank: MoeTarget(sizes, dp, ep, rank), range(ep), {})


DENSE, MOE = Sizes(128, 25600, 160), MoeSizes(128, 6144, 1664, 256)
MID = Sizes(40, 5120, 40)
QUICK_DENSE, QUICK_MOE = Sizes(16, 1024, 16, 8192, 512), MoeSizes(8, 512, 256, 16, 8000)


def _dense_small(zero: int) -> Job:
    grid = Grid(DENSE, 8, 48, 2, 1) if zero == 1 else Grid(DENSE, 1, 1, 768, 3, SUB_GROUP)
    return make_dense(f"dense{zero}-1k", Source(DENSE, 8, 64, 2), grid)


def _dense_large(zero: int) -> Job:
    grid = Grid(DENSE, 8, 64, 16, 1) if zero == 1 else Grid(DENSE, 1, 1, 8192, 3, SUB_GROUP)
    return make_dense(f"dense{zero}-10k", Source(DENSE, 8, 64, 20), grid)


def _dense_mid() -> Job:
    """Of a model of 13 B, as every rank of a ZeRO-3 target wants some of every parameter."""
    return make_dense("dense3-mid", Source(MID, 8, 4, 4), Grid(MID, 1, 1, 96, 3, SUB_GROUP))


def _dense_quick(zero: int) -> Job:
    grid = Grid(QUICK_DENSE, 4, 4, 3, 1) if zero == 1 else Grid(QUICK_DENSE, 1, 1, 48, 3, 100_000)
    return make_dense(f"dense{zero}-quick", Source(QUICK_DENSE, 4, 8, 2), grid)


JOBS: dict[str, Callable[[], Job]] = {
    "dense1-1k": lambda: _dense_small(1),
    "dense3-1k": lambda: _dense_small(3),
    "moe-1k": lambda: make_moe("moe-1k", MoeSource(MOE, 1024, 256), 768),
    "dense3-mid": _dense_mid,
    "dense1-10k": lambda: _dense_large(1),
    "dense3-10k": lambda: _dense_large(3),
    "moe-10k": lambda: make_moe("moe-10k", MoeSource(MOE, 10_240, 256), 8192),
    "dense1-quick": lambda: _dense_quick(1),
    "dense3-quick": lambda: _dense_quick(3),
    "moe-quick": lambda: make_moe("moe-quick", MoeSource(QUICK_MOE, 64, 16), 48),
}
