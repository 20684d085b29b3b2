"""What ranks tell each other, and how one rank's error becomes every rank's error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed_ucp import comm as comm_module
from deepspeed_ucp.comm import Comm, connect, join_launch
from deepspeed_ucp.errors import CheckpointError, ConfigError, MismatchError, RemoteError
from tests.mpi import needs_mpi, run_mpi, run_torch
from tests.ranks import BrokenWorldError, World, run_ranks


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


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_tables_go_to_the_ranks_that_they_are_for(size: int) -> None:
    """Of any length, empty ones among them."""

    def work(rank: int, comm: Comm) -> list[Any]:
        tables = [np.full(((rank + other) % 3, 2), 10 * rank + other, np.int32) for other in range(size)]
        return [table.tolist() for table in comm.swap_tables(tables)]

    for rank, found in enumerate(run_ranks(size, work)):
        assert found == [[[10 * other + rank] * 2] * ((rank + other) % 3) for other in range(size)]


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int32, np.int64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)], ids=str)
def test_tables_keep_dtype_and_shape(dtype: Any, shape: tuple[int, ...]) -> None:
    rows = np.arange(4 * int(np.prod(shape))).reshape(4, *shape).astype(dtype)

    def work(_: int, comm: Comm) -> list[Any]:
        return comm.swap_tables([rows[:2], rows[2:3], rows[3:3]])

    for rank, tables in enumerate(run_ranks(3, work)):
        expected = (rows[:2], rows[2:3], rows[3:3])[rank]
        for table in tables:
            assert (table.dtype, table.shape) == (rows.dtype, expected.shape)
            assert (table == expected).all()


def test_tables_need_not_be_contiguous() -> None:
    rows = np.arange(12).reshape(3, 4)
    (found,) = Comm().swap_tables([rows[:, ::2]])
    assert found.tolist() == [[0, 2], [4, 6], [8, 10]]


def test_masks_are_joined() -> None:
    def work(rank: int, comm: Comm) -> list[bool]:
        mask = np.zeros(4, np.bool_)
        mask[rank] = True
        return comm.any_of(mask).tolist()

    assert run_ranks(3, work) == [[True, True, True, False]] * 3
    assert Comm().any_of(np.array([True, False])).tolist() == [True, False]


def test_an_error_on_one_of_several_ranks_is_raised_on_all() -> None:
    def work(rank: int, comm: Comm) -> None:
        with comm.together():
            if rank == 1:
                raise CheckpointError("broken")
        raise AssertionError("goes on")

    results = World(3).run(work)
    assert [(type(result), str(result)) for result in results] == [(CheckpointError, "[rank 1] broken")] * 3


# -- the tests' own ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [None, (2, 1, 0), (1, 2, 0)], ids=str)
def test_ranks_take_turns_from_one_exchange_to_the_next(order: tuple[int, ...] | None) -> None:
    seen: list[tuple[int, int]] = []

    def work(rank: int, comm: Comm) -> None:
        for step in range(3):
            seen.append((step, rank))
            comm.gather(None)

    World(3, order).run(work)
    assert seen == [(step, rank) for step in range(3) for rank in order or range(3)]


def test_what_ranks_hear_is_their_own_copy() -> None:
    def work(rank: int, comm: Comm) -> tuple[Any, Any]:
        heard = comm.gather([rank])
        told = comm.broadcast({"from": rank}, src=2)
        heard[0].append(rank)
        return heard, told

    assert [heard for heard, _ in run_ranks(3, work)] == [[[0, rank], [1], [2]] for rank in range(3)]
    assert [told for _, told in run_ranks(3, work)] == [{"from": 2}] * 3


def test_bytes_are_exchanged_by_counts() -> None:
    def work(rank: int, comm: Comm) -> list[int]:
        counts = [(rank + other) % 3 for other in range(3)]
        data = np.full(sum(counts), rank, np.uint8)
        return comm.swap(data, counts, counts).tolist()

    assert run_ranks(3, work) == [[1, 2, 2], [0, 1, 1], [0, 0, 2]]


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_ranks_do_not_wait_for_one_that_has_ended(culprit: int) -> None:
    def work(rank: int, comm: Comm) -> None:
        comm.gather(None)
        if rank == culprit:
            raise ZeroDivisionError("oh")
        comm.gather(None)

    results = World(3).run(work)
    kinds = [ZeroDivisionError if rank == culprit else BrokenWorldError for rank in range(3)]
    assert [type(result) for result in results] == kinds
    with pytest.raises(ZeroDivisionError):
        run_ranks(3, work)


def test_ranks_in_different_exchanges_are_found_out() -> None:
    def work(rank: int, comm: Comm) -> None:
        comm.gather(None) if rank else comm.any_of(np.zeros(1, np.bool_))

    with pytest.raises(BrokenWorldError, match="different collectives"):
        run_ranks(2, work)


# -- launches ---------------------------------------------------------------------------------------------------------

LAUNCHED = str(Path(__file__).parent / "launched.py")


def expect(rank: int, comm: str) -> dict[str, Any]:
    """What rank ``rank`` of two hears."""
    return {
        "rank": rank,
        "comm": comm,
        "gather": [{"rank": 0}, {"rank": 1}],
        "broadcast": 1,
        "swap": [[1], [0, 1, 1]][rank],
        "slices": True,
        "tables": [[[[10 * other + rank] * 2] * rank for other in range(2)] for rank in range(2)][rank],
        "any": [True, True, False],
    }


@needs_mpi
def test_ranks_of_mpirun() -> None:
    done = run_mpi(2, [LAUNCHED, "well"])
    told = sorted(map(json.loads, done.stdout.splitlines()), key=lambda each: each["rank"])
    assert (done.returncode, told) == (0, [expect(rank, "MpiComm") for rank in range(2)]), done.stderr


@needs_mpi
def test_a_rank_that_fails_alone_ends_all_with_one_message() -> None:
    done = run_mpi(2, [LAUNCHED, "alone"])
    assert done.returncode == 2
    assert done.stderr.count("oh") == 1
    assert "[rank 1] ZeroDivisionError: oh" in done.stderr


@needs_mpi
def test_an_error_of_all_ranks_is_told_once() -> None:
    done = run_mpi(2, [LAUNCHED, "all"])
    assert done.returncode == 2
    assert done.stderr.count("oh") == 1
    assert "[rank 1] oh" in done.stderr


def test_ranks_of_torchrun() -> None:
    for rank, (code, out, err) in enumerate(run_torch(2, [LAUNCHED, "all"])):
        assert json.loads(out) == expect(rank, "TorchComm")
        assert code == 2
        assert ("[rank 1] oh" in err) == (rank == 0)


class Joined(Comm):
    """Stands in for MPI's ranks."""

    joined = 2

    def __init__(self) -> None:
        self.size = self.joined


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({}, Comm),
        ({"OMPI_COMM_WORLD_SIZE": "1", "WORLD_SIZE": "1"}, Comm),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, Joined),
        ({"PMI_SIZE": "2"}, Joined),
        ({"PMIX_RANK": "0"}, Joined),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, Comm),  # a batch script, not what srun starts
        ({"SLURM_STEP_NUM_TASKS": "2"}, Joined),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, Comm),  # a container, no launcher
    ],
    ids=str,
)
def test_the_launcher_is_known_by_what_it_sets(
    environment: dict[str, str], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm_module, "MpiComm", Joined)
    assert type(join_launch(environment)) is kind


def test_tasks_that_do_not_find_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would convert on its own."""
    monkeypatch.setattr(comm_module, "MpiComm", Joined)
    monkeypatch.setattr(Joined, "joined", 1)
    with pytest.raises(ConfigError, match="started 4 tasks, but MPI sees 1.*srun --mpi=pmix"):
        join_launch({"SLURM_STEP_NUM_TASKS": "4"})
    assert type(join_launch({"PMIX_RANK": "0"})) is Comm


def test_without_mpi4py_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"Install deepspeed_ucp\[mpi\]"):
        join_launch({"OMPI_COMM_WORLD_SIZE": "2"})


def test_an_error_of_all_ranks_says_who_is_to_tell_it() -> None:
    told = (CheckpointError, "broken")
    for rank in range(2):
        with pytest.raises(CheckpointError) as error, Seat(rank, {1 - rank: told}).together():
            pass
        assert (error.value.shared, error.value.echo) == (True, rank == 1)
    assert (CheckpointError("x").shared, CheckpointError("x").echo) == (False, False)
