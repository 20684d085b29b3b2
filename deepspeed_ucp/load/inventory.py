"""The tensors of the live engine over all its ranks, and how they relate to the checkpoint's shards."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from ..comm import Comm
from ..engine import LiveBuffer, Target
from ..engine.parallel import live_attributes, live_universal_info
from ..errors import MismatchError, shorten
from ..formats.deepspeed.naming import CHANGING
from ..model import AtomicIndex, number_layer
from ..model.flat import Shape
from ..model.topology import number_groups
from ..plan.match import Match, TargetInventory
from ..plan.renames import list_names
from ..plan.settling import Shapes, settle_index
from ..tensor_parallel import RuleSet, Settled, find_idle, from_attributes, from_universal_info, list_renames

logger = logging.getLogger("deepspeed_ucp")


def gather_inventory(target: Target, extras: Sequence[LiveBuffer], comm: Comm) -> TargetInventory:
    """Gather the tensors of every model-parallel rank (collective).

    Raises:
        MismatchError: tensor-parallel ranks of one stage hold different tensors.
    """
    place = target.place
    ordinals = {name: (each.ordinal, each.count) for name, each in target.instances().items()}

    def report() -> tuple[int, TargetInventory] | None:
        """Return this rank's tensors; only the first replica reports."""
        if not target.is_first_replica:
            return None
        return place.tp_rank, TargetInventory(
            {name: (shape,) for name, shape in target.owned_shapes().items() if target.speaks_for(name)},
            {extra.name: (extra.shape,) for extra in extras if target.speaks_for(extra.name)},
            target.aliases,
            counts={name: total for name, (_, total) in ordinals.items()},
            attributes=live_attributes(target.engine) if not place.dp_rank else {},
            info=live_universal_info(target.engine),
            experts_over_tp=target.experts_over_tp,
        )

    parts = [each for each in comm.each(report) if each is not None]
    return comm.run(lambda: _join(parts, ordinals, place.tp))


def _join(
    parts: Sequence[tuple[int, TargetInventory]], ordinals: Mapping[str, tuple[int, int]], tp: int
) -> TargetInventory:
    """Join the tensors of all model-parallel ranks, each with its tensor-parallel rank."""
    aliases: dict[str, str] = {}
    counts: dict[str, int] = {}
    attributes: dict[str, Mapping[str, Any]] = {}
    for _, part in parts:
        aliases.update(part.aliases)
        counts.update(part.counts)
        attributes.update(part.attributes)
    experts_over_tp = {name for _, part in parts for name in part.experts_over_tp}
    return TargetInventory(
        _order([(rank, part.owned) for rank, part in parts], tp, experts_over_tp),
        _order([(rank, part.extras or {}) for rank, part in parts], tp, experts_over_tp),
        aliases,
        ordinals,
        counts=counts,
        attributes=attributes,
        info=next((part.info for _, part in parts if part.info), None),
        tp=tp,
        experts_over_tp=experts_over_tp,
    )


def _order(parts: Iterable[tuple[int, Shapes]], tp: int, experts_over_tp: Set[str]) -> Shapes:
    ranks_of: dict[str, dict[int, Shape]] = {}
    for tp_rank, shapes in parts:
        for name, (shape,) in shapes.items():
            ranks_of.setdefault(name, {})[0 if name in experts_over_tp else tp_rank] = shape
    partial = [name for name, held in ranks_of.items() if len(held) != tp and name not in experts_over_tp]
    if partial:
        raise MismatchError(
            f"Tensor-parallel ranks hold different tensors: {shorten(partial)} are not on every one of the {tp} ranks. "
            "Build the same model on all ranks, with the mpu or the tensor_parallel section of the run that saved it."
        )
    return {name: tuple(held[rank] for rank in range(len(held))) for name, held in ranks_of.items()}


def check_alike(live: TargetInventory, target: Target, extras: Iterable[LiveBuffer]) -> None:
    """Compare this rank's tensors with those that data-parallel rank 0 has reported.

    Raises:
        MismatchError: they differ.
    """
    counted, tp_shard_of = live.shapes, target.tp_shard_of
    shapes = {**target.owned_shapes(), **{extra.name: extra.shape for extra in extras}}
    odd = [f"{n} {shape}" for n, shape in shapes.items() if n not in counted or counted[n][tp_shard_of(n)] != shape]
    if odd:
        raise MismatchError(
            f"Data-parallel ranks hold different tensors: here {shorten(odd)}, not on rank 0. Build the same model, "
            "with the same parameters frozen, on all ranks."
        )


Group = list[tuple[str, bool]]
"""The parameters of a param group: (raw name, owned by the optimizer)."""


JoinedGroups = tuple[list[Group], list[dict[str, Any]], dict[str, str]]
"""Param groups, their hyper-parameters, and the names of the module's parameters (:meth:`Target.list_names`)."""

StageGroups = tuple[int, list[Group], list[dict[str, Any]], dict[str, str]]
"""A pipeline stage, and its :data:`JoinedGroups`."""


