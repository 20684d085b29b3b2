"""Work in a forked child that is killed by SIGKILL right before its n-th system call, or in the middle of a write."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

_CHANGING = (
    "pwrite", "pwritev", "write", "rename", "replace", "unlink", "link", "mkdir", "rmdir", "fsync", "ftruncate", "open"
)  # fmt: skip
CALLS = tuple((os, name) for name in _CHANGING)
"""Functions that change files; their calls are counted together, over all threads."""

Calls = Sequence[tuple[object, str]]

_ALARM = 600
"""Seconds after which a hung child is killed; a busy machine needs less."""


@contextmanager
def intercept(act: Callable[[int, str, tuple[Any, ...]], None], calls: Calls = CALLS) -> Iterator[None]:
    """Call ``act(number, name, arguments)`` before each of the calls (`open`: if it creates or truncates)."""
    numbers = count()
    originals = [(owner, name, getattr(owner, name)) for owner, name in calls]

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or (len(args) > 1 and args[1] & (os.O_CREAT | os.O_TRUNC)):
                act(next(numbers), name, args)
            return original(*args, **kwargs)

        return wrapper

    try:
        for owner, name, original in originals:
            setattr(owner, name, wrap(name, original))
        yield
    finally:
        for each in originals:
            setattr(*each)


def run_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked child. Return minus the number of the signal that ended it, or 0.

    Raises:
        AssertionError: the child raised an error.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(_ALARM)
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - the parent sees the exit code, the test's output the rest
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code <= 0, "the child raised"
    assert code != -signal.SIGALRM, f"the child took more than {_ALARM} seconds"
    return code


def run_dying(work: Callable[[], object], at: int, *, torn: bool = False) -> bool:
    """Run ``work`` in a child that is killed at call number ``at``. Return False if it ended before.

    Args:
        torn: write half of the bytes of a write before.
    """
    tear = _make_tearing()

    def act(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number != at:
            return
        if torn and name in tear:
            tear[name](*args)
        os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        with intercept(act):
            work()

    return run_child(run) == -signal.SIGKILL


def _make_tearing() -> dict[str, Callable[..., object]]:
    """Return calls that write half of their data."""
    write, pwrite = os.write, os.pwrite

    def halve(data: Any) -> memoryview:
        view = memoryview(data).cast("B")
        return view[: view.nbytes // 2]

    return {
        "write": lambda fd, data: write(fd, halve(data)),
        "pwrite": lambda fd, data, offset: pwrite(fd, halve(data), offset),
        "pwritev": lambda fd, parts, offset: pwrite(fd, halve(b"".join(parts)), offset),
    }


@contextmanager
def failing(at: int, *, code: int = errno.ENOSPC) -> Iterator[None]:
    """Context manager in which calls that need room fail from call number ``at`` on."""

    def act(number: int, name: str, _args: tuple[Any, ...]) -> None:
        if number >= at and name in ("pwrite", "pwritev", "write", "mkdir", "open"):
            raise OSError(code, os.strerror(code))

    with intercept(act):
        yield


def list_calls(work: Callable[[], object]) -> list[str]:
    """List the names of the calls of ``work``, in this process."""
    names: list[str] = []
    with intercept(lambda _number, name, _args: names.append(name)):
        work()
    return names


def list_writes(work: Callable[[], object]) -> list[int]:
    """List the numbers of the calls of ``work`` that write and can be torn."""
    return [number for number, name in enumerate(list_calls(work)) if "write" in name]
