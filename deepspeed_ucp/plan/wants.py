"""From what a rank of a target holds to what it wants of a checkpoint: data, for live and for planned targets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ..atoms import COPY, MASTER, MODULE, Atom, AtomicIndex, AtomKey, ParamKey
from ..flat import Cut, FlatBuffer, Shape, Span, find_gaps
from ..patterns import Layout, Resized, pad_vocabulary
from ..patterns.layout import Intervals, Product, measure
from .locate import View, Want, find_shards
from .match import Match, pick_weight

Layouts = Mapping[str, tuple[Layout, Layout]]
"""By saved name: how source and target cut a tensor; those that neither cuts are not in it."""

Slot = tuple[str, int]
"""What a buffer is: (state, number of the flat buffer), (``MODULE``, number of the tensor), (``REPLICA``, any)."""

REPLICA = "replica"
"""Memory for one of the replicas whose mean is taken."""


@dataclass(frozen=True, slots=True)
class HeldBuffer:
    """A buffer as one rank holds it: a flat buffer of masters, or a tensor that no optimizer owns.

    Attributes:
        buffer: how parameters lie in it, over all ranks; a tensor is a buffer of one parameter.
        part: the partition that the rank holds.
        tp_shard: which of its atoms' shards it is cut from, where these have several (see
            :class:`~deepspeed_ucp.atoms.Atom`).
        dtype: of the masters, or of the tensor.
        states: optimizer states that are loaded, with the dtypes that they have here.
        live: which of these are there already.
        whole: those that the rank keeps of whole parameters, wherever its partition touches one.
        swapped: it is in files, and what is filled are others, which take their place in the end.
    """

    buffer: FlatBuffer
    part: int
    tp_shard: int
    dtype: str
    states: Mapping[str, str] = field(default_factory=dict)
    live: Collection[str] = ()
    whole: Collection[str] = ()
    swapped: bool = False

    def lay_state(self, state: str) -> tuple[FlatBuffer, int]:
        """How an optimizer state lies, and which part of that the rank holds."""
        return (self.buffer.join_touched(self.part), 0) if state in self.whole else (self.buffer, self.part)


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """What one rank of a target holds.

    Attributes:
        flats: buffers that the optimizer owns.
        tensors: frozen and unoptimized parameters, and the module's buffers.
    """

    flats: Sequence[HeldBuffer]
    tensors: Sequence[HeldBuffer]


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Memory that is filled: ``numel`` elements of ``dtype``.

    ``live``: it is part of the engine; ``in_file``: it is a file's, of which the machine need not hold much.
    """

    slot: Slot
    dtype: str
    numel: int
    live: bool
    in_file: bool = False


@dataclass(frozen=True, slots=True)
class Mean:
    """Elements [low, high) of a buffer become the mean of other buffers, which hold a replica each (Partial)."""

    buffer: int
    low: int
    high: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewRows:
    """Elements [low, high) of a buffer become the mean of the rows of a parameter that are kept.

    Attributes:
        key: what the mean is taken of.
        start: the first of these elements in the flattened target shard, of whose rows each is the same.
        view: sizes of a row's axes.
        columns: what the shard holds of a row, by these.
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
        buffers: what is filled.
        sinks: (buffer, dtype of the bytes that come) by the number that wants name: one buffer may have several.
        wants: what is read.
        blanks: (buffer, low, high): elements that are zeroed before anything is read, as no atom fills them, or not all
            of them: padding, states that the source does not have, new rows of a padded vocabulary.
        means: what is averaged.
        rows: new rows of resized parameters that are the mean of the saved ones.
        resized: parameters that have another shape here, a vocabulary with other padding among them.
        averaged: atoms of whose rows a mean is taken, with the source's layout and how many rows count.
    """

    buffers: list[BufferSpec] = field(default_factory=list)
    sinks: list[tuple[int, str]] = field(default_factory=list)
    wants: list[Want] = field(default_factory=list)
    blanks: list[tuple[int, int, int]] = field(default_factory=list)
    means: list[Mean] = field(default_factory=list)
    rows: list[NewRows] = field(default_factory=list)
    resized: dict[str, Resized] = field(default_factory=dict)
    averaged: dict[AtomKey, tuple[Layout, int]] = field(default_factory=dict)

    def add_buffer(self, spec: BufferSpec) -> int:
        """Note a buffer; returns its number."""
        self.buffers.append(spec)
        return len(self.buffers) - 1

    def add_sink(self, buffer: int, stored: str) -> int:
        """Let bytes of a dtype come to a buffer; returns the number that wants have to name."""
        self.sinks.append((buffer, stored))
        return len(self.sinks) - 1

    def list_spans(self) -> list[list[tuple[int, int]]]:
        """Per buffer the elements [low, high) that will be filled, blanks included.

        Of a parameter that is resized those that keep their values may be among its own: none of them counts.
        """
        spans: list[list[tuple[int, int]]] = [[] for _ in self.buffers]
        for want in (each for each in self.wants if each.atom.name not in self.resized):
            spans[self.sinks[want.buffer][0]].append((want.offset, want.offset + want.numel))
        for buffer, low, high in [*self.blanks, *((mean.buffer, mean.low, mean.high) for mean in self.means)]:
            spans[buffer].append((low, high))
        return spans


