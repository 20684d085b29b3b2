"""Reads the headers of a save's files, each on one rank, and compares them."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ...comm import Comm
from ...errors import CheckpointError, UcpError, UnsupportedError, shorten
from ...io.filesystems import choose_map
from ...io.paths import join_path
from ..findings import COPY, WARNING, Finding, from_failure, make_error
from ..places import describe_hosts, hold_copies, list_variants
from ..table import FileTable
from .compare import find_foreign_files, find_late_files
from .files import SEAL, Listing, read_model_rank, sort_files, strip_writer
from .headers import FileHeader
from .identify import Look, SaveFiles, explain_none, identify_save
from .pieces import HeaderCodec, HeaderDelta
from .reading import read_file
from .save import Save, arrange, count_ranks, name_unsaved
from .swapped import add_swapped

_OVERWRITTEN = (
    " DeepSpeed's fast writer does not truncate files that it overwrites: a save into an existing tag may keep the end "
    "of a longer file. Save into a new tag, or remove the tag's folder before; take another tag now."
)

_NEVER_SAVED = (
    "DeepSpeed writes no model states of a tensor-parallel rank if a rank before it holds the same experts, and the "
    "other parameters of such a rank are lost. Save with at least as many expert-parallel ranks as tensor-parallel "
    "ones and without use_data_before_expert_parallelism, or with expert tensor parallelism."
)


def gather_save(where: FileTable, comm: Comm) -> tuple[Save | None, list[Finding]]:
    """Read the headers of a save's files, each on one rank that sees the file, and compare them; collective.

    Args:
        where: its files, and the ranks that see them.
        comm: the ranks that share the files.

    Returns:
        The save, or None if it cannot be read at all; and all faults and warnings.
    """
    try:
        listing = sort_files(where.folder, where.sizes, where)
    except (CheckpointError, UnsupportedError) as error:
        return None, explain_none(where.folder, error)
    looks = _Looks(where, comm.rank if comm.size > 1 else None)
    files = _identify(looks, listing, comm)
    if not files.first:
        return None, files.faults
    findings = list(files.faults)
    headers, unread = _read_rest(looks, listing, files, comm)
    save = arrange(listing, headers)
    missing = _find_missing(listing, files, _describe_holders(where, comm))
    for more in (unread, missing, find_foreign_files(save), _find_foreign_variants(where, save, comm)):
        findings += keep_new(more, findings)
    if make_error(findings) is None:
        findings += add_swapped(save)
    findings += _find_leftovers(listing, {SEAL, *files.expected, *(header.name for header in save.headers)})
    return save, findings + (_find_late(where, headers) if comm.rank == 0 else [])


def keep_new(more: Iterable[Finding], findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings about files without known fault."""
    faulty = {finding.file for finding in findings if not finding.warning}
    return [finding for finding in more if finding.file not in faulty]


def look_at_header(where: FileTable, name: str, reader: str = "") -> Look:
    """Return a file's header from the first place where it is readable, or the fault.

    A file without checksums is only read from its first place, as nothing else identifies a copy.

    Args:
        reader: description of the reading rank, for the message.
    """
    first = where.find(name)[0]

    def read(folder: str) -> FileHeader:
        header = read_file(folder, name)
        if folder != first and not header.checked:
            raise CheckpointError("has no checksums to identify it.", path=join_path(folder, name))
        return header

    try:
        return where.read(name, read)
    except UnsupportedError as error:
        return Finding("unsupported", name, str(error))
    except CheckpointError as error:
        # An error of the operating system may occur on one node only; damage is the same for all.
        where_read = reader if isinstance(error.__cause__, OSError) else ""
        found = from_failure("header", name, error)
        return replace(found, text=f"{found.text}{where_read}{_OVERWRITTEN if strip_writer(name) != name else ''}")


class _Looks(dict[str, Look]):
    """The headers or faults of the files that this rank has read, each on first access."""

    def __init__(self, where: FileTable, rank: int | None) -> None:
        self.where = where
        self._reader = "" if rank is None else f" (looked at by rank {rank})"

    def __missing__(self, name: str) -> Look:
        look = self[name] = look_at_header(self.where, name, self._reader)
        return look


def _identify(looks: _Looks, listing: Listing, comm: Comm) -> SaveFiles:
    """Identify the save's files on rank 0 if it sees all, else read each on a rank that sees it; collective."""
    where = looks.where
    if where.access.is_partial:
        return identify_save(listing, lambda name: where.once(name, lambda: looks[name], comm))
    if comm.rank:  # meanwhile each other rank reads a file that it will probably be assigned
        held = (sorted(files.items()) for files in (listing.model or listing.model_zero3, listing.optim))
        further = [name for files in held for _, name in files[1:]]
        with suppress(Exception):  # a real fault is raised again when the rank is assigned the file
            looks[further[comm.rank - 1]]
    return comm.once(lambda: identify_save(listing, looks.__getitem__))


