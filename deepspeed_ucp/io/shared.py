"""Memory that the ranks of one machine share: each has its own, and sees the others'."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable
from typing import Any

from ..errors import RemoteError
from .memory import identify_host

_FRONT = mmap.PAGESIZE
_TOKEN = 16
"""Bytes in front by which a rank knows that what it maps is what the other has made."""


def share_memory(nbytes: int, rank: int, gather: Callable[[Any], list[Any]]) -> list[memoryview | None]:
    """Memory of every rank of this machine; collective.

    It has no name, so that nothing of it is left when the last process that maps it ends, in whatever way, and no mount
    limits it.

    Args:
        nbytes: of each rank's; the same on all.
        rank: this one's.
        gather: every rank's value, in rank order.

    Returns:
        By rank ``nbytes`` of memory, zeroed; None for ranks of other machines, and for all others where the ranks of
        a machine do not see each other's memory (containers of their own). Whom one rank sees sees it, too.

    Raises:
        RemoteError: a rank has no memory of its own; the same on every rank.
    """
    token = secrets.token_bytes(_TOKEN)
    fd, own = _make(nbytes, token)
    path = f"/proc/{os.getpid()}/fd/{fd}" if fd >= 0 else ""
    try:
        offers: list[tuple[str, str, bytes, bool]] = gather((identify_host(), path, token, own is not None))
        _refuse_lacking([number for number, each in enumerate(offers) if not each[3]], nbytes, rank)
        host = offers[rank][0]
        near = [number for number, each in enumerate(offers) if each[0] == host and number != rank]
        seen = {number: memory for number in near if (memory := _map(*offers[number][1:3], nbytes)) is not None}
        shared = gather(fd >= 0 and len(seen) == len(near))
    finally:
        if fd >= 0:
            os.close(fd)
    if not all(shared[number] for number in (*near, rank)):
        seen = {}
    return [own if number == rank else seen.get(number) for number in range(len(offers))]


def _refuse_lacking(ranks: list[int], nbytes: int, rank: int) -> None:
    if ranks:
        error = RemoteError(
            f"[rank {ranks[0]}] out of memory: {nbytes >> 20} MiB to exchange bytes in cannot be had. Use a smaller "
            "window, or fewer ranks on its machine."
        )
        error.shared, error.echo = True, rank > 0
        raise error


def _make(nbytes: int, token: bytes) -> tuple[int, memoryview | None]:
    """A file of memory with its descriptor; (-1, memory) where the system has none, (-1, None) where it has no room."""
    try:
        return _make_file(nbytes, token)
    except (AttributeError, OSError):
        pass
    try:
        return -1, memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    except OSError:
        return -1, None


def _make_file(nbytes: int, token: bytes) -> tuple[int, memoryview]:
    fd = os.memfd_create("deepspeed_ucp", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _FRONT + nbytes)
        memory = memoryview(mmap.mmap(fd, _FRONT + nbytes))
    except OSError:
        os.close(fd)
        raise
    memory[:_TOKEN] = token
    return fd, memory[_FRONT:]


def _map(path: str, token: bytes, nbytes: int) -> memoryview | None:
    """Another process's memory; None where it cannot be seen, or is another process's of that number."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size != _FRONT + nbytes:
            return None
        memory = memoryview(mmap.mmap(fd, _FRONT + nbytes))
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return memory[_FRONT:] if memory[:_TOKEN] == token else None
