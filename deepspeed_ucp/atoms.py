"""The atomic view of a checkpoint: atoms, where their fragments lie, and what belongs to them.

Pure data: no torch, no files. An atom is one (parameter, state) of the model, whole; the index says which byte ranges
of which files make it up (Lian et al., ATC'25, section 4: the atomic checkpoint as the common representation).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from .errors import CheckpointError
from .flat import FlatBuffer
from .topology import Topology

if TYPE_CHECKING:  # numpy takes long to import
    from .sight import Sight

MASTER = "fp32"
"""State name of the master weight."""

MODULE = "module"
"""State name of tensors that no optimizer owns: frozen and unoptimized parameters, buffers."""

COPY = "copy"
"""State name of the model's own copy of an optimized parameter (16-bit, or fp32), as the module states hold it."""

MOMENTUM = "momentum_buffer"
"""State name of what Muon keeps; other optimizers keep a state of that name as well."""

USE_MUON = "use_muon"
"""Hyper-parameter of the param groups of DeepSpeed's Muon: whether it is used, or an Adam."""

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


class ParamKey(NamedTuple):
    """A parameter; of those that several pipeline stages hold under one name, ``instance`` counts the stages."""

    name: str
    instance: int = 0

    def __str__(self) -> str:
        """For people: ``name``, ``name (instance 1)``."""
        return f"{self.name} (instance {self.instance})" if self.instance else self.name


class AtomKey(NamedTuple):
    """An atom's parameter, state, and instance (see :class:`ParamKey`)."""

    name: str
    state: str
    instance: int = 0

    @property
    def param(self) -> ParamKey:
        """Its parameter."""
        return ParamKey(self.name, self.instance)


@dataclass(frozen=True, slots=True)
class FileRef:
    """A checkpoint file.

    Attributes:
        path: where this rank finds it; where it would lie, of a file that only other ranks see.
        size: in bytes.
        header_crc: CRC32 of its directory, if it has one.
        places: paths where this rank finds files of that name and size, the one that is read first in front; empty
            where ``path`` is all.
    """

    path: str
    size: int
    header_crc: int | None = None
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """A storage inside a file: ``nbytes`` bytes at byte ``offset``; ``crc`` as training wrote it, or None."""

    file: int
    offset: int
    nbytes: int
    crc: int | None


class Records(Sequence[Record]):
    """Records by number, as columns: there may be a million.

    Attributes:
        files, offsets, nbytes: of each record; 64-bit integers.
        crcs: -1 where there is none.
    """

    __slots__ = ("crcs", "files", "nbytes", "offsets")

    def __init__(self) -> None:
        self.files, self.offsets, self.nbytes, self.crcs = array("q"), array("q"), array("q"), array("q")

    @classmethod
    def of(cls, records: Sequence[Record]) -> Records:
        """Some records as columns; themselves if they are."""
        if isinstance(records, cls):
            return records
        made = cls()
        for record in records:
            made.append(record)
        return made

    def append(self, record: Record) -> None:
        """Add one."""
        self.files.append(record.file)
        self.offsets.append(record.offset)
        self.nbytes.append(record.nbytes)
        self.crcs.append(-1 if record.crc is None else record.crc)

    def extend(self, files: Iterable[int], offsets: Iterable[int], nbytes: Iterable[int], crcs: Iterable[int]) -> None:
        """Add several, as many of each."""
        self.files.extend(files)
        self.offsets.extend(offsets)
        self.nbytes.extend(nbytes)
        self.crcs.extend(crcs)

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, at: int) -> Record: ...
    @overload
    def __getitem__(self, at: slice) -> list[Record]: ...
    def __getitem__(self, at: int | slice) -> Record | list[Record]:
        if isinstance(at, slice):
            return [self[number] for number in range(len(self))[at]]
        crc = self.crcs[at]
        return Record(self.files[at], self.offsets[at], self.nbytes[at], None if crc < 0 else crc)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + numel) of a flattened shard, at byte ``offset`` of record ``record``."""

    start: int
    numel: int
    record: int
    offset: int


@dataclass(frozen=True, slots=True)
class Loose:
    """One state of one parameter, as fragments in element order."""

    dtype: str
    fragments: list[Fragment]

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether it is one fragment, of all elements of a shape; of an empty one, none."""
        numel, parts = count(shape), self.fragments
        return (len(parts) == 1 and (parts[0].start, parts[0].numel) == (0, numel)) or not (parts or numel)

    def hold(self, place: int) -> tuple[Fragment, ...]:
        """The fragments of its parameter at a place."""
        return tuple(self.fragments)

    def list_records(self) -> Iterable[tuple[int, int]]:
        """Its parts, and the record that each lies in."""
        return enumerate(fragment.record for fragment in self.fragments)

    def list_part(self, part: int) -> Iterable[tuple[int, Fragment]]:
        """What is in a part: places of parameters, and the fragment of each."""
        return [(0, self.fragments[part])]


