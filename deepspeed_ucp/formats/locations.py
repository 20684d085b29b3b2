"""Find the files of a checkpoint in several places and on several machines.

Every rank lists the tag's folder in every place. If all ranks see the same files (equal digests or, if only times
differ, equal zip directories), the listing is complete. Otherwise the checkpoint is the union of all ranks' files, and
:class:`~..access.PartialAccess` records the ranks that can read each. Ranks with equal listings, such as those of one
machine, share a view.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

from ..comm import Comm
from ..errors import CheckpointError, UcpError, join_numbers, raise_first, shorten
from ..io.paths import Entry, choose_map, is_url, join_path, measure_distance
from ..io.read import Failover, checksum_range
from ..io.store import note_listed, open_stored
from ..model.access import READ_ALL, PartialAccess, ReadAccess
from ..model.records import FileRef
from ..torchsave.records import checksum_directory
from .deepspeed.files import SEAL, list_entries, list_published, read_model_rank, read_shard_ranks, read_swap_name

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")

Entries = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class NodeView:
    """The files that some ranks see, by place; ``host``: machine of the first of them."""

    host: str
    places: tuple[Entries, ...]


@dataclass(frozen=True, slots=True)
class FileTable:
    """The files of a checkpoint, and the places where this rank finds them.

    Attributes:
        folders: the tag's folder by place. Messages name the first.
        entries: all files by name, equal on all ranks; of several copies the one in the first place.
        visible: entries that this rank sees, by place.
        near: the places, nearest first.
        access: the ranks that can read each file, in the order of ``entries``.
        differing: (place, name) of files that this rank sees and that differ from ``entries``.
        views: the distinct views of the ranks; empty if every rank can read all files.
        is_first: whether this is the first rank of its view.
    """

    folders: tuple[str, ...]
    entries: Entries
    visible: tuple[Entries, ...]
    near: tuple[int, ...] = (0,)
    access: ReadAccess = READ_ALL
    differing: frozenset[tuple[int, str]] = frozenset()
    views: tuple[NodeView, ...] = ()
    is_first: bool = False
    _failover: Failover = field(default_factory=Failover)

    @classmethod
    def of(cls, folder: str, entries: Entries) -> FileTable:
        """Return a table of one folder that every rank sees."""
        return cls((folder,), entries, (entries,))

    @property
    def folder(self) -> str:
        return self.folders[0]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file; ``FOLDER`` for a folder."""
        return {name: entry.size for name, entry in self.entries.items()}

    def choose(self, keep: Callable[[str], bool]) -> FileTable:
        entries, *visible = (
            {name: listing[name] for name in listing if keep(name)} for listing in (self.entries, *self.visible)
        )
        return replace(self, entries=entries, visible=tuple(visible), access=self.find_access([*entries]))

    def path(self, name: str, size: int | None = None) -> str:
        """Return the path of this rank's first copy (of ``size`` bytes), else in place 0."""
        paths = (path for path, nbytes in self.list_copies(name).items() if size in (None, nbytes))
        return next(paths, join_path(self.folder, name))

    def list_copies(self, name: str, *, near: bool = False) -> dict[str, int]:
        """Return path → bytes of this rank's copies, by place or (``near``) nearest first."""
        places = self.near if near else range(len(self.visible))
        holders = [place for place in places if name in self.visible[place] and (place, name) not in self.differing]
        return {join_path(self.folders[place], name): self.visible[place][name].size for place in holders}

    def make_ref(self, name: str, size: int, crc: int | None = None, *, identified: bool = True) -> FileRef:
        """Return a reference to a file of ``size`` bytes and its copies, nearest first.

        Args:
            crc: CRC32 of the file's directory, if it has one.
            identified: checksums or a head file identify each copy before it is read; else only the copy in the first
                place is used, as a nearer one of the same size may belong to an earlier save.
        """
        if not self.folders[1:]:
            return FileRef(join_path(self.folder, name), size, crc)
        path = self.path(name, size)
        near = [copy for copy, nbytes in self.list_copies(name, near=True).items() if nbytes == size]
        return FileRef(path, size, crc, tuple(near if identified else near and [path]))

    def list_folders(self, name: str) -> list[str]:
        """Return this rank's folders that have a file; those with a different file last."""
        holders = [place for place, entries in enumerate(self.visible) if name in entries]
        holders.sort(key=lambda place: (place, name) in self.differing)
        return [self.folders[place] for place in holders] or [self.folder]

    def read(self, name: str, work: Callable[[str], T]) -> T:
        """Call ``work`` with a file's folders until it succeeds, or raise the first error."""
        folders = {join_path(folder, name): folder for folder in self.list_folders(name)}
        first, *_ = paths = [*folders]
        return self._failover.read(paths, lambda path: work(folders[path]), first)

    def find_access(self, names: Sequence[str]) -> ReadAccess:
        """Return the ranks that can read each of some files."""
        if not self.access.is_partial:
            return self.access
        numbers = {name: number for number, name in enumerate(self.entries)}
        return self.access.select_files([numbers[name] for name in names])

    def share(
        self,
        names: Sequence[str],
        work: Callable[[str], T],
        comm: Comm,
        apply: Callable[[Callable[[str], T], Sequence[str]], Iterable[T]] = map,
        *,
        first: int = 0,
    ) -> list[T]:
        """Process each file on a rank that can read it; return all results (collective).

        Args:
            apply, first: as in :meth:`.Comm.share`; ``first`` applies if every rank can read all files.
        """
        access = self.find_access(names)
        if not access.is_partial:
            return comm.share(names, work, apply, first=first)
        ranks = access.take_turns(range(len(names)), comm.size).tolist()
        mine = [at for at, rank in enumerate(ranks) if rank == comm.rank]
        parts = comm.gather_results(lambda: dict(zip(mine, apply(work, [names[at] for at in mine]), strict=True)))
        return [parts[rank][at] for at, rank in enumerate(ranks)]

    def once(self, name: str, work: Callable[[], T], comm: Comm) -> T:
        """Run ``work`` on a rank that can read a file; share its result (collective)."""
        return comm.once(work, self.find_access([name]).find_reader(0))


