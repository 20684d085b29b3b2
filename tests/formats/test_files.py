"""File names, ``latest`` and tags; files of DeepSpeed's fast writer, and tags with their files in a folder below."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, OutOfReachError, UnsupportedError
from deepspeed_ucp.examine.tags import describe_tag
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.formats import check_tag, find_tags, read_latest
from deepspeed_ucp.formats.deepspeed.files import (
    NO_AXIS,
    PUBLISHED,
    SEAL,
    SwapName,
    list_entries,
    read_swap_name,
    resolve_published,
    sort_names,
)
from deepspeed_ucp.formats.deepspeed.ownfiles import find_state_file
from deepspeed_ucp.formats.deepspeed.seal import remove_seal
from deepspeed_ucp.formats.latest import (
    describe_content,
    find_age,
    find_checkpoint,
    find_folder,
    find_newest,
    holds_foreign,
    is_sealed,
    list_older,
    list_unsealed,
)
from deepspeed_ucp.formats.open import seal_folder, survey_checkpoint
from deepspeed_ucp.io.paths import join_path
from deepspeed_ucp.io.staging import LATEST as UNIVERSAL
from deepspeed_ucp.load import choice
from deepspeed_ucp.saves.destinations import find_mark
from deepspeed_ucp.saves.publishing import remove_tag
from tests.convert.conversions import write_source
from tests.formats.saves import STATES, check_refused, open_alone, shard
from tests.support.conversion import convert_checkpoint
from tests.support.damage import refuse_path
from tests.synth import Model, Param, Run, Topology, build_files, random_state, write_checkpoint, write_files

TINY = Model((Param("a", (3, 5)),))


def touch(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x" * len(name))


def list_sizes(folder: Path) -> dict[str, int]:
    return {name: entry.size for name, entry in list_entries(str(folder)).items()}


BF16_OPTIM = "bf16_zero_pp_rank_1_mp_rank_07_optim_states.pt"
OLD_OPTIM = "zero_pp_rank_2_mp_rank_00optim_states.pt"
COPIES = {rank: f"{shard(rank)}-{of}" for rank, of in enumerate(("0.2", "0.1", "1.2", "0.1"))}
SWAPS = [f"offloaded_tensors/rank03/{name}" for name in ("1_4.tensor.swp", "exp_avg-1_4.tensor.swp")]
SORTED: list[tuple[list[str], dict[str, dict[Any, str]]]] = [
    ([STATES, "mp_rank_103_model_states.pt"], {"model": {(0, 0): STATES, (103, 0): "mp_rank_103_model_states.pt"}}),
    (
        [STATES, *(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 11))],
        {"model_zero3": {(0, rank): f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 11)}},
    ),
    (
        [STATES, shard(1), BF16_OPTIM, OLD_OPTIM],
        {"optim": {("", 0, 1): shard(1), ("bf16_", 7, 1): BF16_OPTIM, ("", 0, 2): OLD_OPTIM}},
    ),
    (
        [STATES, "layer_01-model_states.pt", "layer_120-model_11-model_states.pt"],
        {"layer": {(1, NO_AXIS): "layer_01-model_states.pt", (120, 11): "layer_120-model_11-model_states.pt"}},
    ),
    (  # names by the fast writer on two sockets, with two ranks that write a whole file each
        [*(f"{STATES}-{of}" for of in ("0.1", "1.2", "0.2")), *COPIES.values()],
        {
            "model": {(0, 0): f"{STATES}-0.2"},
            "optim": {("", 0, rank): name for rank, name in COPIES.items()},
            "copies": {f"{STATES}-0.1": f"{STATES}-0.2", f"{STATES}-1.2": f"{STATES}-0.2"},
        },
    ),
    ([STATES, *SWAPS], {"swap": {SwapName(3, "", 1, 4): SWAPS[0], SwapName(3, "exp_avg", 1, 4): SWAPS[1]}}),
    *(
        ([STATES, f"{STATES}{ending}"], {"model": {(0, 0): STATES}, "copies": {}})
        for ending in ("-0", "-0.", "-٣.4", "-0.2-0.2", f"-{'9' * 10}.1")
    ),
]


@pytest.mark.parametrize(("names", "roles"), SORTED, ids=lambda each: " ".join(each) if isinstance(each, dict) else "")
def test_file_names_determine_roles(names: list[str], roles: dict[str, dict[Any, str]]) -> None:
    found, copies = sort_names("folder", names)
    assert {role: {**found, "copies": copies}[role] for role in roles} == roles


AXES = "layer_00-expert_01-model_01-model_states.pt"


@pytest.mark.parametrize(
    ("names", "kind", "text"),
    [
        ([], CheckpointError, "no model states found .* only nothing"),
        ([shard(0)], CheckpointError, f"only {shard(0)}"),
        ([STATES, AXES], UnsupportedError, f"{AXES} belongs to .*axes of its own.*DeepSpeed's own load takes it"),
        ([f"{STATES}-0.2", STATES], CheckpointError, f"two saves .{STATES}-0.2 and {STATES}"),
        ([f"{shard(0)}-0.{n}" for n in "42"], CheckpointError, f"two saves .{shard(0)}-0.4 and {shard(0)}-0.2"),
    ],
    ids=["nothing", "no model states", "axes", "two writers", "two shards"],
)
def test_invalid_listings_are_refused(names: list[str], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        sort_names("folder", names)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("offloaded_tensors/rank07/0_13.tensor.swp", SwapName(7, "", 0, 13)),
        ("offloaded_tensors/rank123/exp_avg-9_3.tensor.swp", SwapName(123, "exp_avg", 9, 3)),
        ("offloaded_tensors/rank00/a-b-2_2.tensor.swp", SwapName(0, "a-b", 2, 2)),
        ("offloaded_tensors/rank00/0_13_gradient_0_5.tensor.swp", None),
        ("offloaded_tensors/rank0x/0_13.tensor.swp", None),
        ("offloaded_tensors/0_13.tensor.swp", None),
        ("rank00/0_13.tensor.swp", None),
        ("elsewhere/rank00/0_13.tensor.swp", None),
        ("offloaded_tensors/rank00/1_٣.tensor.swp", None),
        (f"offloaded_tensors/rank00/{'9' * 5000}_1.tensor.swp", None),
    ],
)
def test_parse_names_of_swap_files(name: str, expected: SwapName | None) -> None:
    assert read_swap_name(name) == expected


def test_state_files_folders_and_swap_files_are_listed(tmp_path: Path) -> None:
    touch(tmp_path, STATES, "zero_to_fp32.py", "notes.txt", f"{shard(0)}.tmp")
    touch(tmp_path / "offloaded_tensors" / "rank03", "1_4.tensor.swp", "exp_avg-1_4.tensor.swp", "notes.txt")
    (tmp_path / "offloaded_tensors" / "rank03" / "5_6.tensor.swp").mkdir()
    sizes = {STATES: len(STATES), "offloaded_tensors": -1, **{name: len(Path(name).name) for name in SWAPS}}
    assert list_sizes(tmp_path) == sizes
    with pytest.raises(CheckpointError, match="nowhere: cannot be listed .No such file"):
        list_sizes(tmp_path / "nowhere")


def test_a_conversion_does_not_hide_later_tags(tmp_path: Path) -> None:
    """DeepSpeed writes no `latest` with save_latest=False; a conversion writes another one."""
    for tag, step in (("early", 3), ("converted", 3), ("late", 4)):
        (tmp_path / tag).mkdir()
        torch.save({"global_steps": step, "module": {}, "dp_world_size": 1}, tmp_path / tag / STATES)
    (tmp_path / "latest_universal").write_text("converted")
    with pytest.raises(CheckpointError, match="names converted of step 3, but there are later checkpoints: late. Name"):
        read_latest(str(tmp_path))
    assert read_latest(str(tmp_path), universal=True) == "converted"
    (tmp_path / "late" / STATES).unlink()
    assert read_latest(str(tmp_path)) == "converted"
    (tmp_path / "latest").write_text("early\n")
    assert read_latest(str(tmp_path)) == "early"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "latest is missing, but .* global_step3, global_step9.*tag=.*its folder"),
        (b"", r"latest is empty.*\(global_step3, global_step9\)"),
        (b" \n", r"latest is empty.*\(global_step3, global_step9\)"),
        (b"\xff\xfe\x00garbage", "latest: cannot be read"),
        ("folder", "latest: cannot be read"),
    ],
    ids=["missing", "empty", "blank", "garbage", "folder"],
)
def test_an_invalid_latest_is_refused(content: bytes | str | None, text: str, tmp_path: Path) -> None:
    for tag in ("global_step3", "global_step9"):
        touch(tmp_path / tag, STATES)
    if isinstance(content, bytes):
        (tmp_path / "latest").write_bytes(content)
    elif content:
        (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match=text):
        read_latest(str(tmp_path))
    (tmp_path / "latest_universal").write_text("global_step3")  # is no substitute for a damaged `latest`
    if content is not None:
        with pytest.raises(CheckpointError, match=text):
            read_latest(str(tmp_path))


@pytest.mark.parametrize("name", [STATES, "ucp_manifest.json"], ids=["normal", "atomic"])
def test_a_tag_folder_is_accepted_as_a_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tag_folder, below = tmp_path / "global_step3", tmp_path / "global_step3" / "global_step9"
    touch(tag_folder, name)
    monkeypatch.chdir(tag_folder)
    for folder in (str(tag_folder), f"{tag_folder}/", "."):
        assert read_latest(folder) == "global_step3"
        assert os.path.samefile(find_folder(folder, "global_step3"), tag_folder)
        assert os.path.samefile(check_tag(folder, "global_step3"), find_checkpoint(folder))
    assert find_folder(str(tag_folder), "other") == str(tag_folder / "other")
    touch(below, STATES)  # a later save into the loaded folder, complete once `latest` names it
    assert (read_latest(str(tag_folder)), find_checkpoint(str(tag_folder))) == ("global_step3", str(tag_folder))
    (tag_folder / "latest").write_text("global_step9")
    assert (read_latest(str(tag_folder)), find_checkpoint(str(tag_folder))) == ("global_step9", str(below))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("checkpoint-4/x", "checkpoint-12/x", "config.json"), "trainer's output folder.*checkpoint-4, checkpoint-12$"),
        (("last.ckpt/latest", "hparams.yaml"), "of Lightning's: name one of its checkpoints, last.ckpt$"),
        (("adapter_config.json",), "PEFT adapter without its weights"),
        (("zero_to_fp32.py",), "leftovers of removed checkpoints"),
        (("first/latest", "second/latest", "log"), "folders of checkpoints: name one of them, first, second$"),
        (("step-3/.metadata", "step-3/__0_0.distcp", "log"), "folders of checkpoints: name one of them, step-3$"),
        (("README.md", "docs/index.md"), "^holds README.md, docs, none of them a checkpoint"),
        ((".gitkeep", "lost+found/x"), "^$"),
        ((), "^$"),
    ],
)
def test_a_folder_without_a_checkpoint_is_described(names: tuple[str, ...], text: str, tmp_path: Path) -> None:
    for name in names:
        touch((tmp_path / name).parent, Path(name).name)
    looks = describe_content(str(tmp_path))
    assert re.search(text, looks)
    with pytest.raises(CheckpointError, match="neither a checkpoint's folder nor one with `latest`: it") as error:
        find_checkpoint(str(tmp_path))
    assert str(error.value).endswith(f": it {looks or 'is empty'}.")


def test_a_file_in_place_of_a_folder_is_described(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    assert describe_content(str(tmp_path / "absent")) == ""
    for name in ("file", "link"):
        assert "is a file or a broken link" in describe_content(str(tmp_path / name))


@pytest.mark.parametrize(
    ("folder", "tag", "text"),
    [
        ("empty", "x", "no checkpoint with tag 'x'.*the folder holds no checkpoint"),
        ("absent", "x", "no checkpoint with tag 'x': {}/absent does not exist. Check"),
        ("file", "x", "no checkpoint with tag 'x': {}/file is a file. Check"),
        ("weights", "x", "itself a checkpoint, safetensors. Load it without a tag"),
        ("lost", "x", "the folder holds no checkpoint"),  # weights next to `latest` do not replace the missing tag
        ("run", "global_step4", "'global_step4'.*holds global_step3 .did you mean 'global_step3'.*Name one of"),
    ],
)
def test_an_unknown_tag_is_refused_with_the_known_ones(folder: str, tag: str, text: str, tmp_path: Path) -> None:
    for path in ("empty", "run/logs"):
        (tmp_path / path).mkdir(parents=True)
    touch(tmp_path, "file")
    touch(tmp_path / "weights", "model.safetensors")
    touch(tmp_path / "lost", "model.safetensors")
    (tmp_path / "lost" / "latest").write_text("x")
    touch(tmp_path / "run" / "global_step3", STATES)
    with pytest.raises(CheckpointError, match=text.format(tmp_path)):
        check_tag(str(tmp_path / folder), tag)


@pytest.mark.parametrize("closed", ["", "a"], ids=["all", "one"])
def test_tags_are_folders_with_states(closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable folder is an error, except ``lost+found``: otherwise a run would restart from scratch."""
    touch(tmp_path / "b", STATES)
    touch(tmp_path / "a", shard(0))
    touch(tmp_path / "c", "notes.txt")
    touch(tmp_path, STATES)
    (tmp_path / "lost+found").mkdir()
    refuse = partial(refuse_path, os.scandir)
    monkeypatch.setattr(os, "scandir", partial(refuse, str(tmp_path / "lost+found")))
    assert find_tags(str(tmp_path)) == ["a", "b"]
    assert find_tags(str(tmp_path / "absent")) == find_tags(str(tmp_path / "c" / "notes.txt")) == []
    (tmp_path / STATES).unlink()
    monkeypatch.setattr(os, "scandir", partial(refuse, os.path.join(tmp_path, closed)))
    with pytest.raises(OutOfReachError, match=r"cannot be listed \(Permission denied\)"):
        read_latest(str(tmp_path))


