"""The files of a normal checkpoint: which save they make up, and what keeps them from being one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..atoms import AtomicIndex
from ..comm import Comm
from ..errors import CheckpointError, MismatchError, UcpError, UnsupportedError, shorten
from .family import arrange, expect_files, find_strangers
from .files import SEAL, Entry, Listing, find_leftovers, list_entries, sort_files
from .findings import WARNING, Finding, from_error, make_error
from .headers import FileHeader
from .index import build_index, enabled
from .naming import GroupNames, NamedGroups
from .reading import read_file
from .times import find_late_files

_ZERO12, _ZERO3 = ("zero12", "bf16"), ("zero3",)


@dataclass(frozen=True, slots=True)
class Naming:
    """What names the parameters of a stage-0 source, which does not name them itself (see ``open_checkpoint``)."""

    live: GroupNames | None = None
    hyper: Sequence[Mapping[str, Any]] = ()
    groups: NamedGroups | None = None
    weights_only: bool = False


@dataclass(slots=True)
class _Headers:
    """Headers that could be read, by name, and why others could not; ``reader`` says who looks at them."""

    folder: str
    known: dict[str, FileHeader]
    faults: dict[str, Finding]
    reader: str = ""

    def read(self, name: str) -> FileHeader | None:
        """A file's header, read once; None where it cannot be read."""
        if name not in self.known and name not in self.faults:
            try:
                self.known[name] = read_file(self.folder, name)
            except UnsupportedError as error:
                self.faults[name] = Finding("unsupported", name, str(error))
            except CheckpointError as error:
                # What the system refuses, it may refuse on one node alone; damage is the same for all.
                where = self.reader if isinstance(error.__cause__, OSError) else ""
                self.faults[name] = Finding("header", name, f"{error}{where}")
        return self.known.get(name)

    def first(self, names: Iterable[str]) -> FileHeader | None:
        """The first of some files that can be read."""
        return next((header for name in names if (header := self.read(name))), None)


@dataclass(frozen=True, slots=True)
class SaveHeaders:
    """The headers of a save's files, the first rank's model states in front, and what is wrong with the files."""

    listing: Listing
    headers: Sequence[FileHeader]
    findings: list[Finding]


def survey_normal(
    folder: str, comm: Comm, entries: Mapping[str, Entry], naming: Naming
) -> tuple[AtomicIndex | None, list[Finding]]:
    """The index of a normal checkpoint and everything that is wrong with its files; collective.

    Raises:
        ConfigError: the groups are of another form.
    """
    save = read_save(folder, comm, entries)
    if make_error(save.findings) is not None:
        return None, save.findings
    index, more = _build(save.listing, save.headers, naming)
    return index, [*save.findings, *more]


def _compare_seal(folder: str, headers: Sequence[FileHeader]) -> list[Finding]:
    """Faults of files that are not those that were sealed. What checks a seal's form takes long to import."""
    if not os.path.lexists(os.path.join(folder, SEAL)):
        return []
    from .seal import compare_seal

    return compare_seal(folder, headers)


def read_save(
    folder: str, comm: Comm, entries: Mapping[str, Entry] | None = None, *, sealed: bool = True
) -> SaveHeaders:
    """Read the headers of a save's files, each by one rank, and hold them against each other; collective.

    Args:
        folder: the tag's folder.
        comm: the ranks that share the files.
        entries: what the folder holds, the same on every rank.
        sealed: hold the files against the seal as well, where there is one.
    """
    known = comm.once(lambda: list_entries(folder)) if entries is None else entries
    listing = Listing(folder, {})
    try:
        listing = sort_files(folder, {name: entry.size for name, entry in known.items()})
    except (CheckpointError, UnsupportedError) as error:
        return SaveHeaders(listing, [], _tell_none(folder, error))
    first, expected, found = comm.once(lambda: _find_save(listing))
    if not first:
        return SaveHeaders(listing, [], found)
    headers, unread = _read_rest(listing, first, expected, comm)
    found += [*unread, *_find_missing(listing, first[0], expected), *find_strangers(arrange(listing, headers))]
    if sealed:
        found += comm.once(lambda: _compare_seal(folder, headers))
    faults = {finding.file: finding for finding in reversed(found)}  # the first that is told of each file
    more = comm.once(lambda: find_late_files(folder, known, [header.name for header in headers]))
    return SaveHeaders(listing, headers, [*faults.values(), *_list_leftovers(listing, expected), *more])


def _find_missing(listing: Listing, first: FileHeader, expected: Mapping[str, bool]) -> list[Finding]:
    counters = first.model.counters if first.model else {}
    dp, mp = int(counters.get("dp_world_size", 1)), int(counters.get("mp_world_size", 1))
    ranks = f"{dp} data-parallel ranks" + (f" of {mp} model-parallel ones" if mp > 1 else "")
    text = f"the checkpoint was saved by {ranks} and needs all of their files. Copy it here or load another tag."
    absent = [name for name, in_folder in expected.items() if not in_folder]
    return [Finding("missing", name, f"{listing.path(name)} is missing; {text}") for name in absent]


def _list_leftovers(listing: Listing, expected: Iterable[str]) -> list[Finding]:
    text = "left by an earlier save into this folder; it is not loaded."
    left = find_leftovers(listing, expected)
    return [Finding("leftover", name, f"{listing.path(name)}: {text}", WARNING) for name in left]


def _tell_none(folder: str, error: UcpError) -> list[Finding]:
    """What keeps a folder from being a save at all."""
    return [replace(each, kind="missing") if each.kind != "unsupported" else each for each in from_error(folder, error)]


