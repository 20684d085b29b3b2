"""Opens a checkpoint folder: files → headers, each read by one rank → findings → AtomicIndex."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..atoms import AtomicIndex, SavedJob
from ..comm import Comm
from ..errors import CheckpointError, MismatchError, UcpError, UnsupportedError, shorten
from ..io.distance import choose_map
from ..io.read import sum_range
from ..io.store import open_stored
from .alike import Short, Shortening
from .atomic import survey_atomic
from .compare import find_late_files, find_strangers
from .expertfiles import ExpertForms
from .files import SEAL, Listing, holds_atoms, read_model_rank, sort_files, strip_writer
from .findings import COPY, WARNING, Finding, fold_findings, from_error, from_failure, make_error, sort_findings
from .headers import FileHeader
from .index import build_index, enabled
from .module import call_by_name
from .naming import GroupNames, NamedGroups, Naming, Rename
from .places import FileTable, find_files, list_files
from .reading import read_file
from .save import Save, arrange, complete_experts, count_ranks, expect_files, find_degrees, name_unsaved
from .swapped import add_swapped, adopt_sums

logger = logging.getLogger("deepspeed_ucp")

_LEFT = "files of an earlier save, which DeepSpeed's own load would take for this one's"

_OVERWRITTEN = (
    " DeepSpeed's fast writer cuts no file short that it writes over: a save into a tag that was there already may "
    "leave the end of a longer file. Save into a new tag, or remove the tag's folder before; take another tag now."
)

FindFirst = Callable[[Iterable[str]], FileHeader | None]
"""The header of the first of some files that can be read."""


@dataclass(frozen=True, slots=True)
class FolderReport:
    """A checkpoint's folder as its headers tell.

    Attributes:
        folder: which.
        atomic: it is an atomic checkpoint.
        index: the atomic view; with faults only as far as it can be had.
        findings: all that is wrong, the same on every rank, and all that is odd, on the first one.
    """

    folder: str
    atomic: bool
    index: AtomicIndex | None
    findings: tuple[Finding, ...]

    @property
    def fault(self) -> UcpError | None:
        """What keeps it from being loaded, of what the files themselves can be blamed for."""
        return make_error(each for each in self.findings if each.kind not in ("unnamed", "unsupported"))

    def require(self) -> AtomicIndex:
        """The index of a checkpoint without faults.

        Raises:
            UcpError: telling all faults.
        """
        error = make_error(self.findings)
        if error is not None:
            raise error
        if self.index is None:
            raise UcpError(f"{self.folder}: was not read.")
        return self.index

    def tell_warnings(self) -> None:
        """Log what is odd."""
        warnings = [finding for finding in self.findings if finding.severity == WARNING]
        if left := _list_left(warnings):
            logger.warning("%s: ignoring files of an earlier save: %s", self.folder, shorten(left))
        for finding in fold_findings(warnings):
            if finding.kind != "leftover":
                logger.warning("%s", finding.text)


def open_checkpoint(
    folder: str,
    comm: Comm,
    live_groups: GroupNames | None = None,
    live_hyper: Sequence[Mapping[str, Any]] = (),
    live_order: Mapping[str, str] | None = None,
    *,
    groups: NamedGroups | None = None,
    weights_only: bool = False,
    dual: bool = False,
    keys: Mapping[str, str] | None = None,
    rename: Rename | None = None,
    record: Callable[[], Iterable[str]] | None = None,
    ep: int = 0,
    also: Sequence[str] = (),
) -> AtomicIndex:
    """Read the headers of a checkpoint folder (each file by one rank) into the atomic view; collective.

    An atomic checkpoint (with a manifest, or as DeepSpeed's ``ds_to_universal`` writes it) is opened as well.

    Args:
        folder: the tag's folder.
        comm: the ranks that load. They may see different files, which together are the checkpoint.
        live_groups, live_hyper, live_order, groups, weights_only, dual, keys, rename, record, ep: what names the
            tensors of a source, as :class:`.naming.Naming` has it.
        also: the tag's folder in further places; files of the first one count.

    Raises:
        CheckpointError: missing, damaged, foreign or differing files; the same error on every rank.
        UnsupportedError: a kind of checkpoint that is not covered.
        MismatchError: stage 0 with other param groups than the live ones.
    """
    naming = Naming(live_groups, live_hyper, groups, weights_only=weights_only, dual=dual, keys=keys or {})
    naming = replace(naming, order=live_order or {}, record=record, ep=ep)
    report = survey_checkpoint(folder, comm, replace(naming, rename=rename) if rename else naming, also=also)
    index = comm.run(report.require)
    if comm.rank == 0:
        report.tell_warnings()
    return index


def survey_checkpoint(
    folder: str, comm: Comm, naming: Naming | None = None, *, also: Sequence[str] = ()
) -> FolderReport:
    """Look at the headers of a checkpoint's files, and find everything that is wrong with them; collective.

    Args:
        folder: the tag's folder.
        comm: the ranks that share the files.
        naming: what names the parameters of a stage-0 source.
        also: the tag's folder in further places.

    Raises:
        CheckpointError: the folder cannot be listed, or machines hold different files under one name.
        ConfigError: the groups are of another form.
    """
    where = find_files([folder, *also], comm)
    atomic = holds_atoms(where.entries)
    try:
        if atomic:
            index, findings = survey_atomic(where, comm)
        else:
            index, findings = _survey_normal(where, comm, naming or Naming())
    except (CheckpointError, UnsupportedError) as error:
        index, findings = None, from_error(folder, error)
    return FolderReport(folder, atomic, index, sort_findings(findings))


def look_at_job(folder: str, also: Sequence[str] = ()) -> SavedJob:
    """What ran around a saved engine, from one model-states file that this process sees.

    Args:
        folder: the tag's folder.
        also: the same in further places.

    Raises:
        UcpError: that file cannot be read, or there is none.
    """
    where = find_files([folder, *also], Comm())
    entries = where.entries
    name = "mp_rank_00_model_states.pt"
    if holds_atoms(entries):
        first = [where.read(name, lambda folder: read_file(folder, name))]
    else:
        first, _, faults = _find_save(sort_files(folder, where.sizes, where), lambda name: _read_header(where, name))
        error = make_error(faults)
        if not first and error is not None:
            raise error
    model = next((header.model for header in first if header.model), None)
    if model is None:
        raise CheckpointError(f"{folder}: holds no model states.")
    return SavedJob.read({**model.counters, **model.batch})


def lacks_states(folder: str) -> bool:
    """Whether a folder on this node is a save at stage 0 without any optimizer states, as far as it can be read."""
    try:
        if any(map(_holds_states, os.listdir(folder))):
            return False
        model = read_file(folder, "mp_rank_00_model_states.pt").model
    except (UcpError, OSError):
        return False
    return model is not None and model.optim is None


def seal_folder(folder: str, comm: Comm, *, local: bool = False) -> None:
    """Write the seal of a save that has come to its end, in place of an older one; collective.

    Args:
        folder: the tag's folder.
        local: every node has a folder of its own, and gets the seal.

    Raises:
        CheckpointError: the files are damaged or do not belong together; there is no seal then.
        UnsupportedError: a kind of checkpoint that is not covered.
        StorageError: the seal cannot be written.
    """
    from .seal import write_seal

    where = find_files([folder], comm) if local else list_files(folder, comm)
    save, findings = read_save(where, comm)

    def check() -> list[FileHeader]:
        error = make_error(findings)
        if error is not None:
            raise error
        return save.headers if save else []

    headers = comm.run(check)
    swaps = {header.name: header.size for header in headers if header.swap}
    found = where.share(list(swaps), lambda name: _sum_file(folder, name, swaps[name]), comm)
    sums = dict(zip(swaps, found, strict=True))
    sealed = [replace(header, crc=sums.get(header.name, header.crc)) for header in headers]
    if where.access is None:
        comm.once(lambda: write_seal(folder, sealed))
    else:
        hosts = where.list_by_host()
        comm.run(lambda: write_seal(folder, sealed, hosts) if where.is_first else None)


def _sum_file(folder: str, name: str, size: int) -> int:
    with open_stored(os.path.join(folder, name), os.POSIX_FADV_SEQUENTIAL) as file:
        return sum_range(file, 0, size)


def _list_left(findings: Iterable[Finding]) -> list[str]:
    """Files of an earlier save."""
    return [finding.file for finding in findings if finding.kind == "leftover" and not finding.names]


def _survey_normal(where: FileTable, comm: Comm, naming: Naming) -> tuple[AtomicIndex | None, list[Finding]]:
    """The index of a normal checkpoint and everything that is wrong with its files; collective."""
    save, findings = read_save(where, comm)
    if naming.weights_only and make_error(findings) is not None and where.access is None:
        save, findings = _read_weights(where, comm) or (save, findings)
    if save is not None and SEAL in where.entries:
        faults, sums = where.once(SEAL, lambda: _compare_seal(where.find(SEAL)[0], save), comm)
        findings += _keep_new(faults, findings)
        adopt_sums(save, sums)
    if save is None or make_error(findings) is not None:
        return None, findings
    call_by_name(save, naming.keys)
    index, more = _build(save, naming)
    if index is not None and any(name.endswith("model_states.pt") for name in _list_left(findings)):
        index = index.change(unnoticed=(*index.limits.unnoticed, _LEFT))
    return index, [*findings, *more, *find_unsaved(save)]


def _read_weights(where: FileTable, comm: Comm) -> tuple[Save, list[Finding]] | None:
    """What of a save is whole without its optimizer's files, where that holds the weights; collective."""
    own = tuple({name: entry for name, entry in each.items() if not _holds_states(name)} for each in where.own)
    kept = {name: entry for name, entry in where.entries.items() if not _holds_states(name)}
    if len(kept) == len(where.entries):
        return None
    save, findings = read_save(replace(where, entries=kept, own=own), comm)
    if save is None or make_error(findings) is not None:
        return None
    text = (
        f"{where.folder}: its files of optimizer states are not whole, and are left out: the weights alone are wanted."
    )
    return save, [*findings, Finding("missing", "", text, WARNING)]


def _holds_states(name: str) -> bool:
    return name.endswith("optim_states.pt")


def _compare_seal(folder: str, save: Save) -> tuple[list[Finding], dict[str, int]]:
    """As :func:`.seal.compare_seal`. What checks a seal's form takes long to import."""
    from .seal import compare_seal

    return compare_seal(folder, save.headers)


def _build(save: Save, naming: Naming) -> tuple[AtomicIndex | None, list[Finding]]:
    """The index; without its optimizer where nothing names the states, which is a fault if they are wanted."""
    folder, unnamed = save.listing.folder, list[Finding]()
    try:
        try:
            return build_index(save, naming), []
        except MismatchError as error:
            unnamed = [] if naming.weights_only else from_error(folder, error)
            return build_index(save, replace(naming, optimizer=False)), unnamed
    except (CheckpointError, UnsupportedError, MismatchError) as error:
        return None, [*unnamed, *from_error(folder, error)]


def read_save(where: FileTable, comm: Comm) -> tuple[Save | None, list[Finding]]:
    """Read the headers of a save's files, each by one rank that sees it, and hold them against each other; collective.

    Args:
        where: its files, and who sees which.
        comm: the ranks that share the files.
    """
    folder = where.folder
    try:
        listing = sort_files(folder, where.sizes, where)
    except (CheckpointError, UnsupportedError) as error:
        return None, _tell_none(folder, error)
    looks = _Looks(where, comm.rank if comm.size > 1 else None)
    first, expected, faults = _find_first(looks, listing, comm)
    if not first:
        return None, faults
    headers, unread = _read_rest(looks, listing, first, expected, comm)
    save = arrange(listing, headers)
    findings = list(faults)
    missing = _find_missing(listing, first, expected, _tell_holders(where, comm))
    for more in (unread, missing, find_strangers(save), _find_strange_variants(where, save, comm)):
        findings += _keep_new(more, findings)
    if make_error(findings) is None:
        findings += add_swapped(save)
    findings += _find_left(listing, {SEAL, *expected, *(header.name for header in save.headers)})
    return save, findings + (_find_late(where, headers) if comm.rank == 0 else [])


def _find_late(where: FileTable, headers: Sequence[FileHeader]) -> list[Finding]:
    """Warnings of files that were written at another time; of places with copies of one save in each by itself."""
    names = [header.name for header in headers]
    found = find_late_files(where.folder, where.entries, names)
    if not found or not where.holds_copies({header.name: header.crc for header in headers}):
        return found
    each = zip(where.folders, where.own, strict=True)
    return [finding for folder, entries in each for finding in find_late_files(folder, entries, names)]


class _Looks(dict[str, FileHeader | Finding]):
    """What this rank has looked at: the headers of files, or why they cannot be read."""

    def __init__(self, where: FileTable, rank: int | None) -> None:
        self.where = where
        self._reader = "" if rank is None else f" (looked at by rank {rank})"

    def __missing__(self, name: str) -> FileHeader | Finding:
        look = self[name] = _read_header(self.where, name, self._reader)
        return look


def _find_first(looks: _Looks, listing: Listing, comm: Comm) -> tuple[list[FileHeader], list[str], list[Finding]]:
    """As :func:`_find_save`; one rank looks where it sees all files, else each file's own readers; collective."""
    where = looks.where
    if where.access is not None:
        return _find_save(listing, lambda name: where.once(name, lambda: looks[name], comm))
    if comm.rank:  # meanwhile the others look at what they are likely to be given, one file each
        held = (sorted(files.items()) for files in (listing.model or listing.model_zero3, listing.optim))
        further = [name for files in held for _, name in files[1:]]
        with suppress(Exception):  # if it is wanted after all, it fails in a collective
            looks[further[comm.rank - 1]]
    return comm.once(lambda: _find_save(listing, looks.__getitem__))


def _tell_holders(where: FileTable, comm: Comm) -> str:
    """Which machine has, and had, which files, in words; empty where all see the same; collective."""
    told = where.tell_hosts()
    if not told:
        return ""
    sealed: dict[str, list[str]] = {}
    if SEAL in where.entries:
        sealed = where.once(SEAL, lambda: _read_hosts(where.find(SEAL)[0]), comm)
    gone = [f"{host} had {shorten(lost)}" for host, names in sealed.items() if (lost := _lack(names, where))]
    return "; ".join([*gone, told])


def _lack(names: Iterable[str], where: FileTable) -> list[str]:
    return [name for name in names if name not in where.entries]


def _read_hosts(folder: str) -> dict[str, list[str]]:
    from .seal import read_seal

    try:
        return read_seal(os.path.join(folder, SEAL)).hosts
    except (CheckpointError, FileNotFoundError):
        return {}


def _find_strange_variants(where: FileTable, save: Save, comm: Comm) -> list[Finding]:
    """Faults of files that further nodes wrote under a name of this save's, for themselves; collective."""
    if where.access is None:
        return []
    told = comm.each(lambda: [_read_variant(where, name) for name in where.variants])
    variants = [each for held in told for each in held if each.model]
    models = [[*held] for held in save.models]
    for each in variants:
        mp = read_model_rank(each.name.partition(" ")[0])
        if mp is not None and mp < len(models):
            models[mp].append(_slim(each, save.main, repeats=True))
    names = {each.name for each in variants}
    return [each for each in find_strangers(replace(save, models=models)) if each.file in names and not each.warning]


def _read_variant(where: FileTable, name: str) -> FileHeader:
    """The header of a file of this machine's own; without anything in it where it cannot be read."""
    place = next(place for place, odd in sorted(where.odd) if odd == name)
    told = f"{name} of {socket.gethostname()}"
    try:
        return replace(read_file(where.folders[place], name), name=told)
    except (CheckpointError, UnsupportedError):
        return FileHeader(told, 0, None)


def find_unsaved(save: Save) -> list[Finding]:
    """State of the run that DeepSpeed saves nowhere, by the ds_config."""
    autocast = save.main.config.get("torch_autocast") or {}
    halves = ("fp16", "float16", "half", "torch.float16")  # all that DeepSpeed takes for it (runtime/config.py)
    if not autocast.get("enabled") or autocast.get("dtype") not in halves:
        return []
    text = (
        f"{save.path(save.main)}: was saved under torch_autocast in fp16, whose GradScaler DeepSpeed does not save. A "
        "run that scales its loss starts with the scale that it is configured with."
    )
    return [Finding("unsaved", save.main.name, text, WARNING)]


def _find_left(listing: Listing, expected: Iterable[str]) -> Iterator[Finding]:
    """A warning for every file that no load takes."""
    for name in sorted(name for name, size in listing.sizes.items() if size >= 0 and name not in expected):
        of = listing.copies.get(name)
        why = f"another rank's copy of {of}" if of else "left by an earlier save into this folder"
        text = f"{listing.path(name)}: {why}; it is not loaded."
        yield Finding("leftover", name, text, WARNING, (of,) if of else ())


def _keep_new(more: Iterable[Finding], findings: Sequence[Finding]) -> list[Finding]:
    """Those of files of which no fault is told yet."""
    told = {finding.file for finding in findings if not finding.warning}
    return [finding for finding in more if finding.file not in told]


def _tell_none(folder: str, error: UcpError) -> list[Finding]:
    """What keeps a folder from being a save at all."""
    return [replace(each, kind="missing") if each.kind != "unsupported" else each for each in from_error(folder, error)]


def _read_header(where: FileTable, name: str, reader: str = "") -> FileHeader | Finding:
    """A file's header from the first of its places where it can be read, or why it cannot be.

    Of what has no checksums the first place's counts: nothing would hold its bytes against another place's header.

    Args:
        reader: who looks at it, in words.
    """
    first = where.find(name)[0]

    def read(folder: str) -> FileHeader:
        header = read_file(folder, name)
        if folder != first and not header.checked:
            raise CheckpointError(f"{os.path.join(folder, name)}: has no checksums, which would tell whose it is.")
        return header

    try:
        return where.read(name, read)
    except UnsupportedError as error:
        return Finding("unsupported", name, str(error))
    except CheckpointError as error:
        # What the system refuses, it may refuse on one node alone; damage is the same for all.
        told = reader if isinstance(error.__cause__, OSError) else ""
        found = from_failure("header", name, error)
        return replace(found, text=f"{found.text}{told}{_OVERWRITTEN if strip_writer(name) != name else ''}")


def _find_save(
    listing: Listing, read: Callable[[str], FileHeader | Finding]
) -> tuple[list[FileHeader], list[str], list[Finding]]:
    """What the folder holds, from one model file and one optimizer file.

    Args:
        read: a file's header, or why it cannot be read.

    Returns:
        Their headers; names of all files of their save; what is wrong with files that were looked at.
    """
    looks: dict[str, FileHeader | Finding] = {}

    def find_first(names: Iterable[str]) -> FileHeader | None:
        for name in names:
            look = looks[name] = looks.get(name) or read(name)
            if isinstance(look, FileHeader):
                return look
        return None

    try:
        first = _choose(listing, find_first)
        first[0] = _infer_degrees(listing, _complete(listing, first, find_first), find_first)
        expected = expect_files(listing, first, _look_at_stages(listing, first[0], find_first))
    except (CheckpointError, UnsupportedError) as error:
        faults = [look for look in looks.values() if isinstance(look, Finding)]
        return [], [], faults or _tell_none(listing.folder, error)
    return first, expected, [look for name in expected if isinstance(look := looks.get(name), Finding)]


def _complete(listing: Listing, first: Sequence[FileHeader], find_first: FindFirst) -> FileHeader:
    """The first rank's model states, with what older releases leave out of them where there are experts."""
    header, others = first[0], first[1:]
    if not others and header.model and header.model.experts:
        held = find_first(name for (mp, _), name in sorted(listing.expert_optim.items()) if mp == 0)
        others = [held] if held else []
    return complete_experts(header, *others[:1])


def _infer_degrees(listing: Listing, first: FileHeader, find_first: FindFirst) -> FileHeader:
    """The first rank's model states with the parallel degrees that older releases do not tell.

    Of a pipeline with experts there are no layer files either; the ranks of its first stage hold the same names.
    """
    model = first.model
    if model is None or model.module is None or model.degrees or not model.experts:
        return first
    (ranks, _), tp = count_ranks(model), 1
    while tp < ranks and tp in listing.model:
        header = find_first([listing.model[tp]])
        if header is None or header.model is None or set(header.model.module or ()) != set(model.module):
            break
        tp += 1
    return replace(first, model=replace(model, degrees=(ranks // tp, tp)))


def _look_at_stages(listing: Listing, first: FileHeader, find_first: FindFirst) -> list[FileHeader]:
    """The model states of the further stages of a pipeline with experts: each tells of its own layers alone."""
    model = first.model
    if model is None or model.module is None or not model.experts:
        return []
    pp, tp = find_degrees(listing, model)
    names = [name for mp, name in sorted(listing.model.items()) if 0 < mp < pp * tp and mp % tp == 0]
    return [header for name in names if (header := find_first([name]))]


def _choose(listing: Listing, find_first: FindFirst) -> list[FileHeader]:
    """A model header and, where there is one, an optimizer header that goes with it; both of the lowest rank's."""
    plain = find_first(name for _, name in sorted(listing.model.items()))
    sharded = find_first(name for _, name in sorted(listing.model_zero3.items()))
    candidates = []
    mate = _find_mate(listing, find_first, plain, ("zero12", "bf16"))
    if plain and plain.model and plain.model.optim and plain.model.optim.kind != "bf16":
        candidates.append([plain])  # shards of ZeRO 1/2 beside it lost their model file to it: leftovers
    elif plain and mate:
        candidates.append([plain, mate])
    mate = _find_mate(listing, find_first, sharded, ("zero3",))
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
    listing: Listing, find_first: FindFirst, model: FileHeader | None, kinds: tuple[str, ...]
) -> FileHeader | None:
    """The lowest rank's optimizer file that goes with a model file; files of the saved precision's prefix come first.

    Prefixes: engine.py ``_get_zero_ckpt_prefix``.
    """
    if model is None:
        return None
    usual = "bf16_" if enabled(model.config, "bf16", "bfloat16") else ""
    for prefix in sorted({prefix for prefix, _, _ in listing.optim}, key=lambda each: (each != usual, each)):
        header = find_first(name for (each, _, _), name in sorted(listing.optim.items()) if each == prefix)
        if header and header.optim and header.optim.kind in kinds:
            return header
    return None


def _read_rest(
    looks: _Looks, listing: Listing, first: Sequence[FileHeader], expected: Sequence[str], comm: Comm
) -> tuple[list[FileHeader], list[Finding]]:
    """The headers of a save's files, each read by one rank, with the ``first`` in front; why others cannot be read."""
    known = {header.name for header in first}
    names = [name for name in expected if name in listing.sizes and name not in known]
    further = {name for (_, rank), name in listing.model_zero3.items() if rank}
    shortening, forms = Shortening(first[-1]), ExpertForms()

    def read(name: str) -> FileHeader | Short | Finding:
        look = looks[name]
        del looks[name]  # of thousands the short form is kept alone
        if isinstance(look, Finding):
            return look
        if look.layer is not None:
            return replace(look, layer=forms.shorten(look.layer))
        return shortening.cut(_slim(look, first[0], repeats=name in further))

    told = [
        shortening.restore(look) if isinstance(look, Short) else look
        for look in looks.where.share(names, read, comm, choose_map(listing.folder), first=1)
    ]
    headers = [look for look in told if isinstance(look, FileHeader)]
    return [*first, *headers], [look for look in told if isinstance(look, Finding)]


def _slim(header: FileHeader, first: FileHeader, *, repeats: bool) -> FileHeader:
    """A header without what the first ranks' headers tell as well (``repeats``): headers travel to all ranks."""
    model = header.model
    if model is None or first.model is None:
        return header
    hints = {} if repeats or model.hints == first.model.hints else model.hints
    model = replace(model, degrees=model.degrees or first.model.degrees)
    if repeats:
        model = replace(model, module={}, buffers=(), param_shapes=(), shared={}, placements={})
    return replace(header, model=replace(model, hints=hints, others=()))


def _find_missing(
    listing: Listing, first: Sequence[FileHeader], expected: Iterable[str], holders: str
) -> list[Finding]:
    """Faults of files that are not there; ``holders`` says which machine has which, where they see different ones."""
    model, lost = first[0].model, name_unsaved(listing, first)
    mp, dp = count_ranks(model) if model else (1, 1)
    ranks = f"{dp} data-parallel ranks" + (f" of {mp} model-parallel ones" if mp > 1 else "")
    text = f"the checkpoint was saved by {ranks} and needs all of their files. {COPY}"
    text += f" The machines see different files of it: {holders}." if holders else ""
    absent = [name for name in expected if name not in listing.sizes]
    return [
        Finding("missing", name, f"{listing.path(name)} is missing; {_NEVER_SAVED if name in lost else text}")
        for name in absent
    ]


_NEVER_SAVED = (
    "DeepSpeed writes no model states of a tensor-parallel rank whose experts a rank before it holds as well, and what "
    "such a rank alone held is lost. Save with at least as many expert-parallel ranks as tensor-parallel ones and "
    "without use_data_before_expert_parallelism, or with expert tensor parallelism."
)