def list_wants(
    index: AtomicIndex,
    layout: TargetLayout,
    match: Match,
    layouts: Layouts,
    *,
    with_states: bool,
    resizes: Mapping[str, Resized] | None = None,
) -> Wants:
    """What a rank wants of a checkpoint.

    Args:
        layout: what it holds.
        match: which saved parameters its own take their state from; the others keep their values.
        layouts: how both sides cut each of these.
        with_states: optimizer states are loaded as well.
        resizes: by saved name what becomes of those that the user's rules resize.
    """
    lister = _Lister(index, match, layouts, with_states, resizes or {})
    for number, held in enumerate(layout.flats):
        lister.add_flat(number, held)
    for number, held in enumerate(layout.tensors):
        lister.add_tensor(number, held)
    return lister.wants


def list_touched(index: AtomicIndex, layout: TargetLayout, match: Match, *, with_states: bool) -> list[AtomKey]:
    """Atoms of which the ranks that hold these buffers together want something."""
    wanted = [(held, name) for held in (*layout.flats, *layout.tensors) for name in held.buffer.names]
    owned = {name for held in layout.flats for name in held.buffer.names}
    atoms: list[Atom | None] = []
    for held, name in wanted:
        if param := match.params.get(name):
            atoms.append(pick_weight(index, param, name in owned, with_states))
            atoms += [index.find(param.name, state, param.instance) for state in held.states]
    return [atom.key for atom in atoms if atom]


def is_replicated(atom: Atom, layouts: tuple[Layout, Layout] | None) -> bool:
    """Whether the source's shards are replicas that have to be equal."""
    return layouts is not None and layouts[0].replicated and not layouts[0].mean and len(atom.shards) > 1


def find_states(index: AtomicIndex, param: ParamKey) -> dict[str, str]:
    """Optimizer states that the checkpoint has of a parameter, with their dtypes."""
    states = index.stored.atoms.find_states(param)
    return {state: states[state] for state in sorted(states) if state not in (MASTER, MODULE, COPY)}


def join_states(index: AtomicIndex, buffer: FlatBuffer, match: Match) -> dict[str, str]:
    """States that some parameter of a buffer has, with the dtype that the first one has it in."""
    states: dict[str, str] = {}
    for name in reversed(buffer.names):
        states.update(find_states(index, match.params[name]) if name in match.params else {})
    return dict(sorted(states.items()))


def view_shards(layouts: tuple[Layout, Layout] | None, tp_shard: int) -> tuple[View | None, ...]:
    """How a target shard is made from the source's: in one view; of a mean, in one per replica.

    What has one shard alone (experts spread over tensor-parallel ranks) is the same to every rank.
    """
    if layouts is None:
        return (None,)
    tp_shard %= len(layouts[1].shards)
    if layouts[0].mean:
        return tuple(View(*layouts, tp_shard, (shard,)) for shard in range(len(layouts[0].shards)))
    return (View(*layouts, tp_shard, find_shards(*layouts, tp_shard)),)


def _list_new(rows: Intervals, kept: int, width: int, cut: Cut) -> Iterator[Span]:
    """Elements [low, high) of a flattened shard that a cut of it holds of its new rows.

    Args:
        rows: of the logical tensor that the shard holds; from number ``kept`` on they are new.
        width: elements that the shard has of each.
    """
    place = 0
    for low, high in rows:
        begin, end = (place + max(low, kept) - low) * width, (place + high - low) * width
        begin, end = max(begin, cut.start), min(end, cut.start + cut.numel)
        if begin < end:
            yield begin, end
        place += high - low


