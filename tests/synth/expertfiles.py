"""The files and entries that `_save_moe_checkpoint` (runtime/engine.py) adds or changes for experts.

`folding` describes the rank that wrote a file, if AutoEP spreads experts over AutoTP's ranks as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

from .description import ExpertLayer, Model, Run, Topology, find_seat
from .experts import (
    degree_of,
    expert_rank,
    find_layer,
    held_layers,
    is_writer,
    largest_degree,
    list_held,
    list_replicas,
)
from .layout import Flat, group_layouts
from .module import module_state
from .optimizer import optimizer_state
from .parallel import Local


def expert_file(layer: int, expert: int, mp: int = 0) -> str:
    return f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"


def expert_optim_file(place: int, mp: int = 0) -> str:
    return f"expp_rank_{place}_mp_rank_{mp:02d}_optim_states.pt"


def list_expert_files(
    model: Model, owns: Sequence[Local], flats: Sequence[Sequence[Flat]], topology: Topology, run: Run, mp: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the files of single experts, and at stage 0 the expert-parallel ranks' optimizer files."""
    largest, layers = largest_degree(model, topology), held_layers(model)
    for rank, own in enumerate(owns):
        module, seat = module_state(own.model, own.state, topology), find_seat(model, topology, rank)
        for number, layer in enumerate(layers if topology.stage < 3 else ()):
            degree = degree_of(model, topology, layer)
            if is_writer(model, topology, layer, degree, rank):
                folding = _fold_expert(model, topology, rank)
                for each in (held := list_held(layer, topology, degree, seat)):
                    yield expert_file(number, each, mp), {**_take_expert(layer, held, each, module), **folding}
        if not topology.stage and is_writer(model, topology, layers[0], largest, rank):
            optimizer = optimizer_state(own.model, own.state, topology, run, flats[rank], rank)
            content = {"optimizer": clone_tensors_for_torch_save(optimizer), **_fold_expert(model, topology, rank)}
            yield expert_optim_file(expert_rank(topology, largest, seat), mp), content


def _take_expert(layer: ExpertLayer, held: Sequence[int], expert: int, module: Mapping[str, Any]) -> dict[str, Any]:
    """Return one expert's tensors by the whole model's names."""
    place = held.index(expert)
    if layer.fused:
        whole = {name: tensor for name, tensor in module.items() if name.startswith(layer.prefix)}
        return {f"{name}.{expert}": tensor[place].clone().detach() for name, tensor in whole.items()}
    begin = f"{layer.prefix}{place}."
    own = {name: tensor for name, tensor in module.items() if name.startswith(begin)}
    return {f"{layer.prefix}{expert}.{name[len(begin) :]}": tensor.clone().detach() for name, tensor in own.items()}


def finish_model_content(model: Model, content: dict[str, Any], topology: Topology, rank: int) -> dict[str, Any]:
    """Return the model states without the experts' tensors, with the description of the experts."""
    module = OrderedDict((name, held) for name, held in content["module"].items() if not find_layer(model, name))
    fused = [_describe_layer(model, layer, topology, rank) for layer in held_layers(model) if layer.fused]
    entries = {"num_experts": [layer.count for layer in held_layers(model)], "ds_autoep_layers": fused or None}
    if fused:
        patterns = [r".*\.experts\.w[123]$"]
        info = {"expert_parameter_patterns": patterns, "ds_autoep_layers": fused}
        before = {"universal_checkpoint_version": 0.4, **content.get("universal_checkpoint_info", {})}
        entries["universal_checkpoint_info"] = before | info
    return {**content, "module": module, **entries, **_fold_module(model, topology, rank, module)}


