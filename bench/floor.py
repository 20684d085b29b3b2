"""The floor: the bytes of the state read once by plain parallel preadv, with nothing done to them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from meters import Io

if TYPE_CHECKING:
    from pathlib import Path

    from ranks import Peer

_PIECE = 16 << 20
THREADS = 4  # a process


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


def file_pieces(folder: Path) -> list[Piece]:
    """All bytes of the files of a checkpoint, cut into pieces."""
    sizes = {file: file.stat().st_size for file in sorted(folder.glob("*.pt"))}
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


def floor_body(pieces: Sequence[Piece], threads: int = THREADS) -> Any:
    """The body of one floor process, for `Ranks`."""

    def body(peer: Peer) -> dict[str, Any]:
        mine = iter(share_of(pieces, peer.rank, peer.world))
        descriptors = {file: os.open(file, os.O_RDONLY) for file in {piece.file for piece in pieces}}
        buffers = [memoryview(bytearray(os.urandom(4096) * (_PIECE // 4096))) for _ in range(threads)]  # touched
        lock = threading.Lock()
        workers = [threading.Thread(target=_read, args=(mine, lock, descriptors, buffer)) for buffer in buffers]
        peer.ready()
        before, began = Io.now(), time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return {"seconds": time.perf_counter() - began, "io": Io.now() - before}

    return body


def _read(pieces: Iterator[Piece], lock: threading.Lock, descriptors: dict[Path, int], buffer: memoryview) -> None:
    while True:
        with lock:
            piece = next(pieces, None)
        if piece is None:
            return
        done = 0
        while done < piece.length:
            got = os.preadv(descriptors[piece.file], [buffer[done : piece.length]], piece.offset + done)
            if not got:
                raise EOFError(f"{piece.file} ends before byte {piece.offset + piece.length}")
            done += got
