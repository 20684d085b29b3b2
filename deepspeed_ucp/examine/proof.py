"""Compare a folder's files with a seal, or with the manifest of an atomic checkpoint."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from ..errors import CheckpointError, ConfigError, UnsupportedError
from ..formats.deepspeed.seal import SEAL, Seal, SealedFile, compare_file, read_seal
from ..formats.findings import Finding
from ..formats.open import FolderReport
from ..formats.universal.manifest import AtomRecord, Manifest, read_manifest_file
from ..io.staging import MANIFEST
from ..torchsave.records import FileRecords

Proof = Seal | Manifest


def read_proof(path: str) -> Proof:
    """Read a seal or a manifest.

    Raises:
        ConfigError: the file is neither, or cannot be read.
    """
    faults = []
    for read in (read_seal, read_manifest_file):
        try:
            return read(path)
        except (FileNotFoundError, NotADirectoryError):
            faults.append(f"{path}: there is no such file.")
        except (CheckpointError, UnsupportedError, OSError) as error:
            faults.append(str(error))
    raise ConfigError(
        f"--against: neither a seal ({SEAL}, which `seal` or `ds_ucp verify --seal` writes) nor a manifest ({MANIFEST} "
        f"of an atomic checkpoint). {' '.join(dict.fromkeys(faults))}"
    )


def compare_proof(
    proof: Proof,
    report: FolderReport,
    sizes: Mapping[str, int],
    listed: Mapping[str, FileRecords],
    *,
    first: bool,
) -> list[Finding]:
    """Find the files that do not match the proof.

    Args:
        proof: a manifest proves an atomic checkpoint's own files, or a normal checkpoint that was converted.
        report: what the folder is.
        sizes: all files with their bytes.
        listed: the directories of this rank's files.
        first: this rank reports missing and extra files.
    """
    if isinstance(proof, Manifest) and report.atomic:
        findings, names = compare_manifest(proof, sizes, listed, first=first), set(proof.files)
    else:
        seal = proof if isinstance(proof, Seal) else make_seal(proof)
        left = {finding.file for finding in report.findings if finding.kind == "leftover"}
        sealed = [
            compare_file(report.folder, n, f.size, f.header_crc, seal) for n, f in listed.items() if n not in left
        ]
        findings, names = [fault for fault in sealed if fault], set(seal.files)
    for name in sorted(names - set(sizes)) if first else ():
        findings.append(Finding("missing", name, f"{os.path.join(report.folder, name)} is missing; it is proven."))
    return findings


def make_seal(manifest: Manifest) -> Seal:
    """Return a seal for the source files of a manifest's conversion.

    Raises:
        ConfigError: a checksum is unknown.
    """
    files = manifest.fingerprint["files"]
    sealed = {f["name"]: SealedFile(size=f["size"], crc=crc) for f in files if (crc := f.get("header_crc")) is not None}
    unknown = [file["name"] for file in files if file["name"] not in sealed]
    if unknown or not files:
        raise ConfigError(f"--against: the manifest has no checksum of {unknown[0] if unknown else 'any file'}.")
    return Seal(files=sealed)


def compare_manifest(
    manifest: Manifest, sizes: Mapping[str, int], listed: Mapping[str, FileRecords], *, first: bool
) -> list[Finding]:
    """Find files of an atomic checkpoint that its manifest does not list, or whose records it lists differently.

    Missing files are found when the checkpoint is opened, and damaged bytes when records are read. Arguments as of
    :func:`compare_proof`.
    """
    steps: set[str] = set()
    if not any(os.path.basename(state.name) == "step.pt" for state in manifest.states):
        # It is of a release that listed none of the parameters' step files.
        steps = {os.path.join(os.path.dirname(atom.file), "step.pt") for atom in manifest.atoms}
    extra = sorted(set(sizes) - manifest.files.keys() - steps) if first else []
    findings = [
        Finding("extra", n, f"{n}: the manifest does not list it; DeepSpeed would load it all the same. Remove it.")
        for n in extra
    ]
    return [*findings, *_compare_states(manifest, listed), *_compare_atoms(manifest.atoms, listed)]


def _compare_states(manifest: Manifest, listed: Mapping[str, FileRecords]) -> Iterator[Finding]:
    for state in manifest.states:
        file = listed.get(state.name)
        if file is not None and file.header_crc != state.crc:
            text = (
                f"{state.name}: its directory has CRC32 {file.header_crc:08x}, the manifest says {state.crc:08x}; it "
                "is not the file that was written."
            )
            yield Finding("manifest", state.name, text)


def _compare_atoms(atoms: Iterable[AtomRecord], listed: Mapping[str, FileRecords]) -> Iterator[Finding]:
    by_file = defaultdict(list)
    for atom in atoms:
        by_file[atom.file].append(atom)
    for name, file in listed.items():
        records = {(record.offset, record.nbytes): record for record in file.records}
        for atom in by_file[name]:
            record = records.get((atom.offset, atom.nbytes))
            fault = ""
            if record is None and atom.nbytes:
                fault = f"must be {atom.nbytes} bytes at byte {atom.offset}; the file has no such record."
            elif record is not None and record.crc is not None and record.crc != atom.crc:
                fault = (
                    f"has CRC32 {record.crc:08x}, the manifest says {atom.crc:08x}; it is the file of another "
                    "parameter or checkpoint, or damaged."
                )
            if fault:
                label = f"{atom.name} ({atom.state})"
                yield Finding("manifest", name, f"{name}: {label} {fault}", names=(label,))
