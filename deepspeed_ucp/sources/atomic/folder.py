"""Atomic checkpoints as sources: folders with a manifest, and those of DeepSpeed's own converter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...atoms import (
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
from ...comm import Comm
from ...errors import CheckpointError, UcpError
from ...io.paths import Entry, is_url
from ...io.store import find_entry, list_tree
from ...plan.derive import split_experts
from ...topology import Topology
from ...wrappers import ATOMIC
from ..files import MANIFEST, holds_atoms
from ..findings import Finding, from_failure
from ..headers import FileHeader
from ..reading import read_file
from ..table import FileTable
from .universal import open_universal

if TYPE_CHECKING:
    from .manifest import Manifest


def survey_atomic(where: FileTable, comm: Comm) -> tuple[AtomicIndex | None, list[Finding]]:
    """The index of an atomic checkpoint and everything that is wrong with its files; collective.

    With a manifest that is read alone (by one rank), and the files' sizes are looked at; a folder of DeepSpeed's
    ``ds_to_universal`` is read by the headers of its files. Every atom has one shard of the logical shape.

    Args:
        where: its files. Of an atomic checkpoint all lie in one place, which every rank sees.
        comm: the ranks that load.

    Raises:
        CheckpointError: a folder of ``ds_to_universal`` that is damaged or half-made, or that not all ranks see; the
            same error on every rank.
        UnsupportedError: a kind that is not covered.
    """
    place, *others = _choose_places(where)
    folder = where.folders[place]
    manifest = comm.once(lambda: _read_manifest(folder))
    if isinstance(manifest, Finding):
        return None, [manifest]
    if manifest is None:
        return open_universal(folder, {name: entry.size for name, entry in where.own[place].items()}, comm)
    findings = _find_all_faults(folder, manifest.files, comm)
    header = comm.once(lambda: _read_state_file(folder, manifest, findings))
    if isinstance(header, Finding):
        findings.append(header)
    if findings or not isinstance(header, FileHeader):
        return None, findings
    places = [each for each in where.near if each == place or each in others] if others else []
    return make_index(folder, manifest, header, [where.folders[each] for each in places]), []


def _choose_places(where: FileTable) -> list[int]:
    """The places where every rank sees an atomic checkpoint.

    Raises:
        CheckpointError: there is none; the same on every rank.
    """
    views = [view.list_entries() for view in where.views] or [where.own]
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
    """What a look at all files finds wrong; collective. Of a store every rank learns the files' versions."""
    if is_url(folder):
        return comm.run(lambda: find_faults(folder, sizes))
    found = comm.share([*sizes.items()], lambda file: find_faults(folder, dict([file])))
    return [fault for faults in found for fault in faults]


def find_faults(folder: str, sizes: Mapping[str, int]) -> list[Finding]:
    """What a look at files, which have to have so many bytes, finds wrong with them; nothing where they are right.

    A store tells of a thousand files at once, a file system of each.
    """
    tree = list_tree(folder) if is_url(folder) else {}
    found = []
    for name, size in sizes.items():
        held = tree.get(name) if is_url(folder) else find_entry(os.path.join(folder, name))
        found += _compare_entry(folder, name, size, held)
    return found


def _compare_entry(folder: str, name: str, size: int, held: Entry | None) -> list[Finding]:
    """What is wrong with a file of which ``held`` is known."""
    path = os.path.join(folder, name)
    if held is None:
        text = f"{path} is missing; the manifest lists it. Copy it here, or convert again."
        return [Finding("missing", name, text)]
    if held.size != size:
        text = f"{path}: has {held.size} bytes, the manifest says {size} bytes; it was cut short or replaced."
        return [Finding("manifest", name, f"{text} Copy it again.")]
    return []


def _read_state_file(folder: str, manifest: Manifest, faults: Sequence[Finding]) -> FileHeader | Finding | None:
    """The header of the file that carries the client state; other tensors in it belong to the client."""
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
    """The index that a manifest tells of.

    Args:
        folder: where the files lie.
        manifest: read from it.
        header: of its state file.
        places: the folders that may hold the same files, the nearest first; empty where ``folder`` is all.
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
        held = (Fragment(0, count(each.shape), len(records), 0),) if count(each.shape) else ()
        records.append(Record(numbers[each.file], each.offset, each.nbytes, each.crc))
        atoms.append(Atom(each.name, each.state, each.dtype, (Shard(each.shape, held),), each.instance))
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
            recorded={name: told["pattern"] for name, told in manifest.patterns.items()},
        ),
        limits=Limits(
            dropped=manifest.dropped,
        ),
    )
    return split_experts(index, manifest.fused)
