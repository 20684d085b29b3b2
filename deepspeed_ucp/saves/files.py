"""``torch.save`` into memory: torch pickles, a writer of ours copies and sums in one pass."""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch

from ..torchsave.zipframe import RecordWriter

_PROTOCOL = 2
"""Of pickles, as ``torch.save`` has it."""


class _TorchRecords(RecordWriter):
    """Takes what ``torch.serialization`` has of a record: bytes, text, or a storage in the host's memory."""

    def write_record(self, name: str, data: Any, nbytes: int) -> None:
        if isinstance(data, str):
            data = data.encode()
        elif not isinstance(data, bytes):
            data = memoryview(torch.empty(0, dtype=torch.uint8).set_(data).numpy())
        super().write_record(name, data, nbytes)


def save_over(value: Any, path: str) -> None:
    """What ``torch.save(value, path)`` does, over the bytes of a file that is there: its pages need not be found anew.

    Raises:
        OSError: it cannot be written.
    """
    save: Any = getattr(torch.serialization, "_save", None)  # torch's own, with a writer of its own behind it
    if save is None:
        torch.save(value, path)
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        records = _TorchRecords(fd)
        save(value, records, pickle, _PROTOCOL, False)
        records.close()
    finally:
        os.close(fd)
