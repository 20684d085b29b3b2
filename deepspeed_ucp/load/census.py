"""What the live engine holds over all its ranks, and how its tensors relate to the checkpoint's shards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..atoms import MASTER, MODULE, AtomicIndex
from ..comm import Comm
from ..errors import MismatchError, shorten
from ..patterns import (
    Layout,
    RuleSet,
    find_idle,
    from_attributes,
    from_config,
    from_universal_info,
    rename_names,
)
from ..plan.match import Live, Match, Shape
from ..plan.settling import settle_index
from ..sources.naming import CHANGING
from ..targets import Extra, Target
from ..targets.parallel import live_attributes, live_universal_info

logger = logging.getLogger("deepspeed_ucp")

Layouts = Mapping[str, tuple[Layout, Layout]]
"""By saved name: how source and target cut a tensor."""


@dataclass(frozen=True, slots=True)
class _Return:
    """What one model-parallel rank tells the others (those of data-parallel rank 0 do)."""

    tp_rank: int
    owned: dict[str, Shape]
    extras: dict[str, Shape]
    buffers: frozenset[str]
    aliases: dict[str, str]
    ordinals: dict[str, tuple[int, int]]
    attributes: dict[str, dict[str, Any]]
    info: dict[str, Any] | None


@dataclass(slots=True)
class Census:
    """All ranks' tensors by name.

    Attributes:
        tp: tensor-parallel degree.
        owned, extras: local shapes per tensor-parallel rank.
        buffers: which of the extras are buffers.
        aliases: live tied names → the name that holds the data.
        ordinals: of this rank's parameters that several stages hold.
        everyone: (name, ordinal, count) of every stage's.
        attributes: Megatron's attributes of the parameters.
        info: the live model's own ``universal_checkpoint_info``.
    """

    tp: int
    owned: dict[str, tuple[Shape, ...]] = field(default_factory=dict)
    extras: dict[str, tuple[Shape, ...]] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    ordinals: dict[str, tuple[int, int]] = field(default_factory=dict)
    everyone: set[tuple[str, int, int]] = field(default_factory=set)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    info: dict[str, Any] | None = None

    def live(self, renamed: Mapping[str, str], *, with_extras: bool) -> Live:
        """For :func:`~deepspeed_ucp.plan.match.match_parameters`."""
        return Live(self.owned, self.extras if with_extras else None, self.aliases, self.ordinals, renamed)


def take_census(target: Target, extras: Iterable[Extra], comm: Comm) -> Census:
    """Ask every model-parallel rank what it holds; collective.

    Raises:
        MismatchError: tensor-parallel ranks of one stage hold different tensors.
    """
    place, found = target.place, list(extras)
    ordinals = {name: (each.ordinal, each.count) for name, each in target.instances().items()}
    census = Census(place.tp, ordinals=ordinals)

    def tell() -> _Return | None:
        if place.dp_rank:
            return None
        return _Return(
            place.tp_rank,
            target.owned_shapes(),
            {extra.name: extra.shape for extra in found},
            frozenset(extra.name for extra in found if extra.is_buffer),
            target.aliases,
            ordinals,
            live_attributes(target.engine),
            live_universal_info(target.engine),
        )

    returns = [each for each in comm.each(tell) if each is not None]
    comm.run(lambda: _count(census, returns))
    return census


def check_alike(census: Census, target: Target, extras: Iterable[Extra]) -> None:
    """Hold this rank's tensors against those that data-parallel rank 0 told of.

    Raises:
        MismatchError: it holds others.
    """
    counted, tp_rank = {**census.owned, **census.extras}, target.place.tp_rank
    mine = {**target.owned_shapes(), **{extra.name: extra.shape for extra in extras}}
    odd = [f"{name} {shape}" for name, shape in mine.items() if name not in counted or counted[name][tp_rank] != shape]
    if odd:
        raise MismatchError(f"Data-parallel ranks hold different tensors: here {shorten(odd)}, not on rank 0.")


def _count(census: Census, returns: Iterable[_Return]) -> None:
    owned: dict[str, dict[int, Shape]] = {}
    extras: dict[str, dict[int, Shape]] = {}
    for each in returns:
        for found, told in ((owned, each.owned), (extras, each.extras)):
            for name, shape in told.items():
                found.setdefault(name, {})[each.tp_rank] = shape
        census.buffers |= each.buffers
        census.aliases.update(each.aliases)
        census.everyone |= {(name, *place) for name, place in each.ordinals.items()}
        census.attributes.update(each.attributes)
        census.info = census.info or each.info
    census.owned, census.extras = _order(owned, census.tp), _order(extras, census.tp)


def _order(found: Mapping[str, Mapping[int, Shape]], tp: int) -> dict[str, tuple[Shape, ...]]:
    partial = [name for name, shapes in found.items() if len(shapes) != tp]
    if partial:
        raise MismatchError(
            f"Tensor-parallel ranks hold different tensors: {shorten(partial)} are not on every one of the {tp} ranks."
        )
    return {name: tuple(shapes[rank] for rank in range(tp)) for name, shapes in found.items()}


@dataclass(slots=True)
class LiveGroups:
    """The optimizer's param groups as the user made them, over all pipeline stages in stage order.

    Attributes:
        names: per group (raw name, owned by the optimizer).
        hyper: per group its hyper-parameters.
    """

    names: list[list[tuple[str, bool]]] = field(default_factory=list)
    hyper: list[dict[str, Any]] = field(default_factory=list)


def join_groups(target: Target, comm: Comm) -> LiveGroups:
    """Put the stages' param groups together; collective.

    DeepSpeed drops a stage's empty groups, so groups of two stages are the same one where their hyper-parameters are.
    """
    place = target.place

    def tell() -> tuple[int, list[list[tuple[str, bool]]], list[dict[str, Any]]] | None:
        first = place.dp_rank == place.tp_rank == 0
        return (place.pp_rank, target.live_groups(), target.live_hyper()) if first else None

    stages = sorted((each for each in comm.each(tell) if each is not None), key=lambda told: told[0])
    if len(stages) == 1:
        return LiveGroups(*stages[0][1:])
    joined = LiveGroups()
    known: dict[tuple[str, int], int] = {}
    for _, names, hyper in stages:
        seen: Counter[str] = Counter()
        for group, fields in zip(names, hyper, strict=False):
            kind = repr(sorted((key, repr(value)) for key, value in fields.items() if key not in CHANGING))
            seen[kind] += 1
            number = known.setdefault((kind, seen[kind]), len(joined.names))
            if number == len(joined.names):
                joined.names.append([])
                joined.hyper.append(fields)
            present = {name for name, _ in joined.names[number]}
            joined.names[number] += [item for item in group if item[0] not in present]
    return joined


def find_renamed(index: AtomicIndex, census: Census, rules: Sequence[RuleSet], *, tell: bool) -> dict[str, str]:
    """Live name → saved name, by the user's ``rename`` rules.

    A rule counts where the engine does not know the saved name and knows the new one, so that one set of rules serves
    both directions, and a run that goes on under the names it has.
    """
    renames = tuple(rename for each in rules for rename in each.renames)
    if not renames:
        return {}
    live = {*census.owned, *census.extras, *census.aliases}
    saved = {key.name for key in index.stored.atoms if key.state in (MASTER, MODULE)} | set(index.model.aliases)
    foreign = sorted(saved - live)
    if tell and (idle := find_idle(saved, renames)):
        logger.info("patterns: %s", shorten(idle))
    return {new: old for old, new in rename_names(foreign, renames, live).items() if new in live}


def settle_layouts(
    index: AtomicIndex, census: Census, match: Match, rules: Sequence[RuleSet], *, tell: bool
) -> dict[str, tuple[Layout, Layout]]:
    """How source and target cut each matched tensor, by saved name; without tensor parallelism only those of
    another number of rows, which a vocabulary's padding makes.

    Args:
        rules: the user's.
        tell: log what was passed over.

    Raises:
        MismatchError: a tensor whose pattern nothing settles, or shapes that contradict it.
    """
    whole = index.run.topology.tp == census.tp == 1
    if whole and not match.resized:
        return {}
    target = {saved: census.owned.get(live) or census.extras[live] for live, saved in match.saved.items()}
    names = [match.params[live].name for live in match.resized] if whole else None
    live = list_live_rules(census, match.saved)
    settled = settle_index(index, rules, target, live, names=names).require()
    if tell and not whole:
        for text in settled.notes:
            logger.info("%s", text)
        if settled.unused:
            logger.warning("patterns: rules that match no parameter: %s", shorten(settled.unused))
    return settled.pairs


def list_live_rules(census: Census, saved: Mapping[str, str]) -> list[RuleSet]:
    """What the live engine tells of its parameters: AutoTP's maps, then Megatron's attributes.

    Args:
        saved: live name → the name that the checkpoint has for it; attributes of others are left out.
    """
    found: list[RuleSet] = []
    if census.info:
        found.append(from_universal_info(census.info, by="target"))
    if census.attributes:
        found.append(from_attributes({saved[n]: told for n, told in census.attributes.items() if n in saved}))
    return found


def read_rules(patterns: Any) -> tuple[RuleSet, ...]:
    """The user's ``patterns``.

    Raises:
        ConfigError: they cannot be read.
    """
    return from_config(patterns)
