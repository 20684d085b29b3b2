"""Loads into swap files: new files replace all of DeepSpeed's or none."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import CheckpointError, DiskFullError, UcpError
from deepspeed_ucp.load import transfer
from tests.support.damage import flip_bit
from tests.support.direct import FakeEngine, run_load
from tests.support.ranks import run_ranks
from tests.support.reshard import SENTINEL, make_targets, open_for
from tests.support.swapped import ALIGNED, MODEL, SwappedTarget
from tests.synth import Model, Topology, random_state, write_checkpoint


def write(folder: Path, topology: Topology | None = None, model: Model = MODEL) -> Path:
    topology = topology or Topology(1, 3)
    state = random_state(model, 0, precision=topology.precision)
    return write_checkpoint(folder, model, state, topology)


def check_file(data: bytes, tensor: torch.Tensor) -> None:
    """Check that a file holds a tensor, followed by zeros."""
    expected = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    assert data == expected + bytes(-len(expected) % (ALIGNED * tensor.element_size()))


FEWER = Model(tuple(replace(each, shape=(each.shape[0] - 2, *each.shape[1:])) for each in MODEL.params))
SOME = Model(tuple(param for param in MODEL.params if param.name in ("a", "small")))
RESIZED = {"resize": [{"match": "b", "new": "mean"}, {"match": ".*"}]}


@pytest.mark.parametrize("saved", [MODEL, FEWER], ids=["alike", "fewer rows"])
@pytest.mark.parametrize("steps", [0, 4], ids=["fresh", "trained"])
@pytest.mark.parametrize("target", [Topology(3, 1), Topology(3, 2, "bf16", sub_group_size=40)], ids=lambda t: t.label)
def test_swap_files_hold_the_same_bytes_as_memory(target: Topology, steps: int, saved: Model, tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 3, target.precision), saved)
    config = UniversalConfig(threads=1, patterns=RESIZED)
    plain = make_targets(MODEL, target)
    swapped = [SwappedTarget(tmp_path / "swap", target, rank) for rank in range(target.dp)]
    for held in (plain, swapped):
        run_ranks(
            target.dp,
            lambda rank, comm, held=held: run_load(
                open_for(path, held[rank], comm), held[rank], comm, config, engine=FakeEngine(held[rank], steps)
            ),
        )
    for one, other in zip(plain, swapped, strict=True):
        files, names = other.look(), set()
        for number, (flat, live) in enumerate(zip(one.flats, other.flats, strict=True)):
            states = one.wrapped.state[flat.tensor]
            assert other.wrapped.state[live.tensor].keys() == states.keys()
            if live.swap is None:
                assert live.data.equal(flat.data)
                continue
            for prefix, tensor in (("", flat.data), *((f"{key}-", states[key]) for key in ("exp_avg", "exp_avg_sq"))):
                names.add(name := f"{prefix}{number}_9.tensor.swp")
                check_file(files[name], tensor)
            assert float(other.wrapped.state[live.tensor]["step"]) == float(states["step"])
        check_file(files["frozen_param.tensor.swp"], one.extras()[0].data)
        assert files.keys() == {*names, "frozen_param.tensor.swp"}
        other.discard()
        assert [each.name for each in (tmp_path / "swap").iterdir() if each.suffix == ".ucp"] == [
            f"rank{rank}.ucp" for rank in range(other.rank + 1, target.dp)
        ]


def test_a_load_of_weights_keeps_swapped_states(tmp_path: Path) -> None:
    target = SwappedTarget(tmp_path / "swap", Topology(3))
    states = target.folder / "exp_avg-0_9.tensor.swp"
    states.write_bytes(b"as it was")
    path = write(tmp_path)
    run_load(open_for(path, target), target, load_optimizer_states=False)
    assert states.read_bytes() == b"as it was"
    assert target.look()["0_9.tensor.swp"][:4] != np.float32(SENTINEL).tobytes()


def test_parameters_that_the_checkpoint_lacks_keep_their_values(tmp_path: Path) -> None:
    path, state = write(tmp_path, model=SOME), random_state(SOME, 0)
    target = SwappedTarget(tmp_path / "swap", Topology(3))
    before = target.look()
    run_load(open_for(path, target), target, load_module_strict=False)
    after = np.frombuffer(target.look()["0_9.tensor.swp"], np.float32)
    assert torch.from_numpy(after[:91].copy()).equal(state.atoms["a"]["fp32"].view(-1))
    assert (after[91 : 91 + 90] == SENTINEL).all()
    assert target.look()["frozen_param.tensor.swp"] == before["frozen_param.tensor.swp"]


def test_a_truncated_swap_file_is_refused(tmp_path: Path) -> None:
    path, target = write(tmp_path, model=SOME), SwappedTarget(tmp_path / "swap", Topology(3))
    (target.folder / "0_9.tensor.swp").write_bytes(bytes(100))
    with pytest.raises(UcpError, match=r"0_9.tensor.swp: has 100 bytes, 724 are expected. The swap file is damaged"):
        run_load(open_for(path, target), target, load_module_strict=False)


def test_damage_leaves_all_swap_files_unchanged(tmp_path: Path) -> None:
    path, target = write(tmp_path), SwappedTarget(tmp_path / "swap", Topology(3))
    before, index = target.look(), open_for(path, target)
    flip_bit(index, "b", "exp_avg_sq")
    with pytest.raises(CheckpointError, match="the file is damaged. Nothing was changed"):
        run_load(index, target)
    target.discard()
    assert target.look() == before
    assert not target.wrapped.state
    assert [each.name for each in (tmp_path / "swap").iterdir()] == ["rank0"]


def test_a_full_disk_is_an_error_before_swap_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = write(tmp_path), SwappedTarget(tmp_path / "swap", Topology(3))
    before = target.look()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=full))
    with pytest.raises(DiskFullError, match=r"rank0.ucp/.*: disk full.*Make room"):
        run_load(open_for(path, target), target)
    assert target.look() == before


def test_swap_files_of_a_killed_load_are_removed(tmp_path: Path) -> None:
    path, target = write(tmp_path), SwappedTarget(tmp_path / "swap", Topology(3))
    left = tmp_path / "swap" / "rank0.ucp"
    left.mkdir()
    (left / "0_9.tensor.swp").write_bytes(b"half")
    (left / "other").write_bytes(b"")
    run_load(open_for(path, target), target)
    assert list(left.iterdir()) == []


def test_an_error_in_the_swap_of_files_blocks_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = write(tmp_path), SwappedTarget(tmp_path / "swap", Topology(3))
    replace, done = os.replace, []

    def fail(old: str, new: str) -> None:
        if done:
            raise OSError(errno.EIO, os.strerror(errno.EIO), new)
        done.append(new)
        replace(old, new)

    monkeypatch.setattr(os, "replace", fail)
    engine = FakeEngine(target)
    with pytest.raises(Exception, match=r"tensor.swp: .*\(EIO\).*must not be used"):
        run_load(open_for(path, target), target, engine=engine)
    assert find_state(engine).broken


def test_swapped_buffers_do_not_count_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)

    def read_again(left: int) -> int:
        target = SwappedTarget(tmp_path / f"swap{left}", Topology(3))
        in_memory = [flat.data for flat in target.flats if flat.swap is None]
        assert in_memory
        for data in in_memory:
            data.copy_(torch.arange(1, data.numel() + 1))  # cannot be recomputed
        monkeypatch.setattr(transfer, "measure_available", lambda: (256 << 20) * 4 // 3 + left)
        return run_load(open_for(path, target), target, engine=FakeEngine(target, 2))[1].bytes_again

    assert read_again(200) == 0
    assert read_again(0) > 0
