"""Folders of DeepSpeed's converter, from synthesised checkpoints: contents and refusals."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.errors import UnsupportedError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.open import read_saved_job
from deepspeed_ucp.io import objects
from deepspeed_ucp.io.objects import ObjectStore
from deepspeed_ucp.model.index import AtomicIndex, SavedJob
from deepspeed_ucp.model.storage import COPY, AtomKey, ParamKey
from deepspeed_ucp.tensor_parallel.kinds import ShardH, ShardV
from deepspeed_ucp.tensor_parallel.recorded import read_pattern
from tests.formats.saves import check_refused, open_alone
from tests.support.contents import check_content, check_reads
from tests.support.damage import write_checksums
from tests.support.memory import clear_memory, put_folder
from tests.support.ranks import Apart, run_ranks
from tests.support.reshard import LIVE_LR, Loaded, load, make_targets
from tests.support.reshard3d import draw_state, expect, load_all, make_pipeline, make_plain
from tests.support.upstream import to_universal
from tests.synth import Model, Param, Run, Topology, build_files, random_state, write_files

MODEL = Model(
    (
        Param("a.weight", (7, 13)),
        Param("a.bias", (7,), frozen=True),
        Param("b.weight", (5, 7), group=1),
        Param("one", (1,), group=1),
        Param("outside", (3,), group=None, frozen=True),
        Param("tied", (7, 13), alias_of="a.weight"),
    ),
    {"count": torch.arange(3), "flag": torch.tensor([True, False])},
)
ZERO1 = Topology(1, 2, "bf16")
ZERO3 = Topology(3, 3, "bf16", sub_group_size=40)


def write(folder: Path, topology: Topology, *, legacy: bool = False, **run: Any) -> Path:
    """Write a checkpoint and convert it."""
    state = random_state(MODEL, 5, precision=topology.precision)
    write_files(folder / "tag", build_files(MODEL, state, topology, Run(**run)), legacy=legacy)
    return to_universal(folder / "tag", folder / "universal")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Topology], Path]:
    """Return a function that converts each topology once; tests must not change the result."""
    folders: dict[str, Path] = {}

    def make(topology: Topology) -> Path:
        if topology.label not in folders:
            folders[topology.label] = write(tmp_path_factory.mktemp("made"), topology)
        return folders[topology.label]

    return make


@pytest.fixture
def folder(made: Callable[[Topology], Path], tmp_path: Path) -> Path:
    """A copy that tests may damage."""
    return Path(shutil.copytree(made(ZERO1), tmp_path / "universal"))


SOURCES = [ZERO1, Topology(2, 3, "fp16", round_robin=True), Topology(1, 2, "bf16", "bf16"), Topology(1, 4), ZERO3]


@pytest.mark.parametrize("source", SOURCES, ids=lambda t: t.label)
def test_universal_checkpoints_contain_all_states_and_load(source: Topology, made: Callable[[Topology], Path]) -> None:
    """Frozen parameters and buffers come from the copied model states in their saved dtype."""
    folder, state = made(source), random_state(MODEL, 5, precision=source.precision)
    index = open_alone(folder)
    normal = open_alone(folder.with_name("tag"))
    for field in ("scalars", "aliases", "buffers", "counters", "scaler", "clip_grad", "optimizer", "scalar_dtypes"):
        assert getattr(index, field) == getattr(normal, field), field
    assert [set(group.names) for group in index.groups] == [set(group.names) for group in normal.groups]
    assert [group.hyper for group in index.groups] == [group.hyper for group in normal.groups]
    assert {key for key in index.atoms if key[1] != COPY} == {key for key in normal.atoms if key[1] != COPY}
    assert (index.topology.wrapper, index.topology.zero_stage) == ("atomic", source.stage)
    assert index.topology.precision == normal.topology.precision
    assert not index.dropped
    assert read_saved_job(str(folder)) == read_saved_job(str(folder.with_name("tag"))) != SavedJob(1, 1, 0, None, None)
    for target in (Topology(2, 3), Topology(3, 2, source.precision)):
        targets = make_targets(MODEL, target)
        ranks = load(index, targets)
        check_content(ranks, state)
        check_reads(index, ranks)


def test_several_ranks_share_the_headers(made: Callable[[Topology], Path]) -> None:
    alone = open_alone(made(ZERO3))
    assert run_ranks(3, lambda _rank, comm: open_checkpoint(str(made(ZERO3)), comm)) == [alone] * 3


def test_one_rank_lists_a_store_and_every_rank_gets_file_versions(
    made: Callable[[Topology], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank gets versions of files whose headers another rank has read, too."""
    clear_memory()
    url = "memory://universals/tag"
    put_folder(made(ZERO1), url)
    monkeypatch.setattr(objects, "_known", Apart())
    listed = list[str]()
    for name in ("list_folder", "list_tree"):
        monkeypatch.setattr(ObjectStore, name, partial(_note, getattr(ObjectStore(), name), listed))

    def look(_: int, comm: Comm) -> list[str]:
        files = open_checkpoint(url, comm).files
        return [file.path for file in files if objects._known.get(file.path) is None]

    assert run_ranks(2, look) == [[], []]
    assert [each for each in listed if "/zero" in each] == [f"{url}/zero"]


