"""Table of a checkpoint's files: the places where this rank finds each, and the ranks that can read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..comm import Comm
from ..io.failover import Failover
from ..io.paths import Entry, join_path
from ..model.access import READ_ALL, ReadAccess

T = TypeVar("T")

Entries = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class NodeView:
    """Files that a set of ranks sees.

    Attributes:
        host: machine of the first of these ranks.
        places: (bytes, time of change) of each file, by place.
    """

    host: str
    places: tuple[dict[str, tuple[int, float]], ...]

    def list_entries(self) -> tuple[Entries, ...]:
        """Return the files by place."""
        return tuple({name: Entry(*stat) for name, stat in files.items()} for files in self.places)


@dataclass(frozen=True, slots=True)
class FileTable:
    """The files of a checkpoint, and the places where this rank finds them.

    Attributes:
        folders: the tag's folder by place. Messages name the first.
        entries: all files by name, equal on all ranks; of several copies the one in the first place.
        visible: entries that this rank sees, by place.
        near: the places, nearest first.
        access: the ranks that can read each file, in the order of ``entries``.
        odd: (place, name) of files that this rank sees and that differ from ``entries``.
        views: the distinct views of the ranks; empty if every rank can read all files.
        is_first: whether this is the first rank of its view.
    """

    folders: tuple[str, ...]
    entries: Entries
    visible: tuple[Entries, ...]
    near: tuple[int, ...] = (0,)
    access: ReadAccess = READ_ALL
    odd: frozenset[tuple[int, str]] = frozenset()
    views: tuple[NodeView, ...] = ()
    is_first: bool = False
    _failover: Failover = field(default_factory=Failover)

    @property
    def folder(self) -> str:
        """The tag's folder in the first place."""
        return self.folders[0]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file; ``FOLDER`` for a folder."""
        return {name: entry.size for name, entry in self.entries.items()}

    def choose(self, keep: Callable[[str], bool]) -> FileTable:
        """Return a table of the files whose names pass a filter."""
        entries, *visible = (
            {name: each[name] for name in each if keep(name)} for each in (self.entries, *self.visible)
        )
        return replace(self, entries=entries, visible=tuple(visible), access=self.see([*entries]))

    def path(self, name: str, size: int | None = None) -> str:
        """Return the first path of a file, of ``size`` bytes if given; by default its path in the first place."""
        paths = (path for path, nbytes in self.list_copies(name).items() if size in (None, nbytes))
        return next(paths, join_path(self.folder, name))

    def list_copies(self, name: str, *, near: bool = False) -> dict[str, int]:
        """Return path → bytes of this rank's copies of a file, by place or (``near``) the nearest first."""
        places = self.near if near else range(len(self.visible))
        holders = [place for place in places if name in self.visible[place] and (place, name) not in self.odd]
        return {join_path(self.folders[place], name): self.visible[place][name].size for place in holders}

    def find(self, name: str) -> list[str]:
        """Return the folders in which this rank finds a file, by place; folders with a different file come last."""
        holders = [place for place, entries in enumerate(self.visible) if name in entries]
        holders.sort(key=lambda place: (place, name) in self.odd)
        return [self.folders[place] for place in holders] or [self.folder]

    def read(self, name: str, work: Callable[[str], T]) -> T:
        """Call ``work`` with the folders that have a file, until one call succeeds.

        Raises:
            CheckpointError, UnsupportedError: the error in the first folder, if ``work`` fails in all.
        """
        folders = {join_path(folder, name): folder for folder in self.find(name)}
        first, *_ = paths = [*folders]
        return self._failover.read(paths, lambda path: work(folders[path]), first)

    def see(self, names: Sequence[str]) -> ReadAccess:
        """Return the ranks that can read each of some files."""
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
        """Process each file on a rank that can read it; return all results on all ranks; collective.

        Args:
            apply, first: as in :meth:`.Comm.share`; ``first`` applies if every rank can read all files.

        Raises:
            UcpError: the first failing rank's error, the same on all ranks.
        """
        access = self.see(names)
        if not access.is_partial:
            return comm.share(names, work, apply, first=first)
        ranks = access.take_turns(range(len(names)), comm.size).tolist()
        mine = [at for at, rank in enumerate(ranks) if rank == comm.rank]
        parts = comm.each(lambda: dict(zip(mine, apply(work, [names[at] for at in mine]), strict=True)))
        return [parts[rank][at] for at, rank in enumerate(ranks)]

    def once(self, name: str, work: Callable[[], T], comm: Comm) -> T:
        """Run ``work`` on a rank that can read a file; all ranks get its result or error; collective."""
        return comm.once(work, self.see([name]).find_reader(0))
