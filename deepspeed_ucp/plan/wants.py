"""From what a rank of a target holds to what it wants of a checkpoint: data, for live targets and forecasts alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..atoms import COPY, MASTER, MODULE, Atom, AtomicIndex, AtomKey, ParamKey
from ..flat import Cut, FlatBuffer, find_gaps
from ..patterns import Layout
from .locate import View, Want, find_shards
from .match import Match, pick_weight

Layouts = Mapping[str, tuple[Layout, Layout]]
"""By saved name: how source and target cut a tensor; those that neither cuts are not in it."""

Home = tuple[str, int]
"""What a buffer is: (state, number of the flat buffer), (``MODULE``, number of the tensor), (``REPLICA``, any)."""

REPLICA = "replica"
"""Memory for one of the replicas whose mean is taken."""


@dataclass(frozen=True, slots=True)
class HeldBuffer:
    """A buffer as one rank holds it: a flat buffer of masters, or a tensor that no optimizer owns.

    Attributes:
        buffer: how parameters lie in it, over all ranks; a tensor is a buffer of one parameter.
        part: the partition that the rank holds.
        dtype: of the masters, or of the tensor.
        live: optimizer states that are there already, with their dtypes.
        kept: states that the optimizer keeps, with their dtypes; None where that is not known: it keeps what was saved.
    """

    buffer: FlatBuffer
    part: int
    dtype: str
    live: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """What one rank of a target holds.

    Attributes:
        tp_rank: its tensor-parallel rank.
        flats: buffers that the optimizer owns.
        tensors: frozen and unoptimized parameters, and the module's buffers.
    """

    tp_rank: int
    flats: Sequence[HeldBuffer]
    tensors: Sequence[HeldBuffer]


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Memory that is filled: ``numel`` elements of ``dtype``; ``fresh``: it is not part of the engine yet."""

    home: Home
    dtype: str
    numel: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Mean:
    """Elements [low, high) of a buffer become the mean of other buffers, which hold a replica each (Partial)."""

    buffer: int
    low: int
    high: int
    replicas: tuple[int, ...]


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
        touched: atoms of which something is wanted, of whichever rank of this model-parallel rank.
        grown: vocabulary parameters that get new rows: name → (rows saved, rows here).
    """

    buffers: list[BufferSpec] = field(default_factory=list)
    sinks: list[tuple[int, str]] = field(default_factory=list)
    wants: list[Want] = field(default_factory=list)
    blanks: list[tuple[int, int, int]] = field(default_factory=list)
    means: list[Mean] = field(default_factory=list)
    touched: dict[AtomKey, Atom] = field(default_factory=dict)
    grown: dict[str, tuple[int, int]] = field(default_factory=dict)

    def is_fresh(self, sink: int) -> bool:
        """Whether a sink's memory is not part of the engine yet."""
        return self.buffers[self.sinks[sink][0]].fresh

    def add_buffer(self, spec: BufferSpec) -> int:
        """Note a buffer; returns its number."""
        self.buffers.append(spec)
        return len(self.buffers) - 1

    def add_sink(self, buffer: int, stored: str) -> int:
        """Let bytes of a dtype come to a buffer; returns the number that wants have to name."""
        self.sinks.append((buffer, stored))
        return len(self.sinks) - 1

    def list_states(self) -> dict[int, dict[str, str]]:
        """Per flat buffer the optimizer states that are filled, with their dtypes."""
        found: dict[int, dict[str, str]] = defaultdict(dict)
        for spec in self.buffers:
            state, number = spec.home
            if state not in (MASTER, MODULE, REPLICA):
                found[number][state] = spec.dtype
        return found

    def list_spans(self) -> list[list[tuple[int, int]]]:
        """Per buffer the elements [low, high) that will be filled, blanks included."""
        spans: list[list[tuple[int, int]]] = [[] for _ in self.buffers]
        for want in self.wants:
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
    states: Mapping[ParamKey, set[str]] | None = None,
) -> Wants:
    """What a rank wants of a checkpoint.

    Args:
        layout: what it holds.
        match: which saved parameters its own take their state from; the others keep their values.
        layouts: how both sides cut each of these.
        with_states: optimizer states as well.
        states: those of each saved parameter, where they are known already.
    """
    lister = _Lister(
        index, layout.tp_rank, match, layouts, with_states, list_states(index) if states is None else states
    )
    for number, held in enumerate(layout.flats):
        lister.add_masters(number, held)
        if with_states:
            lister.add_states(number, held)
    for number, held in enumerate(layout.tensors):
        lister.add_tensor(number, held)
    return lister.wants


def list_states(index: AtomicIndex) -> dict[ParamKey, set[str]]:
    """Optimizer states that the checkpoint has of each parameter."""
    found: dict[ParamKey, set[str]] = defaultdict(set)
    for key in index.stored.atoms:
        if key.state not in (MASTER, MODULE, COPY):
            found[key.param].add(key.state)
    return found


