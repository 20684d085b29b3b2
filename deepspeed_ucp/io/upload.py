"""Where an output for a URL grows: a scratch folder of each rank, whose files go to the store as they become whole.

Stores neither rename nor lock. What makes an output one goes last, and first where one is replaced: an upload that was
stopped leaves nothing that looks whole, and the next one begins anew.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import DiskFullError, StorageError, UnsupportedError
from .distance import choose_map
from .paths import is_url, normalize
from .staging import LATEST, OutputKind, Staging
from .store import list_tree, put_file, remove, write_small

_UNFINISHED = ".ucp-unfinished"
"""Object at a destination while it is written to: what else lies there may be replaced."""


def open_staging(destination: str, source: str, kind: OutputKind) -> Staging:
    """Where an output grows, of a folder or of a URL.

    Raises:
        StorageError: it can be no folder of its own, or source and destination lie in each other.
    """
    return (RemoteStaging if is_url(destination) else Staging)(destination, source, kind)


class RemoteStaging(Staging):
    """The destination of one output behind a URL: what grows in a rank's scratch folder is gone with it.

    Args:
        destination: the URL of the folder to be.
        source: the folder that it is made of.
        kind: what it will be.

    Attributes:
        folder: this rank's scratch folder, inside :meth:`scratch`.

    Raises:
        StorageError: it can be no folder of its own, or source and destination lie in each other.
        UnsupportedError: it is read only.
    """

    is_remote = True

    def __init__(self, destination: str, source: str, kind: OutputKind) -> None:
        self.destination, self.kind = normalize(destination), kind
        self.parent, self.name = os.path.split(self.destination)
        if self.destination.startswith(("http://", "https://")):
            raise UnsupportedError("is read only. Write to a folder, or to a store that takes files.", path=destination)
        if "://" not in self.parent:
            raise StorageError(f"a whole bucket cannot be {kind.name}; name a folder in it.", path=destination)
        origin = normalize(source)
        if f"{origin}/".startswith(f"{self.destination}/"):
            raise StorageError("holds the checkpoint that is read; write it elsewhere.", path=destination)
        if self.destination.startswith(f"{origin}/"):
            raise StorageError("lies in the checkpoint that is read; write it elsewhere.", path=destination)
        self.folder = ""

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Around everything that a rank does: its scratch folder, below ``TMPDIR``.

        Raises:
            DiskFullError: one that is raised inside, which tells of ``TMPDIR`` as well.
        """
        with tempfile.TemporaryDirectory(prefix=f"ucp-{self.name}-", ignore_cleanup_errors=True) as self.folder:
            try:
                yield
            except DiskFullError as error:
                place = f"TMPDIR ({tempfile.gettempdir()})"
                error.args += (
                    f"Files grow below {place} before they go to the store: a folder with more room will do.",
                )
                raise

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Nothing keeps two writers of one URL apart."""
        yield

    def check_destination(self, overwrite: bool) -> None:
        """What a stopped upload has left is no obstacle."""
        present = self._list()
        if not present:
            return
        stopped = _UNFINISHED in present
        names = {name.split("/")[0] for name in present} - {_UNFINISHED}
        is_ours = stopped or self.kind.is_one(self.destination)
        self.kind.refuse_taken(self.destination, names, is_ours=is_ours, overwrite=overwrite or stopped)

    def _list(self) -> list[str]:
        try:
            return sorted(list_tree(self.destination))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot be listed ({error}).", path=self.destination) from error

    def begin(self) -> None:
        """Delete the files of this kind at the destination; those that mark it as complete first."""
        present = [name for name in self._list() if self.kind.parts.fullmatch(name.split("/")[0])]
        marks = [name for name in reversed(self.kind.last) if name in present]
        with _explain(self.destination):
            write_small(f"{self.destination}/{_UNFINISHED}", b"")
            for name in [*marks, *(name for name in present if name not in marks)]:
                remove(f"{self.destination}/{name}")

    def put(self, name: str) -> None:
        """Take a file, which is whole, from the scratch folder to the store; any thread.

        Raises:
            StorageError: it cannot be written.
        """
        with _explain(f"{self.destination}/{name}"):
            put_file(self.path(name), f"{self.destination}/{name}")
        os.unlink(self.path(name))

    def sync(self) -> None:
        """Take all that this rank has made to the store, but what makes an output one.

        Raises:
            StorageError: it cannot be written.
        """
        names = [name for name in list_tree(self.folder) if name not in self.kind.last]
        names = [name for name in names if not os.path.basename(name).startswith(".ucp-")]
        list(choose_map(self.destination)(self.put, names))

    def commit(self, latest: str | None = None, *, overwrite: bool = False) -> None:
        """Take what makes the output one to the store, and let ``latest_universal`` name it.

        Raises:
            StorageError: it cannot be written.
        """
        for name in self.kind.last:
            if os.path.exists(self.path(name)):
                self.put(name)
        with _explain(self.destination):
            remove(f"{self.destination}/{_UNFINISHED}")
        if latest is not None:
            self.point_at(latest)

    def point_at(self, name: str) -> None:
        with _explain(f"{self.parent}/{LATEST}"):
            write_small(f"{self.parent}/{LATEST}", name.encode())


@contextmanager
def _explain(url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot be written ({error}).", path=url) from error
