"""Staging: one writer, only complete outputs under the final name, and no removal of foreign files."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import pytest

from deepspeed_ucp.convert.outputs import CONVERSION
from deepspeed_ucp.errors import CheckpointError, StorageError
from deepspeed_ucp.io import disk
from deepspeed_ucp.io.disk import check_space, explain_full, sync_tree, write_at, write_atomically
from deepspeed_ucp.io.staging import LATEST, MANIFEST, OutputKind, Staging, hold_lock
from tests.support.covering import stride
from tests.support.crash import failing, intercept, list_calls, list_writes, run_dying

KIND = OutputKind(
    name="an output",
    maker="conversion",
    is_output=lambda folder: os.path.exists(os.path.join(folder, MANIFEST)),
    parts=re.compile(f"zero|{re.escape(MANIFEST)}"),
    last=(MANIFEST,),
)


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not sync files: other processes see them without it."""
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    monkeypatch.setattr(disk, "_sync_filesystem", os.path.isdir)


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return stage(tmp_path / "step1_universal")


def stage(destination: object, source: object = "/source", kind: OutputKind = KIND) -> Staging:
    return Staging(str(destination), str(source), kind)


NEW = {MANIFEST: "new", "zero/bias": "new", "zero/weight": "new"}
OLD = {MANIFEST: "old", "zero/weight": "old"}
FOREIGN = {MANIFEST: "foreign", ".ucp-halt": "foreign", "zero/other/weight": "foreign"}


def make_tree(folder: Path | str, files: dict[str, str] = OLD) -> Path:
    """Make a folder of files, by default those by which staging recognizes an output."""
    for name, text in files.items():
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_text(text)
    return Path(folder)


def convert(destination: Path, *, overwrite: bool = False) -> None:
    """Use staging like a conversion."""
    staging = stage(destination, destination.parent / "source")
    with staging.lock():
        if (destination / MANIFEST).exists() and (destination / MANIFEST).read_text() == "new":
            staging.write_latest(staging.name)
            return
        staging.check_destination(overwrite)
        staging.begin()
        with staging.discard_on_error():
            with explain_full(staging.folder):
                os.mkdir(staging.path("zero"))
            for name in ("weight", "bias"):
                write_atomically(staging.path("zero", name), b"new")
            staging.sync()
            write_atomically(staging.path(MANIFEST), b"new")
            staging.commit(staging.name, overwrite=overwrite)


def read_tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- killed, and disk full --------------------------------------------------------------------------------------------

FULL = {errno.errorcode[code]: code for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}


@pytest.mark.parametrize(
    ("before", "failure"),
    [*product(("nothing", "empty", "old", "other-attempt"), ("between", "torn")), *product(("old",), FULL)],
)
def test_a_conversion_that_fails_at_any_call_leaves_a_complete_output(
    before: str, failure: str, tmp_path: Path
) -> None:
    """It is killed between or within calls, or the disk is full. The next run completes the conversion.

    Another attempt is the temporary folder of a killed conversion of another source.
    """
    prepare = {
        "nothing": lambda folder: folder.parent.mkdir(),
        "empty": lambda folder: folder.mkdir(parents=True),
        "old": make_tree,
        "other-attempt": lambda folder: make_tree(stage(folder).folder, FOREIGN),
    }[before]

    prepare(tmp_path / "dry" / "step1")
    is_torn, errors = failure == "torn", list[str]()
    calls = (list_writes if is_torn else list_calls)(lambda: convert(tmp_path / "dry" / "step1", overwrite=True))
    step = (1 if before == "old" else 2) * stride(5)  # the other cases are parts of "old"
    if failure in FULL:
        step = 1 if failure == "ENOSPC" else 10
    for at in calls[::step] if is_torn else range(0, len(calls), step):
        destination = tmp_path / str(at) / "step1"
        prepare(destination)
        if failure not in FULL:
            assert run_dying(lambda folder=destination: convert(folder, overwrite=True), at, torn=is_torn)
        else:
            try:
                with failing(at, code=FULL[failure]):
                    convert(destination, overwrite=True)
            except StorageError as error:
                errors.append(str(error))
            assert {path.name for path in destination.parent.iterdir()} - {LATEST, ".step1.ucp-old"} == {"step1"}
            assert read_tree(destination) in (OLD, NEW)
        if destination.exists():
            assert read_tree(destination) in ([{}, OLD, NEW] if before in ("empty", "old") else [NEW])
        convert(destination, overwrite=True)
        assert read_tree(destination) == NEW
        assert {path.name for path in destination.parent.iterdir()} == {"step1", LATEST}
        assert (destination.parent / LATEST).read_text() == "step1"
    assert all(re.search("disk full .*bytes free", error) for error in errors) and bool(errors) == (failure in FULL)


