"""Communication between ranks, and errors of one rank that all ranks raise."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from deepspeed_ucp import comm as comm_module
from deepspeed_ucp.comm import Comm, TorchComm, connect, join_launch
from deepspeed_ucp.errors import ConfigError, MismatchError, RemoteError, StorageError
from tests.support.mpi import needs_mpi, run_mpi, run_torch
from tests.support.ranks import World, run_ranks

METHODS = ("run", "gather_results", "once")


@pytest.mark.parametrize(
    ("method", "calls", "results"),
    [("run", 3, [0, 10, 20]), ("gather_results", 3, [[0, 10, 20]] * 3), ("once", 1, [0] * 3)],
)
def test_ranks_get_results_in_one_collective(method: str, calls: int, results: list[Any]) -> None:
    world, work = World(3), mock.Mock(side_effect=lambda rank: 10 * rank)
    assert world.run(lambda rank, comm: getattr(comm, method)(lambda: work(rank))) == results
    assert (world.collectives, work.call_count) == (1, calls)


@pytest.mark.parametrize("method", METHODS)
def test_a_single_rank_gets_the_result_object_without_copies(method: str) -> None:
    comm, result = connect(), object()
    found = getattr(comm, method)(lambda: result)
    assert (found[0] if method == "gather_results" else found) is result
    assert (comm.rank, comm.size, comm.gather("x"), comm.broadcast("x")) == (0, 1, ["x"], "x")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("size", "failing", "text"),
    [(1, (0,), "broken by 0"), (3, (0, 2), "[rank 0] broken by 0"), (3, (1,), "[rank 1] broken by 1")],
)
def test_the_first_error_is_raised_on_all_ranks(method: str, size: int, failing: tuple[int, ...], text: str) -> None:
    """It keeps its class and text, and only one rank prints it."""
    assert (MismatchError("x").shared, MismatchError("x").echo) == (False, False)

    def work(rank: int, comm: Comm) -> None:
        def fail() -> None:
            if rank in failing:
                raise MismatchError(f"broken by {rank}")

        getattr(comm, method)(fail, **({"rank": failing[0]} if method == "once" else {}))
        raise AssertionError("continues")

    results = World(size).run(work)
    found = [(type(result), str(result), result.shared, result.echo) for result in results]
    assert found == [(MismatchError, text, True, rank > 0) for rank in range(size)]


@pytest.mark.parametrize("method", ["gather_results", "once"])
def test_a_result_that_cannot_be_pickled_is_an_error_on_all_ranks(method: str) -> None:
    results = World(2).run(lambda rank, comm: getattr(comm, method)(lambda: (lambda: None) if rank == 0 else 1))
    assert {type(result) for result in results} == {RemoteError}
    assert len({str(result) for result in results}) == 1 and "[rank 0]" in str(results[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ZeroDivisionError("oh"), RemoteError, "ZeroDivisionError: oh$"),
        (FileNotFoundError(2, "No such file", "/x/a.pt"), StorageError, r"/x/a\.pt: No such file \(ENOENT\)$"),
        (OSError(5, "Input/output error"), StorageError, r"a file: Input/output error \(EIO\)$"),
        (MemoryError(), RemoteError, "out of memory. Use a smaller window"),
        (KeyboardInterrupt(), KeyboardInterrupt, "$"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_errors_are_sent_as_text(method: str, error: BaseException, kind: type[BaseException], text: str) -> None:
    with pytest.raises(kind, match=f"^{text}") as caught:
        getattr(Comm(), method)(mock.Mock(side_effect=error))
    assert error in (caught.value, caught.value.__cause__)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int32, np.int64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)], ids=str)
def test_exchanged_tables_keep_dtype_and_shape(size: int, dtype: Any, shape: tuple[int, ...]) -> None:
    """Tables may have any length and may be non-contiguous."""

    def make_table(rank: int, other: int) -> np.ndarray:
        rows = np.arange(6 * int(np.prod(shape))).reshape(6, *shape) + 10 * rank + other
        return rows.astype(dtype)[::2][: (rank + other) % 3]

    found = run_ranks(size, lambda rank, comm: comm.swap_tables([make_table(rank, to) for to in range(size)]))
    for rank, tables in enumerate(found):
        for other, table in enumerate(tables):
            np.testing.assert_array_equal(table, make_table(other, rank), strict=True)


# -- torch's collectives


class CountedDist:
    """The part of ``torch.distributed`` that ``TorchComm`` uses, for ranks as threads; it counts received bytes."""

    ReduceOp = SimpleNamespace(MAX=None)

    def __init__(self, comm: Any) -> None:
        self.comm, self.received = comm, 0

    def _take(self, into: torch.Tensor, data: Any) -> None:
        into.copy_(torch.as_tensor(data, dtype=torch.uint8))
        self.received += into.numel()

    def all_gather(self, rows: list[torch.Tensor], own: torch.Tensor) -> None:
        for row, values in zip(rows, self.comm.gather(own.tolist()), strict=True):
            self._take(row, values)

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        self._take(data, self.comm.broadcast(data.tolist(), src))

    def all_to_all_single(self, received: torch.Tensor, data: torch.Tensor, receives: Any, sends: Any) -> None:
        self._take(received, self.comm.swap(data.numpy(), sends, receives))

    def all_reduce(self, flags: torch.Tensor, op: None) -> None:
        self._take(flags, self.comm.any_of(flags.numpy().astype(np.bool_)))


def count_received(size: int, work: Callable[[Comm], Any]) -> list[tuple[Any, int]]:
    """Return each rank's result of ``work`` and the bytes that it received in torch's collectives."""

    def run(rank: int, comm: Comm) -> tuple[Any, int]:
        ranks = TorchComm.__new__(TorchComm)
        ranks.rank, ranks.size, ranks.device = rank, size, torch.device("cpu")
        ranks.dist = CountedDist(comm)
        return work(ranks), ranks.dist.received

    return run_ranks(size, run)


def make_value(rank: int, long: int) -> bytes:
    return bytes(range(256)) * 40 if rank == long else b""


@pytest.mark.parametrize("long", [0, 3])
def test_the_traffic_of_a_long_value_of_one_rank_does_not_grow_with_the_ranks(long: int) -> None:
    received = []
    for size in (4, 8):
        found = count_received(size, lambda comm: comm.gather(make_value(comm.rank, long)))
        assert [values for values, _ in found] == [[make_value(rank, long) for rank in range(size)]] * size
        received.append([nbytes for _, nbytes in found])
    assert max(received[1]) - max(received[0]) < 2000  # for four more ranks
    assert max(received[1]) < 2.5 * len(make_value(long, long))


def test_work_without_errors_exchanges_one_byte() -> None:
    assert count_received(4, lambda comm: comm.run(lambda: comm.rank)) == [(rank, 1) for rank in range(4)]


@pytest.mark.parametrize("value", [b"", b"x" * 240, b"x" * 256, b"x" * 5000], ids=len)
def test_broadcasts_keep_values_of_any_length(value: bytes) -> None:
    found = count_received(3, lambda comm: comm.broadcast(value if comm.rank == 1 else None, src=1))
    assert [received for received, _ in found] == [value] * 3


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
def test_the_backend_determines_the_device(config: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.accelerator`` is missing before torch 2.6."""
    monkeypatch.delattr("torch.accelerator", raising=False)
    monkeypatch.setattr("torch.get_device_module", {device[:-2]: SimpleNamespace(current_device=lambda: 3)}.get)
    for name, value in (("rank", 0), ("world_size", 2), ("backend", "undefined"), ("backend_config", config)):
        monkeypatch.setattr(f"torch.distributed.get_{name}", lambda value=value: value)
    assert TorchComm().device == torch.device(device)


