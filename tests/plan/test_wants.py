"""The wants of a rank, from data alone."""

from __future__ import annotations

import pytest

from deepspeed_ucp.model.flat import join_parameters
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import Record, Records
from deepspeed_ucp.model.storage import COPY, MASTER, MODULE, Atom, Fragment, Fragments, ParamKey
from deepspeed_ucp.model.view import EngineBuffer, EngineView
from deepspeed_ucp.plan.locate import View, Want, locate
from deepspeed_ucp.plan.match import Match
from deepspeed_ucp.plan.wants import REPLICA, Mean, Wants, list_wants
from deepspeed_ucp.tensor_parallel.layout import Layout, stack
from deepspeed_ucp.tensor_parallel.resize import Resized
from tests.plan import planning


def cut(lanes: int) -> Layout:
    """Cut 12 rows of two elements along the rows."""
    return stack([(12 // lanes, 2)] * lanes)


def make_index(**lanes: int) -> AtomicIndex:
    """Build parameters of 12 rows of two elements in so many shards, each in a separate record."""
    records = Records()
    atoms = []
    for name, count in lanes.items():
        shards = []
        for _ in range(count):
            storage = Fragments("float32", [Fragment(0, 24 // count, len(records), 0)])
            shards.append(((12 // count, 2), storage))
            records.append(0, Record(64, 96 // count, 0))
        atoms.append(Atom.of(name, MASTER, shards))
    return planning.make_index(atoms, records)


@pytest.mark.parametrize("folded", [False, True])
def test_wants_of_experts_and_dense_parameters(folded: bool) -> None:
    """Rank 1 of 4 has the second of two shards of `dense` and the third of four shards of `experts`.

    Folded experts have one shard for every tensor-parallel rank: the second of two ranks has all of two saved shards.
    """
    index = make_index(dense=1 + folded, experts=2)
    layouts = {"dense": (cut(1 + folded), cut(2)), "experts": (cut(2), cut(1 if folded else 4))}
    flats = [
        EngineBuffer(join_parameters(0, ("dense",), ((6, 2),), parts=4, partition=3), 1, 1, "float32"),
        EngineBuffer(join_parameters(1, ("experts",), ((3, 2),), parts=2, partition=3), 0, 2, "float32"),
    ]
    if folded:
        flats = [
            EngineBuffer(join_parameters(0, ("dense",), ((6, 2),)), 0, 1, "float32"),
            EngineBuffer(join_parameters(1, ("experts",), ((12, 2),)), 0, 1, "float32"),
        ]
    match = Match({name: ParamKey(name) for name in layouts})
    found = list_wants(index, EngineView(flats=flats), match, layouts, with_states=True)
    expected = [[(1, 0, 12)], [(2, 0, 12), (3, 0, 12)]] if folded else [[(0, 15, 3)], [(2, 0, 3)]]
    places = [[(item.record, item.offset // 4, item.run // 4) for item in locate(want)] for want in found.wants]
    assert places == expected  # (record, first element, elements) of each piece


A, B = (planning.make_atom(name, numel) for name, numel in (("a", 6), ("b", 3)))
A_MOMENT = planning.make_atom("a", 6, dtype="bfloat16", state="exp_avg")
TWO = join_parameters(0, ("a", "b"), ((6,), (3,)), parts=2, partition=5)
MATCH = Match({"a": ParamKey("a"), "b": ParamKey("b")})


def make_halves(state: str) -> Atom:
    """Make the atom `a` with two shards of six elements, in no file."""
    return Atom.of("a", state, [((6,), Fragments("float32", []))] * 2)


def list_of(engine_buffer: EngineBuffer, match: Match = MATCH, *, tensor: bool = False) -> Wants:
    """List the wants of a rank with one buffer of `a`, which has a moment, and `b`, which has no moment."""
    view = EngineView(extras=[engine_buffer]) if tensor else EngineView(flats=[engine_buffer])
    return list_wants(planning.make_index([A, B, A_MOMENT]), view, match, {}, with_states=True)


def test_wants_of_a_partition_by_element() -> None:
    """The second of two partitions: the last element of `a`, all of `b`, and padding. The rest of the moment is 0."""
    found = list_of(EngineBuffer(TWO, 1, 0, "float32", {"exp_avg": "float16"}, live=("exp_avg",)))
    assert found.buffers == [(MASTER, 0), ("exp_avg", 0)]
    assert found.sinks == [(0, "float32"), (1, "bfloat16")]
    assert found.wants == [
        Want(A, 5, 1, 0, 0, None),
        Want(B, 0, 3, 0, 1, None),
        Want(A_MOMENT, 5, 1, 1, 0, None),
    ]
    assert found.blanks == [(0, 4, 5), (1, 1, 5)]
    assert found.list_spans() == [[(0, 1), (1, 4), (4, 5)], [(0, 1), (1, 5)]]
    assert (found.means, found.resized) == ([], {})


def test_a_missing_parameter_keeps_its_master_and_has_zero_states() -> None:
    found = list_of(EngineBuffer(TWO, 1, 0, "float32", {"exp_avg": "float32"}), Match({"b": ParamKey("b")}))
    assert found.wants == [Want(B, 0, 3, 0, 1, None)]
    assert found.blanks == [(0, 4, 5), (1, 0, 5)]


@pytest.mark.parametrize(
    ("swapped", "live", "flags"),
    [
        (False, (), [(True, False), (False, False)]),
        (False, ("exp_avg",), [(True, False), (True, False)]),
        (True, (), [(False, True), (False, True)]),
        (True, (MASTER, "exp_avg"), [(True, False), (True, False)]),
    ],
    ids=str,
)
def test_flags_of_live_or_swapped_buffers(swapped: bool, live: tuple[str, ...], flags: list[tuple[bool, bool]]) -> None:
    """A state that does not exist yet is neither live nor swapped."""
    engine_buffer = EngineBuffer(TWO, 0, 0, "float32", {"exp_avg": "float32"}, live=live, swap=swapped or None)
    assert [state for state, _ in list_of(engine_buffer).buffers] == [MASTER, "exp_avg"]
    assert [(engine_buffer.is_live(state), engine_buffer.is_in_file(state)) for state in (MASTER, "exp_avg")] == flags


def test_a_whole_state_is_wanted_for_each_parameter_in_the_partition() -> None:
    engine_buffer = EngineBuffer(TWO, 0, 0, "float32", {"exp_avg": "float32"}, whole=("exp_avg",))
    found = list_of(engine_buffer)
    assert [engine_buffer.find_state_layout(state)[0].partition for state, _ in found.buffers] == [5, 6]
    assert found.wants == [Want(A, 0, 5, 0, 0, None), Want(A_MOMENT, 0, 6, 1, 0, None)]
    assert found.blanks == []


def test_wants_of_a_tensor_without_optimizer() -> None:
    engine_buffer = EngineBuffer(join_parameters(0, ("b",), ((3,),)), 0, 0, "bfloat16")
    found = list_of(engine_buffer, tensor=True)
    assert (found.buffers, engine_buffer.is_live(MODULE), engine_buffer.is_in_file(MODULE)) == (
        [(MODULE, 0)],
        True,
        False,
    )
    assert (found.wants, found.sinks, found.blanks) == ([Want(B, 0, 3, 0, 0, None)], [(0, "float32")], [])
    assert list_of(engine_buffer, Match({}), tensor=True) == Wants()


def test_a_state_in_two_dtypes_has_two_sinks() -> None:
    moment = planning.make_atom("b", 3, state="exp_avg")
    engine_buffer = EngineBuffer(TWO, 1, 0, "float32", {"exp_avg": "float32"})
    index = planning.make_index([A, B, A_MOMENT, moment])
    found = list_wants(index, EngineView(flats=[engine_buffer]), MATCH, {}, with_states=True)
    assert found.sinks == [(0, "float32"), (1, "bfloat16"), (1, "float32")]
    assert found.wants[2:] == [Want(A_MOMENT, 5, 1, 1, 0, None), Want(moment, 0, 3, 2, 1, None)]


@pytest.mark.parametrize(("before", "now", "blanks"), [(4, 6, [(0, 0, 12)]), (6, 4, [])])
def test_new_rows_of_a_larger_vocabulary_are_zeroed(before: int, now: int, blanks: list[tuple[int, int, int]]) -> None:
    """The whole shard is zeroed before the saved rows are read into it. A smaller vocabulary has no new rows."""
    atom = Atom.of("vocabulary", MASTER, [((before, 2), Fragments("float32", []))])
    engine_buffer = EngineBuffer(join_parameters(0, ("vocabulary",), ((now, 2),)), 0, 0, "float32")
    sides = (Layout((rows, 2), (rows, 2), ((((0, rows),), ((0, 2),)),), ((rows, 2),)) for rows in (before, now))
    saved, wanted = sides
    layouts = {"vocabulary": (saved, wanted)}
    match = Match({"vocabulary": ParamKey("vocabulary")})
    resized = {"vocabulary": Resized(before, now, 4, pads=now > before)}
    resizes = {} if now > before else resized  # padding needs no rule
    index, view = planning.make_index([atom]), EngineView(flats=[engine_buffer])
    found = list_wants(index, view, match, layouts, with_states=True, resizes=resizes)
    assert (found.blanks, found.resized) == (blanks, resized)
    (want,) = found.wants
    assert (want.start, want.numel, want.destination, want.position) == (0, 2 * now, 0, 0)
    assert want.view == View(saved, wanted, 0, (0,))


@pytest.mark.parametrize(
    ("tensor", "with_states", "wanted"), [(False, True, MASTER), (False, False, COPY), (True, True, MODULE)], ids=str
)
def test_the_wanted_weight_is_the_master_copy_or_module_tensor(tensor: bool, with_states: bool, wanted: str) -> None:
    """The master if states are loaded, else the copy; the module's tensor if there is no optimizer."""
    atoms = [planning.make_atom("b", 3, state=state) for state in (MASTER, COPY, MODULE)]
    engine_buffer = EngineBuffer(join_parameters(0, ("b",), ((3,),)), 0, 0, "float32")
    view = EngineView(extras=[engine_buffer]) if tensor else EngineView(flats=[engine_buffer])
    (want,) = list_wants(planning.make_index(atoms), view, MATCH, {}, with_states=with_states).wants
    assert want.atom.state == wanted


def test_every_replica_of_a_mean_is_wanted() -> None:
    """The mean of two whole shards of six elements fills the second half."""
    atom = make_halves(MASTER)
    saved = Layout((6,), (6,), ((((0, 6),),),) * 2, ((6,),) * 2, replicated=True, mean=True)
    wanted = Layout((6,), (6,), ((((0, 6),),),), ((6,),))
    engine_buffer = EngineBuffer(join_parameters(0, ("a",), ((6,),), parts=2, partition=3), 1, 0, "bfloat16")
    match, layouts = Match({"a": ParamKey("a")}), {"a": (saved, wanted)}
    found = list_wants(planning.make_index([atom]), EngineView(flats=[engine_buffer]), match, layouts, with_states=True)
    assert found.buffers == [(MASTER, 0), (REPLICA, 1), (REPLICA, 2)]
    assert found.sinks == [(0, "float32"), (1, "float32"), (2, "float32")]
    views = [View(saved, wanted, 0, (shard,)) for shard in range(2)]
    assert found.wants == [Want(atom, 3, 3, 1, 0, views[0]), Want(atom, 3, 3, 2, 0, views[1])]
    assert found.means == [Mean(0, 0, 3, (1, 2))]
    assert found.blanks == []


@pytest.mark.parametrize("tensor", [False, True])
def test_states_and_tensors_are_read_from_the_ranks_shard(tensor: bool) -> None:
    """The second of two shards, for moment and master."""
    layout = cut(2)
    atoms = [make_halves(state) for state in (MASTER, "exp_avg")]
    engine_buffer = EngineBuffer(
        join_parameters(0, ("a",), ((6, 2),)), 0, 1, "float32", {} if tensor else {"exp_avg": "float32"}
    )
    target = EngineView(extras=[engine_buffer]) if tensor else EngineView(flats=[engine_buffer])
    match = Match({"a": ParamKey("a")})
    found = list_wants(planning.make_index(atoms), target, match, {"a": (layout, layout)}, with_states=True)
    assert [want.view for want in found.wants] == [View(layout, layout, 1, (1,))] * (1 if tensor else 2)
    assert found.blanks == [] and found.resized == {}
