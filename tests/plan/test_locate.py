"""The location of wanted elements and their claims: listed cases, and all patterns of shards compared with numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.model.records import CopyItem, Read
from deepspeed_ucp.model.storage import Atom, Fragment, Fragments
from deepspeed_ucp.plan.locate import MAX_ITEMS, View, Want, join_items, list_claims, list_reads, locate
from deepspeed_ucp.tensor_parallel.kinds import Replicate, ShardH, ShardNC, ShardV
from deepspeed_ucp.tensor_parallel.layout import Layout, overlap, whole
from tests.plan.planning import make_atom
from tests.support.reads import item
from tests.support.reshard import examples
from tests.tensor_parallel.shards import cut_array, draw_widths


def test_positions_count_elements_of_the_stored_dtype() -> None:
    atom = make_atom("w", 4, (0, 4, 3, 10), dtype="bfloat16")
    (piece,) = locate(Want(atom, 1, 2, 0, 7))
    assert piece == item(3, 12, 4, 0, 7)
    assert (piece.nbytes, piece.is_contiguous) == (4, True)


def test_columns_are_located_as_strided_runs() -> None:
    atom = Atom.of("w", "fp32", [((3, 4), Fragments("float32", [Fragment(0, 12, 0, 8)]))])
    source, target = whole((3, 4)), ShardH().join([(3, 3), (3, 1)])
    want = Want(atom, 0, 3, 0, 10, View(source, target, 1, (0,)))
    assert list(locate(want)) == [CopyItem(0, 20, 4, 16, 3, 0, 10)]
    assert list(locate(want, split=True)) == [item(0, 20 + 16 * row, 4, 0, 10 + row) for row in range(3)]
    assert [(each.offset, each.count) for each in locate(want, 32)] == [(20, 1), (36, 2)]


# -- claims of neighbouring items --------------------------------------------------------------------------------------


def test_claims_end_at_block_boundaries() -> None:
    want = Want(make_atom("w", 5, (0, 5, 0, 4)), 0, 5, 0, 10)
    parts = [item(0, 4, 4, 0, 10), item(0, 8, 8, 0, 11), item(0, 16, 8, 0, 13)]
    assert list_claims([want], 8) == list_reads([want], 8) == [Read(*each[:5], (each,)) for each in parts]
    assert list_reads([want]) == [Read(0, 4, 20, 20, 1, (item(0, 4, 20, 0, 10),))]


def test_a_claim_has_at_most_max_items() -> None:
    items = [item(0, 4 * i, 4, 0, 2 * i) for i in range(MAX_ITEMS + 3)]
    assert [len(claim.items) for claim in join_items(items)] == [MAX_ITEMS, 3]


# -- every pattern against numpy --------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Draw two layouts of a matrix: rows, uneven columns, fused parts, or replicas."""
    kind = draw(st.sampled_from(("rows", "columns", "fused", "replicas")))
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    if kind == "fused":
        parts, unit = (draw(st.integers(1, 3)), draw(st.integers(1, 3))), 12
        shapes = [[(sum(parts) * unit // tp, columns)] * tp for tp in draw(DEGREES)]
        return ShardNC(parts).join(shapes[0]), ShardNC(parts).join(shapes[1])
    if kind == "replicas":
        degrees = draw(DEGREES)
        return tuple(Replicate().join([(rows, columns)] * tp) for tp in degrees)  # type: ignore[return-value]
    pattern, total = (ShardV(), rows) if kind == "rows" else (ShardH(), columns)
    cut = [draw_widths(draw, total, tp) for tp in draw(DEGREES)]
    shapes = [[(w, columns) if kind == "rows" else (rows, w) for w in widths] for widths in cut]
    return pattern.join(shapes[0]), pattern.join(shapes[1])


DEGREES = st.tuples(*[st.sampled_from((1, 1, 2, 3, 4))] * 2)


@examples(500)
@given(pair=layouts(), data=st.data())
def test_located_pieces_are_exactly_the_wanted_elements(pair: tuple[Layout, Layout], data: st.DataObject) -> None:
    """Shards are cut into fragments of several records; any range of any target shard has each element once."""
    source, target = pair
    logical = np.arange(int(np.prod(source.shape)))
    records: list[np.ndarray] = []
    shards = []
    if len(source.shards) == 1 and logical.size and data.draw(st.booleans()):
        shards.append((source.shape, draw_blocks(data.draw, logical.reshape(source.shape), records)))
    for rank, shape in enumerate(source.local_shapes if not shards else ()):
        held, fragments = cut_array(source, logical)[rank], []
        ends = sorted(data.draw(st.lists(st.integers(0, len(held)), max_size=3)))
        for low, high in zip([0, *ends], [*ends, len(held)], strict=True):
            if low < high:
                ahead = data.draw(st.integers(0, 2))
                fragments.append(Fragment(low, high - low, len(records), 4 * ahead))
                records.append(np.concatenate([np.full(ahead, -1), held[low:high]]))
        shards.append((shape, Fragments("float32", fragments)))
    atom = Atom.of("w", "fp32", shards)
    if len(shards) == 1 and source.view == source.shape and source.shape:  # omit the end of an axis
        axis = data.draw(st.integers(0, len(source.shape) - 1))
        kept = data.draw(st.integers(0, source.shape[axis]))
        held = source.shards[0]
        source = replace(source, claims=((*held[:axis], tuple(overlap(held[axis], [(0, kept)])), *held[axis + 1 :]),))
        places = np.arange(source.shape[axis]).reshape(-1, *[1] * (len(source.shape) - axis - 1))
        logical = np.where(places < kept, logical.reshape(source.shape), -9).reshape(-1)
    rank = data.draw(st.integers(0, len(target.shards) - 1))
    expected = cut_array(target, logical)[rank]
    start = data.draw(st.integers(0, len(expected)))
    numel = data.draw(st.integers(0, len(expected) - start))
    view = View(source, target, rank, (0,) if source.replicated else tuple(range(len(shards))))
    memory = np.full(numel + 3, -9)
    want = Want(atom, start, numel, 0, 2, view)
    items = list(locate(want))
    for record, src, dst in moves(items):
        assert memory[dst] == -9, "written twice"
        memory[dst] = records[record][src]
    assert memory.tolist() == [-9, -9, *expected[start : start + numel], -9]
    block, split = data.draw(st.sampled_from((4, 8, 32))), data.draw(st.booleans())
    cut = list(locate(want, block, split=split))
    assert sorted(moves(cut)) == sorted(moves(items))
    assert all(len({4 * src // block for _, src, _ in moves([each])}) == 1 for each in cut)
    assert not split or all(each.is_contiguous for each in cut)


def draw_blocks(draw: st.DrawFn, whole: np.ndarray, records: list[np.ndarray]) -> Fragments:
    """Cut a tensor along every dimension, each block in a separate record."""
    blocks = []
    cuts = [sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else [] for size in whole.shape]
    spans = [zip([0, *cut], [*cut, size], strict=True) for cut, size in zip(cuts, whole.shape, strict=True)]
    for box in product(*spans):
        ahead = draw(st.integers(0, 2))
        held = whole[tuple(slice(*span) for span in box)]
        begins = tuple(low for low, _ in box)
        blocks.append(Fragment.of_block(begins, held.shape, whole.shape, len(records), 4 * ahead))
        records.append(np.concatenate([np.full(ahead, -1), held.ravel()]))
    return Fragments("float32", blocks, whole.shape)


@given(data=st.data())
def test_rows_of_blocks_are_blocks(data: st.DataObject) -> None:
    """A slice of the first dimension, with or without that dimension, is in blocks; other parts are not."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    elements, records = np.arange(int(np.prod(shape))).reshape(shape), list[np.ndarray]()
    blocks, row = draw_blocks(data.draw, elements, records), int(np.prod(shape[1:]))
    low = data.draw(st.integers(0, shape[0] - 1))
    high = data.draw(st.integers(low + 1, shape[0]))
    wanted = elements[low:high]
    wanted = wanted[0] if high - low == 1 and data.draw(st.booleans()) else wanted
    cut = blocks.cut_blocks(low * row, high * row, wanted.shape)
    assert cut is not None and cut.shape == wanted.shape
    found = [records[run.record][run.offset // 4 :][: run.numel] for run in cut.find(0, 0, wanted.size)]
    assert np.concatenate(found).tolist() == wanted.ravel().tolist()
    assert [block.start for block in cut.fragments] == sorted(block.start for block in cut.fragments)
    assert blocks.cut_blocks(low * row, high * row, (*wanted.shape, 2)) is None
    assert row == 1 or blocks.cut_blocks(low * row + 1, high * row, wanted.shape) is None


def moves(items: Iterable[CopyItem]) -> list[tuple[int, int, int]]:
    """List (record, its element, element of the destination) for every element of four bytes."""
    return [
        (each.record, (each.offset + row * each.step) // 4 + column, each.position + row * stride + column)
        for each in items
        for stride in (each.stride or each.run // 4,)
        for row in range(each.count)
        for column in range(each.run // 4)
    ]
