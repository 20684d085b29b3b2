"""Layouts and runs compared with numpy, element by element, for random layouts."""

from __future__ import annotations

import dataclasses
import re
import time
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.tensor_parallel.layout import (
    Layout,
    Run,
    align,
    copy_runs,
    find_faults,
    measure,
    stack,
    whole,
)
from tests.support.reshard import examples

from .shards import check_reshard, cut_array, follow


@st.composite
def axis_parts(draw, size, ranks):
    """Cut an axis at random indices and assign the pieces to ranks in random order: interval lists per rank."""
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=5)))
    pieces = list(zip([0, *cuts], [*cuts, size], strict=True))
    pieces = draw(st.permutations(pieces))
    owners = [draw(st.integers(0, ranks - 1)) for _ in pieces]
    return [tuple(p for p, o in zip(pieces, owners, strict=True) if o == rank) for rank in range(ranks)]


@st.composite
def layouts(draw, view):
    """Draw a grid of ranks over the view's axes, each axis cut at random."""
    grid = tuple(draw(st.integers(1, 3 if axis < 2 else 1)) for axis in range(len(view)))
    parts = [draw(axis_parts(size, ranks)) for size, ranks in zip(view, grid, strict=True)]
    shards = tuple(
        tuple(parts[axis][place] for axis, place in enumerate(coordinates)) for coordinates in np.ndindex(*grid)
    )
    local = tuple(tuple(map(measure, shard)) for shard in shards)
    return Layout(tuple(view), tuple(view), shards, local)


@given(st.lists(st.integers(1, 6), max_size=4).map(tuple), st.data())
@examples(600)
def test_runs_copy_any_layout_into_any_other(view, data):
    """Copies of whole shards, the whole tensor, and a range of a shard write each element once."""
    source, target = data.draw(layouts(view)), data.draw(layouts(view))
    assert find_faults(source) == []
    values = np.random.default_rng(0).permutation(prod(view))
    shards, expected = cut_array(source, values), cut_array(target, values)
    check_reshard(source, shards, target, expected)
    check_reshard(source, shards, whole(view), [values])
    rank = data.draw(st.integers(0, len(target.shards) - 1))
    size = expected[rank].size
    low, high = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
    got, writes = np.full(size, -1), np.zeros(size, dtype=np.int64)
    for src_rank, shard in enumerate(shards):
        follow(copy_runs(source, src_rank, target, rank, low, high), shard, got, writes)
    assert (writes[low:high] == 1).all() and writes.sum() == high - low
    np.testing.assert_array_equal(got[low:high], expected[rank][low:high])


@given(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)), st.booleans(), st.data())
@examples(600)
def test_layouts_with_different_views_of_a_tensor_are_compatible(view, first, data):
    """(a, b, c) and the same elements as (a * b, c) or (a, b * c), whole or cut along a common axis."""
    fine, values = data.draw(layouts(view)), np.arange(prod(view))
    coarse = whole((view[0] * view[1], view[2]) if first else (view[0], view[1] * view[2]))
    coarse = dataclasses.replace(coarse, shape=fine.shape, local_shapes=(fine.shape,))
    check_reshard(fine, cut_array(fine, values), coarse, [values])
    check_reshard(coarse, [values], fine, cut_array(fine, values))


def test_incompatible_views_are_refused():
    rows = Layout((6, 2), (6, 2), (((((0, 3)),), ((0, 2),)), (((3, 6),), ((0, 2),))), ((3, 2), (3, 2)))
    blocks = whole((3, 2, 2))
    with pytest.raises(MismatchError, match="do not follow blocks of 2"):
        align(rows, blocks)
    with pytest.raises(MismatchError, match="no common refinement"):
        align(whole((2, 3, 4)), whole((2, 4, 3)))


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        (Layout((4,), (4,), ((((0, 2),),), (((3, 4),),)), ((2,), (1,))), "have 3 of 4"),
        (Layout((4,), (4,), ((((0, 3),),), (((2, 4),),)), ((3,), (2,))), "ranks 0 and 1 have the same"),
        (Layout((4,), (4,), ((((0, 3), (2, 4)),),), ((5,),)), r"\[2, 3\) occurs twice"),
        (Layout((4,), (4,), ((((0, 5),),),), ((5,),)), r"\[0, 5\) is not inside \[0, 4\)"),
        (Layout((4,), (4,), ((((0, 4),),),), ((3,),)), "intervals have 4 elements"),
        (Layout((4,), (4,), ((((0, 4),),), (((0, 3),),)), ((4,), (3,)), replicated=True), "rank 1 does not have"),
    ],
)
def test_invalid_layouts_are_refused(layout, fault):
    assert re.search(fault, find_faults(layout)[0])


def cut_columns(rows, columns, ranks):
    width = columns // ranks
    shards = tuple((((0, rows),), ((r * width, (r + 1) * width),)) for r in range(ranks))
    return Layout((rows, columns), (rows, columns), shards, ((rows, width),) * ranks)


def test_runs_are_joined_to_the_minimum_number():
    source, target = cut_columns(100, 64, 8), cut_columns(100, 64, 4)
    assert copy_runs(source, 1, target, 0, 0, 1600) == (Run(0, 8, 8, 100, 8, 16),)
    assert copy_runs(source, 1, target, 0, 10, 60) == (Run(2, 10, 6), Run(8, 24, 8, 2, 8, 16), Run(24, 56, 4))
    assert copy_runs(source, 3, target, 0, 0, 1600) == ()
    assert copy_runs(target, 0, target, 0, 5, 50) == (Run(5, 5, 45),)
    layout = stack(((3, 4), (2, 4), (0, 4)))
    assert find_faults(layout) == []
    assert [copy_runs(layout, 1, layout, 1, 2, 100), copy_runs(layout, 0, layout, 1, 0, 8)] == [(Run(2, 2, 6),), ()]
    assert copy_runs(layout, 2, layout, 2, 0, 0) == ()


def test_the_time_to_find_runs_does_not_depend_on_the_elements():
    """102400 × 25600 elements cut along columns: hundreds of ranges a second."""
    source, target = cut_columns(102400, 25600, 8), cut_columns(102400, 25600, 4)
    size = 102400 * 6400
    start = time.process_time()
    for low in range(0, size, size // 500):
        copy_runs(source, 1, target, 0, low, low + size // 500)
    assert time.process_time() - start < 2.0


def test_views_whose_axes_all_differ_are_aligned() -> None:
    """Both divide 24 elements: 4 x 6 and 8 x 3."""
    source = Layout((24,), (4, 6), ((((0, 4),), ((0, 6),)),), ((24,),))
    target = Layout((24,), (8, 3), ((((0, 4),), ((0, 3),)), (((4, 8),), ((0, 3),))), ((12,), (12,)))
    assert copy_runs(source, 0, target, 0, 0, 12) == (Run(0, 0, 12),)
    assert copy_runs(source, 0, target, 1, 0, 12) == (Run(12, 0, 12),)