@dataclass(frozen=True)
class Spread:
    """One state of all parameters of a flat buffer, as files hold it: a record for each partition.

    Attributes:
        buffer: its parameters under the whole model's names.
        dtype: as stored.
        records: by partition its record; -1 where no file has it.
        offsets: by partition the byte of the record at which it begins.
    """

    buffer: FlatBuffer
    dtype: str
    records: Sequence[int]
    offsets: Sequence[int]

    @cached_property
    def _is_whole(self) -> bool:
        return self.buffer.is_whole and len(self.records) == self.buffer.parts and min(self.records) >= 0

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether all partitions are there, and in them every element of each parameter once."""
        return self._is_whole

    def hold(self, place: int) -> Strip:
        """The fragments of its parameter at a place."""
        return Strip(self, place)

    def list_records(self) -> Iterable[tuple[int, int]]:
        """Its parts, and the record that each lies in."""
        return ((part, record) for part, record in enumerate(self.records) if record >= 0)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.buffer.names)}

    def list_part(self, part: int) -> Iterable[tuple[int, Fragment]]:
        """What is in a part: places of parameters, and the fragment of each."""
        record, begin, itemsize = self.records[part], self.offsets[part], ITEMSIZE[self.dtype]
        for cut in self.buffer.cuts(part):
            yield self._places[cut.name], Fragment(cut.start, cut.numel, record, begin + cut.offset * itemsize)


@dataclass(frozen=True, slots=True)
class Row:
    """One state of parameters of one size, each whole in a record of its own.

    Attributes:
        dtype: as stored.
        numel: of each of them, at least 1.
        first: record of the first one; those of the others follow it.
        offsets: by parameter the byte of the record at which it begins.
    """

    dtype: str
    numel: int
    first: int
    offsets: Sequence[int]

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether it is all elements of a shape."""
        return count(shape) == self.numel

    def hold(self, place: int) -> tuple[Fragment, ...]:
        """The fragments of its parameter at a place."""
        return (Fragment(0, self.numel, self.first + place, self.offsets[place]),)

    def list_records(self) -> Iterable[tuple[int, int]]:
        """Its parts, and the record that each lies in."""
        return enumerate(range(self.first, self.first + len(self.offsets)))

    def list_part(self, part: int) -> Iterable[tuple[int, Fragment]]:
        """What is in a part: places of parameters, and the fragment of each."""
        return [(part, self.hold(part)[0])]


class Strip(NamedTuple):
    """The fragments of one parameter of a flat buffer, which are made when they are asked for."""

    spread: Spread
    place: int

    def find(self, low: int, high: int) -> Iterator[Fragment]:
        """Those of elements [low, high), and no further elements."""
        spread, itemsize = self.spread, ITEMSIZE[self.spread.dtype]
        for part, cut in spread.buffer.find_holders(self.place, low, high):
            if part < len(spread.records) and (record := spread.records[part]) >= 0:
                yield Fragment(cut.start, cut.numel, record, spread.offsets[part] + cut.offset * itemsize)


@dataclass(frozen=True, slots=True)
class Shard:
    """What one tensor-parallel rank holds of an atom: its local shape, and fragments in element order."""

    shape: tuple[int, ...]
    held: tuple[Fragment, ...] | Strip

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return count(self.shape)

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """All of them."""
        return tuple(self.held.find(0, self.numel)) if isinstance(self.held, Strip) else self.held

    def find(self, low: int, high: int) -> Iterable[Fragment]:
        """The fragments that hold elements [low, high)."""
        if isinstance(self.held, Strip):
            return self.held.find(low, high)
        first = max(bisect_right(self.held, low, key=lambda fragment: fragment.start) - 1, 0)
        last = bisect_right(self.held, high - 1, key=lambda fragment: fragment.start)
        return self.held[first:last]


