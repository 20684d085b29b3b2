"""Ranks as forked processes: they share the parent's imports, so that a launch costs seconds and not half a minute."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

_context = multiprocessing.get_context("fork")
_SHARED_MEMORY = Path("/dev/shm")
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Peer:
    """What a rank's body gets: who it is, and how to meet the others and the parent."""

    rank: int
    world: int
    port: int
    barrier: Any
    connection: Connection

    def ready(self) -> None:
        """Tell the parent that the set-up is done, and wait until it says that the measurement may begin."""
        self.connection.send(("ready", None))
        self.connection.recv()
        self.barrier.wait()


class RankFailed(RuntimeError):
    """A rank raised, or died; carries its traceback or the end of its output."""


Body = Callable[[Peer], Any]


class Ranks:
    """`world` processes that run `body(peer)`; a context manager that leaves no process and no buffer behind."""

    def __init__(self, world: int, body: Body, log: Path, timeout_seconds: float = 1800) -> None:
        self.world, self._body, self._log, self._timeout = world, body, log, timeout_seconds
        self.port = _free_port()
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Ranks:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        barrier = _context.Barrier(self.world, timeout=self._timeout)
        for rank in range(self.world):
            ours, theirs = _context.Pipe()
            peer = Peer(rank, self.world, self.port, barrier, theirs)
            process = _context.Process(target=_run_rank, args=(self._body, peer, self._log), daemon=False)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        remove_reduce_buffers(self.port)

    def run(self, before: Callable[[], object] = lambda: None) -> list[Any]:
        """Wait until all ranks are ready, call `before`, let them go; what each rank's body returned, by rank."""
        self._receive("ready")
        before()
        for connection in self._connections:
            connection.send("go")
        return self._receive("done")

    def _receive(self, expected: str) -> list[Any]:
        received: dict[int, Any] = {}
        while len(received) < self.world:
            waiting = [c for rank, c in enumerate(self._connections) if rank not in received]
            answered = wait(waiting, self._timeout)
            if not answered:
                raise RankFailed(f"no rank answered within {self._timeout:.0f} s{self._tail()}")
            for connection in answered:
                received[self._connections.index(connection)] = self._answer(connection, expected)
        return [received[rank] for rank in range(self.world)]

    def _answer(self, connection: Any, expected: str) -> Any:
        rank = self._connections.index(connection)
        try:
            kind, value = connection.recv()
        except EOFError:
            raise RankFailed(f"rank {rank} of {self.world} died{self._tail()}") from None
        if kind != expected:
            raise RankFailed(f"rank {rank} of {self.world}:\n{value}")
        return value

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-20:] if self._log.exists() else []
        return "; the end of its output:\n" + "\n".join(lines)


def remove_reduce_buffers(port: int) -> None:
    """Remove what DeepSpeed's shared-memory collectives of the launch at `port` left in /dev/shm (69 MB a rank)."""
    for file in _SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        file.unlink(missing_ok=True)


def release_free_memory() -> None:
    """Give freed memory back to the system, so that the resident size is what is in use."""
    gc.collect()
    _libc.malloc_trim(0)


def _run_rank(body: Body, peer: Peer, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    _set_launcher_environment(peer)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # the parent has read its own already
    try:
        answer = ("done", body(peer))
    except Exception:  # noqa: BLE001 (the boundary of the process: the parent raises it)
        answer = ("failed", traceback.format_exc())
    peer.connection.send(answer)
    os._exit(0)  # engines of gigabytes need not be taken down in order


def _set_launcher_environment(peer: Peer) -> None:
    os.environ |= {
        "RANK": str(peer.rank),
        "LOCAL_RANK": str(peer.rank),
        "WORLD_SIZE": str(peer.world),
        "LOCAL_SIZE": str(peer.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(peer.port),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // peer.world)),
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
