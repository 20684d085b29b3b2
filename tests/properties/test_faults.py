"""Faults: opening, `ds_ucp verify`, `ds_ucp inspect` and loads agree, for every source, fault and kind of file.

A load that is not refused restores the saved bits. An atomic checkpoint is opened by its manifest, without the headers
of its atoms: there `verify --headers-only` may find more than opening does.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.properties.faults import FAULTS, Fault
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
