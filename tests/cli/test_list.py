"""``ds_ucp list``: checkpoints on storage and in memory, with a mark at the one that a resume loads."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import SaveOptions, UniversalConfig
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.files import PUBLISHED
from deepspeed_ucp.formats.latest import find_checkpoint
from deepspeed_ucp.formats.open import seal_folder
from deepspeed_ucp.io.store import write_small
from deepspeed_ucp.load.tags import find_tag
from deepspeed_ucp.saves.memory import Job, find_root, name_job
from deepspeed_ucp.saves.search import find_in_memory
from tests.cli.samples import make_gpt, write_sample
from tests.saves.saving import TAG, make_save
from tests.support.memory import clear_memory, put_folder
from tests.synth import Topology

GPT = make_gpt(1)


def save(folder: Path, step: int, *, sealed: bool = False) -> Path:
    tag_folder = write_sample(folder, Topology(1, 2, "bf16"), GPT, global_steps=step)
    if sealed:
        seal_folder(str(tag_folder), Comm())
    return tag_folder


def test_tags_are_listed_newest_first(tmp_path: Path, run_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 9, sealed=True)
    late = save(tmp_path, 10)
    os.utime(next(late.iterdir()), (1, 1))  # a slow clock
    (tmp_path / "logs").mkdir()
    code, listed = run_json("list", tmp_path)
    rows = [(each["tag"], each["step"], each["whole"], each["sealed"]) for each in listed["checkpoints"]]
    assert (code, rows) == (0, [("global_step10", 10, True, False), ("global_step9", 9, True, True)])
    first = listed["checkpoints"][0]
    assert first["bytes"] == sum(path.stat().st_size for path in late.iterdir())
    assert (first["named_by"], listed["latest"], first["resume"]) == (["latest"], late.name, True)
    assert first["topology"] == "ZeRO-1 dp=2 bfloat16 (zero12)"
    assert main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    rows = [["global_step10", "10", "yes", "no"], ["global_step9", "9", "yes", "yes"]]
    assert [line.split()[:4] for line in lines] == rows


def test_checkpoints_of_a_trainer_are_found_in_subfolders(tmp_path: Path, run_json: Any) -> None:
    for step in (4, 8):
        save(tmp_path / f"checkpoint-{step}", step)
    code, listed = run_json("list", tmp_path)
    assert code == 0
    assert [each["tag"] for each in listed["checkpoints"]] == ["checkpoint-8/global_step8", "checkpoint-4/global_step4"]
    (tmp_path / "checkpoint-8" / "rng_state_0.pth").write_text("")  # trainer_state.json, the last file, is missing
    code, listed = run_json("list", tmp_path)
    assert (code, [each["whole"] for each in listed["checkpoints"]]) == (1, [False, True])
    assert "trainer_state.json: missing" in listed["checkpoints"][0]["fault"]
    code, listed = run_json("list", tmp_path / "checkpoint-4" / "global_step4")
    assert [(each["tag"], each["step"]) for each in listed["checkpoints"]] == [(".", 4)]


def test_weights_next_to_tags_are_not_listed(tmp_path: Path, run_json: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The Trainer writes weights into each folder and the output folder. Commands choose a tag like a load."""
    for step in (4, 8):
        save(tmp_path / f"checkpoint-{step}", step)
        save_file({"it": torch.ones(2)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    code, listed = run_json("list", tmp_path / "checkpoint-8")
    assert (code, [each["tag"] for each in listed["checkpoints"]]) == (0, ["global_step8"])
    save_file({"it": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "other").mkdir()
    save_file({"it": torch.ones(2)}, tmp_path / "other" / "model.safetensors")
    code, listed = run_json("list", tmp_path)
    below = ["checkpoint-8/global_step8", "checkpoint-4/global_step4"]
    assert [each["tag"] for each in listed["checkpoints"]][:2] == below
    bare = {each["tag"]: each["bytes"] for each in listed["checkpoints"][2:]}
    assert bare == dict.fromkeys([".", "other"], (tmp_path / "model.safetensors").stat().st_size)
    open_checkpoint(find_checkpoint(str(tmp_path)), Comm())
    assert any("not DeepSpeed's checkpoints in checkpoint-4, checkpoint-8" in line for line in caplog.messages)
    (tmp_path / "checkpoint-8" / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"latest is missing, but .*checkpoint-8 holds checkpoints: global_step8"):
        find_checkpoint(str(tmp_path / "checkpoint-8"))


def test_damaged_pointers_are_reported_next_to_other_tags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tag = save(tmp_path, 1)
    (tmp_path / "latest").write_text("")
    assert main(["list", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "latest is empty" in printed.err and "; a resume fails: " in printed.out.splitlines()[0]
    (tmp_path / "latest").write_text(tag.name)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / PUBLISHED).write_text("{")
    assert main(["list", str(tmp_path)]) == 1
    printed_now = capsys.readouterr().out
    assert "2 checkpoints, 1 not complete; a resume takes " in printed_now
    assert f"broken: {PUBLISHED}: is no valid JSON" in printed_now


def test_list_shows_the_tags_of_a_store(tmp_path: Path, run_json: Any) -> None:
    clear_memory()
    put_folder(save(tmp_path, 5), "memory://listed/run/global_step5")
    write_small("memory://listed/run/latest", b"global_step5")
    code, listed = run_json("list", "memory://listed/run")
    assert code == 0
    assert [(each["step"], each["whole"], each["named_by"]) for each in listed["checkpoints"]] == [
        (5, True, ["latest"])
    ]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(os.path.join(find_root(str(tmp_path / "memory")), name_job()))
    made.create()
    made.unlock()
    return made


def find_resumed(folder: Path, memory: Path) -> tuple[str, str] | None:
    with mock.patch("deepspeed_ucp.saves.launch.start_writer"):
        listed = find_in_memory(UniversalConfig(save=SaveOptions(memory=str(memory))), str(folder), None, Comm())
    if listed is not None:
        return "memory", listed.tag
    tag = find_tag(str(folder), None, Comm())
    return None if tag is None else ("storage", tag)


HELD: dict[str, tuple[Any, Any, Any]] = {  # the save in memory, a tag on storage, rows as (place, tag, resume)
    "alone": (("a", 3, {}), None, [("memory", "a", True)]),
    "newer": (("b", 5, {}), "a", [("memory", "b", True), ("storage", "a", False)]),
    "older": (("a", 3, {}), "b", [("storage", "b", True), ("memory", "a", False)]),
    "best": (("best", 5, {"latest": False}), "a", [("memory", "best", False), ("storage", "a", True)]),
    "part": (("b", 5, {"nodes": 2}), "a", [("memory", "b", False), ("storage", "a", True)]),
}


@pytest.mark.parametrize("case", HELD)
def test_list_marks_the_save_in_memory_or_storage_that_a_load_chooses(
    case: str, job: Job, tmp_path: Path, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, memory = tmp_path / "run", tmp_path / "memory"
    (tag, step, changes), stored, expected = HELD[case]
    if stored:
        save(folder, 4).rename(folder / stored)
        (folder / "latest").write_text(stored)
    make_save(job, str(folder), tag=tag, step=step, **changes)
    code, listed = run_json("list", folder, "--memory", memory)
    rows = listed["checkpoints"]
    assert (code, [(each["place"], each["tag"], each["resume"]) for each in rows]) == (0, expected)
    ((place, tag),) = [(place, tag) for place, tag, resume in expected if resume]
    assert (place, tag) == find_resumed(folder, memory)
    assert main(["list", str(folder), "--memory", str(memory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"all complete; a resume takes {tag} from {place}")
    (note,) = [line for line in lines if f"in {job.folder}/00000001/" in line]
    assert f"for {folder}" in note and ("files of node 0 of 2" in note) == (case == "part")
    assert run_json("list", folder, "--memory", tmp_path / "absent")[0] == (0 if stored else 2)
    assert not (tmp_path / "absent").exists() and job.list_saves()


def test_saves_in_a_configured_memory_folder_are_listed(
    job: Job, tmp_path: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``"save": {"memory": …}`` may contain a variable, too."""
    root = os.path.dirname(job.folder)
    assert run_json("list", root)[0] == 2
    make_save(job, str(tmp_path / "run"), tag="a")
    make_save(job, str(tmp_path / "other"), tag="b")
    code, listed = run_json("list", root)
    rows = {(each["tag"], each["memory"]["save_dir"], each["resume"]) for each in listed["checkpoints"]}
    assert (code, rows) == (0, {("a", f"{tmp_path}/run", True), ("b", f"{tmp_path}/other", True)})
    monkeypatch.setenv("HOME", str(tmp_path))
    for memory in ("~/memory", "$HOME/memory"):
        assert run_json("list", tmp_path / "run", "--memory", memory)[0] == 0


def test_a_trainers_and_a_tags_folder_are_listed_with_memory(job: Job, tmp_path: Path, run_json: Any) -> None:
    make_save(job, str(tmp_path / "out" / "checkpoint-3"))
    for folder, tag, resumed in (
        ("out", f"checkpoint-3/{TAG}", False),
        ("out/checkpoint-3", TAG, True),
        (f"out/checkpoint-3/{TAG}", ".", True),
    ):
        code, listed = run_json("list", tmp_path / folder, "--memory", tmp_path / "memory")
        rows = [(each["tag"], each["resume"]) for each in listed["checkpoints"]]
        assert (code, rows) == (0, [(tag, resumed)])


def test_a_running_jobs_saves_are_listed_unmarked(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_save(job, str(tmp_path / "run"))
    with open(os.path.join(job.folder, "owner")) as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)  # like the process that saves
        assert main(["list", str(tmp_path / "run"), "--memory", str(tmp_path / "memory")]) == 0
    out = capsys.readouterr().out
    assert "its job is running" in out and out.splitlines()[0].endswith("a resume needs the folder of one")
