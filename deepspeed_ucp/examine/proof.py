"""Holds a folder's files against what proves them: a seal, or the manifest of an atomic checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ..errors import CheckpointError, ConfigError
from ..sources.atomic.manifest import Manifest, read_manifest_file
from ..sources.findings import Finding
from ..sources.open import FolderReport
from ..sources.seal import Seal, SealedFile, compare_file, read_seal
from ..torchsave.records import FileRecords
from .inventory import compare_contents, find_extra

Proof = Seal | Manifest


def read_proof(path: str) -> Proof:
    """A seal or a manifest from its file, whichever it is.

    Raises:
        ConfigError: it is neither.
    """
    faults = []
    for read in (read_seal, read_manifest_file):
        try:
            return read(path)
        except (CheckpointError, OSError) as error:
            faults.append(str(error))
    raise ConfigError(f"--against: neither a seal ({faults[0]}) nor a manifest ({faults[1]}).")


def compare_proof(
    folder: str,
    proof: Proof,
    report: FolderReport,
    sizes: Mapping[str, int],
    listed: Mapping[str, FileRecords],
    *,
    first: bool,
) -> list[Finding]:
    """Faults of the files that are not what the proof says.

    Args:
        folder: where they lie.
        proof: a manifest proves an atomic checkpoint's own files, or a normal checkpoint that was converted.
        report: what the folder is.
        sizes: all files with their bytes.
        listed: the directories of this rank's files.
        first: this rank tells what is missing.
    """
    if isinstance(proof, Manifest) and report.atomic:
        names = {atom.file for atom in proof.atoms} | {state.name for state in proof.states}
        lacking = list(find_extra(proof, sizes)) if first else []
        found = [*lacking, *compare_contents(proof, listed)]
    else:
        seal = proof if isinstance(proof, Seal) else make_seal(proof)
        names = set(seal.files)
        left = {finding.file for finding in report.findings if finding.kind == "leftover"}
        found = list(_compare_sealed(folder, seal, {n: f for n, f in listed.items() if n not in left}))
    missing = sorted(names - set(sizes)) if first else []
    return [*found, *(Finding("missing", n, f"{os.path.join(folder, n)} is missing; it is proven.") for n in missing)]


def _compare_sealed(folder: str, seal: Seal, listed: Mapping[str, FileRecords]) -> Iterator[Finding]:
    for name, file in listed.items():
        fault = compare_file(folder, name, file.size, file.header_crc, seal)
        if fault:
            yield fault


def make_seal(manifest: Manifest) -> Seal:
    """The seal of the files that a manifest's checkpoint was converted from.

    Raises:
        ConfigError: their checksums were not known.
    """
    files = manifest.fingerprint.get("files", ())
    unknown = [str(file["name"]) for file in files if file.get("header_crc") is None]
    if unknown or not files:
        raise ConfigError(f"--against: the manifest has no checksum of {unknown[0] if unknown else 'any file'}.")
    return Seal(files={str(f["name"]): SealedFile(size=f["size"], crc=f["header_crc"]) for f in files})
