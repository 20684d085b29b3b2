"""Open atomic checkpoints: folders with a manifest, and folders of DeepSpeed's converter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...comm import Comm
from ...errors import CheckpointError, UcpError
from ...io.paths import is_url
from ...io.store import find_entry, list_tree
from ...model import (
    Atom,
    AtomicIndex,
    FileRef,
    Fragment,
    Limits,
    ModelInfo,
    Record,
    RunState,
    Shard,
    StoredAtoms,
    count,
)
from ...model.topology import Topology
from ...model.wrappers import ATOMIC
from ...plan.derive import split_experts
from ..deepspeed.files import MANIFEST, holds_atoms
from ..deepspeed.headers import FileHeader
from ..deepspeed.reading import read_file
from ..findings import Finding, from_failure
from ..table import FileTable
from .universal import open_universal

if TYPE_CHECKING:
    from .manifest import Manifest


def survey_atomic(where: FileTable, comm: Comm) -> tuple[AtomicIndex | None, list[Finding]]:
    """Return the index of an atomic checkpoint, and its faults; collective.

    With a manifest, one rank reads only this file, and sizes are checked. For DeepSpeed's ``ds_to_universal`` all
    headers are read. Each atom has one shard of the logical shape.

    Args:
        where: the files. An atomic checkpoint must be whole in one place that every rank sees.
        comm: the loading ranks.

    Raises:
        CheckpointError: a folder of ``ds_to_universal`` is damaged, incomplete, or not visible to all ranks; equal on
            all ranks.
        UnsupportedError: the kind of checkpoint is not supported.
    """
    place, *others = _choose_places(where)
    folder = where.folders[place]
    manifest = comm.once(lambda: _read_manifest(folder))
    if isinstance(manifest, Finding):
        return None, [manifest]
    if manifest is None:
        return open_universal(folder, {name: entry.size for name, entry in where.visible[place].items()}, comm)
    findings = _find_all_faults(folder, manifest.files, comm)
    header = comm.once(lambda: _read_state_file(folder, manifest, findings))
    if isinstance(header, Finding):
        findings.append(header)
    if findings or not isinstance(header, FileHeader):
        return None, findings
    places = [each for each in where.near if each == place or each in others] if others else []
    return make_index(folder, manifest, header, [where.folders[each] for each in places]), []


def _choose_places(where: FileTable) -> list[int]:
    """Return the places where every rank sees an atomic checkpoint."""
    views = [view.list_entries() for view in where.views] or [where.visible]
    common = [place for place in range(len(where.folders)) if all(holds_atoms(each[place]) for each in views)]
    if not common:
        raise CheckpointError(
            "some ranks see an atomic checkpoint, others do not. Put all of it where every rank sees it.",
            path=where.folder,
        )
    return common


def _read_manifest(folder: str) -> Manifest | Finding | None:
    from .manifest import read_manifest

    try:
        return read_manifest(folder)
    except CheckpointError as error:
        return from_failure("manifest", MANIFEST, error)


def _find_all_faults(folder: str, sizes: Mapping[str, int], comm: Comm) -> list[Finding]:
    """Check the sizes of all files; collective. In an object store, every rank learns the files' versions."""
    if is_url(folder):
        return comm.run(lambda: find_faults(folder, sizes))
    found = comm.share([*sizes.items()], lambda file: find_faults(folder, dict([file])))
    return [fault for faults in found for fault in faults]


def find_faults(folder: str, sizes: Mapping[str, int]) -> list[Finding]:
    """Return the faults of files that are missing or not of the given size.

    An object store lists a thousand files at once; a file system is asked for each file.
    """
    tree = list_tree(folder) if is_url(folder) else {}
    found = []
    for name, size in sizes.items():
        path = os.path.join(folder, name)
        entry = tree.get(name) if is_url(folder) else find_entry(path)
        if entry is None:
            text = f"{path} is missing; the manifest lists it. Copy it here, or convert again."
            found.append(Finding("missing", name, text))
        elif entry.size != size:
            text = f"{path}: has {entry.size} bytes, the manifest says {size} bytes; it was cut short or replaced."
            found.append(Finding("manifest", name, f"{text} Copy it again."))
    return found


def _read_state_file(folder: str, manifest: Manifest, faults: Sequence[Finding]) -> FileHeader | Finding | None:
    """Read the header of the client's state file; all tensors in it belong to the client."""
    if any(fault.file == manifest.state_file for fault in faults):
        return None
    try:
        header = read_file(folder, manifest.state_file)
    except UcpError as error:
        return from_failure("header", manifest.state_file, error)
    expected = next(state.crc for state in manifest.states if state.name == manifest.state_file)
    if header.crc != expected:
        text = (
            f"{folder}/{manifest.state_file}: its directory has CRC32 {header.crc:08x}, the manifest {expected:08x}; "
            "the file was damaged or replaced. Copy it again, or convert again."
        )
        return Finding("manifest", manifest.state_file, text)
    return header


def make_index(folder: str, manifest: Manifest, header: FileHeader, places: Sequence[str] = ()) -> AtomicIndex:
    """Build the index from a manifest.

    Args:
        folder: folder of the files.
        manifest: its manifest.
        header: header of its state file.
        places: folders that may hold copies, nearest first; empty if there is only ``folder``.
    """
    sizes = manifest.files
    crcs = {state.name: state.crc for state in manifest.states}
    files = [
        FileRef(f"{folder}/{name}", size, crcs.get(name), tuple(f"{place}/{name}" for place in places))
        for name, size in sizes.items()
    ]
    numbers = {name: number for number, name in enumerate(sizes)}
    records: list[Record] = []
    atoms: list[Atom] = []
    for each in manifest.atoms:
        fragments = (Fragment(0, count(each.shape), len(records), 0),) if count(each.shape) else ()
        records.append(Record(numbers[each.file], each.offset, each.nbytes, each.crc))
        atoms.append(Atom(each.name, each.state, each.dtype, (Shard(each.shape, fragments),), each.instance))
    others = header.model.others if header.model else ()
    client = tuple(range(len(records), len(records) + len(others)))
    records += [Record(numbers[manifest.state_file], blob.offset, blob.nbytes, blob.crc) for blob in others]
    topology = {**manifest.source, "wrapper": ATOMIC, **dict.fromkeys(("dp", "tp", "pp", "sp", "ep"), 1)}
    index = AtomicIndex(
        stored=StoredAtoms.of(files, records, atoms),
        run=RunState(
            scalars=manifest.scalars,
            groups=manifest.groups,
            counters=manifest.counters,
            scaler=manifest.scaler,
            clip_grad=manifest.clip_grad,
            state_file=f"{folder}/{manifest.state_file}",
            topology=Topology(**topology),
            optimizer=manifest.optimizer,
            optimizer_params=manifest.optimizer_params,
            client_records=client,
            scalar_dtypes=manifest.scalar_dtypes,
            degrees=(manifest.source["tp"], manifest.source["pp"]),
        ),
        model=ModelInfo(
            aliases=manifest.aliases,
            buffers=frozenset(manifest.buffers),
            instances=manifest.instances,
            hints=manifest.hints,
            recorded={name: record["pattern"] for name, record in manifest.patterns.items()},
        ),
        limits=Limits(dropped=manifest.dropped),
    )
    return split_experts(index, manifest.fused)
