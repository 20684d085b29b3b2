"""What the files say that loads write of themselves (``"report"`` in a ds_config)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, StorageError

VERSION = 1
_WHOLE = {"time", "loaded", "step", "direct", "reason", "state_bytes"}
"""What is told of the whole load."""

START = "start"
"""The time of a process before its load: imports, process groups, the engine."""


def list_loads(path: str) -> list[str]:
    """The files of a folder's loads in their order, or the one file.

    Raises:
        ConfigError: there is none.
    """
    if os.path.isfile(path):
        return [path]
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    found = [os.path.join(path, name) for name in names if name.startswith("load-") and name.endswith(".json")]
    if not found:
        raise ConfigError(f'{path}: holds no report of a load; loads write them where the ds_config says "report".')
    return found


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank told.

    Attributes:
        spans: (phase, seconds since the epoch at which it began, seconds).
        floor: seconds that reading its bytes took with nothing else: those that its threads waited for storage, over
            the threads.
        slowest: the file that gave its bytes at the lowest rate, and that rate in bytes a second; None without any.
    """

    rank: int
    host: str
    spans: tuple[tuple[str, float, float], ...]
    nbytes: int
    requests: int
    floor: float
    slowest: tuple[str, float] | None

    def sum(self, phase: str | None = None) -> float:
        """Seconds of a phase, or of the load without the start of its process."""
        return sum(seconds for name, _, seconds in self.spans if name == phase or (phase is None and name != START))


def read_load(path: str) -> Mapping[str, Any]:
    """A load's file.

    Raises:
        StorageError: it cannot be read.
        ConfigError: it is of another form.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            told = json.load(stream)
        if told["version"] != VERSION or not told["ranks"] or not told.keys() >= _WHOLE:
            raise ValueError(f"version {told['version']}")
        for each in told["ranks"]:
            make_rank(each)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path}: is no report of a load that this release knows ({error!r}).") from None
    return told  # type: ignore[no-any-return]


def make_rank(told: Mapping[str, Any]) -> Rank:
    """A rank's part of a file."""
    spans = [(str(name), float(at), float(seconds)) for name, at, seconds in told["spans"]]
    if spans:
        spans.insert(0, (START, float(told["started"]), spans[0][1] - float(told["started"])))
    files = {str(path): (int(nbytes), float(seconds)) for path, (nbytes, seconds) in told["files"].items()}
    rates = {path: nbytes / seconds for path, (nbytes, seconds) in files.items() if nbytes and seconds}
    slowest = min(rates, key=rates.__getitem__, default=None)
    return Rank(
        rank=int(told["rank"]),
        host=str(told["host"]),
        spans=tuple(spans),
        nbytes=int(told["bytes_read"]),
        requests=int(told["requests"]),
        floor=sum(seconds for _, seconds in files.values()) / max(int(told["threads"]), 1),
        slowest=None if slowest is None else (slowest, rates[slowest]),
    )


def list_phases(ranks: Sequence[Rank]) -> list[str]:
    """All phases in the order in which they come."""
    return list(dict.fromkeys(name for rank in ranks for name, *_ in rank.spans))
