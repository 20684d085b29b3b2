"""View the engine over all ranks, match it, and list each rank's wants."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from ..comm import Comm
from ..engine.base import Target, flatten
from ..engine.parallel import live_attributes, live_universal_info
from ..errors import MismatchError, Objections, pluralize, shorten
from ..io.cast import FLOATING
from ..model.flat import Shape
from ..model.index import AtomicIndex
from ..model.storage import ITEMSIZE, MASTER, MODULE, AtomKey
from ..model.view import EngineBuffer, EngineView, Shapes
from ..plan.match import Adaptation, Match, lacks_frozen, list_faults, match_groups, match_parameters
from ..plan.settling import list_names, refuse_stateless, refuse_unreadable, settle_index
from ..plan.wants import REPLICA, Wants, list_touched, list_wants
from ..stream.duplicates import check_instances
from ..tensor_parallel.layout import list_repeats
from ..tensor_parallel.metadata import from_universal_info
from ..tensor_parallel.rules import RuleSet, find_renamed, from_attributes
from ..tensor_parallel.settle import Settled
from .context import LoadContext
from .destinations import Buffer, FillPlan, TensorSink
from .states import OptimizerMatch, States

logger = logging.getLogger("deepspeed_ucp")


def prepare(context: LoadContext, saved: AtomicIndex, target: Target, *, with_states: bool) -> FillPlan:
    """Plan this rank's fill: match names, settle patterns, list wants (collective).

    A ``custom_load_fn`` loads all tensors that no optimizer owns.
    """
    comm, is_custom = context.comm, context.custom_load_fn is not None
    comm.run(lambda: refuse_unreadable(saved))
    if with_states:
        comm.run_replicated(lambda: refuse_stateless(saved))
    elif is_custom:
        return FillPlan(saved)
    view = view_engine(target, None if is_custom else comm.run(target.extras), comm)
    fill_plan, settled = comm.run(lambda: _plan_fill(context, saved, target, view, with_states=with_states))
    _exchange_needs(context, view, settled, fill_plan)
    return fill_plan


def view_engine(target: Target, extras: Sequence[EngineBuffer] | None, comm: Comm) -> EngineView:
    """Return this rank's buffers, and the tensors of all ranks (collective).

    Args:
        extras: this rank's tensors without optimizer; None if they are not loaded.
    """
    parallel = target.parallel
    ordinals = {name: (instance.ordinal, instance.count) for name, instance in target.instances().items()}

    def report() -> tuple[int, EngineView] | None:
        """Return this rank's tensors; only the first replica reports."""
        if not target.is_first_replica:
            return None
        return parallel.tp_rank, EngineView(
            {name: (shape,) for name, shape in target.owned_shapes().items() if target.reports(name)},
            {extra.name: (extra.shape,) for extra in extras or () if target.reports(extra.name)},
            aliases=target.aliases,
            counts={name: total for name, (_, total) in ordinals.items()},
            attributes=live_attributes(target.engine) if not parallel.dp_rank else {},
            info=live_universal_info(target.engine),
            unsharded=target.unsharded,
        )

    reports = [answer for answer in comm.gather_results(report) if answer is not None]
    views = [view for _, view in reports]
    unsharded = {name for view in views for name in view.unsharded}

    def join() -> EngineView:
        owned = _join_shapes([(rank, view.owned) for rank, view in reports], parallel.tp, unsharded)
        unowned = _join_shapes([(rank, view.unowned or {}) for rank, view in reports], parallel.tp, unsharded)
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
            tp=parallel.tp,
            unsharded=unsharded,
        )

    return comm.run(join)


def _join_shapes(reports: Iterable[tuple[int, Shapes]], tp: int, unsharded: Set[str]) -> Shapes:
    """Join reports of tensor-parallel ranks; MismatchError if one lacks a tensor."""
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
    return {name: tuple(map(ranks.__getitem__, range(len(ranks)))) for name, ranks in by_rank.items()}


def check_alike(view: EngineView, target: Target) -> None:
    """Raise MismatchError if this rank's tensors differ from data-parallel rank 0's."""
    joined, tp_shard_of = view.shapes, target.tp_shard_of
    shapes = {**target.owned_shapes(), **{extra.name: extra.shape for extra in view.extras}}
    differing = [f"{n} {shape}" for n, shape in shapes.items() if n not in joined or joined[n][tp_shard_of(n)] != shape]
    if differing:
        raise MismatchError(
            f"Data-parallel ranks hold different tensors: here {shorten(differing)}, not on rank 0. Build the same "
            "model, with the same parameters frozen, on all ranks."
        )


