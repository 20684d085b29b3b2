"""Where the files of a checkpoint lie: in which of several places, and on which machines.

Every rank lists the tag's folder in every place. Where all see the same, that is all: a digest tells it or, where times
alone differ, the directories of the files. Else the files of all ranks together are the checkpoint, and a table says
who can read which (:class:`~..access.ReadAccess`). It is made of views: ranks that see the same, as those of one
machine do, count once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ..access import ReadAccess
from ..comm import Comm
from ..errors import CheckpointError, UcpError, shorten
from ..io.distance import choose_map, measure_distance
from ..io.failover import Failover
from ..io.paths import Entry, is_url
from ..io.read import sum_range
from ..io.store import note_listed, open_stored
from ..torchsave.records import sum_directory
from .files import SEAL, list_entries, read_model_rank, read_optim_ranks, read_swap_name

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")

Entries = Mapping[str, Entry]


class Copy(NamedTuple):
    """A file in a place, as the ranks of a view see it."""

    place: int
    view: int


@dataclass(frozen=True, slots=True)
class FileTable:
    """The files of a checkpoint, and where this rank finds them.

    Attributes:
        folder: of the tag in the first place: what messages name.
        entries: all files by name, the same on every rank.
        folders: of the tag, by place.
        own: by place what this rank sees.
        access: which ranks can read which files, in the order of the entries; None where every rank can read all.
        odd: (place, name) of what this rank sees that is another file than the one which counts.
        hosts: by view, the machine of its first rank; empty without ``access``.
        parts: by view, names of what it sees; empty without ``access``.
        variants: files of this rank's machine under a name that a file which counts has on another one, where every
            node writes one of its own.
        is_first: this rank speaks for those that see the same.
    """

    folder: str
    entries: Entries
    folders: tuple[str, ...]
    own: tuple[Entries, ...]
    access: ReadAccess | None = None
    odd: frozenset[tuple[int, str]] = frozenset()
    hosts: tuple[str, ...] = ()
    parts: tuple[frozenset[str], ...] = ()
    variants: tuple[str, ...] = ()
    is_first: bool = False
    _distances: list[int] = field(default_factory=list)
    _failover: Failover = field(default_factory=Failover)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, ``FOLDER`` for a folder."""
        return {name: entry.size for name, entry in self.entries.items()}

    def path(self, name: str, size: int | None = None) -> str:
        """Where this rank finds a file, of ``size`` bytes if given; in the first place if it finds none."""
        held = self._list_places(name, size) if len(self.folders) > 1 else ()
        return os.path.join(self.folders[held[0]] if held else self.folder, name)

    def find(self, name: str) -> list[str]:
        """Folders in which this rank finds a file, in the order of the places; with another file in it comes last."""
        held = self._list_places(name)
        held += [place for place, entries in enumerate(self.own) if name in entries and place not in held]
        return [self.folders[place] for place in held] or [self.folder]

    def read(self, name: str, work: Callable[[str], T]) -> T:
        """Read a file in the first folder that has it, and in the next one where that fails; ``work``: given a folder.

        Raises:
            CheckpointError, UnsupportedError: ``work``'s in the first folder, where it fails in all.
        """
        folders = {os.path.join(folder, name): folder for folder in self.find(name)}
        first, *_ = paths = [*folders]
        return self._failover.read(paths, lambda path: work(folders[path]), first)

    def find_near(self, name: str, size: int) -> tuple[str, ...]:
        """Paths of a file of that many bytes, the nearest first, among several places; empty where there is one."""
        if len(self.folders) == 1:
            return ()
        held = sorted(self._list_places(name, size), key=self._measure)
        return tuple(os.path.join(self.folders[place], name) for place in held)

    def _list_places(self, name: str, size: int | None = None) -> list[int]:
        held = [(place, entries[name]) for place, entries in enumerate(self.own) if name in entries]
        same = [place for place, entry in held if size is None or entry.size == size]
        return [place for place in same if (place, name) not in self.odd]

    def _measure(self, place: int) -> int:
        if not self._distances:
            self._distances.extend(measure_distance(folder) for folder in self.folders)
        return self._distances[place]

    def holds_copies(self, sums: Mapping[str, int | None]) -> bool:
        """Whether further places have files of the first one's save, by their CRC32s, and no others; all see the same.

        Args:
            sums: by name the CRC32 of the directory of a file of the save.
        """
        first = self.own[0]
        for folder, entries in zip(self.folders[1:], self.own[1:], strict=True):
            both = [name for name in sums if {name} <= first.keys() & entries.keys()]
            both = [name for name in both if first[name].size == entries[name].size]
            paths = [os.path.join(folder, name) for name in both]
            if entries and (not both or list(choose_map(folder)(_sum, paths)) != [sums[name] for name in both]):
                return False
        return self.access is None and len(self.folders) > 1

    def see(self, names: Sequence[str]) -> ReadAccess | None:
        """Which ranks can read which of some files; None where every rank can read all."""
        if self.access is None:
            return None
        numbers = {name: number for number, name in enumerate(self.entries)}
        return self.access.choose([numbers[name] for name in names])

    def share(
        self,
        names: Sequence[str],
        work: Callable[[str], T],
        comm: Comm,
        apply: Callable[[Callable[[str], T], Sequence[str]], Iterable[T]] = map,
        *,
        first: int = 0,
    ) -> list[T]:
        """Each file is worked on by one rank that can read it; every rank gets all results; collective.

        Args:
            apply, first: as of :meth:`.Comm.share`; ``first`` where every rank can read all.

        Raises:
            UcpError: the first failing rank's error, the same on all ranks.
        """
        access = self.see(names)
        if access is None:
            return comm.share(names, work, apply, first=first)
        ranks = access.take_turns(range(len(names))).tolist()
        mine = [at for at, rank in enumerate(ranks) if rank == comm.rank]
        parts = comm.each(lambda: dict(zip(mine, apply(work, [names[at] for at in mine]), strict=True)))
        return [parts[rank][at] for at, rank in enumerate(ranks)]

    def once(self, name: str, work: Callable[[], T], comm: Comm) -> T:
        """A rank that can read a file runs ``work``; every rank gets its result, or its error; collective."""
        access = self.see([name])
        return comm.once(work, 0 if access is None else access.find_reader(0))

    def list_by_host(self) -> dict[str, list[str]]:
        """Names of the files that each machine has; nothing where all see the same."""
        held: dict[str, set[str]] = defaultdict(set)
        for host, names in zip(self.hosts, self.parts, strict=True):
            held[host] |= {name for name in names if name != SEAL and self.entries[name].size >= 0}
        return {host: sorted(names) for host, names in sorted(held.items()) if names}

    def tell_hosts(self) -> str:
        """What each machine holds, in words; empty where all see the same."""
        held: dict[str, set[int]] = defaultdict(set)
        for host, names in zip(self.hosts, self.parts, strict=True):
            ranks = (read_optim_ranks(name) for name in names)
            held[host] |= {ranks[1] for ranks in ranks if ranks}
        told = [f"{host} has the files of data-parallel ranks {_tell_ranks(held[host])}" for host in sorted(held)]
        return shorten(told, 16).replace(", ", "; ") if any(held.values()) else ""