def find_files(folders: Sequence[str], comm: Comm, list_place: Callable[[str], Entries] = list_entries) -> FileTable:
    """Find a checkpoint's files; refuse different ones under one name (collective)."""
    stores = {folder: comm.once(partial(_try_listing, folder, list_place)) for folder in folders if is_url(folder)}
    for folder, entries, _ in stores.values():
        note_listed(folder, entries)
    place_files: list[tuple[str, Entries, CheckpointError | None]] = []

    def list_all() -> tuple[list[str], bytes, bytes, bool, list[str]]:
        place_files.extend(stores.get(folder) or _try_listing(folder, list_place) for folder in folders)
        actual, listings, errors = zip(*place_files, strict=True)
        below = [path.removeprefix(folder) for path, folder in zip(actual, folders, strict=True)]
        sizes, view = _digest_listings(listings, lambda entry: entry.size), _digest_listings(listings, _get_version)
        return below, sizes, view, any(listings), [str(error or "") for error in errors]

    reports = comm.gather_results(list_all)
    resolved, listings, errors = zip(*place_files, strict=True)
    if not any(some for *_, some, _ in reports):
        comm.run(lambda: raise_first(errors))
    below = [max(paths) for paths in zip(*(paths for paths, *_ in reports), strict=True)]
    # A rank that sees none of a tag's files does not know their subfolder.
    folders = [
        folder + path if seen == folder else seen for folder, path, seen in zip(folders, below, resolved, strict=True)
    ]
    near = sorted(range(len(folders)), key=lambda place: measure_distance(folders[place])) if folders[1:] else [0]
    joined = {name: entry for entries in reversed(listings) for name, entry in entries.items()}  # the first counts
    table = FileTable(tuple(folders), dict(sorted(joined.items())), listings, tuple(near))
    views = [view for _, _, view, *_ in reports]
    if len({sizes for _, sizes, *_ in reports}) > 1 or not (len(set(views)) == 1 or _is_one_save(table, views, comm)):
        table = _unite(table, views, comm)
    if comm.rank == 0:
        for error, *others in zip(*(texts for *_, texts in reports), strict=True):
            if error and all(others):  # a wrong path, or an unreachable store
                logger.warning("%s The other places are read.", error)
        _warn_of_different_copies(table)
    return table


def list_files(folder: str, comm: Comm) -> FileTable:
    """List a folder that every rank sees, on one rank (collective)."""
    folder, entries = comm.once(lambda: list_published(folder, list_entries))
    note_listed(folder, entries)
    return FileTable.of(folder, entries)


def are_places_alike(table: FileTable, crcs: Mapping[str, int | None]) -> bool:
    """Return True if further places have equal copies only, which all ranks see.

    False without further places. ``crcs``: file name → CRC32 of the zip directory.
    """
    first, *others = zip(table.folders, table.visible, strict=True)
    for folder, entries in others:
        both = [name for name in crcs if name in entries and name in first[1]]
        both = [name for name in both if first[1][name].size == entries[name].size]
        paths = [join_path(folder, name) for name in both]
        if entries and (not both or list(choose_map(folder)(_try_sum, paths)) != [crcs[name] for name in both]):
            return False
    return bool(others) and not table.access.is_partial


def list_by_host(table: FileTable) -> dict[str, list[str]]:
    """Return the names of the files on each machine; empty if all ranks see the same."""
    names_by_host: dict[str, set[str]] = defaultdict(set)
    for view in table.views:
        names = (name for place in view.places for name in place)
        names_by_host[view.host] |= {name for name in names if name != SEAL and table.entries[name].size >= 0}
    return {host: sorted(names) for host, names in sorted(names_by_host.items())}


