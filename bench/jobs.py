"""Loads of models with 10^12 parameters by thousands of ranks, for `scale.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dense import DenseRanks, DenseSizes
from moe import MoeRanks, MoeSizes
from synthetic import SUB_GROUP


@dataclass(frozen=True)
class Job:
    """The ranks that save a checkpoint, and those that load it.

    Attributes:
        reporters: the ranks that report tensors which other ranks replicate.
    """

    title: str
    source: DenseRanks | MoeRanks
    target: DenseRanks | MoeRanks
    reporters: Sequence[int]

    @property
    def ranks(self) -> int:
        return self.target.ranks


def make_dense(source: DenseRanks, target: DenseRanks) -> Job:
    title = f"dense, {source.ranks:,} → {target.ranks:,} ranks {'ZeRO-3' if target.sub_group else 'ZeRO-1'}"
    return Job(title, source, target, [rank for rank in range(target.ranks) if not target.find_state(rank).dp_rank])


def make_moe(source: MoeRanks, target: MoeRanks) -> Job:
    title = f"{source.sizes.experts} experts, {source.ranks:,} → {target.ranks:,} ranks ZeRO-1, EP{source.ep}"
    return Job(title, source, target, range(target.ep))


DENSE, MOE = DenseSizes(128, 25600, 160), MoeSizes(128, 6144, 1664, 256)
QUICK_DENSE, QUICK_MOE = DenseSizes(16, 1024, 16, 8192, 512), MoeSizes(8, 512, 256, 16, 8000)

JOBS: dict[str, Job] = {
    "dense1-10k": make_dense(DenseRanks(DENSE, 8, 64, 20), DenseRanks(DENSE, 8, 64, 16)),
    "dense3-10k": make_dense(DenseRanks(DENSE, 8, 64, 20), DenseRanks(DENSE, 1, 1, 8192, SUB_GROUP)),
    "moe-10k": make_moe(MoeRanks(MOE, 10_240, 256), MoeRanks(MOE, 8192, 256)),
}

QUICK_JOBS: dict[str, Job] = {
    "dense1-quick": make_dense(DenseRanks(QUICK_DENSE, 4, 8, 2), DenseRanks(QUICK_DENSE, 4, 4, 3)),
    "dense3-quick": make_dense(DenseRanks(QUICK_DENSE, 4, 8, 2), DenseRanks(QUICK_DENSE, 1, 1, 48, 100_000)),
    "moe-quick": make_moe(MoeRanks(QUICK_MOE, 64, 16), MoeRanks(QUICK_MOE, 48, 16)),
}