def test_the_output_of_two_killed_conversions_is_completed(tmp_path: Path) -> None:
    for first in range(0, 40, 13):
        for second in range(0, 30, 11):
            destination = tmp_path / f"{first}-{second}" / "step1"
            make_tree(destination)
            for at in (first, second):
                run_dying(lambda folder=destination: convert(folder, overwrite=True), at)
            convert(destination, overwrite=True)
            assert read_tree(destination) == NEW


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: pwritev(fd, [b"".join(parts)[:3]], offset))
    with open(tmp_path / "file", "wb") as stream:
        write_at(stream.fileno(), memoryview(b"0123456789").cast("H"), 5)
        disk.write_parts(stream.fileno(), [b"ab", b"", b"cdef", b""], 15)
    assert (tmp_path / "file").read_bytes() == bytes(5) + b"0123456789abcdef"


def test_write_errors_other_than_a_full_disk_are_not_changed() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_at(-1, b"x", 0)


def test_space_is_checked_with_figures_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Existing files count as written; holes do not."""
    monkeypatch.setattr(disk, "_count_free", lambda path: (100 << 20) if path == str(tmp_path) else 0)
    check_space(str(tmp_path / "a" / "b"), 100 << 20)
    with pytest.raises(StorageError, match=r"a/b: disk full: needs 105,906,176 bytes, has 104,857,600 bytes free"):
        check_space(str(tmp_path / "a" / "b"), 101 << 20)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "data").write_bytes(os.urandom(4 << 20))
    with open(tmp_path / "hole", "wb") as stream:
        stream.truncate(1 << 30)
    os.sync()
    check_space(str(tmp_path), 104 << 20)
    with pytest.raises(StorageError, match="needs 104,8.* bytes, has 104,857,600 bytes free. Make room"):
        check_space(str(tmp_path), (104 << 20) + 10_000)


# -- one writer -------------------------------------------------------------------------------------------------------


def test_a_lock_file_removed_before_flock_is_created_again(staging: Staging) -> None:
    """Its holder removes it between open and flock, so no other process would see this lock."""
    with intercept(lambda number, *_: number or os.unlink(staging.lock_path), [(fcntl, "flock")]), staging.lock():
        assert os.path.exists(staging.lock_path)
        text = f"a conversion to {staging.destination} is under way already .pid {os.getpid()} on "
        with pytest.raises(StorageError, match=text):
            staging.lock().__enter__()


def test_only_one_thread_at_a_time_holds_the_lock(staging: Staging) -> None:
    inside, most = [0], [0]

    def work(_: int) -> None:
        with suppress(StorageError), hold_lock(staging.lock_path, "work"):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            inside[0] -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(200)))
    assert most[0] == 1 and not os.path.exists(staging.lock_path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_without_flock_the_lock_file_is_the_lock(code: int, staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(code, os.strerror(code))))
    with staging.lock(), pytest.raises(StorageError, match="or was killed.*remove the file and run it again"):
        stage(staging.destination).lock().__enter__()
    assert not os.listdir(staging.parent)


def test_a_lock_file_without_content_is_a_lock(staging: Staging) -> None:
    with open(staging.lock_path, "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="by a process that has not written its name"):
            staging.lock().__enter__()


# -- files that are never replaced ------------------------------------------------------------------------------------


MAKERS: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: make_tree(path, {**FOREIGN, "notes.txt": "mine"}),
    "file": lambda path: path.write_text("mine"),
    "link": lambda path: path.symlink_to(make_tree(path.parent / "other")),
}


@pytest.mark.parametrize("at", ["folder", "destination"])
@pytest.mark.parametrize("kind", MAKERS)
def test_foreign_files_are_refused_and_kept(kind: str, at: str, staging: Staging, tmp_path: Path) -> None:
    """They are at the destination, or have the name of the temporary folder."""
    MAKERS[kind](Path(getattr(staging, at)))
    before = read_tree(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(StorageError, match="stays"):
            convert(Path(staging.destination), overwrite=overwrite)
    assert read_tree(tmp_path) == before


def test_only_a_complete_output_is_committed_and_replaces_no_other(staging: Staging) -> None:
    staging.begin()
    with pytest.raises(CheckpointError, match="it is not whole"):
        staging.commit(None)
    write_atomically(staging.path(MANIFEST), b"new")
    Path(staging.destination).write_text("mine")
    with pytest.raises(StorageError, match="appeared while the conversion ran"):
        staging.commit(None, overwrite=True)
    assert Path(staging.destination).read_text() == "mine"


@pytest.mark.parametrize("mark", [MANIFEST, "zero/optimizer_state.pt"])
def test_an_atomic_checkpoint_is_replaced_only_on_request(mark: str, tmp_path: Path) -> None:
    staging = stage(tmp_path / "out", kind=CONVERSION)
    (tmp_path / "out" / "zero").mkdir(parents=True)
    (tmp_path / "out" / mark).touch()
    with pytest.raises(StorageError, match="--overwrite .overwrite=True. replaces it"):
        staging.check_destination(overwrite=False)
    staging.check_destination(overwrite=True)


@pytest.mark.parametrize(
    ("destination", "source", "message"),
    [
        *(("out", f"out/{source}", "holds the checkpoint that is read") for source in (".", "inner", "inner/more")),
        *(
            (f"out/{inner}", "out", "lies in the checkpoint that is read")
            for inner in ("inner", "inner/more", "link/more")
        ),
        ("/", "out", "root folder"),
        ("out2", "out/inner", ""),
    ],
)
def test_destinations_near_the_source_are_refused(destination: str, source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to(tmp_path / "out")
    with pytest.raises(StorageError, match=message) if message else nullcontext():
        stage(tmp_path / destination, tmp_path / source)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["link"]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_removable", [True, False])
@pytest.mark.parametrize("error", [CheckpointError("x"), OSError(5, "x"), KeyboardInterrupt("x")], ids=repr)
def test_an_error_leaves_no_files(
    error: BaseException,
    is_removable: bool,
    staging: Staging,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error of the removal does not hide the first error."""

    def work() -> None:
        with staging.lock():
            staging.begin()
            with staging.discard_on_error():
                write_atomically(staging.path(MANIFEST), b"half")
                if not is_removable:
                    monkeypatch.setattr(os, "unlink", mock.Mock(side_effect=PermissionError(13, "not yours")))
                raise error

    with pytest.raises(type(error), match=re.escape(str(error))):
        work()
    if is_removable:
        assert not os.listdir(staging.parent)
    else:
        assert f"{staging.folder}: could not be removed" in caplog.text and "not yours" in caplog.text


