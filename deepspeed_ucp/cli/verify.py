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
    from ..stream.batches import WorkOptions

    if options.seal and options.also:
        raise ConfigError("--seal needs a folder that is complete without other places. Remove --also.")
    how = WorkOptions(**read_work_options(options, least=1))
    with join_launch() as comm:
        try:
            folder, *also = find_folders(options.checkpoint, options.also, comm)
        except CheckpointError as error:
            return _report_dangling(options, error)
        found = verify_checkpoint(
            folder,
            comm,
            how,
            also=also,
            headers_only=options.headers_only,
            groups=read_groups(options.groups),
            against=options.against,
        )
        if options.seal and found.whole:
            seal_folder(folder, comm)
            if not options.quiet and not comm.rank:
                print_message(f"ds_ucp: wrote {os.path.join(folder, SEAL)}")
    emit(options, to_data(found), to_text(found, headers_only=options.headers_only))
    return OK if found.whole else FAULT


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
            found = Verification(options.checkpoint, "", "", (), (), 0, 0.0, (fault,))
            emit(options, to_data(found), [f"{options.checkpoint}: 1 fault", _word(fault)])
            return FAULT
    raise error


def to_data(found: Verification) -> dict[str, Any]:
    """Convert a verification to data for ``--json``."""
    files = [{"name": f.name, "bytes": f.nbytes, "records": f.records, "unchecked": f.unchecked} for f in found.files]
    faults = [
        {"kind": f.kind, "file": f.file, "text": f.text, "warning": f.warning, "tensors": f.names} for f in found.faults
    ]
    return {
        "folder": found.folder,
        "kind": found.kind,
        "topology": found.topology,
        "whole": found.whole,
        "files": files,
        "others": found.others,
        "bytes": found.nbytes,
        "read": found.read,
        "unchecked": found.unchecked,
        "seconds": found.seconds,
        "rate": found.read / found.seconds if found.seconds else 0.0,
        "faults": faults,
        "fingerprint": found.fingerprint,
    }


def to_text(found: Verification, *, headers_only: bool = False) -> list[str]:
    """Write a verification; the first line is the verdict."""
    from ..formats.findings import fold_findings

    records = sum(file.records for file in found.files)
    rate = format_bytes(found.read / max(found.seconds, 1e-9))
    read = f"{format_bytes(found.read)} read in {format_duration(found.seconds)} ({rate}/s)"
    lines = [
        f"{found.folder}: {_conclude(found, headers_only=headers_only)}",
        f"{found.kind} checkpoint{f', {found.topology}' if found.topology else ''}",
        f"{pluralize(len(found.files), 'file')}, {pluralize(records, 'record')}, {format_bytes(found.nbytes)}; "
        + ("only headers were read" if headers_only else read),
    ]
    if found.fingerprint.get("digest"):
        lines.append(f"source: {found.fingerprint['digest']}")
    if found.others:
        lines.append(f"{pluralize(len(found.others), 'other file')} not looked into")
    return [*lines, *map(_word, fold_findings(found.faults))]


def _conclude(found: Verification, *, headers_only: bool) -> str:
    """Write the verdict: the number of faults, or the extent to which checksums were compared."""
    warnings = sum(fault.warning for fault in found.faults)
    more = f" ({pluralize(warnings, 'warning')})" if warnings else ""
    if not found.whole:
        return pluralize(len(found.faults) - warnings, "fault") + more
    if headers_only:
        return f"complete by names, sizes and headers; checksums were not compared{more}"
    if not any(file.checked for file in found.files):
        return f"complete by names and sizes; no checksums to compare{more}"
    if found.unchecked:
        return f"complete; {format_bytes(found.unchecked)} have no checksums to compare, the rest matches{more}"
    return f"complete, all checksums match{more}"


def _word(fault: Finding) -> str:
    return f"{'warning' if fault.warning else 'FAULT'} [{fault.kind}] {fault.text}"
