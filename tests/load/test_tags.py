"""The tag to load, on one rank and on several; the report if there is no checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, StorageError, UnsupportedError
from deepspeed_ucp.formats.deepspeed.files import SEAL
from deepspeed_ucp.io.paths import is_url
from deepspeed_ucp.io.store import write_small
from deepspeed_ucp.load import tags
from deepspeed_ucp.load.tags import find_folders, find_tag, report_absent
from tests.support.damage import refuse_path
from tests.support.memory import clear_memory
from tests.support.ranks import World, run_ranks

STATES = "mp_rank_00_model_states.pt"
KILLED = ".global_step4.ucp-save-job-1"
"""Folder of an interrupted save whose tag was not published."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a run with two tags, the latest of which is older, and further places."""
    for tag, time in (("run/global_step1", 20), ("run/global_step2", 10), ("mirror/global_step3", 30)):
        (tmp_path / tag).mkdir(parents=True)
        (tmp_path / tag / STATES).touch()
        os.utime(tmp_path / tag / STATES, (time, time))
    for copy in ("bare", "there", "untagged"):
        shutil.copytree(tmp_path / "run", tmp_path / copy)
    for lost in ("there/global_step2", "untagged/global_step2"):
        shutil.rmtree(tmp_path / lost)
    for place in ("empty", "pointer"):
        (tmp_path / place).mkdir()
    for place, tag in (("run", "global_step2"), ("mirror", "global_step3"), ("there", "global_step1")):
        (tmp_path / place / "latest").write_text(tag)
    (tmp_path / "pointer" / "latest").write_text("global_step2")
    return tmp_path / "run"


class Refused(str):
    """The pattern of an error message."""


@contextmanager
def expect_refusal(expected: object) -> Iterator[None]:
    with pytest.raises(CheckpointError, match=expected) if isinstance(expected, Refused) else nullcontext():
        yield


NO_TAG_7 = Refused("no checkpoint with tag '7'")
ONE_RANK: list[tuple[str | None, list[str], Any, bool, str | None]] = [
    ("global_step2", ["run"], None, False, "global_step2"),
    ("global_step2", ["run"], "global_step1", False, "global_step1"),
    ("global_step2", ["run"], 7, False, NO_TAG_7),
    ("global_step2", ["run"], 7, True, NO_TAG_7),
    ("global_step2", ["empty"], None, False, None),
    ("global_step2", ["empty"], None, True, None),
    ("global_step2", ["absent"], None, False, None),
    ("global_step9", ["run"], None, False, Refused("tag 'global_step9'.*global_step1, global_step2")),
    ("global_step9", ["run"], None, True, "global_step1"),
    ("", ["run"], None, False, Refused("latest is empty")),
    ("", ["run"], None, True, "global_step1"),
    (None, ["run"], None, False, Refused("latest is missing")),
    (None, ["run"], None, True, "global_step1"),
    ("global_step2", ["run", "mirror"], None, False, "global_step2"),
    ("global_step2", ["run", "mirror"], "global_step3", False, "global_step3"),
    ("global_step2", ["absent", "mirror", "run"], None, False, "global_step3"),
    # an unreadable `latest` is an error: the `latest` of the next place may be older
    ("", ["run", "absent", "pointer"], None, False, Refused("latest is empty.*global_step1, global_step2")),
    (None, ["run", "absent", "pointer"], None, False, Refused("latest is missing.*global_step1, global_step2")),
    ("", ["run", "absent", "pointer"], "global_step1", False, "global_step1"),
    ("", ["run", "absent", "pointer"], None, True, "global_step1"),
    (None, ["run", "absent", "pointer"], None, True, "global_step1"),
]
"""Content of `latest`, places, tag, `fallback`, and the expected tag."""


