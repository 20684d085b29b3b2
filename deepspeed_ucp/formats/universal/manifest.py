"""The manifest of an atomic checkpoint: one JSON file with all data of its index, and the origin."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Required, get_type_hints

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ...errors import CheckpointError, UnsupportedError, shorten
from ...io.jsonfile import parse_json, read_bounded
from ...io.store import find_change
from ...model import ITEMSIZE, AtomicIndex, GroupInfo, ParamKey, Record, count
from ...model.experts import holds_experts
from ...model.topology import Topology
from ...tensor_parallel import Pattern, record_pattern
from ...version import __version__
from ..deepspeed.files import MANIFEST
from .plainjson import decode, dump_json, is_plain

FORMAT = 2
_KIND = "deepspeed_ucp atomic checkpoint"


Text = Annotated[str, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0)]
Number = StrictBool | StrictInt | StrictFloat | None


@dataclass(frozen=True, slots=True)
class AtomRecord:
    """The record of an atom in an atomic checkpoint.

    Attributes:
        name, state, dtype, instance: as in the atom.
        shape: logical shape, including padding rows of a vocabulary.
        vocab: number of rows without padding; None without a padded vocabulary.
        file: relative path of the file.
        offset, nbytes, crc: place of the elements in the file, and their CRC32.
        size: bytes of the file.
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
    """A file without atoms (states, a step): relative path, bytes, CRC32 of the zip directory."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: Text
    size: Count
    crc: Count


class PatternRecord(TypedDict):
    """How a parameter was assembled: the pattern as data, and its origin."""

    pattern: dict[str, Any]
    origin: str


class SourceFile(TypedDict, total=False):
    """A file of the source in :func:`fingerprint`."""

    name: Required[str]
    size: Required[int]
    header_crc: int | None
    records: list[list[int | None]]
    changed: int


class Fingerprint(TypedDict):
    """Identification of the source."""

    files: list[SourceFile]
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """An atomic checkpoint's description.

    Attributes:
        version: version of the format.
        package: version of deepspeed_ucp that wrote it.
        fingerprint: identification of the source (:func:`fingerprint`).
        source: topology of the source as data, without flat buffers.
        atoms: sorted by name, state and instance.
        states: files without atoms.
        state_file: the file with scheduler, counters and client state.
        patterns: name → {"pattern": as data, "origin": text}.
        scalars, scalar_dtypes, groups, counters, scaler, clip_grad, optimizer: as in ``RunState``.
        aliases, buffers, instances, hints: as in ``ModelInfo``.
        view: digest of the source's index (:func:`digest_view`).
        verified: whether every byte of the source was compared with its checksum.
        dropped: as in ``Limits``.
        kind: constant that identifies manifests.
        fused: parameter with all experts of a layer → number of experts; the index has an atom per expert. Not written
            if empty.
        optimizer_params: as in ``RunState``. Not written if empty.
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
        """Bytes of each listed file."""
        return {atom.file: atom.size for atom in self.atoms} | {state.name: state.size for state in self.states}

    def to_json(self) -> str:
        """Return one line of ASCII, equal for equal manifests; ``digest`` is the SHA-256 of all other fields."""
        data = {key: value for key, value in asdict(self).items() if key not in ("fused", "optimizer_params") or value}
        data["digest"] = _sum(data)
        return dump_json(data) + "\n"


_MOST_BYTES = 1 << 31
"""Maximum bytes of a manifest, which has an entry for each state of each parameter."""

_MANIFEST = TypeAdapter(Manifest)


def _sum(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(dict(data)).encode()).hexdigest()


