"""What ranks tell each other, and how one rank's error becomes every rank's error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp import comm as comm_module
from deepspeed_ucp.comm import Comm, TorchComm, connect, join_launch
from deepspeed_ucp.errors import CheckpointError, ConfigError, MismatchError, RemoteError, StorageError
from tests.support.mpi import needs_mpi, run_mpi, run_torch
from tests.support.ranks import BrokenWorldError, World, run_ranks


def test_one_rank_alone() -> None:
    comm = connect()
    assert (comm.rank, comm.size) == (0, 1)
    assert comm.gather("x") == ["x"]
    assert comm.broadcast("x") == "x"


# -- work that ends alike on all ranks --------------------------------------------------------------------------------


def test_each_rank_gets_its_own_result() -> None:
    assert run_ranks(3, lambda rank, comm: comm.run(lambda: 10 * rank)) == [0, 10, 20]


def test_all_ranks_get_the_results_of_each() -> None:
    assert run_ranks(3, lambda rank, comm: comm.each(lambda: [rank])) == [[[0], [1], [2]]] * 3


def test_what_rank_0_does_once_all_ranks_get() -> None:
    calls: list[int] = []

    def work(rank: int, comm: Comm) -> str:
        return comm.once(lambda: calls.append(rank) or "x")

    assert run_ranks(3, work) == ["x"] * 3
    assert calls == [0]


METHODS = ("run", "each", "once")


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_alone_gets_the_result_itself(method: str) -> None:
    result = object()
    found = getattr(Comm(), method)(lambda: result)
    assert (found[0] if method == "each" else found) is result


@pytest.mark.parametrize(("method", "collectives"), [("run", 1), ("each", 1), ("once", 1)])
def test_results_and_errors_take_one_collective(method: str, collectives: int) -> None:
    world = World(2)
    world.run(lambda _, comm: getattr(comm, method)(lambda: 1))
    assert world.collectives == collectives


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 3])
def test_our_errors_keep_their_kind_and_text(method: str, size: int) -> None:
    def work(rank: int, comm: Comm) -> None:
        def fail() -> None:
            if rank in (0, 2):
                raise CheckpointError(f"broken by {rank}")

        getattr(comm, method)(fail)
        raise AssertionError("goes on")

    text = "broken by 0" if size == 1 else "[rank 0] broken by 0"
    results = World(size).run(work)
    assert [(type(result), str(result)) for result in results] == [(CheckpointError, text)] * size


@pytest.mark.parametrize("method", ["run", "each"])
def test_another_ranks_error_is_raised_here(method: str) -> None:
    def work(rank: int, comm: Comm) -> None:
        def fail() -> None:
            if rank == 1:
                raise MismatchError("shapes")

        getattr(comm, method)(fail)
        raise AssertionError("goes on")

    results = World(3).run(work)
    assert [(type(result), str(result)) for result in results] == [(MismatchError, "[rank 1] shapes")] * 3


@pytest.mark.parametrize("method", METHODS)
def test_other_errors_are_carried_as_text(method: str) -> None:
    def fail() -> None:
        raise ZeroDivisionError("oh")

    with pytest.raises(RemoteError, match="^ZeroDivisionError: oh$") as error:
        getattr(Comm(), method)(fail)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("method", ["each", "once"])
def test_a_result_that_cannot_be_sent_is_an_error_of_all_ranks(method: str) -> None:
    """A rank that failed within the collective would leave the others waiting."""

    def work(rank: int, comm: Comm) -> None:
        getattr(comm, method)(lambda: (lambda: None) if rank == 0 else 1)

    results = World(2).run(work)
    assert {type(result) for result in results} == {RemoteError}
    assert len({str(result) for result in results}) == 1
    assert "[rank 0]" in str(results[0])


def test_an_error_of_the_system_names_file_and_cause(tmp_path: Path) -> None:
    path = tmp_path / "missing.pt"
    with pytest.raises(StorageError, match=rf"^{re.escape(str(path))}: No such file or directory \(ENOENT\)$"):
        Comm().run(path.read_bytes)


def test_an_error_of_the_system_without_a_file_says_so() -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(StorageError, match=r"^a file: Input/output error \(EIO\)$"):
        Comm().run(fail)


def test_want_of_memory_has_a_text() -> None:
    def fail() -> None:
        raise MemoryError

    with pytest.raises(RemoteError, match="^out of memory. Use a smaller window"):
        Comm().run(fail)


@pytest.mark.parametrize("method", METHODS)
def test_interrupts_are_not_held_back(method: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        getattr(Comm(), method)(interrupt)


@pytest.mark.parametrize("method", METHODS)
def test_an_error_of_all_ranks_says_who_is_to_tell_it(method: str) -> None:
    def fail() -> None:
        raise CheckpointError("broken")

    results = World(2).run(lambda _, comm: getattr(comm, method)(fail))
    assert [(result.shared, result.echo) for result in results] == [(True, False), (True, True)]
    assert (CheckpointError("x").shared, CheckpointError("x").echo) == (False, False)


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


# -- torch's collectives ----------------------------------------------------------------------------------------------


class CountedDist:
    """What ``TorchComm`` asks of ``torch.distributed``, between a world's ranks; counts the bytes that one receives."""

    ReduceOp = SimpleNamespace(MAX=None)

    def __init__(self, comm: Any) -> None:
        self.comm, self.received = comm, 0

    def _take(self, into: torch.Tensor, data: Any) -> None:
        into.copy_(torch.as_tensor(data, dtype=torch.uint8))
        self.received += into.numel()

    def all_gather(self, rows: list[torch.Tensor], own: torch.Tensor) -> None:
        for row, told in zip(rows, self.comm.gather(own.tolist()), strict=True):
            self._take(row, told)

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        self._take(data, self.comm.broadcast(data.tolist(), src))

    def all_to_all_single(self, received: torch.Tensor, data: torch.Tensor, receives: Any, sends: Any) -> None:
        self._take(received, self.comm.swap(data.numpy(), sends, receives))

    def all_reduce(self, flags: torch.Tensor, op: None) -> None:
        self._take(flags, self.comm.any_of(flags.numpy().astype(np.bool_)))


