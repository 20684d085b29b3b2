"""Files without atoms: client state, and entries of optimizer_state.pt for upstream's loaders."""

from __future__ import annotations

import argparse
import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert.states import MODEL_STATES_ZERO3, OPTIMIZER_STATE, write_states
from deepspeed_ucp.errors import CheckpointError, StorageError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.universal.index import STATE_FILE
from deepspeed_ucp.torchsave.torchfile import read_header
from tests.support.damage import flip
from tests.synth import Layer, Model, Param, Run, Topology, build_files, random_state, write_checkpoint, write_files
from tests.torchsave.inputs import assert_same

PARAMS = (
    Param("a", (3, 5)),
    Param("b", (7,), group=1),
    Param("big", (300, 300)),
    Param("frozen", (4,), frozen=True),
)
MODEL = Model(PARAMS, buffers={"running": torch.arange(3.0)})
PIPELINE = Model((Param("0.w", (4, 6)), Param("1.w", (6, 4)), Param("1.b", (6,), group=1)), layers=(Layer(), Layer()))
GROUPS = (
    {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "foreach": None},
    {"lr": 2e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.0, "amsgrad": False, "foreach": None},
)
"""Hyper-parameters that differ between the groups."""

TOPOLOGIES = [
    Topology(0),
    Topology(0, 2, "fp16", "fused"),
    Topology(0, 1, "fp16", "unfused"),
    Topology(0, 2, "bf16", "bf16"),
    Topology(1, 2, "bf16", "bf16"),
    Topology(1, 2),
    Topology(1, 2, "bf16", elastic=True),
    Topology(2, 3, "fp16"),
    Topology(3, 2),
    Topology(3, 2, "bf16", sub_group_size=20),
]


@dataclass
class Progress:
    """An object of the training script."""

    epoch: int
    best: dict


def make_client():
    rng, best = torch.get_rng_state()[:100], {"loss": np.float64(0.25), "at": (1, 2)}
    ring = [1]
    ring.append(ring)
    return {
        "iteration": 7,
        "args": argparse.Namespace(lr=1e-3, betas=(0.9, 0.99), rank=0, tags={"x", "y"}),
        "progress": Progress(3, best),
        "best": best,
        "rng": {"torch": rng, "again": rng, "numpy": np.random.RandomState(0).get_state()},
        "ema": torch.nn.Parameter(torch.arange(6.0).view(2, 3)),
        "view": torch.arange(10)[2:5],
        "ring": ring,
        "classes": [Progress, torch.float16, torch.Size((2,)), 2**90, b"\x00\xff"],
    }


def write(folder, topology, model=MODEL, **run):
    run = Run(client_state=make_client(), lr_scheduler={"last_epoch": 3, "_last_lr": [0.1]}, skipped_steps=1, **run)
    state = random_state(model, 0, precision=topology.precision, topology=topology)
    state = replace(state, groups=GROUPS[: len(model.groups)])
    return write_checkpoint(folder, model, state, topology, run=run)


def open_index(path, model=MODEL):
    return open_checkpoint(str(path), Comm(), Naming(model.live_groups))


def convert(tmp_path, topology, model=MODEL, **run):
    """Convert; return the index, the contents of the state files, and the output folder."""
    index = open_index(write(tmp_path / "src", topology, model, **run), model)
    out = tmp_path / "out"
    out.mkdir(parents=True)
    return SimpleNamespace(
        topology=topology,
        index=index,
        files=write_states(index, str(out)),
        out=out,
        old=torch.load(index.state_file, weights_only=False),
        new=torch.load(out / STATE_FILE, weights_only=False),
        optimizer=torch.load(out / OPTIMIZER_STATE, weights_only=False),
    )


def rewrite_optimizer(path, folder):
    write_states(open_index(path), str(folder))
    return torch.load(folder / OPTIMIZER_STATE, weights_only=False)


@pytest.fixture(scope="module", params=TOPOLOGIES, ids=lambda t: t.label)
def found(request, tmp_path_factory):
    """The conversion of a checkpoint of each kind."""
    return convert(tmp_path_factory.mktemp("states"), request.param, clip_grad=0.75)