def test_tags_without_steps_are_ordered_by_their_earliest_time_in_all_places(tmp_path: Path) -> None:
    saves = {"here/c": 30, "there/b": 99, "nearby/b": 20, "there/later": 40, "there/a": 10, "here/run/x": 5}
    for tag, time in saves.items():
        touch(tmp_path / tag, f"{STATES}-0.1" if "x" in tag else STATES)
        for file in (tmp_path / tag).iterdir():
            os.utime(file, (time, time))
    places = [str(tmp_path / name) for name in ("here", "there", "nearby", "absent")]
    assert list_older(places, "c") == ["c", "b", "a"]
    assert list_older(places[:1], "a") == ["a", "c"]  # the time of `a` is unknown
    assert list_older([str(tmp_path)], "there/b") == ["there/b", "there/later", "there/a"]
    assert list_older(places, "run/x") == ["run/x"]
    assert find_newest(places[1]) == "b"


def test_list_older_orders_tags_by_step_then_seal_then_time(tmp_path: Path) -> None:
    """Times count only for tags of one step, or without a readable step."""
    saves = {"final": (12, 5), "best": (9, 90), "old": (3, 99), "copy": (9, 40), "newer": (13, 1), "sealed": (9, 7)}
    for tag, (step, time) in saves.items():
        folder = write_checkpoint(tmp_path, TINY, random_state(TINY, 0), Topology(1, 1), tag=tag, run=Run(step))
        for file in folder.iterdir():
            os.utime(file, (time, time))
    (tmp_path / "sealed" / SEAL).touch()
    (tmp_path / "old" / shard(7)).symlink_to("nowhere")
    place = str(tmp_path)
    assert list_older([place], "final") == ["final", "sealed", "best", "copy", "old"]
    assert list_older([place], "best") == ["best", "sealed", "copy", "old"]
    assert find_newest(place) == "newer"
    os.truncate(tmp_path / "best" / STATES, 100)
    assert list_older([place], "best") == ["best", "newer", "final", "sealed", "copy"]  # `old` was written later
    assert list_older([place], "final") == ["final", "sealed", "copy", "old"]
    assert find_age([str(tmp_path / "old")]) == (3, False, 99.0)
    assert find_age([str(tmp_path / "absent"), str(tmp_path / "sealed")]) == (9, True, 7.0)


