"""The parts of a checkpoint that a rank, live or planned, wants for its buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ..model.flat import Cut, FlatBuffer, Shape, Span, find_gaps
from ..model.index import AtomicIndex
from ..model.storage import COPY, MASTER, MODULE, Atom, AtomKey, ParamKey, count
from ..model.view import EngineView
from ..tensor_parallel.layout import Intervals, Layout, Product, list_repeats, measure
from ..tensor_parallel.resize import Resized, find_added_padding
from .locate import View, Want, find_shards
from .match import Match, pick_weight

Layouts = Mapping[str, tuple[Layout, Layout]]
"""Saved name → how source and target cut a tensor; without the tensors that neither cuts."""

Slot = tuple[str, int]
"""Memory to fill: (state, number of the flat buffer), (``MODULE``, number of the tensor), or (``REPLICA``, any)."""

REPLICA = "replica"
"""Memory for one of several replicas whose mean is computed."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Elements [low, high) of a buffer become the mean of replicas in other buffers."""

    buffer: int
    low: int
    high: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewRows:
    """Elements [low, high) of a buffer become the mean of a parameter's kept rows.

    Attributes:
        key: the atom whose mean is computed.
        start: the first of these elements in the flattened target shard, whose rows are all equal.
        view: sizes of a row's axes.
        columns: the shard's part of a row, by these axes.
    """

    buffer: int
    low: int
    high: int
    key: AtomKey
    start: int
    view: Shape
    columns: Product


@dataclass(slots=True)
class Wants:
    """Everything that one rank wants of a checkpoint.

    Attributes:
        sinks: (buffer, dtype of the arriving bytes), by the number in the wants: one buffer may have several.
        blanks: (buffer, low, high): elements that no atom fills completely: padding, states that the source lacks, new
            rows of a padded vocabulary. They are zeroed at the beginning of the pass that fills their buffer.
        rows: new rows of resized parameters, which become the mean of the saved ones.
        resized: parameters that have another shape here, vocabularies with other padding included.
        averaged: atoms whose rows are averaged, with the source's layout and the number of rows.
    """

    buffers: list[Slot] = field(default_factory=list)
    sinks: list[tuple[int, str]] = field(default_factory=list)
    wants: list[Want] = field(default_factory=list)
    blanks: list[tuple[int, int, int]] = field(default_factory=list)
    means: list[Mean] = field(default_factory=list)
    rows: list[NewRows] = field(default_factory=list)
    resized: dict[str, Resized] = field(default_factory=dict)
    averaged: dict[AtomKey, tuple[Layout, int]] = field(default_factory=dict)

    def add_buffer(self, slot: Slot) -> int:
        self.buffers.append(slot)
        return len(self.buffers) - 1

    def add_sink(self, buffer: int, stored: str) -> int:
        self.sinks.append((buffer, stored))
        return len(self.sinks) - 1

    def add_atom(
        self,
        atom: Atom,
        cut: Cut,
        tp_shard: int,
        sink: int,
        layouts: tuple[Layout, Layout] | None,
        resizes: Mapping[str, Resized],
    ) -> None:
        """Want the elements of a cut from an atom, in a sink.

        Args:
            layouts: how source and target cut it; None if neither does.
        """
        views = view_shards(layouts, tp_shard)
        if layouts is not None and layouts[0].mean:
            self._add_mean(atom, cut, sink, views)
            return
        if layouts is not None and (resized := resizes.get(atom.name) or find_added_padding(*layouts)):
            self._resize(atom, cut, self.sinks[sink][0], layouts, tp_shard, resized)
        self.wants += [Want(atom, cut.start, cut.numel, sink, cut.offset, view) for view in views]

    def _resize(
        self, atom: Atom, cut: Cut, buffer: int, layouts: tuple[Layout, Layout], tp_shard: int, resized: Resized
    ) -> None:
        """Record the new rows of an atom of another shape, to zero or fill with a mean."""
        self.resized[atom.name] = resized
        low, high, is_weight = cut.offset, cut.offset + cut.numel, atom.state in (MASTER, MODULE, COPY)
        if resized.live > resized.kept and (resized.new == "zero" or not is_weight):
            self.blanks.append((buffer, low, high))
        elif resized.new == "mean" and is_weight:
            self.averaged[atom.key] = layouts[0], resized.kept
            rows, *columns = layouts[1].shards[tp_shard % len(layouts[1].shards)]
            width, view = prod(map(measure, columns)), layouts[1].view[1:]
            for begin, end in _list_new_rows(rows, resized.kept, width, cut):
                offset = low - cut.start
                self.rows.append(NewRows(buffer, offset + begin, offset + end, atom.key, begin, view, tuple(columns)))

    def _add_mean(self, atom: Atom, cut: Cut, sink: int, views: Sequence[View | None]) -> None:
        """Want every replica in separate memory, and their mean in the sink's buffer."""
        replicas = []
        for view in views:
            replica = self.add_buffer((REPLICA, len(self.buffers)))
            self.wants.append(Want(atom, cut.start, cut.numel, self.add_sink(replica, atom.dtype), 0, view))
            replicas.append(replica)
        self.means.append(Mean(self.sinks[sink][0], cut.offset, cut.offset + cut.numel, tuple(replicas)))

    def list_spans(self) -> list[list[tuple[int, int]]]:
        """List the elements [low, high) of each buffer that are filled or zeroed.

        A resized parameter has no span: some of its elements may keep their values.
        """
        spans: list[list[tuple[int, int]]] = [[] for _ in self.buffers]
        for want in self.wants:
            if want.atom.name not in self.resized:
                spans[self.sinks[want.destination][0]].append((want.position, want.position + want.numel))
        for buffer, low, high in [*self.blanks, *((mean.buffer, mean.low, mean.high) for mean in self.means)]:
            spans[buffer].append((low, high))
        return spans


