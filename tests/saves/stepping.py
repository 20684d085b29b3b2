"""Writers that stop at each request, so that a test chooses the order of their requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

import obstore

from tests.support.crash import intercept

PLACE = "memory://bucket/run"
"""Destination in a store of this process (tests/support/memory.py)."""

REQUESTS = [(obstore, name) for name in ("list_with_delimiter", "list", "head", "get", "put", "delete")]

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


def kill_at_request(work: Callable[[], object], at: int) -> bool:
    """Run ``work``, whose threads all end at a store's request number ``at``. Return False if it ended before."""

    def act(number: int, *_: object) -> None:
        if number >= at:
            raise KilledError

    with suppress(KilledError), intercept(act, REQUESTS):
        work()
        return False
    return True
