"""Every element of every output is written exactly once for any number of nodes; batches stay within bounds."""

from __future__ import annotations

from itertools import accumulate
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepspeed_ucp.plan.conversion import ALIGNMENT, Output, plan_conversion
from tests.support.reshard import examples

MIB = 1 << 20

outputs_of = st.lists(
    st.builds(
        Output,
        st.sampled_from((0, 1, 7, 1000, MIB // 4, MIB, 5 * MIB + 3)),
        st.sampled_from((1, 2, 4, 8)),
        st.tuples(st.integers(0, 3), st.integers(0, 100)),
    ),
    max_size=40,
)


@mock.patch("deepspeed_ucp.plan.conversion.MAX_RANGES", 8)
@example(outputs=[Output(1, 1)] * 20, nodes=1, most=MIB)
@given(outputs=outputs_of, nodes=st.integers(1, 5), most=st.sampled_from((MIB, 4 * MIB, 16 * MIB)))
@examples(150)
def test_each_element_of_an_output_is_written_once(outputs: list[Output], nodes: int, most: int) -> None:
    plan = plan_conversion(outputs, nodes, most=most)
    assert len(plan) == nodes
    batches = [batch for batches in plan for batch in batches]
    ranges = sorted(each for batch in batches for each in batch.ranges)
    for number, output in enumerate(outputs):
        held = [each for each in ranges if each.output == number]
        assert [each.start for each in held] == [0, *accumulate(each.numel for each in held[:-1])]
        assert sum(each.numel for each in held) == output.numel
    for batch in batches:
        assert batch.nbytes == sum(each.numel * outputs[each.output].itemsize for each in batch.ranges) <= most
        assert len(batch.ranges) <= 8
        for each in batch.ranges:
            output = outputs[each.output]
            assert each.start * output.itemsize % ALIGNMENT == 0  # ranges of a file share no page
            assert len(batch.ranges) == 1 or each.numel == output.numel
            assert output.nbytes <= most or each.numel < output.numel


def test_each_node_reads_its_part_of_the_source_in_order() -> None:
    outputs = [Output(MIB, 4, (file, place)) for place in range(8) for file in range(2)]
    plan = plan_conversion(outputs, 2)
    for node, batches in enumerate(plan):
        places = [outputs[each.output].place for batch in batches for each in batch.ranges]
        assert places == sorted(places)
        assert {file for file, _ in places} == {node}


def share_out(sizes: list[int], workers: int) -> list[int]:
    shares = [0] * workers
    for size in sizes:
        shares[shares.index(min(shares))] += size
    return shares


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_nodes_and_their_workers_get_equal_shares(nodes: int) -> None:
    """The outputs are a table larger than a share, matrices, and many small vectors."""
    h = 1024
    outputs = [Output(250 * h * h, 4)]
    outputs += [
        Output(size, 4, (1, 13 * layer + number)) for layer in range(70) for number, size in enumerate((4 * h * h, h))
    ]
    sizes = [[batch.nbytes for batch in batches] for batches in plan_conversion(outputs, nodes)]
    workers = [share for batches in sizes for share in share_out(batches, 8)]
    for shares, most in ((list(map(sum, sizes)), 1.05), (workers, 1.1 if nodes < 64 else 1.7)):
        assert max(shares) <= most * sum(shares) / len(shares)
