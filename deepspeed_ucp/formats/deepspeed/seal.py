"""Seal of a save or a conversion: sizes and checksums that reveal later mixtures."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import CheckpointError, UnsupportedError
from ...io.jsonfile import parse_json, read_bounded
from ...io.paths import join_path
from ...io.store import remove, write_small
from ..findings import Finding
from .files import MANIFEST, PUBLISHED, SEAL
from .headers import FileHeader

OF_SAVES: Final = 1
OF_CONVERSIONS: Final = 3
"""Versions of the format; 2 was a manifest of another form."""


class SealedFile(BaseModel):
    """A file's bytes, and the CRC32 of its zip directory, which has all checksums.

    A swap file has no directory: ``crc`` covers all its bytes.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    size: int = Field(ge=0)
    crc: int = Field(ge=0, lt=1 << 32)


class Seal(BaseModel):
    """The files of one save or conversion; ``digest`` is the SHA-256 of the rest.

    Attributes:
        version: 1 for a save, 3 for a conversion, whose seal is its manifest.
        hosts: the files of each machine, unless every machine had all.
        index: the index of a conversion (:class:`..universal.index.Manifest`).
        package: version of deepspeed_ucp that wrote a conversion.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kind: Literal["deepspeed_ucp seal"] = "deepspeed_ucp seal"
    version: Literal[1, 3] = OF_SAVES
    files: dict[str, SealedFile]
    hosts: dict[str, list[str]] = {}
    index: dict[str, Any] = {}
    package: str = ""
    digest: str = ""

    @property
    def is_manifest(self) -> bool:
        """Whether it is a conversion's manifest."""
        return self.version == OF_CONVERSIONS

    def dump(self) -> bytes:
        """Return the file with the digest, equal for equal seals: one line of ASCII."""
        empty = {name for name in ("hosts", "index", "package") if not getattr(self, name)}
        data = self.model_dump(exclude={"digest", *empty})
        return json.dumps({**data, "digest": _sum(data)}, sort_keys=True, separators=(",", ":")).encode()


def _sum(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a seal without its digest."""
    text = json.dumps({key: value for key, value in data.items() if key != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


_CONVERT = "Restore the file, or convert again."
_RESTORE = "Restore the file; if the whole tag was saved again without a seal, remove it."
"""Remedies for a damaged manifest and a damaged seal."""

_MOST_BYTES = 1 << 31  # size limit of a seal, which has an entry for each state of each parameter


def read_seal(path: str) -> Seal:
    """Read a seal and check its digest.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file cannot be read, or is damaged.
        UnsupportedError: the format is unknown.
    """
    advice = _CONVERT if os.path.basename(path) == MANIFEST else _RESTORE
    data = parse_json(read_bounded(path, _MOST_BYTES, advice), path, advice=advice, strict=True)
    if type(version := data.get("version")) is int and version not in (OF_SAVES, OF_CONVERSIONS):
        raise UnsupportedError(
            f"is of format {version}, this release reads formats {OF_SAVES} and {OF_CONVERSIONS}. It was written by "
            f"deepspeed_ucp {data.get('package', 'of an unknown version')}: update deepspeed_ucp, or convert again.",
            path=path,
        )
    try:
        seal, digest = Seal.model_validate(data), _sum(data)
    except RecursionError:
        raise CheckpointError(f"is nested too deeply; it is damaged. {advice}", path=path) from None
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        fact = f"{where} is missing or of another form" if where else "it is no JSON of that form"
        text = f"is not the seal that was written ({fact}); it is damaged. {advice}"
        raise CheckpointError(text, path=path) from None
    if seal.digest != digest:
        text = f"its digest does not match its contents; it is damaged or was edited. {advice}"
        raise CheckpointError(text, path=path)
    return seal


def write_seal(folder: str, headers: Iterable[FileHeader], hosts: Mapping[str, list[str]] | None = None) -> None:
    """Write the seal of a save in ``folder`` atomically.

    ``hosts``: names of the files of each machine, unless every machine has all.
    """
    files = {header.name: SealedFile(size=header.size, crc=header.crc or 0) for header in headers}
    write_small(os.path.join(folder, SEAL), Seal(files=files, hosts=dict(hosts or {})).dump())


def remove_seal(folder: str) -> None:
    """Remove an earlier save's seal and the file that names its folder, if any."""
    remove(os.path.join(folder, SEAL))
    remove(os.path.join(folder, PUBLISHED))  # the new files are in the tag itself


def compare_file(
    folder: str, name: str, size: int, crc: int | None, seal: Seal, *, against: str = ""
) -> Finding | None:
    """Return a finding if a file's size or known CRC32 is not the sealed one.

    Args:
        against: path of the seal if the user has named it; else it is the folder's own.
    """
    sealed, path = seal.files.get(name), join_path(folder, name)
    source = against or (MANIFEST if seal.is_manifest else SEAL)
    if sealed is None and seal.is_manifest and not against:
        text = f"{path}: the manifest does not list it; DeepSpeed would load it all the same. Remove it."
        return Finding("extra", name, text)
    if sealed is None:
        text = f"{path}: is not in {source}; another save wrote it."
    elif (sealed.size, sealed.crc) != (size, sealed.crc if crc is None else crc):
        checksum = "" if crc is None else f" and CRC32 {crc:08x}"
        text = (
            f"{path}: has {size} bytes{checksum}, {source} says {sealed.size} and {sealed.crc:08x}; it is not the file "
            "that was sealed."
        )
    else:
        return None
    advice = f"Put the right file back; if the whole tag was saved again without a seal, remove {folder}/{SEAL}."
    if against:
        advice = "Put the right file back, or name the seal of this save."
    elif seal.is_manifest:
        advice = "Copy it again, or convert again."
    return Finding("seal", name, f"{text} {advice}")
