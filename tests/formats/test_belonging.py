"""Files of two saves with equal steps and hyper-parameters in one folder: marks, times and seals."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.engine_state import KEY, RANDOM_STATES
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.formats.deepspeed.files import SEAL
from deepspeed_ucp.formats.deepspeed.gather import find_late_files
from deepspeed_ucp.formats.findings import WARNING, Finding
from deepspeed_ucp.formats.open import seal_folder, survey_checkpoint
from deepspeed_ucp.io.paths import Entry
from deepspeed_ucp.rng import make_record
from tests.formats.saves import Files, check_refused, make_files, open_alone, shard
from tests.synth import Model, Param, Topology, write_files

MODEL = Model((Param("a", (9, 5)), Param("b", (17,), group=1)))
ZERO2, ZERO3 = Topology(2, 4, "bf16"), Topology(3, 4)


def make(seed: int = 0, topology: Topology = ZERO3) -> Files:
    return make_files(MODEL, topology, seed)


def write(folder: Path, files: Files) -> Path:
    write_files(folder / "tag", files)
    (folder / "latest").write_text("tag")
    return folder / "tag"


def mix(folder: Path, change: Callable[[dict[str, Any]], object], rank: int = 2, topology: Topology = ZERO3) -> Path:
    """Write a checkpoint of four ranks, with changed files of another run on one rank."""
    files, other = make(0, topology), make(1, topology)
    for name, content in other.items():
        if f"zero_pp_rank_{rank}_" in name:
            change(content)
            files[name] = content
    return write(folder, files)


def look(path: Path) -> list[Finding]:
    return list(survey_checkpoint(str(path), Comm()).findings)


@pytest.mark.parametrize("topology", [ZERO2, ZERO3], ids=lambda t: t.label)
@pytest.mark.parametrize("rank", [0, 2])
def test_files_of_another_deepspeed_release_are_refused(tmp_path: Path, topology: Topology, rank: int) -> None:
    """The error names the file that differs from most, even if it is rank 0's. Such a mixture is not sealed."""
    path = mix(tmp_path, lambda content: content.update(ds_version="0.0.1"), rank, topology)
    check_refused(path, r"ds_version differs from that of .*\(0.0.1 ≠")
    assert all(f"zero_pp_rank_{rank}_" in finding.file for finding in look(path))
    with pytest.raises(CheckpointError, match="ds_version differs"):
        seal_folder(str(path), Comm())
    assert not (path / SEAL).exists()


def test_a_shard_in_another_archive_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, make())
    torch.save(make(1)[shard(1)], path / shard(1), _use_new_zipfile_serialization=False)
    check_refused(path, "zero_pp_rank_1_.*form of its archive differs")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda content: content["ds_config"].update(steps_per_print=7), "whole ds_config"),
        (lambda content: content.update(lr_scheduler={"last_epoch": 77}), "lr_scheduler"),
        (lambda content: content.update(run_id="k3j9x"), "client state"),
    ],
    ids=["config", "scheduler", "client"],
)
def test_values_that_may_differ_by_rank_are_a_warning(
    tmp_path: Path, change: Callable[[Any], object], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = mix(tmp_path, change)
    found = [finding for finding in look(path) if finding.kind == "foreign"]
    assert found and all(text in f.text and f.severity == WARNING and "rank_2" in f.file for f in found)
    assert all("may be of another" in f.text and "put the right one back" not in f.text for f in found)
    open_alone(path)
    assert "rank_2" in caplog.text


def test_values_of_each_rank_are_no_warning(tmp_path: Path) -> None:
    """Strings with the rank's number; random states of all ranks in the first file; samplers of some ranks."""
    files = make()
    places = [(0, 0, rank) for rank in range(4)]
    axes, states = {"torch": (2,)}, {place: (bytes([place[2]]),) for place in places}
    for rank, content in enumerate(content for name, content in files.items() if "model_states" in name):
        content.update(device=f"cuda:{rank}", rng=[1.5 * rank], node=f"node{rank}")
        held = [(place, {"torch": states[place]}) for place in (places if rank == 0 else [places[rank]])]
        data = {"sampler": {"epoch": 1}} if rank < 2 else {}
        content[KEY] = {RANDOM_STATES: make_record(held, axes, 7, 3), **data}
    assert look(write(tmp_path, files)) == []


def age(path: Path, hours: float) -> None:
    changed = path.stat().st_mtime - 3600 * hours
    os.utime(path, (changed, changed))


def test_files_written_hours_apart_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, make())
    for rank in (1, 2, 3):
        age(path / shard(rank), 5)
    (finding,) = look(path)
    assert (finding.kind, finding.severity) == ("times", WARNING)
    assert set(finding.names) == {shard(rank) for rank in (1, 2, 3)}
    assert "5 hours before the other files" in finding.text
    open_alone(path)
    assert "5 hours before" in caplog.text


@pytest.mark.parametrize(("sign", "hours", "late"), [(1, 3.5, 4), (-0.25, 9, 0)], ids=["cut off", "slow copy"])
def test_files_older_and_newer_than_latest_are_a_warning(tmp_path: Path, sign: float, hours: float, late: int) -> None:
    """They are left by an interrupted save over the same tag. In a copy all files are newer than ``latest``."""
    path = write(tmp_path, make())
    for place, file in enumerate(sorted(path.iterdir())):
        age(file, sign * place)
    age(tmp_path / "latest", hours)
    found = look(path)
    assert [(finding.kind, len(finding.names)) for finding in found] == [("times", late)] * bool(late)
    assert all("after `latest`" in finding.text for finding in found)


