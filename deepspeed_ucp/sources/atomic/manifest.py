"""The manifest of an atomic checkpoint: all that its index needs, and where it comes from, in one JSON file."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Required, get_type_hints

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ...atoms import ITEMSIZE, AtomicIndex, GroupInfo, ParamKey, Record, count
from ...errors import CheckpointError, UnsupportedError, shorten
from ...experts import holds_experts
from ...io.jsonfile import parse_json, read_bounded
from ...io.store import find_change
from ...patterns import Pattern, record_pattern
from ...topology import Topology
from ...version import __version__
from ..files import MANIFEST
from .plainjson import decode, dump_json, is_plain

FORMAT = 2
_KIND = "deepspeed_ucp atomic checkpoint"


Text = Annotated[str, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0)]
Number = StrictBool | StrictInt | StrictFloat | None


@dataclass(frozen=True, slots=True)
class AtomRecord:
    """One atom as it lies in an atomic checkpoint.

    Attributes:
        name, state, dtype, instance: the atom's.
        shape: logical shape, rows of vocabulary padding included.
        vocab: rows that mean something where dimension 0 is a padded vocabulary.
        file: path of its file, relative to the checkpoint's folder.
        offset, nbytes, crc: where its elements lie in the file, and their CRC32.
        size: of the file.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: Text
    state: Text
    dtype: Text
    shape: tuple[Count, ...]
    vocab: Count | None
    file: Text
    offset: Count
    nbytes: Count
    crc: Count
    size: Count
    instance: Count = 0


@dataclass(frozen=True, slots=True)
class StateRecord:
    """A file without atoms (states, a parameter's step): path relative to the folder, bytes, CRC32 of its directory."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: Text
    size: Count
    crc: Count


class PatternRecord(TypedDict):
    """How a parameter was united: the pattern as data, and what told it."""

    pattern: dict[str, Any]
    origin: str


class SourceFile(TypedDict, total=False):
    """A file of the source, as :func:`fingerprint` tells of it."""

    name: Required[str]
    size: Required[int]
    header_crc: int | None
    records: list[list[int | None]]
    changed: int


class Fingerprint(TypedDict):
    """What tells the source from every other checkpoint."""

    files: list[SourceFile]
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """An atomic checkpoint's description.

    Attributes:
        version: of the format.
        package: version of deepspeed_ucp that wrote it.
        fingerprint: of the source, see :func:`fingerprint`.
        source: the source's topology as data, without its flat buffers.
        atoms: by name, state and instance.
        states: files without atoms.
        state_file: the one that carries scheduler, counters and client state.
        patterns: name → {"pattern": as data, "origin": what told it}.
        scalars, scalar_dtypes, groups, counters, scaler, clip_grad, optimizer: of the run, as in ``RunState``.
        aliases, buffers, instances, hints: of the model, as in ``ModelInfo``.
        view: of the source, see :func:`digest_view`.
        verified: every byte of the source was held against its checksum.
        dropped: as in ``Limits``.
        kind: the same in every manifest; tells the file from other JSON.
        fused: parameters in which all experts of a layer lie one behind the other: name → how many; the index has an
            atom for each. Not written where there are none.
        optimizer_params: as in ``RunState``. Not written where there are none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    version: Count
    package: Text
    fingerprint: Fingerprint
    source: dict[Text, Any]
    atoms: tuple[AtomRecord, ...]
    states: tuple[StateRecord, ...]
    state_file: Text
    patterns: dict[Text, PatternRecord]
    scalars: dict[ParamKey, dict[Text, Number]]
    scalar_dtypes: dict[Text, Text]
    groups: tuple[GroupInfo, ...]
    aliases: dict[Text, Text]
    buffers: tuple[Text, ...]
    counters: dict[Text, Number]
    scaler: dict[Text, Number]
    clip_grad: Number
    optimizer: Text | None
    instances: dict[Text, Count]
    hints: dict[Text, Any]
    view: Text
    verified: Annotated[bool, Field(strict=True)]
    dropped: Text
    kind: Text = field(default=_KIND)
    fused: dict[Text, Count] = field(default_factory=dict)
    optimizer_params: dict[Text, Number] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, int]:
        """Bytes of every file that it lists."""
        return {atom.file: atom.size for atom in self.atoms} | {state.name: state.size for state in self.states}

    def to_json(self) -> str:
        """One line of ASCII, the same for equal manifests; its ``digest`` is the SHA-256 of the rest."""
        told = {key: value for key, value in asdict(self).items() if key not in ("fused", "optimizer_params") or value}
        told["digest"] = _sum(told)
        return dump_json(told) + "\n"


_MOST_BYTES = 1 << 31
"""Of a manifest, which has an entry for each state of each parameter."""

