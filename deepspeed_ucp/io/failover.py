"""Reads a file from the first place that has it, and from the next one if that fails."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TypeVar

from ..errors import CheckpointError, UnsupportedError

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")

_ENOUGH = 3
"""Failed files after which a place is tried last: each failure may take minutes."""


class Failover:
    """Chooses the copies of files to read; thread-safe.

    Attributes:
        failed: paths of copies that have failed and are not used again.
    """

    def __init__(self, failed: set[str] | None = None) -> None:
        self.failed = set[str]() if failed is None else failed
        self._lost = Counter[str]()  # number of failed files by place
        self._lock = threading.Lock()

    def read(self, copies: Sequence[str], work: Callable[[str], T], primary: str) -> T:
        """Call ``work`` with the path of a file, and with that of another copy, with a warning, if it fails.

        Args:
            copies: paths in order of preference.
            primary: the copy whose error is raised if all fail.

        Raises:
            CheckpointError, UnsupportedError: ``work`` has failed for every copy.
        """
        errors: dict[str, CheckpointError | UnsupportedError] = {}
        while True:
            path = next(iter(self._list_left(copies)), primary)
            try:
                return work(path)
            except (CheckpointError, UnsupportedError) as error:
                errors[path] = error
            if not self._pass_over(path, copies, errors[path]):
                raise errors.get(primary, errors[path])

    def _list_left(self, copies: Sequence[str]) -> list[str]:
        left = [path for path in copies if path not in self.failed]
        return sorted(left, key=lambda path: self._lost[_find_place(path, copies)] >= _ENOUGH)

    def _pass_over(self, path: str, copies: Sequence[str], error: Exception) -> bool:
        """Do not use a copy again; return True if there are others."""
        with self._lock:
            is_new, left = path not in self.failed, not self.failed.issuperset({*copies} - {path})
            self.failed.add(path)
            self._lost[_find_place(path, copies)] += is_new and isinstance(error.__cause__, OSError)
        if is_new and left:
            logger.warning("%s The file is taken from another place.", error)
        return left


def _find_place(path: str, copies: Sequence[str]) -> str:
    """Return the place of a copy: its path without the end that all copies share."""
    ends = zip(*(reversed(path.split("/")) for path in copies), strict=False)
    shared = sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, ends))
    return path.rsplit("/", shared)[0]
