"""Compares a folder's files with a seal or an atomic checkpoint's manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ..comm import Comm
from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..formats.deepspeed.seal import SEAL, Seal, SealedFile, compare_file, read_seal
from ..formats.findings import Finding
from ..formats.open import FolderReport
from ..formats.universal.index import Manifest, name_atom_file, parse_index
from ..io.staging import MANIFEST
from ..torchsave.records import FileRecords


def read_proof(path: str, *, of_source: bool) -> Seal:
    """Read a seal, or a manifest's seal: of its files or its source's (``of_source``)."""
    try:
        seal = read_seal(path)
        return make_seal(parse_index(seal, path)) if of_source and seal.is_manifest else seal
    except (FileNotFoundError, NotADirectoryError):
        fault = f"{path}: there is no such file."
    except (CheckpointError, UnsupportedError, OSError) as error:
        fault = str(error)
    raise ConfigError(
        f"--against: neither a seal ({SEAL}, which `seal` or `ds_ucp verify --seal` writes) nor a manifest ({MANIFEST} "
        f"of an atomic checkpoint). {fault}"
    )


def compare_proofs(
    against: str | None, report: FolderReport, sizes: Mapping[str, int], listed: Mapping[str, FileRecords], comm: Comm
) -> list[Finding]:
    """Find files that do not match a seal or manifest (collective).

    Damaged bytes are found when records are read.

    Args:
        against: path of a seal or a manifest. A manifest proves an atomic checkpoint's own files, or a normal
            checkpoint that was converted.
        report: what the folder is; faults in it are not repeated.
        sizes: all files with their bytes.
        listed: the directories of this rank's files.
    """
    proofs = {"": report.manifest.seal} if report.manifest else {}
    if against is not None:
        named = comm.once(lambda: read_proof(against, of_source=not report.atomic))
        proofs |= {} if named in proofs.values() else {against: named}
    known = {finding.file for finding in report.findings if finding.kind in ("leftover", "missing", "seal")}
    faults = [
        compare_file(report.folder, name, file.size, file.header_crc, proof, against=path)
        for path, proof in proofs.items()
        for name, file in listed.items()
        if name not in known
    ]
    proven = {name: path or MANIFEST for path, proof in proofs.items() for name in proof.files}
    for name in sorted(proven.keys() - sizes.keys() - known) if comm.rank == 0 else ():
        path = os.path.join(report.folder, name)
        faults.append(Finding("missing", name, f"{path} is missing, but {proven[name]} lists it."))
    if report.manifest:
        faults += _compare_atoms(report.manifest, {n: file for n, file in listed.items() if n not in known})
    return [fault for fault in faults if fault]


def _compare_atoms(manifest: Manifest, listed: Mapping[str, FileRecords]) -> Iterator[Finding]:
    """Yield a fault for each intact file without the tensor that the manifest lists."""
    for atom in manifest.atoms:
        name = name_atom_file(atom.key)
        file, sealed = listed.get(name), manifest.seal.files[name]
        if file is None or file.header_crc != sealed.crc or not atom.nbytes:
            continue
        if (atom.offset, atom.nbytes, atom.crc) not in file.records.values():
            text = (
                f"{name}: {atom.label} must be {atom.nbytes} bytes at byte {atom.offset} with CRC32 {atom.crc:08x}; "
                "the file has no such record. Convert again."
            )
            yield Finding("seal", name, text, names=(atom.label,))


def make_seal(manifest: Manifest) -> Seal:
    """Return a seal for a manifest's source files; ConfigError without a checksum."""
    files = manifest.fingerprint["files"]
    sealed = {f["name"]: SealedFile(size=f["size"], crc=crc) for f in files if (crc := f.get("header_crc")) is not None}
    unknown = [file["name"] for file in files if file["name"] not in sealed]
    if unknown or not files:
        raise ConfigError(f"--against: the manifest has no checksum of {unknown[0] if unknown else 'any file'}.")
    return Seal(files=sealed)
