"""Headers of checkpoints and ranks of engines without bytes, built from the param groups of a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from deepspeed_ucp.engine.base import Target
from deepspeed_ucp.engine.parallel import Instance, ParallelState, Share
from deepspeed_ucp.extensions.registry import Extension
from deepspeed_ucp.formats.deepspeed.headers import FileHeader, ModelHeader, OptimHeader, Piece, TensorStates
from deepspeed_ucp.model.flat import FlatBuffer, join_parameters, join_reserved
from deepspeed_ucp.model.records import Record
from deepspeed_ucp.model.storage import count

Shape = tuple[int, ...]
ALIGNMENT = 64  # bytes, of records in a torch.save file
STEP = 1000
SUB_GROUP = 1_000_000_000  # ZeRO 3's default sub_group_size
HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "maximize": False, "foreach": None}


@dataclass(frozen=True)
class Group:
    """A param group of one rank: local shapes by name, and the number of ranks over which it is partitioned."""

    tensors: Mapping[str, Shape]
    parts: int
    hyper: Mapping[str, Any]

    @property
    def shapes(self) -> list[Shape]:
        return list(self.tensors.values())

    def lay_out(self, number: int) -> FlatBuffer:
        """Make ZeRO-1's flat buffer (stage_1_and_2.py: `nccl_start_alignment_factor` is 2)."""
        numel = sum(map(count, self.shapes))
        partition = -(-numel // (2 * self.parts)) * 2
        return join_parameters(number, list(self.tensors), self.shapes, parts=self.parts, partition=partition)

    def lay_out_sub_groups(self, number: int, sub_group: int) -> Iterator[FlatBuffer]:
        """Make ZeRO-3's flat buffers: a sub-group ends with the parameter that reaches its size (stage3.py)."""
        names, shapes, begin, size = list(self.tensors), self.shapes, 0, 0
        for at, shape in enumerate(shapes):
            size += -(-count(shape) // self.parts)
            if size >= sub_group or at == len(shapes) - 1:
                yield join_reserved(number, names[begin : at + 1], shapes[begin : at + 1], self.parts)
                begin, size = at + 1, 0


def make_group(tensors: Iterable[tuple[str, Shape]], parts: int, **hyper: Any) -> Group:
    return Group(dict(tensors), parts, {**HYPER, **hyper})


def split_groups(tensors: Iterable[tuple[str, Shape]], parts: int) -> list[Group]:
    """Split into matrices with weight decay and vectors without."""
    tensors = list(tensors)
    matrices = [each for each in tensors if len(each[1]) > 1]
    vectors = [each for each in tensors if len(each[1]) == 1]
    return [make_group(matrices, parts, weight_decay=0.1), make_group(vectors, parts, weight_decay=0.0)]


def make_config(batch: int) -> dict[str, Any]:
    """Make a usual ds_config at ZeRO 1 in bf16."""
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 500_000_000},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100_000, "warmup_num_steps": 2000}},
    }


def make_model_states(
    number: int, groups: Sequence[Group], dp: int, mp: int, module: dict[str, Piece] | None, end: int, **fields: Any
) -> FileHeader:
    """Make the header of a rank's model states; `end` is the size of the file."""
    batch = 2 * dp
    model = ModelHeader(
        module=module,
        nested=False,
        buffers=(),
        param_shapes=tuple(tuple(group.tensors.items()) for group in groups),
        frozen_shapes={},
        frozen={},
        shared={},
        counters={
            "global_steps": STEP,
            "global_samples": STEP * batch,
            "skipped_steps": 0,
            "dp_world_size": dp,
            "mp_world_size": mp,
        },
        optim=None,
        **fields,
    )
    return FileHeader(f"mp_rank_{number:02d}_model_states.pt", end, model=model, config=make_config(batch))


