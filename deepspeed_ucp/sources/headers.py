"""Headers of a checkpoint's files, reduced to what the index needs: small, picklable, gathered from all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..atoms import ITEMSIZE, count
from ..torchsave.records import FileRecord


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous tensor in a file: its blob, byte offset inside it, shape and dtype.

    ``fault`` says why its bytes cannot be cut (a permuted memory format, an unknown dtype), if they cannot.
    """

    blob: FileRecord
    offset: int
    shape: tuple[int, ...]
    dtype: str
    fault: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return count(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def contents(self) -> tuple[tuple[int, ...], str, int, int, int | None]:
        """What tells whether two tensors hold the same bytes, for :func:`~deepspeed_ucp.atoms.are_alike`."""
        return self.shape, self.dtype, self.offset, self.blob.nbytes, self.blob.crc

    def narrow(self, start: int, numel: int) -> Piece:
        """Elements [start, start + numel) of the flattened tensor."""
        return Piece(self.blob, self.offset + start * ITEMSIZE[self.dtype], (numel,), self.dtype, self.fault)


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
class Holder:
    """What an optimizer keeps for one of its tensors: element-wise states, scalars, and anything else by name.

    ``zero_dim`` locates those scalars that are 0-dim tensors: for a 0-dim parameter they are its states. ``single`` has
    the numbers of those states that are one element, of shape (1,): for a larger parameter they are scalars.
    """

    states: dict[str, Piece] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    zero_dim: dict[str, Piece] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)
    single: dict[str, Any] = field(default_factory=dict)

    def of_zero_dim(self) -> Holder:
        """The same for a 0-dim parameter, whose states look like scalars; ``step`` remains one."""
        states = {name: piece for name, piece in self.zero_dim.items() if name != "step"}
        scalars = {name: value for name, value in self.scalars.items() if name not in states}
        return replace(self, states={**self.states, **states}, scalars=scalars)


@dataclass(frozen=True, slots=True)
class OptimHeader:
    """An optimizer's state in one file.

    Attributes:
        kind: ``zero12``, ``zero3``, ``bf16``, ``fp16_fused``, ``fp16_unfused`` or ``torch``.
        masters: per flat buffer the fp32 partition (unfused: a list per group, flattened in ``layout``).
        holders: per flat buffer (or per parameter) the optimizer's states.
        groups: hyper-parameters per param group.
        params: per param group the positions in ``holders`` that it owns.
        slices: ZeRO 1/2 and BF16: per group (name, start, numel) inside the partition.
        partition_count: per group.
        paddings: ZeRO 1/2 and BF16: per group, elements of padding at the end of the partition.
    """

    kind: str
    stage: int
    masters: tuple[Piece, ...]
    holders: tuple[Holder, ...]
    groups: tuple[dict[str, Any], ...]
    params: tuple[tuple[int, ...], ...]
    slices: tuple[tuple[tuple[str, int, int], ...], ...] = ()
    partition_count: tuple[int, ...] = ()
    paddings: tuple[int, ...] = ()
    alignment: Any = None
    elastic: bool = False
    scaler: dict[str, Any] = field(default_factory=dict)
    clip_grad: float | None = None
    names: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """A model-states file: tensors that it holds, shapes, counters, and the optimizer of stage 0.

    Attributes:
        module: the model's tensors by name; None where the file has none (a pipeline's lie in layer files).
        nested: the module dict was nested; ``module`` has its keys joined by dots.
        degrees: (pipeline, tensor) parallel degrees, or None in older releases.
        hints: what the client state tells about the model (see :class:`~deepspeed_ucp.atoms.AtomicIndex`).
        others: storages that belong to none of these: the client's tensors.
    """

    module: dict[str, Piece] | None
    nested: bool
    buffers: tuple[str, ...]
    param_shapes: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...] | None
    frozen_shapes: dict[str, tuple[int, ...]]
    frozen: dict[str, Piece]
    shared: dict[str, str]
    counters: dict[str, Any]
    config: dict[str, Any]
    optim: OptimHeader | None
    others: tuple[FileRecord, ...] = ()
    degrees: tuple[int, int] | None = None
    hints: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileHeader:
    """One file's header: a model's, an optimizer's, or the tensors of one layer of a pipeline.

    ``marks`` are what all files of a save have alike (:mod:`.marks`); ``globals`` the classes and functions that its
    pickle names, beyond those of every checkpoint.
    """

    name: str
    size: int
    model: ModelHeader | None = None
    optim: OptimHeader | None = None
    config: dict[str, Any] = field(default_factory=dict)
    layer: dict[str, Piece] | None = None
    crc: int | None = None
    marks: dict[str, str] = field(default_factory=dict)
    globals: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The parts of the saved ds_config that the index looks at."""
        return self.model.config if self.model else self.config