@dataclass(slots=True)
class _Lister:
    index: AtomicIndex
    match: Match
    layouts: Layouts
    with_states: bool
    resizes: Mapping[str, Resized] = field(default_factory=dict)
    wants: Wants = field(default_factory=Wants)

    def add_flat(self, number: int, held: HeldBuffer) -> None:
        buffer = self._add_buffer((MASTER, number), held.buffer, held, held.dtype)
        cuts = self._match_cuts(held.buffer, held.part)
        weights = [(cut, pick_weight(self.index, param, True, self.with_states)) for cut, param in cuts]
        self._fill(buffer, held.tp_shard, weights)
        self.wants.blanks += [(buffer, low, high) for low, high in held.buffer.gaps(held.part)]
        for state, dtype in held.states.items():
            layout, part = held.lay_state(state)
            buffer = self._add_buffer((state, number), layout, held, dtype, live=state in held.live)
            cuts = self._match_cuts(layout, part)
            filled = [(cut, self.index.find(param.name, state, param.instance)) for cut, param in cuts]
            self._fill(buffer, held.tp_shard, filled)
            # Of a state that some parameters lack nothing may be left to chance, in live memory neither.
            spans = ((cut.offset, cut.offset + cut.numel) for cut, atom in filled if atom)
            self.wants.blanks += [(buffer, low, high) for low, high in find_gaps(spans, layout.partition)]

    def _match_cuts(self, buffer: FlatBuffer, part: int) -> list[tuple[Cut, ParamKey]]:
        """What a part holds of parameters that the checkpoint has."""
        params = self.match.params
        return [(cut, params[cut.name]) for cut in buffer.cuts(part) if cut.name in params]

    def add_tensor(self, number: int, held: HeldBuffer) -> None:
        if param := self.match.params.get(held.buffer.names[0]):
            atom = pick_weight(self.index, param, False, self.with_states)
            buffer = self._add_buffer((MODULE, number), held.buffer, held, held.dtype)
            self._fill(buffer, held.tp_shard, [(cut, atom) for cut in held.buffer.cuts(held.part)])

    def _add_buffer(self, slot: Slot, layout: FlatBuffer, held: HeldBuffer, dtype: str, *, live: bool = True) -> int:
        in_file = held.swapped and slot[0] not in held.live
        return self.wants.add_buffer(BufferSpec(slot, dtype, layout.partition, live and not in_file, in_file))

    def _fill(self, buffer: int, tp_shard: int, filled: Sequence[tuple[Cut, Atom | None]]) -> None:
        """Let atoms fill their cuts of a buffer."""
        sinks: dict[str, int] = {}
        for cut, atom in filled:
            if atom is not None:
                if atom.dtype not in sinks:
                    sinks[atom.dtype] = self.wants.add_sink(buffer, atom.dtype)
                self._want(atom, cut, tp_shard, sinks[atom.dtype])

    def _want(self, atom: Atom, cut: Cut, tp_shard: int, sink: int) -> None:
        """Want a part of a shard of an atom."""
        layouts = self.layouts.get(atom.name)
        views = view_shards(layouts, tp_shard)
        if layouts is not None and layouts[0].mean:
            self._want_mean(atom, cut, sink, views)
            return
        if layouts is not None:
            self._resize(atom, cut, self.wants.sinks[sink][0], layouts, tp_shard)
        self.wants.wants += [Want(atom, cut.start, cut.numel, sink, cut.offset, view) for view in views]

    def _resize(self, atom: Atom, cut: Cut, buffer: int, layouts: tuple[Layout, Layout], tp_shard: int) -> None:
        """Of what has another shape here, note what becomes of new places, and of those that are kept."""
        resized = self.resizes.get(atom.name) or pad_vocabulary(*layouts)
        if resized is None:
            return
        self.wants.resized[atom.name] = resized
        low, high, is_weight = cut.offset, cut.offset + cut.numel, atom.state in (MASTER, MODULE, COPY)
        if resized.live > resized.kept and (resized.new == "zero" or not is_weight):
            self.wants.blanks.append((buffer, low, high))
        elif resized.new == "mean" and is_weight:
            self.wants.averaged[atom.key] = layouts[0], resized.kept
            rows, *columns = layouts[1].shards[tp_shard % len(layouts[1].shards)]
            width, view = prod(map(measure, columns)), layouts[1].view[1:]
            for begin, end in _list_new(rows, resized.kept, width, cut):
                offset = low - cut.start
                self.wants.rows.append(
                    NewRows(buffer, offset + begin, offset + end, atom.key, begin, view, tuple(columns))
                )

    def _want_mean(self, atom: Atom, cut: Cut, sink: int, views: Sequence[View | None]) -> None:
        """Want every replica, in memory of its own."""
        replicas = []
        for view in views:
            spec = BufferSpec((REPLICA, len(self.wants.buffers)), atom.dtype, cut.numel, live=False)
            replica = self.wants.add_buffer(spec)
            self.wants.wants.append(Want(atom, cut.start, cut.numel, self.wants.add_sink(replica, atom.dtype), 0, view))
            replicas.append(replica)
        into = self.wants.sinks[sink][0]
        self.wants.means.append(Mean(into, cut.offset, cut.offset + cut.numel, tuple(replicas)))
