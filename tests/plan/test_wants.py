"""The wants of a rank, from data alone."""

from __future__ import annotations

import pytest

from deepspeed_ucp.model.flat import join_parameters
from deepspeed_ucp.model.storage import COPY, MASTER, MODULE, Atom, ParamKey
from deepspeed_ucp.model.view import EngineBuffer, EngineView
from deepspeed_ucp.plan.locate import Want
from deepspeed_ucp.plan.match import Match
from deepspeed_ucp.plan.wants import Wants, list_wants
from tests.plan import planning

A, B = (planning.make_atom(name, numel) for name, numel in (("a", 6), ("b", 3)))
A_MOMENT = planning.make_atom("a", 6, dtype="bfloat16", state="exp_avg")
B_MOMENT = planning.make_atom("b", 3, state="exp_avg")
TWO = join_parameters(0, ("a", "b"), ((6,), (3,)), parts=2, partition=5)
MATCH = Match({"a": ParamKey("a"), "b": ParamKey("b")})


def list_of(engine_buffer: EngineBuffer, *more: Atom, match: Match = MATCH) -> Wants:
    """List the wants of a rank with one buffer of `a`, which has a moment, and `b`."""
    index = planning.make_index([A, B, A_MOMENT, *more])
    return list_wants(index, EngineView(flats=[engine_buffer]), match, {}, with_states=True)


def test_wants_of_a_partition_by_element() -> None:
    """The second of two partitions: the last element of `a`, all of `b`, and padding."""
    found = list_of(EngineBuffer(TWO, 1, 0, "float32", {"exp_avg": "float16"}, live=("exp_avg",)))
    assert found.buffers == [(MASTER, 0), ("exp_avg", 0)]
    assert found.sinks == [(0, "float32"), (1, "bfloat16")]
    assert found.wants == [Want(A, 5, 1, 0, 0), Want(B, 0, 3, 0, 1), Want(A_MOMENT, 5, 1, 1, 0)]
    assert found.blanks == [(0, 4, 5), (1, 1, 5)]
    assert found.list_spans() == [[(0, 1), (1, 4), (4, 5)], [(0, 1), (1, 5)]]


def test_a_missing_parameter_keeps_its_master_and_has_zero_states() -> None:
    buffer = EngineBuffer(TWO, 1, 0, "float32", {"exp_avg": "float32"})
    found = list_of(buffer, match=Match({"b": ParamKey("b")}))
    assert (found.wants, found.blanks) == ([Want(B, 0, 3, 0, 1)], [(0, 4, 5), (1, 0, 5)])


def test_a_state_in_two_dtypes_has_two_sinks() -> None:
    found = list_of(EngineBuffer(TWO, 1, 0, "float32", {"exp_avg": "float32"}), B_MOMENT)
    assert found.sinks == [(0, "float32"), (1, "bfloat16"), (1, "float32")]
    assert found.wants[2:] == [Want(A_MOMENT, 5, 1, 1, 0), Want(B_MOMENT, 0, 3, 2, 1)]


def test_a_whole_state_is_wanted_for_each_parameter_in_the_partition() -> None:
    found = list_of(EngineBuffer(TWO, 0, 0, "float32", {"exp_avg": "float32"}, whole=("exp_avg",)))
    assert found.wants == [Want(A, 0, 5, 0, 0), Want(A_MOMENT, 0, 6, 1, 0)]
    assert found.blanks == []


@pytest.mark.parametrize(
    ("tensor", "with_states", "held", "wanted"),
    [
        (False, True, (COPY, MODULE, MASTER), MASTER),
        (False, False, (MASTER, MODULE, COPY), COPY),
        (True, True, (MASTER, COPY, MODULE), MODULE),
        (True, True, (MASTER, COPY), COPY),
        (True, False, (MASTER, COPY), COPY),
    ],
)
def test_the_wanted_weight_is_the_master_copy_or_module_tensor(
    tensor: bool, with_states: bool, held: tuple[str, ...], wanted: str
) -> None:
    """The master if states are loaded, else the copy; the module's tensor or the copy if there is no optimizer."""
    buffer = EngineBuffer(join_parameters(0, ("b",), ((3,),)), 0, 0, "float32")
    view = EngineView(extras=[buffer]) if tensor else EngineView(flats=[buffer])
    index = planning.make_index([planning.make_atom("b", 3, state=state) for state in held])
    (want,) = list_wants(index, view, MATCH, {}, with_states=with_states).wants
    assert want.atom.state == wanted


@pytest.mark.parametrize(
    ("swapped", "live", "flags"),
    [
        (False, (), [(True, False), (False, False)]),
        (False, ("exp_avg",), [(True, False), (True, False)]),
        (True, (), [(False, True), (False, True)]),
        (True, (MASTER, MODULE, "exp_avg"), [(True, False), (True, False)]),
    ],
    ids=str,
)
def test_memory_to_fill_is_live_or_in_a_new_file(
    swapped: bool, live: tuple[str, ...], flags: list[tuple[bool, bool]]
) -> None:
    """A state that does not exist yet is in neither."""
    buffer = EngineBuffer(TWO, 0, 0, "float32", {"exp_avg": "float32"}, live=live, swap=swapped or None)
    found = {state: (buffer.is_live(state), buffer.is_in_file(state)) for state in (MASTER, MODULE, "exp_avg", "none")}
    assert found == {MASTER: flags[0], MODULE: flags[0], "exp_avg": flags[1], "none": (False, swapped)}
