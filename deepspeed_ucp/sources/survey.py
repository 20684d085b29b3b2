"""What is wrong with a checkpoint folder whose index cannot be built: all of it, file by file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ..atoms import AtomicIndex
from ..comm import Comm
from ..errors import CheckpointError, UcpError, UnsupportedError
from .family import arrange, expect_files, find_degrees, find_strangers
from .files import Listing, find_leftovers, list_sizes, sort_files
from .headers import FileHeader
from .reading import read_file

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flaw:
    """One thing that is wrong.

    Attributes:
        kind: ``header`` (unreadable, damaged, renamed), ``missing``, ``foreign`` (of another step, run or world size),
            ``leftover`` (of an earlier save), ``unsupported``, ``inconsistent``.
        file: name in the folder; empty where it is the folder's.
        text: what, and what to do.
    """

    kind: str
    file: str
    text: str


def survey_folder(folder: str, comm: Comm) -> list[Flaw]:
    """Everything that the headers of a normal checkpoint's files tell to be wrong; collective.

    Empty where the files as such fit: then what :func:`~.open.open_checkpoint` says is all there is to say.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    with comm.together():
        sizes = list_sizes(folder)
    names = sorted(name for name, size in sizes.items() if size >= 0)
    mine = [_try_header(folder, name) for name in names[comm.rank :: comm.size]]
    headers: dict[str, FileHeader] = {}
    flaws: list[Flaw] = []
    for header, flaw in (each for held in comm.gather(mine) for each in held):
        if header is not None:
            headers[header.name] = header
        elif flaw is not None:
            flaws.append(flaw)
    return sorted({*flaws, *_compare(folder, sizes, headers, {flaw.file for flaw in flaws})}, key=_order)


def _order(flaw: Flaw) -> tuple[str, str, str]:
    return flaw.file, flaw.kind, flaw.text


def _try_header(folder: str, name: str) -> tuple[FileHeader | None, Flaw | None]:
    try:
        return read_file(folder, name), None
    except UnsupportedError as error:
        return None, Flaw("unsupported", name, str(error))
    except UcpError as error:
        return None, Flaw("header", name, str(error))


def _compare(
    folder: str, sizes: Mapping[str, int], headers: Mapping[str, FileHeader], damaged: set[str]
) -> Iterator[Flaw]:
    """Hold the readable headers against each other and against the files that have to be there."""
    try:
        listing = sort_files(folder, dict(sizes))
        first = _choose(listing, headers)
        if not first:
            return
        expected = expect_files(listing, first)
    except UnsupportedError as error:
        yield Flaw("unsupported", "", str(error))
        return
    except CheckpointError as error:
        yield Flaw("missing", "", str(error))
        return
    absent = [name for found, name in expected if found is None]
    for name in absent:
        yield Flaw("missing", name, f"{os.path.join(folder, name)} is missing; copy it here or use another tag.")
    wanted = [found or name for found, name in expected]
    for name in find_leftovers(listing, [*wanted, *damaged, *(header.name for header in first)]):
        yield Flaw("leftover", name, _tell_leftover(folder, name))
    yield from _find_foreign(folder, wanted, first, headers, {*absent, *damaged})


def _choose(listing: Listing, headers: Mapping[str, FileHeader]) -> list[FileHeader]:
    """A model header and an optimizer header that goes with it, of those that can be read."""
    plain = _find(headers, (name for _, name in sorted(listing.model.items())))
    sharded = _find(headers, (name for _, name in sorted(listing.model_zero3.items())))
    optims = [headers[name] for _, name in sorted(listing.optim.items()) if name in headers]
    if plain is not None and plain.model is not None:
        if plain.model.optim and plain.model.optim.kind != "bf16":
            return [plain]
        kinds: tuple[str, ...] = ("zero12", "bf16")
        if mate := next((h for h in optims if h.optim and h.optim.kind in kinds), None):
            return [plain, mate]
        if not sharded:
            return [plain]
    if sharded is not None:
        mate = next((h for h in optims if h.optim and h.optim.kind == "zero3"), None)
        return [sharded, mate] if mate else [sharded]
    return []


def _find(headers: Mapping[str, T], names: Iterable[str]) -> T | None:
    return next((headers[name] for name in names if name in headers), None)


def _find_foreign(
    folder: str, names: list[str], first: list[FileHeader], headers: Mapping[str, FileHeader], lacking: set[str]
) -> Iterator[Flaw]:
    """Files of another step, run or world size. What is lacking is stood in for by another rank's header."""
    listing = sort_files(folder, dict.fromkeys(names, 0))
    model = first[0].model
    if model is None:
        return
    _, tp = find_degrees(listing, model)
    known = {name: headers[name] for name in names if name in headers}
    every = [*known.values(), *_stand_in(listing, known, tp)]
    main = min(every, key=lambda header: (header.model is None, header.name))
    try:
        save = arrange(listing, [main, *(header for header in every if header is not main)])
        found = list(find_strangers(save))
    except (UcpError, LookupError) as error:
        yield Flaw("inconsistent", "", str(error))
        return
    for name, text in found:
        if name not in lacking:
            yield Flaw("foreign", name, text)


def _stand_in(listing: Listing, known: Mapping[str, FileHeader], tp: int) -> Iterator[FileHeader]:
    """For each file without a header, one of its kind, of the nearest model-parallel rank that has one."""
    roles = (
        {(mp, 0): name for mp, name in listing.model.items()},
        {(mp, rank): name for (mp, rank), name in listing.model_zero3.items()},
        {(mp, rank): name for (_, mp, rank), name in listing.optim.items()},
        {(0, layer): name for (layer, _), name in listing.layers.items()},
    )
    for role in roles:
        have = {place: known[name] for place, name in role.items() if name in known}
        for (mp, rank), name in role.items():
            if name not in known and have:
                near = min(have, key=lambda at: (at[0] != mp, at[0] // tp != mp // tp, abs(at[1] - rank), at))
                yield replace(have[near], name=name)


def find_old_files(folder: str, index: AtomicIndex) -> list[Flaw]:
    """State files of an earlier save into the folder, which the checkpoint does not consist of."""
    listing = sort_files(folder, list_sizes(folder))
    found = find_leftovers(listing, _list_used(listing, index))
    return [Flaw("leftover", name, _tell_leftover(folder, name)) for name in found]


def _list_used(listing: Listing, index: AtomicIndex) -> Iterator[str]:
    topology = index.topology
    ranks = topology.tp * topology.pp
    held = {os.path.basename(file.path) for file in index.files}
    if topology.wrapper == "zero3":
        yield from (name for (mp, rank), name in listing.model_zero3.items() if mp < ranks and rank < topology.dp)
    else:
        yield from (name for mp, name in listing.model.items() if mp < ranks)
    prefixes = {prefix for (prefix, _, _), name in listing.optim.items() if name in held}
    for (prefix, mp, rank), name in listing.optim.items():
        if prefix in prefixes and mp < ranks and rank < topology.dp:
            yield name
    if held & set(listing.layers.values()):
        yield from (name for (_, rank), name in listing.layers.items() if rank < topology.tp)


def _tell_leftover(folder: str, name: str) -> str:
    return f"{os.path.join(folder, name)}: left by an earlier save into this folder; it is not loaded."
