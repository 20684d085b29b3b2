"""Conversions by this package; their manifest is a seal that contains the index."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, NamedTuple, Required, get_type_hints

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ...comm import Comm
from ...errors import CheckpointError, UcpError, UnsupportedError, shorten
from ...io.paths import is_url
from ...io.store import find_entry, list_tree
from ...model.index import AtomicIndex, GroupInfo
from ...model.records import FileRef, Record, Records
from ...model.storage import ITEMSIZE, Atom, AtomKey, Fragment, Fragments, ParamKey, count
from ...model.topology import Topology
from ...model.wrappers import ATOMIC
from ...plan.derive import can_fuse, split
from ...tensor_parallel.kinds import Pattern
from ...tensor_parallel.recorded import record_pattern
from ..deepspeed.files import MANIFEST, ZERO
from ..deepspeed.headers import FileHeader
from ..deepspeed.reading import read_file
from ..deepspeed.seal import Seal, compare_file, read_seal
from ..findings import Finding, from_failure

STATE_FILE = "mp_rank_00_model_states.pt"
"""The file of a conversion with scheduler, counters and client state."""

LONGEST = 255
"""Maximum bytes of a file name on common file systems."""

Text = Annotated[str, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Number = StrictBool | StrictInt | StrictFloat | None

_PLAIN = (
    *("scalar_dtypes", "counters", "scaler", "clip_grad", "optimizer", "optimizer_params"),
    *("aliases", "instances", "hints", "fused", "dropped", "foreign"),
)
"""Fields of the index that are kept as they are."""


_FLOAT, _TUPLE, _DICT, _BYTES = "$float", "$tuple", "$dict", "$bytes"

_DECODERS: dict[str, Callable[[Any], Any]] = {
    _FLOAT: lambda value: struct.unpack(">d", bytes.fromhex(value))[0],
    _TUPLE: tuple,
    _DICT: dict,
    _BYTES: bytes.fromhex,
}
"""Marks of values that JSON does not have, and their decoders."""


class PatternRecord(TypedDict):
    """The pattern by which a parameter was assembled, as data, and its origin."""

    pattern: dict[str, Any]
    origin: str


class SourceFile(TypedDict, total=False):
    """A file of a source: as in the index, with its records if it has no header CRC32."""

    name: Required[str]
    size: Required[int]
    header_crc: int | None
    records: list[list[int | None]]
    changed: int


class Fingerprint(TypedDict):
    """Identification of a source (:func:`deepspeed_ucp.convert.identity.fingerprint`)."""

    files: list[SourceFile]
    digest: str


class SealedAtom(NamedTuple):
    """An atom of a conversion: the whole tensor, in the only storage of its file.

    Attributes:
        shape: logical shape, including padding rows of a vocabulary.
        offset, crc: place of the elements in the file, and their CRC32.
    """

    name: Text
    state: Text
    instance: Count
    dtype: Text
    shape: tuple[Count, ...]
    offset: Count
    crc: Count

    @property
    def key(self) -> AtomKey:
        return AtomKey(self.name, self.state, self.instance)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.state})"

    @property
    def nbytes(self) -> int:
        return count(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The index of a conversion's files as data, and the identity of its source.

    Attributes:
        seal: the seal that has it, without it.
        fingerprint, view: of the source (:mod:`deepspeed_ucp.convert.identity`).
        verified: whether every byte of the source was compared with its checksum.
        source: topology of the source as data, without flat buffers.
        patterns: name → {"pattern": as data, "origin": text}.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    seal: Seal
    fingerprint: Fingerprint
    view: Text
    verified: Annotated[bool, Field(strict=True)]
    source: dict[Text, Any]
    atoms: tuple[SealedAtom, ...]
    patterns: dict[Text, PatternRecord]
    scalars: tuple[tuple[ParamKey, dict[Text, Number]], ...]
    groups: tuple[GroupInfo, ...]
    buffers: tuple[Text, ...]
    scalar_dtypes: dict[Text, Text]
    counters: dict[Text, Number]
    scaler: dict[Text, Number]
    clip_grad: Number
    optimizer: Text | None
    optimizer_params: dict[Text, Number]
    aliases: dict[Text, Text]
    instances: dict[Text, Count]
    hints: dict[Text, Any]
    fused: dict[Text, Count]
    dropped: Text
    foreign: Text


_MANIFEST = TypeAdapter(Manifest)


def dump_index(
    index: AtomicIndex,
    atoms: Iterable[SealedAtom],
    patterns: Mapping[str, Pattern],
    origin: Mapping[str, str],
    identity: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the entry ``index`` of a conversion's seal.

    Args:
        identity: ``fingerprint``, ``view`` and ``verified``.
    """
    topology = {field.name: getattr(index.topology, field.name) for field in fields(Topology) if field.name != "flats"}
    if index.degrees is not None:
        topology["tp"], topology["pp"] = index.degrees
    recorded = {
        name: {"pattern": record_pattern(pattern), "origin": origin.get(name, "")} for name, pattern in patterns.items()
    }
    return {
        **identity,
        **{name: encode(getattr(index, name), name) for name in _PLAIN},
        "source": topology,
        "atoms": sorted(atoms),
        "patterns": encode(recorded, "patterns"),
        "scalars": sorted((key, encode(value, "scalars")) for key, value in index.scalars.items()),
        "groups": [{"members": group.members, "hyper": encode(keep_plain(group.hyper), "")} for group in index.groups],
        "buffers": sorted(index.buffers),
    }


