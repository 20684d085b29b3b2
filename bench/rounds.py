"""The order of everything that is measured beside each other: in rounds, each in an order of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class Result(Protocol):
    """What was measured of a case in a round; `seconds` is 0 where it came to nothing."""

    @property
    def case(self) -> str: ...

    @property
    def seconds(self) -> float: ...

    def tell(self) -> str:
        """One line for who waits."""
        ...


R = TypeVar("R", bound=Result)


def run_in_turns(
    cases: Sequence[str], rounds: int, measure: Callable[[str, int], R], say: Callable[[str], None]
) -> list[R]:
    """All cases in each round, next to each other, in an order that is drawn for the round.

    What came to nothing is not tried again.
    """
    found: list[R] = []
    for round_ in range(rounds):
        for case in random.Random(round_).sample(cases, len(cases)):
            if any(each.case == case and not each.seconds for each in found):
                continue
            found.append(measure(case, round_))
            say(f"round {round_ + 1}/{rounds}  {found[-1].tell()}")
    return found
