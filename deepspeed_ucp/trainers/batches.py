"""Batch sizes of trainers, which derive samples and learning rates from steps."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any, NoReturn

from ..comm import connect
from ..config import SECTION, UniversalConfig, adapt_batch
from ..errors import CheckpointError, MismatchError, UnsupportedError, pluralize
from ..model.index import BATCH_SIZES, SavedJob, to_integer

logger = logging.getLogger("deepspeed_ucp")

LIVE = f'set "{SECTION}": {{"total_batch": "live"}} to continue with the total batch of this run'


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Batch sizes of a run.

    Attributes:
        micro: samples in a micro batch of one rank.
        accumulation: micro batches per step.
        ranks: data-parallel ranks.
    """

    micro: int
    accumulation: int
    ranks: int

    @classmethod
    def of(cls, engine: Any) -> BatchSizes:
        """Read an engine's batch sizes, floats under sequence parallelism, as integers."""
        total, micro, accumulation = (to_integer(getattr(engine, name)()) for name in BATCH_SIZES)
        return cls(micro, accumulation, total // (micro * accumulation))

    @property
    def total(self) -> int:
        """Samples of a step."""
        return self.micro * self.accumulation * self.ranks

    def accepts_total(self, folder: str, job: SavedJob, config: UniversalConfig) -> bool:
        """Return True if this total batch needs no change; warn if the job records none."""
        if job.format and connect().rank == 0:
            writers = f", saved by {pluralize(job.ranks, 'rank')} (from files of random states)"
            logger.warning(
                f"{folder}: {job.format}{writers if job.ranks > 1 else ''}, records no total batch; this run takes "
                f"{self.total} samples a step. If the saved run took another number, set batch sizes that make it."
            )
        return config.total_batch == "live" or job.total_batch in (None, self.total)

    def fit(self, folder: str, job: SavedJob) -> tuple[int, int]:
        """Find (micro batch, accumulation) that make the saved total batch.

        Raises:
            MismatchError: these ranks cannot make it.
        """
        fitting = adapt_batch(job.total_batch or self.total, self.micro, self.ranks)
        return fitting or self.refuse(folder, job, "Use a number of ranks that divides it")

    def refuse(self, folder: str, job: SavedJob, advice: str) -> NoReturn:
        raise MismatchError(
            f"saved with a total batch of {job.total_batch} samples, this run has {self.total} ({self.micro} "
            f"a device, {pluralize(self.ranks, 'rank')}): it would continue at other samples and learning rates. "
            f"{advice}, or {LIVE}.",
            path=folder,
        )


def complete_job(job: SavedJob, folder: str, name: str) -> SavedJob:
    """Return the job with its number of ranks, counted by files if not recorded.

    Args:
        name: name of a rank's file of random states, with ``{}`` for the rank.
    """
    if not job.format:
        return job
    paths = (os.path.join(folder, name.format(rank)) for rank in count())
    return replace(job, ranks=sum(1 for _ in takewhile(os.path.exists, paths)) or 1)


def refuse_weights(job: SavedJob, folder: str, advice: str) -> None:
    """Refuse to resume a job that saved weights alone.

    Raises:
        CheckpointError: the folder has no optimizer states.
    """
    if job.weights_alone:
        raise CheckpointError(f"has only weights ({job.format}) and cannot be resumed. {advice}.", path=folder)


def refuse_loader_position(folder: str, job: SavedJob, advice: str = "") -> None:
    """Refuse a stateful data loader's position in another world.

    Raises:
        UnsupportedError: the world is another one.
    """
    ranks = connect().size
    if job.ranks != ranks:
        raise UnsupportedError(
            f"the position of a stateful data loader was saved by {pluralize(job.ranks, 'rank')}, each for its "
            f"batches, and means other samples on {ranks}. Use deepspeed_ucp.data.ElasticSampler{advice}.",
            path=folder,
        )


def warn_order(folder: str, changes: str, advice: str) -> None:
    """Warn that samples have another order than in the saved run."""
    logger.warning(
        f"{folder}: the samples have another order than in the saved run ({changes}), so a partial epoch repeats some "
        f"and omits others. {advice}."
    )


def warn_unfinished(folder: str, done: int, accumulation: int, advice: str) -> None:
    """Warn if a save has ``done`` micro batches of an unfinished step."""
    if done:
        logger.warning(
            f"{folder}: was saved after {done} of the {accumulation} micro batches of a step, whose gradients were not "
            f"saved: {advice}"
        )
