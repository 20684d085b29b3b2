"""The order of tags, where the one that ``latest`` names is not to be had: by step, then seal, then time."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..errors import UcpError
from ..io.opened import explain_failure
from ..io.store import find_change
from .files import SEAL, holds_run, is_state_file, list_published, resolve_published
from .latest import find_tags
from .reading import read_file

_TRIED = 4
"""Files of a place that are asked for their step, one after the other: a tag whose files are damaged has others."""


class Age(NamedTuple):
    """What orders the tags of a job: the later one is greater.

    Attributes:
        step: of its model states; -1 where none can be read.
        sealed: it has a seal.
        time: when the first of its state files was written: what came later may be a copy.
    """

    step: int
    sealed: bool
    time: float

    def is_before(self, other: Age) -> bool:
        """Whether it may have been saved before another one; times are asked where a step is not known."""
        return self.time <= other.time if -1 in (self.step, other.step) else self.step <= other.step


def find_newest(load_dir: str) -> str | None:
    """The tag that was saved last; None where there is none."""
    return max(find_tags(load_dir), key=lambda tag: find_age([os.path.join(load_dir, tag)]), default=None)


def list_older(places: Sequence[str], tag: str) -> list[str]:
    """The tag and those that were saved before it, the newest first.

    Args:
        places: folders of all tags. Of one in several the earliest time counts.
    """
    above, folders = os.path.dirname(tag), defaultdict[str, list[str]](list)
    for place in places:
        for each in find_tags(os.path.join(place, above)):
            folders[os.path.join(above, each)].append(os.path.join(place, above, each))
    ages = {each: find_age(held) for each, held in folders.items()}
    newest = ages.pop(tag, None)
    older = [each for each, age in ages.items() if newest is None or age.is_before(newest)]
    return [tag, *sorted(older, key=ages.__getitem__, reverse=True)]


def find_age(folders: Sequence[str]) -> Age:
    """The age of a tag that lies in some folders, copies of each other."""
    listed = [(found, sorted(held.items())) for found, held in map(list_published, folders)]
    times = [entry.changed for _, held in listed for name, entry in held if is_state_file(name)]
    time = min(filter(None, times), default=0.0)  # 0 where it is not known
    step = next((step for folder, held in listed for step in _read_steps(folder, [name for name, _ in held])), -1)
    return Age(step, any(_is_there(os.path.join(folder, SEAL)) for folder, _ in listed), time)


def _read_steps(folder: str, names: Iterable[str]) -> Iterable[int]:
    for name in [name for name in names if holds_run(name)][:_TRIED]:
        with suppress(UcpError):  # what is wrong with it is told when the tag is loaded
            model = read_file(folder, name).model
            step = model.counters.get("global_steps") if model else None
            if isinstance(step, int):
                yield step


def list_unsealed(places: Sequence[str], tags: Sequence[str]) -> set[str]:
    """Those tags that have a seal in no place, in a job that seals its saves; none where no tag has one."""
    sealed = {tag for tag in tags if is_sealed(places, tag)}
    return set(tags) - sealed if sealed else set()


def is_sealed(places: Sequence[str], tag: str) -> bool:
    """Whether a tag has a seal in some place; those behind the one that has it are not asked.

    Raises:
        CheckpointError: that cannot be told of a place.
    """
    return any(_has_seal(os.path.join(place, tag)) for place in places)


def _has_seal(folder: str) -> bool:
    if _is_there(os.path.join(folder, SEAL)):
        return True
    found = resolve_published(folder)
    return found != folder and _is_there(os.path.join(found, SEAL))


def _is_there(path: str) -> bool:
    try:
        find_change(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise explain_failure(path, "looked at", error) from error
    return True