def _note(work: Callable[[str], Any], urls: list[str], url: str) -> Any:
    urls.append(url)
    return work(url)


def test_files_without_checksums_or_in_the_legacy_format_are_read(folder: Path) -> None:
    """Archives of several torch releases have equal contents."""
    before = open_alone(folder)
    for number, path in enumerate(sorted(folder.glob("zero/*/*.pt"))):
        content = torch.load(path, weights_only=False)
        with write_checksums(False):
            torch.save(content, path, _use_new_zipfile_serialization=bool(number % 2))
    after = open_alone(folder)
    assert after.atoms.keys() == before.atoms.keys()
    masters = [a for a in after.atoms.values() if a.state == "exp_avg"]
    assert {after.records[atom.shards[0].list_fragments(atom.state)[0].record].crc for atom in masters} == {None}
    check_content(load(after, make_targets(MODEL, Topology(3, 2))), random_state(MODEL, 5, precision="bf16"))


def test_a_missing_step_comes_from_the_counters(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in folder.glob("zero/*/step.pt"):
        path.unlink()
    index = open_alone(folder)
    assert index.scalars == {ParamKey(name): {"step": 3} for name in ("a.weight", "b.weight", "one")}
    assert "kept no step of the optimizer; the step 3 of the counters is used" in caplog.text


def test_a_group_without_gradients_has_only_masters(tmp_path: Path) -> None:
    """The converter copies its values from the model states."""
    state = random_state(MODEL, 5, without=("b.weight", "one"))
    write_files(tmp_path / "tag", build_files(MODEL, state, Topology(1, 2)))
    index = open_alone(to_universal(tmp_path / "tag", tmp_path / "universal"))
    assert {key.state for key in index.atoms if key.name == "b.weight"} == {"fp32", COPY}
    assert set(index.scalars) == {ParamKey("a.weight")}


def remove(*paths: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in paths:
            found = folder / path
            shutil.rmtree(found) if found.is_dir() else found.unlink()

    return change


def write_file(name: str, content: object) -> Callable[[Path], None]:
    return lambda folder: torch.save(content, folder / "zero" / name)


def change_step(folder: Path) -> None:
    path = folder / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=False), "global_steps": 9}, path)