def _tell_ranks(ranks: Iterable[int]) -> str:
    """``0-3, 8``; ``none``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return " and ".join(f"{low}-{high}" if low != high else str(low) for low, high in runs) or "none"


def find_files(folders: Sequence[str], comm: Comm) -> FileTable:
    """Find the files of a checkpoint; collective.

    Args:
        folders: the tag's folder in each place, the first one's first.

    Raises:
        CheckpointError: no rank sees any; machines hold different files under one name. The same on every rank.
    """
    looks = [_look(folder, comm) for folder in folders]
    own = tuple(entries for entries, _ in looks)
    sizes, looked = _digest(own, lambda entry: entry.size), _digest(own, _tell_entry)
    told = comm.gather((sizes, looked, not any(own), [str(error or "") for _, error in looks]))
    if all(nothing for _, _, nothing, _ in told):
        comm.run(lambda: _refuse_nothing([error for _, error in looks]))
    if comm.rank == 0:
        _tell_unseen([errors for *_, errors in told])
    views = [view for _, view, *_ in told]
    if len({each for each, *_ in told}) == 1 and (len(set(views)) == 1 or _is_one_save(folders, own, views, comm)):
        found = FileTable(folders[0], _join(own), tuple(folders), own)
        if comm.rank == 0:
            _tell_others(found)
        return found
    return _unite(tuple(folders), own, views, comm)


def list_files(folder: str, comm: Comm) -> FileTable:
    """The files of a folder that every rank sees, by the look of one; collective.

    Raises:
        CheckpointError: it cannot be listed; the same on every rank.
    """
    entries = comm.once(lambda: list_entries(folder))
    note_listed(folder, entries)
    return FileTable(folder, entries, (folder,), (entries,))


def _look(folder: str, comm: Comm) -> tuple[Entries, CheckpointError | None]:
    """What a place holds, and why it cannot be listed; of a store one rank asks, for all."""
    if not is_url(folder):
        return _list(folder)
    told = comm.once(lambda: _list(folder))
    note_listed(folder, told[0])
    return told


def _list(folder: str) -> tuple[Entries, CheckpointError | None]:
    try:
        return list_entries(folder), None
    except CheckpointError as error:
        return {}, error


def _refuse_nothing(errors: Iterable[CheckpointError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


def _tell_unseen(errors: Iterable[Sequence[str]]) -> None:
    """Warn of places that no rank can list: a path may be wrong, a store out of reach.

    Args:
        errors: by rank, then by place.
    """
    for error in [error for error, *others in zip(*errors, strict=True) if error and all(others)]:
        logger.warning("%s The other places are read.", error)


def _digest(own: Sequence[Entries], tell: Callable[[Entry], object]) -> bytes:
    told = [sorted((name, tell(entry)) for name, entry in entries.items()) for entries in own]
    return hashlib.sha256(repr(told).encode()).digest()


def _tell_entry(entry: Entry) -> tuple[int, float]:
    """Bytes and time of change; a folder's time tells nothing of what a checkpoint has in it."""
    return entry.size, 0.0 if entry.is_folder else entry.changed


