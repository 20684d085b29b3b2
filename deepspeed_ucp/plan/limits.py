"""What of a checkpoint cannot be had, in words."""

from __future__ import annotations

from collections.abc import Callable

from ..atoms import AtomicIndex
from ..errors import UnsupportedError, shorten


def describe_unreadable(index: AtomicIndex, states: Callable[[str], bool] = lambda _: True) -> str:
    """Tensors whose bytes cannot be cut; empty where there are none.

    Args:
        states: which states are wanted.
    """
    faults = sorted(index.limits.unreadable.items())
    listed = [f"{name}: {fault}" for name, fault in faults if states(name.split("(")[-1][:-1])]
    if not listed:
        return ""
    return (
        f"{index.run.state_file}: {shorten(listed)}. What is only not contiguous can be resumed in the topology that "
        "saved it, and saved again with contiguous tensors; the rest is not in the checkpoint."
    )


def refuse_unreadable(index: AtomicIndex, states: Callable[[str], bool] = lambda _: True) -> None:
    """Raise where something that is wanted cannot be cut.

    Raises:
        UnsupportedError: naming it.
    """
    if text := describe_unreadable(index, states):
        raise UnsupportedError(text)


def describe_irregular(index: AtomicIndex) -> str:
    """Optimizer states that cannot be cut for another topology; empty where there are none."""
    listed = [f"{name} ({what})" for name, what in sorted(index.limits.irregular.items())]
    if not listed:
        return ""
    return (
        f"{index.run.optimizer or 'The saved optimizer'} keeps states that are not element-wise, or not in the files, "
        f"and cannot be united or cut for another topology: {shorten(listed)}."
    )
