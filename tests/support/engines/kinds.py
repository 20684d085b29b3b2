"""Descriptions of engines; how their states are read on the ranks and joined."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups
from torch import Tensor

States = dict[tuple[str, str], Tensor]
"""Whole tensors by parameter and state; ``fp32`` is the master, ``copy`` the model's parameter."""


class Kind:
    """Base of the descriptions of an engine; its module has ``make``, ``train`` and ``read_states``.

    Attributes:
        world: number of ranks.
        stage: ZeRO stage.
        precision: "fp32", "bf16" or "fp16".
    """

    world: int
    stage: int
    precision: str

    def training(self, seed: int, folder: str = "", **options: Any) -> Any:
        """Return the function that makes and trains an engine.

        Args:
            folder: for files of the engine outside its saves.
            options: arguments of ``make``.
        """
        return partial(run, self, seed, {**self.list_options(folder), **options})

    def list_options(self, folder: str) -> dict[str, Any]:
        """List arguments of ``make`` that depend on the folder of a run."""
        return {}

    def read(self, engine: Any) -> States:
        """Read the states of this rank; collective."""
        return sys.modules[type(self).__module__].read_states(engine)  # type: ignore[no-any-return]

    def join(self, parts: Sequence[States]) -> States:
        return join(parts)

    def is_direct(self, source: Any) -> bool:
        """Return True if the plugin's own loader loads `source` into this engine."""
        return source != self  # type: ignore[no-any-return]

    def find_refusal(self, source: Any) -> str:
        """Return a part of the error message of a load of `source`; empty if it succeeds."""
        return ""

    def find_tolerance(self, source: Any) -> dict[str, float] | None:
        """Return the arguments of `pytest.approx` for losses; None if they are not comparable."""
        return {"abs": 1e-7} if source.precision == self.precision == "fp32" else None

    def adjust(self, state: str, saved: Tensor, loaded: Tensor) -> Tensor:
        """Return the saved tensor as this engine keeps it."""
        return saved


# --- on the ranks


def run(kind: Kind, seed: int, options: Mapping[str, Any]) -> Generator[Any, None, None]:
    """Yields the engine of a kind, then the loss of each step."""
    home = sys.modules[type(kind).__module__]
    engine = home.make(kind, seed, **options)
    yield engine
    while True:
        yield from home.train(engine, range(engine.global_steps, engine.global_steps + 1))


def forget_groups() -> None:
    """Clear DeepSpeed's groups of experts, which it names by the degree and not by the order of ranks."""
    groups._EXPERT_PARALLEL_GROUP.clear()
    groups._EXPERT_DATA_PARALLEL_GROUP.clear()
    groups.mpu = None


def mean_square(output: Tensor, _label: Tensor) -> Tensor:
    """A loss without labels."""
    return output.float().pow(2).mean()


def take_step(engine: Any, loss: Tensor) -> float:
    """Make a step of the engine. Returns the mean of the loss over all ranks."""
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total.item() / dist.get_world_size())


def train_on_noise(
    engine: Any,
    steps: range,
    shape: Sequence[int],
    part: tuple[int, int],
    loss_of: Callable[[Tensor, Tensor], Tensor] = mean_square,
    label: Callable[[Tensor], Tensor] = lambda own: own,
) -> list[float]:
    """Train on batches that depend on the step's number. Returns the losses, as means over all ranks.

    Args:
        shape: of a whole batch.
        part: number of this rank's part of the batch, and number of parts.
    """
    losses = []
    for step in steps:
        batch = torch.randn(*shape, generator=torch.Generator().manual_seed(step))
        own = batch.chunk(part[1])[part[0]].to(engine.device, next(engine.module.parameters()).dtype)
        if isinstance(engine.module, PipelineModule):
            parts = own.split(engine.train_micro_batch_size_per_gpu())
            losses.append(float(engine.train_batch(iter([(each, label(each)) for each in parts]))))
            continue
        losses.append(take_step(engine, loss_of(engine(own), label(own))))
    return losses