def _find_save(listing: Listing) -> tuple[list[FileHeader], dict[str, bool], list[Finding]]:
    """What the folder holds, from one model file and one optimizer file.

    Returns:
        Their headers; per file of their save whether it is there; what is wrong with files that were looked at.
    """
    headers = _Headers(listing.folder, {}, {})
    try:
        first = _choose(listing, headers)
        expected = {found or name: found is not None for found, name in expect_files(listing, first)}
    except (CheckpointError, UnsupportedError) as error:
        return [], {}, [*headers.faults.values()] or _tell_none(listing.folder, error)
    return first, expected, [fault for name, fault in headers.faults.items() if name in expected]


def _choose(listing: Listing, headers: _Headers) -> list[FileHeader]:
    """A model header and, where there is one, an optimizer header that goes with it; both of the lowest rank's."""
    plain = headers.first(name for _, name in sorted(listing.model.items()))
    sharded = headers.first(name for _, name in sorted(listing.model_zero3.items()))
    candidates = []
    mate = _find_mate(listing, headers, plain, _ZERO12)
    if plain and plain.model and plain.model.optim and plain.model.optim.kind != "bf16":
        candidates.append([plain])  # shards of ZeRO 1/2 beside it lost their model file to it: leftovers
    elif plain and mate:
        candidates.append([plain, mate])
    mate = _find_mate(listing, headers, sharded, _ZERO3)
    if sharded and mate:
        candidates.append([sharded, mate])
    if len(candidates) > 1:
        raise CheckpointError(
            f"{listing.folder}: holds the files of two saves ({candidates[0][0].name} and {candidates[1][-1].name} do "
            "not belong together). Remove the older save's files."
        )
    if candidates:
        return candidates[0]
    if plain and plain.model and (plain.model.module or listing.layers) and not listing.optim:
        return [plain]  # the weights alone: enough for load_optimizer_states=False
    known = next((header.name for header in (plain, sharded) if header), "the model states")
    raise CheckpointError(
        f"{listing.folder}: the optimizer states that go with {known} are missing ({shorten(sorted(listing.sizes))}). "
        "Copy the whole folder, or load with load_optimizer_states=False where the model states hold the weights "
        "(ZeRO 0-2)."
    )


def _find_mate(
    listing: Listing, headers: _Headers, model: FileHeader | None, kinds: tuple[str, ...]
) -> FileHeader | None:
    """The lowest rank's optimizer file that goes with a model file."""
    for prefix in _list_prefixes(listing, model) if model else ():
        names = (name for (each, _, _), name in sorted(listing.optim.items()) if each == prefix)
        header = headers.first(names)
        if header and header.optim and header.optim.kind in kinds:
            return header
    return None


def _list_prefixes(listing: Listing, model: FileHeader) -> list[str]:
    """Prefixes of optimizer files, the saved precision's own first (engine.py ``_get_zero_ckpt_prefix``)."""
    config = model.model.config if model.model else {}
    expected = "bf16_" if enabled(config, "bf16", "bfloat16") else ""
    others = sorted({prefix for prefix, _, _ in listing.optim} - {expected})
    return [expected, *others]


def _read_rest(
    listing: Listing, first: Sequence[FileHeader], expected: Mapping[str, bool], comm: Comm
) -> tuple[list[FileHeader], list[Finding]]:
    """The headers of a save's files, each read by one rank, with the ``first`` in front; why others cannot be read."""
    known = {header.name for header in first}
    names = [name for name, in_folder in expected.items() if in_folder and name not in known]
    further = {name for (_, rank), name in listing.model_zero3.items() if rank}

    def read() -> tuple[list[FileHeader], list[Finding]]:
        headers = _Headers(listing.folder, {}, {}, f" (looked at by rank {comm.rank})" if comm.size > 1 else "")
        held = [headers.read(name) for name in names[comm.rank :: comm.size]]
        slim = [_slim(header, first[0], repeats=header.name in further) for header in held if header]
        return slim, list(headers.faults.values())

    parts = comm.each(read)
    by_name = {header.name: header for held, _ in parts for header in held}
    headers = [*first, *(by_name[name] for name in names if name in by_name)]
    return headers, [fault for _, faults in parts for fault in faults]


def _slim(header: FileHeader, first: FileHeader, *, repeats: bool) -> FileHeader:
    """A header without what the first ranks' headers tell as well (``repeats``): headers travel to all ranks."""
    model = header.model
    if model is None or first.model is None:
        return header
    hints = {} if model.hints == first.model.hints else model.hints
    if repeats:
        model = replace(model, module={}, buffers=(), param_shapes=(), shared={})
        hints = {}
    return replace(header, model=replace(model, hints=hints, others=()))


def _build(listing: Listing, headers: Sequence[FileHeader], naming: Naming) -> tuple[AtomicIndex | None, list[Finding]]:
    """The index; without its optimizer where nothing names the states, which is a fault if they are wanted."""

    def build(**how: Any) -> AtomicIndex:
        return build_index(listing, headers, naming.live, **how)

    more: list[Finding] = []
    try:
        try:
            return build(live_hyper=naming.hyper, groups=naming.groups), more
        except MismatchError as error:
            more = [] if naming.weights_only else from_error(listing.folder, error)
            return build(optimizer=False), more
    except (CheckpointError, UnsupportedError, MismatchError) as error:
        return None, [*more, *from_error(listing.folder, error)]
