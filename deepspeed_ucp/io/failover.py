"""Reads a file in the first of the places that have it, and in the next one where that fails."""

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
"""Files that a place does not give, until it is taken for one that gives none: each may take minutes to fail."""


class Failover:
    """Which copies of files are read; several threads may use it at once.

    Attributes:
        failed: paths of copies in which something has failed; they are passed over.
    """

    def __init__(self, failed: set[str] | None = None) -> None:
        self.failed = set[str]() if failed is None else failed
        self._lost = Counter[str]()  # files by place, that could not be read there
        self._lock = threading.Lock()

    def read(self, copies: Sequence[str], work: Callable[[str], T], primary: str) -> T:
        """Work on a file; where that fails, on another copy of it, with a warning.

        Args:
            copies: paths, the one that is read first in front.
            work: given a path.
            primary: the copy that counts. Where no copy is left its error is what is told.

        Raises:
            CheckpointError, UnsupportedError: ``work``'s, with every copy.
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
        """Leave a copy out from now on; whether others are left."""
        with self._lock:
            is_new, left = path not in self.failed, not self.failed.issuperset({*copies} - {path})
            self.failed.add(path)
            self._lost[_find_place(path, copies)] += is_new and isinstance(error.__cause__, OSError)
        if is_new and left:
            logger.warning("%s The file is taken from another place.", error)
        return left


def _find_place(path: str, copies: Sequence[str]) -> str:
    """What tells the place of a copy: the front of its path, which those of the others do not end in."""
    ends = zip(*(reversed(each.split("/")) for each in copies), strict=False)
    shared = sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, ends))
    return path.rsplit("/", shared)[0]
