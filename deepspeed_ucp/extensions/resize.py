"""Vocabularies with other numbers of rows, by ``resize`` rules.

New rows may start from the mean of the saved rows, which is the same to the bit in every topology: rows are added in
fp64, block by block of the whole tensor and then the blocks in their order, for any assignment of blocks to ranks.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain, groupby
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..comm import Comm
from ..config import UniversalConfig
from ..errors import fold_names, shorten
from ..io.cast import find_dtype
from ..io.memory import Scratch
from ..io.paths import count_readers
from ..io.read import Checked
from ..model.index import AtomicIndex
from ..model.storage import COPY, MASTER, MODULE, AtomKey
from ..plan.match import Adaptation
from ..plan.settling import list_names
from ..stream.full_tensors import assemble_full_tensor
from ..stream.reader import AtomReader, refuse_scattered, verify_reads
from ..tensor_parallel.layout import Layout
from ..tensor_parallel.resize import Resized
from .registry import Extension

logger = logging.getLogger("deepspeed_ucp")

BLOCK = 1 << 21
"""Elements of the rows that are added at once, unless one row has more."""

Sum = npt.NDArray[np.float64]


class ResizedRows(Extension):
    """The user's ``resize`` rules."""

    def adapt(self, adaptation: Adaptation) -> None:
        """Log rules that match no parameter."""
        names = list_names(adaptation.index)
        resizes = chain.from_iterable(rule_set.resizes for rule_set in adaptation.rules if rule_set.reported)
        idle = [resize.match for resize in resizes if not any(map(resize.matches, names))]
        if idle and adaptation.log:
            logger.info("patterns: %s", shorten(f"resize: {match!r} matches no parameter" for match in idle))

    def read_more(self, context: Any, fill_plan: Any) -> None:
        """Log parameters of another shape, and read means of saved rows (collective)."""
        if context.comm.rank == 0:
            _log_changes(fill_plan)
        if fill_plan.wants.averaged:
            with context.report.phase("read"):
                fill_plan.averages = average_rows(
                    fill_plan.index, fill_plan.wants.averaged, context.comm, context.config
                )


def _log_changes(fill_plan: Any) -> None:
    """Log parameters of another shape, with names that differ in numbers together."""
    alike: dict[Resized, list[str]] = defaultdict(list)
    changed = [pair for pair in sorted(fill_plan.wants.resized.items()) if not pair[1].pads]
    for name, (how, *_) in fold_names(changed, lambda how: how):
        alike[how].append(name)
    for how, names in alike.items():
        logger.warning("resize: %s: %s", shorten(names), how.describe())
    with_states = any(key.state not in (MASTER, COPY, MODULE) for key in fill_plan.touched)
    if with_states and any(fill_plan.index.scalars.values()) and any(how.live > how.kept for how in alike):
        logger.warning("resize: %s", _describe_new_states(fill_plan.index))


def _describe_new_states(index: AtomicIndex) -> str:
    """Describe how zero moments under an old step count change Adam's first updates."""
    betas = {tuple(group.hyper["betas"]) for group in index.groups if "betas" in group.hyper}
    most = max(((1 - one) / math.sqrt(1 - two) for one, two in betas if two < 1), default=0)
    rate = f", so Adam's first updates there are up to {most:.2g} × lr" if most else ""
    return f"the optimizer states of new rows are zero under the old step count{rate}"


def average_rows(
    index: AtomicIndex, wanted: Mapping[AtomKey, tuple[Layout, int]], comm: Comm, config: UniversalConfig
) -> dict[AtomKey, Sum]:
    """Return the mean row of each parameter's first rows (collective).

    Args:
        wanted: how the source cuts each, and how many rows count; the same on every rank.

    Raises:
        UcpError: a file cannot be read or is damaged; the same on every rank.
    """
    comm.run_replicated(
        lambda: refuse_scattered(index, "all ranks together compute the mean from which new rows start")
    )
    checks, threads = list[Checked](), config.threads or count_readers(index.state_file)
    blocks = [
        (key, low, min(low + step, count))
        for key, (layout, count) in sorted(wanted.items())
        for step in (max(BLOCK // max(prod(layout.shape[1:]), 1), 1),)
        for low in range(0, count, step)
    ]
    with AtomReader(index, checksum=config.verify == "crc") as reader:

        def add(block: tuple[AtomKey, int, int]) -> Sum:
            """Return the sum of rows [low, high) of a whole tensor."""
            key, low, high = block
            tensor = assemble_full_tensor(index.atoms[key], wanted[key][0])
            width = prod(tensor.shape[1:])
            want = tensor.want(low * width, (high - low) * width)
            data = Scratch().take(want.nbytes)
            checks.extend(reader.read_tensors([want], [data]))
            rows = np.frombuffer(data, find_dtype(tensor.dtype)).reshape(-1, width)
            return np.asarray(rows.astype(np.float64).sum(0))

        sums = comm.share(blocks, add)
        if reader.checksum:
            verify_reads(checks, index, comm, threads=threads)
    pairs = zip(blocks, sums, strict=True)
    return {
        key: np.add.reduce([total for _, total in parts]) / wanted[key][1]
        for key, parts in groupby(pairs, lambda pair: pair[0][0])
    }
