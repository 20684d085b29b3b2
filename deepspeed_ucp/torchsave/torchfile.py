"""Headers of ``torch.save`` files: object trees, and byte ranges of storages.

Reads the zip format (uncompressed records with a CRC32 each) and the legacy format
(``torch.serialization._legacy_save``: pickles followed by raw storages, without checksums).

Readers raise CheckpointError for a file that is missing, unreadable, truncated, damaged or malicious, UnsupportedError
for one of a big-endian machine, of a release that is too old, or with compressed records.
"""

from __future__ import annotations

import io
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from isal import isal_zlib

from ..errors import UnsupportedError
from ..io.interface import ReadStream
from ..model.index import Use
from ..model.records import Record
from ..model.storage import ITEMSIZE
from .objects import STORAGE_DTYPES, Global, TensorRef, describe, list_parts, make_damage_error
from .records import LEGACY, FilePart, FileRecords, check_crc, list_zip, open_file, read_record, starts_zip
from .unpickle import Pickled, read_pickle
from .zipframe import BYTEORDER, DATA, PICKLE, ROOT

BEGINNING, ENDING = 2048, 1024
"""Bytes at a file's start that hold its pickle, and at its end that hold its directory, as torch writes them."""

_MOST_FORMS = 8  # limit of forms per directory, so that a hostile file cannot make the comparison slow

_ENTRY, _ENTRY_MAGIC = struct.Struct("<4s12xI8x3H12x"), b"PK\x01\x02"


class Header(NamedTuple):
    """Object tree of a file with tensor references, and its storages' records by key."""

    tree: Any
    storages: dict[str, Record]


class HeaderCache:
    """Headers of the files inside one larger file.

    Files of one form have the same size, the same directory except for checksums, and the same bytes in front of the
    only storage.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._forms = defaultdict[tuple[int, bytes], list[tuple[bytes, TensorRef, Record]]](list)

    def find(self, nbytes: int, begin: bytes, end: bytes) -> Header | None:
        """Return the header of a file of a known form, else None.

        Args:
            begin, end: its first :data:`BEGINNING` and last :data:`ENDING` bytes.
        """
        _, directory, crc = _read_directory(end)
        for front, tree, record in self._forms.get((nbytes, directory), ()):
            if begin.startswith(front):
                record = record._replace(crc=crc)
                filled = tree if tree.data is None else self._fill(tree, record, begin)
                return None if filled is None else Header(filled, {tree.storage.key: record})
        return None

    def _fill(self, tree: TensorRef, record: Record, begin: bytes) -> TensorRef | None:
        """Return the tensor with its only element's bytes, None if not in ``begin``."""
        itemsize = ITEMSIZE[tree.dtype]
        data = begin[record.offset : record.offset + itemsize]
        if len(data) < itemsize or record.nbytes != itemsize:
            return None
        check_crc(self._path, f"{DATA}{tree.storage.key}", record, isal_zlib.crc32(data))
        return replace(tree, data=data)

    def add(self, header: Header, records: FileRecords, begin: bytes, end: bytes) -> None:
        """Add the form of a parsed header if torch wrote the file for a single tensor."""
        named, (names, directory, _) = records.records, _read_directory(end)
        tree, storages = header
        if len(storages) != 1 or type(tree) is not TensorRef or sorted(names) != sorted(named):
            return
        ((key, record),) = storages.items()
        front = [named[name] for name in (PICKLE, BYTEORDER) if name in named]
        if key != tree.storage.key or record.crc is None or not record.offset <= len(begin):
            return
        forms = self._forms[records.size, directory]
        if len(forms) < _MOST_FORMS and all(other.offset <= record.offset for other in front):
            forms.append((begin[: record.offset], tree, record))


def _read_directory(end: bytes) -> tuple[list[str], bytes, int]:
    """Parse the directory in a zip's last bytes.

    Returns names, the bytes (with 0 as checksum of the first storage and later records), and that storage's checksum.
    """
    at = start = max(end.find(_ENTRY_MAGIC), 0)
    names, data, crc = list[str](), bytearray(end), None
    while len(end) >= at + _ENTRY.size and end[at : at + 4] == _ENTRY_MAGIC:
        stored, *lengths = _ENTRY.unpack_from(end, at)[1:]
        name = end[at + _ENTRY.size : at + _ENTRY.size + lengths[0]].partition(b"/")[2].decode(errors="replace")
        names.append(name)
        if crc is None and name.startswith(DATA):
            crc = stored
        if crc is not None:
            data[at + 16 : at + 20] = bytes(4)
        at += _ENTRY.size + sum(lengths)
    return names, bytes(data[start:]), crc or 0


