"""Frozen parameters in a place: a folder of them beside the tags that name it (:mod:`..sources.frozen`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Set
from contextlib import suppress

from ..errors import UcpError
from ..io.disk import sync_folder
from ..io.store import list_folder, list_tree
from ..sources.files import BASE, FROZEN, resolve_published
from ..sources.frozen import read_reference
from ..torchsave.records import sum_directory
from .memory import Destination, Snapshot
from .removing import remove_tree


def list_brought(save: Snapshot, place: Destination) -> list[str]:
    """Files with frozen parameters that a place has, of an earlier save: no other folder has the name of theirs."""
    held = dict[str, int]()
    for folder in {os.path.dirname(each) for each in save.list_base()}:
        with suppress(FileNotFoundError):
            entries = list_folder(os.path.join(place.folder, folder))
            held |= {os.path.join(folder, name): entry.size for name, entry in entries.items()}
    return [each for each in save.list_base() if held.get(each) == os.path.getsize(os.path.join(save.folder, each))]


def bring_base(save: Snapshot, place: Destination, copy: Callable[[str, str], None]) -> None:
    """Bring frozen parameters that a place lacks, before anything names them; where the disk has them, as links."""
    lacking = set(save.list_base()).difference(list_brought(save, place))
    for each in sorted(lacking):
        source, final = os.path.join(save.folder, each), os.path.join(place.folder, each)
        os.makedirs(os.path.dirname(final), exist_ok=True)
        try:
            os.link(next(_list_same(source, place.folder, each), ""), final)
        except OSError:
            copy(source, final)
    for folder in {os.path.dirname(os.path.join(place.folder, each)) for each in lacking}:
        sync_folder(folder)
        sync_folder(os.path.dirname(folder))


def _list_same(source: str, place: str, path: str) -> Iterator[str]:
    """Files with the same in them: beside a place, as a trainer has another one for each save and removes whole ones,
    and in bases of other jobs there, as after a restart."""
    (folder, base), above = os.path.split(os.path.dirname(path)), os.path.dirname(place)
    found = [os.path.join(above, name, folder, base) for name in os.listdir(above)]
    inside = os.path.join(place, folder)
    found += [os.path.join(inside, name) for name in os.listdir(inside) if name.startswith(BASE) and name != base]
    for each in (os.path.join(folder, os.path.basename(path)) for folder in found):
        with suppress(OSError, UcpError):
            if os.path.getsize(each) == os.path.getsize(source) and sum_directory(each) == sum_directory(source):
                yield each


def find_base(place: str, tag: str) -> set[str]:
    """The folder beside a tag, by its path in the place, that has its frozen parameters."""
    try:
        reference = read_reference(resolve_published(os.path.join(place, tag)))
    except (OSError, UcpError):
        return set()
    return {os.path.join(os.path.dirname(tag), reference.folder)} if reference else set()


def remove_bases(place: Destination, bases: Set[str]) -> None:
    """Remove those of some folders with frozen parameters that no tag of anybody names, wherever it has been put."""
    with suppress(OSError, UcpError):  # what cannot be read may name one
        tags = [path for path in list_tree(place.folder) if os.path.basename(path) == FROZEN]
        named = [read_reference(os.path.dirname(os.path.join(place.folder, path))) for path in tags]
        kept = {reference.folder for reference in named if reference}
        for base in (base for base in bases if os.path.basename(base) not in kept):
            remove_tree(place.folder, base)
