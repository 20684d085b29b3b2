"""Incomplete, mixed or unsupported checkpoints: the error names the file and the contradiction."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, MismatchError, UcpError, UnsupportedError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed import gather as gathering
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.deepspeed.reading import read_file
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import MASTER
from deepspeed_ucp.stream.duplicates import check_samples
from tests.formats.saves import (
    PIPE,
    PLAIN,
    STATES,
    WORD,
    Change,
    Files,
    assign,
    check_refused,
    edit,
    find_states,
    make_files,
    open_files,
    shard,
)
from tests.support.ranks import World
from tests.synth import Layer, Model, Param, Run, Topology, random_state, write_checkpoint, write_files

MODEL = Model(
    (Param("a", (9, 5)), Param("frozen", (3,), frozen=True), Param("b", (17,), group=1)), {"n": torch.arange(3)}
)
LARGER = Model((Param("a", (9, 6)), *MODEL.params[1:]))
LESSER = Model(tuple(param for param in PLAIN.params if param.name != "a.row"), PLAIN.buffers)
TWINS = Model(
    (
        Param("tied_modules.one.col", (4, 3), tied=True),
        Param("tied_modules.two.col", (4, 3), tied=True),
        Param("2.row", (3, 4)),
    ),
    {},
    (Layer("one"), Layer("two"), Layer(), Layer("one"), Layer("two")),
)
LAYERS = Model(tuple(Param(f"{i}.col", (4, 3)) for i in range(4)), {}, (Layer(),) * 4)
UNEVEN = Model((Param("0.a", (4, 3)), Param("1.b", (5,)), Param("2.c", (2, 2)), Param("3.d", (7,))), {}, LAYERS.layers)
EQUAL = tuple(Param(f"{i}.a", (4, 3)) for i in range(1, 4))
EMBED = Param(WORD, (4, 3), tied=True)
SECOND, ZERO3_STATES = "mp_rank_01_model_states.pt", "zero_pp_rank_2_mp_rank_00_model_states.pt"


def open_live(folder: Path, files: Files, model: Model = MODEL) -> AtomicIndex:
    """Open a stage-0 save with the names of a live engine's groups."""
    return open_files(folder, files, Naming(model.live_groups))


def drop(*parts: str) -> Change:
    return lambda files: {name: each for name, each in files.items() if not any(part in name for part in parts)}


def mix(end: str, model: Model, topology: Topology, seed: int = 0, **other: Any) -> Change:
    """Replace files, by the end of their names, with files of another checkpoint."""
    found = make_files(model, topology, seed, **other)
    return lambda files: {**files, **{name: each for name, each in found.items() if name.endswith(end)}}


def set_rate(content: Any) -> None:
    for group in find_states(content)["param_groups"]:
        group["lr"] = 0.5


def narrow(content: Any) -> None:
    states = find_states(content)["state"][0]
    states["exp_avg"] = states["exp_avg"].bfloat16()


def add_buffer(content: Any) -> None:
    state = content["optimizer_state_dict"]
    next(value for key, value in state.items() if "fp32" in key).append(torch.zeros(0))


def chain(*changes: Change) -> Change:
    def change(files: Files) -> Files:
        for each in changes:
            files = each(files)
        return files

    return change


ZERO1, BF16, ZERO3 = Topology(1, 3), Topology(1, 3, "bf16", "bf16"), Topology(3, 3)
FP16, FP16_PIPED = Topology(2, 3, "fp16"), Topology(1, 2, "fp16", pp=2)
ZERO0_FP16 = [Topology(0, 1, "fp16", wrapper) for wrapper in ("fused", "unfused")]
PIPED, FLAT, SHARDED = Topology(1, 2, "bf16", tp=2, pp=2), Topology(2, 2, "bf16", tp=2), Topology(3, 2, "bf16", tp=2)
KINDS = [(PIPE, PIPED), (PLAIN, FLAT), (PLAIN, SHARDED), (PLAIN, Topology(0, 1, tp=2))]
OLDER = Run(parallel_dimensions=False)