def settle_layouts(
    index: AtomicIndex, live: EngineView, match: Match, rules: Sequence[RuleSet], *, log: bool
) -> Settled:
    """Find how source and target cut each matched tensor, by saved name.

    Without tensor parallelism only tensors of another shape have an entry: a padded vocabulary, or a ``resize`` rule.
    """
    whole = index.topology.tp == live.tp == 1
    reshaped = [*match.resized, *match.resized_by_rule]
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
    """Return the live engine's rules: AutoTP's maps, then Megatron's attributes.

    Args:
        saved: live name → saved name, to which the rules refer; attributes of other parameters are left out.
    """
    rules = [from_universal_info(live.info, source="target").follow(saved)] if live.info else []
    if live.attributes:
        rules.append(from_attributes({saved[n]: attributes for n, attributes in live.attributes.items() if n in saved}))
    return rules


def _plan_fill(
    context: LoadContext, saved: AtomicIndex, target: Target, view: EngineView, *, with_states: bool
) -> tuple[FillPlan, Settled]:
    """Match engine and checkpoint; return this rank's plan and each tensor's cut."""
    is_first, rules, objections = context.comm.rank == 0, context.rules, Objections()
    renamed = find_renamed(list_names(saved), {*view.shapes, *view.aliases}, rules).values()
    # Stages of a pipeline have different modules, and all ranks must read alike.
    module = target.engine.module if target.parallel.pp == 1 else None
    adapted = Adaptation(saved, view, rules, module, is_first, saved, {*renamed})
    for extension in context.extensions:
        extension.adapt(adapted)
    index, view = adapted.index, adapted.view
    strict = context.load_module_strict or view.unowned is None
    match = match_parameters(index, view, strict=strict, with_states=with_states, rules=rules)
    match.notes += adapted.notes
    check_alike(view, target)
    with objections:
        match.require()
    with objections:
        if with_states:
            match_groups(index, target.group_members(), match, keep_live=context.config.param_groups == "live")
    with objections:
        settled = settle_layouts(index, view, match, rules, log=is_first)
    optimizer = OptimizerMatch(index, target, match)
    with objections:
        if with_states and not match.fault:
            optimizer.check()
    objections.settle()
    states = [optimizer.make_states(flat) for flat in view.flats] if with_states else []
    if with_states:
        view = replace(view, flats=[entry.flat for entry in states])
    wants = list_wants(index, view, match, settled.pairs, with_states=with_states, resizes=settled.resizes)
    # Data-parallel ranks need parts of the same atoms: the first replica reports them.
    keys = list_touched(index, view, match, with_states=with_states) if target.is_first_replica else []
    touched = [key for key in keys if target.reports(key.name)]
    if with_states:
        match.notes += optimizer.list_notes()
    match.notes += describe_rounding(wants, view)
    filled = {name for name, param in match.params.items() if param.name not in wants.resized}
    buffers = make_buffers(wants, view, states, filled, target)
    sinks = [TensorSink(buffers[number], stored) for number, stored in wants.sinks]
    return FillPlan(index, wants, buffers, sinks, states, match, touched), settled


def make_buffers(
    wants: Wants, view: EngineView, states: Sequence[States], filled: Container[str], target: Target
) -> list[Buffer]:
    """Return the memory of each wanted buffer: live, or new for replicas of a mean."""
    buffers, stored = list[Buffer](), dict(wants.sinks)
    numels = {number: mean.high - mean.low for mean in wants.means for number in mean.replicas}
    for (state, number), spans in zip(wants.buffers, wants.list_spans(), strict=True):
        if state == REPLICA:
            memory = torch.empty(numels[len(buffers)], dtype=getattr(torch, stored[len(buffers)]))
            buffers.append(Buffer(memory, True, spans))
            continue
        live, is_weight = view.find_buffer(state, number), state in (MASTER, MODULE)
        tensor = map_partition(live, filled) if is_weight else flatten(states[number].tensors[state])
        copies = target.find_copies(number) if state == MASTER else ()
        in_file = live.is_in_file(state)
        buffers.append(Buffer(tensor, not live.is_live(state), spans, in_file=in_file, copies=copies))
    return buffers


def map_partition(buffer: EngineBuffer, filled: Container[str]) -> torch.Tensor:
    """Return memory to fill: the live partition, or a file to replace its swap file.

    Args:
        filled: parameters that will be filled; the file starts as a copy of the swap file if there are others.

    Raises:
        DiskFullError: there is no room for the file.
    """
    if buffer.swap is None:
        memory: torch.Tensor = buffer.data
    else:
        make = buffer.swap.make if all(name in filled for name in buffer.names) else buffer.swap.copy
        memory = make(buffer.buffer.partition)
    return memory


_REAL = {dtype for dtype in FLOATING if not dtype.startswith("float8")}