def list_wants(
    index: AtomicIndex,
    view: EngineView,
    match: Match,
    layouts: Layouts,
    *,
    with_states: bool,
    resizes: Mapping[str, Resized] | None = None,
) -> Wants:
    """List the wants of a rank.

    Args:
        match: the saved parameters for its parameters; unmatched ones keep their values.
        layouts: how both sides cut each of these.
        resizes: by saved name, the effect of the user's ``resize`` rules.
    """
    wants = Wants()
    for slot, tp_shard, filled, gaps in _list_buffers(index, view, match, with_states=with_states):
        number = wants.add_buffer(slot)
        sinks: dict[str, int] = {}
        for cut, atom in filled:
            if atom.dtype not in sinks:
                sinks[atom.dtype] = wants.add_sink(number, atom.dtype)
            wants.add_atom(atom, cut, tp_shard, sinks[atom.dtype], layouts.get(atom.name), resizes or {})
        wants.blanks += [(number, low, high) for low, high in gaps]
    return wants


def _list_buffers(
    index: AtomicIndex, view: EngineView, match: Match, *, with_states: bool
) -> Iterator[tuple[Slot, int, list[tuple[Cut, Atom]], list[Span]]]:
    """Yield each buffer, its tensor-parallel shard, cuts to fill, and gaps to zero."""
    for number, flat in enumerate(view.flats):
        cuts = _match_cuts(flat.buffer, flat.part, match)
        filled = [(cut, atom) for cut, param in cuts if (atom := pick_weight(index, param, True, with_states))]
        yield (MASTER, number), flat.tp_shard, filled, flat.buffer.gaps(flat.part)
        for state in flat.states:
            layout, part = flat.find_state_layout(state)
            cuts = _match_cuts(layout, part, match)
            filled = [(cut, atom) for cut, param in cuts if (atom := index.find(param.name, state, param.instance))]
            # Parameters without saved state get zeros, in live memory too.
            gaps = find_gaps(((cut.offset, cut.offset + cut.numel) for cut, _ in filled), layout.partition)
            yield (state, number), flat.tp_shard, filled, gaps
    for number, extra in enumerate(view.extras):
        if param := match.params.get(extra.name):
            atom = pick_weight(index, param, False, with_states)
            filled = [(cut, atom) for cut in extra.buffer.cuts(extra.part) if atom]
            yield (MODULE, number), extra.tp_shard, filled, []


def _match_cuts(buffer: FlatBuffer, part: int, match: Match) -> list[tuple[Cut, ParamKey]]:
    """Return the cuts of a part whose parameters are in the checkpoint."""
    return [(cut, match.params[cut.name]) for cut in buffer.cuts(part) if cut.name in match.params]


def list_touched(index: AtomicIndex, view: EngineView, match: Match, *, with_states: bool) -> list[AtomKey]:
    """List the atoms that any rank with a part of these buffers wants."""
    wanted = [(buffer, name) for buffer in (*view.flats, *view.extras) for name in buffer.buffer.names]
    owned = {name for buffer in view.flats for name in buffer.buffer.names}
    atoms: list[Atom | None] = []
    for buffer, name in wanted:
        if param := match.params.get(name):
            atoms.append(pick_weight(index, param, name in owned, with_states))
            atoms += [index.find(param.name, state, param.instance) for state in buffer.states]
    return [atom.key for atom in atoms if atom]


def list_overlaps(atom: Atom, layout: Layout) -> Iterator[tuple[Want, Want]]:
    """Yield the parts that two source shards have in common, as wants of both."""
    source = replace(layout, claims=None)
    for rank, other, part in list_repeats(layout):
        sides = (View(source, part, 0, (shard,)) for shard in (rank, other))
        first, second = (Want(atom, 0, count(part.local_shapes[0]), view=view) for view in sides)
        yield first, second


def find_states(index: AtomicIndex, param: ParamKey) -> dict[str, str]:
    """Return a parameter's saved optimizer states with their dtypes."""
    states = index.atoms.find_states(param)
    return {state: states[state] for state in sorted(states) if state not in (MASTER, MODULE, COPY)}


def join_states(index: AtomicIndex, buffer: FlatBuffer, match: Match) -> dict[str, str]:
    """Return the saved states of a buffer's parameters, each with its first dtype."""
    states: dict[str, str] = {}
    for name in reversed(buffer.names):
        states.update(find_states(index, match.params[name]) if name in match.params else {})
    return dict(sorted(states.items()))


def view_shards(layouts: tuple[Layout, Layout] | None, tp_shard: int) -> tuple[View | None, ...]:
    """Return the views that make a target shard: one, or for a mean one per replica.

    An atom with a single shard is the same for every rank.
    """
    if layouts is None:
        return (None,)
    tp_shard %= len(layouts[1].shards)
    if layouts[0].mean:
        return tuple(View(*layouts, tp_shard, (shard,)) for shard in range(len(layouts[0].shards)))
    return (View(*layouts, tp_shard, find_shards(*layouts, tp_shard)),)


def _list_new_rows(rows: Intervals, kept: int, width: int, cut: Cut) -> Iterator[Span]:
    """Yield a flattened shard's elements [low, high) that are new rows in a cut.

    Args:
        rows: of the logical tensor in the shard; rows from number ``kept`` on are new.
        width: elements of each row in the shard.
    """
    index = 0
    for low, high in rows:
        begin, end = (index + max(low, kept) - low) * width, (index + high - low) * width
        begin, end = max(begin, cut.start), min(end, cut.start + cut.numel)
        if begin < end:
            yield begin, end
        index += high - low
