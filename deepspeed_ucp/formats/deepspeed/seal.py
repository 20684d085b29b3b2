"""Seal of a save: sizes and checksums of all its files, by which later mixtures of files are detected."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import CheckpointError
from ...io.jsonfile import parse_json, read_bounded
from ...io.paths import join_path
from ...io.store import remove, write_small
from ..findings import Finding, from_failure
from .files import SEAL
from .headers import FileHeader


class SealedFile(BaseModel):
    """A file's bytes, and the CRC32 of its zip directory, which holds the checksums of all its records.

    A swap file has no directory: ``crc`` covers all its bytes.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    size: int = Field(ge=0)
    crc: int = Field(ge=0, lt=1 << 32)


class Seal(BaseModel):
    """The files of one save by name; ``digest`` is the SHA-256 of the rest.

    ``hosts`` lists the files of each machine, unless every machine had all.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kind: Literal["deepspeed_ucp seal"] = "deepspeed_ucp seal"
    version: Literal[1] = 1
    files: dict[str, SealedFile]
    hosts: dict[str, list[str]] = {}
    digest: str = ""

    def make_digest(self) -> str:
        """Return the SHA-256 of the other fields."""
        text = json.dumps(self.model_dump(exclude={"digest"} if self.hosts else {"digest", "hosts"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


_MOST_BYTES = 1 << 28
"""Size limit of a seal."""


def read_seal(path: str) -> Seal:
    """Read a seal and check its digest.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file cannot be read, or is damaged.
    """
    data = read_bounded(path, _MOST_BYTES)
    try:
        seal = Seal.model_validate(parse_json(data, path, strict=True))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        fact = f"{where} is missing or of another form" if where else "it is no JSON of that form"
        raise CheckpointError(f"is not the seal that was written ({fact}); it is damaged.", path=path) from None
    if seal.digest != seal.make_digest():
        raise CheckpointError("its digest does not match its contents; it is damaged or was edited.", path=path)
    return seal


def write_seal(folder: str, headers: Iterable[FileHeader], hosts: Mapping[str, list[str]] | None = None) -> None:
    """Write the seal of a save in ``folder`` atomically.

    Args:
        hosts: names of the files of each machine, unless every machine has all.

    Raises:
        OSError: it cannot be written.
        DiskFullError: the disk is full.
    """
    files = {header.name: SealedFile(size=header.size, crc=header.crc or 0) for header in headers}
    seal = Seal(files=dict(sorted(files.items())), hosts=dict(hosts or {}))
    seal = seal.model_copy(update={"digest": seal.make_digest()})
    data = seal.model_dump_json(exclude=None if seal.hosts else {"hosts"}).encode()
    write_small(os.path.join(folder, SEAL), data)


def remove_seal(folder: str) -> None:
    """Remove the seal of an earlier save, if any.

    Raises:
        OSError: it cannot be removed.
    """
    remove(os.path.join(folder, SEAL))


def compare_seal(folder: str, headers: Sequence[FileHeader]) -> tuple[list[Finding], dict[str, int]]:
    """Return the faults of files that differ from the sealed ones, and the CRC32 of each swap file.

    Both are empty without a seal.
    """
    path = os.path.join(folder, SEAL)
    try:
        seal = read_seal(path)
    except FileNotFoundError:
        return [], {}
    except CheckpointError as error:
        return [from_failure("seal", SEAL, error)], {}
    faults = [compare_file(folder, header.name, header.size, header.crc, seal) for header in headers]
    sums = {header.name: seal.files[header.name].crc for header in headers if header.swap and header.name in seal.files}
    return [fault for fault in faults if fault], sums


def compare_file(folder: str, name: str, size: int, crc: int | None, seal: Seal) -> Finding | None:
    """Return a finding if a file is not the one that was sealed, by its size and, if known, its CRC32."""
    sealed, path = seal.files.get(name), join_path(folder, name)
    if sealed is None:
        text = f"{path}: is not in {SEAL}; another save wrote it."
    elif (sealed.size, sealed.crc) != (size, sealed.crc if crc is None else crc):
        checksum = "" if crc is None else f" and CRC32 {crc:08x}"
        text = (
            f"{path}: has {size} bytes{checksum}, {SEAL} says {sealed.size} and {sealed.crc:08x}; it is not the file "
            "that was sealed."
        )
    else:
        return None
    advice = f"Put the right file back; if the whole tag was saved again without a seal, remove {folder}/{SEAL}."
    return Finding("seal", name, f"{text} {advice}")
