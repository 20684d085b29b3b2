"""Compare two checkpoints of any topologies and kinds, atom by atom."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..comm import Comm
from ..errors import ConfigError, advise, shorten
from ..io.cast import cast, find_dtype
from ..io.memory import Scratch
from ..io.read import Checked
from ..model.index import AtomicIndex
from ..model.storage import ITEMSIZE, MASTER, MODULE, Atom, ParamKey
from ..model.topology import find_differences
from ..plan.conversion import Batch, Output, Range, cut_batches
from ..plan.derive import recast
from ..plan.settling import list_shapes
from ..stream.full_tensors import WorkOptions, stream
from ..stream.reader import AtomReader
from ..tensor_parallel.facts import compile_regex
from ..tensor_parallel.rules import RuleSet
from .pairing import Pair, Pairs, pair_atoms
from .values import ABSENT, ValueDifference, compare_runs, compare_values

Buffer = bytes | bytearray | memoryview
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Tally:
    """The result of comparing elements.

    Attributes:
        first: position of the first different element; -1 if none differs.
        largest: largest absolute difference; inf if one side is not finite.
        relative: largest of |a - b| / max(|a|, |b|).
    """

    numel: int = 0
    differing: int = 0
    first: int = -1
    largest: float = 0.0
    relative: float = 0.0

    def join(self, other: Tally) -> Tally:
        places = [tally.first for tally in (self, other) if tally.differing]
        return Tally(
            self.numel + other.numel,
            self.differing + other.differing,
            min(places, default=-1),
            max(self.largest, other.largest),
            max(self.relative, other.relative),
        )


NOTHING = Tally()


@dataclass(frozen=True, slots=True)
class AtomDifference:
    """An atom that differs.

    Attributes:
        name, state: name in A, and state.
        kind: ``values``, ``shape``, ``only in A`` or ``only in B``.
        dtypes: dtypes in A and B; different dtypes are compared as numbers.
        tally: result for the elements without padding rows of a vocabulary.
        padding: result for the common padding rows.
        index: index of the first different element in the logical tensor; if the pattern is unknown, in the shard of
            rank ``shard``.
        instance: number of the copy, if several pipeline stages hold the parameter with different values.
    """

    name: str
    state: str
    kind: str
    dtypes: tuple[str, str]
    tally: Tally = NOTHING
    padding: Tally = NOTHING
    index: tuple[int, ...] = ()
    shard: int | None = None
    text: str = ""
    instance: int = 0

    @property
    def label(self) -> str:
        return str(ParamKey(self.name, self.instance))

    def is_within(self, tolerance: float) -> bool:
        """Return True if only values differ, by at most a positive ``tolerance``."""
        return self.kind == "values" and tolerance > 0 and max(self.tally.largest, self.padding.largest) <= tolerance


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of a comparison.

    Attributes:
        compared: number of common atoms with equal logical shapes.
        converted: number of atoms with different dtypes, compared as numbers.
        atoms: different atoms, the largest difference first.
        values: different scalars, hyper-parameters, counters and other state.
        tolerance: largest accepted absolute difference.
    """

    compared: int
    numel: int
    converted: int
    atoms: tuple[AtomDifference, ...]
    values: tuple[ValueDifference, ...]
    notes: tuple[str, ...]
    unused: tuple[str, ...]
    tolerance: float

    @property
    def equal(self) -> bool:
        return not self.values and all(atom.is_within(self.tolerance) for atom in self.atoms)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions(WorkOptions):
    """Options of a comparison.

    Attributes:
        only: regular expression for parts of names; counters, client state and similar values are then omitted.
        states: names of states; only tensors are then compared.
        tolerance: largest absolute difference that is reported but accepted.
    """

    only: str = ""
    states: Collection[str] = ()
    tolerance: float = 0.0
    window: int = 64 << 20

    def wants(self, name: str, state: str = "") -> bool:
        """Return True if an atom (or without ``state`` a parameter) is to be compared."""
        is_in_states = not state or not self.states or state in self.states
        return is_in_states and compile_regex(self.only, "--only").search(name) is not None


DEFAULT = DiffOptions()


