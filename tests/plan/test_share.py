"""Who reads what several ranks need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.atoms import ITEMSIZE, Atom
from deepspeed_ucp.plan import Want, share_wants
from deepspeed_ucp.plan.share import Segment
from tests.reshard import examples


def make_want(numel: int, buffer: int = 0, *, dtype: str = "float32", start: int = 0, offset: int = 0) -> Want:
    return Want(Atom(f"w{buffer}", "fp32", (start + numel,), dtype, ()), start, numel, buffer, offset)


def test_a_want_is_cut_into_equal_shares_and_the_last_takes_the_rest() -> None:
    shares, segments = share_wants([make_want(10, start=2, offset=5)], 3)
    assert [[(w.start, w.numel, w.offset) for w in share] for share in shares] == [
        [(2, 3, 5)],
        [(5, 3, 8)],
        [(8, 4, 11)],
    ]
    assert segments == [Segment(0, 0, 5, 3), Segment(1, 0, 8, 3), Segment(2, 0, 11, 4)]


def test_neighbours_of_one_owner_in_one_buffer_travel_together() -> None:
    _, segments = share_wants([make_want(4), make_want(4, offset=4), make_want(8, 1)], 2)
    assert segments == [Segment(0, 0, 0, 8), Segment(1, 1, 0, 8)]


def test_bytes_are_balanced_and_not_elements() -> None:
    shares, _ = share_wants([make_want(4, 0, dtype="float64"), make_want(32, 1, dtype="uint8")], 2)
    assert [[w.buffer for w in share] for share in shares] == [[0], [1]]


def test_more_ranks_than_elements_leaves_ranks_without_work() -> None:
    shares, segments = share_wants([make_want(2)], 5)
    assert [sum(w.numel for w in share) for share in shares] == [0, 0, 1, 0, 1]
    assert [segment.owner for segment in segments] == [2, 4]


def test_one_rank_reads_everything() -> None:
    wants = [make_want(3), make_want(0, 1), make_want(5, 2)]
    shares, segments = share_wants(wants, 1)
    assert shares == [[wants[0], wants[2]]]
    assert segments == [Segment(0, 0, 0, 3), Segment(0, 2, 0, 5)]


def test_nothing_to_share() -> None:
    assert share_wants([], 3) == ([[], [], []], [])


WANTS = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(("float32", "bfloat16", "float64", "bool")), st.integers(0, 9)),
    max_size=8,
)


@examples(400)
@given(described=WANTS, size=st.integers(1, 17))
def test_every_element_has_one_owner_and_the_shares_are_equal(described: list[tuple[int, str, int]], size: int) -> None:
    wants = [
        make_want(n, i, dtype=dtype, start=start, offset=2 * start) for i, (n, dtype, start) in enumerate(described)
    ]
    shares, segments = share_wants(wants, size)
    owned = sorted((w.buffer, w.start + i, w.offset + i) for share in shares for w in share for i in range(w.numel))
    assert owned == sorted((w.buffer, w.start + i, w.offset + i) for w in wants for i in range(w.numel))
    sent = [(s.owner, s.buffer, s.offset + i) for s in segments for i in range(s.numel)]
    read = [(rank, w.buffer, w.offset + i) for rank, share in enumerate(shares) for w in share for i in range(w.numel)]
    assert sent == read
    sizes = [sum(w.numel * ITEMSIZE[w.atom.dtype] for w in share) for share in shares]
    fair = sum(sizes) / size
    assert all(abs(found - fair) < 1 + max(ITEMSIZE.values()) for found in sizes[:-1])
    assert sizes[-1] < fair + 1 + max(ITEMSIZE.values())