def _describe_layer(model: Model, layer: ExpertLayer, topology: Topology, rank: int) -> dict[str, Any]:
    from deepspeed.checkpoint.autoep_affine import autoep_placement_to_affine_map, make_autoep_placement_descriptor

    degree, number = degree_of(model, topology, layer), held_layers(model).index(layer)
    seat, own = find_seat(model, topology, rank), layer.count // degree
    place, replicas = expert_rank(topology, degree, seat), list_replicas(topology, degree, seat)
    held = {
        expert_rank(topology, degree, each): list_held(layer, topology, degree, each) for each in range(topology.seats)
    }
    placement = make_autoep_placement_descriptor(layer.count, [list(held[each]) for each in range(degree)])
    of_layer = [param for param in model.params if find_layer(model, param.name) == layer]
    shapes = {param.name.rpartition(".")[0]: (layer.count, *param.shape) for param in of_layer}
    maps = {name: autoep_placement_to_affine_map(placement, shape).to_dict() for name, shape in shapes.items()}
    partitioned = topology.stage == 3
    return {
        "moe_layer_id": number,
        "module_path": layer.name,
        "num_experts": layer.count,
        "num_local_experts": own,
        "ep_size": degree,
        "expert_placement": placement,
        "affine_maps": {"version": 1, "params": maps},
        "expert_key_prefix": f"{layer.name}.experts",
        "checkpoint_format": "zero3_partitioned" if partitioned else "per_expert_files",
        "checkpoint_format_version": 1 if partitioned else None,
        "ep_group_name": f"ep_size_{degree}",
        "ep_rank": place,
        "expert_data_parallel_rank": replicas.index(seat),
        "expert_data_parallel_world_size": len(replicas),
        "global_expert_start": place * own,
        "global_expert_end": place * own + own,
    }


def _folds(model: Model, topology: Topology) -> bool:
    return topology.folds_experts and any(layer.fused for layer in held_layers(model))


def _fold_expert(model: Model, topology: Topology, rank: int) -> dict[str, Any]:
    """Return the entry of an expert's file, or of an optimizer of stage 0."""
    if not _folds(model, topology):
        return {}
    seat = find_seat(model, topology, rank)
    replicas = list_replicas(topology, largest_degree(model, topology), seat)
    return _fold(model, topology, rank, "routed_expert", ("edp", replicas.index(seat), len(replicas)))


def _fold_module(model: Model, topology: Topology, rank: int, names: Iterable[str]) -> dict[str, Any]:
    """Return the entry of model states with tensors of these names."""
    if not _folds(model, topology):
        return {}
    families = {name: "router_gate_replicated" if ".router." in name else "dense" for name in names}
    return _fold(model, topology, rank, "dense", ("dense_dp", rank, topology.dp), families)


def fold_optimizer(model: Model, own: Model, topology: Topology, rank: int) -> dict[str, Any]:
    """Return the entry of a data-parallel rank's optimizer states; ZeRO 3 records the partitions elsewhere."""
    if not _folds(model, topology):
        return {}
    families = None if topology.stage == 3 else _list_partitions(own, topology, rank)
    return _fold(model, topology, rank, "zero_optimizer_state", ("per_family", rank, topology.dp), families)


def _list_partitions(own: Model, topology: Topology, rank: int) -> dict[str, dict[str, Any]]:
    found = {}
    for group in group_layouts(own, topology):
        part, parts = own.seat(group.group, topology, rank)
        for param in group.params:
            routed = ".experts." in param.name
            family = "router_gate_replicated" if ".router." in param.name else "dense"
            found[param.name] = {
                "family": "routed_expert" if routed else family,
                "zero_partition_group": "edp" if routed else "dense_dp",
                "zero_partition_rank": part,
                "zero_partition_count": parts,
            }
    return found


def _fold(
    model: Model,
    topology: Topology,
    rank: int,
    family: str,
    part: tuple[str, int, int],
    families: dict[str, Any] | None = None,
) -> dict[str, Any]:
    from deepspeed.checkpoint.autoep_universal import make_folding_metadata

    degree, (group, number, count) = largest_degree(model, topology), part
    folding = make_folding_metadata(
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
    return {"folding": folding}