def test_a_tag_with_a_damaged_published_file_does_not_hide_others(tmp_path: Path) -> None:
    """`fallback` skips such a tag like any other damaged one."""
    for tag, step in (("new", 9), ("old", 3)):
        write_checkpoint(tmp_path, TINY, random_state(TINY, 0), Topology(1, 1), tag=tag, run=Run(step))
    touch(tmp_path / "broken", PUBLISHED)
    touch(tmp_path / "old", SEAL)
    place = str(tmp_path)
    assert find_newest(place) == "new"
    assert list_older([place], "new") == ["new", "old", "broken"]
    assert list_older([place], "broken") == ["broken", "new", "old"]
    assert list_unsealed([place], ["new", "old", "broken"]) == {"new", "broken"}
    (tmp_path / "latest").unlink()
    (tmp_path / UNIVERSAL).write_text("old")
    with pytest.raises(CheckpointError, match=r"there are later checkpoints: new\."):
        read_latest(place)


def test_tags_without_a_seal_are_listed_if_others_have_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tags, places = ["c", "b", "a"], [str(tmp_path), str(tmp_path / "there")]
    for tag in tags:
        (tmp_path / tag).mkdir()
        (tmp_path / "there" / tag).mkdir(parents=True)
    assert list_unsealed(places, tags) == set()
    (tmp_path / "a" / SEAL).touch()
    assert list_unsealed(places, tags) == {"b", "c"}
    (tmp_path / "there" / "c" / SEAL).touch()
    assert list_unsealed(places, tags) == {"b"}

    def look(path: str) -> int:
        if path.startswith(places[1]):
            raise ConnectionError("out of reach")
        return os.stat(path).st_mtime_ns

    monkeypatch.setattr("deepspeed_ucp.formats.latest.find_change_time", look)
    assert is_sealed(places, "a")
    with pytest.raises(OutOfReachError, match=r"there.c.ucp_seal.json: cannot be looked at .out of reach"):
        list_unsealed(places, tags)


