"""The floor: the bytes of the state read once, as the best reader would, through the page cache or past it.

As many threads of a process read as a load's there. Through the cache is plain parallel ``preadv`` into memory that is
reused, without any work on the bytes. Past it (``O_DIRECT``) includes the minimal work of a reader that delivers them:
aligned memory of the cache's size, the checksum while they are in the cache, and one copy to fresh memory, in large
pages if the system has them. The faster of both counts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cold import map_memory
from isal import isal_zlib
from meters import Io

from deepspeed_ucp.io.memory import LargePages, allocate_large, find_address
from deepspeed_ucp.io.threads import count_threads

if TYPE_CHECKING:
    from pathlib import Path

    from ranks import Peer

_PIECE = 16 << 20
_DIRECT_CHUNK = 4 << 20
_ALIGNED = 4096
DIRECT = "-direct"
"""Suffix of the name of a floor past the page cache."""


@dataclass(frozen=True)
class Piece:
    """A byte range of one file, at most 16 MiB."""

    file: Path
    offset: int
    length: int


def state_pieces(tag_folder: Path) -> list[Piece]:
    """The records of fp32 masters and moments in the optimizer files of a normal ZeRO-1 checkpoint, cut into pieces."""
    pieces = []
    for file in sorted(tag_folder.glob("*_optim_states.pt")):
        for offset, length in _records(file):
            pieces += [
                Piece(file, at, min(_PIECE, offset + length - at)) for at in range(offset, offset + length, _PIECE)
            ]
    return pieces


def file_pieces(folder: Path, pattern: str = "*.pt") -> list[Piece]:
    """All bytes of the files of a checkpoint, cut into pieces."""
    sizes = {file: file.stat().st_size for file in sorted(folder.glob(pattern))}
    return [Piece(file, at, min(_PIECE, size - at)) for file, size in sizes.items() for at in range(0, size, _PIECE)]


def _records(file: Path) -> list[tuple[int, int]]:
    """(offset, length) in bytes of every tensor of one or more dimensions of the file's optimizer state."""
    content = torch.load(file, map_location="meta", weights_only=False)["optimizer_state_dict"]
    storages = [t.untyped_storage() for t in _tensors(content) if t.dim() and t.numel()]
    return sorted({(s._checkpoint_offset, s.nbytes()) for s in storages})


def _tensors(content: object) -> Iterator[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _tensors(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _tensors(value)


def share_of(pieces: Sequence[Piece], rank: int, world: int) -> Sequence[Piece]:
    """A contiguous share of the pieces, equal to within one piece."""
    return pieces[len(pieces) * rank // world : len(pieces) * (rank + 1) // world]


def floor_body(pieces: Sequence[Piece], *, direct: bool = False) -> Any:
    """The body of one floor process, for `Ranks`."""

    def body(peer: Peer) -> dict[str, Any]:
        share, threads = share_of(pieces, peer.rank, peer.world), count_threads()
        mine, lock = iter(share), threading.Lock()
        make_reader = _make_direct_reader(share) if direct else _make_buffered_reader(share)
        readers = [make_reader() for _ in range(threads)]
        peer.ready()
        before, began = Io.now(), time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(_read_all, mine, lock, read) for read in readers]:
                done.result()
        return {"seconds": time.perf_counter() - began, "io": Io.now() - before}

    return body


def allows_direct(file: Path) -> bool:
    """Whether the file system opens files past its page cache."""
    with suppress(OSError):
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
        return True
    return False


_Reader = Callable[[Piece], None]


def _read_all(pieces: Iterator[Piece], lock: threading.Lock, read: _Reader) -> None:
    while True:
        with lock:
            piece = next(pieces, None)
        if piece is None:
            return
        read(piece)


def _open(pieces: Sequence[Piece], flags: int) -> dict[Path, int]:
    return {file: os.open(file, os.O_RDONLY | flags) for file in {piece.file for piece in pieces}}


def _make_buffered_reader(pieces: Sequence[Piece]) -> Callable[[], _Reader]:
    descriptors = _open(pieces, 0)

    def make() -> _Reader:
        buffer = memoryview(bytearray(os.urandom(4096) * (_PIECE // 4096)))  # touched

        def read(piece: Piece) -> None:
            done = 0
            while done < piece.length:
                got = os.preadv(descriptors[piece.file], [buffer[done : piece.length]], piece.offset + done)
                if not got:
                    raise EOFError(f"{piece.file} ends before byte {piece.offset + piece.length}")
                done += got

        return read

    return make


def _make_direct_reader(pieces: Sequence[Piece]) -> Callable[[], _Reader]:
    descriptors = _open(pieces, os.O_DIRECT)
    memory = map_memory(sum(piece.length for piece in pieces))
    LargePages().add(find_address(memory), len(memory))
    fresh = np.frombuffer(memory, np.uint8)
    starts = dict(zip(pieces, np.cumsum([0, *(piece.length for piece in pieces[:-1])]).tolist(), strict=False))

    def make() -> _Reader:
        scratch = allocate_large(_DIRECT_CHUNK)
        scratch[::_ALIGNED] = bytes(len(scratch[::_ALIGNED]))  # touched

        def read(piece: Piece) -> None:
            end, out = piece.offset + piece.length, starts[piece]
            at = piece.offset
            while at < end:
                low = at // _ALIGNED * _ALIGNED
                asked = min(_DIRECT_CHUNK, -(-(end - low) // _ALIGNED) * _ALIGNED)
                got = min(os.preadv(descriptors[piece.file], [scratch[:asked]], low), end - low) - (at - low)
                if got <= 0:
                    raise EOFError(f"{piece.file} ends before byte {end}")
                view = scratch[at - low : at - low + got]
                isal_zlib.crc32(view)
                np.copyto(fresh[out : out + got], np.frombuffer(view, np.uint8))
                at, out = at + got, out + got

        return read

    return make
