"""Find the tag to load on any node and in any place, or report that none exists."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from ..comm import Comm
from ..errors import CheckpointError, OutOfReachError, UcpError, join_numbers, shorten
from ..formats import check_tag, read_latest
from ..formats.latest import (
    describe_content,
    find_folder,
    find_newest,
    find_siblings,
    find_tags,
    leads_to_folder,
    list_unfinished,
)
from ..hub import describe_cached
from ..io.paths import find_root_url, is_url, normalize
from ..io.store import is_folder

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")


def find_tag(
    load_dir: str,
    tag: Any,
    comm: Comm,
    *,
    universal: bool = False,
    fallback: bool = False,
    also: Sequence[str] = (),
) -> str | None:
    """Return the tag to load, or None if nothing was saved yet (collective).

    A node may lack the tag's folder or ``latest``: it suffices that some rank sees them.

    Args:
        universal: look at ``latest_universal`` first, as DeepSpeed does with ``load_universal``.
        fallback: if ``latest`` leads to no tag (a crash may leave it empty), take the newest one, with a warning.
        also: further places; the first one that has ``latest`` counts. A place with checkpoints and an unreadable
            ``latest`` is not skipped: another place may have an older one.

    Raises:
        CheckpointError: there is no such tag, or ranks ask for different ones, or see different ones.
    """
    wanted, places = None if tag is None else str(tag), (load_dir, *also)
    requested = comm.gather(wanted)
    comm.run_replicated(partial(_check_requested, load_dir, requested))
    ask = partial(_look, requested=wanted, rank=comm.rank, universal=universal, fallback=fallback)
    errors: list[str] = []
    newest: str | None = None
    chosen: str | None = None
    for place in places:  # stops at the first place that has it: a store out of reach takes long to fail
        tags, faults, others = zip(*comm.gather_results(partial(ask, place)), strict=True)
        errors += filter(None, faults)
        newest = newest or next(filter(None, others), None)
        chosen = chosen or comm.run_replicated(partial(_choose_tag, load_dir, tags))
        if chosen is None and errors:
            break
        if chosen is not None and (chosen, "") in zip(tags, faults, strict=True):
            return chosen
    if chosen is None and not errors:
        return None
    if chosen is not None and _has_folder(places, chosen, comm):
        return chosen
    if newest is None:
        raise comm.common(CheckpointError(errors[0]))
    if comm.rank == 0:
        logger.warning("%s Falling back to the newest one by step, seal and time: %s", errors[0], newest)
    return newest


def _look(
    place: str, requested: str | None, rank: int, *, universal: bool, fallback: bool
) -> tuple[str | None, str, str | None]:
    """Find the tag in a place, as this rank sees it; only rank 0 looks in a store.

    Returns:
        The tag: ``requested``, or the tag in ``latest``, or None. The fault, if there is no valid tag. With
        ``fallback``, the tag that was saved last.
    """
    if rank and is_url(place):
        return None, "", None
    named = requested
    try:
        named = named if named is not None else read_latest(place, universal=universal, foreign=True)
        if named is not None:
            check_tag(place, named)
    except CheckpointError as error:
        newest = None
        if fallback and requested is None:
            with suppress(CheckpointError):  # the first error is reported, unless another rank sees more
                newest = find_newest(place)
        return named, str(error), newest
    return named, "", None


def _choose_tag(load_dir: str, named: Sequence[str | None]) -> str | None:
    if len({*named} - {None}) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints ({_describe_tags(named)}). Remove the `latest` of the older "
            "one, or name the tag (tag=… of load_checkpoint).",
            path=load_dir,
        )
    return next((tag for tag in named if tag is not None), None)


def _check_requested(load_dir: str, requested: Sequence[str | None]) -> None:
    if len({*requested}) > 1:
        named = _describe_tags([tag or "the tag in `latest`" for tag in requested])
        raise CheckpointError(
            f"ranks asked for different tags ({named}), and all load one. Give load_checkpoint the same tag "
            "on every rank: if each rank finds it, use that of rank 0 (torch.distributed.broadcast_object_list).",
            path=load_dir,
        )


def _describe_tags(named: Sequence[str | None]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, tag in enumerate(named):
        if tag is not None:
            ranks.setdefault(tag, []).append(rank)
    return shorten(f"rank{'s' * (len(members) > 1)} {join_numbers(members)}: {tag}" for tag, members in ranks.items())


def _has_folder(places: Sequence[str], tag: str, comm: Comm) -> bool:
    """Return True if some rank sees the tag's folder in some place (collective)."""
    paths = [os.path.join(place, tag) for place in places]
    here = comm.gather_results(lambda: any(is_folder(path) for path in paths if not is_url(path)))
    return any(here) or comm.once(lambda: any(is_folder(path) for path in paths if is_url(path)))


