"""Headers of a checkpoint's files, reduced to the fields of the index: small, picklable, exchanged by all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...model import ITEMSIZE, Use, count, strip_compiled
from ...model.wrappers import Wrapper, find_wrapper
from ...torchsave.records import FileRecord

Shape = tuple[int, ...]

Placement = tuple[tuple[int, ...], ...]
"""The experts of a layer that each expert-parallel rank holds, in the rank's order."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous tensor in a file: its record, byte offset inside it, shape and dtype.

    ``fault`` is the reason why its bytes cannot be resharded (a permuted memory format, an unknown dtype), or empty.
    """

    record: FileRecord
    offset: int
    shape: Shape
    dtype: str
    fault: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as one call: slots are restored field by field, which is slow for hundreds of thousands."""
        return Piece, (self.record, self.offset, self.shape, self.dtype, self.fault)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return count(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def contents(self) -> tuple[Shape, str, int, int, int | None]:
        """Fields that :func:`~deepspeed_ucp.model.are_alike` compares."""
        return self.shape, self.dtype, self.offset, self.record.nbytes, self.record.crc

    def narrow(self, start: int, numel: int) -> Piece:
        """Return elements [start, start + numel) of the flattened tensor."""
        offset = self.offset + start * ITEMSIZE[self.dtype]
        return Piece(self.record, offset, (numel,), self.dtype, self.fault)


@dataclass(frozen=True, slots=True)
class Unread:
    """An opaque value (a function, a class, an object): its class, and a digest of its pickle for comparisons.

    ``has_tensors``: it is a tensor, or a list, tuple or dict that contains one at any depth.
    """

    kind: str
    digest: str
    has_tensors: bool = False


@dataclass(frozen=True, slots=True)
class TensorStates:
    """The optimizer's states of one tensor: element-wise states, scalars, and descriptions of other values.

    ``zero_dim`` has the pieces of scalars that are 0-dim tensors: a 0-dim parameter has them as states. ``single`` has
    the values of states of shape (1,): a larger parameter has them as scalars.
    """

    states: dict[str, Piece] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    zero_dim: dict[str, Piece] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)
    single: dict[str, Any] = field(default_factory=dict)

    def of_zero_dim(self) -> TensorStates:
        """Return the states of a 0-dim parameter, which look like scalars; ``step`` stays a scalar."""
        states = {name: piece for name, piece in self.zero_dim.items() if name != "step"}
        scalars = {name: value for name, value in self.scalars.items() if name not in states}
        return replace(self, states={**self.states, **states}, scalars=scalars)


@dataclass(frozen=True, slots=True)
class OptimHeader:
    """An optimizer's state in one file.

    Attributes:
        kind: name of the wrapper that saved it, as in :data:`~deepspeed_ucp.model.wrappers.WRAPPERS`.
        stage: of ZeRO; 0 without ZeRO, 1 for ``bf16``.
        masters: fp32 partition of each flat buffer (unfused: of each parameter, group by group).
        tensors: the optimizer's states of each flat buffer (or parameter), in the order of the param groups.
        owners: param group of each of ``tensors``.
        groups: hyper-parameters of each param group.
        slices: ZeRO 1/2 and BF16: (module's parameter name, start, numel) in the partition, for each group.
        partition_count: for each group.
        paddings: ZeRO 1/2 and BF16: elements of padding at the end of the partition, for each group.
        alignment: ZeRO 1/2: elements of padding behind each parameter (``parameter_alignment``), for each group.
        elastic: saved with ``elastic_checkpoint``: states without padding, no hyper-parameters.
        scaler: fields of the loss scaler (``cur_scale``, ``dynamic``, …); empty without one.
        clip_grad: gradient clipping that the optimizer stored, or None.
        names: atom names of each group's parameters, if the param groups record them.
        partition_ranks: ZeRO 3 with AutoEP: data-parallel ranks that hold each sub-group.
    """

    kind: str
    stage: int
    masters: Sequence[Piece]
    tensors: Sequence[TensorStates]
    owners: tuple[int, ...]
    groups: tuple[dict[str, Any], ...]
    slices: tuple[tuple[tuple[str, int, int], ...], ...] = ()
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
        """The wrapper's description."""
        return find_wrapper(self.kind)

    def list_pieces(self) -> list[Piece]:
        """List the masters, then the states of each tensor."""
        states = (piece for held in self.tensors for piece in (*held.states.values(), *held.zero_dim.values()))
        return [*self.masters, *states]


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """A model-states file: its tensors, shapes, counters, and the optimizer of stage 0.

    Names are those of atoms (:func:`~deepspeed_ucp.model.strip_compiled`), except in ``param_shapes`` and ``slices``.

    Attributes:
        module: the model's tensors; None if the file has none (a pipeline has layer files).
        nested: the module dict was nested; ``module`` has its keys joined by dots.
        buffers: names of the module's persistent buffers.
        param_shapes: (module's name, shape) of the parameters of each param group (ZeRO 3: of each sub-group).
        frozen_shapes: whole shapes of the frozen parameters.
        frozen: elements of frozen parameters that the file has apart from ``module``; under ZeRO 3 this rank's.
        shared: tied parameter → name that holds the data.
        counters: global_steps, global_samples, skipped_steps, dp_world_size, mp_world_size, if recorded.
        optim: the optimizer of stage 0; None if it has separate files, or is not saved.
        degrees: (pipeline, tensor) parallel degrees; None in older releases.
        hints: as in :class:`~deepspeed_ucp.model.ModelInfo`.
        others: storages of the client's tensors.
        experts: number of experts of each mixture-of-experts layer; empty without any.
        placements: prefix of the experts' parameter names → placement, for AutoEP's layers.
        ep_rank: AutoEP's expert-parallel rank that wrote the file.
        batch: batch sizes in its ds_config, by DeepSpeed's names.
        shard_size: ranks over which MiCS partitions, of which only the first group saves; 0 without MiCS.
        order: in a base: names of all entries of the module's state dict, in its order.
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
    others: tuple[FileRecord, ...] = ()
    experts: tuple[int, ...] = ()
    placements: dict[str, Placement] = field(default_factory=dict)
    ep_rank: int | None = None
    degrees: tuple[int, int] | None = None
    hints: dict[str, Any] = field(default_factory=dict)
    batch: dict[str, int] = field(default_factory=dict)
    shard_size: int = 0
    order: tuple[str, ...] = ()

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
        marks: values that all files of a save have in common (:mod:`.compare`).
        layer: the tensors of a pipeline's layer or of an expert.
        folding: (tensor-parallel, expert-parallel) rank that wrote it, as AutoEP records under AutoTP.
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
    folding: tuple[int, int] | None = None
    swap: Piece | None = None
    checked: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as :meth:`Piece.__reduce__` does."""
        return FileHeader, tuple(getattr(self, name) for name in self.__slots__)
