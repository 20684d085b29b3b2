"""Files of DeepSpeed's fast writer, `<name>-<writer>.<writers>`: everything reads them as it reads other files."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import convert_checkpoint
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.open import seal_folder
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (3, 5)), Param("b", (7,))))
STATES = "mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_%d_mp_rank_00_optim_states.pt"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A save of four ranks, and the same as two writers and two ranks that are none leave it."""
    topology = Topology(1, 4)
    plain = write_checkpoint(tmp_path / "plain", MODEL, random_state(MODEL, 0), topology)
    fast = write_checkpoint(tmp_path / "fast", MODEL, random_state(MODEL, 0), topology)
    for rank, writer in enumerate(("0.2", "0.1", "1.2", "0.1")):
        (fast / (OPTIM % rank)).rename(fast / f"{OPTIM % rank}-{writer}")
    for writer in ("0.1", "1.2"):
        (fast / f"{STATES}-{writer}").write_bytes((fast / STATES).read_bytes())
    (fast / STATES).rename(fast / f"{STATES}-0.2")
    return plain, fast


def test_other_ranks_copies_are_told_and_keep_nothing_from_being_loaded(folders: tuple[Path, Path]) -> None:
    fast = folders[1]
    (fast / f"{STATES}-0.1").write_bytes(b"torn")
    found = verify_checkpoint(str(fast))
    assert {fault.file for fault in found.faults} == {f"{STATES}-0.1", f"{STATES}-1.2"}
    assert all(fault.warning for fault in found.faults)
    assert any(f"another rank's copy of {STATES}-0.2" in fault.text for fault in found.faults)
    assert len(found.files) == 7


@pytest.mark.parametrize("name", [f"{STATES}-0.2", f"{OPTIM % 2}-1.2"])
def test_what_is_damaged_is_named(folders: tuple[Path, Path], name: str) -> None:
    path = folders[1] / name
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=f"{name}: no zip directory"):
        open_checkpoint(str(folders[1]), Comm())


def write_over(folder: Path, model: Model, writer: str) -> Path:
    """As a second save into a tag: what is longer keeps its end."""
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
        (3, "0.2", r"does not truncate files .* Save into a new tag, or remove the tag's folder"),
        (300, "0.4", r"two saves .* Remove the older save's files; DeepSpeed's fast writer leaves them"),
    ],
    ids=["shorter", "other writers"],
)
def test_a_save_into_an_older_tag_says_what_to_do(tmp_path: Path, rows: int, writer: str, words: str) -> None:
    write_over(tmp_path, Model((Param("a", (300, 5)),)), "0.2")
    tag = write_over(tmp_path, Model((Param("a", (rows, 5)),)), writer)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(tag), Comm())


def test_what_is_missing_is_named(folders: tuple[Path, Path]) -> None:
    (folders[1] / f"{OPTIM % 3}-0.1").unlink()
    with pytest.raises(CheckpointError, match=f"{OPTIM % 3} is missing"):
        open_checkpoint(str(folders[1]), Comm())


def test_a_seal_and_a_conversion_take_them(folders: tuple[Path, Path], tmp_path: Path) -> None:
    made = [tmp_path / name for name in ("of-plain", "of-fast")]
    for folder, destination in zip(folders, made, strict=True):
        seal_folder(str(folder), Comm())
        convert_checkpoint(str(folder), str(destination))
    left, right = ({p.relative_to(m): p.read_bytes() for p in m.rglob("*.pt")} for m in made)
    assert left == right
    (folders[1] / f"{OPTIM % 0}-0.2").write_bytes((folders[0] / (OPTIM % 0)).read_bytes() + b"\0")
    with pytest.raises(CheckpointError):
        open_checkpoint(str(folders[1]), Comm())
