"""Conversions and exports that are killed or fill the disk leave no incomplete output, and the next run succeeds."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import StorageError
from deepspeed_ucp.export.safetensors import export_safetensors
from deepspeed_ucp.export.tensors import ExportOptions
from deepspeed_ucp.formats import open_checkpoint
from tests.convert.conversions import convert, read_bytes, write_source
from tests.convert.converting import use_small_ranges
from tests.support.covering import stride
from tests.support.crash import failing, intercept, list_calls, list_writes, run_child, run_dying

DST = "global_step3_universal"
LATEST = "latest_universal"


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_ranges(monkeypatch)
    # tests/io/test_staging.py tests it. Here it would wait for all other writes of the machine.
    monkeypatch.setattr("deepspeed_ucp.io.staging.sync_tree", lambda _folder: None)
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


@pytest.fixture
def place(source: Path, tmp_path: Path) -> Callable[[object], Path]:
    """Return a function that copies the root with hard links, through which a write would change all copies."""
    return lambda name: Path(shutil.copytree(source, tmp_path / str(name), copy_function=os.link))


def export(root: Path, to: Path | None = None) -> object:
    """Export the weights in two files, in one process and one worker."""
    index, options = open_checkpoint(str(root / "global_step3"), Comm()), ExportOptions(workers=1, overwrite=True)
    return export_safetensors(index, str(to or root / DST), options=options, max_shard=2000)


WRITERS: dict[str, Callable[..., object]] = {"convert": convert, "export": export}
by_writer = pytest.mark.parametrize("writer", WRITERS)


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an uninterrupted conversion."""
    return make_reference(source, tmp_path_factory.mktemp("reference"))


def make_reference(source: Path, folder: Path, write: Callable[..., object] = convert) -> dict[str, bytes]:
    write(source, folder / DST)
    return read_bytes(folder / DST)


def check_half_way(root: Path, expected: dict[str, bytes]) -> None:
    """Check that there is no output, or the complete one."""
    if (root / DST).exists():
        assert read_bytes(root / DST) == expected
    if (root / LATEST).exists():
        assert (root / LATEST).read_text() == DST
        assert (root / DST).exists()


def check_done(root: Path, source: Path, expected: dict[str, bytes], latest: str = LATEST) -> None:
    """Check for the complete output, the unchanged source, and no other files."""
    assert read_bytes(root / DST) == expected
    assert not latest or (root / LATEST).read_text() == DST
    assert {path.name for path in root.iterdir()} == {path.name for path in source.iterdir()} | {DST, latest} - {""}


@pytest.mark.parametrize("failure", ["between", "torn", "full"])
@by_writer
def test_the_same_command_succeeds_after_a_failure_at_any_call(
    writer: str, failure: str, source: Path, place: Callable[[object], Path], tmp_path: Path
) -> None:
    """It is killed between or within calls, or the disk is full from a call on."""
    write, latest = WRITERS[writer], LATEST if writer == "convert" else ""
    before, expected, root = read_bytes(source), make_reference(source, tmp_path, write), place("dry")
    is_torn, errors = failure == "torn", list[str]()
    calls = list_writes(lambda: write(root)) if is_torn else range(len(list_calls(lambda: write(root))))
    assert len(calls) > (10 if writer == "convert" else 4)
    chosen = calls[:: stride(3 if is_torn else 13) if writer == "convert" else 1]
    for at in chosen:
        root = place(at)
        if writer == "export" and at % 2:  # it replaces an earlier export
            write(root)
        if failure == "full":
            try:
                with failing(at):
                    write(root)
            except StorageError as error:
                errors.append(str(error))
            left = {path.name for path in root.iterdir()} - {path.name for path in source.iterdir()}
            assert left in (set(), {DST}, {DST, LATEST}), at
        else:
            assert run_dying(lambda root=root: write(root), at, torn=is_torn)
        check_half_way(root, expected)
        write(root)
        check_done(root, source, expected, latest)
        shutil.rmtree(root)
    assert len(errors) > len(chosen) / 2 or failure != "full"
    assert all("disk full" in each for each in errors)
    assert read_bytes(source) == before


def test_a_conversion_with_many_workers_completes_after_kills_at_any_time(
    source: Path, place: Callable[[object], Path], expected: Any
) -> None:
    """Each attempt is killed slightly later, until one completes."""
    root, delays = place("root"), random.Random(0)
    for attempt in range(200):
        child = os.fork()
        if not child:
            convert(root, workers=8)
            os._exit(0)
        time.sleep(0.005 * stride(4) * attempt * delays.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        check_half_way(root, expected)
        if (root / DST).exists():
            break
    convert(root, workers=8)
    check_done(root, source, expected)


def test_an_interrupt_leaves_no_files(source: Path, place: Callable[[object], Path], expected: Any) -> None:
    """It also releases the lock."""
    root = place("root")
    half = len(list_calls(lambda: convert(place("dry")))) // 2

    def interrupt(number: int, _name: str, _args: tuple[Any, ...]) -> None:
        if number == half:
            os.kill(os.getpid(), signal.SIGINT)

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in background jobs of shells SIGINT is ignored
        with pytest.raises(KeyboardInterrupt), intercept(interrupt):
            convert(root)

    assert run_child(work) == 0
    assert {path.name for path in root.iterdir()} == {path.name for path in source.iterdir()}
    convert(root)
    check_done(root, source, expected)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_folder_of_a_killed_attempt_is_removed(
    overwrite: bool, source: Path, place: Callable[[object], Path], expected: Any, tmp_path: Path
) -> None:
    """It is removed even if the tag was saved again, or if the earlier output is reused."""
    root = place("root")
    if overwrite:
        convert(root)
    calls = len(list_calls(lambda: convert(place("dry"))))
    assert run_dying(lambda: convert(root, overwrite=overwrite), calls // 2)
    assert (root / f".{DST}.ucp-partial").exists()
    if overwrite:
        assert convert(root).reused
        check_done(root, source, expected)
    else:
        shutil.rmtree(root / "global_step3")
        write_source(root, seed=1)
        convert(root)
        assert read_bytes(root / DST) == make_reference(root, tmp_path / "again")


# -- disk full --------------------------------------------------------------------------------------------------------


@by_writer
def test_too_little_room_is_an_error_before_the_first_byte(
    writer: str, source: Path, place: Callable[[object], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = place("root")
    monkeypatch.setattr("deepspeed_ucp.io.disk._count_free", lambda _path: 1000)
    with pytest.raises(StorageError, match=r"needs .* bytes, has 1,000 bytes free"):
        WRITERS[writer](root)
    assert {path.name for path in root.iterdir()} == {path.name for path in source.iterdir()}


# -- existing outputs --------------------------------------------------------------------------------------------------


def test_a_save_converted_in_place_is_never_replaced(place: Callable[[object], Path], source: Path) -> None:
    """Upstream's script can convert in place: the folder looks atomic and is the only copy of the run."""
    root = place("root")
    other = root / "other"
    shutil.copytree(source / "global_step3", other)
    (other / "zero").mkdir()
    (other / "zero" / "optimizer_state.pt").touch()
    with pytest.raises(StorageError, match="holds files that no conversion wrote .*optim_states"):
        convert(root, other, overwrite=True)
