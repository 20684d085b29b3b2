"""Headers of a checkpoint's files, reduced to what the index needs: small, picklable, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..atoms import ITEMSIZE, Use, count, strip_compiled
from ..torchsave.records import FileRecord
from ..wrappers import Wrapper, find_wrapper

Shape = tuple[int, ...]

Placement = tuple[tuple[int, ...], ...]
"""The experts of a layer by expert-parallel rank, in the order in which a rank holds them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous tensor in a file: its record, byte offset inside it, shape and dtype.

    ``fault`` says why its bytes cannot be cut (a permuted memory format, an unknown dtype), if they cannot.
    """

    record: FileRecord
    offset: int
    shape: Shape
    dtype: str
    fault: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """There are a hundred thousand and more, which dataclasses with slots would restore field by field."""
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
        """What tells whether two tensors hold the same bytes, for :func:`~deepspeed_ucp.atoms.are_alike`."""
        return self.shape, self.dtype, self.offset, self.record.nbytes, self.record.crc

    def narrow(self, start: int, numel: int) -> Piece:
        """Elements [start, start + numel) of the flattened tensor."""
        offset = self.offset + start * ITEMSIZE[self.dtype]
        return Piece(self.record, offset, (numel,), self.dtype, self.fault)


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that is not looked into (a function, a class, an object): its class, and a digest of its pickle.

    It can be compared and sent, whatever the file holds; nothing can be restored from it. ``has_tensors`` tells of a
    tensor, or of a list, tuple or dict with tensors somewhere in it.
    """

    kind: str
    digest: str
    has_tensors: bool = False


@dataclass(frozen=True, slots=True)
class TensorStates:
    """What an optimizer keeps for one of its tensors: element-wise states, scalars, and anything else by name.

    ``zero_dim`` locates those scalars that are 0-dim tensors: for a 0-dim parameter they are its states. ``single`` has
    the numbers of those states that are one element, of shape (1,): for a larger parameter they are scalars.
    """

    states: dict[str, Piece] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    zero_dim: dict[str, Piece] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)
    single: dict[str, Any] = field(default_factory=dict)

    def of_zero_dim(self) -> TensorStates:
        """The same for a 0-dim parameter, whose states look like scalars; ``step`` remains one."""
        states = {name: piece for name, piece in self.zero_dim.items() if name != "step"}
        scalars = {name: value for name, value in self.scalars.items() if name not in states}
        return replace(self, states={**self.states, **states}, scalars=scalars)


@dataclass(frozen=True, slots=True)
class OptimHeader:
    """An optimizer's state in one file.

    Attributes:
        kind: name of the wrapper that saved it, as in :data:`~deepspeed_ucp.wrappers.WRAPPERS`.
        stage: of ZeRO; 0 where there is none, 1 of ``bf16``.
        masters: per flat buffer the fp32 partition (unfused: of all groups' parameters in order).
        tensors: the optimizer's states per flat buffer (or per parameter), in the order of the param groups.
        owners: the param group of each of ``tensors``.
        groups: hyper-parameters per param group.
        slices: ZeRO 1/2 and BF16: per group (name as the module spells it, start, numel) inside the partition.
        partition_count: per group.
        paddings: ZeRO 1/2 and BF16: per group, elements of padding at the end of the partition.
        alignment: ZeRO 1/2: per group, elements of padding behind each parameter (``parameter_alignment``).
        elastic: saved by ``elastic_checkpoint``: each rank's states without padding, no hyper-parameters.
        scaler: loss scaler fields (``cur_scale``, ``dynamic``, …), empty without one.
        clip_grad: gradient clipping stored with the optimizer, or None.
        names: atom names of each group's parameters, where the param groups tell them.
        partition_ranks: of ZeRO 3 with AutoEP: per sub-group the data-parallel ranks that hold it.
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
        """What that wrapper does to masters and states."""
        return find_wrapper(self.kind)

    def count_members(self) -> list[int]:
        """Per param group its flat buffers, or its parameters."""
        return [self.owners.count(group) for group in range(len(self.groups))]


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """A model-states file: tensors that it holds, shapes, counters, and the optimizer of stage 0.

    Names are those of atoms (:func:`~deepspeed_ucp.atoms.strip_compiled`), but in ``param_shapes`` and ``slices``.

    Attributes:
        module: the model's tensors; None where the file has none (a pipeline's lie in layer files).
        nested: the module dict was nested; ``module`` has its keys joined by dots.
        buffers: names of the module's persistent buffers.
        param_shapes: per param group (per sub-group of ZeRO 3) its parameters as the module spells them, with shapes.
        frozen_shapes: of the frozen parameters, whole.
        frozen: their elements, where the file has them apart from ``module``; of ZeRO 3 this rank's.
        shared: tied parameters → the name that holds the data.
        counters: global_steps, global_samples, skipped_steps, dp_world_size, mp_world_size, as far as they are told.
        optim: the optimizer of stage 0; None where it has files of its own, or is not saved.
        degrees: (pipeline, tensor) parallel degrees, or None in older releases.
        hints: what the client state tells about the model (see :class:`~deepspeed_ucp.atoms.ModelInfo`).
        others: storages that belong to none of these: the client's tensors.
        experts: number of experts of each mixture-of-experts layer; empty without any.
        placements: of AutoEP's layers, by what the names of their experts' parameters begin with.
        ep_rank: AutoEP's expert-parallel rank that wrote the file.
        batch: batch sizes that its ds_config tells, by DeepSpeed's names.
        shard_size: ranks over which MiCS partitions, the first of which alone save; 0 where all data-parallel ranks do.
        order: of a base: the names of all that the module's state dict held, in its order.
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
        """Shapes of the parameters that an optimizer owns, as far as ``param_shapes`` tells."""
        return {strip_compiled(name): shape for group in self.param_shapes or () for name, shape in group}


@dataclass(frozen=True, slots=True)
class FileHeader:
    """One file's header: a model's, an optimizer's, or the tensors of a pipeline's layer or of an expert.

    A swap file has none: ``swap`` is what has to lie in it.

    ``config`` are the parts of the saved ds_config that the index looks at; ``marks`` what all files of a save have
    alike (:mod:`.compare`); ``globals`` the classes and functions that its pickle names, beyond every checkpoint's.
    ``folding`` is AutoEP's word of the (tensor-parallel, expert-parallel) rank that wrote it, under AutoTP. Where it is
    ``checked``, there are checksums of all records: ``crc`` tells the file from every other one.
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
        """As :meth:`Piece.__reduce__`."""
        return FileHeader, tuple(getattr(self, name) for name in self.__slots__)