def describe_hosts(table: FileTable) -> str:
    """Describe the machines' files by data-parallel rank; empty if all see the same."""
    by_host = {
        host: {ranks[1] for name in names if (ranks := read_shard_ranks(name))}
        for host, names in list_by_host(table).items()
    }
    texts = [
        f"{host} has the files of data-parallel ranks {join_numbers(sorted(ranks)).replace(',', ' and ') or 'none'}"
        for host, ranks in by_host.items()
    ]
    return shorten(texts, 16).replace(", ", "; ") if any(by_host.values()) else ""


def list_variants(table: FileTable) -> list[tuple[str, str]]:
    """Return (folder, name) of this node's model states that differ from those in use."""
    differing = sorted(table.differing) if table.is_first else []
    return [(table.folders[place], name) for place, name in differing if read_model_rank(name) is not None]


def _try_listing(folder: str, list_place: Callable[[str], Entries]) -> tuple[str, Entries, CheckpointError | None]:
    """Return a place's folder with the tag's files, its entries, and an error or None."""
    try:
        return *list_published(folder, list_place), None
    except CheckpointError as error:
        return folder, {}, error


def _warn_of_different_copies(table: FileTable) -> None:
    for folder, entries in zip(table.folders[1:], table.visible[1:], strict=True):
        others = [name for name, entry in entries.items() if entry.size != table.entries[name].size]
        if others:
            text = "%s: these files differ from the places before it and are read only if those are unreadable: %s"
            logger.warning(text, folder, shorten(others))


def _digest_listings(listings: Sequence[Entries], pick: Callable[[Entry], object]) -> bytes:
    rows = [sorted((name, pick(entry)) for name, entry in entries.items()) for entries in listings]
    return hashlib.sha256(repr(rows).encode()).digest()


def _get_version(entry: Entry) -> tuple[int, float]:
    """Return bytes and time of change (0 for a folder), which identify a version."""
    return entry.size, 0.0 if entry.is_folder else entry.changed


_SMALL = 1 << 26  # maximum bytes of a file without a zip directory that is read to compare it


def _is_one_save(table: FileTable, views: Sequence[bytes], comm: Comm) -> bool:
    """Return True if equally named files are equal despite their times (collective).

    A shared file system may report different times to each machine; local files may be of one save or of two. The ranks
    of a view take turns.

    ``views``: digest of the listing by rank.
    """
    among = [rank for rank, view in enumerate(views) if view == views[comm.rank]]
    turn, turns = among.index(comm.rank), min(Counter(views).values())
    files = [
        (join_path(folder, name), entry)
        for folder, entries in zip(table.folders, table.visible, strict=True)
        for name, entry in sorted(entries.items())
        if not (entry.is_folder or is_url(folder))
    ]

    def sum_part() -> bytes:
        sums = choose_map(table.folder)(lambda file: _sum_content(*file), files[turn::turns])
        return hashlib.sha256(repr(list(sums)).encode()).digest()

    parts = comm.gather_results(lambda: (turn, sum_part()) if turn < turns else None)
    return len({digest for digest in parts if digest is not None}) == turns


def _sum_content(path: str, entry: Entry) -> object:
    """Return a CRC32 that identifies a file's content, else its time of change."""
    crc = _try_sum(path)
    if crc is None and entry.size <= _SMALL:
        with suppress(UcpError):
            return sum_file(path, entry.size)
    return entry.changed if crc is None else crc


def sum_file(path: str, size: int) -> int:
    """Return the CRC32 of a file's bytes."""
    with open_stored(path, os.POSIX_FADV_SEQUENTIAL) as file:
        return checksum_range(file, 0, size)


def _try_sum(path: str) -> int | None:
    """Return the CRC32 of a file's zip directory; None without a readable one."""
    try:
        return checksum_directory(path)
    except UcpError:
        return None


# -- ranks that see different files -----------------------------------------------------------------------------------


class Copy(NamedTuple):
    """A copy of a file: its place, the view that sees it, and what the view knows."""

    place: int
    view: int
    host: str
    path: str
    size: int
    changed: float