_BIG_ENDIAN = "saved on a big-endian machine, which is not supported. Load it with torch and save it again here."
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_FRONT = 1 << 16
"""Bytes of a legacy file that are read at once for its pickles."""
_MOST_FRONT = 1 << 28
"""Limit of its pickles' bytes."""
_LONGEST_PLACE = 1000


@dataclass(frozen=True)
class TorchFile(FileRecords):
    """A file's header.

    Attributes:
        tree: object tree as inert data; one-element tensors have their bytes.
        uses, members: see :meth:`.Pickled.list_uses`.
    """

    tree: Any
    protocol: int
    uses: dict[Global, Use]
    members: tuple[Use, ...]


def read_header(path: str) -> TorchFile:
    """Read a ``torch.save`` file's header and the bytes of its one-element tensors."""
    with open_file(path) as stream:
        return _read_open(path, stream)


def read_parts(path: str, parts: Sequence[tuple[int, int]]) -> list[Header]:
    """Read the headers of ``torch.save`` files that are parts of one file.

    Args:
        parts: first byte and size of each part. Offsets in the returned headers are those of the whole file.
    """
    headers, cache = [], HeaderCache(path)
    with open_file(path) as stream:
        size = stream.size
        for start, nbytes in parts:
            if start < 0 or nbytes < 1 or start + nbytes > size:
                raise make_damage_error(
                    path,
                    f"has {size} bytes instead of at least {start + nbytes} (a tensor's part begins at byte {start}); "
                    f"it is truncated.",
                )
        edges = sorted({edge for start, nbytes in parts for edge in (start, start + nbytes)})
        stream.read_ahead([(max(edge - ENDING, 0), ENDING + BEGINNING) for edge in edges])
        for start, nbytes in parts:
            begin, rest = stream.read_at(min(nbytes, BEGINNING), start), min(nbytes, ENDING)
            end = begin[-rest:] if nbytes <= BEGINNING else stream.read_at(rest, start + nbytes - rest)
            header = cache.find(nbytes, begin, end)
            if header is None:
                file = _read_open(path, FilePart(stream, start, nbytes))
                header = Header(file.tree, file.storages)
                cache.add(header, file, begin, end)
            moved = {key: record._replace(offset=record.offset + start) for key, record in header.storages.items()}
            headers.append(Header(header.tree, moved))
    return headers


def _read_open(path: str, stream: ReadStream) -> TorchFile:
    read = _read_zip if starts_zip(stream) else _read_legacy
    pickled, records = read(path, stream)
    single = [ref for ref in pickled.tensors if ref.numel == 1 and ref.dtype in ITEMSIZE and not ref.lazy]
    places = {ref: _find_element(ref, records) for ref in single}
    stream.read_ahead([(offset, ITEMSIZE[ref.dtype]) for ref, (_, offset) in places.items()])
    for ref, (record, offset) in places.items():
        ref.data = stream.read_at(ITEMSIZE[ref.dtype], offset)
        if record.nbytes == ITEMSIZE[ref.dtype]:
            check_crc(path, f"{DATA}{ref.storage.key}", record, isal_zlib.crc32(ref.data))
    fields = records.path, records.size, records.records, records.header_crc, records.saved_as
    return TorchFile(*fields, pickled.root, pickled.proto, *pickled.list_uses())


def list_records(path: str) -> FileRecords:
    """Read a file's directory, without parsing a zip's pickle."""
    with open_file(path) as stream:
        return list_zip(path, stream) if starts_zip(stream) else _read_legacy(path, stream)[1]


def _read_zip(path: str, stream: ReadStream) -> tuple[Pickled, FileRecords]:
    listed = list_zip(path, stream)
    if PICKLE not in listed.records:
        raise make_damage_error(path, "its data.pkl is empty; the file is damaged.")
    if BYTEORDER in listed.records and read_record(stream, listed, BYTEORDER) != b"little":
        raise UnsupportedError(_BIG_ENDIAN, path=path)
    return read_pickle(read_record(stream, listed, PICKLE), path), listed


class _Front(io.BufferedReader):
    """A file's beginning: reads allocate at most its size, whatever a pickle says."""

    def __init__(self, file: FilePart) -> None:
        super().__init__(file, _FRONT)
        self._size = file.size

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 0, self._size))