def test_the_client_state_is_converted(found):
    assert list(found.new) == list(found.old)
    emptied = {"frozen_param_fragments": None, "module": {}, "optimizer": None}
    assert {key: found.new[key] for key in emptied} == emptied
    old, new = ({key: value for key, value in each.items() if key not in emptied} for each in (found.old, found.new))
    assert_same(old, new)
    assert found.new["rng"]["torch"] is found.new["rng"]["again"]
    assert found.new["progress"].best is found.new["best"]


def test_state_files_are_listed_with_sizes_and_checksums(found):
    assert [*found.files] == [STATE_FILE, MODEL_STATES_ZERO3, OPTIMIZER_STATE]
    for name, file in found.files.items():
        header = read_header(str(found.out / name))
        assert (file.size, file.crc) == (header.size, header.header_crc)
        assert file.size < 60_000, "the model's tensors (360 kB) stay out"
    assert os.path.samefile(found.out / STATE_FILE, found.out / MODEL_STATES_ZERO3)
    first = [(found.out / name).read_bytes() for name in found.files]
    write_states(found.index, str(found.out))  # like after a killed conversion
    assert [(found.out / name).read_bytes() for name in found.files] == first


def test_optimizer_state_pt_has_groups_and_scalars(found):
    hyper = ({}, {}) if found.topology.keeps_lean_states else GROUPS  # elastic checkpoints have no hyper-parameters
    expected = [{**group, "params": [i]} for i, group in enumerate(hyper)]
    written = found.optimizer
    assert written["param_groups"] == expected
    assert written["optimizer_state_dict"]["param_groups"] == expected
    step = written["optimizer_state_dict"]["state"][0]["step"]
    assert torch.is_tensor(step)
    assert (step.item(), step.dtype, step.shape) == (3.0, torch.float32, ())
    assert written["ds_version"] == found.old["ds_version"]


def fake(**fields):
    """Make a live optimizer before a load."""
    return SimpleNamespace(
        loss_scaler="live", dynamic_loss_scale="live", overflow="live", clip_grad=0.5, compute_grad_norm=True, **fields
    )


def test_upstreams_loaders_accept_optimizer_state_pt(found):
    """The test runs upstream's code that reads the top level of the file."""
    written, topology = found.optimizer, found.topology
    zero12, zero3 = fake(partition_gradients=False), fake()
    DeepSpeedZeroOptimizer._load_global_state(zero12, written)
    DeepSpeedZeroOptimizer_Stage3._load_global_state_stage3(zero3, written)
    assert zero12.clip_grad == (0.5 if topology.kind in ("raw", "unfused") or topology.stage == 3 else 0.75)
    for live in (zero12, zero3):
        if topology.kind in ("raw", "bf16"):  # without a saved scaler
            assert live.loss_scaler == "live"
        elif topology.precision == "fp16":
            assert type(live.loss_scaler) is DynamicLossScaler
            assert live.loss_scaler.cur_scale == 2**16
            assert live.dynamic_loss_scale is True
        else:
            assert type(live.loss_scaler) is LossScaler
            assert live.dynamic_loss_scale is False


@pytest.mark.parametrize("wrapper", ["fused", "unfused"])
def test_saved_fields_of_a_loss_scaler_become_deepspeeds_object(wrapper, tmp_path):
    config = Topology(0, 1, "fp16", wrapper).ds_config()
    config["fp16"] |= {"hysteresis": 4, "min_loss_scale": 8, "consecutive_hysteresis": True}
    written = convert(tmp_path / "fp16", Topology(0, 1, "fp16", wrapper), ds_config=config).optimizer
    fields = vars(written["loss_scaler"])
    real = vars(DynamicLossScaler(2.0**16, 1000, min_scale=8, delayed_shift=4, consecutive_hysteresis=True))
    assert {**fields, "cur_iter": 0, "last_overflow_iter": -1} == {**real, "cur_iter": 0, "last_overflow_iter": -1}
    assert fields["cur_iter"] == 3
    static = convert(tmp_path / "bf16", Topology(0, 1, "bf16", "unfused")).optimizer["loss_scaler"]
    assert vars(static) == vars(LossScaler(1.0))