_SMALL = 1 << 26
"""Bytes of a file, of which no directory tells the content, that is read whole to compare it."""


def _is_one_save(folders: Sequence[str], own: Sequence[Entries], views: Sequence[bytes], comm: Comm) -> bool:
    """Whether files of the same names and sizes are the same, although times of change differ; collective.

    They may be those of one folder, of which a file system tells every machine times of its own; or each machine's,
    of one save or of two. The ranks of a view take turns.

    Args:
        views: by rank a digest of what it sees.
    """
    among = [rank for rank, view in enumerate(views) if view == views[comm.rank]]
    turn, turns = among.index(comm.rank), min(Counter(views).values())

    files = [
        (os.path.join(folder, name), entry)
        for folder, entries in zip(folders, own, strict=True)
        for name, entry in sorted(entries.items())
        if not (entry.is_folder or is_url(folder))
    ]

    def tell_part() -> bytes:
        told = choose_map(folders[0])(lambda file: _tell_content(*file), files[turn::turns])
        return hashlib.sha256(repr(list(told)).encode()).digest()

    told = comm.each(lambda: (turn, tell_part()) if turn < turns else None)
    return len({each for each in told if each is not None}) == turns


def _tell_content(path: str, entry: Entry) -> object:
    """What the same of two files tells that they are: a CRC32, or the time of change where there is none."""
    crc = _sum(path)
    if crc is None and entry.size <= _SMALL:
        with suppress(UcpError), open_stored(path, os.POSIX_FADV_SEQUENTIAL) as file:
            return sum_range(file, 0, entry.size)
    return entry.changed if crc is None else crc


