"""Tensors as destinations of bytes, on the host and on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it reads attributes that `LateCuda` lacks

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.io import memory
from deepspeed_ucp.io.memory import ScratchPool, allocate_large, find_address
from deepspeed_ucp.load import destinations, transfer
from deepspeed_ucp.load.destinations import (
    AsyncGpuCopies,
    Buffer,
    FillPlan,
    SyncCopies,
    TensorSink,
    choose_device_copies,
)
from deepspeed_ucp.model.records import CopyItem
from deepspeed_ucp.plan.wants import Mean, Wants
from tests.plan.planning import make_index
from tests.support.contents import check_load
from tests.support.direct import write
from tests.support.ranks import current_rank, run_ranks
from tests.support.reshard import load, make_targets, open_for
from tests.synth import Model, Param, Topology


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes()))


def test_a_non_contiguous_tensor_is_filled_in_separate_memory() -> None:
    assert TensorSink(Buffer(torch.zeros(0), fill_first=True), "float32").view(0, 0) is None
    whole = torch.zeros(3, 2)
    sink = TensorSink(Buffer(whole.t(), fill_first=False), "float32")
    view = sink.view(0, 24)
    assert view is not None
    view[:] = raw(torch.arange(6.0))
    assert not whole.any()
    sink.buffer.commit()
    assert whole.t().tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("live", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (CopyItem(0, 0, 8, 8, 2, 0, 1, 4), [0, 1, 2, 0, 0, 3, 4, 0, 0, 0]),
        (CopyItem(0, 0, 4, 4, 4, 0, 1, 2), [0, 1, 0, 2, 0, 3, 0, 4, 0, 0]),
        (CopyItem(0, 0, 8, 24, 2, 0, 2), [0, 0, 1, 2, 3, 4, 0, 0, 0, 0]),
    ],
    ids=["rows", "columns", "contiguous"],
)
def test_bytes_are_stored_in_rows(rows: CopyItem, expected: list[int], skip: int, live: torch.dtype) -> None:
    """The tensor may begin at an offset in its storage."""
    whole = torch.zeros(10 + skip, dtype=live)
    sink = TensorSink(Buffer(whole[skip:], fill_first=True), "float32")
    sink.store(rows, raw(torch.arange(1.0, 5.0)))
    assert whole.tolist() == [*[0] * skip, *expected]


def test_elements_outside_the_spans_keep_their_values() -> None:
    whole = torch.arange(6.0).view(3, 2)
    for tensor in (whole.t(), whole.view(-1)):
        before = tensor.clone()
        buffer = Buffer(tensor, fill_first=False, spans=[(4, 5), (0, 2)])
        buffer.use_separate()
        buffer.memory[0:2] = torch.tensor([7.0, 8.0])
        buffer.memory[4] = 9.0
        assert buffer.fill_first and tensor.equal(before)
        buffer.commit()
        assert tensor.reshape(-1).tolist() == [7, 8, *before.reshape(-1)[2:4].tolist(), 9, before.reshape(-1)[5]]


@pytest.mark.parametrize(
    ("values", "copies", "in_place"),
    [
        ([1.5, -0.0, float("nan"), 2.0], [[1.5, -0.0, float("nan")], [2.0]], True),
        ([0.0, 0.0], [], True),
        ([1.5, 2.0], [], False),
        ([0.0, -0.0], [], False),
        ([1.5, 2.0], [[1.5]], False),
        ([1.5, 2.0], [[1.5, 2.0, 3.0]], False),
        ([1.5, 0.0], [[1.5, -0.0]], False),
        ([1.5, 1e-9 + 1.0], [[1.5], [1.0 + 2**-6]], False),
    ],
    ids=["masters", "zero states", "unknown", "negative zero", "less", "more", "another sign", "trained"],
)
def test_only_masters_equal_to_their_copies_and_zero_states_are_filled_in_place(
    values: list[float], copies: list[list[float]], in_place: bool
) -> None:
    made_from = [torch.tensor(copy).bfloat16() for copy in copies]
    before = torch.cat(made_from).float() if copies and in_place else torch.tensor(values)
    buffer = Buffer(before.clone(), fill_first=False, copies=made_from)
    assert buffer.detect_recomputable() == in_place
    if in_place:
        assert buffer.fill_first and buffer.memory is buffer.tensor
        buffer.memory.fill_(7.0)
        buffer.undo()
        assert raw(buffer.tensor) == raw(before)


def test_a_tensor_that_shares_memory_with_its_copy_is_not_filled_in_place() -> None:
    """ZeRO 3 has no separate masters if both would have one dtype."""
    tensor = torch.tensor([1.5, 2.0])
    assert not Buffer(tensor, fill_first=False, copies=[tensor.view(-1)]).detect_recomputable()


def test_zeros_and_means_are_written_to_a_non_contiguous_tensor() -> None:
    whole = torch.full((3, 2), 5.0)
    buffer = Buffer(whole.t(), fill_first=False, spans=[(0, 6)])
    replicas = [Buffer(torch.tensor(values), fill_first=True) for values in ([1.0, 2.0], [3.0, 4.0])]
    wants = Wants(blanks=[(0, 0, 4)], means=[Mean(0, 4, 6, (1, 2))])
    fill_plan = FillPlan(make_index([]), wants, [buffer, *replicas])
    fill_plan.zero_blanks(is_first_pass=True)
    assert whole.eq(5).all()
    fill_plan.commit()
    assert whole.t().tolist() == [[0, 0, 0], [0, 2, 3]]


def test_free_memory_counts_for_all_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks on two machines; each needs 40 bytes and a window of 10."""
    free = dict[str, int]()
    monkeypatch.setattr(transfer, "identify_host", lambda: "aab"[current_rank()])
    monkeypatch.setattr(transfer, "measure_available", lambda: free["aab"[current_rank()]])

    def decide(_rank: int, comm: Comm) -> bool:
        return transfer.has_memory([Buffer(torch.ones(10), fill_first=False)], 10, comm)

    for a, b, enough in ((134, 67, True), (133, 67, False), (134, 66, False)):
        free.update(a=a, b=b)
        assert run_ranks(3, decide) == [enough] * 3


