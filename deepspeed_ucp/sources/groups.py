"""Param groups of the whole model from those of its model-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..atoms import GroupInfo, ParamKey
from ..errors import CheckpointError
from .family import Save


def join_ranks(save: Save, groups: Sequence[Sequence[GroupInfo]]) -> list[list[GroupInfo]]:
    """Param groups per pipeline stage; a tensor-parallel rank may lack parameters that are empty there.

    Args:
        save: the files.
        groups: per model-parallel rank.
    """
    joined = []
    for stage in range(save.pp):
        ranks = groups[stage * save.tp : (stage + 1) * save.tp]
        members = [dict.fromkeys(m for rank in ranks for m in rank[i].members) for i in range(len(ranks[0]))]
        joined.append([GroupInfo(tuple(held), group.hyper) for held, group in zip(members, ranks[0], strict=True)])
    return joined


def merge_groups(stages: Sequence[Sequence[GroupInfo]]) -> tuple[GroupInfo, ...]:
    """The param groups of the whole model from those of its pipeline stages.

    Groups are matched by position where all stages agree about the hyper-parameters. Elsewhere by their
    hyper-parameters, the n-th with the n-th of the same ones: DeepSpeed drops the groups that are empty on a stage.
    """
    hypers = [[group.hyper for group in groups] for groups in stages]
    if all(hyper == hypers[0] for hyper in hypers):
        joined = [dict.fromkeys(each for groups in stages for each in groups[i].members) for i in range(len(hypers[0]))]
        return tuple(GroupInfo(tuple(held), hyper) for held, hyper in zip(joined, hypers[0], strict=True))
    merged: list[tuple[dict[ParamKey, None], dict[str, Any]]] = []
    for groups in stages:
        free = list(range(len(merged)))
        for group in groups:
            place = next((i for i in free if merged[i][1] == group.hyper), None)
            if place is None:
                merged.append((dict.fromkeys(group.members), group.hyper))
            else:
                free.remove(place)
                merged[place][0].update(dict.fromkeys(group.members))
    return tuple(GroupInfo(tuple(members), hyper) for members, hyper in merged)


def check_steps(
    save: Save, groups: Sequence[Sequence[GroupInfo]], scalars: Mapping[ParamKey, Mapping[str, Any]]
) -> None:
    """Refuse a pipeline stage whose files are of another step: none of its parameters has a step that others have.

    Args:
        save: the files.
        groups: per model-parallel rank.
        scalars: the optimizer's scalars by parameter.

    Raises:
        CheckpointError: naming the stage's file.
    """
    steps: list[set[Any]] = []
    for stage in range(save.pp):
        members = (member for group in groups[stage * save.tp] for member in group.members)
        steps.append({scalars[member]["step"] for member in members if "step" in scalars.get(member, {})})
    first = next((held for held in steps if held), set())
    for stage, held in enumerate(steps):
        if held and held.isdisjoint(first):
            files = save.shards[stage * save.tp] or save.models[stage * save.tp]
            raise CheckpointError(
                f"{save.path(files[0])}: has step {min(held)}, other stages of this checkpoint have {min(first)}. The "
                "file belongs to another step or run; put the right one back."
            )