def _join(own: Sequence[Entries]) -> dict[str, Entry]:
    """What lies in any of the places; of what lies in several, the first one's counts."""
    joined: dict[str, Entry] = {}
    for entries in reversed(own):
        joined |= entries
    return dict(sorted(joined.items()))


def _tell_others(found: FileTable) -> None:
    """Warn of files that the first place has otherwise."""
    for place, folder in enumerate(found.folders):
        held = found.own[place].items()
        _warn_odd(folder, [name for name, entry in held if entry.size != found.entries[name].size])


def _warn_odd(folder: str, names: Sequence[str]) -> None:
    if names:
        told = "%s: files that are not those of the places before it are read only where those cannot be: %s"
        logger.warning(told, folder, shorten(names))


# -- ranks that see different files -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the ranks of a view see: by place and name (bytes, time of change)."""

    host: str
    places: tuple[dict[str, tuple[int, float]], ...]


class _Union:
    """What all views see, together: the same on every rank."""

    def __init__(self, glances: Sequence[NodeView]) -> None:
        self.glances = glances
        self.copies: dict[str, list[Copy]] = defaultdict(list)
        for view, glance in enumerate(glances):
            for place, held in enumerate(glance.places):
                for name in held:
                    self.copies[name].append(Copy(place, view))
        self.homes = {name: min(held, key=lambda copy: self._rank(name, copy)) for name, held in self.copies.items()}

    def _rank(self, name: str, copy: Copy) -> tuple[int, int, int]:
        """Of a file that every node writes for itself the one beside the first data-parallel rank's file counts."""
        first = self._find_first_rank(name, copy) if is_written_by_each_node(name) else 0
        return copy.place, first, copy.view

    def _find_first_rank(self, name: str, copy: Copy) -> int:
        mp = read_model_rank(name)
        found = [read_optim_ranks(each) for each in self.glances[copy.view].places[copy.place]]
        return min((ranks[1] for ranks in found if ranks and mp in (None, ranks[0])), default=1 << 30)

    def look(self, name: str, copy: Copy) -> tuple[int, float]:
        """Bytes and time of change of a copy."""
        return self.glances[copy.view].places[copy.place][name]

    def list_wanted(self, name: str, folders: Sequence[str]) -> list[Copy]:
        """The copies that are read: those behind URLs only of what no machine has."""
        near = [copy for copy in self.copies[name] if not is_url(folders[copy.place])]
        return near or self.copies[name]

    def list_doubts(self, folders: Sequence[str]) -> list[tuple[str, Copy]]:
        """Copies as large as the one that counts, which were written at another time; with that one."""
        doubts = []
        for name, home in sorted(self.homes.items()):
            size, changed = self.look(name, home)
            looks = [(copy, self.look(name, copy)) for copy in self.list_wanted(name, folders)]
            unsure = [copy for copy, (nbytes, at) in looks if nbytes == size and at != changed]
            doubts += [(name, copy) for copy in ([home, *unsure] if unsure and size >= 0 else [])]
        return doubts


def is_written_by_each_node(name: str) -> bool:
    """Whether with ``use_node_local_storage`` each node has a file of that name, with what its own first rank tells."""
    return read_model_rank(name) is not None or name == SEAL


