"""Headers of a checkpoint's files, reduced to small picklable objects.

Headers that differ only in offsets and sizes have a compact form: a shared template, and a row of integers per file.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, zip_longest
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ...comm import pack, unpack
from ...model.flat import Shape
from ...model.index import Use
from ...model.records import Record
from ...model.storage import count, strip_compiled
from ...model.wrappers import Wrapper, find_wrapper


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous tensor in a file: its record, byte offset in it, shape and dtype.

    ``fault`` is the reason why its bytes cannot be resharded (a permuted memory format, an unknown dtype), or empty.
    """

    record: Record
    offset: int
    shape: Shape
    dtype: str
    fault: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as one call, which is faster than restoring each slot."""
        return Piece, (self.record, self.offset, self.shape, self.dtype, self.fault)

    @property
    def numel(self) -> int:
        return count(self.shape)

    @property
    def contents(self) -> tuple[Shape, str, int, int, int | None, str]:
        """Fields that :func:`~deepspeed_ucp.model.are_alike` compares."""
        # ``fault``: other strides mean other elements.
        return self.shape, self.dtype, self.offset, self.record.nbytes, self.record.crc, self.fault


@dataclass(frozen=True, slots=True)
class Unread:
    """An opaque value: its class, and a digest of its pickle for comparisons.

    ``has_tensors``: it is a tensor, or a list, tuple or dict that contains one at any depth.
    """

    kind: str
    digest: str
    has_tensors: bool = False


@dataclass(frozen=True, slots=True)
class TensorStates:
    """Optimizer states of a tensor: element-wise, scalars, descriptions of others.

    ``zero_dim`` has the pieces of scalars that are 0-dim tensors: a 0-dim parameter has them as states. ``single`` has
    the values of states of shape (1,): a larger parameter has them as scalars.
    """

    states: dict[str, Piece] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    zero_dim: dict[str, Piece] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)
    single: dict[str, Any] = field(default_factory=dict)

    def as_zero_dim(self) -> TensorStates:
        """Return a 0-dim parameter's states: 0-dim scalars, except ``step``, are states."""
        states = {name: piece for name, piece in self.zero_dim.items() if name != "step"}
        scalars = {name: value for name, value in self.scalars.items() if name not in states}
        return replace(self, states={**self.states, **states}, scalars=scalars)


Slices = tuple[tuple[str, int, int], ...]
"""Parts of parameters in a partition: (name, first element in the partition, elements)."""