def test_the_duration_of_a_large_save_is_no_warning() -> None:
    """70B in ZeRO 3 on 256 ranks at 1 GB/s: all optimizer files end together, 15 minutes after the others."""
    model, optim = ([f"{kind}_{rank}" for rank in range(256)] for kind in ("model", "optim"))
    for seconds, is_late in ((900.0, False), (5 * 3600.0, True)):
        entries = {name: Entry(550 << 20, 1.0 + place / 256) for place, name in enumerate(model)}
        entries |= {name: Entry(3300 << 20, 1.0 + seconds + place / 16) for place, name in enumerate(optim)}
        assert bool(find_late_files("/none/tag", entries, [*model, *optim])) is is_late


@pytest.mark.parametrize("file", ["model.safetensors", "adapter_model.bin", "training_args.bin"])
@pytest.mark.parametrize("topology", [ZERO2, Topology(0)], ids=lambda t: t.label)
def test_newer_weights_in_the_parent_folder_are_a_warning(file: str, topology: Topology, tmp_path: Path) -> None:
    """A trainer has saved only weights into the folder later. A later export is no warning."""
    path = write(tmp_path, make(topology=topology))
    (tmp_path / file).touch()
    (tmp_path / "trainer_state.json").write_text("{}")
    find = lambda: [each.text for each in look(path) if each.kind == "times"]  # noqa: E731
    assert find() == []
    for each in (*path.iterdir(), tmp_path / "latest"):
        age(each, 5)
    words = f"{path}: {file} and trainer_state.json in its parent folder were written 5 hours later"
    assert [text.startswith(words) for text in find()] == [True] * (file != "training_args.bin")
    age(tmp_path / "trainer_state.json", 5)
    assert find() == []


@pytest.mark.parametrize(
    ("content", "warns"),
    [
        ('{"global_step": 4}', True),
        ('{"global_step": 3}', False),
        ('{"global_step": 5, "epoch": 1.2}', False),  # an epoch that drops its last batches
        ('{"global_step": 6, "epoch": 1.2}', True),
        ('{"global_step": 2, "epoch": 1.2}', True),
        ('{"global_step": 4, "epoch": "1"}', False),
        ("[]", False),
        ("{", False),
        ('{"global_step": "4"}', False),
    ],
)
def test_a_trainers_state_of_another_step_is_a_warning(content: str, warns: bool, tmp_path: Path) -> None:
    path = write(tmp_path, make())
    (tmp_path / "trainer_state.json").write_text(content)
    found = look(path)
    assert [finding.kind for finding in found] == ["foreign"] * warns
    assert all(re.search(r"trainer_state.json: counts \d steps, the optimizer 3\.", each.text) for each in found)


@pytest.mark.parametrize("topology", [ZERO2, ZERO3, Topology(0)], ids=lambda t: t.label)
def test_a_sealed_save_opens_until_a_file_is_replaced(tmp_path: Path, topology: Topology) -> None:
    find = lambda: {finding.kind for finding in look(path)} - {"unnamed"}  # noqa: E731
    path = write(tmp_path, make(0, topology))
    seal_folder(str(path), Comm())
    assert sorted(os.listdir(path)) == sorted([*make(0, topology), SEAL])
    assert find() == set()
    write(tmp_path, make(1, topology))
    assert find() == {"seal"}
    seal_folder(str(path), Comm())
    assert find() == set()


@pytest.mark.parametrize("topology", [ZERO2, ZERO3], ids=lambda t: t.label)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_shard_of_another_run_breaks_the_seal(tmp_path: Path, topology: Topology, rank: int) -> None:
    """Configuration and step are the same, so only the seal shows the difference."""
    path, other = write(tmp_path, make(0, topology)), write(tmp_path / "other", make(1, topology))
    seal_folder(str(path), Comm())
    (name,) = (each for each in os.listdir(path) if each.endswith(shard(rank)))
    shutil.copy2(other / name, path / name)
    (finding,) = (finding for finding in look(path) if finding.is_fault)
    assert (finding.kind, finding.file) == ("seal", name)
    check_refused(path, f"{name}: has .* is not the file that was sealed.*remove .*{SEAL}")


def test_warnings_do_not_hide_a_broken_seal(tmp_path: Path) -> None:
    path = write(tmp_path, make())
    seal_folder(str(path), Comm())
    mix(tmp_path, lambda content: content["ds_config"].update(steps_per_print=7))
    assert {"seal", "foreign"} == {finding.kind for finding in look(path)}
    check_refused(path, "is not the file that was sealed")


@pytest.mark.parametrize("text", [None, "", '{"files": {"a": {"size": -1, "crc": 0}}}'])
def test_a_damaged_or_edited_seal_is_refused(tmp_path: Path, text: str | None) -> None:
    path = write(tmp_path, make())
    seal_folder(str(path), Comm())
    (path / SEAL).write_text((path / SEAL).read_text().replace('"size":', '"size":1') if text is None else text)
    (finding,) = look(path)
    assert (finding.kind, finding.file) == ("seal", SEAL)
    assert text is not None or "digest" in finding.text
