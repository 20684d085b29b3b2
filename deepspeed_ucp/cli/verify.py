"""``ds_ucp verify``: checks every byte of a checkpoint, and names all faults."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from ..errors import ConfigError, pluralize
from . import common
from .printing import FAULT, OK, emit, format_bytes, format_duration, list_fields, print_message

if TYPE_CHECKING:
    from ..examine.verify import Verification


def add_parser(commands: common.Commands) -> None:
    """Add the parser of the command."""
    parser = common.add_command(
        commands,
        "verify",
        description="Check every file of a checkpoint: the CRC32 of each record, whether every element of every "
        "parameter exists once, and whether the files belong together (same step, run and world size). All faults are "
        "named, with the parameters in damaged bytes. Exit code 0: complete; 1: faults; 2: no readable checkpoint.",
        examples="""
            ds_ucp verify checkpoints/
            ds_ucp verify checkpoints/global_step1000 --headers-only
            ds_ucp verify /nvme/checkpoints --also s3://bucket/run
            mpirun -np 4 ds_ucp verify checkpoints/global_step1000_universal --json
        """,
        keys="folder; kind (normal, atomic, foreign); topology; files, each with name, nbytes, records, unchecked, "
        "checked; others; read; seconds; faults (kind, file, text, severity, names); fingerprint; whole; nbytes; "
        "unchecked (bytes without a checksum)",
    )
    common.add_checkpoint(parser)
    text = (
        "compare the files with a seal (ucp_seal.json), or a manifest (ucp_manifest.json) of the checkpoint or of a "
        "conversion of it"
    )
    parser.add_argument("--against", metavar="FILE", help=text)
    text = "write ucp_seal.json into the folder or URL of a normal checkpoint if it is complete"
    parser.add_argument("--seal", action="store_true", help=text)
    parser.add_argument("--headers-only", action="store_true", help="read only headers, not the bytes of tensors")
    common.add_shared_options(parser, checkpoint=True, window=64)


def run(options: argparse.Namespace) -> int:
    """Verify the checkpoint; collective under mpirun and torchrun."""
    from ..comm import join_launch
    from ..examine.verify import verify_checkpoint
    from ..formats.deepspeed.files import SEAL
    from ..formats.open import seal_folder
    from ..stream.full_tensors import WorkOptions

    if options.seal and options.also:
        raise ConfigError("--seal needs a folder that is complete without other places. Remove --also.")
    how = WorkOptions(**common.read_work_options(options, least=1))
    with join_launch() as comm:
        folder, *also = common.find_folders(options.checkpoint, options.also, comm)
        if options.seal:
            comm.once(lambda: _refuse_seal(folder))
        found = verify_checkpoint(
            folder,
            comm,
            how,
            also=also,
            headers_only=options.headers_only,
            groups=comm.run(lambda: common.read_groups(options.groups)),
            against=options.against,
        )
        if options.seal and found.whole:
            seal_folder(folder, comm)
            if not options.quiet and not comm.rank:
                print_message(f"ds_ucp: wrote {os.path.join(folder, SEAL)}")
    sums = {"whole": found.whole, "nbytes": found.nbytes, "unchecked": found.unchecked}
    emit(options, {**list_fields(found), **sums}, _to_text(found, headers_only=options.headers_only))
    return OK if found.whole else FAULT


def _refuse_seal(folder: str) -> None:
    from ..formats.deepspeed.files import find_foreign_format, holds_atoms, list_entries

    entries = list_entries(folder)
    if holds_atoms(entries) or find_foreign_format(entries):
        raise ConfigError(f"--seal: {folder} is no normal checkpoint, and only these have seals. Remove --seal.")


def _to_text(found: Verification, *, headers_only: bool) -> list[str]:
    from ..formats.findings import fold_findings

    rate = format_bytes(found.read / max(found.seconds, 1e-9))
    read = f"{format_bytes(found.read)} read in {format_duration(found.seconds)} ({rate}/s)"
    lines = [
        f"{found.folder}: {_conclude(found, headers_only=headers_only)}",
        f"{found.kind} checkpoint{f', {found.topology}' if found.topology else ''}",
        f"{pluralize(len(found.files), 'file')}, {pluralize(sum(file.records for file in found.files), 'record')}, "
        f"{format_bytes(found.nbytes)}; {'only headers were read' if headers_only else read}",
    ]
    if found.fingerprint.get("digest"):
        lines.append(f"source: {found.fingerprint['digest']}")
    if found.others:
        lines.append(f"{pluralize(len(found.others), 'other file')} not looked into")
    faults = fold_findings(found.faults)
    return [*lines, *(f"{'warning' if each.warning else 'FAULT'} [{each.kind}] {each.text}" for each in faults)]


def _conclude(found: Verification, *, headers_only: bool) -> str:
    """Write the verdict: the number of faults, or the extent of compared checksums."""
    warnings = sum(fault.warning for fault in found.faults)
    if not found.whole:
        text = pluralize(len(found.faults) - warnings, "fault")
    elif headers_only:
        text = "complete by names, sizes and headers; checksums were not compared"
    elif not any(file.checked for file in found.files):
        text = "complete by names and sizes; no checksums to compare"
    elif found.unchecked:
        text = f"complete; {format_bytes(found.unchecked)} have no checksums to compare, the rest matches"
    else:
        text = "complete, all checksums match"
    return f"{text} ({pluralize(warnings, 'warning')})" if warnings else text
