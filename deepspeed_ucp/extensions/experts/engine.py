"""Mixture-of-experts in a live engine: DeepSpeed's layers and AutoEP's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from deepspeed import comm as ds_comm
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups

from ...engine.base import Target
from ...engine.coverage import UnknownLayoutError
from ...engine.parallel import ParallelState, Share
from ...errors import UnsupportedError
from ...model.flat import Shape
from ...model.view import EngineBuffer
from ..registry import Extension
from .names import find_layer, is_expert, name_experts

PLACEMENT = "expert_placement_descriptor"
"""Attribute of AutoEP's layers (``module_inject/auto_ep_layer.py``): the experts of each rank."""


@dataclass(frozen=True, slots=True)
class LocalExperts(Share):
    """A rank's experts of a layer, by number in the layer, in the rank's order."""

    numbers: Sequence[int]

    def name_parts(self, name: str, shape: Shape) -> dict[str, Shape]:
        return name_experts(name, shape, [self.numbers])[0]


class LiveExperts(Extension):
    """An engine with experts."""

    def find_shares(self, target: Target) -> dict[str, LocalExperts]:
        module = target.engine.module
        tensors = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        return share_out(find_experts(target.engine, target.parallel), (name for name, _ in chain(*tensors)))

    def complete_extras(self, target: Target, extras: list[EngineBuffer]) -> list[EngineBuffer]:
        for name in target.fused_indices:
            if name not in target.owned and hasattr(target.params[name], "ds_tensor"):
                raise UnsupportedError(
                    f"{name}: ZeRO 3 does not save frozen parameters of AutoEP's experts. Resume at ZeRO 0 to 2, or "
                    "without freezing it."
                )
        return extras

    def list_unknown(self, target: Target) -> Iterator[str]:
        """Describe experts with which DeepSpeed's load is not known to be right.

        DeepSpeed looks for a process's experts under its tensor-parallel rank, which is right if that degree divides
        the expert-parallel degree.
        """
        if any(map(is_expert, target.params.keys() - target.owned)):
            yield "frozen experts"  # at ZeRO 2 every rank gets the first rank's
        layers = target.shares.values()
        is_regular = all(not layer.unsharded or layer.degree % target.parallel.tp == 0 for layer in layers)
        if not (is_regular and len({layer.degree for layer in layers}) <= 1):
            yield "experts of other ranks or degrees"
        elif layers and target.topology.zero_stage == 3:
            yield "experts"
        if layers and target.engine.use_node_local_storage():
            yield "node-local files"  # one node writes files that others read

    def describe_engine(self, engine: Any) -> dict[str, Any]:
        layers = list(engine.module.modules())
        facts: dict[str, Any] = {
            "experts per layer": list(engine.num_experts),
            "AutoEP placement": [getattr(layer, PLACEMENT) for layer in layers if hasattr(layer, PLACEMENT)],
        }
        if hasattr(engine.optimizer, "partition_count"):
            return facts
        # At stage 0 dense parameters have any number of replicas, experts are distributed over ranks. With several
        # degrees the files contain only the largest.
        sizes = sorted({layer.ep_size for layer in layers if hasattr(layer, "ep_size")})
        facts |= {"data-parallel ranks": int(engine.seq_dp_world_size), "expert-parallel ranks": sizes[-1]}
        return facts if len(sizes) == 1 else {**facts, "expert-parallel degrees": sizes}


def share_out(layers: Mapping[str, LocalExperts], names: Iterable[str]) -> dict[str, LocalExperts]:
    """Map experts' parameters to their layer's entry; ``layers`` are by name prefix."""
    return {name: layers[layer] for name in names if (layer := find_layer(name, layers))}


def find_experts(engine: Any, parallel: ParallelState) -> dict[str, LocalExperts]:
    """Return this rank's experts of each layer, by the prefix of their parameters.

    Raises:
        UnknownLayoutError: ranks with the same experts are not evenly spaced, or tensor-parallel ranks not adjacent.
    """
    layers = {}
    for name, module in engine.module.named_modules(remove_duplicate=False):  # tied layers under every name
        prefix = f"{name}." if name else ""
        if isinstance(module, MoE):
            group, end = module.expert_group_name, "deepspeed_moe.experts.deepspeed_experts."
            first = groups._get_expert_parallel_rank(group) * module.num_local_experts
            numbers: Sequence[int] = range(first, first + module.num_local_experts)
        elif getattr(module, "_is_autoep_layer", False):
            group, end = module.ep_group_name, "experts."
            numbers = _list_autoep_experts(module)
        else:
            continue
        peers = ds_comm.get_all_ranks_from_group(engine.seq_data_parallel_group)
        replicas = ds_comm.get_all_ranks_from_group(groups._get_expert_data_parallel_group(group))
        sharing = ds_comm.get_all_ranks_from_group(groups._get_expert_parallel_group(group))
        over_tp = not {*replicas, *sharing} <= {*peers}
        stage_ranks = _number_ranks(replicas, peers, parallel, over_tp=over_tp)
        ranks = None if not over_tp and len(stage_ranks) == len(peers) else stage_ranks
        is_first = replicas[0] == ds_comm.get_rank()
        layers[f"{prefix}{end}"] = LocalExperts(len(sharing), ranks, over_tp, is_first, numbers)
    return layers


def _list_autoep_experts(layer: Any) -> Sequence[int]:
    placement = getattr(layer, PLACEMENT, None)
    if placement is None:  # up to 0.19.5; a rank's experts are consecutive
        first = layer.ep_rank * layer.num_local_experts
        return range(first, first + layer.num_local_experts)
    return tuple({entry["rank"]: entry["experts"] for entry in placement["ranks"]}[layer.ep_rank])


def _number_ranks(ranks: Sequence[int], peers: Sequence[int], parallel: ParallelState, *, over_tp: bool) -> range:
    """Convert global ranks to ranks of their pipeline stage.

    Args:
        peers: this rank's data-parallel group.
        over_tp: ``ranks`` may contain ranks of other data-parallel groups.
    """
    first = peers[0] - parallel.tp_rank
    if over_tp and peers != [first + rank * parallel.tp + parallel.tp_rank for rank in range(parallel.dp)]:
        raise UnknownLayoutError(
            f"experts are distributed over tensor-parallel ranks, and data-parallel ranks are numbered {peers}. Number "
            f"tensor-parallel ranks side by side (every {parallel.tp}th rank in this rank's data-parallel group)"
        )
    numbers = [rank - first if over_tp else peers.index(rank) * parallel.tp + parallel.tp_rank for rank in ranks]
    spaced = range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0] if len(numbers) > 1 else 1)
    if list(spaced) != numbers:
        raise UnknownLayoutError(f"ranks {numbers} of a stage have the same experts, but are not evenly spaced")
    return spaced
