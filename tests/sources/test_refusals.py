"""Folders that are not one whole checkpoint, and kinds of checkpoints that are not covered."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.atoms import AtomicIndex
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, MismatchError, UcpError, UnsupportedError
from deepspeed_ucp.sources import gather as gathering
from deepspeed_ucp.sources import open_checkpoint
from deepspeed_ucp.sources.reading import read_file
from deepspeed_ucp.stream.duplicates import check_samples
from tests.support.ranks import run_ranks
from tests.synth import Model, Param, Run, Topology, build_files, random_state, write_checkpoint, write_files

MODEL = Model(
    (Param("a", (9, 5)), Param("frozen", (3,), frozen=True), Param("b", (17,), group=1)), {"n": torch.arange(3)}
)
GROUPS = [[("a", True), ("frozen", False)], [("b", True)]]
STATES = "mp_rank_00_model_states.pt"

Files = dict[str, dict[str, Any]]


def shard(rank: int, prefix: str = "") -> str:
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def zero3_states(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def make_files(topology: Topology, seed: int = 0, run: Run | None = None, **options: Any) -> Files:
    state = random_state(MODEL, seed, precision=topology.precision, **options)
    return build_files(MODEL, state, topology, run or Run())


def open_files(folder: Path, files: Files, legacy: bool = False) -> AtomicIndex:
    write_files(folder, files, legacy=legacy)
    return open_checkpoint(str(folder), Comm(), GROUPS)


def refuse(folder: Path, files: Files, kind: type[UcpError], text: str, legacy: bool = False) -> None:
    with pytest.raises(kind, match=text):
        open_files(folder, files, legacy)


# -- files that are missing -------------------------------------------------------------------------------------------


def test_all_missing_files_are_listed(tmp_path: Path) -> None:
    files = make_files(Topology(2, 5))
    del files[shard(1)], files[shard(3)]
    text = r"zero_pp_rank_\{1,3\}_mp_rank_00_optim_states.pt \(2 files\) is missing; .*\"also\", --also.*another tag"
    refuse(tmp_path, files, CheckpointError, text)


def test_weights_alone_are_a_checkpoint_without_states(tmp_path: Path) -> None:
    index = open_files(tmp_path, {STATES: make_files(Topology(1, 3))[STATES]})
    assert {key.state for key in index.stored.atoms} == {"copy", "module"}


@pytest.mark.parametrize("topology", [Topology(1, 3), Topology(3, 3)], ids=lambda t: t.label)
def test_a_state_that_one_rank_lacks_is_named_with_its_elements(tmp_path: Path, topology: Topology) -> None:
    files = make_files(topology)
    state = files[shard(1)]["optimizer_state_dict"]
    del (state.get("base_optimizer_state") or state["optimizer_state_dict"])["state"][0]["exp_avg"]
    text = r"a \(exp_avg, shape \(9, 5\)\): elements \[\d+, \d+\) are missing; the next fragment is in .*rank_2_"
    refuse(tmp_path, files, CheckpointError, text)


def test_frozen_elements_that_one_rank_lacks_are_named(tmp_path: Path) -> None:
    files = make_files(Topology(3, 3))
    del files[zero3_states(2)]["frozen_param_fragments"]["frozen"]
    text = r"frozen \(module, shape \(3,\)\): the shape has 3 elements, the fragments hold 2"
    refuse(tmp_path, files, CheckpointError, text)


# -- files that belong elsewhere --------------------------------------------------------------------------------------


def test_a_copy_of_another_ranks_legacy_file_is_told_by_its_parts(tmp_path: Path) -> None:
    write_files(tmp_path, make_files(Topology(1, 3)), legacy=True)
    shutil.copy(tmp_path / shard(1), tmp_path / shard(2))
    with pytest.raises(CheckpointError, match=f"{shard(2)}: holds other parts of group 0"):
        open_checkpoint(str(tmp_path), Comm())


def mix(topology: Topology, other: Files, rank: int = 1, **options: Any) -> Files:
    """A checkpoint with one rank's shard of another."""
    files = make_files(topology, **options)
    name = next(name for name in files if name.endswith(shard(rank)))
    return {**files, name: other[next(n for n in other if n.endswith(shard(rank)))]}


