"""One rank's error becomes every rank's error."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ucp.comm import Comm, connect
from deepspeed_ucp.errors import CheckpointError, MismatchError, RemoteError


class Seat(Comm):
    """One rank of several; what the others say is given."""

    def __init__(self, rank: int, others: dict[int, Any]) -> None:
        self.rank, self.size, self.others = rank, len(others) + 1, others

    def gather(self, value: Any) -> list[Any]:
        return [value if rank == self.rank else self.others[rank] for rank in range(self.size)]


def test_one_rank_alone() -> None:
    comm = connect()
    assert (comm.rank, comm.size) == (0, 1)
    assert comm.gather("x") == ["x"]
    assert comm.broadcast("x") == "x"


def test_a_block_that_succeeds_everywhere_goes_on() -> None:
    with Seat(0, {1: None}).together():
        pass


def test_our_errors_keep_their_kind_and_text() -> None:
    with pytest.raises(CheckpointError, match="^broken$"), Comm().together():
        raise CheckpointError("broken")


def test_other_errors_are_carried_as_text() -> None:
    with pytest.raises(RemoteError, match="^ZeroDivisionError: oh$") as error, Comm().together():
        raise ZeroDivisionError("oh")
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_another_ranks_error_is_raised_here() -> None:
    with pytest.raises(MismatchError, match=r"^\[rank 1\] shapes$"), Seat(0, {1: (MismatchError, "shapes")}).together():
        pass


def test_the_first_failing_rank_speaks_for_all() -> None:
    comm = Seat(2, {0: None, 1: (MismatchError, "first")})
    with pytest.raises(MismatchError, match=r"^\[rank 1\] first$"), comm.together():
        raise CheckpointError("second")


def test_interrupts_are_not_held_back() -> None:
    with pytest.raises(KeyboardInterrupt), Comm().together():
        raise KeyboardInterrupt
