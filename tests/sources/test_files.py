"""File names, ``latest`` and tags."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, OutOfReachError, UnsupportedError
from deepspeed_ucp.sources import check_tag, find_tags, open_checkpoint, read_latest
from deepspeed_ucp.sources.files import (
    NO_AXIS,
    NO_LAYER,
    SEAL,
    SwapName,
    holds_atoms,
    list_entries,
    name_expert,
    read_swap_name,
    sort_files,
)
from deepspeed_ucp.sources.latest import (
    describe_content,
    find_checkpoint,
    find_folder,
)
from deepspeed_ucp.sources.older import find_age, find_newest, is_sealed, list_older, list_unsealed
from deepspeed_ucp.sources.ownfiles import find_state_file
from tests.synth import Model, Param, Run, Topology, build_files, random_state, write_checkpoint, write_files

MODEL = "mp_rank_00_model_states.pt"
TINY = Model((Param("a", (3, 5)),))


def touch(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x" * len(name))


def test_files_get_their_roles() -> None:
    names = [
        MODEL,
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "zero_pp_rank_11_mp_rank_00_model_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_07_optim_states.pt",
        "zero_pp_rank_2_mp_rank_00optim_states.pt",
        "mp_rank_103_model_states.pt",
        "layer_01-model_states.pt",
        "layer_120-model_11-model_states.pt",
    ]
    listing = sort_files("folder", dict.fromkeys(names, 1))
    assert listing.model == {0: MODEL, 103: names[6]}
    assert listing.model_zero3 == {(0, 0): names[1], (0, 11): names[2]}
    assert listing.optim == {("", 0, 1): names[3], ("bf16_", 7, 1): names[4], ("", 0, 2): names[5]}
    assert listing.layers == {(1, NO_AXIS): names[7], (120, 11): names[8]}


def list_sizes(folder: str) -> dict[str, int]:
    return {name: entry.size for name, entry in list_entries(folder).items()}


def test_only_state_files_and_folders_are_listed(tmp_path: Path) -> None:
    touch(tmp_path, MODEL, "zero_to_fp32.py", "notes.txt", "zero_pp_rank_0_mp_rank_00_optim_states.pt.tmp")
    (tmp_path / "sub").mkdir()
    assert list_sizes(str(tmp_path)) == {MODEL: len(MODEL), "sub": -1}


def test_kinds_that_are_not_covered_are_refused_by_file(tmp_path: Path) -> None:
    name = "layer_00-expert_01-model_01-model_states.pt"
    touch(tmp_path, MODEL, name)
    with pytest.raises(UnsupportedError, match=f"{name} belongs to .*axes of its own.*DeepSpeed's own load takes it"):
        sort_files(str(tmp_path), list_sizes(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "told"),
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
def test_names_of_swap_files(name: str, told: SwapName | None) -> None:
    assert read_swap_name(name) == told


def test_swap_files_are_listed(tmp_path: Path) -> None:
    touch(tmp_path, MODEL)
    folder = tmp_path / "offloaded_tensors" / "rank03"
    folder.mkdir(parents=True)
    touch(folder, "1_4.tensor.swp", "exp_avg-1_4.tensor.swp", "notes.txt")
    (folder / "5_6.tensor.swp").mkdir()
    sizes = list_sizes(str(tmp_path))
    names = [f"offloaded_tensors/rank03/{name}" for name in ("1_4.tensor.swp", "exp_avg-1_4.tensor.swp")]
    assert sizes.keys() == {MODEL, "offloaded_tensors", *names}
    assert sort_files(str(tmp_path), sizes).swaps == {
        SwapName(3, "", 1, 4): names[0],
        SwapName(3, "exp_avg", 1, 4): names[1],
    }


def test_files_of_experts_have_roles(tmp_path: Path) -> None:
    names = ["layer_2_expert_13_mp_rank_01_model_states.pt", "expert_3_mp_rank_00_model_states.pt"]
    touch(tmp_path, MODEL, *names, "expp_rank_5_mp_rank_01_optim_states.pt")
    listing = sort_files(str(tmp_path), list_sizes(str(tmp_path)))
    assert listing.experts == {(2, 13, 1): names[0], (NO_LAYER, 3, 0): names[1]}
    assert listing.expert_optim == {(1, 5): "expp_rank_5_mp_rank_01_optim_states.pt"}
    assert {name_expert(*key) for key in listing.experts} == set(names)


def test_of_the_fast_writers_copies_the_first_ranks_is_read() -> None:
    """Four ranks on two sockets: two writers, and the ranks that are none write as if they were alone."""
    optim = "zero_pp_rank_%d_mp_rank_00_optim_states.pt-%s"
    shards = {rank: optim % (rank, of) for rank, of in enumerate(("0.2", "0.1", "1.2", "0.1"))}
    names = [f"{MODEL}-{of}" for of in ("0.1", "1.2", "0.2")]
    listing = sort_files("folder", dict.fromkeys([*names, *shards.values()], 1))
    assert listing.model == {0: f"{MODEL}-0.2"}
    assert listing.optim == {("", 0, rank): name for rank, name in shards.items()}
    assert listing.copies == {f"{MODEL}-0.1": f"{MODEL}-0.2", f"{MODEL}-1.2": f"{MODEL}-0.2"}


@pytest.mark.parametrize("ending", ["-0", "-0.", "-٣.4", "-0.2-0.2", f"-{'9' * 10}.1"])
def test_names_that_the_fast_writer_does_not_make_have_no_role(ending: str) -> None:
    assert sort_files("folder", {MODEL: 1, f"{MODEL}{ending}": 1}).model == {0: MODEL}


@pytest.mark.parametrize(
    "names",
    [(f"{MODEL}-0.2", MODEL), tuple(f"zero_pp_rank_0_mp_rank_00_optim_states.pt-{of}" for of in ("0.4", "0.2"))],
)
def test_files_of_two_writers_are_two_saves(names: tuple[str, str]) -> None:
    with pytest.raises(CheckpointError, match=f"two saves .{names[0]} and {names[1]}"):
        sort_files("folder", dict.fromkeys(names, 1))


def test_a_folder_without_model_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model states found .* only nothing"):
        sort_files(str(tmp_path), list_sizes(str(tmp_path)))
    touch(tmp_path, "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match="only zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        sort_files(str(tmp_path), list_sizes(str(tmp_path)))


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: cannot be listed .No such file"):
        list_sizes(str(tmp_path / "nowhere"))


def test_latest_names_the_tag(tmp_path: Path) -> None:
    touch(tmp_path / "global_step3", MODEL)
    (tmp_path / "latest").write_text("global_step3\n")
    assert read_latest(str(tmp_path)) == "global_step3"
    assert check_tag(str(tmp_path), "global_step3") == str(tmp_path / "global_step3")


def test_where_nothing_was_saved_there_is_nothing_to_resume(tmp_path: Path) -> None:
    assert read_latest(str(tmp_path / "absent")) is None
    (tmp_path / "logs").mkdir()
    assert read_latest(str(tmp_path)) is None


@pytest.mark.parametrize("name", [MODEL, "ucp_manifest.json"], ids=["normal", "atomic"])
def test_a_checkpoints_own_folder_is_that_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, below = tmp_path / "global_step3", tmp_path / "global_step3" / "global_step9"
    touch(own, name)
    monkeypatch.chdir(own)
    for folder in (str(own), f"{own}/", "."):
        assert read_latest(folder) == "global_step3"
        assert os.path.samefile(find_folder(folder, "global_step3"), own)
        assert os.path.samefile(check_tag(folder, "global_step3"), find_checkpoint(folder))
    assert find_folder(str(own), "other") == str(own / "other")
    touch(below, MODEL)  # of a save into the folder that was loaded from, which `latest` tells is whole
    assert (read_latest(str(own)), find_checkpoint(str(own))) == ("global_step3", str(own))
    (own / "latest").write_text("global_step9")
    assert (read_latest(str(own)), find_checkpoint(str(own))) == ("global_step9", str(below))


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("checkpoint-4/x", "checkpoint-12/x", "config.json"), "trainer's output folder.*checkpoint-4, checkpoint-12$"),
        (("last.ckpt/latest", "hparams.yaml"), "of Lightning's: name one of its checkpoints, last.ckpt$"),
        (("adapter_config.json",), "PEFT adapter without its weights"),
        (("zero_to_fp32.py",), "what removed checkpoints have left"),
        (("first/latest", "second/latest", "log"), "folders of checkpoints: name one of them, first, second$"),
        (("step-3/.metadata", "step-3/__0_0.distcp", "log"), "folders of checkpoints: name one of them, step-3$"),
        (("README.md", "docs/index.md"), "^holds README.md, docs, none of them a checkpoint"),
        ((".gitkeep", "lost+found/x"), "^$"),
        ((), "^$"),
    ],
)
def test_a_folder_without_a_checkpoint_is_told_by_what_it_looks_like(
    names: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    for name in names:
        touch((tmp_path / name).parent, Path(name).name)
    looks = describe_content(str(tmp_path))
    assert re.search(told, looks)
    with pytest.raises(CheckpointError, match="neither a checkpoint's folder nor one with `latest`: it") as caught:
        find_checkpoint(str(tmp_path))
    assert str(caught.value).endswith(f": it {looks or 'is empty'}.")


def test_what_lies_in_a_folders_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    assert describe_content(str(tmp_path / "absent")) == ""
    for name in ("file", "link"):
        assert "is a file, or a link to nothing" in describe_content(str(tmp_path / name))


def test_a_missing_latest_beside_checkpoints_is_refused(tmp_path: Path) -> None:
    touch(tmp_path / "global_step3", MODEL)
    touch(tmp_path / "global_step9", MODEL)
    with pytest.raises(CheckpointError, match="latest is missing, but .* global_step3, global_step9.*tag=.*its folder"):
        read_latest(str(tmp_path))


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_latest_is_refused(tmp_path: Path, text: str) -> None:
    touch(tmp_path / "global_step3", MODEL)
    (tmp_path / "latest").write_text(text)
    with pytest.raises(CheckpointError, match=r"latest is empty.*\(global_step3\)"):
        read_latest(str(tmp_path))


def test_a_latest_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match="latest: cannot be read"):
        read_latest(str(tmp_path))


def test_a_latest_of_garbage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"\xff\xfe\x00garbage")
    with pytest.raises(CheckpointError, match="latest"):
        read_latest(str(tmp_path))


def test_without_latest_an_atomic_checkpoint_is_resumed(tmp_path: Path) -> None:
    """A moved one comes with ``latest_universal`` alone; beside ``latest`` that is the newer word."""
    touch(tmp_path / "global_step3_universal", MODEL)
    (tmp_path / "latest_universal").write_text("global_step3_universal")
    assert read_latest(str(tmp_path)) == "global_step3_universal"
    (tmp_path / "latest").write_text("global_step9")
    assert read_latest(str(tmp_path)) == "global_step9"
    (tmp_path / "latest").write_text("")
    with pytest.raises(CheckpointError, match="latest is empty"):
        read_latest(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "atomic"),
    [
        (("zero/", "mp_rank_00_model_states.pt"), True),
        (("ucp_manifest.json",), True),
        (("zero/", "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"), False),
        (("mp_rank_00_model_states.pt",), False),
    ],
    ids=["converted", "manifest", "converted-into-itself", "normal"],
)
def test_atomic_checkpoints_are_told_by_their_files(tmp_path: Path, names: tuple[str, ...], atomic: bool) -> None:
    for name in names:
        (tmp_path / name).mkdir() if name.endswith("/") else touch(tmp_path, name)
    assert holds_atoms(list_entries(str(tmp_path))) is atomic


def test_an_unknown_tag_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint with tag 'x'.*the folder holds no checkpoint"):
        check_tag(str(tmp_path), "x")
    (tmp_path / "file").touch()
    for name, fact in (("absent", "does not exist"), ("file", "is a file")):
        with pytest.raises(CheckpointError, match=f"no checkpoint with tag 'x': {tmp_path}/{name} {fact}. Check"):
            check_tag(str(tmp_path / name), "x")
    touch(tmp_path / "weights", "model.safetensors")
    with pytest.raises(CheckpointError, match="itself a checkpoint, safetensors. Load it without a tag"):
        check_tag(str(tmp_path / "weights"), "x")
    (tmp_path / "weights" / "latest").write_text("x")  # of a run whose tag is lost: the weights alone are not that
    with pytest.raises(CheckpointError, match="the folder holds no checkpoint"):
        check_tag(str(tmp_path / "weights"), "x")
    touch(tmp_path / "global_step3", MODEL)
    (tmp_path / "logs").mkdir()
    with pytest.raises(
        CheckpointError, match="'global_step4'.*holds global_step3 .did you mean 'global_step3'.*Name one of"
    ):
        check_tag(str(tmp_path), "global_step4")


def test_tags_are_folders_with_states(tmp_path: Path) -> None:
    touch(tmp_path / "b", MODEL)
    touch(tmp_path / "a", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    touch(tmp_path / "c", "notes.txt")
    touch(tmp_path, MODEL)
    assert find_tags(str(tmp_path)) == ["a", "b"]
    assert find_tags(str(tmp_path / "absent")) == []
    assert find_tags(str(tmp_path / "c" / "notes.txt")) == []


@pytest.mark.parametrize("refused", ["", "a"], ids=["all", "one"])
def test_a_folder_that_cannot_be_listed_is_not_one_without_tags(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody begins from scratch because of it. What root keeps in the root of a file system is nothing of a run."""
    (tmp_path / "lost+found").mkdir()
    touch(tmp_path / "a", MODEL)
    scan, closed = os.scandir, [str(tmp_path / "lost+found")]

    def look(path: str) -> Any:
        if path in closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", look)
    assert find_tags(str(tmp_path)) == ["a"]
    closed.append(os.path.join(tmp_path, refused).rstrip("/"))
    with pytest.raises(OutOfReachError, match=r"cannot be listed \(Permission denied\)"):
        read_latest(str(tmp_path))