TOPOLOGIES = pytest.mark.parametrize(
    "topology", [Topology(1, 3), Topology(1, 3, "bf16", "bf16"), Topology(3, 3)], ids=lambda t: t.label
)


@TOPOLOGIES
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_shard_of_another_step_is_refused(tmp_path: Path, topology: Topology, rank: int) -> None:
    other = make_files(topology, seed=1, step=4)
    refuse(
        tmp_path,
        mix(topology, other, rank),
        CheckpointError,
        r"has step (3|4)\.0, other files .* (3|4)\.0.*another step",
    )


@TOPOLOGIES
def test_a_shard_with_another_learning_rate_is_refused(tmp_path: Path, topology: Topology) -> None:
    other = make_files(topology, states=("momentum_buffer",), step=None)
    for content in other.values():
        state = content.get("optimizer_state_dict") or {}
        base = state.get("base_optimizer_state") or state.get("optimizer_state_dict") or {"param_groups": []}
        base["param_groups"] = [{**group, "lr": 0.5} for group in base["param_groups"]]
    files = mix(topology, other, states=("momentum_buffer",), step=None)
    refuse(tmp_path, files, CheckpointError, r"rank_1_.*groups differs from .*group 0: lr 0.5 ≠ 0.001")


@pytest.mark.parametrize(
    ("run", "text"),
    [(Run(clip_grad=0.25), "clip_grad differs .*0.25 ≠ 1.0"), (Run(global_steps=4), "scaler differs")],
    ids=["clipping", "scaler"],
)
def test_a_shard_of_another_run_is_refused_by_what_differs(tmp_path: Path, run: Run, text: str) -> None:
    topology = Topology(2, 3, "fp16")
    refuse(tmp_path, mix(topology, make_files(topology, run=run)), CheckpointError, f"{shard(1)}: {text}")


def test_a_shard_of_another_configuration_is_refused(tmp_path: Path) -> None:
    topology, other = Topology(1, 3), Topology(1, 3, elastic=False, round_robin=False, sub_group_size=99)
    refuse(tmp_path, mix(topology, make_files(other)), CheckpointError, f"{shard(1)}: its ds_config differs")


@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(3, 2)], ids=lambda t: t.label)
def test_shards_of_another_configuration_than_the_model_states_are_refused(tmp_path: Path, topology: Topology) -> None:
    """An incomplete save beside the whole leftovers of an older one."""
    new, old = make_files(topology), make_files(Topology(topology.stage, 2, "bf16"), seed=1)
    files = {
        **{name: content for name, content in new.items() if "model_states" in name},
        **{n: c for n, c in old.items() if "optim" in n},
    }
    refuse(tmp_path, files, CheckpointError, "ds_config|are missing")


@TOPOLOGIES
def test_a_shard_of_another_model_is_refused(tmp_path: Path, topology: Topology) -> None:
    larger = Model((Param("a", (9, 6)), Param("frozen", (3,), frozen=True), Param("b", (17,), group=1)))
    other = build_files(larger, random_state(larger, 0, precision=topology.precision), topology)
    text = r"rank_1_.*(holds other parts|(sub-group|partition) 0 has \d+ elements, \d+ are expected)"
    refuse(tmp_path, mix(topology, other), CheckpointError, text)


def test_shards_of_a_larger_world_with_a_smaller_worlds_model_are_refused(tmp_path: Path) -> None:
    files = {**make_files(Topology(1, 3)), STATES: make_files(Topology(1, 2))[STATES]}
    refuse(tmp_path, files, CheckpointError, r"was saved by \(3, 3\) ranks, the model states say 2")


