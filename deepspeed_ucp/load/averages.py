"""Means of saved rows, from which new rows of resized parameters start: the same to the bit in every topology.

Rows are added in fp64, block by block of the whole tensor and then the blocks in their order, for any assignment of
blocks to ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..comm import Comm
from ..config import UniversalConfig
from ..io.cast import find_dtype
from ..io.filesystems import count_readers
from ..io.memory import Scratch
from ..model import AtomicIndex, AtomKey
from ..stream.checks import Checks
from ..stream.copies import refuse_scattered
from ..stream.full_tensors import assemble_full_tensor
from ..stream.reader import AtomReader
from ..tensor_parallel import Layout

BLOCK = 1 << 21
"""Elements of the rows that are added at once, unless one row has more."""

Sum = npt.NDArray[np.float64]


class _Block(NamedTuple):
    """Rows [low, high) of a whole tensor."""

    key: AtomKey
    low: int
    high: int


def average_rows(
    index: AtomicIndex, wanted: Mapping[AtomKey, tuple[Layout, int]], comm: Comm, config: UniversalConfig
) -> dict[AtomKey, Sum]:
    """Return the mean of each parameter's first rows, [elements of a row]; collective.

    Args:
        wanted: how the source cuts each, and how many rows count; the same on every rank.

    Raises:
        UcpError: a file cannot be read or is damaged; the same on every rank.
    """
    if not wanted:
        return {}
    comm.alike(lambda: refuse_scattered(index, "all ranks together reckon the mean that new rows begin from"))
    checks, threads = Checks(), config.threads or count_readers(index.run.state_file)
    blocks = [
        _Block(key, low, min(low + step, kept))
        for key, (layout, kept) in sorted(wanted.items())
        for step in (max(BLOCK // max(prod(layout.shape[1:]), 1), 1),)
        for low in range(0, kept, step)
    ]
    with AtomReader(index, checksum=config.verify == "crc") as reader:

        def add(block: _Block) -> Sum:
            """Return the sum of a block's rows."""
            tensor = assemble_full_tensor(index.stored.atoms[block.key], wanted[block.key][0])
            width = prod(tensor.shape[1:])
            want = tensor.want(block.low * width, (block.high - block.low) * width)
            data = Scratch().take(want.nbytes)
            checks.add(reader.read_tensors([want], [data]))
            rows = np.frombuffer(data, find_dtype(tensor.dtype)).reshape(-1, width)
            return np.asarray(rows.astype(np.float64).sum(0))

        sums = comm.share(blocks, add)
        if reader.checksum:
            checks.verify(index, comm, threads=threads)
    pairs = zip(blocks, sums, strict=True)
    return {
        key: np.add.reduce([total for _, total in parts]) / wanted[key][1]
        for key, parts in groupby(pairs, lambda pair: pair[0].key)
    }
