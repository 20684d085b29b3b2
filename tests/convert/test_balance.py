"""Balance of a conversion over nodes and workers, for the parameters of BLOOM (176 B) and for a skewed model."""

from __future__ import annotations

import heapq

import pytest

from deepspeed_ucp.plan.conversion import RANGE, Output, plan_conversion

HIDDEN, VOCABULARY, LAYERS = 14336, 250880, 70
LAYER = [HIDDEN] * 4 + [3 * HIDDEN**2, 3 * HIDDEN, HIDDEN**2, HIDDEN, 4 * HIDDEN**2, 4 * HIDDEN, 4 * HIDDEN**2, HIDDEN]
BLOOM = [VOCABULARY * HIDDEN, HIDDEN, HIDDEN, *LAYER * LAYERS, HIDDEN, HIDDEN]
SKEWED = [(1 << 20) * 512, *[512 * 512] * 1000]
"""One parameter is two thirds of the model."""


def list_outputs(sizes: list[int]) -> list[Output]:
    """Masters and two moments in fp32."""
    return [Output(numel, 4, (record, 0)) for record, numel in enumerate(sizes * 3)]


def share_out(batches: list[int], workers: int) -> list[int]:
    """Bytes of each worker if each takes the next batch when it is free."""
    shares = [(0, worker) for worker in range(workers)]
    for nbytes in batches:
        heapq.heapreplace(shares, (shares[0][0] + nbytes, shares[0][1]))
    return [nbytes for nbytes, _ in shares]


def imbalance(shares: list[int]) -> float:
    return max(shares) * len(shares) / sum(shares)


@pytest.mark.parametrize(
    ("sizes", "nodes", "most", "of_workers"),
    [
        pytest.param(BLOOM, 5, RANGE, 1.05, id="bloom-5"),
        pytest.param(BLOOM, 8, RANGE, 1.05, id="bloom-8"),
        pytest.param(BLOOM, 64, RANGE, 1.05, id="bloom-64"),
        pytest.param(SKEWED, 8, 1 << 20, 1.1, id="skewed-8"),
    ],
)
def test_nodes_and_workers_get_equal_shares(sizes: list[int], nodes: int, most: int, of_workers: float) -> None:
    plan = plan_conversion(list_outputs(sizes), nodes, most=most)
    shares = [sum(batch.nbytes for batch in batches) for batches in plan]
    assert sum(shares) == 12 * sum(sizes)
    assert imbalance(shares) <= 1.05
    assert max(batch.nbytes for batches in plan for batch in batches) <= most
    workers = [share for batches in plan for share in share_out([batch.nbytes for batch in batches], 8)]
    assert imbalance(workers) <= of_workers