@pytest.mark.parametrize("change", ["global_steps", "skipped_steps", "global_samples"])
def test_zero3_model_states_of_another_step_are_refused(tmp_path: Path, change: str) -> None:
    other = make_files(Topology(3, 3), run=Run(**{change: 7}))
    files = {**make_files(Topology(3, 3)), zero3_states(2): other[zero3_states(2)]}
    refuse(tmp_path, files, CheckpointError, f"{zero3_states(2)}: its step differs .*_(steps|samples) 7 ≠")


@pytest.mark.parametrize(
    "topology",
    [Topology(1, 2), Topology(2, 2, "bf16"), Topology(1, 2, "bf16", "bf16"), Topology(1, 2, "fp16")],
    ids=lambda t: t.label,
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_of_another_run_at_the_same_step_is_told_by_its_values(
    tmp_path: Path, topology: Topology, rank: int
) -> None:
    index = open_files(tmp_path / "whole", make_files(topology))
    check_samples(index, index.stored.atoms, Comm())
    index = open_files(tmp_path / "mixed", mix(topology, make_files(topology, seed=1), rank))
    with pytest.raises(CheckpointError, match=f"rank_{rank}_.*: its fp32 weights are not those of the model states"):
        check_samples(index, index.stored.atoms, Comm())


def test_model_states_of_another_run_are_told_by_their_values(tmp_path: Path) -> None:
    files = {**make_files(Topology(1, 2)), STATES: make_files(Topology(1, 2), seed=1)[STATES]}
    index = open_files(tmp_path, files)
    with pytest.raises(CheckpointError, match="another run or step"):
        check_samples(index, index.stored.atoms, Comm())


def test_a_few_edited_weights_are_let_through(tmp_path: Path) -> None:
    files = make_files(Topology(1, 2))
    files[STATES]["module"]["a"].detach()[0, 0] += 1
    index = open_files(tmp_path, files)
    check_samples(index, index.stored.atoms, Comm())


# -- more files than there should be ----------------------------------------------------------------------------------


def two_saves() -> list[Any]:
    kinds = [
        Topology(0, 1),
        Topology(0, 1, "bf16"),
        Topology(1, 2),
        Topology(1, 2, "bf16", "bf16"),
        Topology(3, 2),
        Topology(3, 2, "bf16"),
    ]
    clashing = [(kinds[4], kinds[0]), (kinds[4], kinds[1]), (kinds[5], kinds[2]), (kinds[4], kinds[3])]
    return [pytest.param(a, b, id=f"{a.label}+{b.label}") for a, b in clashing]


@pytest.mark.parametrize(("first", "second"), two_saves())
def test_two_whole_saves_in_one_folder_are_refused(tmp_path: Path, first: Topology, second: Topology) -> None:
    write_files(tmp_path, make_files(first))
    refuse(tmp_path, make_files(second), CheckpointError, "holds the files of two saves|do not belong together")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Topology(1, 4), Topology(1, 2)),
        (Topology(3, 4), Topology(3, 2)),
        (Topology(1, 3), Topology(0, 1)),
        (Topology(1, 2, "bf16"), Topology(1, 2)),
        (Topology(1, 3), Topology(1, 2, "bf16")),
    ],
    ids=lambda t: t.label,
)
def test_leftovers_of_an_earlier_save_are_ignored_with_a_warning(
    tmp_path: Path, old: Topology, new: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    write_files(tmp_path, make_files(old, seed=1))
    caplog.set_level(logging.WARNING, "deepspeed_ucp")
    index = open_files(tmp_path, make_files(new))
    left = sorted(set(make_files(old)) - set(make_files(new)))
    assert "ignoring files of an earlier save" in caplog.text
    assert all(name in caplog.text for name in left)
    assert index.run.topology.dp == (new.dp if new.stage else 1)
    assert not {Path(file.path).name for file in index.stored.files} & set(left)


def test_a_clean_folder_gives_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "sub").mkdir()
    open_files(tmp_path, make_files(Topology(3, 3)))
    assert not caplog.records


# -- kinds that are not covered ---------------------------------------------------------------------------------------