def _unite(table: FileTable, digests: Sequence[bytes], comm: Comm) -> FileTable:
    """Unite the listings of all ranks, given the digest of each (collective)."""
    numbers: dict[bytes, int] = {}
    ranks = [numbers.setdefault(digest, len(numbers)) for digest in digests]
    mine, among = ranks[comm.rank], [rank for rank, view in enumerate(ranks) if view == ranks[comm.rank]]
    is_first = among[0] == comm.rank
    places = tuple({name: Entry(*_get_version(entry)) for name, entry in entries.items()} for entries in table.visible)
    views = [view for view in comm.gather(NodeView(socket.gethostname(), places) if is_first else None) if view]
    copies = _list_copies(table.folders, views)
    doubts = [doubt for file_copies in copies.values() for doubt in _list_to_compare(file_copies)]
    part = [at for at, doubt in enumerate(doubts) if doubt.view == mine][among.index(comm.rank) :: len(among)]
    sums: dict[Copy, int | None] = {}
    for known in comm.gather_results(lambda: {at: _try_sum(doubts[at].path) for at in part}):
        sums.update((doubts[at], crc) for at, crc in known.items())
    same = {name: _list_same(file_copies, sums) for name, file_copies in copies.items()}
    comm.run(lambda: _refuse_different(copies, same))
    if comm.rank == 0:
        hosts = len({view.host for view in views})
        logger.info("%s: ranks see different files, on %d machines; each is read where it lies", table.folder, hosts)
    readers = [dict.fromkeys(copy.view for copy in file_copies) for file_copies in same.values()]
    differing = (
        (copy.place, name)
        for name, file_copies in copies.items()
        for copy in set(_prefer_local(file_copies)).difference(same[name])
        if copy.view == mine
    )
    return replace(
        table,
        entries={name: Entry(home.size, home.changed) for name, (home, *_) in copies.items()},
        access=PartialAccess.of(ranks, readers) if same else READ_ALL,
        differing=frozenset(differing),
        views=tuple(views),
        is_first=is_first,
    )


def _list_copies(folders: Sequence[str], views: Sequence[NodeView]) -> dict[str, list[Copy]]:
    """Return the copies of each file; the first of a file is in use.

    It is in the first place. Of files that every node writes, it is from the first data-parallel rank's node.
    """
    copies: dict[str, list[Copy]] = defaultdict(list)
    for view, node in enumerate(views):
        for place, files in enumerate(node.places):
            for name, entry in files.items():
                path = join_path(folders[place], name)
                copies[name].append(Copy(place, view, node.host, path, entry.size, entry.changed))
    for name, file_copies in copies.items():
        mp = read_model_rank(name)

        def find_first_dp_rank(copy: Copy, mp: int | None = mp) -> int:
            pairs = map(read_shard_ranks, views[copy.view].places[copy.place])
            return min((ranks[1] for ranks in pairs if ranks and mp in (None, ranks[0])), default=1 << 30)

        by_node = is_written_by_each_node(name)
        file_copies.sort(key=lambda copy: (copy.place, find_first_dp_rank(copy) if by_node else 0, copy.view))
    return dict(sorted(copies.items()))


def _prefer_local(copies: Sequence[Copy]) -> Sequence[Copy]:
    """Return the copies to read: in object stores only if no machine has the file."""
    return [copy for copy in copies if not is_url(copy.path)] or copies


def _list_to_compare(copies: Sequence[Copy]) -> list[Copy]:
    """Return the copy in use and those of its size and another time; [] without these."""
    home = copies[0]
    unsure = [copy for copy in _prefer_local(copies) if copy.size == home.size and copy.changed != home.changed]
    return [home, *unsure] if unsure and home.size >= 0 else []


def _list_same(copies: Sequence[Copy], crcs: Mapping[Copy, int | None]) -> list[Copy]:
    """Return the copies equal to the one in use; ``crcs``: of their zip directories."""
    home, crc = copies[0], crcs.get(copies[0])

    def is_same(copy: Copy) -> bool:
        is_equal = copy.changed == home.changed or copy.size < 0 or (crc is not None and crcs.get(copy) == crc)
        return copy == home or (copy.size == home.size and is_equal)

    return [copy for copy in _prefer_local(copies) if is_same(copy)] or [home]


def _refuse_different(copies: Mapping[str, Sequence[Copy]], same: Mapping[str, Sequence[Copy]]) -> None:
    """Refuse different files under one name on several machines."""
    for name, file_copies in copies.items():
        home, wanted = file_copies[0], _prefer_local(file_copies)
        others = [copy for copy in wanted if copy.place == home.place and copy not in same[name]]
        if not others or is_written_by_each_node(name):
            continue
        here, there = (f"{copy.host} ({copy.size} bytes)" for copy in (home, others[0]))
        reason = (
            ": with use_node_local_storage DeepSpeed names swap files by ranks of a node, so other nodes cannot "
            "identify them. Load them with DeepSpeed in the topology, and on the nodes, that wrote them."
            if read_swap_name(name)
            else "; the nodes hold different copies of the checkpoint. Remove the files that are not of this save."
        )
        raise CheckpointError(f"{home.path}: is one file on {here} and another on {there}{reason}")


def is_written_by_each_node(name: str) -> bool:
    """Return True for files that each node writes with ``use_node_local_storage``."""
    return read_model_rank(name) is not None or name == SEAL
