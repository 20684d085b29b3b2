"""Assemble full tensors from a source's shards without a live engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..model import COPY, ITEMSIZE, MASTER, Atom, AtomicIndex, AtomKey, count
from ..plan import View, Want
from ..plan.settling import settle_index
from ..tensor_parallel import Layout, Pattern, RuleSet, Unique
from ..tensor_parallel.layout import Shape


@dataclass(frozen=True, slots=True)
class FullTensor:
    """One atom as a full tensor.

    Attributes:
        atom: the atom with its shards.
        shape: logical shape, including padding rows of a vocabulary.
        view: how the shards are assembled; None if there is one shard.
    """

    atom: Atom
    shape: Shape
    view: View | None = None

    @property
    def name(self) -> str:
        """Name of the parameter or buffer."""
        return self.atom.name

    @property
    def dtype(self) -> str:
        """Stored element type."""
        return self.atom.dtype

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.atom.dtype]

    @property
    def numel(self) -> int:
        """Number of elements of the logical tensor."""
        return count(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the logical tensor."""
        return self.numel * self.itemsize

    @property
    def place(self) -> tuple[int, int]:
        """Record and byte offset of the first fragment, which order the reads of a source."""
        return next(
            ((f.record, f.offset) for shard in self.atom.shards for f in shard.list_fragments(self.atom.state)), (0, 0)
        )

    def want(self, start: int, numel: int) -> Want:
        """Want elements [start, start + numel) of the logical tensor."""
        return Want(self.atom, start, numel, view=self.view)


@dataclass(frozen=True, slots=True)
class FullTensors:
    """All atoms of a source as full tensors.

    Attributes:
        tensors: full tensors by atom.
        patterns: patterns by name, if known.
        origin: origin of each pattern.
        unused: the user's rules without a match.
    """

    tensors: dict[AtomKey, FullTensor]
    patterns: dict[str, Pattern]
    origin: dict[str, str]
    unused: list[str]

    def cut_padding(self, tensor: FullTensor) -> Shape:
        """Return a tensor's shape without padding rows of a vocabulary."""
        pattern = self.patterns.get(tensor.name)
        if pattern is None or pattern.vocab is None:
            return tensor.shape
        return (min(pattern.vocab, tensor.shape[0]), *tensor.shape[1:])


def assemble_full_tensors(
    index: AtomicIndex,
    rules: Sequence[RuleSet] = (),
    *,
    states: Callable[[str], bool] = lambda _: True,
    live: Sequence[RuleSet] = (),
) -> FullTensors:
    """Assemble each parameter and buffer from its shards.

    Copies of parameters with a master are omitted: a load recreates them.

    Args:
        rules: the user's rules.
        states: filter of states.
        live: rules of a live engine.

    Raises:
        MismatchError: patterns are unknown or contradict the shapes; all in one message.
    """
    settled = settle_index(index, rules, live=live).require()
    patterns = {
        name: pattern for name, pattern in settled.patterns.items() if not isinstance(pattern, Unique) or pattern.vocab
    }
    tensors = {
        key: assemble_full_tensor(atom, settled.layouts[key.name][0])
        for key, atom in index.stored.atoms.items()
        if states(key.state) and not is_remade(key, index)
    }
    return FullTensors(tensors, patterns, settled.origin, settled.unused)


def assemble_full_tensor(atom: Atom, layout: Layout) -> FullTensor:
    """Assemble an atom by the layout of its shards."""
    if len(layout.shards) == 1:
        return FullTensor(atom, layout.shape)
    full = tuple(((0, size),) for size in layout.view)
    target = Layout(layout.shape, layout.view, (full,), (layout.shape,))
    shards = (0,) if layout.replicated and not layout.mean else tuple(range(len(layout.shards)))
    return FullTensor(atom, layout.shape, View(layout, target, 0, shards))


def is_remade(key: AtomKey, index: AtomicIndex) -> bool:
    """Return True for a copy of a parameter with a master, from which a load recreates it."""
    return key.state == COPY and index.find(key.name, MASTER, key.instance) is not None
