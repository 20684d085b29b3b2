"""Open atomic checkpoints: folders of our conversions, with a manifest, and folders of DeepSpeed's converter."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...comm import Comm
from ...errors import CheckpointError, UcpError
from ...io.paths import is_url
from ...io.store import find_entry, list_tree
from ...model import AtomicIndex
from ..deepspeed.files import MANIFEST, holds_atoms
from ..deepspeed.headers import FileHeader
from ..deepspeed.reading import read_file
from ..findings import Finding, from_failure
from ..places import FileTable
from .universal import open_universal

if TYPE_CHECKING:  # pydantic takes long to import
    from ..deepspeed.seal import Seal
    from .index import Manifest


def survey_atomic(where: FileTable, comm: Comm) -> tuple[AtomicIndex | None, list[Finding], Manifest | None]:
    """Return the index of an atomic checkpoint, its faults, and its manifest; collective.

    With a manifest, one rank reads only this file, and sizes are checked. For DeepSpeed's ``ds_to_universal`` all
    headers are read. Each atom has one shard of the logical shape.

    Args:
        where: the files. An atomic checkpoint must be whole in one place that every rank sees.

    Raises:
        CheckpointError: a folder of ``ds_to_universal`` is damaged, incomplete, or not visible to all ranks; equal on
            all ranks.
        UnsupportedError: the kind of checkpoint is not supported.
    """
    place, *others = _choose_places(where)
    folder = where.folders[place]
    manifest = comm.once(lambda: _read_manifest(folder))
    if isinstance(manifest, Finding):
        return None, [manifest], None
    if manifest is None:
        sizes = {name: entry.size for name, entry in where.visible[place].items()}
        return *open_universal(folder, sizes, comm), None
    from .index import STATE_FILE, make_index

    findings = _find_all_faults(folder, manifest.seal, comm)
    if any(fault.file == STATE_FILE for fault in findings):
        return None, findings, manifest
    header = comm.once(lambda: _read_state_file(folder, STATE_FILE, manifest.seal))
    if isinstance(header, Finding):
        findings.append(header)
    if findings or isinstance(header, Finding):
        return None, findings, manifest
    places = [near for near in where.near if near == place or near in others] if others else []
    return make_index(folder, manifest, header, [where.folders[near] for near in places]), [], manifest


def _choose_places(where: FileTable) -> list[int]:
    """Return the places where every rank sees an atomic checkpoint."""
    views = [view.list_entries() for view in where.views] or [where.visible]
    common = [place for place in range(len(where.folders)) if all(holds_atoms(view[place]) for view in views)]
    if not common:
        raise CheckpointError(
            "some ranks see an atomic checkpoint, others do not. Put all of it where every rank sees it.",
            path=where.folder,
        )
    return common


def _read_manifest(folder: str) -> Manifest | Finding | None:
    from .index import read_manifest

    try:
        return read_manifest(folder)
    except CheckpointError as error:
        return from_failure("seal", MANIFEST, error)


def _find_all_faults(folder: str, seal: Seal, comm: Comm) -> list[Finding]:
    """Check the sizes of all files; collective. In an object store, every rank learns the files' versions."""
    if is_url(folder):
        return comm.run(lambda: find_faults(folder, seal))
    by_file = comm.share([*seal.files], lambda name: find_faults(folder, seal, [name]))
    return [fault for faults in by_file for fault in faults]


def find_faults(folder: str, seal: Seal, names: Iterable[str] | None = None) -> list[Finding]:
    """Return the faults of sealed files that are missing or not of the sealed size.

    An object store lists a thousand files at once; a file system is asked for each file.

    Args:
        names: files to look at (default: all).
    """
    from ..deepspeed.seal import compare_file

    tree = list_tree(folder) if is_url(folder) else {}
    findings: list[Finding | None] = []
    for name in seal.files if names is None else names:
        path = os.path.join(folder, name)
        entry = tree.get(name) if is_url(folder) else find_entry(path)
        if entry is None:
            text = f"{path} is missing; the manifest lists it. Copy it here, or convert again."
            findings.append(Finding("missing", name, text))
        else:
            findings.append(compare_file(folder, name, entry.size, None, seal))
    return [fault for fault in findings if fault]


def _read_state_file(folder: str, name: str, seal: Seal) -> FileHeader | Finding:
    """Read the header of the client's state file, or return its fault."""
    from ..deepspeed.seal import compare_file

    try:
        header = read_file(folder, name)
    except UcpError as error:
        return from_failure("header", name, error)
    return compare_file(folder, name, header.size, header.crc, seal) or header