def change_model(files: Files, **fields: Any) -> Files:
    return {name: {**content, **fields} if name == STATES else content for name, content in files.items()}


def test_a_nested_module_whose_names_cannot_be_told_is_not_covered(tmp_path: Path) -> None:
    tensors = {name: torch.ones(1) for name in ("w", "x", "y", "z")}
    files = change_model(make_files(Topology(1, 2)), module={"language_model": tensors})
    text = f"{STATES}: its module states are nested, and these cannot be told by name: language_model.w, .*such as"
    refuse(tmp_path, files, UnsupportedError, text)


def test_a_pipeline_without_layer_files_is_refused(tmp_path: Path) -> None:
    files = change_model(make_files(Topology(1, 2)), module=None)
    refuse(tmp_path, files, CheckpointError, "a pipeline's model states without any layer_")


@pytest.mark.parametrize("extra", [{"amax": [1.0]}, b"bytes", None, torch.ones(3)], ids=lambda e: type(e).__name__)
def test_extra_state_of_a_module_is_not_taken_for_a_nested_one(tmp_path: Path, extra: Any) -> None:
    """``get_extra_state`` may return anything; the parameters beside it are what they are."""
    files = make_files(Topology(1, 2))
    files[STATES]["module"]["layer._extra_state"] = extra
    index = open_files(tmp_path, files)
    assert index.find("a", "fp32")


def test_files_of_further_model_parallel_ranks_are_missed(tmp_path: Path) -> None:
    files = change_model(make_files(Topology(1, 2)), mp_world_size=2)
    text = "mp_rank_01_model_states.pt is missing; .*by 2 data-parallel ranks of 2 model-parallel ones"
    refuse(tmp_path, files, CheckpointError, text)


def test_an_unknown_wrapper_is_not_covered(tmp_path: Path) -> None:
    files = change_model(make_files(Topology(0)), optimizer={"secret": 1, "other": 2})
    refuse(tmp_path, files, UnsupportedError, r"keys \['other', 'secret'\] .*wrapper that is not covered")


def test_releases_without_slice_mappings_are_not_covered(tmp_path: Path) -> None:
    files = make_files(Topology(1, 2))
    for rank in range(2):
        del files[shard(rank)]["optimizer_state_dict"]["param_slice_mappings"]
    refuse(tmp_path, files, UnsupportedError, "no param_slice_mappings; saved by a DeepSpeed release too old")


# -- stage 0 names nothing --------------------------------------------------------------------------------------------

STAGE0 = pytest.mark.parametrize(
    "topology", [Topology(0), Topology(0, 1, "bf16"), Topology(0, 1, "bf16", "fused")], ids=lambda t: t.label
)


@STAGE0
def test_stage0_needs_a_live_engine_for_its_names(tmp_path: Path, topology: Topology) -> None:
    write_files(tmp_path, make_files(topology))
    with pytest.raises(MismatchError, match="stage 0 saves no parameter names"):
        open_checkpoint(str(tmp_path), Comm(), None)


@STAGE0
@pytest.mark.parametrize(
    "live",
    [
        [[("a", True), ("frozen", False), ("b", True)]],
        [[("b", True)], [("a", True), ("frozen", False)]],
        [[("a", True), ("frozen", False)], [("x", True)]],
        [[("a", True)], [("b", True)], [("frozen", False)]],
    ],
    ids=["one group", "other order", "other name", "more groups"],
)
def test_stage0_with_other_groups_is_refused(tmp_path: Path, topology: Topology, live: Any) -> None:
    write_files(tmp_path, make_files(topology))
    with pytest.raises(MismatchError, match="groups must be made as in the saved run|not in the checkpoint: x"):
        open_checkpoint(str(tmp_path), Comm(), live)


