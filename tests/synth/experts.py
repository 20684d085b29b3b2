"""Assigns experts to ranks, and describes each rank's module: DeepSpeed's layers and AutoEP's.

The whole model has every expert's parameters with the numbers in the whole layer; `own_models` returns each rank's part
with local names and param groups. A seat is a rank among those over which experts are spread (`find_seat`): the
data-parallel ranks, or all ranks of a pipeline stage. Sources: `deepspeed/utils/groups.py`,
`deepspeed/moe/utils.py` (`split_params_into_different_moe_groups_for_optimizer`), `module_inject/auto_ep_layer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from .description import ExpertLayer, Model, Param, Spread, State, Topology, find_seat


def list_held(layer: ExpertLayer, topology: Topology, degree: int, seat: int) -> tuple[int, ...]:
    """Return the experts that a seat holds of a layer that is spread over `degree` ranks, in the rank's order."""
    place = expert_rank(topology, degree, seat)
    if layer.fused and topology.dealt:
        return tuple(range(place, layer.count, degree))
    share = layer.count // degree
    return tuple(range(place * share, (place + 1) * share))


def expert_rank(topology: Topology, degree: int, seat: int) -> int:
    return seat // (topology.seats // degree) if topology.data_first else seat % degree


def list_replicas(topology: Topology, degree: int, seat: int) -> range:
    """Return the seats that hold the same experts."""
    place, seats = expert_rank(topology, degree, seat), topology.seats
    replicas = seats // degree
    return range(place * replicas, (place + 1) * replicas) if topology.data_first else range(place, seats, degree)


def held_layers(model: Model) -> list[ExpertLayer]:
    """Return the layers of experts of a pipeline stage."""
    return [each for each in model.experts if any(param.name.startswith(each.prefix) for param in model.params)]


def largest_degree(model: Model, topology: Topology) -> int:
    """Return the largest degree of a stage's layers, whose groups save everything except single experts."""
    return max((degree_of(model, topology, layer) for layer in held_layers(model)), default=1)


def is_writer(model: Model, topology: Topology, layer: ExpertLayer, degree: int, rank: int) -> bool:
    """Return True if a data-parallel rank saves its experts; with AutoEP under AutoTP each lane saves all experts."""
    if layer.fused and topology.folds_experts:
        return rank < degree
    seat = find_seat(model, topology, rank)
    return list_replicas(topology, degree, seat)[0] == seat


def degree_of(model: Model, topology: Topology, layer: ExpertLayer) -> int:
    """Return the number of ranks over which a layer's experts are spread."""
    return topology.ep[model.experts.index(layer)] if topology.ep else 1


def find_layer(model: Model, name: str) -> ExpertLayer | None:
    """Return the layer of an expert's parameter, by its global or local name, or None."""
    return next((layer for layer in model.experts if name.startswith(layer.prefix)), None)


def own_models(model: Model, topology: Topology) -> tuple[Model, ...]:
    if not model.experts:
        return (model,) * topology.dp
    return tuple(_make_own(model, topology, rank) for rank in range(topology.dp))


def own_state(state: State, own: Model) -> State:
    """Return the whole state with the hyper-parameters of a rank's param groups."""
    if not own.spread:
        return state
    fixed = [{} if each.degree is None else {"name": f"ep_size_{each.degree}", "moe": True} for each in own.spread]
    groups = [state.groups[each.origin] for each in own.spread] if state.groups else []
    return replace(state, groups=tuple({**hyper, **more} for hyper, more in zip(groups, fixed, strict=bool(groups))))


def _make_own(model: Model, topology: Topology, rank: int) -> Model:
    params = list(chain.from_iterable(_name_own(model, topology, rank)))
    count = len(model.groups)
    first, end = find_seat(model, topology, 0), find_seat(model, topology, topology.dp)
    dense = range(first, end, topology.tp if topology.folds_experts else 1)
    spread = [Spread(group, None, dense) for group in range(count)]
    placed = {param.name: param for param in params}
    for group, degree, held in _cut_groups(model, topology, rank, params, count):
        for param in held:
            placed[param.name] = replace(param, group=len(spread))
        spread.append(Spread(group, degree, list_replicas(topology, degree, find_seat(model, topology, rank))))
    return replace(model, params=tuple(placed[param.name] for param in params), spread=tuple(spread))


def _name_own(model: Model, topology: Topology, rank: int) -> Iterator[list[Param]]:
    """Yield the rank's parameters in module order; a fused parameter has the place of its first expert."""
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
    """Yield (user's group, degree, parameters of experts) in pieces of at most `max_group` elements."""
    layers = {param.name: find_layer(model, param.name) for param in params}
    degrees = {name: degree_of(model, topology, layer) for name, layer in layers.items() if layer}
    order = sorted({degree_of(model, topology, each) for each in model.experts}, key=lambda degree: f"ep_size_{degree}")
    if topology.shuffled and rank % 2:
        order.reverse()
    for group in range(count):
        for degree in order:
            held = [p for p in params if p.parts and p.group == group and degrees[p.name] == degree]
            yield from ((group, degree, piece) for piece in _cut_pieces(held, topology.max_group))


def _cut_pieces(params: Sequence[Param], limit: int | None) -> Iterator[list[Param]]:
    piece: list[Param] = []
    for param in params:
        if piece and limit is not None and sum(each.numel for each in piece) + param.numel > limit:
            yield piece
            piece = []
        piece.append(param)
    if piece:
        yield piece
