"""Where this process is: what its main thread does, whether it waits for others, how many collectives it has begun.

A rank that waits stands in a collective, at a store, or for its GPU, on which a collective may wait. That is told by
the innermost frames of Python's stack; of torch nothing is imported here.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_DEPTH, _TOLD, _INNERMOST = 100, 16, 6
"""Frames that are looked at, those that are told, and those that tell whether it is a wait."""

_LIBRARIES = ("/site-packages/", "/lib/python3", "<frozen ")
"""In the paths of code that is not the script's own."""

_ROOMS = ("/torch/distributed/", "/deepspeed/comm/", "/deepspeed_ucp/meeting.py", "/deepspeed_ucp/comm.py")
"""Files by whose functions ranks wait for each other."""

_CALLS = frozenset({"wait", "synchronize", "barrier", "item", "tolist", "cpu"})
"""Methods that wait for what was begun before: for a collective, or a GPU."""

_BACKWARD = "_engine_run_backward"
"""Of torch: what it calls may go on in threads of its own."""


def count_collectives() -> dict[str, int]:
    """How many collectives this process has begun, by the name of the process group; of groups that count none nothing.

    The names of a group, and the numbers of ranks that have come equally far, are the same on all of its ranks.
    """
    counts: dict[str, int] = {}
    for group, name in list(_list_groups().items()):
        with contextlib.suppress(Exception):  # backends without
            counts[str(name)] = int(group._get_sequence_number_for_group())
    return counts


def _list_groups() -> dict[Any, str]:
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return getattr(world, "pg_names", {})


class CollectiveCounter:
    """The sum of :func:`count_collectives`, for who asks several times in every step (some 0.15 µs a group)."""

    def __init__(self) -> None:
        self._groups, self._last = 0, None
        self._ask: list[Callable[[], int]] = []

    def count(self) -> int:
        """Of all groups that there are now."""
        groups = _list_groups()
        last = next(reversed(groups), None)
        if len(groups) != self._groups or last is not self._last:
            named = count_collectives()
            asked = [group for group, name in list(groups.items()) if str(name) in named]
            self._groups, self._last = len(groups), last
            self._ask = [group._get_sequence_number_for_group for group in asked]
        return sum(ask() for ask in self._ask)


def find_whereabouts() -> dict[str, Any]:
    """Where the main thread is; may be asked in another thread.

    Returns:
        ``stack``: frames as ``file:line function``, the innermost first, and of those further out the script's own
        alone; ``own``: the innermost one that is; ``waits``: the function by which it waits for other ranks or for its
        GPU, or None; ``collectives``: as :func:`count_collectives`.
    """
    frames = sys._current_frames()
    stack = list(_walk(frames.get(threading.main_thread().ident or 0)))
    waits = _find_wait(stack)
    if waits is None and stack and stack[0].f_code.co_name == _BACKWARD:
        known = {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
        waits = next((room for at, frame in frames.items() if at not in known and (room := _find_room(frame))), None)
    told = [frame for at, frame in enumerate(stack) if at < _TOLD // 2 or _is_own(frame)][:_TOLD]
    own = next((_describe(frame) for frame in stack if _is_own(frame)), None)
    return {"stack": list(map(_describe, told)), "own": own, "waits": waits, "collectives": count_collectives()}


def _is_own(frame: FrameType) -> bool:
    return not any(part in frame.f_code.co_filename for part in _LIBRARIES)


def _walk(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _find_wait(stack: list[FrameType]) -> str | None:
    if not stack:
        return None
    if not stack[0].f_code.co_filename.endswith("/threading.py"):
        called = next((name for name in _find_called(stack[0]) if name in _CALLS), None)
        if called is not None:
            return called
    return _find_room(stack[0])


def _find_room(frame: FrameType) -> str | None:
    """The function of one of those files that the innermost frames are in."""
    for each in list(_walk(frame))[:_INNERMOST]:
        code = each.f_code
        if code.co_name not in ("wrapper", "<module>") and any(room in code.co_filename for room in _ROOMS):
            return code.co_name
    return None


def _find_called(frame: FrameType) -> list[str]:
    """What a frame has looked up since its last call that has come back: the method that it is in, and arguments."""
    names: list[str] = []
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset >= frame.f_lasti:
            break
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            names.append(str(instruction.argval))
        elif instruction.opname.startswith("CALL"):
            names.clear()
    return names


def _describe(frame: FrameType) -> str:
    path = frame.f_code.co_filename.rpartition("/site-packages/")[2]
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
