"""Write an output to a store: each rank uploads the files of a temporary folder.

Stores neither rename nor lock. The files that mark an output as complete are uploaded last, and deleted first when an
output is replaced. An upload that was killed therefore leaves no output that looks complete; the next run starts again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import DiskFullError, StorageError, UnsupportedError
from .paths import choose_map, is_url, normalize
from .staging import LATEST, OutputKind, Staging, check_apart
from .store import list_tree, put_file, remove, write_small

_UNFINISHED = ".ucp-unfinished"
"""Object at a destination while an output is written: the other objects there may be replaced."""


def open_staging(destination: str, source: str, kind: OutputKind) -> Staging:
    """Return the staging of an output, for a folder or a URL."""
    return (RemoteStaging if is_url(destination) else Staging)(destination, source, kind)


class RemoteStaging(Staging):
    """Staging of an output behind a URL.

    Attributes:
        folder: this rank's temporary folder, inside :meth:`scratch`.
    """

    is_remote = True

    def __init__(self, destination: str, source: str, kind: OutputKind) -> None:
        self.destination, self.kind = normalize(destination), kind
        self.parent, self.name = os.path.split(self.destination)
        if self.destination.startswith(("http://", "https://")):
            raise UnsupportedError("is read only. Write to a folder, or to a store that takes files.", path=destination)
        if "://" not in self.parent:
            raise StorageError(f"a whole bucket cannot be {kind.name}; name a folder in it.", path=destination)
        check_apart(destination, self.destination, normalize(source))
        self.folder = ""

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Create and delete this rank's folder below ``TMPDIR``; DiskFullError names it."""
        with tempfile.TemporaryDirectory(prefix=f"ucp-{self.name}-", ignore_cleanup_errors=True) as self.folder:
            try:
                yield
            except DiskFullError as error:
                place = f"TMPDIR ({tempfile.gettempdir()})"
                error.args += (
                    f"Files are written below {place} before they are uploaded: name a folder with more room.",
                )
                raise

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Do nothing: stores have no locks."""
        yield

    def check_destination(self, overwrite: bool) -> None:
        """Raise as for a folder; the remains of a killed upload may be replaced."""
        present = self._list()
        if not present:
            return
        stopped = _UNFINISHED in present
        names = {name.split("/")[0] for name in present} - {_UNFINISHED}
        is_ours = stopped or self.kind.is_output(self.destination)
        self.kind.check_replaceable(self.destination, names, is_ours=is_ours, overwrite=overwrite or stopped)

    def _list(self) -> list[str]:
        try:
            return sorted(list_tree(self.destination))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot be listed ({error}).", path=self.destination) from error

    def begin(self) -> None:
        """Delete this kind's files at the destination, first the files in ``kind.last``."""
        present = [name for name in self._list() if self.kind.parts.fullmatch(name.split("/")[0])]
        marks = [name for name in reversed(self.kind.last) if name in present]
        with _convert_errors(self.destination):
            write_small(f"{self.destination}/{_UNFINISHED}", b"")
            for name in [*marks, *(name for name in present if name not in marks)]:
                remove(f"{self.destination}/{name}")

    def put(self, name: str) -> None:
        """Move a complete file from the temporary folder to the store; thread-safe."""
        with _convert_errors(f"{self.destination}/{name}"):
            put_file(f"{self.destination}/{name}", self.path(name))
        os.unlink(self.path(name))

    def sync(self) -> None:
        """Move this rank's files to the store, except the files in ``kind.last``."""
        names = [name for name in list_tree(self.folder) if name not in self.kind.last]
        names = [name for name in names if not os.path.basename(name).startswith(".ucp-")]
        list(choose_map(self.destination)(self.put, names))

    def commit(self, latest: str | None = None, *, overwrite: bool = False) -> None:
        """Move the files in ``kind.last`` to the store, and write ``latest_universal``."""
        for name in self.kind.last:
            if os.path.exists(self.path(name)):
                self.put(name)
        with _convert_errors(self.destination):
            remove(f"{self.destination}/{_UNFINISHED}")
        if latest is not None:
            self.write_latest(latest)

    def write_latest(self, name: str) -> None:
        with _convert_errors(f"{self.parent}/{LATEST}"):
            write_small(f"{self.parent}/{LATEST}", name.encode())


@contextmanager
def _convert_errors(url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot be written ({error}).", path=url) from error
