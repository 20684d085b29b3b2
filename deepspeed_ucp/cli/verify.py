"""``ds_ucp verify``: checks every byte of a checkpoint, and names all faults."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, ConfigError, pluralize
from .common import (
    Commands,
    add_checkpoint,
    add_command,
    add_shared_options,
    find_folders,
    read_groups,
    read_work_options,
)
from .printing import FAULT, OK, emit, format_bytes, format_duration, print_message

if TYPE_CHECKING:
    from ..examine.verify import Verification
    from ..formats.findings import Finding


def add_parser(commands: Commands) -> None:
    """Add the parser of the command."""
    parser = add_command(
        commands,
        "verify",
        help="check every byte of a checkpoint",
        description="Check every file of a checkpoint: the CRC32 of each record, whether every element of every "
        "parameter exists once, and whether the files belong together (same step, run and world size). All faults are "
        "named, with the parameters in damaged bytes. Exit code 0: complete; 1: faults; 2: no readable checkpoint.",
        examples="""
            ds_ucp verify checkpoints/
            ds_ucp verify checkpoints/global_step1000 --headers-only
            ds_ucp verify /nvme/checkpoints --also s3://bucket/run
            mpirun -np 4 ds_ucp verify checkpoints/global_step1000_universal --json
        """,
        keys="folder; kind (normal, atomic, foreign); topology; whole; files, each with name, bytes, records, "
        "unchecked; others; bytes; read; unchecked (records without a checksum); seconds; rate; faults (kind, "
        "file, text, warning, tensors); fingerprint",
    )
    add_checkpoint(parser)
    text = (
        "compare the files with a seal (ucp_seal.json), or a manifest (ucp_manifest.json) of the checkpoint or of a "
        "conversion of it"
    )
    parser.add_argument("--against", metavar="FILE", help=text)
    text = "write ucp_seal.json into the folder or URL of a normal checkpoint if it is complete"
    parser.add_argument("--seal", action="store_true", help=text)
    parser.add_argument("--headers-only", action="store_true", help="read only headers, not the bytes of tensors")
    add_shared_options(parser, checkpoint=True, window=64)


def run(options: argparse.Namespace) -> int:
    """Verify the checkpoint; collective under mpirun and torchrun."""
    from ..comm import join_launch
    from ..examine.verify import verify_checkpoint
    from ..formats.deepspeed.files import SEAL
    from ..formats.open import seal_folder
    from ..stream.full_tensors import WorkOptions

    if options.seal and options.also:
        raise ConfigError("--seal needs a folder that is complete without other places. Remove --also.")
    how = WorkOptions(**read_work_options(options, least=1))
    with join_launch() as comm:
        try:
            folder, *also = find_folders(options.checkpoint, options.also, comm)
        except CheckpointError as error:
            return _report_dangling(options, error)
        verification = verify_checkpoint(
            folder,
            comm,
            how,
            also=also,
            headers_only=options.headers_only,
            groups=read_groups(options.groups),
            against=options.against,
        )
        if options.seal and verification.whole:
            seal_folder(folder, comm)
            if not options.quiet and not comm.rank:
                print_message(f"ds_ucp: wrote {os.path.join(folder, SEAL)}")
    emit(options, to_data(verification), to_text(verification, headers_only=options.headers_only))
    return OK if verification.whole else FAULT


def _report_dangling(options: argparse.Namespace, error: CheckpointError) -> int:
    """Report a `latest` that names no checkpoint as a fault.

    Raises:
        CheckpointError: there is no `latest`.
    """
    from ..examine.verify import Verification
    from ..formats.findings import Finding
    from ..io.store import exists

    for latest in ("latest", "latest_universal"):
        if exists(os.path.join(options.checkpoint, latest)):
            fault = Finding("latest", latest, str(error))
            verification = Verification(options.checkpoint, "", "", (), (), 0, 0.0, (fault,))
            emit(options, to_data(verification), [f"{options.checkpoint}: 1 fault", _word(fault)])
            return FAULT
    raise error


def to_data(verification: Verification) -> dict[str, Any]:
    """Convert a verification to data for ``--json``."""
    files = [
        {"name": f.name, "bytes": f.nbytes, "records": f.records, "unchecked": f.unchecked} for f in verification.files
    ]
    faults = [
        {"kind": f.kind, "file": f.file, "text": f.text, "warning": f.warning, "tensors": f.names}
        for f in verification.faults
    ]
    return {
        "folder": verification.folder,
        "kind": verification.kind,
        "topology": verification.topology,
        "whole": verification.whole,
        "files": files,
        "others": verification.others,
        "bytes": verification.nbytes,
        "read": verification.read,
        "unchecked": verification.unchecked,
        "seconds": verification.seconds,
        "rate": verification.read / verification.seconds if verification.seconds else 0.0,
        "faults": faults,
        "fingerprint": verification.fingerprint,
    }


def to_text(verification: Verification, *, headers_only: bool = False) -> list[str]:
    """Write a verification; the first line is the verdict."""
    from ..formats.findings import fold_findings

    records = sum(file.records for file in verification.files)
    rate = format_bytes(verification.read / max(verification.seconds, 1e-9))
    read = f"{format_bytes(verification.read)} read in {format_duration(verification.seconds)} ({rate}/s)"
    lines = [
        f"{verification.folder}: {_conclude(verification, headers_only=headers_only)}",
        f"{verification.kind} checkpoint{f', {verification.topology}' if verification.topology else ''}",
        f"{pluralize(len(verification.files), 'file')}, {pluralize(records, 'record')}, "
        f"{format_bytes(verification.nbytes)}; {'only headers were read' if headers_only else read}",
    ]
    if verification.fingerprint.get("digest"):
        lines.append(f"source: {verification.fingerprint['digest']}")
    if verification.others:
        lines.append(f"{pluralize(len(verification.others), 'other file')} not looked into")
    return [*lines, *map(_word, fold_findings(verification.faults))]


def _conclude(verification: Verification, *, headers_only: bool) -> str:
    """Write the verdict: the number of faults, or the extent to which checksums were compared."""
    warnings = sum(fault.warning for fault in verification.faults)
    more = f" ({pluralize(warnings, 'warning')})" if warnings else ""
    if not verification.whole:
        return pluralize(len(verification.faults) - warnings, "fault") + more
    if headers_only:
        return f"complete by names, sizes and headers; checksums were not compared{more}"
    if not any(file.checked for file in verification.files):
        return f"complete by names and sizes; no checksums to compare{more}"
    if verification.unchecked:
        return f"complete; {format_bytes(verification.unchecked)} have no checksums to compare, the rest matches{more}"
    return f"complete, all checksums match{more}"


def _word(fault: Finding) -> str:
    return f"{'warning' if fault.warning else 'FAULT'} [{fault.kind}] {fault.text}"
