"""When a checkpoint's files were written: files of two saves lie further apart in time than those of one.

A copy may have times of its own, a restored file has a newer one, and clocks differ: so these are warnings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..errors import CheckpointError, shorten
from .files import Entry
from .findings import WARNING, Finding
from .latest import LATEST, read_tag

_SLACK = 120.0
"""Seconds that the files of one save may lie apart in any case."""

_SLOWEST = 10 << 20
"""Bytes per second at which the slowest storage writes, or is copied to."""


def find_late_files(folder: str, entries: Mapping[str, Entry], used: Sequence[str]) -> list[Finding]:
    """A warning where a save's files were not written in one go, by the times of their last change.

    Args:
        folder: the tag's folder.
        entries: its files.
        used: those of the save.
    """
    times = sorted((entries[name].changed, name) for name in used if name in entries)
    if len(times) < 2:
        return []
    slack = _SLACK + max(entries[name].size for _, name in times) / _SLOWEST
    finding = _find_gap(folder, times, slack)
    return [finding] if finding else _find_unfinished(folder, times, slack)


def _find_gap(folder: str, times: Sequence[tuple[float, str]], slack: float) -> Finding | None:
    """One gap that is longer than all the rest: two saves, or a file that was put there later."""
    gap, at = max((after[0] - before[0], at) for at, (before, after) in enumerate(pairwise(times), 1))
    rest = times[-1][0] - times[0][0] - gap
    if gap <= max(slack, 2 * rest):
        return None
    older, newer = [name for _, name in times[:at]], [name for _, name in times[at:]]
    fewer, others = (older, "before") if len(older) < len(newer) else (newer, "after")
    text = (
        f"{folder}: {shorten(fewer)} were written {_tell_span(gap)} {others} the other files. A save into a tag that "
        "was there before, and that was cut off, leaves files of two runs, which nothing else may tell; load another "
        "tag if that is what happened."
    )
    return Finding("times", fewer[0], text, WARNING, tuple(fewer))


def _find_unfinished(folder: str, times: Sequence[tuple[float, str]], slack: float) -> list[Finding]:
    """``latest`` is written after all files of a save: some older and some newer are those of two saves."""
    parent, tag = os.path.split(os.path.abspath(folder))
    path = os.path.join(parent, LATEST)
    try:
        written = os.stat(path).st_mtime
        if read_tag(path) != tag:
            return []
    except (OSError, CheckpointError):
        return []
    late = [name for changed, name in times if changed > written + slack]
    if not late or len(late) == len(times):
        return []
    text = (
        f"{folder}: {shorten(late)} were written after `{LATEST}`, the other files before it. A save into this tag may "
        "have been cut off; load another tag if that is what happened."
    )
    return [Finding("times", late[0], text, WARNING, tuple(late))]


def _tell_span(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"
