"""Assemble full tensors from shards without a live engine, and read their ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ..io import direct
from ..io.memory import Scratch
from ..io.paths import count_readers
from ..io.read import Checked
from ..io.threads import run_threads
from ..model.index import AtomicIndex
from ..model.storage import COPY, ITEMSIZE, MASTER, Atom, AtomKey, count
from ..plan.conversion import ALIGNMENT, RANGE, Batch
from ..plan.locate import View, Want
from ..plan.settling import settle_index
from ..tensor_parallel.kinds import Pattern, Unique
from ..tensor_parallel.layout import Layout, Shape
from ..tensor_parallel.rules import RuleSet
from .reader import AtomReader


@dataclass(frozen=True, slots=True)
class FullTensor:
    """One atom as a full tensor.

    Attributes:
        shape: logical shape, including padding rows of a vocabulary.
        view: how the shards are assembled; None if there is one shard.
    """

    atom: Atom
    shape: Shape
    view: View | None = None

    @property
    def name(self) -> str:
        return self.atom.name

    @property
    def dtype(self) -> str:
        return self.atom.dtype

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.atom.dtype]

    @property
    def numel(self) -> int:
        return count(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def place(self) -> tuple[int, int]:
        """Record and byte offset of the first fragment, which order the reads of a source."""
        return next(
            ((f.record, f.offset) for shard in self.atom.shards for f in shard.list_fragments(self.atom.state)), (0, 0)
        )

    def want(self, start: int, numel: int) -> Want:
        """Return the want of elements [start, start + numel) of the logical tensor."""
        return Want(self.atom, start, numel, view=self.view)


@dataclass(frozen=True, slots=True)
class FullTensors:
    """All atoms of a source as full tensors.

    Attributes:
        patterns, origin: each parameter's pattern, if known, and the source that settled it.
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
    """Describe each parameter and buffer as assembled from its shards; reads nothing.

    Copies of parameters with a master are omitted: a load recreates them.

    Raises:
        MismatchError: patterns are unknown or contradict the shapes; all in one message.
    """
    settled = settle_index(index, rules, live=live).require()
    patterns = {
        name: pattern for name, pattern in settled.patterns.items() if not isinstance(pattern, Unique) or pattern.vocab
    }
    tensors = {
        key: assemble_full_tensor(atom, settled.layouts[key.name][0])
        for key, atom in index.atoms.items()
        if states(key.state) and not is_remade(key, index)
    }
    return FullTensors(tensors, patterns, settled.origin, settled.unused)


def assemble_full_tensor(atom: Atom, layout: Layout) -> FullTensor:
    """Return an atom's full tensor, by the layout of its shards."""
    if len(layout.shards) == 1:
        return FullTensor(atom, layout.shape)
    full = tuple(((0, size),) for size in layout.view)
    target = Layout(layout.shape, layout.view, (full,), (layout.shape,))
    shards = (0,) if layout.replicated and not layout.mean else tuple(range(len(layout.shards)))
    return FullTensor(atom, layout.shape, View(layout, target, 0, shards))


def is_remade(key: AtomKey, index: AtomicIndex) -> bool:
    """Return True for a 16-bit copy that a load recreates from the parameter's master."""
    return key.state == COPY and index.find(key.name, MASTER, key.instance) is not None


MakeBar = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Factory of a progress bar for a number of bytes; its context manager yields a thread-safe callback for bytes done."""

Consume = Callable[[Batch, Sequence[list[memoryview]], list[Checked], Scratch], None]
"""Takes a batch, by source the bytes of its ranges (valid until it returns), the checks of the bytes read, and scratch
memory of the thread."""


def no_bar(total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Factory of an invisible progress bar."""
    return nullcontext(lambda nbytes: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions:
    """Resources of a node.

    Attributes:
        workers: number of threads; 0: chosen by the cores.
        window: bytes of memory for data in transit.
    """

    workers: int = 0
    window: int = 256 << 20
    bar: MakeBar = no_bar

    def split_window(self, source: str) -> tuple[int, int]:
        """Return (threads, bytes per batch) that fit into the window.

        A thread holds about three times these bytes. ``source``: the folder or file that they read.
        """
        threads = max(min(self.count_threads(source), self.window // (3 * ALIGNMENT)), 1)
        most = self.window // (3 * threads) // ALIGNMENT * ALIGNMENT
        return threads, max(min(most, RANGE), ALIGNMENT)

    def count_threads(self, source: str) -> int:
        """Return the number of threads that read from a folder."""
        return self.workers or count_readers(source)


def stream(
    sources: Sequence[tuple[AtomReader, Sequence[FullTensor]]],
    batches: Sequence[Batch],
    consume: Consume,
    *,
    threads: int,
    bar: MakeBar = no_bar,
    halted: Callable[[], bool] = lambda: False,
) -> None:
    """Read batches from all sources in threads, which take them in order.

    Args:
        sources: reader of each checkpoint, and its atoms by the batches' output number.
        consume: called with each batch, in the thread that has read it.
        threads: number of threads; each holds memory for the largest batch.
        halted: called before each batch; True stops the thread.

    Raises:
        UcpError: the first thread's error; the others stop after their batch.
    """
    largest = [max((_align_ranges(batch, atoms)[-1] for batch in batches), default=0) for _, atoms in sources]
    spans = [span for batch in batches for span in batch.ranges]
    total = sum(span.numel * atoms[span.output].itemsize for _, atoms in sources for span in spans)

    def work(turn: Iterator[Batch]) -> None:
        spaces, scratch = [Scratch().take(nbytes) for nbytes in largest], Scratch()
        for batch in turn:
            if halted():
                return
            sides, checks = [], []
            for (reader, atoms), space in zip(sources, spaces, strict=True):
                wants = [atoms[span.output].want(span.start, span.numel) for span in batch.ranges]
                offsets = _align_ranges(batch, atoms)
                sides.append([space[offset:][: want.nbytes] for want, offset in zip(wants, offsets, strict=False)])
                checks += reader.read_tensors(wants, sides[-1])
            consume(batch, sides, checks, scratch)
            progress(sum(data.nbytes for side in sides for data in side))

    with bar(total) as progress:
        run_threads(batches, work, threads)


def _align_ranges(batch: Batch, atoms: Sequence[FullTensor]) -> list[int]:
    """Return the aligned memory offset of each range of a batch, and the total size."""
    offsets = [0]
    for span in batch.ranges:
        nbytes = span.numel * atoms[span.output].itemsize
        offsets.append(offsets[-1] + -(-nbytes // direct.ALIGNMENT) * direct.ALIGNMENT)
    return offsets
