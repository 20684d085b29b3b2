"""Exports for torch.distributed.checkpoint: FSDP2 and torchtitan load them and resume."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, ConfigError
from deepspeed_ucp.examine.diff import diff_checkpoints
from deepspeed_ucp.export.chunks import Chunk, Planner, cut_chunks
from deepspeed_ucp.export.dcp import export_dcp, make_scaler
from deepspeed_ucp.export.statedict import LAYOUTS, complete_group
from deepspeed_ucp.export.tensors import ExportOptions
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.foreign.names import OPTIMIZER_FOLDER, SCALER
from deepspeed_ucp.model.storage import MASTER, AtomKey
from tests.support import fsdp_run
from tests.support.exports import MODEL, TOPOLOGIES, check_same, open_model, read_all, save_trained
from tests.support.ranks import run_ranks
from tests.support.reshard import examples
from tests.support.reshard3d import VOCAB, draw_state, make_plain, open_run, rules_of
from tests.synth import Model, Param, Run, State, Topology, random_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OPTIONS = ExportOptions(workers=3)


# -- content ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "nodes"), [*zip(TOPOLOGIES, (1, 1, 2, 1, 2, 3), strict=True)])
def test_a_dcp_export_has_the_weights_and_optimizer_state_of_the_run(
    tmp_path: Path, topology: Topology, nodes: int
) -> None:
    index = open_model(tmp_path, topology)
    run_ranks(nodes, lambda rank, comm: export_dcp(index, str(tmp_path / "out"), comm, OPTIONS))
    workers = {path.name.split("_")[2] for path in (tmp_path / "out").glob("__*")}
    assert workers <= {str(number) for number in range(3 * nodes)}
    tree, state = read_all(tmp_path / "out"), random_state(MODEL, 0, precision=topology.precision)
    weights = {name: states["fp32"] for name, states in state.atoms.items()} | dict(MODEL.buffers)
    check_same(tree["model"], {**weights, "head.weight": weights["a.weight"]})
    trained = [name for name in state.atoms if name != "frozen"]
    assert set(tree["optim"]["state"]) == set(trained)
    for name in trained:
        held = dict(state.atoms[name], **state.scalars[name])
        check_same(tree["optim"]["state"][name], {key: value for key, value in held.items() if key != "fp32"})
    groups = tree["optim"]["param_groups"]
    assert [set(group["params"]) for group in groups] == [{"a.weight", "scalar"}, {"b.weight"}]
    assert [group["lr"] for group in groups] == [1e-3, 5e-4]
    assert [group["betas"] for group in groups] == [(0.9, 0.999)] * 2


def test_a_dcp_export_of_a_tensor_parallel_run_has_whole_tensors(tmp_path: Path) -> None:
    held = draw_state(make_plain(("word", "norm", "row", "qkv")), Topology(1, 2, tp=2))
    index = open_run(held, tmp_path / "in")
    export_dcp(index, str(tmp_path / "out"), options=OPTIONS, rules=rules_of(held))
    tree = read_all(tmp_path / "out")
    for name, states in held.state.atoms.items():
        rows = VOCAB if name.endswith("word") else len(states["fp32"])
        found = {"fp32": tree["model"][name], **tree["optim"]["state"][name]}
        check_same(found, {key: value[:rows] for key, value in states.items()} | {"step": torch.tensor(3.0)})


def test_a_dcp_export_of_only_weights_may_have_16_bits(tmp_path: Path) -> None:
    index = open_model(tmp_path, Topology(3, 2))
    options = ExportOptions(dtype="bfloat16", tied="drop")
    export_dcp(index, str(tmp_path / "out"), options=options, weights_only=True)
    tree = read_all(tmp_path / "out")
    assert set(tree) == {"model"} and "head.weight" not in tree["model"]
    expected = random_state(MODEL, 0).atoms["b.weight"]["fp32"].bfloat16()
    check_same({"b": tree["model"]["b.weight"]}, {"b": expected})


def test_chunks_of_large_tensors_are_spread_over_files(tmp_path: Path) -> None:
    """Only bytes of tied names are read twice."""
    model = Model((Param("a", (900, 3000)), Param("b", (4,)), Param("c", (900, 3000), alias_of="a")))
    index = open_model(tmp_path, Topology(2, 3), model)
    options = ExportOptions(workers=4, window=12 << 20)
    report = export_dcp(index, str(tmp_path / "out"), options=options, weights_only=True)
    with open(tmp_path / "out" / ".metadata", "rb") as stream:
        metadata = pickle.load(stream)
    assert len(metadata.state_dict_metadata["model.a"].chunks) == 11
    assert len([name for name in report.files if name.endswith(".distcp")]) == 4
    records = {f.record for s in index.atoms[AtomKey("a", MASTER)].shards for f in s.list_fragments(MASTER)}
    assert report.bytes_read == sum(index.records[number].nbytes for number in records) + 900 * 3000 * 4
    a = random_state(model, 0).atoms["a"]["fp32"]
    check_same(read_all(tmp_path / "out")["model"], {"a": a, "c": a, "b": random_state(model, 0).atoms["b"]["fp32"]})


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_bytes_of_a_tied_name_that_change_between_reads_are_refused(
    tmp_path: Path, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second read may be on another rank, and a save may overwrite the file in between."""
    read = Planner._read

    def change(planner: Planner, chunk: Chunk) -> torch.Tensor:
        data = read(planner, chunk)
        if chunk.is_repeated:
            planner.repeated[-1] = replace(planner.repeated[-1], crc=planner.repeated[-1].crc ^ 1)
        return data

    monkeypatch.setattr(Planner, "_read", change)
    index = open_model(tmp_path, Topology(3, 2))
    with pytest.raises(CheckpointError, match="was written to while it was exported"):
        run_ranks(nodes, lambda rank, comm: export_dcp(index, str(tmp_path / "out"), comm, OPTIONS))
    assert not (tmp_path / "out").exists()