def count_received(size: int, work: Callable[[Comm], Any]) -> list[tuple[Any, int]]:
    """By rank what ``work`` returns, and the bytes that the rank received in torch's collectives."""

    def run(rank: int, comm: Comm) -> tuple[Any, int]:
        told = TorchComm.__new__(TorchComm)
        told.rank, told.size, told.device = rank, size, torch.device("cpu")
        told.dist = CountedDist(comm)
        return work(told), told.dist.received

    return run_ranks(size, run)


def speak(rank: int, long: int) -> bytes:
    """What one rank of all has much to tell of, and the others nothing."""
    return bytes(range(256)) * 40 if rank == long else b""


@pytest.mark.parametrize("long", [0, 3])
def test_one_rank_s_long_word_takes_no_room_for_the_others(long: int) -> None:
    received = []
    for size in (4, 8):
        found = count_received(size, lambda comm: comm.gather(speak(comm.rank, long)))
        assert [told for told, _ in found] == [[speak(rank, long) for rank in range(size)]] * size
        received.append([nbytes for _, nbytes in found])
    assert max(received[1]) - max(received[0]) < 2000  # for four ranks more
    assert max(received[1]) < 2.5 * len(speak(long, long))


def test_work_without_errors_is_agreed_about_in_a_byte() -> None:
    assert count_received(4, lambda comm: comm.run(lambda: comm.rank)) == [(rank, 1) for rank in range(4)]


def test_what_is_broadcast_arrives_whole_whatever_its_length() -> None:
    for told in (b"", b"x" * 240, b"x" * 256, b"x" * 5000):
        found = count_received(3, lambda comm, told=told: comm.broadcast(told if comm.rank == 1 else None, src=1))  # type: ignore[misc]
        assert [heard for heard, _ in found] == [told] * 3


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl", "cuda:3"),
        ("cuda:gloo", "cuda:3"),
        ("hpu:hccl", "hpu:3"),
    ],
)
def test_tensors_are_where_a_group_takes_them(config: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its backend is called, and before torch 2.6 knows the accelerator."""
    monkeypatch.delattr("torch.accelerator", raising=False)
    monkeypatch.setattr("torch.get_device_module", {device[:-2]: SimpleNamespace(current_device=lambda: 3)}.get)
    for name, told in (("rank", 0), ("world_size", 2), ("backend", "undefined"), ("backend_config", config)):
        monkeypatch.setattr(f"torch.distributed.get_{name}", lambda told=told: told)
    assert TorchComm().device == torch.device(device)


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


@pytest.mark.parametrize(("size", "culprit"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_ranks_do_not_wait_for_one_that_has_ended(size: int, culprit: int) -> None:
    def work(rank: int, comm: Comm) -> None:
        comm.gather(None)
        if rank == culprit:
            raise ZeroDivisionError("oh")
        comm.gather(None)

    results = World(size).run(work)
    kinds = [ZeroDivisionError if rank == culprit else BrokenWorldError for rank in range(size)]
    assert [type(result) for result in results] == kinds
    with pytest.raises(ZeroDivisionError):
        run_ranks(size, work)


def test_ranks_in_different_exchanges_are_found_out() -> None:
    def work(rank: int, comm: Comm) -> None:
        comm.gather(None) if rank else comm.any_of(np.zeros(1, np.bool_))

    with pytest.raises(BrokenWorldError, match="different collectives"):
        run_ranks(2, work)


# -- launches ---------------------------------------------------------------------------------------------------------

LAUNCHED = str(Path(__file__).parent / "support" / "launched.py")


def expect(rank: int, comm: str) -> dict[str, Any]:
    """What rank ``rank`` of two hears."""
    return {
        "rank": rank,
        "comm": comm,
        "gather": [{"rank": 0}, {"rank": 1}],
        "long": [0, 5000],
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
    assert done.stderr.count("it broke") == 1
    assert "[rank 1] ZeroDivisionError: it broke" in done.stderr


@needs_mpi
def test_an_error_of_all_ranks_is_told_once() -> None:
    done = run_mpi(2, [LAUNCHED, "all"])
    assert done.returncode == 2
    assert done.stderr.count("it broke") == 1
    assert "[rank 1] it broke" in done.stderr


def test_ranks_of_torchrun() -> None:
    for rank, (code, out, err) in enumerate(run_torch(2, [LAUNCHED, "all"])):
        assert json.loads(out) == expect(rank, "TorchComm")
        assert code == 2
        assert ("[rank 1] it broke" in err) == (rank == 0)


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
