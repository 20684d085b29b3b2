"""Faults: opening, `ds_ucp verify`, `ds_ucp inspect` and loads agree, for every source, fault and kind of file.

A load that is not refused restores the saved bits. An atomic checkpoint is opened by its manifest, without the headers
of its atoms: there `verify --headers-only` may find more than opening does.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.properties.samples import (
    FOREIGN,
    SOURCES,
    Foreign,
    Source,
    Verdict,
    inspect,
    load_folder,
    open_folder,
    verify,
)
from tests.support.covering import stride
from tests.support.damage import flip
from tests.synth import Run

FOLDERS = ("atomic", "global_step3")


@dataclass(frozen=True)
class Fault:
    """A change of one file.

    Attributes:
        do: changes the file; returns False if the fault does not apply. Its last argument is a folder for other
            checkpoints of the source.
        needs_zip: not detectable in legacy files, which have no checksums.
        relative: files contradict each other, and messages may name any of them.
        harmless: all commands and loads accept it.
    """

    name: str
    do: Callable[[Path, Source, Path], bool | None]
    needs_zip: bool = False
    relative: bool = False
    harmless: bool = False

    def __str__(self) -> str:
        return self.name


def find_record(path: Path, part: str) -> tuple[int, int]:
    """Return offset and size of the largest record with this part in its name."""
    with zipfile.ZipFile(path) as archive:
        entry = max((e for e in archive.infolist() if part in e.filename), key=lambda e: e.file_size)
        with path.open("rb") as stream:
            stream.seek(entry.header_offset + 26)
            name, extra = (int.from_bytes(stream.read(2), "little") for _ in range(2))
    return entry.header_offset + 30 + name + extra, entry.file_size


def flip_record(part: str) -> Callable[[Path, Source, Path], bool | None]:
    def do(path: Path, _source: Source, _root: Path) -> bool | None:
        if not zipfile.is_zipfile(path):
            return False
        try:
            offset, nbytes = find_record(path, part)
        except ValueError:
            return False  # the file has no such record
        flip(path, offset + nbytes // 2, 2)
        return None

    return do


def cut(keep: Callable[[int], int]) -> Callable[[Path, Source, Path], None]:
    return lambda path, *_: os.truncate(path, keep(path.stat().st_size))


def swap_in(path: Path, other: Path) -> bool | None:
    """Replace a file by another checkpoint's."""
    if not other.exists() or other.read_bytes() == path.read_bytes():
        return False
    shutil.copy(other, path)
    return None


def from_another_step(path: Path, source: Source, root: Path) -> bool | None:
    if len(list(path.parent.glob("*"))) == 1:
        return False  # the only file: the result would be a complete other checkpoint
    folder = write_other(root / "step", lambda root: source.write(root, seed=1, run=Run(global_steps=4), step=4))
    return swap_in(path, folder / path.relative_to(find_folder(path)))


def from_another_size(path: Path, source: Source, root: Path) -> bool | None:
    """Replace a file by one of a run on more ranks."""
    if not source.topology.partitions:
        return False
    dp = source.topology.dp + max(source.topology.ep, default=1)
    other = replace(source, topology=replace(source.topology, dp=dp))
    return swap_in(
        path, write_other(root / "size", lambda root: other.write(root, seed=1)) / path.relative_to(find_folder(path))
    )


def write_other(root: Path, write: Callable[[Path], Path]) -> Path:
    """Write another checkpoint at the first call."""
    if not root.exists():
        write(root)
    return next(root / name for name in FOLDERS if (root / name).exists())


def from_its_neighbour(path: Path, _source: Source, _root: Path) -> bool | None:
    """Replace a file by another rank's."""
    kind = path.name.rpartition("rank_")[2].lstrip("0123456789")
    others = [other for other in sorted(path.parent.glob(f"*{kind}")) if other != path and "rank_" in other.name]
    others = [other for other in others if other.name.count("rank") == path.name.count("rank")]
    return swap_in(path, others[-1]) if others else False


def repeat_pickle(path: Path, _source: Source, _root: Path) -> bool | None:
    """Add a second data.pkl to a zip; readers differ in their choice."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith("data.pkl"))
        data = archive.read(name)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, data)
    return None


def replace_by(make: Callable[[Path], object]) -> Callable[[Path, Source, Path], None]:
    def do(path: Path, _source: Source, _root: Path) -> None:
        path.unlink()
        make(path)

    return do


def link_out(path: Path, _source: Source, _root: Path) -> None:
    """Move the file out of the checkpoint's folder, behind a link."""
    outside = find_folder(path).with_name("elsewhere")
    shutil.move(path, outside)
    path.symlink_to(outside)


def find_folder(path: Path) -> Path:
    """Return the checkpoint of a file."""
    return next(parent for parent in path.parents if parent.name in FOLDERS)


