"""The tensors of the live engine over all its ranks, and how they relate to the checkpoint's shards."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import Any

from ..comm import Comm
from ..engine import Target
from ..engine.parallel import live_attributes, live_universal_info
from ..errors import MismatchError, shorten
from ..formats.deepspeed.naming import CHANGING
from ..model import AtomicIndex, number_layer
from ..model.flat import Shape
from ..model.topology import number_groups
from ..model.view import EngineBuffer, EngineView, Shapes
from ..plan.match import Match
from ..plan.settling import settle_index
from ..tensor_parallel import RuleSet, Settled, from_attributes, from_universal_info

logger = logging.getLogger("deepspeed_ucp")


def view_engine(target: Target, extras: Sequence[EngineBuffer] | None, comm: Comm) -> EngineView:
    """Return this rank's buffers, and the tensors of all ranks (collective).

    Args:
        extras: this rank's tensors without optimizer; None if they are not loaded.

    Raises:
        MismatchError: tensor-parallel ranks of one stage hold different tensors.
    """
    place = target.place
    ordinals = {name: (instance.ordinal, instance.count) for name, instance in target.instances().items()}

    def report() -> tuple[int, EngineView] | None:
        """Return this rank's tensors; only the first replica reports."""
        if not target.is_first_replica:
            return None
        return place.tp_rank, EngineView(
            {name: (shape,) for name, shape in target.owned_shapes().items() if target.reports(name)},
            {extra.name: (extra.shape,) for extra in extras or () if target.reports(extra.name)},
            aliases=target.aliases,
            counts={name: total for name, (_, total) in ordinals.items()},
            attributes=live_attributes(target.engine) if not place.dp_rank else {},
            info=live_universal_info(target.engine),
            unsharded=target.unsharded,
        )

    reports = [answer for answer in comm.each(report) if answer is not None]
    views = [view for _, view in reports]
    unsharded = {name for view in views for name in view.unsharded}

    def join() -> EngineView:
        owned = _join_shapes([(rank, view.owned) for rank, view in reports], place.tp, unsharded)
        unowned = _join_shapes([(rank, view.unowned or {}) for rank, view in reports], place.tp, unsharded)
        return EngineView(
            owned,
            None if extras is None else unowned,
            flats=target.flats,
            extras=extras or (),
            aliases=dict(chain.from_iterable(view.aliases.items() for view in views)),
            ordinals=ordinals,
            counts=dict(chain.from_iterable(view.counts.items() for view in views)),
            attributes=dict(chain.from_iterable(view.attributes.items() for view in views)),
            info=next((view.info for view in views if view.info), None),
            tp=place.tp,
            unsharded=unsharded,
        )

    return comm.run(join)


def _join_shapes(reports: Iterable[tuple[int, Shapes]], tp: int, unsharded: Set[str]) -> Shapes:
    by_rank: dict[str, dict[int, Shape]] = {}
    for tp_rank, shapes in reports:
        for name, (shape,) in shapes.items():
            by_rank.setdefault(name, {})[0 if name in unsharded else tp_rank] = shape
    partial = [name for name, ranks in by_rank.items() if len(ranks) != tp and name not in unsharded]
    if partial:
        raise MismatchError(
            f"Tensor-parallel ranks hold different tensors: {shorten(partial)} are not on every one of the {tp} ranks. "
            "Build the same model on all ranks, with the mpu or the tensor_parallel section of the run that saved it."
        )
    return {name: tuple(ranks[rank] for rank in range(len(ranks))) for name, ranks in by_rank.items()}


def check_alike(view: EngineView, target: Target) -> None:
    """Compare this rank's tensors with those that data-parallel rank 0 has reported.

    Raises:
        MismatchError: they differ.
    """
    joined, tp_shard_of = view.shapes, target.tp_shard_of
    shapes = {**target.owned_shapes(), **{extra.name: extra.shape for extra in view.extras}}
    odd = [f"{n} {shape}" for n, shape in shapes.items() if n not in joined or joined[n][tp_shard_of(n)] != shape]
    if odd:
        raise MismatchError(
            f"Data-parallel ranks hold different tensors: here {shorten(odd)}, not on rank 0. Build the same model, "
            "with the same parameters frozen, on all ranks."
        )