OTHER_SHAPE = {"param": torch.zeros(6, 7)}
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "interrupted": (lambda folder: (folder / "tmp").mkdir(), "holds tmp, .* interrupted.*--keep_temp_folder"),
    "no optimizer": (remove("zero/optimizer_state.pt"), "lacks zero/optimizer_state.pt"),
    "no model states": (remove("mp_rank_00_model_states.pt"), "no model states found"),
    "no master": (remove("zero/a.weight/fp32.pt"), "zero/a.weight/fp32.pt, although mp_rank_00_.* lists"),
    "no state": (remove("zero/b.weight/exp_avg.pt"), "zero: lacks b.weight/exp_avg.pt, although other parameters"),
    "no step": (remove("zero/b.weight/step.pt"), "zero: lacks b.weight/step.pt, although other parameters"),
    "no folder": (remove("zero/one"), "lacks zero/one/fp32.pt"),
    "no parameters": (remove("zero/a.weight", "zero/b.weight", "zero/one", "zero/a.bias", "zero/outside",
                             "zero/tied", "zero/count", "zero/flag"), "lacks every parameter's folder"),
    "stray": (lambda folder: shutil.copytree(folder / "zero/one", folder / "zero/other"),
              "zero: other have optimizer states, .* does not list them"),
    "truncated": (lambda folder: os.truncate(folder / "zero/one/exp_avg.pt", 99), "zero/one/exp_avg.pt: .*truncated"),
    "no tensor": (write_file("one/fp32.pt", {"x": 1}), "zero/one/fp32.pt: has no 'param'"),
    "text": (write_file("one/fp32.pt", "x"), "zero/one/fp32.pt: holds a str"),
    "other shape": (write_file("b.weight/fp32.pt", OTHER_SHAPE),
                    r"zero/b.weight/fp32.pt: has shape \(6, 7\), .* says \(5, 7\)"),
    "no rows": (write_file("one/fp32.pt", {"param": torch.tensor(1.0), "vocab_tensor": True}),
                r"zero/one/fp32.pt: has shape \(\), .* says \(1,\)"),
    **{f"{kind} state": (write_file("b.weight/exp_avg.pt", {"param": torch.zeros(*shape)}),
                         rf"zero/b.weight/exp_avg.pt: holds \({shape[0]}, {shape[1]}\), fp32.pt \(5, 7\)")
       for kind, shape in (("other", (6, 7)), ("turned", (7, 5)))},
    "module.pt": (
        lambda folder: shutil.copy(folder / "zero/one/fp32.pt", folder / "zero/one/module.pt"),
        "ucp_manifest.json is missing: zero/one/module.pt was written by `ds_ucp convert`",
    ),
    "optimizer of something else": (write_file("optimizer_state.pt", {"x": 1}),
                                    "optimizer_state.pt: has no param_groups"),
}  # fmt: skip
STAGE_3 = {  # each rank has a part of the frozen parameters
    "missing rank": (remove("zero_pp_rank_1_mp_rank_00_model_states.pt"), "lacks zero_pp_rank_1_mp_rank_00_model_"),
    "another step": (change_step, "zero_pp_rank_2.*belongs to another step, run"),
}


@pytest.mark.parametrize("damage", [*DAMAGES, *STAGE_3])
def test_damaged_folders_are_refused(damage: str, made: Callable[[Topology], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made(ZERO3 if damage in STAGE_3 else ZERO1), tmp_path / "universal"))
    change, text = {**DAMAGES, **STAGE_3}[damage]
    change(folder)
    check_refused(folder, text)


@pytest.mark.parametrize("number", [None, 0, 2, 1 << 20, "1"])
def test_a_number_of_experts_that_differs_from_the_rows_is_refused(number: object, folder: Path) -> None:
    path = folder / "zero/one/fp32.pt"
    torch.save({**torch.load(path), "is_expert_param": True, "ep_num_experts": number}, path)
    check_refused(folder, rf"zero/one/fp32.pt: is of {number!r} experts and holds \(1,\)", UnsupportedError)


def test_a_save_with_converted_files_is_read_as_the_save(made: Callable[[Topology], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made(ZERO1).with_name("tag"), tmp_path / "tag"))
    shutil.copytree(made(ZERO1) / "zero", folder / "zero")
    assert open_alone(folder).topology.wrapper == "zero12"


INFO = {"parameter_with_row_parallelism_patterns": [r".*\.row"], "tp_replicated_parameter_patterns": [r".*\.norm"]}


def convert_parallel(model: Model, topology: Topology, root: Path) -> tuple[Any, Path]:
    held = draw_state(model, topology)
    run = Run(client_state={"universal_checkpoint_info": {"universal_checkpoint_version": 0.4, **INFO}})
    held.write(root / "tag", run)
    return held, to_universal(root / "tag", root / "universal")


def test_patterns_of_tensor_parallel_sources_are_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_plain(["column", "row", "norm", "bias"], frozen=["bias"])
    _, folder = convert_parallel(model, Topology(2, 2, tp=2), tmp_path)
    index = open_alone(folder)
    assert read_pattern(index.recorded["body.column"]) == ShardV()
    assert read_pattern(index.recorded["body.row"]) == ShardH(dim=1)
    assert "body.norm" not in index.recorded  # the converter has no mark for replicated parameters
    assert index.atoms[AtomKey("body.count", "module")].shape == (3,)  # a buffer that is equal on both ranks
    assert not index.find("body.bias", "module")
    assert "does not unite the tensor-parallel shards of frozen parameters and buffers: body.bias" in caplog.text
    assert "frozen parameters and buffers" in index.dropped
    masters = {name: index.atoms[AtomKey(name, "fp32")].shape for name in ("body.column", "body.row", "body.norm")}
    assert masters == {"body.column": (12, 5), "body.row": (5, 12), "body.norm": (7,)}