def parse_manifest(text: str, path: str) -> Manifest:
    """Parse and validate the text of a manifest; ``path`` is for messages.

    Raises:
        CheckpointError: the text is no manifest, or damaged.
        UnsupportedError: the format is unknown.
    """
    try:
        data = parse_json(text.encode(), path, strict=True, object_hook=decode)
        _check_form(data, path)
        found = _MANIFEST.validate_python(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise CheckpointError(f"{where} is of another form than expected ({fault['msg']}).", path=path) from None
    _check_entries(found, path)
    return found


def _check_form(data: Any, path: str) -> None:
    """Check kind, format and digest; remove the digest."""
    if data.get("kind") != _KIND:
        raise CheckpointError("is no manifest of an atomic checkpoint.", path=path)
    if data.get("version") != FORMAT:
        raise UnsupportedError(
            f"is of format {data.get('version')!r}, this release reads format {FORMAT}. It was written by "
            f"deepspeed_ucp {data.get('package', 'of an unknown version')}: update deepspeed_ucp, or convert again.",
            path=path,
        )
    digest = data.pop("digest", None)
    if digest != _sum(data):
        raise CheckpointError(
            f"its digest is {digest}, its contents have {_sum(data)}; the file is damaged or was edited. "
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
    if two := sorted(name for name, values in sizes.items() if len(values) > 1):
        raise CheckpointError(f"gives a file two sizes: {shorten(two)}.", path=path)
    kinds = {name: kind for name, kind in get_type_hints(Topology).items() if name != "flats"}
    if odd := [name for name in {**kinds, **found.source} if type(found.source.get(name)) is not kinds.get(name)]:
        raise CheckpointError(
            f"source: {shorten(odd)} is missing, unknown, or of another form than expected.", path=path
        )


def _fits(atom: AtomRecord) -> bool:
    """Return True if shape, dtype and bytes agree and fit into the file."""
    itemsize = ITEMSIZE.get(atom.dtype)
    return itemsize is not None and atom.nbytes == count(atom.shape) * itemsize <= atom.size - atom.offset


def _leads_out(name: str) -> bool:
    """Return True for an untrusted path that is not inside the folder."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return True
    return "\0" in name or any(part in ("", ".", "..") for part in name.replace(os.sep, "/").split("/"))


def read_manifest(folder: str) -> Manifest | None:
    """Read the manifest in a folder; None without one.

    Raises:
        CheckpointError: the file cannot be read, or is damaged.
        UnsupportedError: the format is unknown.
    """
    try:
        return read_manifest_file(os.path.join(folder, MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_manifest_file(path: str) -> Manifest:
    """Read a manifest.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file cannot be read, or is damaged.
        UnsupportedError: the format is unknown.
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
    """Make the manifest of an atomic checkpoint that was converted from ``index``.

    Args:
        index: the source.
        records: all written atoms.
        patterns: parameter → pattern by which it was assembled.
        origin: parameter → origin of the pattern.
        states: the written state files; the first one has scheduler, counters and client state.
        verified: whether the source was compared with its checksums.

    Raises:
        UnsupportedError: a param group or a hint is not plain data.
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
    """Return the hyper-parameters that are objects, which a manifest omits."""
    return sorted({key for group in index.run.groups for key, value in group.hyper.items() if not is_plain(value)})


def _keep_plain(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters that a load restores: plain data. Objects stay those of the live optimizer."""
    return {key: value for key, value in hyper.items() if is_plain(value)}


def fingerprint(index: AtomicIndex) -> Fingerprint:
    """Identify a checkpoint by its files' names, sizes and header CRCs, and a SHA-256 of these.

    A header's CRC covers the CRCs of all records. Without it the records' CRCs are used, and for bytes without a
    checksum the file's time of change. Names are relative to the state file's folder, so a moved checkpoint keeps its
    fingerprint.
    """
    folder = os.path.dirname(index.run.state_file) or "."
    records: dict[int, list[Record]] = {}
    for record in index.stored.records:
        records.setdefault(record.file, []).append(record)
    files = []
    for number, each in enumerate(index.stored.files):
        name = os.path.relpath(each.path, folder)
        if name.startswith(os.pardir):  # in another place
            name = os.path.basename(each.path)
        entry: SourceFile = {"name": name, "size": each.size, "header_crc": each.header_crc}
        ordered = sorted(records.get(number, ()), key=lambda record: record.offset)
        if each.header_crc is None:
            entry["records"] = [[record.offset, record.nbytes, record.crc] for record in ordered]
        if any(record.crc is None for record in ordered):
            entry["changed"] = find_change(each.path)
        files.append(entry)
    files.sort(key=lambda entry: entry["name"])
    return {"files": files, "digest": hashlib.sha256(dump_json(files).encode()).hexdigest()}


def digest_view(index: AtomicIndex) -> str:
    """Return the SHA-256 of an index: the places of all elements, and the run's and model's state.

    One set of files can have several indexes: the user names the parameters of a stage-0 checkpoint.
    """
    found = hashlib.sha256()
    for key, atom in sorted(index.stored.atoms.items()):
        found.update(repr((tuple(key), atom.dtype)).encode())
        for shard in atom.shards:
            places = [(f.start, f.numel, *_find_place(index, f.record), f.offset) for f in shard.pieces]
            found.update(repr((shard.shape, places)).encode())
    values = (
        index.run.scalars,
        index.model.aliases,
        index.model.instances,
        index.run.counters,
        index.run.scaler,
        index.run.clip_grad,
    )
    for each in values[:3]:
        found.update(repr(sorted(each.items())).encode())
    found.update(repr((values[3:], [(group.members, _keep_plain(group.hyper)) for group in index.run.groups])).encode())
    return found.hexdigest()


def _find_place(index: AtomicIndex, number: int) -> tuple[str, int]:
    record = index.stored.records[number]
    return os.path.basename(index.stored.files[record.file].path), record.offset