def list_stage_groups(target: Target) -> StageGroups | None:
    """Return this rank's param groups, or None if another rank reports the same ones."""
    place = target.place
    if not (target.is_first_replica and (place.tp_rank == 0 or target.experts_over_tp)):
        return None
    groups = [[item for item in group if target.speaks_for(item[0])] for group in target.live_groups()]
    return place.pp_rank, groups, target.live_hyper(), target.list_names()


def join_groups(answers: Iterable[StageGroups | None]) -> JoinedGroups:
    """Join the optimizer's param groups of all pipeline stages, in the order of the layers, as the user created them.

    :func:`~deepspeed_ucp.model.topology.number_groups` identifies the groups of different stages. A stage's layers may
    be apart from each other (DualPipeV).

    Args:
        answers: of all ranks (:func:`list_stage_groups`).
    """
    joined: dict[int, tuple[list[dict[tuple[str, bool], None]], list[dict[str, Any]]]] = {}
    order: dict[str, str] = {}
    for stage, groups, hyper, names in (each for each in answers if each is not None):
        order = {**order, **names}
        known, _ = joined.setdefault(stage, ([{} for _ in groups], hyper))
        for one, more in zip(known, groups, strict=True):  # the same groups with other experts in them
            one.update(dict.fromkeys(more))
    stages = {stage: ([list(group) for group in each], hyper) for stage, (each, hyper) in joined.items()}
    if len(stages) > 1:
        order = dict(sorted(order.items(), key=lambda names: number_layer(names[1])))
    return *_join_stages(stages), order


def _join_stages(
    stages: Mapping[int, tuple[list[Group], list[dict[str, Any]]]],
) -> tuple[list[Group], list[dict[str, Any]]]:
    if len(stages) == 1:
        return next(iter(stages.values()))
    ordered = [stages[stage] for stage in sorted(stages)]
    joined: dict[int, tuple[dict[str, bool], dict[str, Any]]] = {}
    numbers = number_groups([hyper for _, hyper in ordered], CHANGING)
    for (groups, hyper), group_numbers in zip(ordered, numbers, strict=True):
        for group, fields, number in zip(groups, hyper, group_numbers, strict=False):
            members, _ = joined.setdefault(number, ({}, fields))
            members.update((name, owned) for name, owned in group if name not in members)
    held = [sorted(members.items(), key=lambda item: number_layer(item[0])) for members, _ in joined.values()]
    return held, [fields for _, fields in joined.values()]


def warn_idle(index: AtomicIndex, made: AtomicIndex, rules: Sequence[RuleSet]) -> None:
    """Log the user's rules that match nothing: ``rename`` in saved names, ``resize`` in the names that these make."""
    reported = [each for each in rules if each.reported]
    idle, names = find_idle(list_names(index), list_renames(reported)), list_names(made)
    for each in (each for one in reported for each in one.resizes):
        idle += [] if any(map(each.fits, names)) else [f"resize: {each.match!r} matches no parameter"]
    if idle:
        logger.info("patterns: %s", shorten(idle))


def settle_layouts(
    index: AtomicIndex, live: TargetInventory, match: Match, rules: Sequence[RuleSet], *, log: bool
) -> Settled:
    """Return how source and target cut each matched tensor, by saved name.

    Without tensor parallelism only tensors of another shape have an entry: a padded vocabulary, or a ``resize`` rule.

    Args:
        rules: the user's.
        log: log notes and unused rules.

    Raises:
        MismatchError: a tensor without a known pattern, or shapes that contradict it.
    """
    whole = index.run.topology.tp == live.tp == 1
    reshaped = [*match.resized, *match.ruled]
    if whole and not reshaped:
        return Settled()
    shapes = live.shapes
    target = {saved: shapes[name] for name, saved in match.saved.items()}
    names = [match.params[name].name for name in reshaped] if whole else None
    settled = settle_index(index, rules, target, list_live_rules(live, match.saved), names=names).require()
    for name, (have, want) in settled.pairs.items() if log else ():
        is_padded = settled.patterns[name].vocab is not None and name not in settled.resizes
        if is_padded and have.shape[:1] > want.shape[:1]:
            logger.info("%s: vocabulary padded to %d rows, here to %d", name, have.shape[0], want.shape[0])
    if log and not whole:
        for text in settled.notes:
            logger.info("%s", text)
        if settled.unused:
            logger.warning("patterns: rules that match no parameter: %s", shorten(settled.unused))
    return settled


def list_live_rules(live: TargetInventory, saved: Mapping[str, str]) -> list[RuleSet]:
    """Return the live engine's rules for its parameters: AutoTP's maps, then Megatron's attributes.

    Args:
        saved: live name → saved name, to which the rules refer; attributes of other parameters are left out.
    """
    rules = [from_universal_info(live.info, by="target").follow(saved)] if live.info else []
    if live.attributes:
        rules.append(from_attributes({saved[n]: attributes for n, attributes in live.attributes.items() if n in saved}))
    return rules