def diff_checkpoints(
    left: AtomicIndex,
    right: AtomicIndex,
    comm: Comm | None = None,
    options: DiffOptions = DEFAULT,
    *,
    rules: Sequence[RuleSet] = (),
) -> Difference:
    """Compare two checkpoints; ``rules`` rename from A's names to B's (collective)."""
    comm = comm or Comm()
    left = recast(left, list_shapes(right))

    def pair() -> Pairs:
        known = {MASTER, MODULE, *(key.state for index in (left, right) for key in index.atoms)}
        if unknown := sorted(set(options.states) - known):
            raise ConfigError(f"--states: neither checkpoint has {shorten(unknown)}. {advise(unknown[0], known)}")
        pairs = pair_atoms(left, right, rules, options.wants)
        if (options.only or options.states) and not pairs:
            raise ConfigError("--only and --states select no tensor, so nothing was compared. Select others.")
        return pairs

    pairs = comm.run(pair)
    shares = comm.gather_results(lambda: _compare_share(left, right, pairs.both, options, comm))
    values, notes = comm.run(lambda: _compare_rest(left, right, pairs, options))
    return Difference(
        compared=len(pairs.both),
        numel=sum(pair.numel for pair in pairs.both),
        converted=sum(pair.left.dtype != pair.right.dtype for pair in pairs.both),
        atoms=_list_differences(pairs, _join(item for share in shares for item in share.items())),
        values=tuple(values),
        notes=tuple(notes + _note_rounding(pairs.both) + _note_padding(pairs.both)),
        unused=tuple(pairs.unused),
        tolerance=options.tolerance,
    )


Tallies = dict[int, tuple[Tally, Tally]]
"""Pair → results without and for padding rows."""


def _compare_share(
    left: AtomicIndex, right: AtomicIndex, pairs: Sequence[Pair], options: DiffOptions, comm: Comm
) -> Tallies:
    """Compare this rank's batches, in the order of A's files."""
    threads, most = options.split_window(left.state_file)  # each thread holds both sides of a batch
    outputs = [Output(pair.numel, max(pair.left.itemsize, pair.right.itemsize), pair.left.place) for pair in pairs]
    batches = cut_batches(outputs, most)[comm.rank :: comm.size]
    tallies: list[tuple[int, tuple[Tally, Tally]]] = []

    def consume(batch: Batch, sides: Sequence[list[memoryview]], checks: list[Checked], scratch: Scratch) -> None:
        for span, mine, theirs in zip(batch.ranges, *sides, strict=True):
            tallies.append((span.output, _compare_range(pairs[span.output], span, mine, theirs)))

    with AtomReader(left, checksum=False) as first, AtomReader(right, checksum=False) as second:
        sources = [(first, [pair.left for pair in pairs]), (second, [pair.right for pair in pairs])]
        stream(sources, batches, consume, threads=threads, bar=options.bar)
    return _join(tallies)


def _join(parts: Iterable[tuple[int, tuple[Tally, Tally]]]) -> Tallies:
    joined: Tallies = {}
    for number, (values, padding) in parts:
        known = joined.get(number, (NOTHING, NOTHING))
        joined[number] = known[0].join(values), known[1].join(padding)
    return joined


def _compare_rest(
    left: AtomicIndex, right: AtomicIndex, pairs: Pairs, options: DiffOptions
) -> tuple[list[ValueDifference], list[str]]:
    """Compare everything except tensors; return differences and notes."""
    weights = left.is_weights_alone or right.is_weights_alone
    chosen = {pair.left.name for pair in pairs.both} | {atom.name for atom, _ in pairs.reshaped}
    values = []
    if not options.states and not weights:
        values = compare_values(left, right, pairs.names, lambda name: not options.only or name in chosen)
    if left.format or right.format:  # foreign formats do not record the topology
        notes = [] if left.origin == right.origin else [f"written: {left.origin} → {right.origin}"]
    else:
        topology = (replace(index.topology, flats=()) for index in (left, right))
        notes = [f"topology: {text}" for text in find_differences(*topology)]
    for side, index in (("A", left), ("B", right)):
        notes += [f"{side}: {index.dropped}"] if index.dropped else []
        uncut = index.unreadable if weights else {**index.irregular, **index.unreadable}
        if listed := [f"{key.param} ({key.state})" for key in sorted(uncut) if options.wants(key.name, key.state)]:
            notes.append(f"{side}: not compared, since they cannot be read as whole tensors: {shorten(listed)}")
    if left.is_weights_alone != right.is_weights_alone:
        notes.append("weights alone are compared, since one side has nothing else")
    if not weights and not options.only and not options.states:
        differences, more = compare_runs(left, right)
        values, notes = values + differences, notes + more
    if bool(left.format) != bool(right.format):
        lacking = [value for value in values if ABSENT in (value.left, value.right)]
        values = [value for value in values if value not in lacking]
        if lacking:
            names = ", ".join(dict.fromkeys(value.key for value in lacking))
            notes.append(f"only one of the two formats keeps, and not compared: {names}")
    return values, notes


def _compare_range(pair: Pair, span: Range, mine: memoryview, theirs: memoryview) -> tuple[Tally, Tally]:
    """Compare a range; return the results outside and inside of padding rows."""
    border = min(max(pair.unpadded_numel - span.start, 0), span.numel)
    tallies = []
    for low, high in ((0, border), (border, span.numel)):
        first = mine[low * pair.left.itemsize : high * pair.left.itemsize]
        second = theirs[low * pair.right.itemsize : high * pair.right.itemsize]
        tally = compare(first, second, pair.left.dtype, pair.right.dtype, pair.rounded_to)
        tallies.append(replace(tally, first=tally.first + span.start + low) if tally.differing else tally)
    return tallies[0], tallies[1]