@pytest.mark.parametrize("row", ONE_RANK)
def test_find_tag_on_one_rank(row: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    latest, places, tag, fallback, expected = row
    (folder / "latest").unlink()
    if latest is not None:
        (folder / "latest").write_text(latest)
    first, *also = [str(folder.parent / place) for place in places]
    with expect_refusal(expected):
        assert find_tag(first, tag, Comm(), also=also, fallback=fallback) == expected
    assert ("Falling back" in caplog.text) is (fallback and tag is None and expected is not None)


SEVERAL_RANKS: list[tuple[list[str], list[str | None], str]] = [
    (
        ["there", "run"],
        [None] * 2,
        Refused("ranks see different .*rank 0: global_step1, rank 1: global_step2.*name the tag"),
    ),
    (
        ["run"] * 3,
        ["global_step2", "global_step1", "global_step1"],
        Refused(r"different tags \(rank 0: global_step2, ranks 1-2: global_step1\)((?!name the tag).)*same tag"),
    ),
    (
        ["run"] * 3,
        [None, "global_step2", None],
        Refused(r"different tags \(ranks 0,2: the tag in `latest`, rank 1: global_step2\).*same tag on every"),
    ),
    (["absent", "untagged", "run"], [None] * 3, "global_step2"),
    (["pointer", "bare"], [None] * 2, "global_step2"),
    (["absent", "run"], ["global_step1"] * 2, "global_step1"),
    (["absent", "run"], ["global_step7"] * 2, Refused(r"^(?!\[rank ).*absent.global_step7: no checkpoint with tag")),
]
"""For each rank its folder and the requested tag; then the tag that all ranks must find."""


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(("places", "requested", "expected"), SEVERAL_RANKS)
def test_find_tag_on_several_ranks(
    places: list[str], requested: list[str | None], expected: str, fallback: bool, folder: Path
) -> None:
    def look(rank: int, comm: Comm) -> str | None:
        return find_tag(str(folder.parent / places[rank]), requested[rank], comm, fallback=fallback)

    with expect_refusal(expected):
        assert run_ranks(len(places), look) == [expected] * len(places)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tag_folder_given_as_load_dir_is_found_in_further_places(ranks: int, folder: Path) -> None:
    """A rank that does not see the folder finds it, too."""
    there = folder.parent / "there"
    places = [[str((folder, there / "absent")[rank] / "global_step1"), str(there)] for rank in range(ranks)]

    def look(rank: int, comm: Comm) -> tuple[str | None, list[str]]:
        tag = find_tag(places[rank][0], None, comm, also=places[rank][1:])
        return tag, find_folders(places[rank], str(tag), comm)

    for rank, found in enumerate(run_ranks(ranks, look)):
        assert found == ("global_step1", [places[rank][0], str(there / "global_step1")])


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("left", [KILLED, ".global_step4.ucp-partial"])
def test_files_of_an_interrupted_first_save_are_no_tag(left: str, fallback: bool, tmp_path: Path) -> None:
    """A sealed folder is a complete save that was interrupted before its tag was published."""
    (tmp_path / left).mkdir()
    (tmp_path / left / STATES).touch()
    assert find_tag(str(tmp_path), None, Comm(), fallback=fallback) is None
    if left == KILLED:
        (tmp_path / left / SEAL).touch()
        with expect_refusal(None if fallback else Refused(f"latest is missing, but .* holds checkpoints: {left}")):
            assert find_tag(str(tmp_path), None, Comm(), fallback=fallback) == left


@pytest.mark.parametrize("fallback", [False, True])
def test_a_node_without_the_folder_uses_its_peers_tag(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    closed = str(folder.parent / "closed")
    for function, path in (("scandir", closed), ("stat", f"{closed}/latest")):
        monkeypatch.setattr(os, function, partial(refuse_path, getattr(os, function), path))
    folders = [closed, str(folder)]
    found = run_ranks(2, lambda rank, comm: find_tag(folders[rank], None, comm, fallback=fallback))
    assert found == ["global_step2"] * 2
    with pytest.raises(CheckpointError, match=r"latest: cannot be read .Permission denied"):
        find_tag(closed, None, Comm(), fallback=fallback)


def test_places_after_the_first_with_the_tag_are_not_accessed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accessed = []
    look = tags._look
    monkeypatch.setattr(tags, "_look", lambda place, *rest, **how: accessed.append(place) or look(place, *rest, **how))
    assert find_tag(str(folder), None, Comm(), also=["s3://out-of-reach/run"]) == "global_step2"
    assert accessed == [str(folder)]


@pytest.mark.parametrize("fallback", [False, True])
def test_only_rank_0_reads_the_tag_from_a_store(folder: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool) -> None:
    """Another rank may lack a module for the store; its error would block the others in a collective call."""
    (folder / "latest").write_text("global_step7")
    look, accessed = tags._look, list[str]()

    def ask(path: str) -> bool:
        accessed.append(path)
        if "://" in path and len(accessed) > 3:
            raise UnsupportedError("no module named obstore")
        return False

    def look_locally(place: str, *rest: Any, **how: Any) -> Any:
        return (None, "", None) if "://" in place else look(place, *rest, **how)

    monkeypatch.setattr(tags, "is_folder", ask)
    monkeypatch.setattr(tags, "_look", look_locally)
    find = partial(find_tag, str(folder), None, fallback=fallback, also=["s3://bucket/run"])
    found = World(2).run(lambda _rank, comm: find(comm))
    assert [type(each) for each in found] == ([str] * 2 if fallback else [CheckpointError] * 2)


def test_a_tag_removed_in_the_search_is_an_error_on_all_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "latest").write_text("global_step7")
    turns = iter([str(folder), str(folder / "gone")])
    monkeypatch.setattr(tags, "find_newest", lambda _place: os.listdir(next(turns))[0])
    found = World(2).run(lambda _rank, comm: find_tag(str(folder), None, comm, fallback=True))
    assert [type(each) for each in found] == [StorageError] * 2


def test_load_universal_prefers_latest_universal(folder: Path) -> None:
    (folder / "global_step1_universal").mkdir()
    (folder / "latest_universal").write_text("global_step1_universal")
    assert find_tag(str(folder), None, Comm()) == "global_step2"
    assert find_tag(str(folder), None, Comm(), universal=True) == "global_step1_universal"


# -- no checkpoint -----------------------------------------------------------------------------------------------------


ADVICE = (
    "To resume, name the folder that holds `latest`, or a checkpoint's own folder; "
    '"require": true makes this an error.'
)


class Case(NamedTuple):
    """Files to create below the root, the searched folder, the expected level and text."""

    name: str
    files: tuple[str, ...]
    folder: str
    text: str
    level: str = "WARNING"


MISSING = "does not exist, nothing to resume: training begins from scratch"
EMPTY = "is empty, nothing to resume: training begins from scratch"

CASES = [
    Case("missing", (), "checkpoints", MISSING, "INFO"),
    Case("empty", ("checkpoints/",), "checkpoints", EMPTY, "INFO"),
    Case("killed-save", (f"run/{KILLED}/{STATES}",), "run",
         f"holds only unfinished saves ({KILLED}), nothing to resume: training begins from scratch", "INFO"),
    Case("sibling-without-checkpoint", ("logs/a.txt", "data/b"), "checkpoints", MISSING, "INFO"),
    Case("sibling", ("ckpt/latest", "z/latest"), "cpkt", f"{MISSING}. ROOT holds checkpoints in ckpt, z."),
    Case("empty-sibling", ("run/latest", "ruin/"), "ruin", f"{EMPTY}. ROOT holds checkpoints in run."),
    Case("tag", (f"step10/{STATES}",), "step100", f"{MISSING}. ROOT holds checkpoints in step10."),
    Case("parent", (), "rnus/a", f"{MISSING}. Its parent folder ROOT/rnus does not exist either."),
    Case("content", ("run/readme.txt",), "run", "holds readme.txt, none of them a checkpoint, SCRATCH."),
    Case("trainer", ("out/checkpoint-4/a",), "out",
         "looks like a trainer's output folder: name one of its checkpoints, checkpoint-4, SCRATCH."),
    Case("above", ("runs/a/latest",), "runs", "holds folders of checkpoints: name one of them, a, SCRATCH."),
]  # fmt: skip


@pytest.fixture(params=["local", "url"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty folder, or an empty store."""
    if request.param == "local":
        yield str(tmp_path)
        return
    clear_memory()
    write_small("memory://absent/jobs/other/readme.txt", b"")
    yield "memory://absent/jobs"


def make(root: str, path: str) -> None:
    """Create an empty file, or a folder if the path ends with a slash."""
    if not is_url(root):
        os.makedirs(os.path.dirname(f"{root}/{path}"), exist_ok=True)
    if not path.endswith("/"):
        write_small(f"{root}/{path}", b"")


@pytest.mark.parametrize("require", [False, True], ids=["log", "require"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_log_level_and_text_if_no_checkpoint_is_found(
    case: Case, require: bool, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    for path in case.files:
        make(root, path)
    folder, text = f"{root}/{case.folder}", case.text.replace("ROOT", root)
    if is_url(root):  # a store has no empty folders
        text = text.replace(EMPTY, MISSING)
    text = text.replace("SCRATCH", "no checkpoint to resume: training begins from scratch")
    caplog.set_level("INFO")
    if require:
        head, _, doubts = text.partition(": training begins from scratch")
        with pytest.raises(CheckpointError) as raised:
            report_absent([folder], Comm(), require=True)
        expected = f'{folder}: {head}, and "require" is on.{doubts.removeprefix(".")} Check the path.'
        assert (str(raised.value), raised.value.shared, caplog.messages) == (expected, True, [])
        return
    report_absent([folder], Comm(), require=False)
    advice = f" {ADVICE}" if case.level == "WARNING" else ""
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (case.level, f"{folder}: {text}{advice}")


def test_a_folder_without_the_engines_saves_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for folder, level in (("run", "INFO"), ("rum", "WARNING")):
        report_absent([str(tmp_path / folder)], Comm(), require=False, saved_to=[str(tmp_path / "run")])
        assert caplog.records[-1].levelname == level
    assert f"This engine saves to {tmp_path}/run." in caplog.messages[-1]


def test_the_content_of_a_further_place_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(str(tmp_path), "b/notes.txt")
    report_absent([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "c")], Comm(), require=False)
    assert f"scratch. {tmp_path}/b holds notes.txt, none of them a checkpoint. {ADVICE}" in caplog.text
