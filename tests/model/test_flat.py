"""Geometry of flat buffers: cuts, padding and holders of elements."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.model.flat import (
    Cut,
    FlatBuffer,
    count_rank_sets,
    find_gaps,
    join_parameters,
    join_reserved,
)

MODEL = ("a", "b", "c"), ((3,), (2, 2), (5,))
"""Names and shapes, with 12 elements in all."""


def test_count_degree_returns_the_expert_parallel_degree() -> None:
    dense = join_parameters(0, *MODEL, parts=3, partition=4)
    expert = replace(dense, group=1, parts=2, partition=6, ranks=range(1, 8, 2))
    others = [replace(expert, ranks=range(first, 8, 4)) for first in range(4)]
    assert [count_rank_sets(each) for each in ([], [dense], [expert, dense], [*others, dense])] == [1, 1, 1, 4]


SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=6)


@st.composite
def buffers(draw: st.DrawFn) -> FlatBuffer:
    """Draw buffers of ZeRO 1/2 or 3 with empty parameters and padding."""
    shapes = [(numel,) for numel in draw(SIZES)]
    names, parts = [f"p{number}" for number in range(len(shapes))], draw(st.integers(1, 7))
    if draw(st.booleans()):
        return join_reserved(0, names, shapes, parts)
    gaps = draw(st.one_of(st.just(()), st.lists(st.integers(0, 3), min_size=len(shapes), max_size=len(shapes))))
    least = -(-(sum(numel for (numel,) in shapes) + sum(gaps)) // parts)
    partition = least + draw(st.integers(0, 9))
    return join_parameters(0, names, shapes, parts=parts, partition=partition, gaps=gaps)


@given(buffers())
def test_partitions_contain_each_element_once_and_padding(buffer: FlatBuffer) -> None:
    held = []
    for part in range(buffer.parts):
        cuts = buffer.cuts(part)
        held += [(cut.name, cut.start + at) for cut in cuts for at in range(cut.numel)]
        places = [cut.offset + at for cut in cuts for at in range(cut.numel)]
        places += [at for low, high in buffer.gaps(part) for at in range(low, high)]
        assert sorted(places) == list(range(buffer.partition))
    pairs = zip(buffer.names, buffer.numels, strict=True)
    assert sorted(held) == [(name, at) for name, numel in pairs for at in range(numel)]


@st.composite
def split_buffers(draw: st.DrawFn) -> tuple[FlatBuffer, FlatBuffer]:
    """Draw a buffer, and the same buffer with each parameter split into equal parts."""
    buffer = draw(buffers())
    parts = {}
    for name, numel in zip(buffer.names, buffer.numels, strict=True):
        count = draw(st.sampled_from([each for each in (1, 2, 3, 4) if numel % each == 0]))
        parts[name] = {f"{name}.{number}": (numel // count,) for number in range(count)}
    return buffer, buffer.split(parts)


@given(split_buffers())
def test_split_parameters_keep_their_position(pair: tuple[FlatBuffer, FlatBuffer]) -> None:
    whole, split = pair
    sizes = dict(zip(split.names, split.numels, strict=True))
    for part in range(whole.parts):
        expected = {cut.offset + at: (cut.name, cut.start + at) for cut in whole.cuts(part) for at in range(cut.numel)}
        found = {}
        for cut in split.cuts(part):
            name, _, number = cut.name.partition(".")
            begin = int(number) * sizes[cut.name] + cut.start
            found.update({cut.offset + at: (name, begin + at) for at in range(cut.numel)})
        assert found == expected
        assert split.gaps(part) == whole.gaps(part)
    assert split.keep(split.names) == split


@given(st.one_of(buffers(), split_buffers().map(lambda pair: pair[1])))
def test_holders_of_elements_match_the_cuts(buffer: FlatBuffer) -> None:
    parts = range(buffer.parts)
    held = {(cut.name, cut.start + at): part for part in parts for cut in buffer.cuts(part) for at in range(cut.numel)}
    for place, numel in enumerate(buffer.numels):
        holders = list(buffer.find_holders(place, numel // 3, numel))
        spans = [(part, range(cut.start, cut.start + cut.numel)) for part, cut in holders]
        assert all(held[buffer.names[place], at] == part for part, span in spans for at in span)
        assert sum(len(span) for _, span in spans) == numel - numel // 3
        assert all(cut in buffer.cuts(part) for part, cut in buffer.find_holders(place, 0, numel))


def test_a_buffer_smaller_than_its_shapes_has_fewer_cuts() -> None:
    buffer = join_parameters(0, ("a", "b"), ((3,), (9,)), parts=2, partition=4)
    assert [buffer.cuts(part) for part in (0, 1)] == [[Cut("a", 0, 3, 0), Cut("b", 0, 1, 3)], [Cut("b", 1, 4, 0)]]
    assert join_parameters(0, ("a",), ((3,),), parts=2, partition=0).cuts(1) == []


def test_gaps_between_spans() -> None:
    assert [find_gaps(spans, 10) for spans in ([(0, 10)], [])] == [[], [(0, 10)]]
    assert find_gaps([(7, 9), (2, 5)], 10) == [(0, 2), (5, 7), (9, 10)]
    assert find_gaps([(1, 8), (2, 4)], 10) == [(0, 1), (8, 10)]


def test_touched_tensors_include_whole_fused_tensors() -> None:
    """All experts of a fused tensor are included if the partition has a part of one expert."""
    buffer = join_parameters(4, ("a", "w", "b"), ((2,), (3, 2), (4,)), parts=3, partition=4)
    split = buffer.split({"a": {"a": (2,)}, "w": {"w.5": (2,), "w.1": (2,), "w.3": (2,)}, "b": {"b": (4,)}})
    experts = ("w.5", "w.1", "w.3")
    assert [split.join_touched(part).names for part in range(3)] == [("a", *experts), experts, ("b",)]
    assert [buffer.join_touched(part).names for part in range(3)] == [("a", "w"), ("w",), ("b",)]
    assert buffer.join_touched(2) == join_parameters(4, ("b",), ((4,),))
