"""What one rank of thousands hears in each collective: the other ranks' words are known beforehand, bytes are counted.

Bytes are those that `comm.TorchComm` has a rank receive.
"""

from __future__ import annotations

import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from deepspeed_ucp import comm as comm_module
from deepspeed_ucp.comm import Comm

ROW = 256
"""Bytes of a short word, as `TorchComm` sends it."""


@dataclass
class Step:
    """What one function asks of the others: how often, and the bytes that this rank receives and sends."""

    calls: int = 0
    received: int = 0
    sent: int = 0


def find_step() -> str:
    """The function that has called a collective, as `module.function`."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename in (comm_module.__file__, __file__) or frame.f_code.co_name.startswith("<"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


class ToldComm(Comm):
    """One rank among peers whose words are known.

    Args:
        told: by step what all ranks say, pickled; where nothing is known the others say what this rank says.
        swapped: by step what comes back from each exchange of tables, by what this rank sends.
        masks: by step what some rank says yes to.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        told: dict[str, Sequence[bytes]],
        swapped: Sequence[Callable[[list[Any]], list[Any]]] = (),
        masks: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.rank, self.size, self.told, self.masks = rank, size, told, masks
        self.steps: dict[str, Step] = defaultdict(Step)
        self._swapped = iter(swapped)

    def note(self, step_name: str, received: int, sent: int) -> None:
        """Count a collective that this class has no part in."""
        step = self.steps[step_name]
        step.calls += 1
        step.received += received
        step.sent += sent

    def gather(self, value: Any) -> list[Any]:
        own = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        blobs = self.told.get(find_step()) or [own] * self.size
        self.note(find_step(), self.size * ROW + sum(len(blob) for blob in blobs if len(blob) > ROW - 8), len(own))
        return [pickle.loads(blob) for blob in blobs]  # noqa: S301 (of this program)

    def once(self, work: Callable[[], Any], src: int = 0) -> Any:
        """Whatever one rank does takes its time on the others too: they wait for it."""
        value = work()
        size = len(pickle.dumps((pickle.dumps(value), None)))
        self.note(find_step(), ROW + (size if size > ROW - 8 else 0), 0)
        return value

    def swap_tables(self, tables: list[Any]) -> list[Any]:
        received = next(self._swapped)(tables)
        came, went = (8 * self.size + sum(table.nbytes for table in each) for each in (received, tables))
        self.note(find_step(), came, went)
        return received

    def any_of(self, mask: Any) -> Any:
        self.note(find_step(), len(mask), len(mask))
        return self.masks.get(find_step(), mask) if len(mask) > 1 else mask


class _Told(Exception):
    """Ends a function that has said what was asked."""


class Overhearing(Comm):
    """Takes down what a rank says first."""

    said: Any = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, value: Any) -> list[Any]:
        self.said = value
        raise _Told


def overhear(rank: int, size: int, work: Callable[[Comm], Any]) -> bytes:
    """What a rank says first in `work`, pickled."""
    comm = Overhearing(rank, size)
    try:
        work(comm)
    except _Told:
        return pickle.dumps(comm.said, pickle.HIGHEST_PROTOCOL)
    raise AssertionError("nothing was said")


@dataclass
class AllRanks(Comm):
    """Stands for all ranks in one: each one's share of work that is shared is done, and kept as it is told."""

    rank: int
    size: int
    shared: dict[str, list[bytes]] = field(default_factory=dict)

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def run(self, work: Callable[[], Any]) -> Any:
        return work()

    def once(self, work: Callable[[], Any], src: int = 0) -> Any:
        return work()

    def share(self, items: Sequence[Any], work: Callable[[Any], Any], *_: Any, first: int = 0) -> list[Any]:
        starts = [(rank - first) % self.size for rank in range(self.size)]
        parts = [[work(item) for item in items[start :: self.size]] for start in starts]
        packed = [pickle.dumps(part, pickle.HIGHEST_PROTOCOL) for part in parts]
        self.shared[find_step()] = [pickle.dumps((part, None), pickle.HIGHEST_PROTOCOL) for part in packed]
        return [parts[(at + first) % self.size][at // self.size] for at in range(len(items))]


def silence(size: int) -> list[bytes]:
    """Of ranks that have nothing to tell in `Comm.each`."""
    return [pickle.dumps((pickle.dumps(None), None))] * size


def count_rows(tables: Sequence[Any]) -> int:
    return int(np.sum([len(table) for table in tables]))