_MANIFEST = TypeAdapter(Manifest)


def _sum(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(dict(told)).encode()).hexdigest()


def parse_manifest(text: str, path: str) -> Manifest:
    """A manifest from its file's text; ``path`` is for messages.

    Raises:
        CheckpointError: not a manifest, or damaged.
        UnsupportedError: of an unknown format.
    """
    try:
        told = parse_json(text.encode(), path, strict=True, object_hook=decode)
        _check_form(told, path)
        found = _MANIFEST.validate_python(told)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise CheckpointError(f"{where} is of another form than expected ({fault['msg']}).", path=path) from None
    _check_entries(found, path)
    return found


def _check_form(told: Any, path: str) -> None:
    """Kind, format, and the digest, which is taken out."""
    if told.get("kind") != _KIND:
        raise CheckpointError("is no manifest of an atomic checkpoint.", path=path)
    if told.get("version") != FORMAT:
        raise UnsupportedError(
            f"is of format {told.get('version')!r}, this release reads format {FORMAT}. It was written by "
            f"deepspeed_ucp {told.get('package', 'of an unknown version')}: update deepspeed_ucp, or convert again.",
            path=path,
        )
    digest = told.pop("digest", None)
    if digest != _sum(told):
        raise CheckpointError(
            f"its digest is {digest}, its contents have {_sum(told)}; the file is damaged or was edited. "
            "Restore it from a copy, or convert again.",
            path=path,
        )


def _check_entries(found: Manifest, path: str) -> None:
    names = [*(atom.file for atom in found.atoms), *(state.name for state in found.states), found.state_file]
    names += [
        *(param.name for param in found.scalars),
        *(part for atom in found.atoms for part in (atom.name, atom.state)),
    ]
    if odd := sorted({name for name in names if _leads_out(name)}):
        raise CheckpointError(f"names files outside of its folder: {shorten(odd)}. Do not trust it.", path=path)
    if found.state_file not in {state.name for state in found.states}:
        raise CheckpointError(f"lists no state file {found.state_file}.", path=path)
    fused = [(atom, found.fused[atom.name]) for atom in found.atoms if atom.name in found.fused]
    if unfit := [f"{atom.name} ({atom.state})" for atom, experts in fused if not holds_experts(atom.shape, experts)]:
        raise CheckpointError(f"holds other numbers of experts than it says: {shorten(unfit)}.", path=path)
    if loops := sorted(alias for alias, name in found.aliases.items() if name in found.aliases):
        raise CheckpointError(f"aliases of aliases: {shorten(loops)}.", path=path)
    if unfit := [f"{atom.name} ({atom.state})" for atom in found.atoms if not _fits(atom)]:
        raise CheckpointError(f"shape, dtype and bytes contradict each other: {shorten(unfit)}.", path=path)
    sizes: dict[str, set[int]] = defaultdict(set)
    for each in found.atoms:
        sizes[each.file].add(each.size)
    if two := sorted(name for name, held in sizes.items() if len(held) > 1):
        raise CheckpointError(f"gives a file two sizes: {shorten(two)}.", path=path)
    kinds = {name: kind for name, kind in get_type_hints(Topology).items() if name != "flats"}
    if odd := [name for name in {**kinds, **found.source} if type(found.source.get(name)) is not kinds.get(name)]:
        raise CheckpointError(
            f"source: {shorten(odd)} is missing, unknown, or of another form than expected.", path=path
        )


def _fits(atom: AtomRecord) -> bool:
    """Whether shape, dtype and bytes agree, and lie in the file."""
    itemsize = ITEMSIZE.get(atom.dtype)
    return itemsize is not None and atom.nbytes == count(atom.shape) * itemsize <= atom.size - atom.offset


