"""What DeepSpeed's own load would not notice in an unchanged topology: then ours runs, which restores or refuses it."""

from __future__ import annotations

from collections.abc import Iterator

from ..atoms import MODULE, AtomicIndex, ParamKey
from ..plan.wants import list_states
from ..targets import Target
from ..targets.optimizer import find_other_kind
from .direct import LoadArguments


def find_unnoticed(index: AtomicIndex, target: Target, arguments: LoadArguments) -> list[str]:
    """What differs although the topologies are equal, in words.

    Args:
        index: of the whole checkpoint.
        target: this rank's, of an equal topology.
    """
    found: list[str] = []
    if target.wrapper == "zero3":
        found += _find_fresh(index, target) if arguments.load_module_strict else []
        # Of these DeepSpeed's own load takes the latest tag's, whichever it was given, or with load_module_only none.
        found += [] if arguments.with_states else ["weights alone of ZeRO 3"]
    if arguments.with_states and target.optimizer is not None:
        found += dict.fromkeys(_find_other_kinds(index, target))
    return found


def _find_fresh(index: AtomicIndex, target: Target) -> Iterator[str]:
    """ZeRO-3 parameters in no optimizer, which DeepSpeed restores where they were frozen alone, and by their size."""
    for name in sorted(target.params.keys() - target.owned):
        saved = index.find(index.resolve(name), MODULE)
        if saved is None and name not in index.limits.unreadable:
            yield f"{name} is not in the checkpoint as a parameter without optimizer"
        elif saved is not None and saved.shards[target.place.tp_rank].shape != target.shape_of(name):
            yield f"{name} has another shape"


def _find_other_kinds(index: AtomicIndex, target: Target) -> Iterator[str]:
    """Optimizers of another kind, whose states torch's ``load_state_dict`` takes as they are."""
    states = list_states(index)
    for name in index.limits.irregular:
        param, _, state = name.rpartition(".")
        states.setdefault(ParamKey(param), {})[state] = "of no known dtype"
    groups = {param: group.hyper for group in index.run.groups for param in group.members}
    for flat in target.flats:
        params = [ParamKey(index.resolve(name)) for name in flat.names]
        saved = set().union(*(states.get(param, ()) for param in params))
        hyper = next((groups[param] for param in params if param in groups), {})
        if flat.holder is not None and saved:
            scalars = set().union(*(index.run.scalars.get(param, ()) for param in params))
            told = find_other_kind(target.optimizer, target.param_group(flat), hyper, saved, flat.holder, scalars)
            yield from [told] if told else []
