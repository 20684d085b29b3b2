"""Experts in files of ZeRO 1, 2 and 3: which ranks hold which experts of a param group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import CheckpointError
from ...formats.deepspeed.save import Save
from ...formats.deepspeed.zero import GroupShare
from ...model import strip_compiled
from ...model.flat import Shape
from .files import ExpertFiles, list_holders
from .names import count_experts, find_layer, name_experts


def deal_group(
    experts: ExpertFiles, save: Save, mp: int, number: int, group: Sequence[tuple[str, Shape]]
) -> list[GroupShare]:
    """Determine which ranks hold which experts of a group; the model states number each rank's experts from 0.

    The number of experts on a rank follows from the experts' files, as a group may lack frozen ones.

    Args:
        mp: model-parallel rank.
        number: of the group.
        group: its parameters.

    Returns:
        Nothing for a group without experts.

    Raises:
        CheckpointError: the number of files or AutoEP's placement contradict the group.
    """
    placements, optim = save.model(mp).facts.get("placements", {}), save.shards[mp][0].optim
    counts = optim.partition_count if optim else ()
    expert_counts = count_experts(name for name, _ in group) if experts.files else {}
    if not expert_counts and not any(find_layer(name, placements) for name, _ in group):
        return []
    over_tp = experts.is_over_tp(save)
    replicas = counts[number] if number < len(counts) else save.dp
    holders = _find_holders(save, mp, replicas, over_tp=over_tp)
    _check_placements(save, mp, group, len(holders))
    shares = _share_experts(save, expert_counts, experts.counts, len(holders))
    dealt, is_named = [], over_tp or len(holders) > 1
    for place, ranks in enumerate(holders):
        numbers: dict[str, Sequence[int]] = {
            layer: range(place * share, (place + 1) * share) for layer, share in shares.items()
        }
        numbers |= {layer: placement[place] for layer, placement in placements.items() if place < len(placement)}
        if is_named:
            _check_writers(save, mp // save.tp, place, ranks, over_tp=over_tp)
        parts = {
            name: name_experts(name, shape, numbers[layer]) if (layer := find_layer(name, numbers)) else {name: shape}
            for name, shape in group
        }
        dealt.append(GroupShare(ranks, dict(group), parts, over_tp, is_named))
    return dealt


def _check_writers(save: Save, stage: int, place: int, ranks: range, *, over_tp: bool) -> None:
    """Verify the rank that AutoEP recorded in each file of an expert-parallel rank.

    Under ZeRO 3 such a save has no copies of the experts to compare.
    """
    for rank in ranks:
        shard, header = save.shard(stage, rank), save.models[stage * save.tp + rank % save.tp]
        folding = shard.writer.get("folding")
        if over_tp and folding not in (None, (rank % save.tp, place)):
            raise CheckpointError(
                f"is of tensor- and expert-parallel rank {folding}, but its name and the degrees require "
                f"{(rank % save.tp, place)}. The file belongs to another run; put the right one back.",
                path=save.path(shard),
            )
        if save.is_sharded and (ep_rank := header[rank // save.tp].writer.get("ep_rank")) != place:
            raise CheckpointError(
                f"is of expert-parallel rank {ep_rank}, but the degrees require {place}. The file belongs to "
                "another run; put the right one back.",
                path=save.path(header[rank // save.tp]),
            )


def _share_experts(save: Save, counts: Mapping[str, int], totals: Mapping[str, int], degree: int) -> dict[str, int]:
    """Return layer → number of experts on one expert-parallel rank.

    Args:
        expert_counts: layer → experts in a rank's param group.
        totals: layer → experts with files.
    """
    for layer, count_held in counts.items():
        total = totals.get(strip_compiled(layer), 0)
        if total % degree or total // degree < count_held:
            raise CheckpointError(
                f"lists {count_held} experts in {layer} on each of {degree} expert-parallel ranks, but {total} experts "
                "of the layer have files. The folder lacks files or mixes two saves.",
                path=save.path(save.main),
            )
    return {layer: totals.get(strip_compiled(layer), 0) // degree for layer in counts}


def _find_holders(save: Save, mp: int, replicas: int, *, over_tp: bool) -> list[range]:
    ranks = save.dp * save.tp if over_tp else save.dp
    if replicas < 1 or ranks % replicas:
        raise CheckpointError(
            f"has a param group in {replicas} partitions, which does not divide the {ranks} ranks that hold the model. "
            "The file is of another save.",
            path=save.path(save.shards[mp][0]),
        )
    return list_holders(save, mp, ranks // replicas, over_tp=over_tp)


def _check_placements(save: Save, mp: int, group: Sequence[tuple[str, Shape]], degree: int) -> None:
    """Verify that AutoEP's placement has as many experts and ranks as the parameters."""
    placements = save.model(mp).facts.get("placements", {})
    for name, shape in group:
        placement = placements.get(find_layer(name, placements) or "", ())
        if placement and (len(placement) != degree or any(shape[:1] != (len(experts),) for experts in placement)):
            raise CheckpointError(
                f"{name} of shape {shape} is spread over {degree} expert-parallel ranks, but the expert placement has "
                f"{[len(experts) for experts in placement]} experts on the ranks. The file is of another save.",
                path=save.path(save.models[mp][0]),
            )
