"""Order of tags for a fallback from the tag in ``latest``: by step, then seal, then time."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..errors import UcpError
from ..io.opened import explain_failure
from ..io.store import find_change
from .deepspeed.files import SEAL, holds_run, is_state_file, list_published, resolve_published
from .deepspeed.reading import read_file
from .latest import find_tags

_TRIED = 4
"""Maximum number of files per place that are read for the step, in case of damaged files."""


class Age(NamedTuple):
    """Sort key of a job's tags: later tags are greater.

    Attributes:
        step: from the model states; -1 if unknown.
        sealed: whether the tag has a seal.
        time: time of the earliest state file; later ones may be copies.
    """

    step: int
    sealed: bool
    time: float

    def is_before(self, other: Age) -> bool:
        """Return True if the tag may be older than another one; times count only if a step is unknown."""
        return self.time <= other.time if -1 in (self.step, other.step) else self.step <= other.step


def find_newest(load_dir: str) -> str | None:
    """Return the tag that was saved last; None without tags."""
    return max(find_tags(load_dir), key=lambda tag: find_age([os.path.join(load_dir, tag)]), default=None)


def list_older(places: Sequence[str], tag: str) -> list[str]:
    """Return a tag and all older tags, newest first.

    Args:
        places: folders of all tags. The earliest time of a tag's copies counts.
    """
    above, folders = os.path.dirname(tag), defaultdict[str, list[str]](list)
    for place in places:
        for each in find_tags(os.path.join(place, above)):
            folders[os.path.join(above, each)].append(os.path.join(place, above, each))
    ages = {each: find_age(copies) for each, copies in folders.items()}
    newest = ages.pop(tag, None)
    older = [each for each, age in ages.items() if newest is None or age.is_before(newest)]
    return [tag, *sorted(older, key=ages.__getitem__, reverse=True)]


def find_age(folders: Sequence[str]) -> Age:
    """Return the age of a tag with copies in some folders."""
    listed = [(found, sorted(entries.items())) for found, entries in map(list_published, folders)]
    times = [entry.changed for _, entries in listed for name, entry in entries if is_state_file(name)]
    time = min(filter(None, times), default=0.0)  # 0 if unknown
    step = next((step for folder, entries in listed for step in _read_steps(folder, [name for name, _ in entries])), -1)
    return Age(step, any(_exists(os.path.join(folder, SEAL)) for folder, _ in listed), time)


def _read_steps(folder: str, names: Iterable[str]) -> Iterable[int]:
    for name in [name for name in names if holds_run(name)][:_TRIED]:
        with suppress(UcpError):  # reported when the tag is loaded
            model = read_file(folder, name).model
            step = model.counters.get("global_steps") if model else None
            if isinstance(step, int):
                yield step


def list_unsealed(places: Sequence[str], tags: Sequence[str]) -> set[str]:
    """Return the tags without a seal in any place; empty if no tag has one."""
    sealed = {tag for tag in tags if is_sealed(places, tag)}
    return set(tags) - sealed if sealed else set()


def is_sealed(places: Sequence[str], tag: str) -> bool:
    """Return True if a tag has a seal in some place; places are asked in order.

    Raises:
        CheckpointError: a place cannot be read.
    """
    return any(_has_seal(os.path.join(place, tag)) for place in places)


def _has_seal(folder: str) -> bool:
    if _exists(os.path.join(folder, SEAL)):
        return True
    found = resolve_published(folder)
    return found != folder and _exists(os.path.join(found, SEAL))


def _exists(path: str) -> bool:
    try:
        find_change(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise explain_failure(path, "looked at", error) from error
    return True
