"""``ds_ucp prune``: what goes of a folder of tags is by wholeness and step; what others need stays."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, OutOfReachError
from deepspeed_ucp.examine import tags
from deepspeed_ucp.saves.pruning import PruneOptions, carry_out, plan_pruning
from deepspeed_ucp.sources.frozen import write_reference
from deepspeed_ucp.sources.open import seal_folder
from deepspeed_ucp.sources.seal import Seal, read_seal
from tests.cli.samples import make_gpt, write_sample
from tests.load.test_direct import run_load
from tests.support.reshard import FakeTarget, open_for
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

GPT = make_gpt(1)
Prune = Callable[..., dict[str, str]]


def save(folder: Path, step: int, *, sealed: bool = False, at: int | None = None, stage: int = 1) -> Path:
    """A tag, written at second ``at``, which is its step's by default."""
    made = write_sample(folder, Topology(stage, 2, "bf16"), GPT, global_steps=step)
    if sealed:
        seal_folder(str(made), Comm())
    date(made, step if at is None else at)
    return made


def date(folder: Path, second: int) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (1_000_000 + second, 1_000_000 + second), follow_symlinks=False)


def cut(tag: Path) -> None:
    """One file has not been written."""
    next(tag.glob("*rank_1*optim_states.pt")).unlink()


def list_left(folder: Path) -> set[str]:
    return {path.name.removeprefix("global_step") for path in folder.iterdir() if path.is_dir()}


def list_tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def prune(run_json: Any, tmp_path: Path) -> Prune:
    """Prunes the test's folder, without a fault; why each stays or goes, by its name without ``global_step``."""

    def run(*argv: object, code: int = 0, folder: Path = tmp_path) -> dict[str, str]:
        before = list_left(folder)
        found, told = run_json("prune", folder, *argv)
        assert found == code, told
        rows = {each["tag"].removeprefix("global_step"): each for each in told["checkpoints"]}
        gone = {name for name, each in rows.items() if each["action"] == "remove"}
        assert list_left(folder) == before - gone
        return {name: f"{each['action']}: {each['why']}" for name, each in rows.items()}

    return run


def test_the_newest_stay_by_step(prune: Prune, tmp_path: Path) -> None:
    """Whatever the files' times are, but for the one that was written last, which `latest` may be going to name."""
    for step in (1, 2, 3, 4, 10):
        save(tmp_path, step, at=100 - step)
    found = prune("--keep", 3)
    assert list_left(tmp_path) == {"1", "3", "4", "10"}
    assert found["1"] == "keep: the one that was written last"
    assert found["4"] == "keep: one of the newest 3 whole ones"
    assert found["2"] == "remove: older than the newest 3 whole ones"
    assert prune("--keep", 3).keys() == {"1", "3", "4", "10"}


