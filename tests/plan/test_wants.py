"""The wants of a rank, from data alone."""

from __future__ import annotations

from deepspeed_ucp.model.flat import join_parameters
from deepspeed_ucp.model.storage import MASTER, Atom, ParamKey
from deepspeed_ucp.model.view import EngineBuffer, EngineView
from deepspeed_ucp.plan.locate import Want
from deepspeed_ucp.plan.match import Match
from deepspeed_ucp.plan.wants import Wants, list_wants
from tests.plan import planning

A, B = (planning.make_atom(name, numel) for name, numel in (("a", 6), ("b", 3)))
A_MOMENT = planning.make_atom("a", 6, dtype="bfloat16", state="exp_avg")
TWO = join_parameters(0, ("a", "b"), ((6,), (3,)), parts=2, partition=5)
MATCH = Match({"a": ParamKey("a"), "b": ParamKey("b")})


def list_of(engine_buffer: EngineBuffer, *more: Atom) -> Wants:
    """List the wants of a rank with one buffer of `a`, which has a moment, and `b`."""
    index = planning.make_index([A, B, A_MOMENT, *more])
    return list_wants(index, EngineView(flats=[engine_buffer]), MATCH, {}, with_states=True)


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


def test_a_whole_state_is_wanted_for_each_parameter_in_the_partition() -> None:
    engine_buffer = EngineBuffer(TWO, 0, 0, "float32", {"exp_avg": "float32"}, whole=("exp_avg",))
    found = list_of(engine_buffer)
    assert [engine_buffer.find_state_layout(state)[0].partition for state, _ in found.buffers] == [5, 6]
    assert found.wants == [Want(A, 0, 5, 0, 0, None), Want(A_MOMENT, 0, 6, 1, 0, None)]
    assert found.blanks == []


def test_a_state_in_two_dtypes_has_two_sinks() -> None:
    moment = planning.make_atom("b", 3, state="exp_avg")
    found = list_of(EngineBuffer(TWO, 1, 0, "float32", {"exp_avg": "float32"}), moment)
    assert found.sinks == [(0, "float32"), (1, "bfloat16"), (1, "float32")]
    assert found.wants[2:] == [Want(A_MOMENT, 5, 1, 1, 0, None), Want(moment, 0, 3, 2, 1, None)]