def save_at(time: int, folder: Path, name: str = "mp_rank_00_model_states.pt") -> None:
    folder.mkdir(parents=True)
    (folder / name).touch()
    os.utime(folder / name, (time, time))


def test_tags_are_told_apart_by_the_times_of_every_writers_files(tmp_path: Path) -> None:
    for time, tag in enumerate(("run/step9", "run/step10", "run/step11"), 10):
        save_at(time, tmp_path / tag, "mp_rank_00_model_states.pt-0.1")
    save_at(50, tmp_path / "other")
    assert list_older([str(tmp_path / "run")], "step11") == ["step11", "step10", "step9"]
    assert list_older([str(tmp_path)], "run/step11") == ["run/step11", "run/step10", "run/step9"]
    assert find_newest(str(tmp_path / "run")) == "step11"


def test_older_checkpoints_are_those_that_were_saved_before(tmp_path: Path) -> None:
    for time, tag in ((30, "c"), (10, "a"), (40, "later"), (20, "b")):
        save_at(time, tmp_path / tag)
    assert list_older([str(tmp_path)], "c") == ["c", "b", "a"]


def test_older_checkpoints_of_all_places_are_told_by_their_first_times(tmp_path: Path) -> None:
    for time, tag in ((30, "here/c"), (99, "there/b"), (20, "nearby/b"), (40, "there/later"), (10, "there/a")):
        save_at(time, tmp_path / tag)
    places = [str(tmp_path / name) for name in ("here", "there", "nearby", "absent")]
    assert list_older(places, "c") == ["c", "b", "a"]
    assert list_older(places[:1], "a") == ["a", "c"]  # which nothing tells the time of