def find_unplain(index: AtomicIndex) -> list[str]:
    """Return the hyper-parameters that are objects, which a manifest omits."""
    return sorted({key for group in index.groups for key, value in group.hyper.items() if not is_plain(value)})


def keep_plain(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain hyper-parameters; a load restores only these."""
    return {key: value for key, value in hyper.items() if is_plain(value)}


def read_manifest(folder: str) -> Manifest | None:
    """Read the manifest in a folder; None without one."""
    path = os.path.join(folder, MANIFEST)
    try:
        return parse_index(read_seal(path), path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def find_manifest(folder: str) -> Manifest | Finding | None:
    """Return the manifest in a folder, its fault, or None without one."""
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        return from_failure("seal", MANIFEST, error)


def parse_index(seal: Seal, path: str) -> Manifest:
    """Parse and check the untrusted index of a seal from ``path``."""
    bare = seal.model_copy(update={"index": {}})
    try:
        data = {key: value if key == "atoms" else decode(value) for key, value in seal.index.items()}
        manifest = _MANIFEST.validate_python({**data, "seal": bare})
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise CheckpointError(f"{where} is of another form than expected ({fault['msg']}).", path=path) from None
    except (ValueError, TypeError, RecursionError, struct.error) as error:
        raise CheckpointError(f"is no valid manifest ({error}). It is damaged: restore the file.", path=path) from None
    if text := next(_find_contradictions(manifest), ""):
        raise CheckpointError(text, path=path)
    return manifest


def _find_contradictions(manifest: Manifest) -> Iterator[str]:
    files = manifest.seal.files
    names = [
        *files,
        *(param.name for param, _ in manifest.scalars),
        *(part for atom in manifest.atoms for part in atom[:2]),
    ]
    if outside := sorted({name for name in names if not is_path(name)}):
        yield f"names files outside of its folder: {shorten(outside)}. Do not trust it."
    if lacking := sorted({STATE_FILE, *(name_atom_file(atom.key) for atom in manifest.atoms)} - files.keys()):
        yield f"lists no file {shorten(lacking)}."
    counts = [(atom, manifest.fused[atom.name]) for atom in manifest.atoms if atom.name in manifest.fused]
    if unfit := [atom.label for atom, parts in counts if not can_fuse(atom.shape, parts)]:
        yield f"holds other numbers of experts than it says: {shorten(unfit)}."
    if loops := sorted(alias for alias, name in manifest.aliases.items() if name in manifest.aliases):
        yield f"aliases of aliases: {shorten(loops)}."
    sizes = {atom: files[name_atom_file(atom.key)].size - atom.offset for atom in manifest.atoms}
    if unfit := [atom.label for atom, size in sizes.items() if atom.dtype not in ITEMSIZE or atom.nbytes > size]:
        yield f"shape, dtype and bytes contradict each other: {shorten(unfit)}."
    kinds = {name: kind for name, kind in get_type_hints(Topology).items() if name != "flats"}
    if bad := [name for name in {**kinds, **manifest.source} if type(manifest.source.get(name)) is not kinds.get(name)]:
        yield f"source: {shorten(bad)} is missing, unknown, or of another form than expected."


def is_path(path: str) -> bool:
    """Return True if an untrusted path can be the path of a file inside a folder."""
    try:
        sizes = [len(name.encode()) for name in path.split("/")]
    except UnicodeEncodeError:
        return False
    return min(sizes) > 0 and max(sizes) <= LONGEST and "\0" not in path and not {".", ".."} & {*path.split("/")}


def name_atom_file(key: AtomKey) -> str:
    """Return the path of an atom's file; upstream's folder has only instance 0."""
    return f"{f'{ZERO}.{key.instance}' if key.instance else ZERO}/{key.name}/{key.state}.pt"


def open_conversion(
    folder: str, manifest: Manifest, places: Sequence[str], comm: Comm
) -> tuple[AtomicIndex | None, list[Finding]]:
    """Return a conversion's index or faults; read only the client's file (collective).

    Args:
        places: folders that may hold copies, nearest first; empty if there is only ``folder``.
    """
    seal = manifest.seal
    if is_url(folder):  # every rank learns the files' versions
        findings = comm.run(lambda: find_faults(folder, seal))
    else:
        by_file = comm.share([*seal.files], lambda name: find_faults(folder, seal, [name]))
        findings = [fault for faults in by_file for fault in faults]
    if not any(fault.file == STATE_FILE for fault in findings):
        header = comm.once(lambda: _read_state_file(folder, seal))
        if isinstance(header, Finding):
            findings.append(header)
        elif not findings:
            return _build_index(folder, manifest, header, places), []
    return None, findings


def find_faults(folder: str, seal: Seal, names: Iterable[str] | None = None) -> list[Finding]:
    """Return the faults of sealed files that are missing or not of the sealed size.

    An object store lists a thousand files at once; a file system looks up each file.

    ``names``: files to look at (default: all).
    """
    tree = list_tree(folder) if is_url(folder) else {}
    findings: list[Finding | None] = []
    for name in seal.files if names is None else names:
        path = os.path.join(folder, name)
        entry = tree.get(name) if is_url(folder) else find_entry(path)
        if entry is None:
            text = f"{path} is missing; the manifest lists it. Copy it here, or convert again."
            findings.append(Finding("missing", name, text))
        else:
            findings.append(compare_file(folder, name, entry.size, None, seal))
    return [fault for fault in findings if fault]


def _read_state_file(folder: str, seal: Seal) -> FileHeader | Finding:
    """Read the header of the client's state file, or return its fault."""
    try:
        header = read_file(folder, STATE_FILE)
    except UcpError as error:
        return from_failure("header", STATE_FILE, error)
    return compare_file(folder, STATE_FILE, header.size, header.crc, seal) or header


def _build_index(folder: str, manifest: Manifest, header: FileHeader, places: Sequence[str]) -> AtomicIndex:
    """Build the index; all tensors in the state file belong to the client."""
    files = [
        FileRef(f"{folder}/{name}", file.size, file.crc, tuple(f"{place}/{name}" for place in places))
        for name, file in manifest.seal.files.items()
    ]
    numbers = {name: number for number, name in enumerate(manifest.seal.files)}
    records = Records()
    atoms: list[Atom] = []
    for atom in manifest.atoms:
        fragments = [Fragment(0, count(atom.shape), len(records), 0)] if count(atom.shape) else []
        records.append(numbers[name_atom_file(atom.key)], Record(atom.offset, atom.nbytes, atom.crc))
        storage = Fragments(atom.dtype, fragments)
        atoms.append(Atom.of(atom.name, atom.state, [(atom.shape, storage)], atom.instance))
    others = header.require_model().client_storages
    client = tuple(range(len(records), len(records) + len(others)))
    for blob in others:
        records.append(numbers[STATE_FILE], Record(blob.offset, blob.nbytes, blob.crc))
    topology = {**manifest.source, "wrapper": ATOMIC, **dict.fromkeys(("dp", "tp", "pp", "sp", "ep"), 1)}
    index = AtomicIndex.of(
        *(files, records, atoms, Topology(**topology), f"{folder}/{STATE_FILE}"),
        **{name: getattr(manifest, name) for name in _PLAIN if name != "fused"},
        scalars=dict(manifest.scalars),
        groups=manifest.groups,
        client_records=client,
        degrees=(manifest.source["tp"], manifest.source["pp"]),
        buffers=frozenset(manifest.buffers),
        recorded={name: record["pattern"] for name, record in manifest.patterns.items()},
    )
    return split(index, manifest.fused)


def is_plain(value: Any) -> bool:
    """Return True if a hyper-parameter is plain data."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))


def encode(value: Any, where: str) -> Any:
    """Encode plain data as JSON; UnsupportedError names ``where`` for other values."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: struct.pack(">d", value).hex()}
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{at}]") for at, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if not isinstance(value, dict):
        raise UnsupportedError(f"{where.lstrip('.') or 'value'}: {type(value).__name__} {value!r} is not plain data.")
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {_DICT: sorted(pairs, key=lambda pair: json.dumps(pair[0], sort_keys=True))}


def decode(value: Any) -> Any:
    """Return the value that :func:`encode` encoded."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    decoded = {key: decode(item) for key, item in value.items()}
    (key, *more) = decoded or ("",)
    return decoded if more or key not in _DECODERS else _DECODERS[key](decoded[key])