def _unite(folders: tuple[str, ...], own: tuple[Entries, ...], told: Sequence[bytes], comm: Comm) -> FileTable:
    """What all ranks see, together; ``told``: by rank a digest of what it sees; collective."""
    numbers: dict[bytes, int] = {}
    views = [numbers.setdefault(digest, len(numbers)) for digest in told]
    mine, among = views[comm.rank], [rank for rank, view in enumerate(views) if view == views[comm.rank]]
    is_first = among[0] == comm.rank
    glance = NodeView(socket.gethostname(), tuple(map(_tell_entries, own))) if is_first else None
    union = _Union([each for each in comm.gather(glance) if each is not None])
    doubts = union.list_doubts(folders)
    part = [at for at, (_, copy) in enumerate(doubts) if copy.view == mine][among.index(comm.rank) :: len(among)]
    parts = comm.each(lambda: {at: _sum(os.path.join(folders[doubts[at][1].place], doubts[at][0])) for at in part})
    sums = {doubts[at]: crc for each in parts for at, crc in each.items()}
    same = {name: _find_same(name, union, folders, sums) for name in sorted(union.homes)}
    comm.run(lambda: _refuse_different(union, same, folders))
    readers = [dict.fromkeys(copy.view for copy in copies) for copies in same.values()]
    odd = {
        (copy.place, name)
        for name, copies in union.copies.items()
        for copy in set(copies).intersection(union.list_wanted(name, folders)).difference(same[name])
        if copy.view == mine
    }
    entries = {name: Entry(*union.look(name, union.homes[name])) for name in same}
    found = FileTable(
        folders[0],
        entries,
        folders,
        own,
        ReadAccess.of(views, readers) if same else None,
        frozenset(odd),
        tuple(each.host for each in union.glances),
        tuple(frozenset().union(*each.places) for each in union.glances),
        tuple(sorted({name for _, name in odd if read_model_rank(name) is not None})) if is_first else (),
        is_first,
    )
    if comm.rank == 0:
        hosts = len(set(found.hosts))
        logger.info("%s: ranks see different files, on %d machines; each is read where it lies", folders[0], hosts)
    return found


def _tell_entries(entries: Entries) -> dict[str, tuple[int, float]]:
    return {name: _tell_entry(entry) for name, entry in entries.items()}


def _sum(path: str) -> int | None:
    try:
        return sum_directory(path)
    except UcpError:
        return None


def _find_same(
    name: str, union: _Union, folders: Sequence[str], sums: Mapping[tuple[str, Copy], int | None]
) -> list[Copy]:
    """The copies of a file that are the one which counts; that one itself, whatever its state."""
    home = union.homes[name]
    size, changed = union.look(name, home)
    crc = sums.get((name, home))

    def is_same(copy: Copy) -> bool:
        nbytes, at = union.look(name, copy)
        return nbytes == size and (at == changed or size < 0 or (crc is not None and sums.get((name, copy)) == crc))

    wanted = [copy for copy in union.list_wanted(name, folders) if copy == home or is_same(copy)]
    return wanted or [home]


def _refuse_different(union: _Union, same: Mapping[str, Sequence[Copy]], folders: Sequence[str]) -> None:
    """Machines that hold different files under one name, in the place that counts.

    Raises:
        CheckpointError: naming one, with both machines.
    """
    for name, copies in same.items():
        home = union.homes[name]
        others = [copy for copy in union.list_wanted(name, folders) if copy.place == home.place and copy not in copies]
        if others and not is_written_by_each_node(name):
            raise CheckpointError(_tell_different(name, home, others[0], union, folders))


def _tell_different(name: str, home: Copy, other: Copy, union: _Union, folders: Sequence[str]) -> str:
    path = os.path.join(folders[home.place], name)
    here, there = (f"{union.glances[copy.view].host} ({union.look(name, copy)[0]} bytes)" for copy in (home, other))
    text = f"{path}: is one file on {here} and another on {there}"
    if read_swap_name(name):
        return (
            f"{text}: with use_node_local_storage DeepSpeed names swap files by ranks of a node, which nothing tells "
            "apart elsewhere. DeepSpeed's own load takes them in the topology, and on the nodes, that wrote them."
        )
    return f"{text}; the nodes hold different copies of the checkpoint. Remove the files that are not of this save."
