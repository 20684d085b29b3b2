"""Tags that the engines of this process save under, so that no engine replaces the save of another one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import StorageError

logger = logging.getLogger("deepspeed_ucp")


class TagOwner(NamedTuple):
    """A save: the folder that the script named, the engine's job, and the step."""

    folder: str
    job: str
    step: int


_claimed, _shared = dict[tuple[str, str], TagOwner](), set[str]()
"""(place, tag) → the save there; folders that two engines save to, already logged."""


def claim_tag(tag: str, claim: TagOwner, places: Iterable[str], *, logs: bool) -> None:
    """Reserve a tag in the claim's folder and in further places.

    Warns once if two engines save one step under one tag into one folder.

    Args:
        logs: this rank logs the warning.

    Raises:
        StorageError: a place has the save of another folder under the same tag.
    """
    for place in dict.fromkeys([claim.folder, *places]):
        other = _claimed.setdefault((place, tag), claim)
        if other.folder != claim.folder and other[1:] != claim[1:]:
            raise StorageError(
                f"has {tag!r} of {other.folder}, which the save of {claim.folder} would replace. Give each engine "
                'another place in "save": {"to": …}, or each save another tag.',
                path=place,
            )
        is_shared = other.folder == claim.folder and other.job != claim.job and other.step == claim.step
        if is_shared and claim.folder not in _shared:
            _shared.add(claim.folder)
            if logs:
                logger.warning(
                    "%s: two engines save %r there, in each other's place: name a folder for each", claim.folder, tag
                )
        _claimed[place, tag] = claim