def _read_rest(looks: _Looks, listing: Listing, files: SaveFiles, comm: Comm) -> tuple[list[FileHeader], list[Finding]]:
    """Read the headers of a save's files, each on one rank; returns those read, the first ones in front, and faults."""
    first = files.first
    known = {header.name for header in first}
    names = [name for name in files.expected if name in listing.sizes and name not in known]
    further = {name for (_, rank), name in listing.model_zero3.items() if rank}
    codec = HeaderCodec(first[-1])

    def read(name: str) -> HeaderDelta | Look:
        look = looks[name]
        del looks[name]  # keep only the compact form of thousands
        if isinstance(look, Finding):
            return look
        return codec.encode(_slim(look, first[0], repeats=name in further))

    shared = looks.where.share(names, read, comm, choose_map(listing.folder), first=1)
    headers = [codec.decode(look) for look in shared if not isinstance(look, Finding)]
    return [*first, *headers], [look for look in shared if isinstance(look, Finding)]


def _slim(header: FileHeader, first: FileHeader, *, repeats: bool) -> FileHeader:
    """Remove from a header what all ranks know from the first header, before it is sent to all ranks.

    ``repeats``: the file repeats the model of its model-parallel rank's first file.
    """
    model = header.model
    if model is None or first.model is None:
        return header
    hints = {} if repeats or model.hints == first.model.hints else model.hints
    model = replace(model, degrees=model.degrees or first.model.degrees)
    if repeats:
        model = replace(model, module={}, buffers=(), param_shapes=(), shared={}, placements={}, order=())
    return replace(header, model=replace(model, hints=hints, others=()))


# -- faults and warnings ----------------------------------------------------------------------------------------------


def _find_missing(listing: Listing, files: SaveFiles, holders: str) -> list[Finding]:
    """Return the faults of missing files; ``holders`` describes which machine has which files, if they differ."""
    model, lost = files.first[0].model, name_unsaved(listing, files.first)
    mp, dp = count_ranks(model) if model else (1, 1)
    ranks = f"{dp} data-parallel ranks" + (f" of {mp} model-parallel ones" if mp > 1 else "")
    text = f"the checkpoint was saved by {ranks} and needs all of their files. {COPY}"
    text += f" The machines see different files of it: {holders}." if holders else ""
    absent = [name for name in files.expected if name not in listing.sizes]
    return [
        Finding("missing", name, f"{listing.path(name)} is missing; {_NEVER_SAVED if name in lost else text}")
        for name in absent
    ]


def _describe_holders(where: FileTable, comm: Comm) -> str:
    """Describe which machine has, and had, which files; empty if all see the same files; collective."""
    present = describe_hosts(where)
    if not present:
        return ""
    sealed: Mapping[str, list[str]] = {}
    if SEAL in where.entries:
        sealed = where.once(SEAL, lambda: _read_hosts(where.path(SEAL)), comm)
    lost = {host: [name for name in names if name not in where.entries] for host, names in sealed.items()}
    return "; ".join([*(f"{host} had {shorten(names)}" for host, names in lost.items() if names), present])


def _read_hosts(path: str) -> dict[str, list[str]]:
    from .seal import read_seal

    try:
        return read_seal(path).hosts
    except (UcpError, FileNotFoundError):
        return {}


def _find_foreign_variants(where: FileTable, save: Save, comm: Comm) -> list[Finding]:
    """Return the faults of node-local files with a name of this save; collective."""
    if not where.access.is_partial:
        return []
    read = comm.each(lambda: [_read_variant(folder, name) for folder, name in list_variants(where)])
    variants = [each for headers in read for each in headers if each.model]
    models = [[*held] for held in save.models]
    for each in variants:
        mp = read_model_rank(each.name.partition(" ")[0])
        if mp is not None and mp < len(models):
            models[mp].append(_slim(each, save.main, repeats=True))
    names = {each.name for each in variants}
    return [
        each for each in find_foreign_files(replace(save, models=models)) if each.file in names and not each.warning
    ]


def _read_variant(folder: str, name: str) -> FileHeader:
    """Return the header of a node-local file; empty if it cannot be read."""
    label = f"{name} of {socket.gethostname()}"
    try:
        return replace(read_file(folder, name), name=label)
    except (CheckpointError, UnsupportedError):
        return FileHeader(label, 0, None)


def _find_leftovers(listing: Listing, expected: Iterable[str]) -> Iterator[Finding]:
    """Yield a warning for every file that no load reads."""
    for name in sorted(name for name, size in listing.sizes.items() if size >= 0 and name not in expected):
        of = listing.copies.get(name)
        why = f"another rank's copy of {of}" if of else "left by an earlier save into this folder"
        text = f"{listing.path(name)}: {why}; it is not loaded."
        yield Finding("leftover", name, text, WARNING, (of,) if of else ())


def _find_late(where: FileTable, headers: Sequence[FileHeader]) -> list[Finding]:
    """Return warnings of files that were written at another time; each place with copies of the save is separate."""
    names = [header.name for header in headers]
    found = find_late_files(where.folder, where.entries, names)
    if not found or not hold_copies(where, {header.name: header.crc for header in headers}):
        return found
    each = zip(where.folders, where.visible, strict=True)
    return [finding for folder, entries in each for finding in find_late_files(folder, entries, names)]
