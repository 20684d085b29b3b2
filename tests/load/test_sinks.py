"""Tensors as destinations of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.io import memory
from deepspeed_ucp.load import transfer
from deepspeed_ucp.load.destinations import Buffer, FillPlan, TensorSink
from deepspeed_ucp.model.records import CopyItem
from deepspeed_ucp.plan.wants import Mean, Wants
from tests.plan.planning import make_index
from tests.support.ranks import current_rank, run_ranks


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes()))


def test_a_non_contiguous_tensor_is_filled_in_separate_memory() -> None:
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


@pytest.mark.parametrize("copies", [[[1.5, -0.0, float("nan")], [2.0]], []], ids=["masters", "zero states"])
def test_masters_equal_to_their_copies_and_zero_states_are_filled_in_place(copies: list[list[float]]) -> None:
    made_from = [torch.tensor(copy).bfloat16() for copy in copies]
    before = torch.cat(made_from).float() if copies else torch.zeros(2)
    buffer = Buffer(before.clone(), fill_first=False, copies=made_from)
    assert buffer.try_in_place() and buffer.fill_first and buffer.memory is buffer.tensor
    buffer.memory.fill_(7.0)
    buffer.undo()
    assert raw(buffer.tensor) == raw(before)


@pytest.mark.parametrize(
    ("values", "copies"),
    [
        ([1.5, 2.0], []),
        ([0.0, -0.0], []),
        ([1.5, 2.0], [[1.5]]),
        ([1.5, 2.0], [[1.5, 2.0, 3.0]]),
        ([1.5, 0.0], [[1.5, -0.0]]),
        ([1.5, 1e-9 + 1.0], [[1.5], [1.0 + 2**-6]]),
    ],
    ids=["unknown", "negative zero", "less", "more", "another sign", "trained"],
)
def test_masters_unlike_their_copies_are_not_filled_in_place(values: list[float], copies: list[list[float]]) -> None:
    made_from = [torch.tensor(copy).bfloat16() for copy in copies]
    assert not Buffer(torch.tensor(values), fill_first=False, copies=made_from).try_in_place()


def test_a_tensor_that_shares_memory_with_its_copy_is_not_filled_in_place() -> None:
    """ZeRO 3 has no separate masters if both would have one dtype."""
    tensor = torch.tensor([1.5, 2.0])
    assert not Buffer(tensor, fill_first=False, copies=[tensor.view(-1)]).try_in_place()


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
    free = {"a": 134, "b": 67}
    monkeypatch.setattr(transfer, "identify_host", lambda: "aab"[current_rank()])
    monkeypatch.setattr(transfer, "measure_available", lambda: free["aab"[current_rank()]])

    def decide(_rank: int, comm: Comm) -> bool:
        return transfer.has_memory([Buffer(torch.ones(10), fill_first=False)], 10, comm)

    assert run_ranks(3, decide) == [True] * 3
    free["a"] = 133
    assert run_ranks(3, decide) == [False] * 3
    free.update(a=134, b=66)
    assert run_ranks(3, decide) == [False] * 3


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
    assert live.try_in_place() and not live.is_fresh_host_memory
    for each in (Buffer(torch.ones(6), fill_first=False), Buffer(torch.ones(6), fill_first=False, in_file=True)):
        each.use_separate()
        assert each.is_fresh_host_memory and each.memory is not each.tensor
