"""Atomic checkpoints as sources: folders with a manifest, and those of DeepSpeed's own converter."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...atoms import MASTER, Atom, AtomicIndex, FileRef, Fragment, GroupInfo, Record, Shard, count
from ...comm import Comm
from ...errors import CheckpointError
from ...topology import ATOMIC, Topology
from ..files import MANIFEST, ZERO, list_sizes
from ..headers import FileHeader
from ..reading import read_file
from .manifest import Manifest, read_manifest
from .universal import open_universal


def open_atomic(folder: str, comm: Comm, sizes: Mapping[str, int] | None = None) -> AtomicIndex:
    """The index of an atomic checkpoint; collective.

    With a manifest that is read alone (by one rank), and the files' sizes are looked at; a folder of DeepSpeed's
    ``ds_to_universal`` is read by the headers of its files. Every atom has one shard of the logical shape.

    Args:
        folder: the checkpoint's folder.
        comm: the ranks that load.
        sizes: what the folder holds, where it has been listed already.

    Raises:
        CheckpointError: missing, damaged or half-made; the same error on every rank.
        UnsupportedError: a kind that is not covered.
    """
    manifest: Manifest | None = None
    with comm.together():
        manifest = read_manifest(folder) if comm.rank == 0 else None
    manifest = comm.broadcast(manifest)
    if manifest is None:
        listed: dict[str, int] = {}
        with comm.together():
            listed = dict(list_sizes(folder) if sizes is None else sizes)
        return open_universal(folder, listed, comm)
    header: FileHeader | None = None
    mine: list[int] = []
    files = _list_files(manifest)
    with comm.together():
        if comm.rank == 0:
            header = _read_state_file(folder, manifest)
        mine = [_look_at(folder, *each) for each in files[comm.rank :: comm.size]]
    header = comm.broadcast(header)
    parts = comm.gather(mine)
    found = {name: parts[at % comm.size][at // comm.size] for at, (name, _, _) in enumerate(files)}
    index: list[AtomicIndex] = []
    with comm.together():
        try:
            index.append(make_index(folder, manifest, header, found))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{folder}/{MANIFEST}: an entry is of another form than expected ({type(error).__name__}: {error})."
            ) from error
    return index[0]


def is_atomic(folder: str) -> bool:
    """Whether a folder holds an atomic checkpoint: a manifest, or ``zero`` without a normal checkpoint's files."""
    if os.path.isfile(os.path.join(folder, MANIFEST)):
        return True
    return os.path.isdir(os.path.join(folder, ZERO)) and not any("optim_states" in name for name in os.listdir(folder))


def _list_files(manifest: Manifest) -> list[tuple[str, int, bool]]:
    """(name, bytes that it has at least, whether exactly) of every file."""
    atoms = {atom.file: (atom.size or atom.offset + atom.nbytes, bool(atom.size)) for atom in manifest.atoms}
    return [
        *((name, *told) for name, told in sorted(atoms.items())),
        *((state.name, state.size, True) for state in manifest.states),
    ]


def _look_at(folder: str, name: str, nbytes: int, exact: bool) -> int:
    path = os.path.join(folder, name)
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror or error}; the manifest lists it. Copy the whole folder, or convert again."
        ) from error
    if size < nbytes or (exact and size != nbytes):
        wanted = f"{nbytes} bytes" if exact else f"{nbytes} bytes or more"
        raise CheckpointError(
            f"{path}: has {size} bytes, {wanted} are in the manifest; it was cut short or replaced. Copy it again, or "
            "convert again."
        )
    return size


def _read_state_file(folder: str, manifest: Manifest) -> FileHeader:
    """The header of the file that carries the client state; other tensors in it belong to the client.

    Raises:
        CheckpointError: it is not the file of the manifest.
    """
    header = read_file(folder, manifest.state_file)
    expected = next(state.crc for state in manifest.states if state.name == manifest.state_file)
    if header.crc != expected:
        raise CheckpointError(
            f"{folder}/{manifest.state_file}: its directory has CRC32 {header.crc:08x}, the manifest {expected:08x}; "
            "the file was damaged or replaced. Copy it again, or convert again."
        )
    return header


def make_index(folder: str, manifest: Manifest, header: FileHeader, sizes: Mapping[str, int]) -> AtomicIndex:
    """The index that a manifest tells of.

    Args:
        folder: where the files lie.
        manifest: read from it.
        header: of its state file.
        sizes: the files' sizes in bytes.
    """
    crcs = {state.name: state.crc for state in manifest.states}
    files = [FileRef(f"{folder}/{name}", size, crcs.get(name)) for name, size in sizes.items()]
    numbers = {name: number for number, name in enumerate(sizes)}
    records: list[Record] = []
    atoms: dict[tuple[str, str], Atom] = {}
    for each in manifest.atoms:
        held = (Fragment(0, count(each.shape), len(records), 0),) if count(each.shape) else ()
        records.append(Record(numbers[each.file], each.offset, each.nbytes, each.crc))
        atoms[each.name, each.state] = Atom(each.name, each.state, each.dtype, (Shard(each.shape, held),))
    others = header.model.others if header.model else ()
    client = tuple(range(len(records), len(records) + len(others)))
    records += [Record(numbers[manifest.state_file], blob.offset, blob.nbytes, blob.crc) for blob in others]
    topology = {**manifest.source, "wrapper": ATOMIC, **dict.fromkeys(("dp", "tp", "pp", "sp", "ep"), 1)}
    return AtomicIndex(
        files=tuple(files),
        records=tuple(records),
        atoms=atoms,
        scalars=manifest.scalars,
        groups=tuple(GroupInfo(tuple(group["names"]), group["hyper"]) for group in manifest.groups),
        aliases=manifest.aliases,
        shapes={name: (atom.shape,) for (name, state), atom in atoms.items() if state == MASTER},
        buffers=frozenset(manifest.buffers),
        counters=manifest.counters,
        scaler=manifest.scaler,
        clip_grad=manifest.clip_grad,
        state_file=f"{folder}/{manifest.state_file}",
        topology=Topology(**topology),
        optimizer=manifest.optimizer,
        client_records=client,
        instances=manifest.instances,
        hints=manifest.hints,
        scalar_dtypes=manifest.scalar_dtypes,
        recorded={name: told["pattern"] for name, told in manifest.patterns.items()},
        dropped=manifest.dropped,
    )
