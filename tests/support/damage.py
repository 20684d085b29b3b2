"""Damaged, unchecked and unreachable files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import AtomKey
from deepspeed_ucp.torchsave.torchfile import list_records


def flip(path: Path, position: int, bit: int = 0) -> None:
    with open(path, "r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 1 << bit]))


def flip_largest(path: Path) -> None:
    """Damage a byte of a file's largest record."""
    records = list_records(str(path)).records
    record = records[max(records, key=lambda name: (name != "data.pkl", records[name].nbytes))]
    flip(path, record.offset + record.nbytes // 2)


def flip_bit(index: AtomicIndex, name: str, state: str, offset: int | None = None) -> None:
    """Damage a source: in the record of an atom's last fragment, in the middle or at a byte."""
    number = index.atoms[AtomKey(name, state)].shards[-1].list_fragments(state)[-1].record
    record = index.records[number]
    position = record.nbytes // 2 if offset is None else offset % record.nbytes
    flip(Path(index.files[index.records.files[number]].path), record.offset + position)


@contextmanager
def write_checksums(on: bool) -> Iterator[None]:
    """Context manager that makes torch write checksums, or omit them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(on)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def refuse_path(work: Callable[..., Any], refused: str, path: Any, *rest: Any, **how: Any) -> Any:
    """Call a function of ``os``, but refuse one path."""
    if str(path) == refused.rstrip("/"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return work(path, *rest, **how)
