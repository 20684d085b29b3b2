"""An engine as data: one rank's buffers, and all ranks' names and shapes.

:func:`deepspeed_ucp.load.prepare.view_engine` makes the view of a live engine, and
:func:`deepspeed_ucp.examine.resume.check_resume` one without tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from .flat import FlatBuffer, Shape
from .storage import MASTER, MODULE

Shapes = Mapping[str, tuple[Shape, ...]]
"""Name → the tensor's shape on each tensor-parallel rank."""


@dataclass(frozen=True, slots=True)
class EngineBuffer:
    """A rank's partition of a buffer of masters, or of a tensor without optimizer.

    A tensor that no optimizer updates is a frozen or unoptimized parameter, or a buffer of the module.

    Attributes:
        buffer: layout of the parameters over all ranks; a tensor without optimizer is alone in it.
        tp_shard: index of the tensor-parallel shard that the partition belongs to, if the tensors have several.
        dtype: dtype of the partition, in memory or in its swap file.
        states: optimizer states to load, with their dtypes in this run.
        live: optimizer states that exist already.
        whole: optimizer states that a rank holds for a whole parameter if its partition has any element of it.
        tensor: the live partition, in the shape of its optimizer states; None without an engine.
        swap: the partition's :class:`~deepspeed_ucp.extensions.nvme.SwapPlace`, or None; with a swap file the tensor's
            contents are invalid, and a load fills a new file.
        is_buffer: the tensor is a buffer of the module.
    """

    buffer: FlatBuffer
    part: int
    tp_shard: int
    dtype: str
    states: Mapping[str, str] = field(default_factory=dict)
    live: Collection[str] = ()
    whole: Collection[str] = ()
    tensor: Any = None
    swap: Any = None
    is_buffer: bool = False

    @property
    def data(self) -> Any:
        """The live partition as a 1-D view.

        If it is not contiguous it has its own shape, and is no destination.
        """
        data = self.tensor.detach()
        return data.view(-1) if data.is_contiguous() else data

    @property
    def group(self) -> int:
        return self.buffer.group

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters in the buffer over all ranks, in order."""
        return self.buffer.names

    @property
    def name(self) -> str:
        """Name of the first parameter."""
        return self.buffer.names[0]

    @property
    def shape(self) -> Shape:
        """Unpartitioned shape of the first parameter."""
        return self.buffer.shapes[0]

    def find_state_layout(self, state: str) -> tuple[FlatBuffer, int]:
        """Return an optimizer state's layout and this rank's partition number in it."""
        return (self.buffer.join_touched(self.part), 0) if state in self.whole else (self.buffer, self.part)

    def is_in_file(self, state: str) -> bool:
        """Return True if the memory to fill for the partition or a state is a new file's."""
        return self.swap is not None and state not in self.live

    def is_live(self, state: str) -> bool:
        """Return True if the memory to fill for masters or a state is the engine's."""
        return (state in (MASTER, MODULE) or state in self.live) and not self.is_in_file(state)

    def find_shape(self, state: str) -> Shape:
        """Return an optimizer state's shape here; 1-D for whole parameters and swap files."""
        if state in self.whole or self.swap is not None:
            return (self.find_state_layout(state)[0].partition,)
        return tuple(self.tensor.shape)


@dataclass(frozen=True, slots=True)
class EngineView:
    """One rank's buffers, and the names and shapes of the tensors of all ranks.

    Attributes:
        owned: shapes of the parameters that the optimizer owns.
        unowned: shapes of parameters without optimizer, and of buffers; None if they are not compared.
        flats: this rank's flat buffers.
        extras: this rank's tensors without optimizer.
        aliases: tied names → the name that holds the data.
        ordinals: parameter on several pipeline stages → (index of this stage among them, number of these stages).
        renamed: live name → saved name, if they differ.
        counts: parameter on several pipeline stages → number of these stages; also if this stage is not one of them.
        attributes: Megatron's attributes of the parameters.
        declared_new: names of tensors that the user has declared to be new: the checkpoint need not have them.
        info: the model's ``universal_checkpoint_info``.
        tp: tensor-parallel degree.
        unsharded: names of tensors that tensor-parallel ranks do not cut.

    Example:
        >>> flat = join_parameters(0, ("a", "b"), ((6,), (3,)), parts=2, partition=5)
        >>> shapes = {"a": ((6,),), "b": ((3,),)}
        >>> second_rank = EngineView(shapes, flats=[EngineBuffer(flat, part=1, tp_shard=0, dtype="float32")])
    """

    owned: Shapes = field(default_factory=dict)
    unowned: Shapes | None = field(default_factory=dict)
    flats: Sequence[EngineBuffer] = ()
    extras: Sequence[EngineBuffer] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    ordinals: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    declared_new: frozenset[str] = frozenset()
    info: Mapping[str, Any] | None = None
    tp: int = 1
    unsharded: Set[str] = frozenset()

    def find_buffer(self, state: str, number: int) -> EngineBuffer:
        """Return a state's buffer by number, among ``flats`` or for MODULE ``extras``."""
        return (self.extras if state == MODULE else self.flats)[number]

    @property
    def shapes(self) -> Shapes:
        return {**(self.unowned or {}), **self.owned}
