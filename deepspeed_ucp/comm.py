"""Communication between ranks: a single rank, ``torch.distributed``, or MPI.

torch and mpi4py are imported only if a launch needs them.
"""

from __future__ import annotations

import errno
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import ConfigError, RemoteError, StorageError, UcpError, escape
from .meeting import find_store, meet, report_failure, start_heartbeats

NumpyArray = npt.NDArray[Any]
T = TypeVar("T")
Item = TypeVar("Item")
_Map = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
_Into = NumpyArray | None


def pack(value: Any) -> bytes:
    """Pickle a value for other ranks of this launch."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes | memoryview) -> Any:
    """Restore a value that a rank of this launch has pickled."""
    return pickle.loads(packed)  # noqa: S301 - not a file's


class Comm:
    """Ranks that load or convert together; the base class is for one rank.

    Methods that call a function raise the first failing rank's error as a UcpError, the same on all ranks. As a context
    manager it ends the launch if only this rank fails, so that no other rank waits for it.
    """

    rank = 0
    size = 1

    def wait(self) -> None:
        """Wait for all ranks without a timeout; collective."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable ``value`` in rank order, on every rank."""
        return [value]

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return the ``value`` of rank ``src``, on every rank."""
        return value

    def swap(self, data: NumpyArray, sends: list[int], receives: list[int], into: _Into = None) -> NumpyArray:
        """Send ``sends[r]`` consecutive bytes of ``data`` (1-D, uint8) to each rank r.

        Unlike other methods it does not :meth:`wait`: call it right after another collective.

        Args:
            into: memory for the result; allocate it in :meth:`run`, because an error here would fail one rank alone.

        Returns:
            The bytes from all ranks.
        """
        return data

    def swap_tables(self, tables: list[NumpyArray]) -> list[NumpyArray]:
        """Send ``tables[r]`` to rank r; return the ranks' tables (of one dtype and width)."""
        shape, dtype = tables[0].shape[1:], tables[0].dtype
        width = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        sends = [len(table) * width for table in tables]
        self.wait()
        sizes = self.swap(np.array(sends, np.int64).view(np.uint8), [8] * self.size, [8] * self.size)
        receives: list[int] = sizes.view(np.int64).tolist()

        def pack() -> tuple[NumpyArray, NumpyArray]:
            parts = [np.ascontiguousarray(table).reshape(-1).view(np.uint8) for table in tables]
            return np.concatenate(parts), np.empty(sum(receives), np.uint8)

        packed, into = self.run(pack)
        received = self.swap(packed, sends, receives, into)
        return [part.view(dtype).reshape(-1, *shape) for part in np.split(received, np.cumsum(receives)[:-1])]

    def ask(self, questions: Sequence[tuple[int, Item]], answer: Callable[[Item], T]) -> list[T]:
        """Send (rank, question) pairs; return their answers in order (collective)."""
        by_rank: list[list[Item]] = [[] for _ in range(self.size)]
        for rank, question in questions:
            by_rank[rank].append(question)
        received = self._trade([self._pack(part) for part in by_rank])
        packed = self.run(lambda: [self._pack([answer(item) for item in self._unpack(part)]) for part in received])
        answers = [iter(self._unpack(part)) for part in self._trade(packed)]
        return [next(answers[rank]) for rank, _ in questions]

    def _trade(self, parts: list[Any]) -> list[Any]:
        """Send packed ``parts[r]`` to rank r; returns the ranks' parts."""
        if self.size == 1:
            return parts
        tables = [np.frombuffer(part, np.uint8) for part in parts]
        return [part.tobytes() for part in self.swap_tables(tables)]

    def any_of(self, mask: NumpyArray) -> NumpyArray:
        """Return the element-wise OR of all ranks' masks."""
        return mask

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work``, without collectives, on every rank; return this rank's result."""
        value, error = _attempt(work)
        if self.any_of(np.array([error is not None]))[0]:  # errors are gathered only if there is one
            self._raise_first(self.gather(_describe(error)), error)
        return value  # type: ignore[return-value]

    def run_replicated(self, work: Callable[[], T]) -> T:
        """Run ``work`` without a collective, if it does the same on all ranks anyway."""
        try:
            return work()
        except UcpError as error:
            self.common(error)
            raise

    def gather_results(self, work: Callable[[], T]) -> list[T]:
        """Run ``work``, without collectives, on every rank; return all results by rank.

        Results and errors are sent in one collective. With several ranks all results are copies.
        """
        packed, error = _attempt(lambda: self._pack(work()))
        gathered = self.gather((packed, _describe(error)))
        self._raise_first([report for _, report in gathered], error)
        return [self._unpack(result) for result, _ in gathered]

    def share(self, items: Sequence[Item], work: Callable[[Item], T], apply: _Map = map, *, first: int = 0) -> list[T]:
        """Run ``work`` on each item, spread over the ranks; return all results in order.

        Args:
            apply: replacement for ``map`` over a rank's items.
            first: rank of the first item; the next rank gets the second.
        """
        parts = self.gather_results(lambda: list(apply(work, items[(self.rank - first) % self.size :: self.size])))
        return [parts[(at + first) % self.size][at // self.size] for at in range(len(items))]

    def once(self, work: Callable[[], T], rank: int = 0) -> T:
        """Run ``work`` on one rank; returns its picklable result on every rank."""
        packed, error = _attempt(lambda: self._pack(work())) if self.rank == rank else (None, None)
        packed, report = self.broadcast((packed, _describe(error)), rank)
        self._raise_first([report], error, rank)
        return self._unpack(packed)  # type: ignore[no-any-return]

    def common(self, error: UcpError) -> UcpError:
        """Mark an error that every rank raises, and return it."""
        error.shared, error.echo = True, self.rank > 0
        return error

    def is_common(self, error: UcpError) -> bool:
        """Return True if every rank raises the error, so that all can continue together."""
        return self.size == 1 or error.shared

    def _raise_first(self, reports: Sequence[UcpError | None], error: Exception | None, first: int = 0) -> None:
        """Raise the first of the reports of ranks ``first``…; ``error`` is this rank's."""
        for failed, report in enumerate(reports, first):
            if report is not None:
                rank = failed if self.size > 1 and report.rank is None else report.rank
                raise report.copy(shared=True, echo=self.rank > 0, rank=rank) from error

    def _pack(self, value: Any) -> Any:
        """Pickle before the collective: a pickling error in it would fail one rank alone."""
        return pack(value) if self.size > 1 else value

    def _unpack(self, packed: Any) -> Any:
        return unpack(packed) if self.size > 1 else packed

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave the launch; an error of this rank alone ends the other ranks, too."""


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (result, None) or (None, error)."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - re-raised on every rank
        return None, error


def _describe(error: Exception | None) -> UcpError | None:
    """Convert an error to a picklable UcpError for the other ranks; None stays None."""
    if error is None:
        return None
    if isinstance(error, UcpError):
        return error.copy(shared=False, echo=False, rank=error.rank)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        details = f" ({error})" if str(error) else ""
        return RemoteError(f"out of memory{details}. Use a smaller window, or fewer workers.")
    if isinstance(error, OSError):
        return StorageError(*describe_os_error(error).split("\n"))
    return RemoteError(*f"{type(error).__name__}: {error}".replace("\n", "\n  ").split("\n"))


def describe_os_error(error: OSError) -> str:
    """Describe a system error by file, cause, errno name and advice."""
    files = " → ".join(
        os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))
    )
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    advice = _ADVICE.get(error.errno or 0, "")
    return f"{files or 'a file'}: {error.strerror or error} ({name}){advice}"


_ADVICE = {
    errno.EROFS: ". Write elsewhere.",
    errno.EACCES: ". Check its permissions, or those of its folder.",
    errno.EDQUOT: ". Make room, or write elsewhere.",
}


_LENGTH, _ROW = 8, 256
"""Bytes of a length field, and of a row with a length and a small value."""


class TorchComm(Comm):
    """The ranks of the default process group, with any backend.

    Ranks wait for each other before each collective (:func:`.meeting.meet`), so that the group's timeout applies to
    the collective only and not to the ranks' work before it.

    Args:
        owner: destroy the group at the end.
        waits: False if all ranks are known to arrive at the same time.
    """

    store: Any = None

    def __init__(self, *, owner: bool = False, waits: bool = True) -> None:
        import torch
        import torch.distributed as dist

        self.dist = dist
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        kinds = [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]  # cpu:gloo,cuda:nccl
        device = "cpu" if "cpu" in kinds else f"{kinds[0]}:{torch.get_device_module(kinds[0]).current_device()}"
        self.device = torch.device(device)
        self.owner = owner
        self.store = find_store() if waits else None
        if self.store is not None:
            start_heartbeats()

    def wait(self) -> None:
        if self.store is not None:
            meet(self.store, self.rank, self.size)

    def gather(self, value: Any) -> list[Any]:
        """Gather values, in one collective if all of them are small."""
        import torch

        self.wait()
        packed = pack(value)
        row = len(packed).to_bytes(_LENGTH, "little") + packed[: _ROW - _LENGTH]
        data = torch.frombuffer(bytearray(row.ljust(_ROW, b"\0")), dtype=torch.uint8).to(self.device)
        gathered = torch.empty(self.size, _ROW, dtype=torch.uint8, device=self.device)
        self.dist.all_gather(list(gathered), data)  # MPI groups do not support all_gather_into_tensor
        rows = [memoryview(row) for row in gathered.cpu().numpy()]
        sizes = [int.from_bytes(row[:_LENGTH], "little") for row in rows]
        if max(sizes) > _ROW - _LENGTH:
            parts = self._gather_parts(packed, sizes)
        else:
            parts = [row[_LENGTH : _LENGTH + size] for row, size in zip(rows, sizes, strict=True)]
        return list(map(unpack, parts))

    def _gather_parts(self, part: bytes, sizes: list[int]) -> list[memoryview]:
        """Gather bytes of any size through rank 0, without padding to the longest."""
        none = [0] * self.size
        joined = self.swap(
            np.frombuffer(bytearray(part), np.uint8), [len(part), *none[1:]], none if self.rank else sizes
        )
        whole = self._broadcast_row(joined, sum(sizes), 0)
        ends = list(accumulate(sizes))
        return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def broadcast(self, value: Any, src: int = 0) -> Any:
        packed = pack(value) if self.rank == src else b""
        self.wait()
        row = self._broadcast_row(len(packed).to_bytes(_LENGTH, "little") + packed[: _ROW - _LENGTH], _ROW, src)
        size = int.from_bytes(row[:_LENGTH], "little")
        data = row[_LENGTH : _LENGTH + size] if size <= _ROW - _LENGTH else self._broadcast_row(packed, size, src)
        return unpack(data)

    def _broadcast_row(self, row: bytes | NumpyArray, width: int, src: int) -> memoryview:
        """Broadcast ``width`` bytes of rank ``src``; a shorter row is padded."""
        import torch

        data = torch.zeros(width, dtype=torch.uint8)
        if self.rank == src:
            data[: len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        data = data.to(self.device)
        self.dist.broadcast(data, src=src)
        return memoryview(data.cpu().numpy())

    def swap(self, data: NumpyArray, sends: list[int], receives: list[int], into: _Into = None) -> NumpyArray:
        import torch

        host = torch.from_numpy(np.empty(sum(receives), np.uint8) if into is None else into)
        received = host.to(self.device)
        self.dist.all_to_all_single(received, torch.from_numpy(data).to(self.device), receives, sends)
        return received.cpu().numpy()

    def any_of(self, mask: NumpyArray) -> NumpyArray:
        import torch

        self.wait()
        flags = torch.from_numpy(mask.astype(np.uint8)).to(self.device)
        self.dist.all_reduce(flags, op=self.dist.ReduceOp.MAX)
        return flags.cpu().numpy().astype(np.bool_)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Report this rank's error to waiting ranks, or destroy the group if ``owner``."""
        if error is not None and not is_shared(error):
            if self.store is not None:
                report_failure(self.store, self.rank, error)
        elif self.owner:
            self.dist.destroy_process_group()


class MpiComm(Comm):
    """The ranks of ``mpirun`` through mpi4py.

    Raises:
        ConfigError: mpi4py or an MPI library is missing.
    """

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
            from mpi4py.util import pkl5
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"This launch has several MPI ranks and mpi4py cannot be used ({error}). Install deepspeed_ucp[mpi]."
            ) from error
        self.mpi = MPI
        self.world = pkl5.Intracomm(MPI.COMM_WORLD)  # pickles of any size
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()

    def gather(self, value: Any) -> list[Any]:
        return list(self.world.allgather(value))

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return self.world.bcast(value, root=src)

    def swap(self, data: NumpyArray, sends: list[int], receives: list[int], into: _Into = None) -> NumpyArray:
        """Send messages between pairs: ``Alltoallv`` has 32-bit counts in most libraries."""
        received = np.empty(sum(receives), np.uint8) if into is None else into
        world, data = self.mpi.COMM_WORLD, np.ascontiguousarray(data)
        pending = [world.Irecv(part, rank) for rank in range(self.size) for part in _slice(received, receives, rank)]
        pending += [world.Isend(part, rank) for rank in range(self.size) for part in _slice(data, sends, rank)]
        self.mpi.Request.Waitall(pending)
        return received

    def any_of(self, mask: NumpyArray) -> NumpyArray:
        flags = np.ascontiguousarray(mask, np.bool_)
        joined = np.empty_like(flags)
        self.mpi.COMM_WORLD.Allreduce(flags, joined, op=self.mpi.LOR)
        return joined

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an error of this rank alone, print it and abort the waiting ranks."""
        if error is None or is_shared(error):
            return
        sys.stderr.write(escape(f"[rank {self.rank}] {type(error).__name__}: {error}") + "\n")
        sys.stderr.flush()
        self.mpi.COMM_WORLD.Abort(2)


def is_shared(error: BaseException) -> bool:
    """Return True if every rank raises the error: collectives are still possible."""
    return isinstance(error, UcpError) and error.shared


_MESSAGE = 1 << 30
"""Maximal bytes of one MPI message."""


def _slice(data: NumpyArray, counts: list[int], rank: int) -> list[NumpyArray]:
    """Cut one rank's part out of bytes in rank order, as messages of limited size."""
    low, high = sum(counts[:rank]), sum(counts[: rank + 1])
    return [data[begin : min(begin + _MESSAGE, high)] for begin in range(low, high, _MESSAGE)]


def connect(*, waits: bool = True) -> Comm:
    """Return the ranks of the current process group; ``waits`` as for TorchComm."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchComm(waits=waits)
    return Comm()


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def join_launch(environment: Mapping[str, str] = os.environ) -> Comm:
    """Join the ranks of ``mpirun``, ``srun`` or ``torchrun``; a single rank otherwise.

    Use as ``with join_launch() as comm``. ConfigError if mpi4py cannot join the MPI ranks.
    """
    if all(name in environment for name in _TORCHRUN) and _read_size(environment, "WORLD_SIZE") > 1:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
            return TorchComm(owner=True)
        return TorchComm()
    tasks = max(_read_size(environment, name) for name in _MPI_SIZES)
    if tasks == 1 and "PMIX_RANK" not in environment:
        return Comm()
    comm = MpiComm()
    if comm.size < tasks:
        raise ConfigError(
            f"The launcher started {tasks} tasks, but MPI sees {comm.size}: launcher and mpi4py use different MPI "
            "libraries (with Slurm: srun --mpi=pmix)."
        )
    return comm if comm.size > 1 else Comm()


def _read_size(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdigit() and int(value) else 1
