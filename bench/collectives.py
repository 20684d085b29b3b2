"""Communication of one rank of thousands in one process: messages of its peers are prepared, received bytes counted.

Bytes are those that `comm.TorchComm` receives.
"""

from __future__ import annotations

import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_ucp import comm as comm_module
from deepspeed_ucp.comm import Comm

ROW = 256
"""Size of a short message of `TorchComm` in bytes."""


def find_step() -> str:
    """Return the function that called a collective, as `module.function`."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename in (comm_module.__file__, __file__) or frame.f_code.co_name.startswith("<"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


class ScriptedComm(Comm):
    """One rank among peers with prepared messages.

    Args:
        messages: pickled messages of all ranks by step; in other steps the peers send the message of this rank.
        exchanges: of each exchange of tables the function from the sent tables to the received ones.
        masks: by step the mask of all ranks.

    Attributes:
        received: bytes by step.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        messages: Mapping[str, Sequence[bytes]],
        exchanges: Sequence[Callable[[list[Any]], list[Any]]],
        masks: Mapping[str, Any],
    ) -> None:
        self.rank, self.size, self.messages, self.masks = rank, size, messages, masks
        self.received: dict[str, int] = defaultdict(int)
        self._exchanges = iter(exchanges)

    def gather(self, value: Any) -> list[Any]:
        step, own = find_step(), pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        messages = self.messages.get(step) or [own] * self.size
        self.received[step] += self.size * ROW + sum(_count_long(message) for message in messages)
        return [pickle.loads(message) for message in messages]  # noqa: S301 (of this program)

    def once(self, work: Callable[[], Any], src: int = 0) -> Any:
        """Do the work of another rank too: this rank would wait for it."""
        value = work()
        self.received[find_step()] += ROW + _count_long(pickle.dumps((pickle.dumps(value), None)))
        return value

    def swap_tables(self, tables: list[Any]) -> list[Any]:
        received = next(self._exchanges)(tables)
        self.received[find_step()] += 8 * self.size + sum(table.nbytes for table in received)
        return received

    def any_of(self, mask: Any) -> Any:
        step = find_step()
        self.received[step] += len(mask)
        return self.masks.get(step, mask) if len(mask) > 1 else mask


def _count_long(message: bytes) -> int:
    """Return the size of a message that needs a second collective, else 0."""
    return len(message) if len(message) > ROW - 8 else 0


class _Stopped(Exception):
    """Ends a function after its first message."""


class _FirstMessage(Comm):
    """Records the first message of a rank."""

    message: Any = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, value: Any) -> list[Any]:
        self.message = value
        raise _Stopped


def record_message(rank: int, size: int, work: Callable[[Comm], Any]) -> bytes:
    """Return the first message of a rank in `work`, pickled."""
    comm = _FirstMessage(rank, size)
    try:
        work(comm)
    except _Stopped:
        return pickle.dumps(comm.message, pickle.HIGHEST_PROTOCOL)
    raise AssertionError("the work sent no message")


def make_empty_messages(size: int) -> list[bytes]:
    """Return the messages of ranks without a result in `Comm.gather_results`."""
    return [pickle.dumps((pickle.dumps(None), None))] * size


@dataclass
class AllRanks(Comm):
    """All ranks in one: does the shares of all of them.

    Attributes:
        shared: pickled messages of the ranks by step.
    """

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
