"""Which rank holds which experts, and what its own parameters are: DeepSpeed's layers and AutoEP's.

The whole model has every expert's parameters, by the numbers in the whole layer; `own_models` says what each rank has
of them, under its own names and in its own param groups. A seat is a rank among those over which experts are spread
(`find_seat`): the data-parallel ones, or all of a pipeline stage. Sources: `deepspeed/utils/groups.py`,
`deepspeed/moe/utils.py` (`split_params_into_different_moe_groups_for_optimizer`), `module_inject/auto_ep_layer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from .description import Spread, find_seat

if TYPE_CHECKING:
    from .description import ExpertLayer, Model, Param, State, Topology


def list_held(layer: ExpertLayer, topology: Topology, degree: int, seat: int) -> tuple[int, ...]:
    """The experts of a layer, spread over `degree` ranks, that one of them holds, in its order."""
    place = expert_rank(topology, degree, seat)
    if layer.fused and topology.dealt:
        return tuple(range(place, layer.count, degree))
    own = layer.count // degree
    return tuple(range(place * own, (place + 1) * own))


def expert_rank(topology: Topology, degree: int, seat: int) -> int:
    """The expert-parallel rank of a seat."""
    return seat // (topology.seats // degree) if topology.data_first else seat % degree


def list_replicas(topology: Topology, degree: int, seat: int) -> range:
    """The seats that hold the same experts as one of them."""
    place, seats = expert_rank(topology, degree, seat), topology.seats
    replicas = seats // degree
    return range(place * replicas, (place + 1) * replicas) if topology.data_first else range(place, seats, degree)


def list_seats(model: Model, topology: Topology) -> range:
    """The seats of a lane's data-parallel ranks."""
    step = topology.tp if topology.folds_experts else 1
    return range(find_seat(model, topology, 0), find_seat(model, topology, topology.dp), step)


def held_layers(model: Model) -> list[ExpertLayer]:
    """The layers of experts that a pipeline stage has."""
    return [each for each in model.experts if any(param.name.startswith(each.prefix) for param in model.params)]


def largest_degree(model: Model, topology: Topology) -> int:
    """Of a stage's layers; DeepSpeed saves by its groups what is not of a single expert."""
    return max((degree_of(model, topology, layer) for layer in held_layers(model)), default=1)


def is_first_replica(model: Model, topology: Topology, degree: int, rank: int) -> bool:
    """Whether a data-parallel rank is the first of those that hold the same experts."""
    seat = find_seat(model, topology, rank)
    return list_replicas(topology, degree, seat)[0] == seat


def is_writer(model: Model, topology: Topology, layer: ExpertLayer, degree: int, rank: int) -> bool:
    """Whether a data-parallel rank saves what it holds of a layer: AutoEP under AutoTP has each lane save all."""
    if layer.fused and topology.folds_experts:
        return rank < degree
    return is_first_replica(model, topology, degree, rank)


def degree_of(model: Model, topology: Topology, layer: ExpertLayer) -> int:
    """Over how many ranks a layer's experts are spread."""
    return topology.ep[model.experts.index(layer)] if topology.ep else 1


def find_layer(model: Model, name: str) -> ExpertLayer | None:
    """The layer of an expert's parameter, by its name in the whole model or on a rank."""
    return next((layer for layer in model.experts if name.startswith(layer.prefix)), None)


def own_models(model: Model, topology: Topology) -> tuple[Model, ...]:
    """What each data-parallel rank's own module is; without experts it is the whole one."""
    if not model.experts:
        return (model,) * topology.dp
    return tuple(_make_own(model, topology, rank) for rank in range(topology.dp))


def own_state(state: State, own: Model) -> State:
    """The whole model's atoms with the hyper-parameters of a rank's own param groups."""
    if not own.spread:
        return state
    fixed = [{} if each.degree is None else {"name": f"ep_size_{each.degree}", "moe": True} for each in own.spread]
    groups = [state.groups[each.origin] for each in own.spread] if state.groups else []
    return replace(state, groups=tuple({**hyper, **more} for hyper, more in zip(groups, fixed, strict=bool(groups))))


def _make_own(model: Model, topology: Topology, rank: int) -> Model:
    params = list(chain.from_iterable(_name_own(model, topology, rank)))
    count = len(model.groups)
    spread = [Spread(group, None, list_seats(model, topology)) for group in range(count)]
    placed = {param.name: param for param in params}
    for group, degree, held in _cut_groups(model, topology, rank, params, count):
        for param in held:
            placed[param.name] = replace(param, group=len(spread))
        spread.append(Spread(group, degree, list_replicas(topology, degree, find_seat(model, topology, rank))))
    return replace(model, params=tuple(placed[param.name] for param in params), spread=tuple(spread))


def _name_own(model: Model, topology: Topology, rank: int) -> Iterator[list[Param]]:
    """The rank's parameters in the module's order; experts that lie in one tensor are in the place of the first."""
    seen: set[str] = set()
    for param in model.params:
        layer = find_layer(model, param.name)
        if layer is None:
            yield [param]
            continue
        held = list_held(layer, topology, degree_of(model, topology, layer), find_seat(model, topology, rank))
        number, end = layer.split(param.name)
        if not layer.fused:
            local = f"{layer.prefix}{held.index(number)}{end}" if number in held else ""
            yield [replace(param, name=local, parts=(param.name,))] if local else []
        elif (own := f"{layer.prefix}{end}") not in seen:
            seen.add(own)
            parts = tuple(f"{own}.{each}" for each in held)
            yield [replace(param, name=own, shape=(len(held), *param.shape), parts=parts)]


def _cut_groups(
    model: Model, topology: Topology, rank: int, params: Sequence[Param], count: int
) -> Iterator[tuple[int, int, list[Param]]]:
    """(the user's group, degree, its experts' parameters), in pieces of at most `max_group` elements."""
    degrees = {layer.prefix: degree_of(model, topology, layer) for layer in model.experts}
    order = sorted(set(degrees.values()), key=lambda degree: f"ep_size_{degree}")
    if topology.shuffled and rank % 2:
        order.reverse()
    for group in range(count):
        for degree in order:
            held = [p for p in params if p.parts and p.group == group and degrees[_prefix(model, p)] == degree]
            yield from ((group, degree, piece) for piece in _cut_pieces(held, topology.max_group))


def _prefix(model: Model, param: Param) -> str:
    layer = find_layer(model, param.name)
    assert layer is not None
    return layer.prefix


def _cut_pieces(params: Sequence[Param], limit: int | None) -> Iterator[list[Param]]:
    piece: list[Param] = []
    for param in params:
        if piece and limit is not None and sum(each.numel for each in piece) + param.numel > limit:
            yield piece
            piece = []
        piece.append(param)
    if piece:
        yield piece
