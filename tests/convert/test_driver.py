"""Whole conversions: output, reuse and refusals."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import ConvertOptions, convert_index, default_destination, driver
from deepspeed_ucp.convert.driver import Written, join_ranges
from deepspeed_ucp.convert.outputs import check_paths, list_steps
from deepspeed_ucp.convert.states import write_states
from deepspeed_ucp.errors import CheckpointError, StorageError, UcpError, UnsupportedError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.io.staging import MANIFEST
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import MASTER, AtomKey, ParamKey
from deepspeed_ucp.plan.conversion import Range
from deepspeed_ucp.stream.full_tensors import assemble_full_tensors
from deepspeed_ucp.stream.reader import AtomReader
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.convert.conversions import read_bytes
from tests.support.conversion import convert_checkpoint
from tests.support.damage import flip_bit, write_checksums
from tests.support.ranks import run_ranks
from tests.support.reshard import examples, temporary_folder
from tests.support.reshard3d import (
    SavedRun,
    draw_state,
    make_config,
    make_pipeline,
    make_plain,
    open_run,
    rules_of,
    trips,
)
from tests.support.wholes import check_atoms
from tests.synth import Model, Param, Run, Topology, random_state, write_checkpoint

OPTIONS = ConvertOptions(workers=2)
MODEL = Model((Param("a", (7, 3)), Param("b", (5,), group=1)))


def make_source(tp: int = 1, topology: Topology | None = None, seed: int = 0) -> SavedRun:
    kinds = ("norm", "row", "qkv", "column", "gate_up", "word")
    return draw_state(make_plain(kinds, frozen=("qkv",)), topology or Topology(1, 2, "bf16", tp=tp), seed)


def convert(index: AtomicIndex, saved_run: SavedRun, to: Path, comm: Comm | None = None, **options: Any) -> Any:
    chosen = ConvertOptions(**{"workers": 2, **options})
    source = os.path.dirname(index.state_file)
    return convert_index(index, source, str(to), comm or Comm(), chosen, rules=rules_of(saved_run))


@given(trip=trips(), nodes=st.integers(1, 3))
@examples(60)
def test_a_conversion_contains_the_state_of_the_run(trip: Any, nodes: int) -> None:
    saved_run = trip.source
    with temporary_folder() as folder:
        source, to = folder / "tag", folder / "tag_universal"
        index = open_run(saved_run, source)
        before = read_bytes(source)
        report = run_ranks(nodes, lambda rank, comm: convert(index, saved_run, to, comm))[0]
        assert read_bytes(source) == before
        again = open_checkpoint(str(to), Comm())
        wholes = assemble_full_tensors(again)
        with AtomReader(again) as reader:
            assert check_atoms(reader, wholes.tensors, saved_run, None) > 0
        assert report.tensors == len(wholes.tensors) == len(assemble_full_tensors(index, rules_of(saved_run)).tensors)
        for field in ("scalars", "scalar_dtypes", "aliases", "buffers", "counters", "scaler", "clip_grad", "hints"):
            assert getattr(again, field) == getattr(index, field), field
        assert [(g.members, g.hyper) for g in again.groups] == [(g.members, g.hyper) for g in index.groups]
        assert again.instances == index.instances
        files = {path.stat().st_ino: path.stat().st_size for path in to.rglob("*") if path.is_file()}
        assert report.bytes_written == sum(files.values())  # hard links count once
        assert (folder / "latest_universal").read_text() == "tag_universal"
        assert sorted(p.name for p in folder.iterdir()) == ["latest_universal", "tag", "tag_universal"]


@pytest.mark.parametrize("tp", [1, 2])
def test_any_numbers_of_nodes_and_workers_write_the_same_bytes(tmp_path: Path, tp: int) -> None:
    saved_run = make_source(tp)
    index = open_run(saved_run, tmp_path / "tag")
    found = []
    for number, (nodes, workers) in enumerate(((1, 1), (1, 5), (3, 1), (2, 4))):
        to = tmp_path / f"out{number}" / "tag_universal"
        run_ranks(nodes, lambda rank, comm, to=to, w=workers: convert(index, saved_run, to, comm, workers=w))
        found.append(read_bytes(to))
    assert len(found[0]) > 10
    assert all(each == found[0] for each in found)


def test_torch_loads_the_files(tmp_path: Path) -> None:
    saved_run = make_source(2)
    to = tmp_path / "out"
    convert(open_run(saved_run, tmp_path / "tag"), saved_run, to)
    saved = torch.load(to / "zero/body.row/exp_avg.pt", weights_only=True)
    assert saved["cat_dim"] == 1
    assert torch.equal(saved["param"], saved_run.state.atoms["body.row"]["exp_avg"])
    word = torch.load(to / "zero/body.word/fp32.pt", weights_only=True)
    assert word["vocab_tensor"] is True
    assert torch.equal(word["param"], saved_run.state.atoms["body.word"]["fp32"][:11]), "upstream sees no padding"
    step = torch.load(to / "zero/body.row/step.pt", weights_only=True)
    assert torch.equal(torch.as_tensor(step), torch.as_tensor(saved_run.state.scalars["body.row"]["step"]))


def convert_tag(folder: Path, tag: str = "tag", to: str | None = None, patterns: Any = None, **options: Any) -> Any:
    """Convert a tag, by default to ``TAG_universal``."""
    destination, chosen = str(folder / to) if to else None, ConvertOptions(**{"workers": 1, **options})
    return convert_checkpoint(str(folder / tag), destination, patterns=patterns, options=chosen)


def test_an_output_of_the_same_source_is_reused(tmp_path: Path) -> None:
    make_source().write(tmp_path / "tag")
    first = convert_tag(tmp_path, latest=False)
    assert not (tmp_path / "latest_universal").exists()
    times = {path: path.stat().st_mtime_ns for path in Path(first.destination).rglob("*")}
    (tmp_path / "latest_universal").write_text("another")
    second = convert_tag(tmp_path)
    assert second.reused and not first.reused and not second.bytes_written
    assert second.destination == default_destination(str(tmp_path / "tag"))
    assert times == {path: path.stat().st_mtime_ns for path in Path(first.destination).rglob("*")}
    assert (tmp_path / "latest_universal").read_text() == "tag_universal"


def save(tag: str, seed: int = 1) -> Callable[[Path], object]:
    return lambda folder: make_source(2, seed=seed).write(folder / tag)


def save_atomic(folder: Path) -> None:
    save("plain")(folder)
    convert_tag(folder, "plain", "tag1", PATTERNS)


def keep(folder: Path) -> None:
    pass


PATTERNS: Any = make_config(make_source().model).patterns
PATTERNS["rules"].append({"match": r".*\.count", "pattern": "replicate"})  # which only checksums show
WRONG_RULES = [{**rule, "parts": [12, 24, 12]} if "qkv" in rule["match"] else rule for rule in PATTERNS["rules"]]
ATOM, STATES = Path("out/zero/body.row/exp_avg.pt"), Path("out/mp_rank_00_model_states.pt")
NOT_REUSED: dict[str, tuple[dict[str, Any], Callable[[Path], object], dict[str, Any]]] = {
    "another tag": ({}, save("tag1"), {"tag": "tag1"}),
    "an atomic source": ({}, save_atomic, {"tag": "tag1"}),
    "saved again": ({}, save("tag"), {}),
    "saved again without checksums": ({}, save("tag"), {}),
    "not verified": ({"verify": False}, keep, {}),
    "corrected patterns": ({"patterns": {**PATTERNS, "rules": WRONG_RULES}}, keep, {}),
    "no atom": ({}, lambda folder: (folder / ATOM).unlink(), {}),
    "no states": ({}, lambda folder: (folder / STATES).unlink(), {}),
    "a short atom": ({}, lambda folder: os.truncate(folder / ATOM, 100), {}),
    "short states": ({}, lambda folder: os.truncate(folder / STATES, 100), {}),
    "no manifest": ({}, lambda folder: (folder / "out" / MANIFEST).unlink(), {}),
    "a short manifest": ({}, lambda folder: os.truncate(folder / "out" / MANIFEST, 100), {}),
}
"""Options of the first conversion, a change of its source or output, and options of the next conversions."""


@pytest.mark.parametrize("way", ["overwrite", "refresh"])
@pytest.mark.parametrize("case", NOT_REUSED)
def test_another_output_is_replaced_only_with_overwrite(case: str, way: str, tmp_path: Path) -> None:
    """The source may differ by content, or, without checksums, only by modification time."""
    first, change, options = NOT_REUSED[case]
    first, following = ({"to": "out", "patterns": PATTERNS, **each} for each in (first, options))
    with write_checksums("without" not in case):
        save("tag", seed=0)(tmp_path)
        assert not convert_tag(tmp_path, **first).reused
        assert convert_tag(tmp_path, **first).reused
        change(tmp_path)
    before = read_bytes(tmp_path / "out")
    with pytest.raises(StorageError, match="--overwrite"):
        convert_tag(tmp_path, **following)
    assert read_bytes(tmp_path / "out") == before
    if way == "refresh" and "manifest" in case:
        return  # nothing shows that a conversion has made it
    assert not convert_tag(tmp_path, **following, **{way: True}).reused
    convert_tag(tmp_path, **{**following, "to": "fresh"})
    assert read_bytes(tmp_path / "out") == read_bytes(tmp_path / "fresh") != before


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_damaged_source_leaves_no_files(tmp_path: Path, nodes: int) -> None:
    saved_run = make_source(2)
    index = open_run(saved_run, tmp_path / "tag")
    flip_bit(index, "body.row", MASTER)

    def work(rank: int, comm: Any) -> str:
        with pytest.raises(CheckpointError, match="CRC32") as caught:
            convert(index, saved_run, tmp_path / "out", comm)
        return str(caught.value)

    assert len(set(run_ranks(nodes, work))) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["tag"]


ODD_PATH = "folder for each parameter.* cannot be a path"
ONE_PATH = "folder for each parameter.* another file or folder"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        *(((name,), ODD_PATH) for name in ("../evil", "a//b", "..", "", "\0", "w" * 256, "ü" * 128, "\udcff")),
        (("optimizer_state.pt",), ONE_PATH),
        (("optimizer_state.pt/a",), ONE_PATH),
        (("a", "a/fp32.pt"), ONE_PATH),
        (("a/fp32.pt", "a"), ONE_PATH),
        (("a", "a"), ONE_PATH),
        (("layers.0.weight", "experts/3", "experts/4", "w" * 255), ""),
    ],
    ids=lambda each: ascii(each)[:20],
)
def test_names_of_parameters_that_are_invalid_paths_are_refused(names: tuple[str, ...], text: str) -> None:
    paths = [f"zero/{name}/{file}.pt" for name in names for file in ("fp32", "step")]
    with pytest.raises(UnsupportedError, match=text) if text else nullcontext():
        check_paths(paths)


@pytest.mark.parametrize("name", ["w" * 300, "w\udcff", "optimizer_state.pt"], ids=["long", "surrogate", "file"])
def test_a_refused_conversion_leaves_no_files(name: str, tmp_path: Path) -> None:
    model = Model((Param(name, (4, 3)),))
    write_checkpoint(tmp_path / "source", model, random_state(model, 0), Topology(1, 1), tag="tag")
    with pytest.raises(UnsupportedError, match="folder for each parameter"):
        convert_tag(tmp_path, "source/tag", "out/it")
    assert not (tmp_path / "out").exists()


def test_ranges_of_a_file_must_cover_it() -> None:
    class Fake:
        path = "x.pt"

        class atom:
            numel, itemsize = 10, 4

    data = os.urandom(40)
    parts = [Written(Range(0, 0, 4), zlib.crc32(data[:16])), Written(Range(0, 4, 6), zlib.crc32(data[16:]))]
    assert join_ranges(parts, [Fake()]) == {0: zlib.crc32(data)}
    overlapping = [parts[0], Written(Range(0, 2, 6), 0)]
    for lacking in (parts[:1], parts[1:], [], [*parts, *parts], overlapping):
        with pytest.raises(CheckpointError, match=r"x\.pt"):
            join_ranges(lacking, [Fake()])


def test_tensors_that_upstream_cannot_cut_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_run = draw_state(make_plain(("norm", "row", "hybrid4")), Topology(1, 1, tp=4))
    convert(open_run(saved_run, tmp_path / "tag"), saved_run, tmp_path / "out")
    (warning,) = [record.getMessage() for record in caplog.records if "load_universal" in record.getMessage()]
    assert "body.hybrid4" in warning and "body.row" not in warning


def test_a_failed_node_stops_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would continue to write useless files."""
    saved_run = make_source(2)
    index = open_run(saved_run, tmp_path / "tag")
    turns, batches = count(), []

    def fail_first(*args: Any, **kwargs: Any) -> AtomReader:
        if next(turns) == 0:  # ranks run in order: the first fails before the second begins
            raise CheckpointError("broken")
        return AtomReader(*args, **kwargs)

    monkeypatch.setattr(driver, "AtomReader", fail_first)

    def work(rank: int, comm: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            convert(index, saved_run, tmp_path / "out", comm, bar=lambda _: nullcontext(batches.append))
        return str(caught.value)

    assert set(run_ranks(2, work)) == {"[rank 0] broken"}
    assert not batches
    monkeypatch.undo()
    run_ranks(2, lambda rank, comm: convert(index, saved_run, tmp_path / "out", comm))
    assert not list((tmp_path / "out").glob(".*"))


def test_nodes_need_the_same_destination(tmp_path: Path) -> None:
    saved_run = make_source()
    index = open_run(saved_run, tmp_path / "tag")
    with pytest.raises(StorageError, match="is not here; rank 0 has made it"):
        run_ranks(2, lambda rank, comm: convert(index, saved_run, tmp_path / f"host{rank}" / "out", comm))
    assert not list(tmp_path.glob("host*/out"))


class Schedule:
    """A hyper-parameter of a class of the script."""


def test_hyper_parameters_that_are_objects_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model((Param("a", (3, 2)),))
    state = random_state(model, 0)
    state = replace(state, groups=tuple({**group, "schedule": Schedule()} for group in state.groups))
    convert_checkpoint(str(write_checkpoint(tmp_path, model, state, Topology(1, 1))), options=OPTIONS)
    assert "hyper-parameters that are objects are not kept: schedule" in caplog.text


def test_dropped_states_of_modules_and_ranks_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """These are extra states in layer files, and client states of other data-parallel ranks under ZeRO 3."""
    saved_run = draw_state(make_pipeline([["column"], ["row", "norm"]], tied=False), Topology(1, 1, pp=2))
    saved_run.write(tmp_path / "pipeline")
    for number in (0, 1):
        path = tmp_path / f"pipeline/layer_{number:02d}-model_states.pt"
        torch.save({**torch.load(path), "norm._extra_state": {"scale": torch.ones(2)}}, path)
    convert_checkpoint(str(tmp_path / "pipeline"), options=OPTIONS)
    assert "layer files are neither loaded nor converted: 0.norm._extra_state, 1.norm._extra_state" in caplog.text
    state, run = random_state(MODEL, 0), Run(client_state={"epoch": 3})
    for topology in (Topology(2, 2), Topology(3, 1), Topology(3, 2)):
        assert "client states" not in caplog.text
        source = write_checkpoint(tmp_path / topology.label, MODEL, state, topology, run=run)
        with caplog.at_level(logging.INFO, "deepspeed_ucp"):
            convert_checkpoint(str(source), options=OPTIONS)
    assert "client states of data-parallel ranks other than the first are not kept: epoch" in caplog.text


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_state_files_that_a_save_replaces_meanwhile_are_refused(name: str, tmp_path: Path) -> None:
    """The tensors were read and verified before."""
    old, new = (
        write_checkpoint(tmp_path / tag, MODEL, random_state(MODEL, step), Topology(1, 2), run=Run(global_steps=step))
        for tag, step in (("old", 3), ("new", 4))
    )
    index = open_checkpoint(str(old), Comm())
    os.replace(Path(new) / name, Path(old) / name)
    with pytest.raises(CheckpointError, match=rf"{name}: was replaced by another save while"):
        write_states(index, str(tmp_path))


@pytest.mark.parametrize("stage", [1, 3])
def test_files_of_the_source_may_be_in_several_places(stage: int, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "src", MODEL, random_state(MODEL, 0), Topology(stage, 2))
    convert_checkpoint(str(source), str(tmp_path / "one"), options=OPTIONS)
    (further := tmp_path / "further" / Path(source).name).mkdir(parents=True)
    for path in Path(source).glob("*optim_states.pt"):
        path.rename(further / path.name)
    index = open_checkpoint(str(source), Comm(), also=[str(further)])
    convert_index(index, str(source), str(tmp_path / "two"), Comm(), OPTIONS)
    one, two = (read_bytes(tmp_path / name) for name in ("one", "two"))
    assert one == two


def test_states_that_are_not_element_wise_are_refused_and_unused_rules_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_run = make_source()
    index = open_run(saved_run, tmp_path / "tag")
    odd = replace(index, irregular={AtomKey("body.row", "row"): "shape (9,)"})
    with pytest.raises(UnsupportedError, match="The weights alone can be had with `ds_ucp export`"):
        convert(odd, saved_run, tmp_path / "out")
    rules = (*rules_of(saved_run), *from_config([{"match": "nothing", "pattern": "replicate"}]))
    convert_index(index, str(tmp_path / "tag"), str(tmp_path / "out"), Comm(), OPTIONS, rules=rules)
    assert "rules that match no parameter: " in caplog.text and "nothing" in caplog.text


def test_a_conversion_with_other_stage_0_names_is_not_reused(tmp_path: Path) -> None:
    """The same files with other names are another checkpoint."""
    model = Model((Param("q", (3, 2)), Param("k", (3, 2))))
    state = random_state(model, 0, precision="fp32", topology=Topology(0, 1))
    tag, to = str(write_checkpoint(tmp_path, model, state, Topology(0, 1), tag="tag")), str(tmp_path / "out")
    with pytest.raises(UcpError, match="--groups"):
        convert_checkpoint(str(make_source(topology=Topology(0, 1)).write(tmp_path / "unnamed")), options=OPTIONS)
    convert_checkpoint(tag, to, groups=[["k", "q"]], options=OPTIONS)
    with pytest.raises(StorageError, match="--overwrite"):
        convert_checkpoint(tag, to, groups=[["q", "k"]], options=OPTIONS)
    convert_checkpoint(tag, to, groups=[["q", "k"]], options=ConvertOptions(workers=1, overwrite=True))
    found = torch.load(f"{to}/zero/q/exp_avg.pt", weights_only=True)["param"]
    assert torch.equal(found, state.atoms["q"]["exp_avg"])


def test_all_ranks_convert_the_tag_that_rank_0_has_read(tmp_path: Path) -> None:
    """A save completes before the other ranks read ``latest``."""
    for tag in ("tag1", "tag2"):
        make_source().write(tmp_path / tag)
    (tmp_path / "latest").write_text("tag1")

    def work(rank: int, comm: Any) -> str:
        if rank:
            (tmp_path / "latest").write_text("tag2")
        return str(convert_checkpoint(str(tmp_path), comm=comm, options=OPTIONS).destination)

    assert run_ranks(2, work) == [str(tmp_path / "tag1_universal")] * 2


def test_names_of_scalars_are_checked_as_paths(tmp_path: Path) -> None:
    index = replace(open_run(make_source(), tmp_path / "tag"), scalars={ParamKey("../../evil"): {"step": 5}})
    with pytest.raises(UnsupportedError, match="evil"):
        check_paths(list_steps(index))