def _read_legacy(path: str, stream: ReadStream) -> tuple[Pickled, FileRecords]:
    front = _Front(FilePart(stream, 0, min(stream.size, _MOST_FRONT)))
    pickled, keys = _read_front(front, path)
    end = front.tell()
    records = {LEGACY: Record(0, end, None), **_list_storages(path, stream, pickled, keys, end)}
    crc = isal_zlib.crc32(stream.read_at(end, 0))
    return pickled, FileRecords(path, stream.size, {name: r for name, r in records.items() if r.nbytes}, crc, ROOT)


def _read_front(front: io.BufferedReader[Any], path: str) -> tuple[Pickled, list[str]]:
    """Return a legacy file's pickled object and its storages' keys, in file order."""
    data = front.peek(10)
    # DataStates begins a file with the length of a JSON object and the object (datastates/llm/checkpointing.py).
    if len(data) > 9 and 1 < struct.unpack("<Q", data[:8])[0] < _MOST_FRONT and data[8:10] in (b'{"', b"{}"):
        raise UnsupportedError(
            "has the DataStates library's own format (datastates_ckpt), which is not supported. Save again without "
            "datastates_ckpt.",
            path=path,
        )
    if data[:1] != b"\x80" or read_pickle(front, path).root != _LEGACY_MAGIC:
        raise make_damage_error(path, "neither a torch.save zip nor its legacy format; the file is damaged.")
    _protocol, system = read_pickle(front, path), read_pickle(front, path)
    if isinstance(system.root, dict) and system.root.get("little_endian") is False:
        raise UnsupportedError(_BIG_ENDIAN, path=path)
    pickled, keys = read_pickle(front, path), read_pickle(front, path)
    if not isinstance(keys.root, list) or not all(isinstance(key, str) for key in keys.root):
        raise make_damage_error(
            path, f"contains {describe(keys.root)} instead of the keys of its storages; it is damaged."
        )
    return pickled, keys.root


def _list_storages(path: str, stream: ReadStream, pickled: Pickled, keys: list[str], offset: int) -> dict[str, Record]:
    """Locate a legacy file's storages, which are in the order of their keys."""
    size, records = stream.size, dict[str, Record]()
    for key in keys:
        ref = pickled.storages.get(key)
        head = stream.read_at(8, offset)  # number of elements
        if ref is None or len(head) < 8:
            text = "no tensor refers to" if ref is None else f"it ends at byte {size} before"
            raise make_damage_error(path, f"{text} storage {describe(key)}; the file is truncated or damaged.")
        nbytes = ref.numel * ITEMSIZE[STORAGE_DTYPES.get(ref.kind.name, "uint8")]
        if struct.unpack("<q", head)[0] != ref.numel:
            raise make_damage_error(path, f"storage {describe(key)} does not have {ref.numel} elements; it is damaged.")
        if offset + 8 + nbytes > size:
            text = f"storage {describe(key)} ends beyond the file ({size} bytes)"
            raise make_damage_error(path, f"{text}; it is truncated.")
        records[f"{DATA}{key}"] = Record(offset + 8, nbytes, None)
        offset += 8 + nbytes
    return records


def _find_element(ref: TensorRef, file: FileRecords) -> tuple[Record, int]:
    """Return a one-element tensor's record, and the byte offset of the element."""
    record = file.storages.get(ref.storage.key)
    itemsize = ITEMSIZE[ref.dtype]
    if record is None or (ref.offset + 1) * itemsize > record.nbytes:
        key = describe(ref.storage.key)
        raise make_damage_error(file.path, f"storage {key} of a one-element tensor is missing; the file is damaged.")
    return record, record.offset + ref.offset * itemsize


def name_storages(path: str) -> dict[str, list[str]]:
    """Map storages' record names to places such as ``optimizer.state.0.exp_avg``."""
    names: dict[str, list[str]] = defaultdict(list)
    todo: list[tuple[str, Any]] = [("", read_header(path).tree)]
    seen: set[int] = set()
    while todo:
        place, value = todo.pop()
        if isinstance(value, TensorRef):
            names[f"data/{value.storage.key}"].append(place)
        elif id(value) not in seen and len(place) <= _LONGEST_PLACE:
            seen.add(id(value))
            inside = value.items() if isinstance(value, dict) else enumerate(list_parts(value))
            todo += [(f"{place}.{key}" if place else f"{key}", part) for key, part in reversed(list(inside))]
    return dict(names)
