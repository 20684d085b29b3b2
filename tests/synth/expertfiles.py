"""What `_save_moe_checkpoint` (runtime/engine.py) writes beside, and otherwise than, a save without experts."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

from .description import find_seat
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
from .folding import tell_expert, tell_module
from .module import module_state
from .optimizer import optimizer_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .description import ExpertLayer, Model, Run, Topology
    from .layout import Flat
    from .parallel import Local


def expert_file(layer: int, expert: int, mp: int = 0) -> str:
    return f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"


def expert_optim_file(place: int, mp: int = 0) -> str:
    return f"expp_rank_{place}_mp_rank_{mp:02d}_optim_states.pt"


def list_expert_files(
    model: Model, owns: Sequence[Local], flats: Sequence[Sequence[Flat]], topology: Topology, run: Run, mp: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every expert's file, and at stage 0 the optimizers of the expert-parallel ranks; of what each rank holds."""
    largest, layers = largest_degree(model, topology), held_layers(model)
    for rank, own in enumerate(owns):
        module, seat = module_state(own.model, own.state, topology), find_seat(model, topology, rank)
        for number, layer in enumerate(layers if topology.stage < 3 else ()):
            degree = degree_of(model, topology, layer)
            if is_writer(model, topology, layer, degree, rank):
                told = tell_expert(model, topology, rank)
                for each in (held := list_held(layer, topology, degree, seat)):
                    yield expert_file(number, each, mp), {**_take_expert(layer, held, each, module), **told}
        if not topology.stage and is_writer(model, topology, layers[0], largest, rank):
            optimizer = optimizer_state(own.model, own.state, topology, run, flats[rank], rank)
            content = {"optimizer": clone_tensors_for_torch_save(optimizer), **tell_expert(model, topology, rank)}
            yield expert_optim_file(expert_rank(topology, largest, seat), mp), content


def _take_expert(layer: ExpertLayer, held: Sequence[int], expert: int, module: Mapping[str, Any]) -> dict[str, Any]:
    """One expert's tensors by the whole model's names."""
    place = held.index(expert)
    if layer.fused:
        whole = {name: tensor for name, tensor in module.items() if name.startswith(layer.prefix)}
        return {f"{name}.{expert}": tensor[place].clone().detach() for name, tensor in whole.items()}
    begin = f"{layer.prefix}{place}."
    own = {name: tensor for name, tensor in module.items() if name.startswith(begin)}
    return {f"{layer.prefix}{expert}.{name[len(begin) :]}": tensor.clone().detach() for name, tensor in own.items()}


def finish_model_content(model: Model, content: dict[str, Any], topology: Topology, rank: int) -> dict[str, Any]:
    """The model states without experts, with what is told of them."""
    module = OrderedDict((name, held) for name, held in content["module"].items() if not find_layer(model, name))
    fused = [_describe_layer(model, layer, topology, rank) for layer in held_layers(model) if layer.fused]
    told = {"num_experts": [layer.count for layer in held_layers(model)], "ds_autoep_layers": fused or None}
    if fused:
        patterns = [r".*\.experts\.w[123]$"]
        info = {"expert_parameter_patterns": patterns, "ds_autoep_layers": fused}
        before = {"universal_checkpoint_version": 0.4, **content.get("universal_checkpoint_info", {})}
        told["universal_checkpoint_info"] = before | info
    return {**content, "module": module, **told, **tell_module(model, topology, rank, module)}


def _describe_layer(model: Model, layer: ExpertLayer, topology: Topology, rank: int) -> dict[str, Any]:
    """`ds_autoep_layers` has one of these per layer."""
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