FAULTS = [
    Fault("missing", replace_by(lambda path: None)),
    Fault("empty", cut(lambda size: 0)),
    Fault("half", cut(lambda size: size // 2)),
    Fault("end-cut", cut(lambda size: size - 50)),
    Fault("no-checkpoint", replace_by(lambda path: path.write_bytes(b"not a checkpoint" * 100))),
    Fault("folder", replace_by(Path.mkdir)),
    Fault("fifo", replace_by(os.mkfifo)),
    Fault("dangling-link", replace_by(lambda path: path.symlink_to("nowhere"))),
    Fault("bit-of-tensor", flip_record("/data/"), needs_zip=True),
    Fault("bit-of-pickle", flip_record("data.pkl"), needs_zip=True),
    Fault("second-pickle", repeat_pickle, needs_zip=True),
    Fault("neighbour", from_its_neighbour, relative=True),
    Fault("another-step", from_another_step, relative=True),
    Fault("another-size", from_another_size, relative=True),
    Fault("link-out", link_out, harmless=True),
]


# -- their detection ---------------------------------------------------------------------------------------------------

ALL = [*SOURCES, *FOREIGN]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Source], Path]:
    """Write a whole checkpoint of each kind once."""
    made: dict[str, Path] = {}

    def write(source: Source) -> Path:
        if source.name not in made:
            made[source.name] = source.write(tmp_path_factory.mktemp(source.name))
        return made[source.name]

    return write


def list_sites(folder: Path) -> list[str]:
    """List the first and the last file of every kind."""
    kinds: dict[str, list[str]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        kinds.setdefault("".join(c for c in path.name if not c.isdigit()), []).append(name)
    return sorted({name for names in kinds.values() for name in (names[0], names[-1])})


@pytest.mark.parametrize("source", ALL, ids=str)
def test_all_commands_and_loads_accept_a_complete_checkpoint(source: Source, written: Callable[[Source], Path]) -> None:
    folder = written(source)
    for verdict in (verify(folder, source), inspect(folder, source), load_folder(folder, source)):
        assert not verdict, verdict.text


def is_unseen(source: Source, fault: Fault, site: str) -> bool:
    """Return True for a fault that the files do not show.

    Legacy files do not contain their name, and a rank's part of ZeRO 3 may have any values. Files of other libraries do
    not record their save, numbers in their names replace an index, and a configuration is not read. A load of weights
    without their optimizer warns that there are only weights.
    """
    if isinstance(source, Foreign):
        is_spare = site.endswith((".index.json", "optimizer.bin")) and fault.name == "missing"
        return fault.name == "another-step" or is_spare or site == "adapter_config.json"
    return fault.name == "neighbour" and source.name == "zero3-legacy-bf16"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("source", ALL, ids=str)
def test_all_commands_and_loads_give_the_same_verdict_on_a_fault(
    source: Source, fault: Fault, written: Callable[[Source], Path], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    whole, sites = written(source), list_sites(written(source))
    step = min(stride(7), len(sites))  # each source and fault has other sites
    sites = sites[(ALL.index(source) + FAULTS.index(fault)) % step :: step]
    for number, site in enumerate(sites):
        if is_unseen(source, fault, site):
            continue
        root = tmp_path / str(number)
        folder = root / whole.name
        shutil.copytree(whole, folder)
        if fault.do(folder / site, source, whole.parent / "others") is False:
            continue
        with subtests.test(site=site):
            check(folder, site, source, fault)


def check(folder: Path, site: str, source: Source, fault: Fault) -> None:
    opened, shown = open_folder(folder, source), inspect(folder, source)
    headers, whole = verify(folder, source, "--headers-only"), verify(folder, source)
    loaded = opened or load_folder(folder, source)  # a load opens the folder in the same way
    assert bool(opened) == bool(shown), f"open: {opened}\ninspect: {shown}"
    assert imply(opened, headers), f"open: {opened}\nverify --headers-only: {headers}"
    assert imply(headers, opened) or source.atomic, f"open: {opened}\nverify --headers-only: {headers}"
    assert imply(headers, whole), f"verify --headers-only: {headers}\nverify: {whole}"
    assert imply(loaded, whole), f"load: {loaded}\nverify: {whole}"
    alone = len(list_sites(folder)) <= 1  # a missing file is not detectable in this case
    found = [verdict for verdict in (opened, shown, headers, whole, loaded) if verdict]
    assert found or fault.harmless or (source.legacy and fault.needs_zip), "not detected"
    for verdict in found:
        assert verdict.names(Path(site).name) or fault.relative or alone, f"{site} is not named: {verdict}"


def imply(left: Verdict, right: Verdict) -> bool:
    return bool(right) or not left