class Holding(NamedTuple):
    """What files hold of a parameter in one lane.

    Attributes:
        shape: local.
        place: of the parameter in what lies there with it.
        states: by name what lies there.
    """

    lane: int
    shape: tuple[int, ...]
    place: int
    states: Mapping[str, Spread | Row | Loose]

    def shard(self, state: str) -> Shard:
        """What it is of an atom."""
        return Shard(self.shape, self.states[state].hold(self.place))


@dataclass(frozen=True, slots=True)
class Atom:
    """One (parameter, state): dtype as stored, and a shard per lane of the source.

    A lane is the place among those ranks that hold different parts of a parameter: the tensor-parallel rank. Experts
    that are spread over all ranks of a pipeline stage, whole, have one. How the shards make up the whole is not in the
    files: patterns settle it once the target is known. ``instance`` counts the pipeline stages that hold the parameter
    under one name, each with values of its own.
    """

    name: str
    state: str
    dtype: str
    shards: tuple[Shard, ...]
    instance: int = 0

    @property
    def key(self) -> AtomKey:
        """Under which an index holds it."""
        return AtomKey(self.name, self.state, self.instance)

    @property
    def param(self) -> ParamKey:
        """Its parameter."""
        return ParamKey(self.name, self.instance)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of tensor-parallel rank 0's shard: the logical shape where tensors are not cut."""
        return self.shards[0].shape

    @property
    def numel(self) -> int:
        """Elements that all shards together hold."""
        return sum(shard.numel for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes that all shards together hold."""
        return self.numel * ITEMSIZE[self.dtype]

    def list_holdings(self) -> Iterator[Holding]:
        """What holds it, lane by lane."""
        for lane, shard in enumerate(self.shards):
            if isinstance(shard.held, Strip):
                yield Holding(lane, shard.shape, shard.held.place, {self.state: shard.held.spread})
            else:
                yield Holding(lane, shard.shape, 0, {self.state: Loose(self.dtype, list(shard.held))})


class Atoms(Mapping[AtomKey, Atom]):
    """Atoms by key, made when they are asked for: of hundreds of thousands one rank looks at few.

    The optimizer's states come first, parameter by parameter, then the model's own tensors in the module's order.

    Args:
        held: by parameter what holds it, of each state in ascending order of the lanes.
        module: parameters and buffers of which there are the model's own tensors, in order.
    """

    __slots__ = ("held", "module")

    def __init__(self, held: Mapping[ParamKey, Sequence[Holding]], module: Iterable[ParamKey]) -> None:
        self.held, self.module = held, tuple(module)

    @classmethod
    def of(cls, atoms: Iterable[Atom]) -> Atoms:
        """Some atoms."""
        held: dict[ParamKey, list[Holding]] = {}
        module: dict[ParamKey, None] = {}
        for atom in atoms:
            held.setdefault(atom.param, []).extend(atom.list_holdings())
            module.update({atom.param: None} if atom.state in (COPY, MODULE) else {})
        return cls(held, module)

    def find_states(self, param: ParamKey) -> dict[str, str]:
        """The states that a parameter has, with their dtypes."""
        return {state: what.dtype for each in self.held.get(param, ()) for state, what in each.states.items()}

    def count_bytes(self, keys: Iterable[AtomKey]) -> int:
        """Bytes of some atoms."""
        held = ((each, key.state) for key in keys for each in self.held[key.param] if key.state in each.states)
        return sum(count(each.shape) * ITEMSIZE[each.states[state].dtype] for each, state in held)

    def list_states(self) -> list[str]:
        """The states that there are."""
        return list(dict.fromkeys(state for held in self.held.values() for each in held for state in each.states))

    def list_names(self, states: Collection[str]) -> set[str]:
        """Names of the parameters that have one of these states."""
        return {
            param.name
            for param, held in self.held.items()
            if any(state in each.states for each in held for state in states)
        }

    def __getitem__(self, key: AtomKey) -> Atom:
        name, state, instance = key
        found = [each for each in self.held[ParamKey(name, instance)] if state in each.states]
        if not found:
            raise KeyError(key)
        shards = tuple(each.shard(state) for each in found)
        return Atom(name, state, found[0].states[state].dtype, shards, instance)

    def __iter__(self) -> Iterator[AtomKey]:
        for param, held in self.held.items():
            yield from _list_keys(param, held, of_module=False)
        for param in self.module:
            yield from _list_keys(param, self.held[param], of_module=True)

    def __len__(self) -> int:
        return sum(len({state for each in held for state in each.states}) for held in self.held.values())


def _list_keys(param: ParamKey, held: Iterable[Holding], *, of_module: bool) -> Iterator[AtomKey]:
    for state in dict.fromkeys(state for each in held for state in each.states):
        if (state in (COPY, MODULE)) == of_module:
            yield AtomKey(param.name, state, param.instance)


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A param group of the source: its parameters and the hyper-parameters that the optimizer kept for them."""

    members: tuple[ParamKey, ...]
    hyper: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters, each once."""
        return tuple(dict.fromkeys(member.name for member in self.members))


@dataclass(frozen=True, slots=True)
class StoredAtoms:
    """Where a checkpoint's bytes lie.

    Attributes:
        files, records: that atoms' fragments refer to by number.
        atoms: by parameter, state and instance.
        repeated: elements that lie in the files a second time, as lane and fragment; they have to be the same.
        sight: which ranks can read which files; None where every rank can read all.
        failed: paths among the files' places that this rank passes over, since something there has failed.
    """

    files: tuple[FileRef, ...]
    records: Records
    atoms: Atoms
    repeated: dict[AtomKey, tuple[tuple[int, Fragment], ...]] = field(default_factory=dict)
    sight: Sight | None = None
    failed: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, files: Iterable[FileRef], records: Sequence[Record], atoms: Iterable[Atom]) -> StoredAtoms:
        """From plain sequences."""
        return cls(tuple(files), Records.of(records), Atoms.of(atoms))


BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys of a ds_config: samples of a step over all ranks, of a micro batch, and micro batches of a step."""

ASKED = "ucp_asked_batch"
"""Key of a ds_config: a rank's samples of a step by the script, where a trainer has kept a saved total batch."""


@dataclass(frozen=True, slots=True)
class SavedJob:
    """The job around a saved engine.

    Attributes:
        ranks: its processes.
        model_ranks: of these, those that hold one replica of the model.
        steps: optimizer steps.
        total_batch: samples of a step, over all ranks; None where nothing tells.
        accumulation: micro batches of a step; None where the ds_config does not tell.
        asked: see :data:`ASKED`; None where the script's own batch was trained on.
    """

    ranks: int
    model_ranks: int
    steps: int
    total_batch: int | None
    accumulation: int | None
    asked: int | None = None

    @classmethod
    def read(cls, counters: Mapping[str, Any]) -> SavedJob:
        """What the counters tell of it; a total batch that the ds_config left open is the samples by the steps."""
        model_ranks = counters.get("mp_world_size") or 1
        steps, samples = counters.get("global_steps") or 0, counters.get("global_samples") or 0
        total = counters.get(BATCH_SIZES[0]) or (samples // steps if steps and not samples % steps else None)
        ranks = (counters.get("dp_world_size") or 1) * model_ranks
        return cls(ranks, model_ranks, steps, total or None, counters.get(BATCH_SIZES[2]), counters.get(ASKED))


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint tells of the run that saved it, besides tensors.

    Attributes:
        topology: what wrote it.
        state_file: the file that carries scheduler, counters and client state.
        counters: global_steps, global_samples, skipped_steps, dp_world_size, mp_world_size, and batch sizes.
        scalars: per parameter, the optimizer's scalars (``step``), Python numbers.
        groups: param groups with hyper-parameters.
        scaler: loss scaler fields (``cur_scale``, ``dynamic``, …), empty without one.
        clip_grad: gradient clipping stored with the optimizer, or None.
        optimizer: name of the optimizer in the saved ds_config, or None.
        scalar_dtypes: dtypes of those scalars that the optimizer keeps as 0-dim tensors, by the scalar's name.
        client_records: records of the state file that hold the client's tensors.
        globals: classes and functions that the files' pickles name, beyond those of every checkpoint: dotted name →
            path of a file that does.
        flats: flat buffers of every model-parallel rank ``pp_rank * tp + tp_rank``, with local names and sizes.
        degrees: tensor- and pipeline-parallel degrees of the ranks whose client states there are, where these are not
            the topology's (an atomic checkpoint has none).
    """

    topology: Topology
    state_file: str
    counters: dict[str, Any] = field(default_factory=dict)
    scalars: dict[ParamKey, dict[str, Any]] = field(default_factory=dict)
    groups: tuple[GroupInfo, ...] = ()
    scaler: dict[str, Any] = field(default_factory=dict)
    clip_grad: float | None = None
    optimizer: str | None = None
    scalar_dtypes: dict[str, str] = field(default_factory=dict)
    client_records: tuple[int, ...] = ()
    flats: dict[int, tuple[FlatBuffer, ...]] = field(default_factory=dict)
    globals: dict[str, str] = field(default_factory=dict)
    degrees: tuple[int, int] | None = None

    @property
    def job(self) -> SavedJob:
        """What ran around the engine."""
        return SavedJob.read(self.counters)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a checkpoint tells of the model.

    Attributes:
        aliases: tied parameter names → the name that holds the data.
        buffers: names of the module's persistent buffers.
        instances: parameters that several pipeline stages hold, each stage with values of its own: name → how many;
            instances are numbered in stage order.
        hints: what the client state tells about the model, plain data: ``universal_checkpoint_info``, ``args``,
            ``checkpoint_version``, ``iteration``.
        recorded: patterns that an atomic checkpoint's manifest tells, as data, by parameter.
        fused: parameters that hold all experts of a layer in DeepSpeed's universal checkpoints (AutoEP's), which have
            an atom for each: name → how many.
    """

    aliases: dict[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    instances: dict[str, int] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    recorded: dict[str, dict[str, Any]] = field(default_factory=dict)
    fused: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """What of a checkpoint cannot be had.

    Attributes:
        irregular: optimizer states that cannot be cut for another topology, by parameter and state, with what they are.
        unreadable: tensors whose bytes cannot be cut, with the reason.
        dropped: why buffers and frozen parameters may be missing (upstream's converter leaves them out), or empty.
        unnoticed: what DeepSpeed's own load would not see, or take for something else, in the same topology, in words.
    """

    irregular: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    dropped: str = ""
    unnoticed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AtomicIndex:
    """A whole checkpoint as a view: its bytes, what it tells of run and model, and what of it cannot be had."""

    stored: StoredAtoms
    run: RunState
    model: ModelInfo = field(default_factory=ModelInfo)
    limits: Limits = field(default_factory=Limits)

    def change(self, **fields: Any) -> AtomicIndex:
        """The same with other values of some fields, whichever part they are of."""
        parts = {}
        for name in ("stored", "run", "model", "limits"):
            part = getattr(self, name)
            known = {each: fields.pop(each) for each in part.__dataclass_fields__ if each in fields}
            parts[name] = replace(part, **known)
        return replace(self, **parts, **fields)

    def find(self, name: str, state: str, instance: int = 0) -> Atom | None:
        """An atom; None where there is none."""
        return self.stored.atoms.get(AtomKey(name, state, instance))

    def resolve(self, name: str) -> str:
        """The name under which a parameter's data is held: itself, or what it is tied to."""
        return self.model.aliases.get(name, name)


def count(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    return prod(shape)


def are_alike(tensors: Iterable[tuple[tuple[int, ...], str, int, int, int | None]]) -> bool:
    """Whether tensors hold the same bytes, as far as checksums prove it; without a checksum nothing is proven.

    Args:
        tensors: of each (shape, dtype, byte offset in its record, the record's bytes, the record's CRC32 or None).
    """
    told = set(tensors)
    return len(told) == 1 and None not in told.pop()


def check_coverage(atom: Atom, files: Callable[[Fragment], str]) -> None:
    """Every element of every shard comes from exactly one fragment (invariant 1).

    Args:
        atom: fragments sorted by start.
        files: path of a fragment's file, for the message.

    Raises:
        CheckpointError: a gap, an overlap, or elements beyond the shape.
    """
    for rank, shard in enumerate(atom.shards):
        if fault := _find_uncovered(shard, files):
            of = f", tensor-parallel rank {rank}" if len(atom.shards) > 1 else ""
            raise CheckpointError(
                f"{atom.param} ({atom.state}, shape {shard.shape}{of}): {fault}. "
                "The checkpoint folder lacks a file or holds one of another save."
            )


def _find_uncovered(shard: Shard, files: Callable[[Fragment], str]) -> str:
    """What is wrong with a shard's fragments; empty where nothing."""
    position = 0
    for fragment in shard.fragments:
        if fragment.start != position:
            kind = "missing" if fragment.start > position else "covered twice"
            low, high = sorted((fragment.start, position))
            return f"elements [{low}, {high}) are {kind}; the next fragment is in {files(fragment)}"
        position += fragment.numel
    if position == shard.numel:
        return ""
    where = f" (last fragment in {files(shard.fragments[-1])})" if shard.fragments else ""
    return f"the shape has {shard.numel} elements, the fragments hold {position}{where}"


def strip_compiled(name: str) -> str:
    """Parameter name without the prefixes that ``torch.compile`` inserts: the name that an atom has."""
    return name.replace("_orig_mod.", "")
