"""Reports a load that finds no checkpoint: a normal first start, or a path that looks mistyped."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ..comm import Comm
from ..errors import CheckpointError, UcpError, shorten
from ..formats.latest import describe_content, find_siblings, leads_to_folder
from ..hub import describe_cached
from ..io.paths import find_store, is_url, normalize
from .tags import ask_ranks

logger = logging.getLogger("deepspeed_ucp")

_ADVICE = (
    "To resume, name the folder that holds `latest`, or a checkpoint's own folder; "
    '"require": true makes this an error.'
)
_MISSING, _EMPTY = _ABSENT = "does not exist", "is empty"


def report_absent(places: Sequence[str], comm: Comm, *, require: bool, saved_to: Iterable[str] = ()) -> None:
    """Log that a load found no checkpoint (collective).

    INFO if the folder is missing or empty, as on the first start of a run. WARNING if it has content, or if its path
    looks mistyped: the parent folder is missing, other checkpoints lie in the parent folder, or the engine saves
    somewhere else.

    Args:
        places: folders or URLs that were searched; the first is the argument of the load.
        require: raise instead.
        saved_to: folders that the engine is known to save to.

    Raises:
        CheckpointError: a checkpoint is required.
    """
    first, *others = [_describe_place(place, comm) for place in places]
    is_absent = first in _ABSENT
    seen = [f"{place} {text}." for place, text in zip(places[1:], others, strict=True) if text not in _ABSENT]
    if is_absent:
        seen += comm.once(lambda: _list_doubts(places[0], saved_to, is_missing=first == _MISSING))
    text = f"{first}, nothing to resume" if is_absent else f"{first}, no checkpoint to resume"
    if require:
        comm.alike(lambda: _refuse(" ".join([f'{text}, and "require" is on.', *seen, "Check the path."]), places[0]))
    if comm.rank:
        return
    text = f"{text}: training begins from scratch"
    if seen or not is_absent:
        logger.warning("%s: %s", places[0], " ".join([f"{text}.", *seen, _ADVICE]))
    else:
        logger.info("%s: %s", places[0], text)


def _describe_place(place: str, comm: Comm) -> str:
    """Describe a place (collective). If ranks differ, content counts before an empty folder, then a missing one."""

    def look() -> str:
        folder = place or os.curdir
        if text := describe_content(folder):
            return text
        if leads_to_folder(folder):
            return _EMPTY
        return _MISSING if is_url(place) else describe_cached(place) or _MISSING

    answers = ask_ranks(place, look, comm)
    return next((text for text in answers if text not in _ABSENT), _EMPTY if _EMPTY in answers else _MISSING)


def _refuse(text: str, path: str) -> None:
    raise CheckpointError(text, path=path)


def _list_doubts(place: str, saved_to: Iterable[str], *, is_missing: bool) -> list[str]:
    """Reasons to think that a missing or empty folder is not the intended one, as sentences."""
    doubts = []
    folder, parent = normalize(place), os.path.dirname(normalize(place))
    folders = list(saved_to)
    if folders and folder not in map(normalize, folders):
        doubts.append(f"This engine saves to {shorten(folders)}.")
    if is_url(place) and parent == find_store(place):
        return doubts
    with suppress(UcpError, OSError):  # reading one folder may be allowed and its parent not
        if siblings := find_siblings(folder):
            doubts.append(f"{parent} holds checkpoints in {shorten(siblings, 3)}.")
        elif is_missing and not leads_to_folder(parent):
            doubts.append(f"Its parent folder {parent} does not exist either.")
    return doubts