def test_tags_are_ordered_by_step_then_seal_then_time(tmp_path: Path) -> None:
    """Whatever the clock was, and when they were copied; of one whose step cannot be read by time."""
    saves = {"final": (12, 5), "best": (9, 90), "old": (3, 99), "copy": (9, 40), "newer": (13, 1), "sealed": (9, 7)}
    for tag, (step, time) in saves.items():
        folder = write_checkpoint(tmp_path, TINY, random_state(TINY, 0), Topology(1, 1), tag=tag, run=Run(step))
        for file in folder.iterdir():
            os.utime(file, (time, time))
    (tmp_path / "sealed" / SEAL).touch()
    (tmp_path / "old" / "zero_pp_rank_7_mp_rank_00_optim_states.pt").symlink_to("nowhere")
    place = str(tmp_path)
    assert list_older([place], "final") == ["final", "sealed", "best", "copy", "old"]
    assert list_older([place], "best") == ["best", "sealed", "copy", "old"]
    assert find_newest(place) == "newer"
    os.truncate(tmp_path / "best" / MODEL, 100)
    assert list_older([place], "best") == ["best", "newer", "final", "sealed", "copy"]  # `old` was written after it
    assert list_older([place], "final") == ["final", "sealed", "copy", "old"]
    assert find_age([str(tmp_path / "old")]) == (3, False, 99.0)
    assert find_age([str(tmp_path / "absent"), str(tmp_path / "sealed")]) == (9, True, 7.0)