def test_foreign_files_that_the_output_kind_keeps_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are durable before the old output is removed."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    kept = {"config.json": "mine", "config.d/part": "mine"}
    make_tree(tmp_path / "out", OLD | kept)
    with pytest.raises(StorageError, match=r"config\.json.*stays"):
        stage(tmp_path / "out").check_destination(overwrite=True)
    staging = stage(tmp_path / "out", kind=replace(KIND, kept=re.compile(r"config\.(json|d)")))
    staging.check_destination(overwrite=True)
    staging.begin()
    write_atomically(staging.path(MANIFEST), b"new")
    synced.clear()
    with intercept(lambda *_: synced.append("renamed"), [(os, "rename")]):
        staging.commit(overwrite=True)
    assert read_tree(tmp_path / "out") == {MANIFEST: "new", **kept}
    assert set(map(staging.path, kept)) <= set(synced[: synced.index("renamed")])


# -- durable ----------------------------------------------------------------------------------------------------------


def test_few_files_are_synced_separately_and_many_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are synced separately if the system lacks the call."""
    make_tree(tmp_path / "tree")
    synced, names = list[str](), {".", "zero", "zero/weight", MANIFEST}
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    for few, can, expected in ((64, True, names), (1, True, {"all"}), (1, False, names | {"all"})):
        monkeypatch.setattr(disk, "_FEW", few)
        monkeypatch.setattr(disk, "_sync_filesystem", lambda folder, can=can: synced.append(f"{folder}/all") or can)
        synced.clear()
        sync_tree(str(tmp_path / "tree"))
        assert {os.path.relpath(path, tmp_path / "tree") for path in synced} == expected


def test_all_files_are_durable_before_the_output_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr("deepspeed_ucp.io.staging.sync_tree", lambda _folder: events.append("sync"))
    calls = [(os, name) for name in ("rename", "replace", "unlink")]
    with intercept(lambda _, name, paths: events.append(f"{name} {os.path.basename(paths[-1])}"), calls):
        convert(tmp_path / "step1")
    manifest, committed = events.index(f"replace {MANIFEST}"), events.index("rename step1")
    assert "sync" in events[:manifest]
    assert committed == manifest + 1
    assert events[committed + 1 :] == [f"replace {LATEST}", "unlink .step1.ucp-lock"]


def test_syncfs_is_used_if_it_reports_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "", "4.4.0-x", "", "")))
    assert not disk._sync_filesystem(str(tmp_path))
    monkeypatch.undo()
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 8):
        assert disk._sync_filesystem(str(tmp_path))
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError):
        disk._sync_filesystem(str(tmp_path))


def test_concurrent_writes_of_one_file_are_atomic(tmp_path: Path) -> None:
    """No temporary file remains."""
    path, texts = tmp_path / "latest", [b"global_step%d" % 10**number for number in range(8)]
    path.write_bytes(texts[0])
    seen = set[bytes]()

    def write(text: bytes) -> None:
        for _ in range(50):
            write_atomically(str(path), text)
            seen.add(path.read_bytes())

    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(write, texts))
    assert seen <= set(texts) and os.listdir(tmp_path) == ["latest"]
