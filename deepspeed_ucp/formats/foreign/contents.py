"""Common form of foreign checkpoints: their contents, reading, and atomic view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, shorten
from ...io.memory import pause_collection
from ...io.paths import join_path
from ...model.flat import Shape
from ...model.index import AtomicIndex, GroupInfo
from ...model.records import FileRef, Record, Records
from ...model.storage import (
    COPY,
    ITEMSIZE,
    MASTER,
    MODULE,
    Atom,
    AtomKey,
    Fragment,
    Fragments,
    ParamKey,
    check_coverage,
    count,
    strip_compiled,
)
from ...model.topology import Topology
from ...model.wrappers import ATOMIC
from ...torchsave.objects import describe
from ...torchsave.unpickle import MOST_DIMENSIONS
from ..deepspeed.headers import Piece
from ..findings import WARNING, Finding, explain_form
from ..locations import FileTable

T = TypeVar("T")

_LARGEST_SIZE = 1 << 62
_LONGEST_NAME = 1 << 12

_UNCHECKED = "its tensors have no checksums: damage in them is not detected"
_MOST_RUNS = 1 << 22  # maximum number of runs of elements in all tensors that are not cut into a grid

NEITHER = "neither model nor optimizer"
ODD_STATES = (
    "its optimizer keeps values that are neither tensors nor numbers: {0}. Load only the weights "
    "(load_optimizer_states=False)"
)
"""Reason why optimizer states cannot be loaded; ``{0}``: the states."""


def read_with(parse: Callable[[str], T], where: FileTable, name: str) -> T:
    """Read a file from the first place where ``parse``, given its path, succeeds."""

    def read(folder: str) -> T:
        path = join_path(folder, name)
        with explain_form(path), pause_collection():
            return parse(path)

    return where.read(name, read)


def read_once(parse: Callable[[str], T], where: FileTable, name: str, comm: Comm) -> T:
    """Read a file on one rank for all (collective); arguments as of :func:`read_with`."""
    return where.once(name, lambda: read_with(parse, where, name), comm)


def read_shape(value: Any) -> Shape:
    """Validate a shape, or an index, from a file."""
    if not isinstance(value, (list, tuple)) or len(value) > MOST_DIMENSIONS:
        raise ValueError(f"{describe(value)} for a shape")
    for size in value:
        if type(size) is not int or not 0 <= size < _LARGEST_SIZE:
            raise ValueError(f"{describe(size)} in a shape")
    return tuple(value)


def is_number(state: str, shape: Shape, weight: Shape | None) -> bool:
    """Return True if a state is a number: ``step``, or 0-dim unlike its weight.

    ``weight``: shape of the parameter, if known.
    """
    return shape == () and (state == "step" or weight != ())


def read_name(value: Any) -> str:
    """Validate a name from a pickle: text of limited length."""
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise ValueError(f"{describe(value)} for a name")
    return value


def derive_counters(steps: Iterable[Any]) -> dict[str, int]:
    """Derive a run's counters from the optimizer's steps; empty without steps."""
    counts = list(steps)
    for step in counts:
        if not isinstance(step, (int, float)) or not 0 <= step < _LARGEST_SIZE:
            raise ValueError(f"{describe(step)} for a step")
    return {"global_steps": int(max(counts))} if counts else {}


def list_ignored(names: Collection[str], reason: str, where: str, file: str = "") -> list[Finding]:
    """Warn of contents of a checkpoint that are not loaded."""
    text = f"{where}: not loaded by the engine, since it is {reason}: {shorten(names)}."
    return [Finding("unsaved", file or next(iter(names)), text, WARNING)] if names else []


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """A contiguous row-major block of a tensor: first index, file, place in the file."""

    offsets: Shape
    file: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as blocks in any order."""

    dtype: str
    shape: Shape
    chunks: tuple[TensorBlock, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a foreign checkpoint, as returned by the reader of its format.

    Attributes:
        head: name of the first file, for messages.
        scalars: numbers of the optimizer by parameter.
        groups: param groups: names, and hyper-parameters.
        aliases: tied name → name with the data.
        stateless: why the optimizer states cannot be loaded, and the remedy; empty if they can, or there are none.
        scalar_dtypes: dtypes of scalars that are 0-dim tensors.
        counters, dropped, hints: as in :class:`AtomicIndex`.
        unchecked: parts without a checksum, if the tensors have some.
    """

    format: str
    head: str
    weights: Mapping[str, StoredTensor]
    states: Mapping[str, Mapping[str, StoredTensor]] = field(default_factory=dict)
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)
    stateless: str = ""
    scalar_dtypes: Mapping[str, str] = field(default_factory=dict)
    dropped: str = ""
    hints: Mapping[str, Any] = field(default_factory=dict)
    unchecked: str = ""


def make_index(contents: Contents, where: FileTable) -> AtomicIndex:
    """Build the atomic view.

    Weights of optimized parameters are masters, or copies if the states include a master; all other weights are module
    tensors.
    """
    maker = _AtomMaker(where)
    trained = {name for names, _ in contents.groups for name in names} | contents.states.keys()
    for name, tensor in contents.weights.items():
        state = COPY if MASTER in contents.states.get(name, ()) else MASTER if name in trained else MODULE
        maker.add(strip_compiled(name), state, tensor)
    members = Counter(name for names, _ in contents.groups for name in names)
    if several := sorted(name for name, number in members.items() if number > 1):
        text = f"holds {shorten(several)} in several param groups, or twice in one; it is damaged."
        raise CheckpointError(text, path=where.path(contents.head))
    irregular: dict[AtomKey, str] = {}
    for name, states in contents.states.items():
        weight = contents.weights.get(contents.aliases.get(name, name))
        for state, tensor in states.items():
            if state in (MODULE, COPY):
                raise UnsupportedError(f"{name} has an optimizer state {state!r}.", path=where.path(contents.head))
            if weight is None or tensor.shape == weight.shape:
                maker.add(strip_compiled(name), state, tensor)
                continue
            shapes = f"of shape {tensor.shape}, its weight of {weight.shape}"
            if state == MASTER:
                raise CheckpointError(f"{name}: the master is {shapes}; it is damaged.", path=where.path(contents.head))
            irregular[AtomKey(strip_compiled(name), state)] = shapes
    aliases = {strip_compiled(alias): strip_compiled(name) for alias, name in contents.aliases.items()}
    if twice := aliases.keys() & {atom.name for atom in maker.atoms}:
        raise CheckpointError(f"holds {shorten(sorted(twice))} twice.", path=where.folder)
    unchecked = (
        _UNCHECKED if any(record.crc is None for record in maker.records if record.nbytes) else contents.unchecked
    )
    dtypes = [tensor.dtype for name, tensor in contents.weights.items() if tensor.dtype.startswith(("float", "bf"))]
    precision = max(dtypes, key=dtypes.count, default="float32")
    masters = [states[MASTER].dtype for states in contents.states.values() if MASTER in states] or [precision]
    groups = [
        GroupInfo(tuple(ParamKey(strip_compiled(name)) for name in names), dict(hyper))
        for names, hyper in contents.groups
    ]
    return AtomicIndex.of(
        maker.files,
        maker.records,
        maker.atoms,
        topology=Topology(zero_stage=0, wrapper=ATOMIC, precision=precision, master=masters[0]),
        state_file=where.path(contents.head),
        counters=dict(contents.counters),
        scalars={ParamKey(strip_compiled(name)): dict(values) for name, values in contents.scalars.items()},
        groups=tuple(groups),
        scalar_dtypes=dict(contents.scalar_dtypes),
        format=contents.format,
        foreign=contents.format,
        aliases=aliases,
        hints=dict(contents.hints),
        irregular=irregular,
        stateless=contents.stateless,
        dropped=contents.dropped,
        unchecked=unchecked,
    )


class _AtomMaker:
    """Collector of checked atoms, and of the files and records that hold them."""

    def __init__(self, where: FileTable) -> None:
        self.where = where
        self.files: list[FileRef] = []
        self.records = Records()
        self.atoms: list[Atom] = []
        self._file_ids: dict[str, int] = {}
        self._record_ids: dict[tuple[int, Record], int] = {}
        self._keys: set[tuple[str, str]] = set()
        self._runs = 0

    def add(self, name: str, state: str, tensor: StoredTensor) -> None:
        if (name, state) in self._keys:
            raise CheckpointError(f"holds {name} ({state}) twice.", path=self.where.folder)
        self._keys.add((name, state))
        shape, dtype = tensor.shape, tensor.dtype
        chunks, blocks = [chunk for chunk in tensor.chunks if chunk.piece.numel], list[Fragment]()
        for chunk in chunks:
            record, piece = self._number_record(chunk), chunk.piece
            self._check_block(name, tensor, chunk)
            blocks.append(Fragment.of_block(chunk.offsets, piece.shape, shape, record, piece.offset))
        runs = sum(block.count_runs(shape) for block in blocks)
        is_grid = runs > len(blocks) and _is_grid(shape, chunks)
        if not is_grid:
            self._runs += runs
            if self._runs > _MOST_RUNS:
                text = f"{name} is cut irregularly, into more than {_MOST_RUNS} pieces with the others."
                raise UnsupportedError(text, path=self.where.folder)
            blocks = [run for block in blocks for run in block.list_runs(shape, ITEMSIZE[dtype])]
        storage = Fragments(dtype, sorted(blocks, key=attrgetter("start")), shape if is_grid else ())
        atom = Atom.of(name, state, [(shape, storage)])
        if not is_grid:
            check_coverage(atom, lambda part: self.files[self.records.files[part.record]].path)
        self.atoms.append(atom)

    def _check_block(self, name: str, tensor: StoredTensor, chunk: TensorBlock) -> None:
        piece, record = chunk.piece, chunk.piece.record
        dims = list(zip(chunk.offsets, piece.shape, tensor.shape, strict=False))
        fits = len(chunk.offsets) == len(piece.shape) == len(tensor.shape)
        if not fits or any(at + size > whole for at, size, whole in dims):
            raise CheckpointError(
                f"{name}: a block of shape {piece.shape} at {chunk.offsets} is not inside of shape {tensor.shape}; the "
                "file is damaged.",
                path=self.where.path(chunk.file),
            )
        nbytes = piece.numel * ITEMSIZE[tensor.dtype]
        size = self.where.entries[chunk.file].size
        if not 0 <= piece.offset <= record.nbytes - nbytes or record.offset + record.nbytes > size:
            raise CheckpointError(
                f"{name}: {nbytes} bytes do not fit into {record.nbytes} of the file's {size}; it is truncated, or of "
                "another save.",
                path=self.where.path(chunk.file),
            )

    def _number_record(self, chunk: TensorBlock) -> int:
        file = self._file_ids.get(chunk.file)
        if file is None:
            if chunk.file not in self.where.entries:
                raise CheckpointError("is missing. Copy it here.", path=self.where.path(chunk.file))
            file = self._file_ids[chunk.file] = len(self.files)
            self.files.append(self.where.make_ref(chunk.file, self.where.entries[chunk.file].size))
        record = chunk.piece.record
        number = self._record_ids.setdefault((file, record), len(self.records))
        if number == len(self.records):
            self.records.append(file, record)
        return number


def _is_grid(shape: Shape, chunks: Sequence[TensorBlock]) -> bool:
    """Return True if the blocks tile the tensor as a grid, each cell once."""
    cuts = [sorted({(chunk.offsets[dim], chunk.piece.shape[dim]) for chunk in chunks}) for dim in range(len(shape))]
    for cut, size in zip(cuts, shape, strict=True):
        if [*(at for at, _ in cut), size] != [0, *(at + width for at, width in cut)]:
            return False
    return len({chunk.offsets for chunk in chunks}) == len(chunks) == count(tuple(map(len, cuts)))