def test_tags_without_a_seal_are_told_where_others_have_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr("deepspeed_ucp.sources.older.find_change", look)
    assert is_sealed(places, "a")
    with pytest.raises(OutOfReachError, match=r"there.c.ucp_seal.json: cannot be looked at .out of reach"):
        list_unsealed(places, tags)


def name_by_sequence_rank(files: dict[str, Any], sp: int) -> dict[str, Any]:
    """The files as DeepSpeed before 0.19.8 names them with ALST's mpu."""
    found = {}
    for name, content in files.items():
        rank = re.match(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_", name)
        found[name.replace("_mp_rank_00_", f"_mp_rank_{int(rank[1]) % sp:02d}_") if rank else name] = content
    return found


@pytest.mark.parametrize("sp", [2, 4])
@pytest.mark.parametrize("topology", [Topology(1, 4, "bf16"), Topology(3, 4)], ids=lambda each: each.label)
def test_files_that_are_named_by_sequence_rank(tmp_path: Path, topology: Topology, sp: int) -> None:
    model = Model((Param("a", (3, 5)), Param("b", (7,))))
    files = build_files(model, random_state(model, 0, precision=topology.precision), topology)
    write_files(tmp_path / "plain", files)
    write_files(tmp_path / "alst", name_by_sequence_rank(files, sp))
    plain, index = (open_checkpoint(str(tmp_path / each), Comm()) for each in ("plain", "alst"))
    assert index.run.topology == plain.run.topology
    assert index.stored.atoms == plain.stored.atoms
    if topology.stage == 3:
        own = [find_state_file(index, 0, rank) for rank in range(1, 4)]
        assert own == [
            str(tmp_path / "alst" / f"zero_pp_rank_{r}_mp_rank_{r % sp:02d}_model_states.pt") for r in range(1, 4)
        ]
    assert [each for each in index.limits.unnoticed if "sequence-parallel rank" in each] and not plain.limits.unnoticed


def test_missing_shards_of_tensor_parallel_ranks_are_not_taken_for_sequence_ranks(tmp_path: Path) -> None:
    """What is left is numbered as under sequence parallelism."""
    model = Model((Param("a", (4, 5)), Param("b", (8,))))
    topology = Topology(1, 2, tp=2)
    files = build_files(model, random_state(model, 0), topology, cut=lambda _, tensor, tp, rank: tensor.chunk(tp)[rank])
    left = {
        name: each for name, each in files.items() if not re.match(r"zero_pp_rank_(0_mp_rank_01|1_mp_rank_00)", name)
    }
    assert len(left) == len(files) - 2
    write_files(tmp_path, left)
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_(0_mp_rank_01|1_mp_rank_00).* missing"):
        open_checkpoint(str(tmp_path), Comm())