def make_optimizer_states(
    rank: int, mp_rank: int, groups: Sequence[tuple[Group, FlatBuffer, int]], config: Mapping[str, Any]
) -> FileHeader:
    """Make the header of a rank's optimizer states at ZeRO 1.

    Args:
        groups: param groups with their flat buffers and the rank's partition of each.
    """
    masters, states, slices, paddings = [], [], [], []
    end = 0
    for _, flat, part in groups:
        total = flat.offsets[-1] + count(flat.shapes[-1])
        padding = min(max((part + 1) * flat.partition - total, 0), flat.partition)
        pieces = []
        for numel in (flat.partition - padding, flat.partition, flat.partition):
            pieces.append(_make_piece(end, (numel,), "float32"))
            end = _align(end + 4 * numel)
        masters.append(pieces[0])
        states.append(TensorStates({"exp_avg": pieces[1], "exp_avg_sq": pieces[2]}, {"step": float(STEP)}))
        slices.append(tuple((cut.name, cut.offset, cut.numel) for cut in flat.cuts(part)))
        paddings.append(padding)
    optim = OptimHeader(
        kind="zero12",
        stage=1,
        masters=tuple(masters),
        tensors=tuple(states),
        groups=tuple(dict(group.hyper) for group, _, _ in groups),
        owners=tuple(range(len(groups))),
        slices=tuple(slices),
        partition_count=tuple(flat.parts for _, flat, _ in groups),
        paddings=tuple(paddings),
        clip_grad=1.0,
    )
    name = f"bf16_zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
    return FileHeader(name, end, optim=optim, config=dict(config))


def make_tensors(tensors: Iterable[tuple[str, Shape]]) -> tuple[dict[str, Piece], int]:
    """Place 16-bit tensors in a file; return them and its size."""
    pieces, end = {}, 0
    for name, shape in tensors:
        pieces[name] = _make_piece(end, shape, "bfloat16")
        end = _align(end + 2 * count(shape))
    return pieces, end


def _make_piece(offset: int, shape: Shape, dtype: str) -> Piece:
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    return Piece(Record(offset, itemsize * count(shape), offset % 0xFFFF_FFFF), 0, shape, dtype)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


class SyntheticTarget(Target):
    """One rank of a live engine: names, shapes and flat buffers on the meta device.

    Args:
        groups: the rank's param groups; a group of experts is partitioned over fewer ranks than the others.
        sub_group: size of ZeRO-3's sub-groups; None at ZeRO 1.
        marks: attributes of live parameters, by name.
    """

    def __init__(
        self,
        parallel: ParallelState,
        groups: Sequence[Group],
        *,
        sub_group: int | None = None,
        marks: Mapping[str, SimpleNamespace] | None = None,
        instances: Mapping[str, Instance] | None = None,
        extensions: Sequence[Extension] = (),
        shares: Mapping[str, Share] = MappingProxyType({}),
    ) -> None:
        self.parallel, self.groups, self.sub_group = parallel, groups, sub_group
        self.aliases, self.flats, self.layout = {}, [], []
        self.extensions, self.shares, self._instances = extensions, shares, dict(instances or {})
        parameters = list((marks or {}).items())
        module = SimpleNamespace(named_parameters=lambda: parameters, named_modules=tuple, modules=tuple)
        self.engine = SimpleNamespace(module=module)
        self.collect()
        tensors = defaultdict(list)
        for flat in self.flats:
            tensors[flat.group].append(flat.tensor)
        self.wrapped = torch.optim.AdamW([{"params": tensors[group]} for group in sorted(tensors)], lr=1e-4)

    @property
    def dp(self) -> int:
        return self.parallel.dp

    def collect(self) -> None:
        for number, group in enumerate(self.groups):
            part = self.parallel.dp_rank // (self.parallel.dp // group.parts)
            buffers = group.lay_out_sub_groups(number, self.sub_group) if self.sub_group else [group.lay_out(number)]
            for buffer in buffers:
                self.add_flat(buffer, part, torch.empty(buffer.partition, device="meta"))

    def refresh_copies(self) -> None:
        """Nothing is loaded."""

    def owned_shapes(self) -> dict[str, Shape]:
        buffers = [flat.buffer for flat in self.flats]  # experts have their numbers in the layer there
        return {name: shape for each in buffers for name, shape in zip(each.names, each.shapes, strict=True)}

    def list_names(self) -> dict[str, str]:
        return {name: name for name in self.owned_shapes()}

    def extras(self) -> list[Any]:
        """Return no tensors: all are in the optimizer."""
        return []

    def instances(self) -> dict[str, Instance]:
        return self._instances