Group = list[tuple[str, bool]]
"""The parameters of a param group: (name in the module, owned by the optimizer)."""

JoinedGroups = tuple[list[Group], list[dict[str, Any]], dict[str, str]]
"""Param groups, their hyper-parameters, and the names of the module's parameters (:meth:`Target.list_names`)."""

StageGroups = tuple[int, list[Group], list[dict[str, Any]], dict[str, str]]
"""A pipeline stage, and its :data:`JoinedGroups`."""


def list_stage_groups(target: Target) -> StageGroups | None:
    """Return this rank's param groups, or None if another rank reports the same ones."""
    place = target.place
    if not (target.is_first_replica and (place.tp_rank == 0 or target.unsharded)):
        return None
    groups = [[item for item in group if target.reports(item[0])] for group in target.live_groups()]
    return place.pp_rank, groups, target.live_hyper(), target.list_names()


def join_groups(reports: Iterable[StageGroups | None]) -> JoinedGroups:
    """Join the optimizer's param groups of all pipeline stages, in the order of the layers, as the user created them.

    :func:`~deepspeed_ucp.model.topology.number_groups` identifies the groups of different stages. A stage's layers may
    be apart from each other (DualPipeV).

    Args:
        reports: results of :func:`list_stage_groups` on all ranks.
    """
    stages: dict[int, tuple[list[dict[str, bool]], list[dict[str, Any]]]] = {}
    order: dict[str, str] = {}
    for stage, pairs, hyper, names in filter(None, reports):
        order.update(names)
        known, _ = stages.setdefault(stage, ([{} for _ in pairs], hyper))
        for members, more in zip(known, pairs, strict=True):  # ranks differ in their distributed parameters
            members.update(more)
    if len(stages) == 1:
        ((only, hyper),) = stages.values()
        return [list(members.items()) for members in only], hyper, order
    ordered = [stages[stage] for stage in sorted(stages)]
    joined: dict[int, tuple[dict[str, bool], dict[str, Any]]] = {}
    numbers = number_groups([hyper for _, hyper in ordered], CHANGING)
    for (groups, hyper), group_numbers in zip(ordered, numbers, strict=True):
        for group, fields, number in zip(groups, hyper, group_numbers, strict=False):
            members, _ = joined.setdefault(number, ({}, fields))
            members.update((name, owned) for name, owned in group.items() if name not in members)
    return (
        [sorted(members.items(), key=lambda member: number_layer(member[0])) for members, _ in joined.values()],
        [fields for _, fields in joined.values()],
        dict(sorted(order.items(), key=lambda names: number_layer(names[1]))),
    )


def settle_layouts(
    index: AtomicIndex, live: EngineView, match: Match, rules: Sequence[RuleSet], *, log: bool
) -> Settled:
    """Return how source and target cut each matched tensor, by saved name.

    Without tensor parallelism only tensors of another shape have an entry: a padded vocabulary, or a ``resize`` rule.

    Args:
        rules: the user's.
        log: log notes and unused rules.

    Raises:
        MismatchError: a tensor without a known pattern, or shapes that contradict it.
    """
    whole = index.topology.tp == live.tp == 1
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


def list_live_rules(live: EngineView, saved: Mapping[str, str]) -> list[RuleSet]:
    """Return the live engine's rules for its parameters: AutoTP's maps, then Megatron's attributes.

    Args:
        saved: live name → saved name, to which the rules refer; attributes of other parameters are left out.
    """
    rules = [from_universal_info(live.info, by="target").follow(saved)] if live.info else []
    if live.attributes:
        rules.append(from_attributes({saved[n]: attributes for n, attributes in live.attributes.items() if n in saved}))
    return rules
