"""What AutoEP tells of the ranks that wrote a file where it spreads experts over AutoTP's ranks as well (folding)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .description import find_seat
from .experts import expert_rank, held_layers, largest_degree, list_replicas
from .layout import group_layouts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .description import Model, Topology


def folds(model: Model, topology: Topology) -> bool:
    return topology.folds_experts and any(layer.fused for layer in held_layers(model))


def tell_expert(model: Model, topology: Topology, rank: int) -> dict[str, Any]:
    """Beside an expert's tensors, or the optimizer of stage 0."""
    if not folds(model, topology):
        return {}
    replicas = list_replicas(topology, largest_degree(model, topology), find_seat(model, topology, rank))
    part = ("edp", replicas.index(find_seat(model, topology, rank)), len(replicas))
    return _tell(model, topology, rank, "routed_expert", part)


def tell_module(model: Model, topology: Topology, rank: int, names: Iterable[str]) -> dict[str, Any]:
    """Beside the model states, whose tensors have these names."""
    if not folds(model, topology):
        return {}
    families = {name: find_family(name, experts=False) for name in names}
    return _tell(model, topology, rank, "dense", ("dense_dp", rank, topology.dp), families)


def tell_optimizer(model: Model, own: Model, topology: Topology, rank: int) -> dict[str, Any]:
    """Beside the states of a data-parallel rank's partitions; of ZeRO 3 those tell themselves who holds them."""
    if not folds(model, topology):
        return {}
    families = None if topology.stage == 3 else _list_partitions(own, topology, rank)
    part = ("per_family", rank, topology.dp)
    return _tell(model, topology, rank, "zero_optimizer_state", part, families)


def _list_partitions(own: Model, topology: Topology, rank: int) -> dict[str, dict[str, Any]]:
    found = {}
    for group in group_layouts(own, topology):
        part, parts = own.seat(group.group, topology, rank)
        for param in group.params:
            family = find_family(param.name)
            found[param.name] = {
                "family": family,
                "zero_partition_group": "edp" if family == "routed_expert" else "dense_dp",
                "zero_partition_rank": part,
                "zero_partition_count": parts,
            }
    return found


def find_family(name: str, *, experts: bool = True) -> str:
    if experts and ".experts." in name:
        return "routed_expert"
    return "router_gate_replicated" if ".router." in name else "dense"


def _tell(
    model: Model,
    topology: Topology,
    rank: int,
    family: str,
    part: tuple[str, int, int],
    families: dict[str, Any] | None = None,
) -> dict[str, Any]:
    from deepspeed.checkpoint.autoep_universal import make_folding_metadata

    degree, (group, number, count) = largest_degree(model, topology), part
    told = make_folding_metadata(
        tp_size=topology.tp,
        tp_rank=model.lane,
        ep_size=degree,
        ep_rank=expert_rank(topology, degree, find_seat(model, topology, rank)),
        zero_partition_group=group,
        zero_partition_rank=number,
        zero_partition_count=count,
        family=family,
        param_families=families,
    )
    return {"folding": told}