def test_separate_memory_of_tensors_on_a_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A non-contiguous tensor is filled in host memory, on any device."""
    flat, other = (Buffer(torch.empty(shape, device="meta"), fill_first=True) for shape in (10, (2, 5)))
    monkeypatch.setattr(transfer, "measure_available", lambda: 10)
    assert transfer.has_memory([flat], 1, Comm())
    assert not transfer.has_memory([other], 1, Comm())


def test_free_memory_is_the_minimum_of_all_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    for path, text in {
        proc / "meminfo": "MemTotal: 900 kB\nMemAvailable: 500 kB\n",
        proc / "self/cgroup": "4:cpu,memory:/job/step\n0::/job\n",
        groups / "memory/job/step/memory.limit_in_bytes": "9223372036854771712\n",
        groups / "memory/job/step/memory.usage_in_bytes": "5\n",
        groups / "memory/job/memory.limit_in_bytes": "400000\n",
        groups / "memory/job/memory.usage_in_bytes": "200000\n",
        groups / "memory/job/memory.stat": "cache 9\ntotal_inactive_file 50000\n",
        groups / "job/memory.max": "max\n",
        groups / "job/memory.current": "7\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(memory, "_PROC", proc)
    monkeypatch.setattr(memory, "_GROUPS", groups)
    assert memory.measure_available() == 250_000
    (groups / "job/memory.max").write_text("1007\n")
    assert memory.measure_available() == 1000
    (proc / "meminfo").unlink()
    assert memory.measure_available() == 0


def test_untouched_memory_is_new_states_and_separate_memory() -> None:
    assert Buffer(torch.zeros(6), fill_first=True).is_fresh_host_memory
    live, file = Buffer(torch.zeros(6), fill_first=False), Buffer(torch.zeros(6), fill_first=True, in_file=True)
    assert not live.is_fresh_host_memory and not file.is_fresh_host_memory
    assert live.detect_recomputable() and not live.is_fresh_host_memory
    for each in (Buffer(torch.ones(6), fill_first=False), Buffer(torch.ones(6), fill_first=False, in_file=True)):
        each.use_separate()
        assert each.is_fresh_host_memory and each.memory is not each.tensor


# -- asynchronous copies to a GPU: stand-ins for streams, which copy as late as they can ------------------------------


MODEL = Model((Param("a", (300, 20)), Param("b", (37,), group=1)), {"buffer": torch.arange(50)})


class LateStream:
    def __init__(self, gpu: int = 0) -> None:
        self.gpu, self.lock = gpu, threading.Lock()
        self.jobs: list[Callable[[], Any]] = []

    def catch_up(self) -> None:
        with self.lock:
            while self.jobs:
                self.jobs[0]()
                del self.jobs[0]


class LateEvent:
    def __init__(self, cuda: LateCuda) -> None:
        self.cuda = cuda

    def record(self, stream: LateStream | None = None) -> None:
        self.stream = stream or self.cuda.current_stream()

    def query(self) -> bool:
        return not self.stream.jobs

    def synchronize(self) -> None:
        self.stream.catch_up()


class LateCuda(threading.local):
    """``torch.cuda`` in a thread, with two GPUs and a stream for each; the first GPU is current in a new thread.

    Attributes:
        gpu: the current one.
        streams: the current one of each.
        made: all streams, of all threads.
    """

    def __init__(self, made: list[LateStream]) -> None:
        self.gpu, self.made = 0, made
        self.streams = [self.Stream(torch.device("cuda", gpu)) for gpu in range(2)]

    def Stream(self, device: torch.device | None = None) -> LateStream:
        self.made.append(LateStream(self._find(device)))
        return self.made[-1]

    def Event(self) -> LateEvent:
        return LateEvent(self)

    def _find(self, device: torch.device | None) -> int:
        return self.gpu if device is None else int(device.index)

    def current_stream(self, device: torch.device | None = None) -> LateStream:
        return self.streams[self._find(device)]

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.gpu = self.gpu, self._find(device)
        yield
        self.gpu = before

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        with self.device(torch.device("cuda", stream.gpu)):
            before, self.streams[stream.gpu] = self.streams[stream.gpu], stream
            yield
            self.streams[stream.gpu] = before

    def synchronize(self, device: torch.device | None = None) -> None:
        for stream in list(self.made):
            if stream.gpu == self._find(device):
                stream.catch_up()


class LateCopies(AsyncGpuCopies):
    def __init__(self, threads: int, most: int) -> None:
        super().__init__(threads, torch.device("cuda", 1))
        self.pool, self.count = ScratchPool(self._allocate, self._record, most), 0

    def _allocate(self, nbytes: int) -> memoryview:
        self.count += 1
        return super()._allocate(nbytes)


@pytest.fixture(params=[0, 1, 3, 16])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Make all destinations the second GPU's, with as many locked pieces as the parameter, or more if needed.

    A thread's streams and events belong to its current GPU, the first one, unless they name another.
    """
    cuda, found = LateCuda([]), SimpleNamespace(most=request.param, made=[], locked=set(), emptied=[])

    def choose(_sinks: object, threads: int) -> SyncCopies:
        cuda.gpu = 1  # as DeepSpeed sets it in the thread that trains
        found.made.append(LateCopies(threads, request.param))
        return found.made[-1]  # type: ignore[no-any-return]

    def allocate(nbytes: int) -> memoryview:
        found.locked.add(cuda.gpu)
        return memoryview(bytearray(nbytes))

    def copy(into: torch.Tensor, values: torch.Tensor) -> None:
        cuda.current_stream(torch.device("cuda", 1)).jobs.append(lambda: into.copy_(values))

    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(destinations, "_allocate_pinned", allocate)
    monkeypatch.setattr(destinations, "_empty_host_cache", lambda: found.emptied.append(1))
    monkeypatch.setattr(destinations, "_copy", copy)
    monkeypatch.setattr(transfer, "choose_device_copies", choose)
    monkeypatch.setattr(TensorSink, "view", lambda self, position, nbytes: None)
    return found