LOST_STATE = r"a \(exp_avg, shape \(9, 5\)\): elements \[\d+, \d+\) are missing; the next fragment is in .*rank_2_"
OTHER_STEP = r"has step (3|4)\.0, other .*(3|4)\.0.*another step"
OTHER_RATE = r"rank_1_.*groups differs from .*group 0: lr 0.5 ≠ 0.001"
OTHER_MODEL = r"rank_1_.*(holds other parts|(sub-group|partition) 0 has \d+ elements, \d+ are expected)"
OTHER_TP_RATE = r"_{0-1}_mp_rank_01_optim_states.pt \(2 files\): groups differs from .*rank_00.*group 0: lr 0.5 ≠ 0.001"
OTHER_STAGE = r"_{{0-1}}_mp_rank_01_optim_states.pt \(2 files\): {} differs from .*mp_rank_00"
TWO_SAVES = "holds the files of two saves|do not belong together"
NESTED = f"{STATES}: its module states are nested, and these have ambiguous names: language_model.w, .*such as"
LENGTHS = f"{STATES}: its contents have a form that is not supported .* fp32 weights, and optimizer states of"

REFUSED: list[tuple[str, Model, Topology, Change, str]] = [
    # files that are missing
    ("shards", MODEL, Topology(2, 5), drop(shard(1), shard(3)),
     r"zero_pp_rank_\{1,3\}_mp_rank_00_optim_states.pt \(2 files\) is missing; .*\"also\", --also.*another tag"),
    ("state-zero1", MODEL, ZERO1, edit(shard(1), lambda c: find_states(c)["state"][0].pop("exp_avg")), LOST_STATE),
    ("state-zero3", MODEL, ZERO3, edit(shard(1), lambda c: find_states(c)["state"][0].pop("exp_avg")), LOST_STATE),
    ("frozen", MODEL, ZERO3, edit(ZERO3_STATES, lambda c: c["frozen_param_fragments"].pop("frozen")),
     r"frozen \(module, shape \(3,\)\): the shape has 3 elements, the fragments hold 2"),
    ("mp-ranks", MODEL, Topology(1, 2), assign(STATES, mp_world_size=2),
     f"{SECOND} is missing; .*by 2 model-parallel x 2 data-parallel ranks"),
    ("no-layers", MODEL, Topology(1, 2), assign(STATES, module=None),
     "a pipeline's model states without any layer_"),
    ("layer", PIPE, PIPED, drop("layer_02"), "layer_02-model_00-model_states.pt missing; .*have parameters"),
    ("tp-state", PLAIN, FLAT, edit("mp_rank_01_optim", lambda c: find_states(c)["state"][0].pop("exp_avg")),
     r"holds a.col \(exp_avg\), the files of tensor-parallel rank 1 do not"),
    # files of another step, run, configuration or model
    ("step-zero1", MODEL, ZERO1, mix(shard(0), MODEL, ZERO1, 1, step=4), OTHER_STEP),
    ("step-bf16", MODEL, BF16, mix(shard(1), MODEL, BF16, 1, step=4), OTHER_STEP),
    ("step-zero3", MODEL, ZERO3, mix(shard(2), MODEL, ZERO3, 1, step=4), OTHER_STEP),
    *((f"step-mp{mp}", PIPE, PIPED, mix(f"mp_rank_0{mp}_optim_states.pt", PIPE, PIPED, 1, step=4), OTHER_STEP)
      for mp in (1, 2, 3)),
    ("step-nan", MODEL, ZERO1, edit(shard(2), lambda c: find_states(c)["state"][0].update(step=math.nan)),
     r"has step nan, other files of this checkpoint have 3\.0"),
    ("step-stage", PIPE, PIPED, chain(*(mix(f"rank_0{mp}_optim_states.pt", PIPE, PIPED, 1, step=4) for mp in (2, 3))),
     r"mp_rank_02_optim_states.pt: has step 4\.0, other stages of this checkpoint have 3\.0"),
    *((f"{counter}-zero3", MODEL, ZERO3, mix(ZERO3_STATES, MODEL, ZERO3, run=Run(**{counter: 7})),
       f"{ZERO3_STATES}: its step differs .*_(steps|samples) 7 ≠")
      for counter in ("global_steps", "skipped_steps", "global_samples")),
    *((f"step-{topology.label}", model, topology, mix(SECOND, model, topology, run=Run(global_steps=9)),
       r"mp_rank_01_model_states.pt( \(2 files\))?: its step differs .*global_steps 9 ≠") for model, topology in KINDS),
    *((f"rate-{topology.label}", MODEL, topology, edit(shard(1), set_rate), OTHER_RATE)
      for topology in (ZERO1, BF16, ZERO3)),
    ("rate-tp", PLAIN, FLAT, edit("mp_rank_01_optim", set_rate), OTHER_TP_RATE),
    ("clipping", MODEL, FP16, mix(shard(1), MODEL, FP16, run=Run(clip_grad=0.25)),
     f"{shard(1)}: clip_grad differs .*0.25 ≠ 1.0"),
    ("scaler", MODEL, FP16, mix(shard(1), MODEL, FP16, run=Run(global_steps=4)), f"{shard(1)}: scaler differs"),
    ("clipping-stage", PIPE, FP16_PIPED, mix("rank_01_optim_states.pt", PIPE, FP16_PIPED, run=Run(clip_grad=0.25)),
     OTHER_STAGE.format("clip_grad")),
    ("scaler-stage", PIPE, FP16_PIPED, mix("rank_01_optim_states.pt", PIPE, FP16_PIPED, run=Run(global_steps=4)),
     OTHER_STAGE.format("scaler")),
    ("config", MODEL, ZERO1, mix(shard(1), MODEL, Topology(1, 3, round_robin=False, sub_group_size=99)),
     f"{shard(1)}: its ds_config differs"),
    *((f"old-shards-zero{stage}", MODEL, Topology(stage, 2),  # a save in another precision was interrupted
       chain(drop("optim"), mix("optim_states.pt", MODEL, Topology(stage, 2, "bf16"), 1)), "ds_config|are missing")
      for stage in (1, 3)),
    *((f"model-{topology.label}", MODEL, topology, mix(shard(1), LARGER, topology), OTHER_MODEL)
      for topology in (ZERO1, BF16, ZERO3)),
    ("dtype", MODEL, ZERO1, edit(shard(1), narrow),
     r"exp_avg\) is bfloat16 of shape .*; other files hold it as float32"),
    ("dtype-tp", PLAIN, FLAT, edit("mp_rank_01_optim", narrow),
     r"exp_avg\) is bfloat16 of shape .*; other files hold it as float32"),
    ("model-tp", PLAIN, FLAT, lambda files: {**files, **drop("rank_00")(make_files(LESSER, FLAT))},
     r"holds a.row \(fp32\), the files of tensor-parallel rank 1 do not"),
    *((f"buffers-{topology.label}", MODEL, topology, edit(shard(1), add_buffer),
       f"{shard(1)}: has 3 flat buffers, the model states list 2") for topology in (ZERO1, BF16, ZERO3)),
    *((f"groups-{topology.label}", MODEL, topology,
       edit("optim", lambda c, value=value: c["optimizer_state_dict"].update(base_optimizer_state=value)),
       "states.pt.*: has 0 flat buffers in its param groups, the model states list 2")
      for topology in (ZERO1, BF16) for value in ({}, None)),
    ("gap", MODEL, ZERO1, edit("optim", lambda c: c["optimizer_state_dict"]["param_alignment_paddings"][0].pop()),
     r"rank_0_.*records the padding behind 0 parameters of group 0, the model states list 1"),
    ("gaps", MODEL, ZERO1, edit("optim", lambda c: c["optimizer_state_dict"]["param_alignment_paddings"].pop()),
     r"rank_0_.*records the padding behind 0 parameters of group 1, the model states list 1"),
    ("world", MODEL, ZERO1, mix(STATES, MODEL, Topology(1, 2)), r"was saved by \(3, 3\) ranks, the model states say 2"),
    ("world-stage", PIPE, Topology(1, 2, pp=2), mix("mp_rank_01_optim_states.pt", PIPE, Topology(1, 3, pp=2)),
     r"was saved by \(3, 3\) ranks, the model states say 2"),
    ("no-world", MODEL, ZERO3, assign("model", dp_world_size=None),
     r"was saved by \(3,\) ranks, the model states say 1"),
    ("optimizer-tp", PLAIN, KINDS[3][1], assign(SECOND, optimizer=None), f"{SECOND}: kind differs from .*None ≠ torch"),
    # more files than one save has
    ("zero3+stage0", MODEL, Topology(3, 2), mix("", MODEL, Topology(0)), TWO_SAVES),
    ("zero3+stage0-bf16", MODEL, Topology(3, 2), mix("", MODEL, Topology(0, 1, "bf16")), TWO_SAVES),
    ("zero3-bf16+zero1", MODEL, Topology(3, 2, "bf16"), mix("", MODEL, Topology(1, 2)), TWO_SAVES),
    ("zero3+bf16", MODEL, Topology(3, 2), mix("", MODEL, Topology(1, 2, "bf16", "bf16")), TWO_SAVES),
    ("layers", PIPE, Topology(1, 1, pp=2, model_axis=True), mix("", PIPE, Topology(1, 1, pp=2)),
     r"two saves \(layer_00-model_states.pt and layer_00-model_00-model_states.pt"),
    ("layers-tp", PIPE, Topology(1, 1, tp=3, pp=2),
     chain(mix("", PIPE, Topology(1, 1, tp=3, pp=2), run=OLDER), drop("model_02"), assign("mp_rank", mp_world_size=5)),
     "saved by 5 model-parallel ranks, its layer files are of 2"),
]  # fmt: skip