def view_shards(layouts: tuple[Layout, Layout] | None, tp_rank: int) -> tuple[View | None, ...]:
    """How a target shard is made from the source's: in one view; of a mean, in one per replica."""
    if layouts is None:
        return (None,)
    if layouts[0].mean:
        return tuple(View(*layouts, tp_rank, (shard,)) for shard in range(len(layouts[0].shards)))
    return (View(*layouts, tp_rank, find_shards(*layouts, tp_rank)),)


@dataclass(slots=True)
class _Lister:
    index: AtomicIndex
    tp_rank: int
    match: Match
    layouts: Layouts
    with_states: bool
    states: Mapping[ParamKey, set[str]]
    wants: Wants = field(default_factory=Wants)

    def add_masters(self, number: int, held: HeldBuffer) -> None:
        params = self._find_params(held)
        atoms = {name: pick_weight(self.index, param, True, self.with_states) for name, param in params.items()}
        buffer = self._add_buffer((MASTER, number), held, held.dtype, fresh=False)
        self._fill(buffer, held, atoms)
        self.wants.blanks += [(buffer, low, high) for low, high in held.buffer.gaps(held.part)]

    def add_states(self, number: int, held: HeldBuffer) -> None:
        params = self._find_params(held)
        states = {state for param in params.values() for state in self.states.get(param, ())}
        for state in sorted(states):
            atoms = {name: self.index.find(param.name, state, param.instance) for name, param in params.items()}
            stored = next(atom.dtype for atom in atoms.values() if atom)
            dtype = held.live.get(state) or (held.kept or {}).get(state) or stored
            buffer = self._add_buffer((state, number), held, dtype, fresh=state not in held.live)
            # Of a state that some parameters lack nothing may be left to chance, in live memory neither.
            covered = self._fill(buffer, held, atoms)
            self.wants.blanks += [(buffer, low, high) for low, high in find_gaps(covered, held.buffer.partition)]

    def add_tensor(self, number: int, held: HeldBuffer) -> None:
        (name,) = held.buffer.names
        if name in self.match.params:
            atom = pick_weight(self.index, self.match.params[name], False, self.with_states)
            self._fill(self._add_buffer((MODULE, number), held, held.dtype, fresh=False), held, {name: atom})

    def _find_params(self, held: HeldBuffer) -> dict[str, ParamKey]:
        """What the parameters of a buffer take their state from."""
        return {name: self.match.params[name] for name in held.buffer.names if name in self.match.params}

    def _add_buffer(self, home: Home, held: HeldBuffer, dtype: str, *, fresh: bool) -> int:
        return self.wants.add_buffer(BufferSpec(home, dtype, held.buffer.partition, fresh))

    def _fill(self, buffer: int, held: HeldBuffer, atoms: Mapping[str, Atom | None]) -> list[tuple[int, int]]:
        """Let atoms fill what the rank holds of a buffer; returns the elements that they cover."""
        self.wants.touched.update({atom.key: atom for atom in atoms.values() if atom})
        sinks: dict[str, int] = {}
        covered = []
        for cut in held.buffer.cuts(held.part):
            atom = atoms.get(cut.name)
            if atom is None:
                continue
            if atom.dtype not in sinks:
                sinks[atom.dtype] = self.wants.add_sink(buffer, atom.dtype)
            self._want(atom, cut, sinks[atom.dtype])
            covered.append((cut.offset, cut.offset + cut.numel))
        return covered

    def _want(self, atom: Atom, cut: Cut, sink: int) -> None:
        """Want a part of this rank's shard of an atom; ``cut.name`` is the target's name."""
        layouts = self.layouts.get(self.match.params[cut.name].name)
        views = view_shards(layouts, self.tp_rank)
        if layouts is not None and layouts[0].mean:
            self._want_mean(atom, cut, sink, views)
            return
        if layouts is not None and layouts[0].shape[:1] < layouts[1].shape[:1]:  # new padding rows of the vocabulary
            self.wants.blanks.append((self.wants.sinks[sink][0], cut.offset, cut.offset + cut.numel))
            self.wants.grown[atom.name] = (layouts[0].shape[0], layouts[1].shape[0])
        self.wants.wants += [Want(atom, cut.start, cut.numel, sink, cut.offset, view) for view in views]

    def _want_mean(self, atom: Atom, cut: Cut, sink: int, views: Sequence[View | None]) -> None:
        """Want every replica, in memory of its own."""
        replicas = []
        for view in views:
            replica = self.wants.add_buffer(BufferSpec((REPLICA, len(self.wants.buffers)), atom.dtype, cut.numel, True))
            self.wants.wants.append(Want(atom, cut.start, cut.numel, self.wants.add_sink(replica, atom.dtype), 0, view))
            replicas.append(replica)
        into = self.wants.sinks[sink][0]
        self.wants.means.append(Mean(into, cut.offset, cut.offset + cut.numel, tuple(replicas)))