@pytest.mark.parametrize("target", [Topology(1, 2), Topology(0, 2), Topology(3, 3)], ids=lambda each: each.label)
def test_staging_memory_is_reused_after_its_copies(late: SimpleNamespace, target: Topology, tmp_path: Path) -> None:
    path, state = write(tmp_path, Topology(1, 3), MODEL)
    _, ranks = check_load(path, MODEL, target, state, window=1 << 12)
    threads = max(rank.transfer.threads for rank in ranks if rank.transfer)
    assert all(made.count <= late.most + 2 * threads for made in late.made)
    assert late.locked == {1}
    assert len(late.emptied) == len(late.made) == target.dp


@pytest.mark.usefixtures("late")
def test_an_error_is_raised_after_copies_in_progress_completed(tmp_path: Path) -> None:
    path, _ = write(tmp_path, Topology(1, 3), MODEL)
    targets = make_targets(MODEL, Topology(0, 2))
    index = open_for(path, targets[0])
    Path(index.files[-1].path).write_bytes(b"")
    with pytest.raises(CheckpointError, match="ends at byte 0"):
        run_ranks(1, lambda rank, comm: load(index, targets))


def test_all_steps_share_one_stream_per_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's pool has 32 streams, each with separate memory; each step has new threads."""
    made = list[object]()
    cuda = SimpleNamespace(Stream=made.append, device=nullcontext, stream=nullcontext)
    monkeypatch.setattr(torch, "cuda", cuda)
    lent = AsyncGpuCopies(2, torch.device("cuda", 0))
    for _ in range(3):
        with lent.open_stream(), suppress(KeyError), lent.open_stream():
            raise KeyError
    assert len(made) == 2