def read_optimizer(wrapped: Any) -> dict[int, dict[str, Tensor]]:
    """Read masters and states by the parameter's identity, whole; partitions are gathered over their own groups."""
    optimizer = getattr(wrapped, "optimizer", wrapped)
    found: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for params, master, cuts, more in _list_masters(wrapped, optimizer):
        states = {"fp32": master, **optimizer.state[master], **more}
        if "momentum_buffer" in states and getattr(wrapped, "params_in_partition", None) and not wrapped.cpu_offload:
            held = wrapped.params_in_partition[_find_group(wrapped, params)]  # Muon's: of whole parameters
            pieces = states.pop("momentum_buffer").split([param.numel() for param in held])
            for param, piece in zip(held, pieces, strict=True):
                found[id(param)]["momentum_buffer"] = piece.view(param.shape).clone()
        for state, value in states.items():
            tensor = value.detach() if torch.is_tensor(value) else torch.tensor(float(value))
            pieces = cuts(tensor) if tensor.dim() else [tensor] * len(params)
            for param, piece in zip(params, pieces, strict=True):
                found[id(param)][state] = piece.clone()
    return found


Cuts = Callable[[Tensor], Sequence[Tensor]]
"""Cuts a tensor of the master's shape into tensors of its parameters."""


def _list_masters(wrapped: Any, optimizer: Any) -> Iterator[tuple[Sequence[Any], Tensor, Cuts, dict[str, Tensor]]]:
    """Yields parameters, their master, how to cut them out of it, and states outside the optimizer."""
    if hasattr(wrapped, "fp32_partitioned_groups_flat"):  # ZeRO 3
        memory = getattr(wrapped, "muon_momentum_buffer_partitioned_groups_flat", {})
        for number, params in enumerate(wrapped.fp16_groups):
            more = {"momentum_buffer": memory[number]} if number in memory else {}
            yield params, wrapped.fp32_partitioned_groups_flat[number], _join_partitions(params), more
    elif hasattr(wrapped, "partition_count"):  # ZeRO 1 and 2, BF16_Optimizer
        held = getattr(wrapped, "round_robin_bit16_groups", None) or wrapped.bf16_groups
        masters = getattr(wrapped, "single_partition_of_fp32_groups", None) or wrapped.fp32_groups_flat_partition
        for params, master, group in zip(held, masters, wrapped.real_dp_process_group, strict=True):
            yield params, master, _cut_flat(params, group), {}
    elif hasattr(wrapped, "fp32_groups_flat"):  # FP16_Optimizer
        for params, master in zip(wrapped.fp16_groups, wrapped.fp32_groups_flat, strict=True):
            yield params, master, _cut_flat(params), {}
    else:
        masters = getattr(wrapped, "fp32_groups", None) or [group["params"] for group in optimizer.param_groups]
        held = getattr(wrapped, "fp16_groups", None) or masters
        for param, master in zip(chain(*held), chain(*masters), strict=True):
            yield [param], master, lambda tensor: [tensor], {}


def _find_group(wrapped: Any, params: Sequence[Any]) -> int:
    return next(number for number, held in enumerate(wrapped.round_robin_bit16_groups) if held is params)


def _cut_flat(params: Sequence[Any], group: Any = None) -> Cuts:
    def cut(tensor: Tensor) -> list[Tensor]:
        whole, start, pieces = torch.cat(_gather(tensor, group)) if group else tensor, 0, []
        for param in params:
            pieces.append(whole[start : start + param.numel()].view(param.shape))
            start += param.numel()
        return pieces

    return cut


def _join_partitions(params: Sequence[Any]) -> Cuts:
    def cut(tensor: Tensor) -> list[Tensor]:
        parts, start, pieces = _gather(tensor, None), 0, []
        for param in params:
            size = -(-param.ds_numel // len(parts))
            whole = torch.cat([part[start : start + size] for part in parts])
            pieces.append(whole[: param.ds_numel].view(param.ds_shape))
            start += size
        return pieces

    return cut


def _gather(tensor: Tensor, group: Any) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def join(parts: Sequence[States], find_cut: Callable[[str], int | None] = lambda _: None, tp: int = 1) -> States:
    """Join the states of all ranks; replicas have to be equal.

    Args:
        parts: by rank of the world.
        find_cut: returns the dimension along which tensor parallelism cuts a parameter, by its name.
        tp: tensor-parallel ranks.
    """
    lanes: dict[tuple[str, str], dict[int, Tensor]] = {}
    for rank, part in enumerate(parts):
        for key, tensor in part.items():
            is_cut = find_cut(key[0]) is not None and tensor.dim() > 0
            held = lanes.setdefault(key, {}).setdefault(rank % tp if is_cut else 0, tensor)
            assert torch.equal(held, tensor), (key, rank)
    return {
        key: torch.cat([held[lane] for lane in sorted(held)], find_cut(key[0]) or 0) if len(held) > 1 else held[0]
        for key, held in lanes.items()
    }