@given(shape=st.lists(st.integers(0, 6), max_size=4).map(tuple), most=st.integers(1, 40))
@examples(300)
def test_chunks_cover_a_tensor_once(shape: tuple[int, ...], most: int) -> None:
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    seen = []
    for offsets, sizes in cut_chunks(shape, most):
        block = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert block.shape == sizes and block.size <= max(most, 1)
        seen += block.reshape(-1).tolist()
    assert seen == list(range(numbers.size))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_opens_with_the_values_of_its_source(tmp_path: Path, layout: str) -> None:
    index = open_model(tmp_path, TOPOLOGIES[0])
    export_dcp(index, str(tmp_path / "out"), layout=layout)
    back = open_checkpoint(str(tmp_path / "out"), Comm())
    found = diff_checkpoints(index, back)
    assert found.equal and found.compared >= 3 * len(MODEL.owners)
    assert back.scalars == index.scalars


def test_an_unknown_layout_of_a_dcp_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torchtitan"):
        export_dcp(open_model(tmp_path, Topology(1)), str(tmp_path / "out"), layout="nested")


# -- loads by other libraries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["torch", "flattened"])
def test_set_state_dict_accepts_a_dcp_export(tmp_path: Path, layout: str) -> None:
    """The model is fresh, and the keys equal those of get_state_dict."""
    folder = save_trained(tmp_path, Topology(1, 2), layout=layout)
    model, optimizer = fsdp_run.build(seed=1)
    form = StateDictOptions(flatten_optimizer_state_dict=layout == "flattened")
    weights, states = get_state_dict(model, optimizer, options=form)
    tree, found = {"model": weights, "optim": states}, read_all(folder)
    without_rates = {key for key in found["optim"] if not key.endswith(".initial_lr")}  # which only schedulers add
    assert found.keys() == tree.keys() and without_rates == states.keys()
    dcp.load(tree, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"], options=form)
    assert fsdp_run.train(model, optimizer, range(3, 5)) == fsdp_run.train(*fsdp_run.build(), range(5))[3:]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_scheduler_created_before_the_load_has_its_rate(tmp_path: Path, layout: str, scheduled: bool) -> None:
    """Torch's schedulers add initial_lr to the param groups. A load then requires it."""
    folder = save_trained(tmp_path, Topology(1, 2), scheduled=scheduled, layout=layout)
    model, optimizer = fsdp_run.build(seed=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    form = StateDictOptions(flatten_optimizer_state_dict=layout in ("flattened", "torchtitan"))
    folder = folder / OPTIMIZER_FOLDER if layout == "accelerate" else folder
    key = "optim" if layout in ("torch", "flattened") else "optimizer"
    tree = {key: get_optimizer_state_dict(model, optimizer, options=form)}
    dcp.load(tree, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(model, optimizer, tree[key], options=form)
    rates = [rate for group in optimizer.param_groups for rate in (group["initial_lr"], group["lr"])]
    moved = 1e-3 if scheduled else 1
    assert rates == pytest.approx([1e-2, 1e-2 * moved, 3e-3, 3e-3 * moved])
    optimizer.step()
    scheduler.step()


def test_an_export_of_deepspeeds_adam_adds_torchs_defaults(tmp_path: Path) -> None:
    """Its groups lack most of AdamW's hyper-parameters, and its step is a number."""
    model = Model((Param("w", (4, 3)),))
    drawn = random_state(model, 0)
    hyper = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.0, "bias_correction": True}
    state = State(drawn.atoms, {"w": {"step": 3}}, (hyper,))
    export_dcp(open_model(tmp_path, Topology(1, 2), model, state), str(tmp_path / "out"))
    optim = read_all(tmp_path / "out")["optim"]
    check_same({"step": optim["state"]["w"]["step"]}, {"step": torch.tensor(3.0)})
    fresh = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    assert optim["param_groups"] == [{**fresh, **hyper, "initial_lr": 0.01, "params": ["w"]}]


@pytest.mark.parametrize("decoupled", [True, False, None])
def test_weight_decay_of_deepspeeds_adam_follows_its_config(
    decoupled: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is unknown if the script has created the optimizer."""
    params = {"adam_w_mode": decoupled, "weight_decay": 0.1}
    optimizer = {} if decoupled is None else {"optimizer": {"type": "Adam", "params": params}}
    run = Run(ds_config={**Topology(1, 2).ds_config(), **optimizer})
    export_dcp(open_model(tmp_path, Topology(1, 2), run=run), str(tmp_path / "out"), options=OPTIONS)
    groups = read_all(tmp_path / "out")["optim"]["param_groups"]
    assert [group["decoupled_weight_decay"] for group in groups] == [decoupled is not False] * 2
    assert ("does not record whether its Adam decouples" in caplog.text) is (decoupled is None)


def test_other_optimizers_keep_their_hyper_parameters() -> None:
    amsgrad = dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
    for state in ("momentum_buffer", "exp_avg"):
        assert complete_group({"lr": 1}, {"w": {state: 0}}, ["w"]) == {"lr": 1, "initial_lr": 1}
    assert complete_group({"lr": 1}, {"w": amsgrad}, ["w"])["amsgrad"] is True


def test_an_export_for_accelerate_has_the_loss_scaler(tmp_path: Path) -> None:
    index = open_model(tmp_path, Topology(2, 2, "fp16"))
    export_dcp(index, str(tmp_path / "out"), options=OPTIONS, layout="accelerate")
    assert torch.load(tmp_path / "out" / SCALER, weights_only=True) == make_scaler(index.scaler)