def _leads_out(name: str) -> bool:
    """Whether a path of the manifest, which anybody may have written, is not one inside of the folder."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return True
    return "\0" in name or any(part in ("", ".", "..") for part in name.replace(os.sep, "/").split("/"))


def read_manifest(folder: str) -> Manifest | None:
    """The manifest in a folder; None where there is none.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
        UnsupportedError: it is of an unknown format.
    """
    try:
        return read_manifest_file(os.path.join(folder, MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_manifest_file(path: str) -> Manifest:
    """A manifest from its file.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it cannot be read, or is damaged.
        UnsupportedError: it is of an unknown format.
    """
    try:
        return parse_manifest(read_bounded(path, _MOST_BYTES).decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"cannot be read ({error}).", path=path) from error


def make_manifest(
    index: AtomicIndex,
    records: Iterable[AtomRecord],
    patterns: Mapping[str, Pattern],
    origin: Mapping[str, str],
    states: Sequence[StateRecord],
    *,
    verified: bool = True,
) -> Manifest:
    """The manifest of an atomic checkpoint that was made from ``index``.

    Args:
        index: the source.
        records: every atom that was written.
        patterns: per parameter how it was united.
        origin: per parameter what told so.
        states: the state files that were written; the first one carries scheduler, counters and client state.
        verified: the source's bytes were held against their checksums.

    Raises:
        UnsupportedError: a param group, or what the client tells, holds something that is not plain data.
    """
    topology = {each.name: getattr(index.run.topology, each.name) for each in fields(Topology) if each.name != "flats"}
    if index.run.degrees is not None:
        topology["tp"], topology["pp"] = index.run.degrees
    return Manifest(
        version=FORMAT,
        package=__version__,
        fingerprint=fingerprint(index),
        source=topology,
        atoms=tuple(sorted(records, key=lambda atom: (atom.name, atom.state, atom.instance))),
        states=tuple(states),
        state_file=states[0].name,
        patterns={
            name: {"pattern": record_pattern(pattern), "origin": origin.get(name, "")}
            for name, pattern in patterns.items()
        },
        scalars=index.run.scalars,
        scalar_dtypes=index.run.scalar_dtypes,
        groups=tuple(GroupInfo(group.members, _keep_plain(group.hyper)) for group in index.run.groups),
        aliases=index.model.aliases,
        buffers=tuple(sorted(index.model.buffers)),
        counters=index.run.counters,
        scaler=index.run.scaler,
        clip_grad=index.run.clip_grad,
        optimizer=index.run.optimizer,
        instances=index.model.instances,
        hints=index.model.hints,
        view=digest_view(index),
        verified=verified,
        dropped=index.limits.dropped,
        fused=index.model.fused,
        optimizer_params=index.run.optimizer_params,
    )


def find_unplain(index: AtomicIndex) -> list[str]:
    """Hyper-parameters that are objects, which a manifest does not keep."""
    return sorted({key for group in index.run.groups for key, value in group.hyper.items() if not is_plain(value)})


def _keep_plain(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that a load gives back: plain data; objects stay the live optimizer's in any case."""
    return {key: value for key, value in hyper.items() if is_plain(value)}


def fingerprint(index: AtomicIndex) -> Fingerprint:
    """What tells a checkpoint from every other: its files with sizes and header CRCs, and a SHA-256 over them.

    A header's CRC covers those of the file's records. Where it is not known, the records' own count; a file whose bytes
    have no checksum is told by the time of its last change. Names are relative to the state file's folder, so that a
    moved checkpoint keeps its fingerprint.
    """
    folder = os.path.dirname(index.run.state_file) or "."
    records: dict[int, list[Record]] = {}
    for record in index.stored.records:
        records.setdefault(record.file, []).append(record)
    files = []
    for number, each in enumerate(index.stored.files):
        name = os.path.relpath(each.path, folder)
        if name.startswith(os.pardir):  # of another place
            name = os.path.basename(each.path)
        told: SourceFile = {"name": name, "size": each.size, "header_crc": each.header_crc}
        held = sorted(records.get(number, ()), key=lambda record: record.offset)
        if each.header_crc is None:
            told["records"] = [[record.offset, record.nbytes, record.crc] for record in held]
        if any(record.crc is None for record in held):
            told["changed"] = find_change(each.path)
        files.append(told)
    files.sort(key=lambda told: told["name"])
    return {"files": files, "digest": hashlib.sha256(dump_json(files).encode()).hexdigest()}


def digest_view(index: AtomicIndex) -> str:
    """SHA-256 of what an index makes of its files: which bytes are whose, and what belongs to them.

    The same files can be looked at in several ways: the param groups that name a stage-0 checkpoint are the user's.
    """
    found = hashlib.sha256()
    for key, atom in sorted(index.stored.atoms.items()):
        found.update(repr((tuple(key), atom.dtype)).encode())
        for shard in atom.shards:
            places = [(f.start, f.numel, *_find_place(index, f.record), f.offset) for f in shard.pieces]
            found.update(repr((shard.shape, places)).encode())
    told = (
        index.run.scalars,
        index.model.aliases,
        index.model.instances,
        index.run.counters,
        index.run.scaler,
        index.run.clip_grad,
    )
    for each in told[:3]:
        found.update(repr(sorted(each.items())).encode())
    found.update(repr((told[3:], [(group.members, _keep_plain(group.hyper)) for group in index.run.groups])).encode())
    return found.hexdigest()


def _find_place(index: AtomicIndex, number: int) -> tuple[str, int]:
    record = index.stored.records[number]
    return os.path.basename(index.stored.files[record.file].path), record.offset
