"""Whether a launch that has failed is worth another try, and when: from what the tries before came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attempt:
    """One launch that has failed.

    Attributes:
        step: the last that any rank told of; None where none did.
        lost: it lost hosts, which explains it.
    """

    step: int | None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """When it is enough.

    Attributes:
        restarts: in all.
        same_step: launches that fail at one step one after the other, with every host there: the script's own fault.
        first_pause, longest_pause: seconds before a restart; doubled as long as none comes further.
    """

    restarts: int = 100
    same_step: int = 3
    first_pause: float = 1.0
    longest_pause: float = 60.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows a failure.

    Attributes:
        pause: seconds until the next try; None where there is none.
        reason: why there is none, in words.
    """

    pause: float | None
    reason: str = ""


def decide(attempts: Sequence[Attempt], limits: RestartLimits) -> Decision:
    """What follows the last of some failed launches (at least one)."""
    steps, tail = list_steps(attempts)[-limits.same_step :], attempts[-limits.same_step :]
    if len(tail) == limits.same_step and len(set(steps)) == 1 and not any(each.lost for each in tail):
        where = "before its first step" if steps[-1] is None else f"after step {steps[-1]}"
        times = f"it failed {limits.same_step} times {where} while every host answered"
        return Decision(None, f"{times}: the script itself, or what it needs beside the hosts")
    if len(attempts) > limits.restarts:
        return Decision(None, f"{limits.restarts} restarts were allowed")
    # How many launches right before the last one had come as far as it, or further.
    *before, last = [-1 if step is None else step for step in list_steps(attempts)]
    stuck = next((count for count, step in enumerate(reversed(before)) if step < last), len(before))
    return Decision(min(limits.longest_pause, limits.first_pause * 2 ** min(stuck, 30)))


def list_steps(attempts: Sequence[Attempt]) -> list[int | None]:
    """How far each launch came; one without a step of its own as far as that before it, from whose save it began."""
    steps: list[int | None] = []
    for attempt in attempts:
        steps.append(attempt.step if attempt.step is not None or not steps else steps[-1])
    return steps