def test_a_load_without_page_locked_memory_falls_back(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    fail = mock.Mock(side_effect=RuntimeError("CUDA error: out of memory"))
    monkeypatch.setattr(destinations, "_allocate_pinned", fail)
    lent = AsyncGpuCopies(1, torch.device("cuda", 0))
    for nbytes in (1 << 20, 40 << 20):
        lent._allocate(nbytes)[-1] = 1
    assert fail.call_count == 1
    assert caplog.text.count("no page-locked memory for copies to cuda:0") == 1


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("size", [1 << 20, 5 << 20, 10 << 20, 16 << 20])
def test_page_locked_memory_is_not_a_power_of_two(threads: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch locks a power of two, which would be 8 MiB for 4 MiB and a disk's alignment."""
    locked = list[int]()

    def allocate(nbytes: int) -> memoryview:
        locked.append(1 << (nbytes - 1).bit_length())
        return allocate_large(nbytes)

    monkeypatch.setattr(destinations, "_allocate_pinned", allocate)
    lent = AsyncGpuCopies(threads, torch.device("cuda", 0))
    pieces = [lent._allocate(size) for _ in range(2 * threads)]
    assert sum(locked) <= 1.1 * 2 * threads * size + destinations._PINNED_CHUNK
    begins = sorted(find_address(piece) for piece in pieces)
    assert all(low + size <= high for low, high in pairwise(begins))
    assert {begin % 4096 for begin in begins} == {0}
    assert {piece.nbytes for piece in pieces} == {size}


@pytest.mark.parametrize(("gpus", "kind"), [([1, 1], AsyncGpuCopies), ([0, 1], SyncCopies), ([], SyncCopies)])
def test_copies_to_several_gpus_are_synchronous(gpus: list[int], kind: type[SyncCopies]) -> None:
    devices = [torch.device("cpu"), *(torch.device("cuda", gpu) for gpu in gpus)]
    sinks: Any = [SimpleNamespace(buffer=SimpleNamespace(memory=SimpleNamespace(device=each))) for each in devices]
    chosen = choose_device_copies(sinks, 1)
    assert type(chosen) is kind and getattr(chosen, "device", devices[-1]) == devices[-1]


@pytest.mark.parametrize(("kind", "goes_on"), [("cuda", True), ("xpu", False), ("cpu", False)])
def test_only_copies_to_cuda_are_asynchronous(kind: str, goes_on: bool) -> None:
    blocking = list[bool]()
    into: Any = SimpleNamespace(
        device=SimpleNamespace(type=kind), copy_=lambda values, non_blocking: blocking.append(non_blocking)
    )
    destinations._copy(into, torch.zeros(1))
    assert blocking == [goes_on]
