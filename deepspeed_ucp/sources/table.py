"""A checkpoint's files as a table: in which of several places this rank finds each, and which ranks can read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..access import READ_ALL, ReadAccess
from ..comm import Comm
from ..io.failover import Failover
from ..io.paths import Entry, join_path

T = TypeVar("T")

Entries = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the ranks of a view see: the first one's machine, and by place the files' (bytes, time of change)."""

    host: str
    places: tuple[dict[str, tuple[int, float]], ...]

    def list_entries(self) -> tuple[Entries, ...]:
        """By place the files."""
        return tuple({name: Entry(*look) for name, look in held.items()} for held in self.places)


@dataclass(frozen=True, slots=True)
class FileTable:
    """The files of a checkpoint, and where this rank finds them.

    Attributes:
        folders: of the tag, by place. Messages name the first.
        entries: all files by name, the same on every rank: of several copies the one that counts.
        own: by place what this rank sees.
        near: the places, the nearest first.
        access: which ranks can read which files, in the order of the entries.
        odd: (place, name) of what this rank sees that is another file than the one which counts.
        views: what the ranks see, each view once; empty where every rank can read all.
        is_first: this rank speaks for those that see the same.
    """

    folders: tuple[str, ...]
    entries: Entries
    own: tuple[Entries, ...]
    near: tuple[int, ...] = (0,)
    access: ReadAccess = READ_ALL
    odd: frozenset[tuple[int, str]] = frozenset()
    views: tuple[NodeView, ...] = ()
    is_first: bool = False
    _failover: Failover = field(default_factory=Failover)

    @property
    def folder(self) -> str:
        """Of the tag in the first place."""
        return self.folders[0]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, ``FOLDER`` for a folder."""
        return {name: entry.size for name, entry in self.entries.items()}

    def choose(self, keep: Callable[[str], bool]) -> FileTable:
        """The same of some of the files, by name."""
        entries, *own = ({name: each[name] for name in each if keep(name)} for each in (self.entries, *self.own))
        return replace(self, entries=entries, own=tuple(own), access=self.see([*entries]))

    def path(self, name: str, size: int | None = None) -> str:
        """Where this rank finds a file, of ``size`` bytes if given; in the first place if it finds none."""
        held = (path for path, nbytes in self.list_copies(name).items() if size in (None, nbytes))
        return next(held, join_path(self.folder, name))

    def list_copies(self, name: str, *, near: bool = False) -> dict[str, int]:
        """Where this rank finds a file, with its bytes there, by place; ``near``: the nearest first."""
        places = self.near if near else range(len(self.own))
        held = [place for place in places if name in self.own[place] and (place, name) not in self.odd]
        return {join_path(self.folders[place], name): self.own[place][name].size for place in held}

    def find(self, name: str) -> list[str]:
        """Folders in which this rank finds a file, in the order of the places; with another file in it comes last."""
        held = [place for place, entries in enumerate(self.own) if name in entries]
        held.sort(key=lambda place: (place, name) in self.odd)
        return [self.folders[place] for place in held] or [self.folder]

    def read(self, name: str, work: Callable[[str], T]) -> T:
        """Read a file in the first folder that has it, and in the next one where that fails; ``work``: given a folder.

        Raises:
            CheckpointError, UnsupportedError: ``work``'s in the first folder, where it fails in all.
        """
        folders = {join_path(folder, name): folder for folder in self.find(name)}
        first, *_ = paths = [*folders]
        return self._failover.read(paths, lambda path: work(folders[path]), first)

    def see(self, names: Sequence[str]) -> ReadAccess:
        """Which ranks can read which of some files."""
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
        if not access.is_partial:
            return comm.share(names, work, apply, first=first)
        ranks = access.take_turns(range(len(names)), comm.size).tolist()
        mine = [at for at, rank in enumerate(ranks) if rank == comm.rank]
        parts = comm.each(lambda: dict(zip(mine, apply(work, [names[at] for at in mine]), strict=True)))
        return [parts[rank][at] for at, rank in enumerate(ranks)]

    def once(self, name: str, work: Callable[[], T], comm: Comm) -> T:
        """A rank that can read a file runs ``work``; every rank gets its result, or its error; collective."""
        return comm.once(work, self.see([name]).find_reader(0))
