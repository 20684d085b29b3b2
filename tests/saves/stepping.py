"""Writers that stop at each request, so that a test chooses the order of their requests."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed_ucp.io import store as stores
from deepspeed_ucp.io.paths import is_url

PLACE = "fake://bucket/run"

Work = Callable[[], str]
"""A writer. It returns how it ended."""


class KilledError(BaseException):
    """Ends a writer before a request is executed."""


class Stepper:
    """Threads that run one at a time, from one request to the next, with a check after each.

    Attributes:
        ended: by name how a thread ended, in the order of the ends.
        steps: by name the requests that a thread has begun.
    """

    def __init__(self, works: Mapping[str, Work], check: Callable[[], None]) -> None:
        self.ended, self.steps, self._check = dict[str, str](), dict.fromkeys(works, 0), check
        self._killed, self._errors = set[str](), list[BaseException]()
        self._turns = {name: threading.Semaphore(0) for name in works}
        self._back = threading.Semaphore(0)
        self._threads = {
            name: threading.Thread(target=self._run, args=(name, work), name=name, daemon=True)
            for name, work in works.items()
        }

    def _run(self, name: str, work: Work) -> None:
        self._turns[name].acquire()
        try:
            self.ended[name] = work()
        except KilledError:
            self.ended[name] = "killed"
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.ended[name] = repr(error)
            self._errors.append(error)
        self._back.release()

    def stop(self) -> None:
        """Wait for the next turn if this is one of the threads; called before each request."""
        name = threading.current_thread().name
        if self._threads.get(name) is not threading.current_thread():
            return
        if name not in self._killed:
            self.steps[name] += 1
            self._back.release()
            self._turns[name].acquire()
        if name in self._killed:
            raise KilledError

    def kill(self, name: str) -> None:
        """End a thread at its next request."""
        self._killed.add(name)
        self.run(name)

    def run(self, name: str, most: int | None = None) -> bool:
        """Let a thread run to its end, or for some requests; return True if it has ended."""
        thread = self._threads[name]
        if thread.ident is None:
            thread.start()
        while name not in self.ended and most != 0:
            self._turns[name].release()
            self._back.acquire()
            if self._errors:
                raise self._errors[0]
            self._check()
            most = None if most is None else most - 1
        return name in self.ended

    def close(self) -> None:
        """End all threads."""
        for name, thread in self._threads.items():
            if thread.ident is not None and name not in self.ended:
                self.kill(name)


class FakeStore(stores.LocalStore):
    """An object store in a folder of this machine, with conditional writes; each request is a step.

    Attributes:
        held: by URL the hash of the content that this process has written.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.held, self.stop = str(root), dict[str, int](), lambda url: None

    def find(self, url: str) -> str:
        return os.path.join(self.root, url.removeprefix("fake://"))

    def exchange_small(self, url: str, data: bytes, before: bytes | None) -> bool:
        now = self._look(url)
        if now == before:
            now = self._look(url)  # the store compares again when it writes
            if now == before:
                self._put(url, data)
                return True
        return now == data

    def _look(self, url: str) -> bytes | None:
        self.stop(url)
        path = Path(self.find(url))
        return path.read_bytes() if path.exists() else None

    def _put(self, url: str, data: bytes | str) -> None:
        path = Path(self.find(url))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(Path(data).read_bytes() if isinstance(data, str) else data)
        self.held[url] = hash(path.read_bytes())

    def remove(self, url: str) -> None:
        self.stop(url)
        path = Path(self.find(url))
        if not path.is_file():
            return
        path.unlink()
        self.held.pop(url, None)
        while not any(path.parent.iterdir()) and str(path.parent) != self.root:  # a store has no empty folders
            path = path.parent
            path.rmdir()

    def clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        os.makedirs(self.root)
        self.held.clear()


def _make_step(name: str) -> Callable[..., Any]:
    def call(self: FakeStore, url: str, *args: Any, **options: Any) -> Any:
        self.stop(url)
        if name in ("write_small", "put_file"):
            return self._put(url, *args)
        return getattr(stores.LocalStore(), name)(self.find(url), *args, **options)

    return call


for _name in (
    "list_folder", "list_tree", "write_small", "put_file", "find_entry", "find_change", "is_file", "exists",
    "read_small", "open_regular", "open_stored",
):  # fmt: skip
    setattr(FakeStore, _name, _make_step(_name))


@contextmanager
def use_store(fake: FakeStore) -> Iterator[None]:
    """Let the package find the fake store behind URLs."""
    choose = stores._choose
    with mock.patch.object(stores, "_choose", lambda path: fake if is_url(path) else choose(path)):
        yield