def name_by_sequence_rank(files: dict[str, Any], sp: int) -> dict[str, Any]:
    """Name files like DeepSpeed before 0.19.8 with ALST's mpu."""
    found = {}
    for name, content in files.items():
        rank = re.match(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_", name)
        found[name.replace("_mp_rank_00_", f"_mp_rank_{int(rank[1]) % sp:02d}_") if rank else name] = content
    return found


PAIR = Model((Param("a", (4, 5)), Param("b", (8,))))
SHARDED = pytest.mark.parametrize("topology", [Topology(1, 4, "bf16"), Topology(3, 4)], ids=lambda each: each.label)


@pytest.mark.parametrize("sp", [2, 4])
@SHARDED
def test_files_named_by_sequence_parallel_rank_are_read(tmp_path: Path, topology: Topology, sp: int) -> None:
    files = build_files(PAIR, random_state(PAIR, 0, precision=topology.precision), topology)
    write_files(tmp_path / "plain", files)
    write_files(tmp_path / "alst", name_by_sequence_rank(files, sp))
    plain, index = (open_alone(tmp_path / each) for each in ("plain", "alst"))
    assert index.topology == plain.topology
    assert index.atoms == plain.atoms
    if topology.stage == 3:
        state_files = [find_state_file(index, 0, rank) for rank in range(1, 4)]
        assert state_files == [
            str(tmp_path / "alst" / f"zero_pp_rank_{r}_mp_rank_{r % sp:02d}_model_states.pt") for r in range(1, 4)
        ]
    assert [each for each in index.unnoticed if "sequence-parallel rank" in each] and not plain.unnoticed


def test_missing_tensor_parallel_shards_do_not_look_like_sequence_parallel_names(tmp_path: Path) -> None:
    """The remaining files have the same numbers as under sequence parallelism."""
    topology = Topology(1, 2, tp=2)
    files = build_files(PAIR, random_state(PAIR, 0), topology, cut=lambda _, tensor, tp, rank: tensor.chunk(tp)[rank])
    for rank in range(2):
        del files[f"zero_pp_rank_{rank}_mp_rank_0{1 - rank}_optim_states.pt"]
    write_files(tmp_path, files)
    check_refused(tmp_path, r"zero_pp_rank_(0_mp_rank_01|1_mp_rank_00).* missing")


@pytest.mark.parametrize("left", [3, 2])
@SHARDED
def test_missing_files_are_named_by_sequence_parallel_rank(tmp_path: Path, topology: Topology, left: int) -> None:
    state = random_state(PAIR, 0, precision=topology.precision)
    files = name_by_sequence_rank(build_files(PAIR, state, topology), 2)
    missing = [name for name in files if (rank := re.search(r"pp_rank_(\d)", name)) and int(rank[1]) >= left]
    write_files(tmp_path, {name: content for name, content in files.items() if name not in missing})
    report = survey_checkpoint(str(tmp_path), Comm())
    assert {finding.file for finding in report.findings if finding.kind == "missing"} == set(missing)


MODEL = Model((Param("a", (3, 5)), Param("b", (7,))))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A save of four ranks, and the same save written by two writers and by two ranks without writer."""
    topology = Topology(1, 4)
    plain = write_checkpoint(tmp_path / "plain", MODEL, random_state(MODEL, 0), topology)
    fast = write_checkpoint(tmp_path / "fast", MODEL, random_state(MODEL, 0), topology)
    for rank, writer in enumerate(("0.2", "0.1", "1.2", "0.1")):
        (fast / shard(rank)).rename(fast / f"{shard(rank)}-{writer}")
    for writer in ("0.1", "1.2"):
        (fast / f"{STATES}-{writer}").write_bytes((fast / STATES).read_bytes())
    (fast / STATES).rename(fast / f"{STATES}-0.2")
    return plain, fast


def test_other_ranks_copies_are_warnings_even_if_damaged(folders: tuple[Path, Path]) -> None:
    fast = folders[1]
    (fast / f"{STATES}-0.1").write_bytes(b"torn")
    found = verify_checkpoint(str(fast))
    assert {fault.file for fault in found.faults} == {f"{STATES}-0.1", f"{STATES}-1.2"}
    assert all(not fault.is_fault for fault in found.faults)
    assert any(f"another rank's copy of {STATES}-0.2" in fault.text for fault in found.faults)
    assert len(found.files) == 7


@pytest.mark.parametrize("name", [f"{STATES}-0.2", f"{shard(2)}-1.2"])
def test_a_damaged_file_of_the_fast_writer_is_refused_by_name(folders: tuple[Path, Path], name: str) -> None:
    path = folders[1] / name
    path.write_bytes(path.read_bytes()[:-40])
    check_refused(folders[1], f"{name}: no zip directory")


def overwrite_in_place(folder: Path, model: Model, writer: str) -> Path:
    """Write over a tag like a second save: a longer old file keeps its end."""
    topology = Topology(1, 2)
    plain = write_checkpoint(folder / "once", model, random_state(model, 0), topology)
    tag = folder / "tag"
    tag.mkdir(exist_ok=True)
    for file in plain.iterdir():
        path, data = tag / f"{file.name}-{writer}", file.read_bytes()
        path.write_bytes(data + (path.read_bytes()[len(data) :] if path.exists() else b""))
    return tag


@pytest.mark.parametrize(
    ("rows", "writer", "words"),
    [
        (3, "0.2", r"does not truncate files .* Next time save into a new tag, or delete the old one first"),
        (300, "0.4", r"two saves .* Remove the older save's files; DeepSpeed's fast writer leaves them"),
    ],
    ids=["shorter", "other writers"],
)
def test_files_with_the_end_of_older_ones_are_refused(tmp_path: Path, rows: int, writer: str, words: str) -> None:
    overwrite_in_place(tmp_path, Model((Param("a", (300, 5)),)), "0.2")
    tag = overwrite_in_place(tmp_path, Model((Param("a", (rows, 5)),)), writer)
    check_refused(tag, words)


def test_a_missing_file_is_reported_by_name(folders: tuple[Path, Path]) -> None:
    (folders[1] / f"{shard(3)}-0.1").unlink()
    check_refused(folders[1], f"{shard(3)} is missing")


def test_seal_and_convert_accept_files_of_the_fast_writer(folders: tuple[Path, Path], tmp_path: Path) -> None:
    conversions = [tmp_path / name for name in ("of-plain", "of-fast")]
    for folder, destination in zip(folders, conversions, strict=True):
        seal_folder(str(folder), Comm())
        convert_checkpoint(str(folder), str(destination))
    left, right = ({p.relative_to(m): p.read_bytes() for p in m.rglob("*.pt")} for m in conversions)
    assert left == right
    (folders[1] / f"{shard(0)}-0.2").write_bytes((folders[0] / shard(0)).read_bytes() + b"\0")
    with pytest.raises(CheckpointError):
        open_alone(folders[1])


# -- a tag whose files are in a folder below it -----------------------------------------------------------------------

INSIDE = ".ucp-save-job-1-0a1b2c3d"


@pytest.fixture
def tag(tmp_path: Path) -> Path:
    """A sealed tag with its files in a folder below it."""
    source = write_source(tmp_path, 3)
    seal_folder(str(source), Comm())
    names = os.listdir(source)
    (source / INSIDE).mkdir()
    for name in names:
        (source / name).rename(source / INSIDE / name)
    (source / "ucp_published.json").write_text(json.dumps({"folder": INSIDE}))
    (tmp_path / "latest").write_text(source.name)
    return source


def test_a_published_tag_is_found_and_loaded(tag: Path, tmp_path: Path) -> None:
    place, name = str(tmp_path), tag.name
    assert find_tags(place) == [name] and check_tag(place, name) == str(tag) and find_checkpoint(place) == str(tag)
    assert not holds_foreign(str(tag)) and is_sealed([place], name) and find_mark(place, name)
    index = open_alone(tag)
    assert {os.path.dirname(file.path) for file in index.files} == {str(tag / INSIDE)}
    age = find_age([str(tag)])
    assert age.sealed and age.step == index.counters["global_steps"] and age.time > 0
    report = describe_tag(place, name)
    assert not report["fault"] and report["topology"]
    assert verify_checkpoint(str(tag)).whole


def test_files_of_an_earlier_save_in_the_tag_do_not_count(tag: Path, tmp_path: Path) -> None:
    for path in (tag / INSIDE).iterdir():
        (tag / path.name).write_bytes(b"of another save")
        os.utime(tag / path.name, (1, 1))
    assert open_alone(tag) and verify_checkpoint(str(tag)).whole and is_sealed([str(tmp_path)], tag.name)


def test_an_unpublished_folder_is_not_read(tag: Path, tmp_path: Path) -> None:
    (tag / "ucp_published.json").unlink()
    assert find_tags(str(tmp_path)) == [] and not is_sealed([str(tmp_path)], tag.name)
    check_refused(tag, "no model states")


def test_a_deepspeed_save_into_a_local_copy_replaces_the_published_files(tag: Path) -> None:
    """The older files are in a folder below the tag and are not loaded."""
    write_source(tag.parent / "later", 5)
    for path in (tag.parent / "later").rglob("*.pt"):
        path.rename(tag / path.name)
    check_refused(tag, r"files of two saves.*remove ucp_published\.json")
    remove_seal(str(tag))  # like a save with the plugin
    assert {os.path.dirname(file.path) for file in open_alone(tag).files} == {str(tag)}


@pytest.mark.parametrize("name", ["..", ".ucp-save-a/../..", "/etc", "other", "", 3, None, ".ucp-save-/x"])
def test_invalid_folder_names_are_refused(name: object, tag: Path) -> None:
    (tag / "ucp_published.json").write_text(json.dumps({"folder": name}))
    check_refused(tag, r"ucp_published\.json")


def test_commands_accept_a_published_tag(tag: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path), "--memory", str(tmp_path / "memory")]) == 0
    assert "a resume takes" in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["verify", "--seal", str(tag)]) == 0 and not (tag / "ucp_seal.json").exists()
    assert main(["convert", str(tmp_path), str(tmp_path / "atomic")]) == 0


def test_a_published_tag_is_removed(tag: Path, tmp_path: Path) -> None:
    (tag / "others").write_text("")
    assert is_sealed([str(tmp_path)], tag.name)
    remove_tag(str(tmp_path), tag.name)
    assert os.listdir(tag) == ["others"]


def test_deepspeeds_loader_is_not_chosen_for_a_published_tag(tag: Path) -> None:
    index = open_alone(tag)
    assert choice._list_elsewhere(index, str(tag)) == [choice._BELOW]
    assert "below the tag" in choice._BELOW
    assert choice._list_elsewhere(index, resolve_published(str(tag))) == []


def test_relative_paths_start_at_the_tag() -> None:
    assert join_path(f"/run/tag/{INSIDE}", "../ucp_frozen-1/file") == "/run/ucp_frozen-1/file"
    assert join_path(f"s3://run/tag/{INSIDE}", "../ucp_frozen-1/file") == "s3://run/ucp_frozen-1/file"