def describe_rounding(wants: Wants, view: EngineView) -> list[str]:
    """Describe restored values that are rounded or change their kind of number."""
    notes, rounded = set[str](), dict[tuple[str, str], list[str]]()
    arriving = dict.fromkeys((*wants.buffers[at], stored) for at, stored in wants.sinks)
    for state, number, stored in arriving:
        if state == REPLICA:  # rounded when their mean is stored
            continue
        live = view.find_buffer(state, number)
        dtype = live.states.get(state, live.dtype)
        if (stored in _REAL) != (dtype in _REAL):
            notes.add(
                f"{state} of {stored} in the checkpoint is {dtype} here: converted number by number, quantized ones "
                "without their scales, fractions not into whole numbers"
            )
        elif state == MODULE and _rounds(stored, dtype):
            rounded.setdefault((stored, dtype), []).append(live.name)
        elif _rounds(stored, dtype):
            notes.add(f"{state} is rounded from {stored} to {dtype}, as this run's optimizer keeps it")
    for (stored, dtype), names in rounded.items():
        notes.add(f"{shorten(names, 3)}: rounded from {stored} to {dtype}, as this run's model has them")
    return sorted(notes)


def _rounds(stored: str, dtype: str) -> bool:
    """Return True if dtype ``stored`` has values that ``dtype`` cannot represent."""
    if not {stored, dtype} <= FLOATING:
        is_known = {stored, dtype} <= np.sctypeDict.keys()
        return not np.can_cast(stored, dtype) if is_known else ITEMSIZE[dtype] < ITEMSIZE[stored]
    before, now = (torch.finfo(getattr(torch, name)) for name in (stored, dtype))
    return now.eps > before.eps or now.max < before.max


def _exchange_needs(context: LoadContext, view: EngineView, settled: Settled, fill_plan: FillPlan) -> None:
    """Complete the plan by the needs of all ranks; log all warnings (collective)."""
    comm, index, layouts = context.comm, fill_plan.index, settled.pairs
    fill_plan.touched = _join_touched(index, fill_plan.touched, comm)
    atoms, cut = index.atoms, [key for key in fill_plan.touched if key.name in layouts]
    counted = atoms.count_bytes(fill_plan.touched[comm.rank :: comm.size])  # each rank counts a part
    everyone = comm.gather((fill_plan.wants.resized, fill_plan.wants.averaged, fill_plan.match.notes, counted))
    fill_plan.state_bytes = sum(counted for *_, counted in everyone)
    fill_plan.wants.resized = {name: how for names, *_ in everyone for name, how in names.items()}
    fill_plan.wants.averaged = {key: how for _, averaged, *_ in everyone for key, how in averaged.items()}
    sources = [(key, layouts[key.name][0]) for key in cut]
    equal = [key for key, source in sources if source.replicated and not source.mean]
    fill_plan.replicated = [key for key in equal if len(atoms[key].shards) > 1]
    fill_plan.overlapping = [(key, source) for key, source in sources if any(list_repeats(source))]

    def log_all() -> None:  # rank 0 alone
        for text in dict.fromkeys(text for *_, notes, _ in everyone for text in notes):
            logger.warning("%s", text)
        _log_match(fill_plan)

    comm.once(log_all)
    check_instances(index, view.counts, fill_plan.touched, comm)


def _join_touched(index: AtomicIndex, touched: Iterable[AtomKey], comm: Comm) -> list[AtomKey]:
    """Return the atoms that any rank needs, in the index's order (collective)."""
    params, states = index.atoms.storages, index.atoms.list_states()
    numbers = {param: number for number, param in enumerate(params)}
    mask = np.zeros((len(numbers), len(states)), np.bool_)
    for key in touched:
        mask[numbers[key.param], states.index(key.state)] = True
    needed = comm.any_of(mask.reshape(-1)).reshape(mask.shape)
    ordered = list(params)
    return [
        AtomKey(ordered[at].name, states[state], ordered[at].instance) for at, state in np.argwhere(needed).tolist()
    ]


def _log_match(fill_plan: FillPlan) -> None:
    match, index = fill_plan.match, fill_plan.index
    if match.left_initial:
        names = shorten(match.left_initial, 3 if index.format else 40)
        logger.warning("%s: %s keep the values that the new model has", index.dropped, names)
    if match.untouched:
        count = pluralize(len(match.untouched), "frozen tensor")
        level = logging.INFO if lacks_frozen(index) else logging.WARNING
        text = "load_module_strict=False: %s not in the checkpoint, the live values stay: %s"
        logger.log(level, text, count, shorten(match.untouched, 3))
    if match.skipped:
        logger.warning("load_module_strict=False, passing over: %s", list_faults(match.skipped))
    for name, how in sorted(fill_plan.wants.resized.items()):
        if how.pads:
            text = "%s: vocabulary padded to %d rows, saved with %d; the %d new ones are zero"
            logger.info(text, name, how.live, how.saved, how.live - how.saved)
