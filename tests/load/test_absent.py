"""A load that finds no checkpoint: INFO on a first start, WARNING if the folder has content or its path looks wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.io.paths import is_url
from deepspeed_ucp.io.store import write_small
from deepspeed_ucp.load.tags import report_absent
from tests.support.memory import clear_memory

STATES = "mp_rank_00_model_states.pt"
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
def test_level_and_text(case: Case, require: bool, root: str, caplog: pytest.LogCaptureFixture) -> None:
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
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        (case.level, f"{folder}: {text}{advice}")
    ]


def test_a_folder_other_than_the_one_that_the_engine_saves_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for folder, level in (("run", "INFO"), ("rum", "WARNING")):
        report_absent([str(tmp_path / folder)], Comm(), require=False, saved_to=[str(tmp_path / "run")])
        assert caplog.records[-1].levelname == level
    assert f"This engine saves to {tmp_path}/run." in caplog.messages[-1]


def test_content_of_a_further_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(str(tmp_path), "b/notes.txt")
    report_absent([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "c")], Comm(), require=False)
    assert f"scratch. {tmp_path}/b holds notes.txt, none of them a checkpoint. {ADVICE}" in caplog.text