def test_what_latest_names_stays(prune: Prune, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("global_step1")
    (tmp_path / "latest_universal").write_text("global_step2")
    found = prune("--keep", 1)
    assert list_left(tmp_path) == {"1", "2", "4"}
    assert (found["1"], found["2"]) == ("keep: `latest` names it", "keep: `latest_universal` names it")


def test_a_latest_that_cannot_be_followed_stops_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("")
    before = list_tree(tmp_path)
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 2
    assert "latest is empty" in capsys.readouterr().err and list_tree(tmp_path) == before


def test_what_is_not_whole_goes_where_a_later_one_is_whole(prune: Prune, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    for step in (2, 5):
        cut(tmp_path / f"global_step{step}")
    (tmp_path / "latest").unlink()
    found = prune("--keep", 3)
    assert list_left(tmp_path) == {"1", "3", "4", "5"}  # it does not count among the three
    assert found["2"] == "remove: not whole, and global_step4, which is newer, is"
    assert found["5"].startswith("keep: not whole; it may still be growing")


def test_what_a_run_that_went_back_writes_now_may_grow(prune: Prune, tmp_path: Path) -> None:
    """Its step is lower than that of what an earlier run has left."""
    save(tmp_path, 9)
    save(tmp_path, 10)
    growing = save(tmp_path, 5, at=11)
    (tmp_path / "latest").unlink()
    cut(growing)
    assert prune("--keep", 1)["5"].startswith("keep: not whole; it may still be growing")
    cut(tmp_path / "global_step10")
    save(tmp_path, 6, at=12)
    (tmp_path / "latest").unlink()
    found = prune("--keep", 9)
    assert found["5"] == "remove: not whole, and global_step6, which is newer, is"
    assert found["10"].startswith("keep: not whole; it may still be growing")


@pytest.mark.parametrize("whole", [[], [1]], ids=["none", "the oldest"])
def test_the_last_whole_one_stays(whole: list[int], prune: Prune, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        made = save(tmp_path, step)
        if step not in whole:
            cut(made)
    (tmp_path / "latest").unlink()
    prune("--keep", 1)
    assert list_left(tmp_path) == {"1", "2", "3"}


def test_what_cannot_be_looked_at_stays(prune: Prune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    survey = tags.survey_checkpoint

    def fail(folder: str, *args: Any, **options: Any) -> Any:
        if folder.endswith("step1"):
            raise OutOfReachError("the store answers 403.")
        return survey(folder, *args, **options)

    monkeypatch.setattr(tags, "survey_checkpoint", fail)
    found = prune("--keep", 1, code=1)
    assert list_left(tmp_path) == {"1", "3"} and "403" in found["1"]


def test_what_is_not_covered_stays(prune: Prune, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        made = save(tmp_path, step)
    for step in (1, 3):
        (tmp_path / f"global_step{step}" / "layer_00-odd_00-model_states.pt").write_bytes(b"a pipeline's")
        date(made, step)
    (tmp_path / "latest").unlink()
    assert "not covered" in prune("--keep", 1, code=1)["1"] and list_left(tmp_path) == {"1", "2", "3"}


def test_multiples_stay(prune: Prune, tmp_path: Path) -> None:
    for step in (5, 10, 12, 20, 21, 22):
        save(tmp_path, step)
    assert prune("--keep", 1, "--keep-every", 10)["10"] == "keep: one every 10 steps"
    assert list_left(tmp_path) == {"10", "20", "22"}


def test_the_newest_sealed_one_stays(prune: Prune, tmp_path: Path) -> None:
    """A load with "fallback" and "seal" takes no other."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step, sealed=step < 3)
    assert prune("--keep", 1)["2"] == "keep: the newest one with a seal"
    assert list_left(tmp_path) == {"2", "4"}


def test_what_a_link_leads_to_stays(prune: Prune, tmp_path: Path) -> None:
    """A tag that is a link, and files of another tag's that are."""
    made = {step: save(tmp_path, step) for step in (1, 2, 3, 4, 5)}
    (tmp_path / "best").symlink_to("global_step1")
    shared = made[5] / "mp_rank_00_model_states.pt"
    shared.rename(made[2] / "kept_once.pt")
    shared.symlink_to("../global_step2/kept_once.pt")
    for step in (2, 5):
        date(made[step], step)
    found = prune("--keep", 1)
    assert (found["1"], found["best"]) == ("keep: best names it", "keep: a link")
    assert found["2"] == "keep: global_step5 names it" and list_left(tmp_path) == {"1", "2", "5", "best"}


def test_what_a_seal_names_stays(prune: Prune, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        made = save(tmp_path, step, sealed=True)
    seal = read_seal(str(made / "ucp_seal.json"))
    files = {**seal.files, "../global_step1/base.pt": next(iter(seal.files.values()))}
    changed = Seal(files=files)
    (made / "ucp_seal.json").write_text(changed.model_copy(update={"digest": changed.make_digest()}).model_dump_json())
    assert prune("--keep", 1)["1"] == "keep: global_step3 names it"
    assert list_left(tmp_path) == {"1", "3"}


A, B, BEGUN = (f"ucp_frozen-{letter * 12}" for letter in "abc")


def freeze(place: Path, name: str, at: int, *steps: int) -> None:
    (place / name).mkdir()
    (place / name / "mp_rank_00_frozen_states.pt").write_bytes(b"frozen")
    date(place / name, at)
    for step in steps:
        write_reference(str(place / f"global_step{step}"), name, {})
        date(place / f"global_step{step}", step)


def test_frozen_tensors_stay_while_a_tag_names_them(prune: Prune, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    freeze(tmp_path, A, 1, 1)
    freeze(tmp_path, B, 2, 2, 3)
    freeze(tmp_path, BEGUN, 9)
    found = prune("--keep", 2)
    assert list_left(tmp_path) == {"2", "3", B, BEGUN}
    assert found[A] == "remove: no tag names it" and found[B] == "keep: a tag names it"
    assert found[BEGUN] == "keep: no tag names it yet"


def test_frozen_tensors_that_a_save_begins_to_name_stay(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    freeze(tmp_path, A, 1, 1)
    plan = plan_pruning(str(tmp_path), PruneOptions(1))
    aside = tmp_path / ".global_step3.ucp-save-job-3"
    aside.mkdir()
    (aside / "ucp_frozen.json").write_text(json.dumps({"folder": A}))
    assert [each.action for each in carry_out(str(tmp_path), plan)] == ["keep", "remove", "keep"]
    assert (tmp_path / A).is_dir()


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_reference_that_cannot_be_read_stops_all(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "ucp_frozen.json").write_text(text)
    before = list_tree(tmp_path)
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 2
    assert "nothing is removed" in capsys.readouterr().err and list_tree(tmp_path) == before


def test_what_others_have_in_a_tag_stays(prune: Prune, tmp_path: Path, run_json: Any) -> None:
    """Another tag may lie below it; a save that grows aside is no tag yet."""
    old = save(tmp_path, 1)
    save(old / "below", 7)
    (old / "arguments.json").write_text("{}")
    (old / "offloaded_tensors" / "rank0").mkdir(parents=True)
    (old / "offloaded_tensors" / "rank0" / "0_1.tensor.swp").write_bytes(b"swapped")
    date(old, 1)
    save(tmp_path, 2)
    aside = save(tmp_path, 0).rename(tmp_path / ".global_step0.ucp-save-job-3")
    (tmp_path / "latest").unlink()
    before, all_bytes = list_tree(old / "below"), sum(map(len, list_tree(tmp_path).values()))
    _, told = run_json("prune", tmp_path, "--keep", 1)
    found = {each["tag"]: each["action"] for each in told["checkpoints"]}
    assert found == {"global_step2": "keep", "global_step1": "remove", aside.name: "keep"}
    assert told["freed"] == all_bytes - sum(map(len, list_tree(tmp_path).values()))
    assert {path.name for path in old.iterdir()} == {"below", "arguments.json"} and list_tree(old / "below") == before


def test_an_atomic_checkpoint_is_no_save(prune: Prune, tmp_path: Path) -> None:
    for step in (1, 2):
        made = save(tmp_path, step)
    assert main(["convert", str(made), str(tmp_path / "atomic"), "-q"]) == 0
    (tmp_path / "atomic" / "mp_rank_00_model_states.pt").write_bytes((made / "mp_rank_00_model_states.pt").read_bytes())
    date(tmp_path / "atomic", 0)
    (tmp_path / "latest_universal").unlink()
    assert prune("--keep", 1)["atomic"] == "keep: an atomic checkpoint"
    assert list_left(tmp_path) == {"2", "atomic"}


def save_trainers(output: Path, step: int, *, best: int | None = None, whole: bool = True) -> None:
    folder = output / f"checkpoint-{step}"
    save(folder, step)
    (folder / "scheduler.pt").write_bytes(b"a schedule")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "words.json").write_text("{}")
    if whole:
        state = {"best_model_checkpoint": best and f"elsewhere/checkpoint-{best}"}
        (folder / "trainer_state.json").write_text(json.dumps(state))


def test_folders_of_hugging_face_go_as_a_whole(prune: Prune, tmp_path: Path) -> None:
    """But for the best one, as one that stays tells."""
    for step, best in ((1, None), (2, 1), (3, 1), (4, 2), (5, 2)):
        save_trainers(tmp_path, step, best=best, whole=step != 3)
    found = prune("--keep", 1)
    assert list_left(tmp_path) == {"checkpoint-1", "checkpoint-2", "checkpoint-5"}
    assert found["checkpoint-2"] == "keep: checkpoint-5 names it"
    assert found["checkpoint-1"] == "keep: checkpoint-2 names it"
    assert found["checkpoint-3"] == "remove: not whole, and checkpoint-5, which is newer, is"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("epoch=1-step={}.ckpt", "save_top_k"),
        ("checkpoint_{}", "total_limit"),
        ("checkpoint-{}", "prune that one"),  # not with what Hugging Face writes beside a tag
        ("run{}", "prune that one"),
    ],
)
def test_other_folders_of_tags_are_left_alone(
    name: str, told: str, prune: Prune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save(tmp_path / name.format(step), step)
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 2
    assert told in capsys.readouterr().err
    for step in (3, 4):
        save(tmp_path, step)
    found = prune("--keep", 1)
    assert list_left(tmp_path) == {name.format(1), name.format(2), "4"}
    assert told in found[f"{name.format(1)}/global_step1"]


WEIGHTS = Model((Param("a", (7, 13)), Param("b", (5, 7), group=1)))


def test_weights_are_left(prune: Prune, tmp_path: Path, run_json: Any) -> None:
    topology = Topology(1, 2, "bf16")
    made = write_checkpoint(tmp_path, WEIGHTS, random_state(WEIGHTS, 0, precision="bf16"), topology)
    seal_folder(str(made), Comm())
    step = int(made.name.removeprefix("global_step"))
    date(made, step)
    save(tmp_path, step + 1, sealed=True)
    for _ in range(2):  # and stay
        found = prune("--keep", 1, "--strip-optimizer")
        rank = FakeTarget(WEIGHTS, Topology(0), 0)
        run_load(open_for(made, rank), rank, load_optimizer_states=False)
        with pytest.raises(CheckpointError, match=r"optim_states.pt missing: all files .* load_optimizer_states=False"):
            run_load(open_for(made, rank), rank)
    assert found[str(step)] == "keep: its weights alone are left"
    assert [path.name for path in made.iterdir()] == ["mp_rank_00_model_states.pt"]
    code, listed = run_json("list", tmp_path)
    assert code == 0
    assert [(each["whole"], each["weights_only"]) for each in listed["checkpoints"]] == [(True, False), (False, True)]
    assert "load_optimizer_states=False" in listed["checkpoints"][1]["fault"]
    assert prune("--keep", 1)[str(step)].startswith("remove: not whole")


def test_weights_that_lie_with_the_optimizer_are_not_stripped(prune: Prune, tmp_path: Path) -> None:
    """Nor is stage 0, whose files hold both, or BF16_Optimizer's, which are whole to the eye without states."""
    save(tmp_path, 1, stage=3)
    save(tmp_path, 2, stage=0)
    cut(save(tmp_path, 3, stage=3))
    mixed = write_sample(tmp_path, Topology(0, 2, "bf16", tp=2, pp=2), global_steps=4)
    date(mixed, 4)
    save(tmp_path, 5)
    before = list_tree(tmp_path / "global_step1") | list_tree(mixed)
    found = prune("--keep", 1, "--strip-optimizer", code=1)
    assert "ds_ucp export" in found["1"] and "ds_ucp export" in found["4"]
    assert list_tree(tmp_path / "global_step1") | list_tree(mixed) == before
    assert found["2"] == "keep: its optimizer has no files of its own"
    assert list_left(tmp_path) == {"1", "2", "4", "5"}


def fill(place: Path) -> None:
    """Everything that is told apart."""
    for step in (1, 2, 3, 4, 5, 10, 11, 12):
        made = save(place, step, sealed=step == 4)
        if step in (3, 12):
            cut(made)
    freeze(place, A, 1, 1)
    (place / "latest").write_text("global_step2")
    (place / "global_step2" / "readme").write_text("kept")


@pytest.mark.parametrize("strip", [[], ["--strip-optimizer"]], ids=["remove", "strip"])
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_dry_run_prints_what_a_run_does(
    form: list[str], strip: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    before = list_tree(tmp_path)
    argv = ["prune", str(tmp_path), "--keep", "1", "--keep-every", "5", *strip, *form]
    assert main([*argv, "--dry-run"]) == 0
    dry = capsys.readouterr()
    assert list_tree(tmp_path) == before and "nothing is removed" in dry.err
    assert main(argv) == 0
    assert capsys.readouterr().out == dry.out
    freed = sum(map(len, before.values())) - sum(map(len, list_tree(tmp_path).values()))
    assert freed and (not form or json.loads(dry.out)["freed"] == freed)
    assert list_left(tmp_path) == {"2", "4", "5", "10", "11", "12"} | ({"1", "3", A} if strip else set())


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize("strip", [[], ["--strip-optimizer"]], ids=["remove", "strip"])
def test_a_stop_leaves_nothing_that_is_taken_for_whole(
    strip: list[str], sealed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_json: Any
) -> None:
    """At every file that is removed; the next run goes on."""
    unlink, left = os.unlink, 0

    def fail(path: Any, **options: Any) -> None:
        nonlocal left
        above = os.readlink(f"/proc/self/fd/{options['dir_fd']}") if "dir_fd" in options else ""
        if "global_step1" in os.path.join(above, path):
            left -= 1
            if left < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        unlink(path, **options)

    for at in range(sealed, 99):
        place = tmp_path / str(at)
        for step in (1, 2):
            save(place, step, sealed=sealed)
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", fail)
            left = at
            code, _ = run_json("prune", place, "--keep", 1, *strip)
        whole = {each["tag"]: each["whole"] for each in run_json("list", place)[1]["checkpoints"]}
        is_untouched = len(list((place / "global_step1").glob("*.pt"))) == 3
        assert whole.pop("global_step2") and whole.get("global_step1", False) is is_untouched
        if code == 0:
            break
        assert code == 2 and not (place / "global_step1" / "ucp_seal.json").exists()
        assert run_json("prune", place, "--keep", 1, *strip)[0] == 0
        assert list_left(place) == ({"1", "2"} if strip else {"2"})
    assert at > 1


def test_what_changes_meanwhile_stays(tmp_path: Path) -> None:
    """A tag that is saved anew; one that `latest` names by now."""
    made = {step: save(tmp_path, step) for step in (1, 2, 3, 4)}
    plan = plan_pruning(str(tmp_path), PruneOptions(1))
    save(tmp_path, 1, at=9)
    shutil.rmtree(made[3])
    (tmp_path / "latest").write_text("global_step2")
    done = {each.name[-1]: (each.action, each.why, each.nbytes) for each in carry_out(str(tmp_path), plan)}
    assert done["1"] == done["3"] == ("keep", "its files have changed meanwhile", 0)
    assert done["2"] == ("keep", "`latest` names it by now", 0) and list_left(tmp_path) == {"1", "2", "4"}


def test_a_store_is_pruned_as_a_folder_is(tmp_path: Path, run_json: Any) -> None:
    fill(tmp_path)
    store = fsspec.filesystem("memory")
    for path in sorted(filter(Path.is_file, tmp_path.rglob("*")), key=lambda each: each.stat().st_mtime):
        store.pipe(f"/pruned/{path.relative_to(tmp_path)}", path.read_bytes())
    try:
        argv = ("--keep", 1, "--keep-every", 5)
        here, there = (run_json("prune", place, *argv)[1] for place in (tmp_path, "memory://pruned"))
        assert here["checkpoints"] == there["checkpoints"]
        left = {name.removeprefix("/pruned/") for name in store.find("/pruned")}
        assert left == set(list_tree(tmp_path))
    finally:
        store.rm("/pruned", recursive=True)


@pytest.mark.parametrize("argv", [["--keep", "0"], ["--keep", "1", "--keep-every", "-1"]], ids=" ".join)
def test_what_cannot_be_asked_for(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    assert main(["prune", str(tmp_path), *argv]) == 2
    assert "--keep" in capsys.readouterr().err


def test_one_tag_s_own_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(save(tmp_path, 1)), "--keep", "1"]) == 2
    assert "one checkpoint's own folder" in capsys.readouterr().err


def test_one_process_of_a_launch_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert list_left(tmp_path) == {"1", "2"}