UNSUPPORTED: list[tuple[str, Model, Topology, Change, str]] = [
    ("one-name", MODEL, Topology(1, 2), assign(STATES, module={"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}),
     r"two tensors have the name 'a\.b'"),
    ("nested", MODEL, Topology(1, 2), assign(STATES, module={"language_model": {x: torch.ones(1) for x in "wxyz"}}),
     NESTED),
    ("no-shapes", MODEL, ZERO3, assign("model", frozen_param_shapes={}),
     r"zero_pp_rank_.*: no shape for frozen"),
    ("wrapper", MODEL, Topology(0), assign(STATES, optimizer={"secret": 1, "other": 2}),
     r"keys \['other', 'secret'\] .*wrapper that is not covered"),
    ("release", MODEL, Topology(1, 2), edit("optim", lambda c: c["optimizer_state_dict"].pop("param_slice_mappings")),
     "no param_slice_mappings; saved by a DeepSpeed release too old"),
    ("twins", TWINS, Topology(1, 1, "bf16", pp=2), assign("layer_00-model_states.pt", fixed=torch.ones(2)),
     r"layer_00-model_states.pt: holds fixed of a tied module"),
    *((f"masters-{topology.label}", MODEL, topology,
       edit(STATES, lambda c: next(c["optimizer"][k] for k in c["optimizer"] if k.startswith("fp32_groups")).pop()),
       LENGTHS) for topology in ZERO0_FP16),
    *((f"groups-{topology.label}", MODEL, topology,
       edit(STATES, lambda c: c["optimizer"]["optimizer_state_dict"]["param_groups"].pop()), LENGTHS)
      for topology in ZERO0_FP16),
]  # fmt: skip

UNSETTLED: list[tuple[str, Model, Topology, Change, str]] = [
    ("runs", UNEVEN, Topology(0, 1, pp=2, placement=((0, 2), (1, 3))), chain(),
     "no division of the layers into 2 runs fits"),
    ("two-ways", Model((EMBED, *EQUAL), {}, (Layer("embed"), *[Layer()] * 3, Layer("embed", file=False))),
     Topology(0, 1, "fp16", "fused", pp=3, placement=((0, 1), (2,), (3, 4))), chain(),
     "cannot be derived from the sizes of their states"),
]  # fmt: skip
KIND_OF = [(CheckpointError, REFUSED), (UnsupportedError, UNSUPPORTED), (MismatchError, UNSETTLED)]


@pytest.mark.parametrize(
    ("kind", "row"), [pytest.param(kind, row, id=row[0]) for kind, rows in KIND_OF for row in rows]
)
def test_inconsistent_checkpoints_are_refused(
    kind: type[UcpError], row: tuple[str, Model, Topology, Change, str], tmp_path: Path
) -> None:
    _, model, topology, change, text = row
    with pytest.raises(kind, match=text):
        open_live(tmp_path, change(make_files(model, topology)), model)


@pytest.mark.parametrize(
    ("model", "topology"),
    [*KINDS, (PIPE, Topology(1, 1, tp=1, pp=2)), (PIPE, Topology(1, 1, tp=2, pp=2))],
    ids=lambda each: each.label if isinstance(each, Topology) else "",
)
def test_any_missing_file_of_a_further_rank_or_layer_is_named(tmp_path: Path, model: Model, topology: Topology) -> None:
    files = make_files(model, topology)
    for name in files:
        if name.startswith(("layer_01", "layer_04")) or not ("mp_rank_00" in name or name.startswith("layer")):
            with pytest.raises(CheckpointError, match=f"{name}.* missing"):
                open_live(tmp_path / name, {key: each for key, each in files.items() if key != name}, model)


def test_a_copy_of_another_ranks_legacy_file_is_detected_by_its_partitions(tmp_path: Path) -> None:
    write_files(tmp_path, make_files(MODEL, ZERO1), legacy=True)
    shutil.copy(tmp_path / shard(1), tmp_path / shard(2))
    check_refused(tmp_path, f"{shard(2)}: holds other parts of group 0")


@pytest.mark.parametrize(
    "topology",
    [Topology(1, 2), Topology(2, 2, "bf16"), Topology(1, 2, "bf16", "bf16"), Topology(1, 2, "fp16")],
    ids=lambda t: t.label,
)
@pytest.mark.parametrize("end", [shard(0), shard(1), STATES], ids=["first", "second", "model"])
def test_files_of_another_run_are_refused_by_their_values(tmp_path: Path, topology: Topology, end: str) -> None:
    files = make_files(MODEL, topology)
    index = open_live(tmp_path / "whole", files)
    check_samples(index, index.atoms, Comm())
    index = open_live(tmp_path / "mixed", mix(end, MODEL, topology, 1)(files))
    named = "" if end == STATES else f"{end}: "
    with pytest.raises(CheckpointError, match=f"{named}its fp32 weights differ from the model states.*another run"):
        check_samples(index, index.atoms, Comm())


def test_a_few_edited_weights_pass_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = make_files(MODEL, Topology(1, 2))
    index = open_live(tmp_path / "whole", files)
    check_samples(index, index.atoms, Comm())
    assert not caplog.text
    files[STATES]["module"]["a"].detach()[0, 0] += 1
    index = open_live(tmp_path / "edited", files)
    check_samples(index, index.atoms, Comm())
    assert f"{shard(0)}: 1 of " in caplog.text and "differ from the model states (a[0] is " in caplog.text


@pytest.mark.parametrize(
    ("model", "old", "new"),
    [
        (MODEL, Topology(1, 4), Topology(1, 2)),
        (MODEL, Topology(3, 4), Topology(3, 2)),
        (MODEL, Topology(1, 3), Topology(0, 1)),
        (MODEL, Topology(1, 2, "bf16"), Topology(1, 2)),
        (MODEL, Topology(1, 3), Topology(1, 2, "bf16")),
        (PIPE, Topology(1, 2, tp=2, pp=2), Topology(1, 2, tp=1, pp=2, model_axis=True)),
        (PIPE, Topology(1, 3, tp=2, pp=4), Topology(1, 2, tp=2, pp=2)),
        (PIPE, Topology(1, 2, pp=2), Topology(1, 2, tp=2, pp=2)),
    ],
    ids=lambda each: each.label if isinstance(each, Topology) else "",
)
def test_leftovers_of_an_earlier_save_are_ignored_with_a_warning(
    tmp_path: Path, model: Model, old: Topology, new: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    before, files = make_files(model, old, 1), make_files(model, new)
    write_files(tmp_path, before)
    index = open_live(tmp_path, files, model)
    assert "ignoring files of an earlier save" in caplog.text
    if model is MODEL:
        assert all(name in caplog.text for name in before.keys() - files.keys())
    else:
        assert "files of an earlier save" in " ".join(index.unnoticed)
    dp, tp, pp = (getattr(index.topology, name) for name in ("dp", "tp", "pp"))
    assert (dp, tp, pp) == (new.dp if new.stage else 1, new.tp, new.pp)
    assert {Path(file.path).name for file in index.files} <= files.keys()


def test_subfolders_weights_and_extra_states_are_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``get_extra_state`` may return any value."""
    (tmp_path / "sub").mkdir()
    open_live(tmp_path, make_files(MODEL, ZERO3))
    assert not caplog.records
    index = open_live(tmp_path / "weights", {STATES: make_files(MODEL, ZERO1)[STATES]})
    assert {key.state for key in index.atoms} == {"copy", "module"}
    for number, extra in enumerate(({"amax": [1.0]}, b"bytes", None, torch.ones(3))):
        files = make_files(MODEL, Topology(1, 2))
        files[STATES]["module"]["layer._extra_state"] = extra
        assert open_live(tmp_path / str(number), files).find("a", "fp32")


def test_copies_of_a_module_with_a_second_name_are_omitted(tmp_path: Path) -> None:
    index = open_live(tmp_path, make_files(TWINS, Topology(1, 1, "bf16", tp=2, pp=2)), TWINS)
    assert {key.name for key in index.atoms if key.state == "copy"} == {"2.row"}
    assert len(index.instances) == 2


# -- stage 0 saves no names -------------------------------------------------------------------------------------------

STAGE0 = pytest.mark.parametrize(
    "topology", [Topology(0), Topology(0, 1, "bf16"), Topology(0, 1, "bf16", "fused")], ids=lambda t: t.label
)
FROZEN = ("frozen", False)


@STAGE0
@pytest.mark.parametrize(
    ("live", "text"),
    [
        (None, "stage 0 saves no parameter names.*--groups module"),
        ([[("a", True), FROZEN, ("b", True)]], "groups must be made as in the saved run"),
        ([[("b", True)], [("a", True), FROZEN]], "groups must be made as in the saved run"),
        ([[("a", True), FROZEN], [("x", True)]], "not in the checkpoint: x"),
        ([[("a", True)], [("b", True)], [FROZEN]], "groups must be made as in the saved run"),
    ],
    ids=["none", "one group", "other order", "other name", "more groups"],
)
def test_stage0_with_other_groups_is_refused(tmp_path: Path, topology: Topology, live: Any, text: str) -> None:
    with pytest.raises(MismatchError, match=text):
        open_files(tmp_path, make_files(MODEL, topology), Naming(live))


@pytest.mark.parametrize("without", ["", "a"])
@pytest.mark.parametrize("topology", [Topology(0), Topology(0, 1, "bf16")], ids=lambda t: t.label)
def test_stage0_in_another_order_is_refused_by_shapes(tmp_path: Path, topology: Topology, without: str) -> None:
    """One of two parameters may have no states."""
    files = make_files(Model((Param("a", (3, 4)), Param("b", (4, 3)))), topology, without=without)
    with pytest.raises(MismatchError, match="order|groups must be made as in the saved run"):
        open_files(tmp_path, files, Naming([[("b", True), ("a", True)]]))


def test_stage0_in_another_order_is_recognised_by_values(tmp_path: Path) -> None:
    """One file has masters and copies of one run."""
    files = make_files(MODEL, Topology(0, 1, "bf16", "unfused"))
    optimizer = files[STATES]["optimizer"]
    optimizer["fp32_groups"] = [[tensor + 1 for tensor in group] for group in optimizer["fp32_groups"]]
    index = open_live(tmp_path, files)
    with pytest.raises(CheckpointError, match="in another order than the saved run did. Use the saved order") as error:
        check_samples(index, list(index.atoms), Comm())
    assert "verify" not in str(error.value) and "another run" not in str(error.value)


def test_stage0_groups_with_names_need_no_engine(tmp_path: Path) -> None:
    """Names with a wrapper's prefix differ from the model states' names and need an engine."""
    files = make_files(MODEL, Topology(0))
    groups = files[STATES]["optimizer"]["param_groups"]
    groups[0]["param_names"], groups[1]["param_names"] = ["a", "frozen"], ["b"]
    index = open_files(tmp_path, files, Naming(None))
    assert [set(group.names) for group in index.groups][1] == {"b"}
    groups[0]["param_names"] = ["module.a", "module.frozen"]
    with pytest.raises(MismatchError, match=r"name other parameters than the model states: module\.a, module\.frozen"):
        open_files(tmp_path, files, Naming(None))
    assert [group.names for group in open_live(tmp_path, files).groups] == [("a",), ("b",)]
    with pytest.raises(MismatchError, match="groups must be made as in the saved run"):
        open_files(tmp_path, files, Naming([[("a", True)], [("b", True)], [FROZEN]]))


TIED = Model((EMBED, *EQUAL[:2]), {}, (Layer("embed"), Layer(), Layer(), Layer("embed", file=False)))


@pytest.mark.parametrize(
    ("model", "topology"),
    [
        (LAYERS, Topology(0, 1, pp=2)),
        (LAYERS, Topology(0, 1, "fp16", "fused", tp=2, pp=2)),
        (TIED, Topology(0, 1, "fp16", "fused", pp=2, placement=((0, 1), (2, 3)))),
    ],
    ids=lambda each: each.label if isinstance(each, Topology) else "",
)
def test_stages_with_layers_of_equal_sizes_are_identified(tmp_path: Path, model: Model, topology: Topology) -> None:
    """Before the first step there are no states whose shapes could be compared."""
    index = open_live(tmp_path, make_files(model, topology), model)
    assert {key.name for key in index.atoms if key.state == MASTER} == {param.name for param in model.params}
    assert index.instances == ({WORD: 2} if model is TIED else {})


def test_weights_of_a_stage0_pipeline_need_no_names(tmp_path: Path) -> None:
    """Names of live groups that do not match are used only to find tied modules."""
    write_files(tmp_path / "layers", make_files(LAYERS, Topology(0, 1, pp=2)))
    write_files(tmp_path / "tied", make_files(PIPE, Topology(0, 1, tp=2, pp=2)))
    live = [[(param.name, True) for param in PIPE.params[n : n + 1]] for n in range(len(PIPE.params))]
    names = {param.name for param in PIPE.params} | set(PIPE.buffers)
    for folder, groups, text, expected in (
        ("layers", None, "there is no live engine to name them", {param.name for param in LAYERS.params}),
        ("tied", live, "the param groups must be made as in the saved run", names),
    ):
        with pytest.raises(MismatchError, match=text):
            open_checkpoint(str(tmp_path / folder), Comm(), Naming(groups))
        index = open_checkpoint(str(tmp_path / folder), Comm(), Naming(groups, weights_only=True))
        assert {key.name for key in index.atoms} == expected
        assert folder == "tied" or {key.state for key in index.atoms} == {"module"}


def test_errors_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    """Ranks see different files under one name, and only one rank reads a header."""
    for rank, dp in enumerate((2, 4)):
        write_files(tmp_path / str(rank), make_files(MODEL, Topology(1, dp)))
    found = World(2).run(lambda rank, comm: open_checkpoint(str(tmp_path / str(rank)), comm))
    assert all(f"{shard(0)}: is one file on " in str(each) and "different copies" in str(each) for each in found)
    os.truncate(tmp_path / "1" / shard(3), 99)
    found = World(3).run(lambda _, comm: open_checkpoint(str(tmp_path / "1"), comm))
    assert [str(each) for each in found] == [str(found[0])] * 3
    assert isinstance(found[0], CheckpointError) and f"{shard(3)}: no zip directory" in str(found[0])


def test_each_header_is_read_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reads two of six files first; the others are distributed over all four ranks."""
    path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1, 5))
    read: list[tuple[str, int]] = []

    def note(folder: str, name: str) -> Any:
        read.append((name, threading.get_ident()))
        return read_file(folder, name)

    monkeypatch.setattr(gathering, "read_file", note)
    indexes = World(4).run(lambda _, comm: open_checkpoint(str(path), comm))
    assert sorted(name for name, _ in read) == sorted([STATES, *(shard(rank) for rank in range(5))])
    assert max(Counter(rank for _, rank in read).values()) == 3
    assert all(index == indexes[0] for index in indexes)
