"""Memory that the ranks of one machine share: each allocates its own and maps the others'."""

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
"""Bytes at the beginning that identify a rank's memory to the others."""


def share_memory(nbytes: int, rank: int, gather: Callable[[Any], list[Any]]) -> list[memoryview | None]:
    """Return the memory of every rank of this machine (collective).

    It has no name, so it is freed when the last process that maps it ends, and the size of no mount limits it.

    Args:
        nbytes: size of each rank's memory, the same on all ranks.
        rank: this rank.
        gather: returns a value of every rank, in rank order.

    Returns:
        ``nbytes`` of zeroed memory by rank; None for ranks of other machines, and for all other ranks if those of this
        machine cannot access each other's memory (separate containers). Access is mutual.

    Raises:
        RemoteError: a rank could not allocate its memory; the same on every rank.
    """
    token = secrets.token_bytes(_TOKEN)
    fd, mine = _make(nbytes, token)
    path = f"/proc/{os.getpid()}/fd/{fd}" if fd >= 0 else ""
    try:
        offers: list[tuple[str, str, bytes, bool]] = gather((identify_host(), path, token, mine is not None))
        if lacking := [number for number, offer in enumerate(offers) if not offer[3]]:
            error = RemoteError(
                f"[rank {lacking[0]}] out of memory: {nbytes >> 20} MiB to exchange bytes in cannot be allocated. Use "
                "a smaller window, or fewer ranks on its machine."
            )
            error.shared, error.echo = True, rank > 0
            raise error
        host = offers[rank][0]
        near = [number for number, offer in enumerate(offers) if offer[0] == host and number != rank]
        seen = {number: memory for number in near if (memory := _map(*offers[number][1:3], nbytes)) is not None}
        shared = gather(fd >= 0 and len(seen) == len(near))
    finally:
        if fd >= 0:
            os.close(fd)
    if not all(shared[number] for number in (*near, rank)):
        seen = {}
    return [mine if number == rank else seen.get(number) for number in range(len(offers))]


def _make(nbytes: int, token: bytes) -> tuple[int, memoryview | None]:
    """Allocate memory with a file descriptor; (-1, memory) if the system has no ``memfd``, (-1, None) if it is full."""
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
    """Map another rank's memory; None if it is not accessible, or the path is that of another process."""
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