@pytest.mark.parametrize("topology", [Topology(0), Topology(0, 1, "bf16")], ids=lambda t: t.label)
def test_stage0_with_parameters_in_another_order_is_refused_where_shapes_tell(
    tmp_path: Path, topology: Topology
) -> None:
    model = Model((Param("a", (3, 4)), Param("b", (4, 3))))
    write_files(tmp_path, build_files(model, random_state(model, 0, precision=topology.precision), topology))
    with pytest.raises(MismatchError, match="order|groups must be made as in the saved run"):
        open_checkpoint(str(tmp_path), Comm(), [[("b", True), ("a", True)]])


def test_stage0_groups_that_carry_names_need_no_engine(tmp_path: Path) -> None:
    files = make_files(Topology(0))
    groups = files[STATES]["optimizer"]["param_groups"]
    groups[0]["param_names"], groups[1]["param_names"] = ["a", "frozen"], ["b"]
    write_files(tmp_path, files)
    index = open_checkpoint(str(tmp_path), Comm(), None)
    assert [set(group.names) for group in index.run.groups][1] == {"b"}


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_sees_other_files_under_the_same_names_ends_all(tmp_path: Path) -> None:
    for rank, dp in enumerate((1, 2)):
        write_files(tmp_path / str(rank), make_files(Topology(1, 2 * dp)))

    def open_it(rank: int, comm: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(str(tmp_path / str(rank)), comm)
        return str(caught.value)

    texts = run_ranks(2, open_it)
    assert all(f"{shard(0)}: is one file on " in text and "different copies" in text for text in texts)


def test_another_ranks_broken_header_is_this_ranks_error(tmp_path: Path) -> None:
    write_files(tmp_path, make_files(Topology(1, 4)))
    os.truncate(tmp_path / shard(3), 99)

    def open_it(_: int, comm: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(str(tmp_path), comm)
        return str(caught.value)

    texts = run_ranks(3, open_it)
    assert texts == [texts[0]] * 3
    assert f"{shard(3)}: no zip directory" in texts[0]


def test_each_header_is_read_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six files and four ranks: two are read first by rank 0, the others are dealt out (metadata scales)."""
    path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1, 5))
    read: list[tuple[str, int]] = []

    def note(folder: str, name: str) -> Any:
        read.append((name, threading.get_ident()))
        return read_file(folder, name)

    monkeypatch.setattr(gathering, "read_file", note)
    indexes = run_ranks(4, lambda _, comm: open_checkpoint(str(path), comm))
    assert sorted(name for name, _ in read) == sorted([STATES, *(shard(rank) for rank in range(5))])
    assert max(Counter(rank for _, rank in read).values()) == 3
    assert all(index == indexes[0] for index in indexes)


# -- stage 0 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["fused", "unfused"])
@pytest.mark.parametrize("lists", ["fp32_groups", "param_groups"])
def test_lists_of_different_lengths_are_refused(lists: str, wrapper: str, tmp_path: Path) -> None:
    files = make_files(Topology(0, 1, "fp16", wrapper))
    optimizer = files[STATES]["optimizer"]
    if lists == "fp32_groups":
        optimizer["fp32_groups" if wrapper == "unfused" else "fp32_groups_flat"].pop()
    else:
        optimizer["optimizer_state_dict"]["param_groups"].pop()
    text = f"{STATES}: its contents have a form that is not supported .* fp32 weights, and optimizer states of"
    refuse(tmp_path, files, UnsupportedError, text)


def test_weights_that_are_not_those_of_their_names_are_told_to_be_in_another_order(tmp_path: Path) -> None:
    """Stage 0 has both in one file: it is no other run's."""
    files = make_files(Topology(0, 1, "bf16", "unfused"))
    optimizer = files[STATES]["optimizer"]
    optimizer["fp32_groups"] = [[tensor + 1 for tensor in group] for group in optimizer["fp32_groups"]]
    index = open_files(tmp_path, files)
    with pytest.raises(CheckpointError, match="in another order than the saved run did. Use the saved order") as told:
        check_samples(index, list(index.stored.atoms), Comm())
    assert "verify" not in str(told.value) and "another run" not in str(told.value)