@pytest.mark.parametrize(
    "topology", [Topology(1, 2, pp=2), Topology(0, 2, "bf16", "bf16", pp=2)], ids=lambda t: t.label
)
def test_state_files_of_a_pipeline_are_converted(topology, tmp_path):
    found = convert(tmp_path, topology, PIPELINE)
    assert found.new["module"] is None
    assert found.old["mp_world_size"] == 2
    assert_same({**found.old, "optimizer": None, "mp_world_size": 1}, found.new)
    assert [group["lr"] for group in found.optimizer["param_groups"]] == [1e-3, 2e-3]
    assert found.optimizer["optimizer_state_dict"]["state"][0]["step"].item() == 3


@pytest.mark.parametrize("topology", [Topology(0), Topology(1, 2), Topology(3, 2)], ids=lambda t: t.label)
def test_extra_states_of_modules_are_converted(topology, tmp_path):
    """`torch.nn.Module.get_extra_state` may return any object."""
    extra = {"layer._extra_state": {"amax": torch.arange(4.0), "recipe": Progress(1, {})}, "_extra_state": None}
    run = Run(nest=lambda module: {**module, **extra})
    path = write_checkpoint(tmp_path / "src", MODEL, random_state(MODEL, 0, precision="fp32"), topology, run=run)
    write_states(open_index(path), str(tmp_path))
    assert_same(extra, torch.load(tmp_path / STATE_FILE, weights_only=False)["module"])


def test_an_atomic_source_gives_equal_state_files(found, tmp_path):
    index = replace(
        found.index,
        state_file=str(found.out / STATE_FILE),
        topology=replace(found.index.topology, wrapper="atomic"),
    )
    (tmp_path / "again").mkdir()
    assert write_states(index, str(tmp_path / "again")) == found.files
    for name in found.files:
        assert (tmp_path / "again" / name).read_bytes() == (found.out / name).read_bytes()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    ("scalars", "hyper", "topology"),
    [
        ({"step": 5}, {}, Topology(3, 2)),
        ({}, {"step": 9}, Topology(2, 2)),  # FusedAdam of older releases
        ({"step": 5}, {"schedule": Progress(1, {})}, Topology(1)),
    ],
    ids=["number", "in the groups", "objects"],
)
def test_steps_and_hyper_parameters_of_all_forms_are_converted(scalars, hyper, topology, legacy, tmp_path):
    """Objects in the source's groups are copied."""
    state = random_state(MODEL, 0, step=None)
    groups = tuple({**group, **hyper} for group in GROUPS)
    state = type(state)(state.atoms, dict.fromkeys(("a", "b", "big"), scalars) if scalars else {}, groups)
    path = write_checkpoint(tmp_path / "src", MODEL, state, topology, legacy=legacy)
    written = rewrite_optimizer(path, tmp_path)
    assert written["optimizer_state_dict"]["state"] == {0: {"step": scalars.get("step", hyper.get("step"))}}
    assert [{key: group[key] for key in hyper} for group in written["param_groups"]] == [hyper, hyper]


def test_state_files_are_copied_if_hard_links_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    found = convert(tmp_path, Topology(3, 2))
    assert not os.path.samefile(found.out / STATE_FILE, found.out / MODEL_STATES_ZERO3)
    assert (found.out / STATE_FILE).read_bytes() == (found.out / MODEL_STATES_ZERO3).read_bytes()


def test_damaged_client_tensors_and_a_full_disk_are_errors(tmp_path, monkeypatch):
    index = open_index(write(tmp_path / "src", Topology(1, 2)))
    with monkeypatch.context() as patch:
        patch.setattr(
            "deepspeed_ucp.torchsave.zipframe.RecordWriter.write_all", Mock(side_effect=OSError(errno.ENOSPC, "full"))
        )
        with pytest.raises(StorageError, match="disk full"):
            write_states(index, str(tmp_path))
    records = (index.records[number] for number in index.client_records)
    record = next(record for record in records if record.nbytes == 24)
    flip(Path(index.state_file), record.offset)
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt: data/\d+ has CRC32"):
        write_states(index, str(tmp_path))


def test_a_source_without_optimizer_states_is_converted(tmp_path):
    """It is of stage 0, before the first step, by a release that wrote no version."""
    files = build_files(MODEL, random_state(MODEL, 0, states=(), step=None), Topology(0))
    for content in files.values():
        del content["ds_version"]
    write_files(tmp_path / "src", files)
    written = rewrite_optimizer(tmp_path / "src", tmp_path)
    assert written["optimizer_state_dict"]["state"] == {0: {}}
    assert written["ds_version"]