@dataclass(frozen=True, slots=True)
class OptimHeader:
    """An optimizer's state in one file.

    Attributes:
        kind: name of the wrapper that saved it, as in :data:`~deepspeed_ucp.model.wrappers.WRAPPERS`.
        stage: of ZeRO; 0 without ZeRO, 1 for ``bf16``.
        masters: fp32 partition of each flat buffer (unfused: of each parameter, group by group).
        tensors: the optimizer's states of each flat buffer (or parameter), in the order of the param groups.
        owners: param group of each of ``tensors``.
        slices: ZeRO 1/2 and BF16: (module's parameter name, start, numel) in the partition, for each group.
        paddings: ZeRO 1/2 and BF16: elements of padding at the end of the partition, for each group.
        alignment: ZeRO 1/2: elements of padding behind each parameter (``parameter_alignment``), for each group.
        elastic: saved with ``elastic_checkpoint``: states without padding, no hyper-parameters.
        names: atom names of each group's parameters, if the param groups record them.
        partition_ranks: ZeRO 3 with AutoEP: data-parallel ranks that hold each sub-group.
    """

    kind: str
    stage: int
    masters: Sequence[Piece]
    tensors: Sequence[TensorStates]
    owners: tuple[int, ...]
    groups: tuple[dict[str, Any], ...]
    slices: tuple[Slices, ...] = ()
    partition_count: tuple[int, ...] = ()
    paddings: tuple[int, ...] = ()
    alignment: tuple[tuple[int, ...], ...] = ()
    elastic: bool = False
    scaler: dict[str, Any] = field(default_factory=dict)
    clip_grad: float | None = None
    names: tuple[tuple[str, ...], ...] | None = None
    partition_ranks: tuple[tuple[int, ...], ...] = ()

    @property
    def traits(self) -> Wrapper:
        return find_wrapper(self.kind)

    def list_pieces(self) -> list[Piece]:
        """List the masters, then the states of each tensor."""
        states = (piece for tensor in self.tensors for piece in (*tensor.states.values(), *tensor.zero_dim.values()))
        return [*self.masters, *states]


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """A model-states file: tensors, shapes, counters, and the optimizer of stage 0.

    Names are those of atoms (:func:`~deepspeed_ucp.model.strip_compiled`), except in ``param_shapes`` and ``slices``.

    Attributes:
        module: the model's tensors; None if the file has none (a pipeline has layer files).
        nested: the module dict was nested; ``module`` has its keys joined by dots.
        param_shapes: (module's name, shape) of the parameters of each param group (ZeRO 3: of each sub-group).
        frozen_shapes: whole shapes of the frozen parameters.
        frozen: elements of frozen parameters that the file has apart from ``module``; under ZeRO 3 this rank's.
        shared: tied parameter → name that holds the data.
        counters: global_steps, global_samples, skipped_steps, dp_world_size, mp_world_size, if recorded.
        optim: the optimizer of stage 0; None if it has separate files, or is not saved.
        degrees: (pipeline, tensor) parallel degrees; None in older releases.
        hints: as in :class:`~deepspeed_ucp.model.index.AtomicIndex`.
        client_storages: storages of the client's tensors.
        facts: values that extensions read.
        batch: batch sizes in its ds_config, by DeepSpeed's names.
        helpers: as in :class:`~deepspeed_ucp.model.index.AtomicIndex`.
        shard_size: ranks over which MiCS partitions, of which only the first group saves; 0 without MiCS.
    """

    module: dict[str, Piece] | None
    nested: bool
    buffers: tuple[str, ...]
    param_shapes: tuple[tuple[tuple[str, Shape], ...], ...] | None
    frozen_shapes: dict[str, Shape]
    frozen: dict[str, Piece]
    shared: dict[str, str]
    counters: dict[str, Any]
    optim: OptimHeader | None
    client_storages: tuple[Record, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    degrees: tuple[int, int] | None = None
    hints: dict[str, Any] = field(default_factory=dict)
    batch: dict[str, int] = field(default_factory=dict)
    helpers: tuple[str, ...] = ()
    shard_size: int = 0

    @property
    def owned(self) -> dict[str, Shape]:
        """Shapes of the optimizer's parameters in ``param_shapes``, by atom name."""
        return {strip_compiled(name): shape for group in self.param_shapes or () for name, shape in group}


@dataclass(frozen=True, slots=True)
class FileHeader:
    """One file's header, with one of ``model``, ``optim``, ``layer`` and ``swap``.

    Attributes:
        globals: uncommon classes and functions that its pickle names.
        config: the parts of the saved ds_config that the index uses.
        marks: values that all files of a save have in common (:func:`~.save.read_marks`).
        layer: the tensors of a plain state_dict, such as of a pipeline's layer.
        extras: keys of the modules' extra states in such a state_dict.
        writer: ranks that wrote it, as the file records them for extensions.
        swap: the expected content of a swap file, which has no header.
        checked: all records have checksums, so that ``crc`` identifies the file.
    """

    name: str
    size: int
    crc: int | None = None
    globals: tuple[Use, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    model: ModelHeader | None = None
    optim: OptimHeader | None = None
    layer: Mapping[str, Piece] | None = None
    extras: tuple[str, ...] = ()
    writer: dict[str, Any] = field(default_factory=dict)
    swap: Piece | None = None
    checked: bool = False

    def require_model(self) -> ModelHeader:
        if self.model is None:
            raise TypeError(f"{self.name} is no file of model states")
        return self.model

    def require_optim(self) -> OptimHeader:
        if self.optim is None:
            raise TypeError(f"{self.name} is no file of optimizer states")
        return self.optim

    def __reduce__(self) -> tuple[Any, ...]:
        return FileHeader, tuple(getattr(self, name) for name in self.__slots__)


# -- compact form ------------------------------------------------------------------------------------------------------
#
# Thousands of optimizer files differ only in the locations and sizes of their pieces, in their parameters and padding;
# tens of thousands of small state_dicts also in the prefix of their tensors' names. A header is therefore sent as a
# HeaderDelta, its template once per rank. Pieces are built on demand.

T = TypeVar("T")

PIECE: Final = np.dtype([(name, "<i8") for name in ("offset", "nbytes", "crc", "start", "numel")])
"""A piece: offset, bytes and checksum (-1: none) of its record, its first byte in the record, and its elements."""

_PIECE = struct.Struct("<5q")

_Variables = tuple[Any, ...]
"""Fields that a template leaves open: slices and paddings of an optimizer's file; prefix of a state_dict's names."""


def _list_pieces(header: FileHeader) -> list[Piece]:
    return header.optim.list_pieces() if header.optim else list((header.layer or {}).values())


def _encode_pieces(header: FileHeader) -> bytes:
    """Encode all pieces of a header as consecutive :data:`PIECE` items."""
    numbers = list[int]()
    for piece in _list_pieces(header):
        offset, nbytes, crc = piece.record
        numbers += (offset, nbytes, -1 if crc is None else crc, piece.offset, piece.numel)
    return _pack_integers(numbers)


def _pack_integers(numbers: Collection[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


class HeaderTemplate:
    """Common content of headers that differ in :data:`PIECE` and :data:`_Variables`.

    Attributes:
        header: one of these headers, of an optimizer's file or a state_dict.
        firsts: piece → first piece in the same record.
        starts: optimizer's file: tensor → number of its first piece.
        ends: state_dict: its names without their common prefix → number of the piece.
    """

    def __init__(self, header: FileHeader) -> None:
        self.header, self._pieces = header, _list_pieces(header)
        numbers: dict[Record, int] = {}
        self.firsts = [numbers.setdefault(piece.record, number) for number, piece in enumerate(self._pieces)]
        optim = header.optim
        shapes = [(-1,) if optim and len(piece.shape) == 1 else piece.shape for piece in self._pieces]
        kinds = [(piece.dtype, piece.fault) for piece in self._pieces]
        self._kinds = tuple(zip(self.firsts, shapes, kinds, strict=True))
        self._hash = hash(self._kinds)
        start = len(find_prefix(header.layer or ()))
        self.ends = {name[start:]: number for number, name in enumerate(header.layer or ())}
        counts = [len(tensor.states) + len(tensor.zero_dim) for tensor in optim.tensors] if optim else []
        self.starts = list(accumulate(counts, initial=len(optim.masters))) if optim else []

    def pack(self) -> bytes:
        """Pickle the template; equal templates of state_dicts mostly have equal bytes."""
        header = self.header
        if header.layer:
            pieces = zip(self.ends, self._pieces, self.firsts, strict=True)
            records = ((end, piece, Record(first, 0, None)) for end, piece, first in pieces)
            layer = {end: replace(piece, record=record, offset=0) for end, piece, record in records}
            header = replace(header, name="", size=0, crc=None, writer={}, layer=layer)
        return pack(header)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeaderTemplate) and self._kinds == other._kinds and self._rest == other._rest

    @cached_property
    def _rest(self) -> tuple[object, ...]:
        optim, names = self.header.optim, list[tuple[list[str], list[str]]]()
        if optim is not None:
            names = [(list(tensor.states), list(tensor.zero_dim)) for tensor in optim.tensors]
            tensors = tuple(replace(tensor, states={}, zero_dim={}) for tensor in optim.tensors)
            optim = replace(optim, masters=(), tensors=tensors, slices=(), paddings=(0,) * len(optim.paddings))
        header = self.header
        common = header.globals, header.config, header.marks, header.model, header.extras, header.checked
        return common, optim, names, self.starts, [*self.ends]

    @property
    def optim(self) -> OptimHeader:
        return self.header.require_optim()

    def list_states(self, tensor: int) -> range:
        """Return the indices of the pieces of a tensor's states."""
        return range(self.starts[tensor], self.starts[tensor + 1])

    def make_piece(self, number: int, encoded: bytes) -> Piece:
        like = self._pieces[number]
        offset, nbytes, crc, start, numel = _PIECE.unpack_from(encoded, number * _PIECE.size)
        shape = (numel,) if len(like.shape) == 1 else like.shape
        record = Record(offset, nbytes, None if crc < 0 else crc)
        return Piece(record, start, shape, like.dtype, like.fault)

    def make_states(self, tensor: int, encoded: bytes) -> TensorStates:
        like = self.optim.tensors[tensor]
        made = iter([self.make_piece(number, encoded) for number in self.list_states(tensor)])
        states = {name: next(made) for name in like.states}
        return replace(like, states=states, zero_dim={name: next(made) for name in like.zero_dim})


class LazyParts(Sequence[T]):
    """Masters or tensors of an optimizer's file, built on demand by ``make``."""

    __slots__ = ("encoded", "length", "make", "template")

    def __init__(self, encoded: bytes, length: int, make: Callable[[int, bytes], T], template: HeaderTemplate) -> None:
        self.encoded, self.length, self.make, self.template = encoded, length, make, template

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: Any) -> Any:
        """Build a part; slices are not supported."""
        return self.make(range(self.length)[at], self.encoded)


class PrefixedTensors(Mapping[str, Piece]):
    """The tensors of a state_dict by name, built on demand."""

    __slots__ = ("encoded", "prefix", "template")

    def __init__(self, template: HeaderTemplate, encoded: bytes, prefix: str) -> None:
        self.template, self.encoded, self.prefix = template, encoded, prefix

    def __len__(self) -> int:
        return len(self.template.ends)

    def __iter__(self) -> Iterator[str]:
        return iter([self.prefix + end for end in self.template.ends])

    def __getitem__(self, name: str) -> Piece:
        if not name.startswith(self.prefix):
            raise KeyError(name)
        return self.template.make_piece(self.template.ends[name[len(self.prefix) :]], self.encoded)


class HeaderDelta(NamedTuple):
    """A header encoded against its template, for sending.

    Attributes:
        template: packed; empty for the template of a header that every rank has.
        encoded: its pieces, as :data:`PIECE` items.
    """

    template: bytes
    name: str
    size: int
    crc: int | None
    writer: dict[str, Any]
    variables: _Variables
    encoded: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the numbers as integers: most take a few bytes."""
        return _restore_delta, (*self[:-1], struct.unpack(f"<{len(self.encoded) // 8}q", self.encoded))

    def decode(self, known: dict[bytes, HeaderTemplate]) -> FileHeader:
        """Return the header; a new template is added to ``known`` by its packed form."""
        template = known.get(self.template)
        if template is None:
            template = known[self.template] = HeaderTemplate(unpack(self.template))
        header, optim = template.header, template.header.optim
        layer: Mapping[str, Piece] | None = None
        if optim is None:
            layer = PrefixedTensors(template, self.encoded, *self.variables)
        else:
            slices, paddings = self.variables
            masters = LazyParts(self.encoded, len(optim.masters), template.make_piece, template)
            tensors = LazyParts(self.encoded, len(optim.tensors), template.make_states, template)
            optim = replace(optim, masters=masters, tensors=tensors, slices=slices, paddings=paddings)
        return FileHeader(  # dataclasses.replace takes several times as long, and each rank decodes all headers
            name=self.name,
            size=self.size,
            crc=self.crc,
            globals=header.globals,
            config=header.config,
            marks=header.marks,
            model=header.model,
            optim=optim,
            layer=layer,
            extras=header.extras,
            writer=self.writer,
            checked=header.checked,
        )


def _restore_delta(*fields: Any) -> HeaderDelta:
    return HeaderDelta._make((*fields[:-1], _pack_integers(fields[-1])))


def encode_header(
    header: FileHeader, first: HeaderTemplate, known: dict[HeaderTemplate, bytes]
) -> FileHeader | HeaderDelta:
    """Encode an optimizer's or a state_dict's header; return others unchanged.

    Args:
        first: template of a header that every rank has.
        known: this rank's other templates and their packed form, to which new ones are added.
    """
    if header.optim is not None:
        variables: _Variables = header.optim.slices, header.optim.paddings
    else:
        tensors = header.layer or {}
        variables = (prefix := find_prefix(tensors),)
        if not prefix or not all(piece.numel and not piece.fault for piece in tensors.values()):
            return header
    template = HeaderTemplate(header)
    if template != first and template not in known:
        known[template] = template.pack()
    sent = known.get(template, b"")
    return HeaderDelta(sent, header.name, header.size, header.crc, header.writer, variables, _encode_pieces(header))


def find_prefix(names: Collection[str]) -> str:
    """Return the common prefix of names up to a dot."""
    first, last = min(names, default=""), max(names, default="")
    same = next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    return first[: first.rfind(".", 0, same) + 1]


@dataclass(eq=False)
class FileBatch:
    """Some files with one template, and the partitions of a flat buffer in them.

    Attributes:
        all_files: all files with the template.
        table: a :data:`PIECE` for each of these and each piece.
        file_numbers: of all files in the index; empty until a record of theirs is numbered.
        record_numbers: piece → number of the first file's record in the index; those of all other files follow.
            All selections of the files share ``file_numbers`` and this.
        files, parts: the selected files, by their places, and the partition that each holds.
    """

    template: HeaderTemplate
    all_files: list[FileHeader]
    table: npt.NDArray[np.void]
    file_numbers: array[int] = field(default_factory=partial(array, "q"))
    record_numbers: dict[int, int] = field(default_factory=dict)
    files: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    @cached_property
    def headers(self) -> list[FileHeader]:
        return [self.all_files[file] for file in self.files]

    @cached_property
    def slices(self) -> list[tuple[Slices, ...]]:
        """Slices of each group in each selected file."""
        return list(zip_longest(*(header.require_optim().slices for header in self.headers), fillvalue=()))

    @cached_property
    def paddings(self) -> list[tuple[int, ...]]:
        """Elements of padding at the end of each group's partition in each selected file."""
        return list(zip(*(header.require_optim().paddings for header in self.headers), strict=True))

    @cached_property
    def rows(self) -> npt.NDArray[np.int64]:
        """The selected files' rows in the table."""
        return np.array(self.files, np.int64)

    def make_first_piece(self, piece: int) -> Piece:
        return self.template.make_piece(piece, self.table[self.files[0]].tobytes())

    def pick(self, piece: int, field: str) -> array[int]:
        """Return one field of :data:`PIECE` of a piece for each selected file."""
        return array("q", self.table[field][self.rows, piece].tobytes())

    def pick_padding(self, group: int) -> Sequence[int]:
        """Return the padding of a group's partition in each file; 0 if not recorded."""
        optim = self.template.optim
        recorded = optim.traits.strips_padding and group < len(optim.paddings)
        return self.paddings[group] if recorded else [0] * len(self.files)

    def split_by_file(self) -> Iterator[FileBatch]:
        return (replace(self, files=[file], parts=[part]) for file, part in zip(self.files, self.parts, strict=True))


Batches = dict[str, tuple[FileBatch, int]]
"""File → the batch of all files with its template, and its place in the batch."""


def batch_files(headers: Iterable[FileHeader]) -> Batches:
    """Group files of optimizers and state_dicts by template."""
    groups: dict[HeaderTemplate, list[tuple[FileHeader, bytes]]] = {}
    for header in headers:
        parts = header.optim.masters if header.optim else header.layer
        if isinstance(parts, (LazyParts, PrefixedTensors)):
            groups.setdefault(parts.template, []).append((header, parts.encoded))
        else:
            groups.setdefault(HeaderTemplate(header), []).append((header, _encode_pieces(header)))
    batches: Batches = {}
    for template, files in groups.items():
        table = np.frombuffer(b"".join(encoded for _, encoded in files), PIECE)
        batch = FileBatch(template, [header for header, _ in files], table.reshape(len(files), len(template.firsts)))
        batches.update({header.name: (batch, file) for file, (header, _) in enumerate(files)})
    return batches


def select_files(batches: Batches, headers: Iterable[FileHeader]) -> list[FileBatch]:
    """Select files by template; their places in ``headers`` are their partitions."""
    chosen: dict[int, FileBatch] = {}
    for part, header in enumerate(headers):
        batch, file = batches[header.name]
        if id(batch) not in chosen:
            chosen[id(batch)] = replace(batch, files=[], parts=[])
        chosen[id(batch)].files.append(file)
        chosen[id(batch)].parts.append(part)
    return list(chosen.values())