# -- launches

LAUNCHED = str(Path(__file__).parent / "support" / "launched.py")


def expect(rank: int, comm: str) -> dict[str, Any]:
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
def test_ranks_of_mpirun_communicate() -> None:
    done = run_mpi(2, [LAUNCHED, "well"])
    reports = sorted(map(json.loads, done.stdout.splitlines()), key=lambda report: report["rank"])
    assert (done.returncode, reports) == (0, [expect(rank, "MpiComm") for rank in range(2)]), done.stderr


@needs_mpi
@pytest.mark.parametrize(
    ("end", "words"), [("alone", "[rank 1] ZeroDivisionError: it broke"), ("all", "[rank 1] it broke")]
)
def test_an_error_of_one_or_all_ranks_of_mpirun_is_printed_once(end: str, words: str) -> None:
    done = run_mpi(2, [LAUNCHED, end])
    assert done.returncode == 2 and words in done.stderr
    assert done.stderr.count("it broke") == 1


def test_ranks_of_torchrun_communicate() -> None:
    for rank, (code, out, err) in enumerate(run_torch(2, [LAUNCHED, "all"])):
        assert (code, json.loads(out)) == (2, expect(rank, "TorchComm"))
        assert ("[rank 1] it broke" in err) == (rank == 0)


class Joined(Comm):
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
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, Comm),  # a batch script, not a task of srun
        ({"SLURM_STEP_NUM_TASKS": "2"}, Joined),
        # A container without launcher:
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, Comm),
    ],
    ids=str,
)
def test_launchers_by_environment(environment: dict[str, str], kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_module, "MpiComm", Joined)
    assert type(join_launch(environment)) is kind


def test_tasks_without_a_common_mpi_world_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each task would convert the whole checkpoint."""
    monkeypatch.setattr(comm_module, "MpiComm", Joined)
    monkeypatch.setattr(Joined, "joined", 1)
    with pytest.raises(ConfigError, match="started 4 tasks, but MPI sees 1.*srun --mpi=pmix"):
        join_launch({"SLURM_STEP_NUM_TASKS": "4"})
    assert type(join_launch({"PMIX_RANK": "0"})) is Comm


def test_a_missing_mpi4py_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"Install deepspeed_ucp\[mpi\]"):
        join_launch({"OMPI_COMM_WORLD_SIZE": "2"})
