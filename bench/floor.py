"""The floor of a load: the shortest time in which this machine delivers the same bytes.

The processes and threads of a load read each byte once, past the page cache (`O_DIRECT`) if the file system allows it.
They do the minimal work of a reader: a checksum while the bytes are in the processor's cache, and one copy to new
memory, in large pages if the system has them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from cold import make_cold, map_memory
from isal import isal_zlib
from meters import Io

from deepspeed_ucp.io.memory import LargePages, allocate_large, find_address
from deepspeed_ucp.io.threads import count_threads

_PIECE = 16 << 20
_CHUNK = 4 << 20
_ALIGNMENT = 4096


@dataclass(frozen=True)
class Piece:
    """A byte range of one file."""

    file: Path
    offset: int
    length: int


def list_pieces(folder: Path, pattern: str) -> list[Piece]:
    """List all bytes of some files of a checkpoint."""
    sizes = {file: file.stat().st_size for file in sorted(folder.glob(pattern))}
    return [
        Piece(file, offset, min(_PIECE, size - offset))
        for file, size in sizes.items()
        for offset in range(0, size, _PIECE)
    ]


def measure_floor(pieces: Sequence[Piece], root: Path) -> dict[str, float]:
    """Read this rank's share of the pieces after the cache was emptied of the files below `root` (collective)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share = pieces[len(pieces) * rank // world : len(pieces) * (rank + 1) // world]
    reader = Reader(share)
    if rank == 0:
        make_cold(root)
    dist.barrier()
    before, start = Io.now(), time.perf_counter()
    reader.run(count_threads())
    return {"seconds": time.perf_counter() - start, "storage_bytes": (Io.now() - before).storage}


class Reader:
    """Threads that read pieces into new memory."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pending, self._lock = iter(pieces), threading.Lock()
        self._files = {file: _open(file) for file in {piece.file for piece in pieces}}
        lengths = [piece.length for piece in pieces]
        memory = map_memory(sum(lengths))
        LargePages().add(find_address(memory), len(memory))
        self._memory = np.frombuffer(memory, np.uint8)
        self._starts = dict(zip(pieces, np.cumsum([0, *lengths]).tolist(), strict=False))

    def run(self, threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(self._read_all) for _ in range(threads)]:
                future.result()

    def _read_all(self) -> None:
        scratch = allocate_large(_CHUNK)
        while True:
            with self._lock:
                piece = next(self._pending, None)
            if piece is None:
                return
            self._read(piece, scratch)

    def _read(self, piece: Piece, scratch: memoryview) -> None:
        position, end, destination = piece.offset, piece.offset + piece.length, self._starts[piece]
        while position < end:
            low = position // _ALIGNMENT * _ALIGNMENT
            requested = min(_CHUNK, -(-(end - low) // _ALIGNMENT) * _ALIGNMENT)
            high = low + os.preadv(self._files[piece.file], [scratch[:requested]], low)
            count = min(high, end) - position
            if count <= 0:
                raise EOFError(f"{piece.file} ends before byte {end}")
            view = scratch[position - low : position - low + count]
            isal_zlib.crc32(view)
            np.copyto(self._memory[destination : destination + count], np.frombuffer(view, np.uint8))
            position, destination = position + count, destination + count


def _open(file: Path) -> int:
    with suppress(OSError):
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    return os.open(file, os.O_RDONLY)