def _list_differences(pairs: Pairs, tallies: Tallies) -> tuple[AtomDifference, ...]:
    differences = [_report_atom(atom, "only in A") for atom in pairs.only_left]
    differences += [_report_atom(atom, "only in B") for atom in pairs.only_right]
    differences += [_report_atom(atom, "shape", text=text) for atom, text in pairs.reshaped]
    for number, (values, padding) in tallies.items():
        if values.differing or padding.differing:
            pair = pairs.both[number]
            index, shard = pair.locate(values.first if values.differing else padding.first)
            difference = _report_atom(pair.left.atom, "values", tally=values, padding=padding, index=index, shard=shard)
            differences.append(replace(difference, dtypes=(pair.left.dtype, pair.right.dtype)))
    return tuple(sorted(differences, key=_make_sort_key))


def _report_atom(atom: Atom, kind: str, **more: Any) -> AtomDifference:
    return AtomDifference(atom.name, atom.state, kind, (atom.dtype, atom.dtype), instance=atom.instance, **more)


def _make_sort_key(atom: AtomDifference) -> tuple[bool, float, int, list[str | int], str]:
    """Return a sort key: incomparable atoms, then the largest difference, then names."""
    parts = [int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d{1,18})", atom.name))]
    return atom.kind == "values", -atom.tally.largest, -atom.tally.differing, parts, atom.state


def _note_rounding(pairs: Sequence[Pair]) -> list[str]:
    rounded = [("AB"[pair.left.atom.state != MASTER], pair.rounded_to) for pair in pairs if pair.rounded_to]
    return [f"masters of {side} are compared after rounding to {dtype}" for side, dtype in dict.fromkeys(rounded)]


def _note_padding(pairs: Sequence[Pair]) -> list[str]:
    return [
        f"{pair.left.name} ({pair.left.atom.state}): {pair.left.shape[0]} rows in A, {pair.right.shape[0]} in B, of "
        f"which {pair.vocab} are the vocabulary; other padding rows are not compared"
        for pair in pairs
        if pair.left.shape != pair.right.shape
    ]


def compare(left: Buffer, right: Buffer, dtype: str, other: str, rounded_to: str = "") -> Tally:
    """Compare elements of ``dtype`` with elements of dtype ``other``.

    Elements of one dtype are equal if their bits are; of two dtypes if their values are, or both are NaN. With
    ``rounded_to``, one of the two dtypes, the elements of the other one are rounded to it first.
    """
    sides = ((left, dtype), (right, other))
    first, second = (
        _round(*side, rounded_to) if rounded_to else np.frombuffer(side[0], find_dtype(side[1])) for side in sides
    )
    if dtype == other:
        bits = f"u{first.itemsize}" if first.itemsize <= 8 else f"V{first.itemsize}"
        places = np.flatnonzero(first.view(bits) != second.view(bits))
    else:
        places = np.flatnonzero(_differ_in_value(_widen(first), _widen(second)))
    if not len(places):
        return Tally(len(first))
    return Tally(len(first), len(places), int(places[0]), *_measure(_widen(first[places]), _widen(second[places])))


def _round(data: Buffer, dtype: str, target: str) -> Array:
    rounded = np.empty(len(data) // ITEMSIZE[dtype], find_dtype(target))
    cast(memoryview(data), dtype, memoryview(rounded.view(np.uint8)), target)
    return rounded


def _differ_in_value(first: Array, second: Array) -> Array:
    return np.asarray((first != second) & ~(np.isnan(first) & np.isnan(second)))


def _widen(data: Array) -> Array:
    """Convert to the widest type of the kind; a long double holds 64-bit integers."""
    kind = np.longdouble if data.dtype.kind in "iu" and data.itemsize == 8 else np.float64
    return data.astype(np.complex128 if data.dtype.kind == "c" else kind)


def _measure(first: Array, second: Array) -> tuple[float, float]:
    """Return the largest absolute and relative difference; inf for NaN and a number."""
    with np.errstate(all="ignore"):
        apart = np.abs(first - second)
        size = np.maximum(np.abs(first), np.abs(second))
        relative = np.where(size > 0, apart / size, 0.0)
    alike = ~_differ_in_value(first, second)

    def find_largest(distances: Array) -> float:
        return float(np.where(alike, 0.0, np.nan_to_num(distances, nan=math.inf, posinf=math.inf)).max())

    return find_largest(apart), find_largest(relative)
