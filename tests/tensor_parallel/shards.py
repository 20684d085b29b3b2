"""Shards of a numpy array by a layout, element by element (the reference for the arithmetic), and a strict `settle`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from deepspeed_ucp.tensor_parallel import settle as settling
from deepspeed_ucp.tensor_parallel.layout import Layout, Product, Run, copy_runs


def draw_widths(draw: st.DrawFn, total: int, ranks: int) -> list[int]:
    """Split `total` indices over ranks, in any widths including 0."""
    ends = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    return [high - low for low, high in zip([0, *ends], [*ends, total], strict=True)]


def index_shard(layout: Layout, shard: Product) -> np.ndarray:
    """List the logical flat positions of a shard's elements in local order."""
    positions = np.arange(int(np.prod(layout.view, dtype=np.int64))).reshape(layout.view)
    for axis, intervals in enumerate(shard):
        places = [place for low, high in intervals for place in range(low, high)]
        positions = np.take(positions, places, axis=axis)
    return positions.reshape(-1)


def cut_array(layout: Layout, values: np.ndarray) -> list[np.ndarray]:
    return [values.reshape(-1)[index_shard(layout, shard)] for shard in layout.shards]


def follow(runs: Sequence[Run], source: np.ndarray, target: np.ndarray, writes: np.ndarray) -> None:
    """Execute runs, and count how often each target element is written."""
    for run in runs:
        for i in range(run.count):
            src, dst = run.src + i * run.src_step, run.dst + i * run.dst_step
            assert 0 <= src <= src + run.width <= source.size
            assert 0 <= dst <= dst + run.width <= target.size
            target[dst : dst + run.width] = source[src : src + run.width]
            writes[dst : dst + run.width] += 1


def check_reshard(source: Layout, shards: Sequence[np.ndarray], target: Layout, expected: Sequence[Any]) -> None:
    """Build the target's shards from the source's, and compare; each element is written exactly once."""
    for rank, wanted in enumerate(expected):
        values, writes = np.full(wanted.size, -1, wanted.dtype), np.zeros(wanted.size, dtype=np.int64)
        for src_rank in [0] if source.replicated else range(len(shards)):
            runs = copy_runs(source, src_rank, target, rank, 0, values.size)
            follow(runs, shards[src_rank].reshape(-1), values, writes)
        assert (writes == 1).all()
        np.testing.assert_array_equal(values, wanted.reshape(-1))
    assert len(expected) == len(target.shards)


def settle(*args: Any, **options: Any) -> settling.Settled:
    return settling.settle(*args, **options).require()
