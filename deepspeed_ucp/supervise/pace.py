"""How fast each rank is by itself: who holds the others up in every step, and a file of seconds by rank and step."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low

from ..errors import ConfigError
from .log import Log, append
from .watch import StepTime

WINDOW = 10
"""Steps between two judgements, whose medians count."""

_FACTOR, _LEAST = 1.5, 0.05
"""How much slower than the ranks' median a rank is that is named, and how much of a step's seconds that has to be."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than the others.

    Attributes:
        seconds: of a step that it takes by itself, in the median of the last steps.
        factor: how many times the ranks' median.
    """

    rank: int
    host: str
    seconds: float
    factor: float


def find_stragglers(times: Sequence[Sequence[StepTime]], named: frozenset[int] = frozenset()) -> list[Straggler]:
    """Ranks that are slower than the median of all by a factor that is no chance, and that costs something.

    All take the same time for a step; what is compared is what each takes by itself.

    Args:
        times: of each rank the last steps.
        named: ranks that have been; they are until they are clearly faster.
    """
    own = {each[-1].rank: median(step.work for step in each) for each in times if each}
    if len(own) < 2:
        return []
    usual, step = median_low(own.values()), median(each.seconds for steps in times for each in steps)
    found = []
    for last in (steps[-1] for steps in times if steps):
        beyond, factor = own[last.rank] - usual, own[last.rank] / max(usual, 1e-6)
        needed = 1 + (_FACTOR - 1) * (0.5 if last.rank in named else 1.0)
        if factor >= needed and beyond >= _LEAST * step:
            found.append(Straggler(last.rank, last.host, round(own[last.rank], 6), round(factor, 2)))
    return sorted(found, key=lambda each: -each.seconds)


class Pace:
    """Follows the steps that ranks tell of.

    Args:
        log: is told who the stragglers are when that changes: ``straggler``.
        path: of a file that gets every step's seconds by rank, a JSON line each; None for none.
    """

    def __init__(self, log: Log, path: str | None = None) -> None:
        self._log, self._path = log, path
        if path is not None:
            append(path, "")
        self.begin()

    def begin(self) -> None:
        """A launch begins."""
        self._times: dict[int, deque[StepTime]] = {}
        self._named: frozenset[int] = frozenset()
        self._judged: int | None = None

    def follow(self, taken: Sequence[StepTime]) -> None:
        """Note the steps that have been told of since the last time."""
        if not taken:
            return
        self._write(taken)
        for each in taken:
            self._times.setdefault(each.rank, deque(maxlen=WINDOW)).append(each)
        step = min(steps[-1].step for steps in self._times.values())
        if self._judged is None:
            self._judged = step
        if step >= self._judged + WINDOW:
            self._judged = step
            self._judge(step)

    def _write(self, taken: Sequence[StepTime]) -> None:
        """Append to the file; after an error no more."""
        try:
            if self._path is not None:
                append(self._path, "".join(f"{json.dumps(asdict(each))}\n" for each in taken))
        except ConfigError as error:
            self._path = None
            self._log("steps", error=str(error))

    def _judge(self, step: int) -> None:
        found = find_stragglers([list(steps) for steps in self._times.values()], self._named)
        named = frozenset(each.rank for each in found)
        if named != self._named:
            self._named = named
            usual = median_low(median(each.work for each in steps) for steps in self._times.values())
            self._log("straggler", step=step, ranks=list(map(asdict, found)), median=round(usual, 6))