def test_tensors_of_only_one_tensor_parallel_rank_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = draw_state(make_plain(["column", "norm"]), Topology(2, 2, tp=2))
    held.write(tmp_path / "tag", Run(client_state={"universal_checkpoint_info": INFO}))
    path = tmp_path / "tag" / "mp_rank_01_model_states.pt"
    saved = torch.load(path, weights_only=False)
    saved["module"]["body.alone"] = torch.ones(3)
    saved["buffer_names"] += ["body.alone"]
    torch.save(saved, path)
    index = open_alone(to_universal(tmp_path / "tag", tmp_path / "universal"))
    assert not index.find("body.alone", "module")
    assert "shards of frozen parameters and buffers: body.alone" in caplog.text


@pytest.mark.parametrize("target", [Topology(1, 1, tp=4), Topology(3, 3)], ids=lambda t: f"→{t.label}")
@pytest.mark.parametrize("source", [Topology(2, 2, "bf16", tp=2), Topology(3, 2, tp=2)], ids=lambda t: t.label)
def test_tensor_parallel_sources_load_without_user_patterns(source: Topology, target: Topology, tmp_path: Path) -> None:
    """The converter's files and the model states supply the patterns."""
    held, folder = convert_parallel(make_plain(["column", "row", "norm", "bias"]), source, tmp_path)
    wanted = expect(held, target)
    _, ranks = load_all(folder, wanted.make_targets(), UniversalConfig(threads=1))
    check_content(ranks, wanted.state, wanted.locals)


def load_converted(model: Model, topology: Topology, root: Path) -> tuple[AtomicIndex, list[Loaded]]:
    """Load a converted run into two ranks without model parallelism."""
    held, folder = convert_parallel(model, topology, root)
    targets = replace(held, topology=Topology(1, 2)).make_targets()
    return load_all(folder, targets, UniversalConfig(threads=1))


def test_tensors_that_the_converter_dropped_keep_live_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It drops a pipeline's frozen parameters and buffers; all other tensors are loaded."""
    model = make_pipeline([["column", "norm"], ["row", "norm"]], tied=False, frozen=[])
    model = replace(model, params=(*model.params, Param("1.bias", (12,), group=1, frozen=True)))
    index, ranks = load_converted(model, Topology(1, 1, tp=2, pp=2), tmp_path)
    assert "a pipeline's buffers and frozen parameters" in index.dropped
    assert all(rank.fill_plan.match.left_initial == ["1.bias", "0.count", "1.count"] for rank in ranks)
    assert "1.bias, 0.count, 1.count keep the values that the new model has" in caplog.text
    for rank in ranks:
        assert {name for flat in rank.target.flats for name in flat.names} == {"0.column", "0.norm", "1.row", "1.norm"}


def test_a_missing_trained_parameter_is_refused(tmp_path: Path) -> None:
    model = make_pipeline([["column", "norm"], ["row", "norm"]], tied=False)
    _, folder = convert_parallel(model, Topology(1, 1, pp=2), tmp_path)
    frozen = replace(model, params=tuple(replace(p, frozen=p.name == "0.column") for p in model.params))
    targets = make_targets(frozen, Topology(1, 1))
    (rank,) = load(open_alone(folder), targets)
    assert rank.fill_plan.match.left_initial == ["0.count", "1.count"]
    (note,) = rank.fill_plan.match.notes
    assert note.startswith("0.column was trained in the saved run")


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ([["column", "norm"], ["row"]], "the saved groups differ in lr"),
        ([["row"], ["column", "norm"]], "it has one group"),
    ],
)
def test_param_groups_that_differ_between_stages_are_refused(
    kinds: list[list[str]], text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The converter keeps the first stage's groups; here one stage has only matrices."""
    model = make_pipeline(kinds, tied=False)
    index, ranks = load_converted(model, Topology(1, 1, pp=2), tmp_path)
    assert index.groups == ()
    assert f"the hyper-parameters of this run are kept ({text}" in caplog.text
    for rank in ranks:
        assert {group["lr"] for group in rank.target.wrapped.param_groups} == {LIVE_LR}