@contextmanager
def suggest_fallback(comm: Comm, has_older: Callable[[], bool]) -> Iterator[None]:
    """Suggest the option ``fallback`` in a CheckpointError of all ranks if it helps.

    Args:
        has_older: whether there is another checkpoint to fall back to; called after a fault, on one rank for all.
    """
    try:
        yield
    except CheckpointError as error:
        if not isinstance(error, OutOfReachError) and comm.is_common(error):
            with suppress(UcpError, OSError):
                error.args = (*error.args, *([_FALLBACK] if comm.once(has_older) else []))
        raise


_FALLBACK = '"fallback": true loads the newest checkpoint that is complete.'


def find_all_tags(places: Sequence[str]) -> set[str]:
    """Return the tags in all places together."""
    return {tag for place in places for tag in find_tags(place)}


def find_folders(places: Sequence[str], tag: str, comm: Comm) -> list[str]:
    """Return the tag's folder in each place; a place may be it already (collective).

    Example:
        >>> find_folders(["checkpoints", "s3://bucket/run"], "global_step100", Comm())
        ['checkpoints/global_step100', 's3://bucket/run/global_step100']
    """

    def is_tag_folder(place: str) -> bool:
        if os.path.basename(normalize(place)) != tag:
            return False
        return any(ask_ranks(place, lambda: find_folder(place, tag) == place, comm))

    return [place if is_tag_folder(place) else os.path.join(place, tag) for place in places]


def ask_ranks(place: str, look: Callable[[], T], comm: Comm) -> list[T]:
    """Run ``look`` on every rank, for a URL on rank 0 alone (collective)."""
    return [comm.once(look)] if is_url(place) else comm.gather_results(look)


_ADVICE = (
    "To resume, name the folder that holds `latest`, or a checkpoint's own folder; "
    '"require": true makes this an error.'
)
_MISSING, _EMPTY = _ABSENT = "does not exist", "is empty"


def report_absent(places: Sequence[str], comm: Comm, *, require: bool, saved_to: Iterable[str] = ()) -> None:
    """Log that a load found no checkpoint (collective).

    INFO if the folder is missing or empty, or holds only unfinished saves, as on the first start of a run. WARNING if
    it has content, or if its path looks mistyped: the parent folder is missing, other checkpoints lie in the parent
    folder, or the engine saves somewhere else.

    Args:
        places: folders or URLs that were searched; the first is the argument of the load.
        require: raise instead.
        saved_to: folders that the engine is known to save to.
    """
    first, *others = [_describe_place(place, comm) for place in places]
    is_absent = first in _ABSENT
    seen = [f"{place} {text}." for place, text in zip(places[1:], others, strict=True) if text not in _ABSENT]
    if is_absent:
        seen += comm.once(lambda: _list_doubts(places[0], saved_to, is_missing=first == _MISSING))
    if first == _EMPTY and (unfinished := comm.once(lambda: list_unfinished(places[0] or os.curdir))):
        first = f"holds only unfinished saves ({shorten(unfinished, 3)})"
    text = f"{first}, nothing to resume" if is_absent else f"{first}, no checkpoint to resume"
    if require:
        fault = " ".join([f'{text}, and "require" is on.', *seen, "Check the path."])
        raise comm.common(CheckpointError(fault, path=places[0]))
    if comm.rank:
        return
    text = f"{text}: training begins from scratch"
    if seen or not is_absent:
        logger.warning("%s: %s", places[0], " ".join([f"{text}.", *seen, _ADVICE]))
    else:
        logger.info("%s: %s", places[0], text)


def _describe_place(place: str, comm: Comm) -> str:
    """Describe a place: content, an empty folder, or a missing one (collective)."""

    def look() -> str:
        folder = place or os.curdir
        if text := describe_content(folder):
            return text
        if leads_to_folder(folder):
            return _EMPTY
        return _MISSING if is_url(place) else describe_cached(place) or _MISSING

    answers = ask_ranks(place, look, comm)
    return next((text for text in answers if text not in _ABSENT), _EMPTY if _EMPTY in answers else _MISSING)


def _list_doubts(place: str, saved_to: Iterable[str], *, is_missing: bool) -> list[str]:
    """List signs that a missing or empty folder is not the intended one."""
    doubts = []
    folder, parent = normalize(place), os.path.dirname(normalize(place))
    folders = list(saved_to)
    if folders and folder not in map(normalize, folders):
        doubts.append(f"This engine saves to {shorten(folders)}.")
    if is_url(place) and parent == find_root_url(place):
        return doubts
    with suppress(UcpError, OSError):  # reading one folder may be allowed and its parent not
        if siblings := find_siblings(folder):
            doubts.append(f"{parent} holds checkpoints in {shorten(siblings, 3)}.")
        elif is_missing and not leads_to_folder(parent):
            doubts.append(f"Its parent folder {parent} does not exist either.")
    return doubts
