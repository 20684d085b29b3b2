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
            comm.once(lambda: _check_sealable(folder))
        result = verify_checkpoint(
            folder,
            comm,
            how,
            also=also,
            headers_only=options.headers_only,
            groups=comm.run(lambda: common.read_groups(options.groups)),
            against=options.against,
        )
        if options.seal and result.whole:
            seal_folder(folder, comm)
            if not options.quiet and not comm.rank:
                print_message(f"ds_ucp: wrote {os.path.join(folder, SEAL)}")
    sums = {"whole": result.whole, "nbytes": result.nbytes, "unchecked": result.unchecked}
    emit(options, {**list_fields(result), **sums}, _format_report(result, headers_only=options.headers_only))
    return OK if result.whole else FAULT


def _check_sealable(folder: str) -> None:
    from ..formats.deepspeed.files import find_foreign_format, holds_atoms, list_entries

    entries = list_entries(folder)
    if holds_atoms(entries) or find_foreign_format(entries):
        raise ConfigError(f"--seal: {folder} is no normal checkpoint, and only these have seals. Remove --seal.")


def _format_report(result: Verification, *, headers_only: bool) -> list[str]:
    from ..formats.findings import fold_findings

    rate = format_bytes(result.read / max(result.seconds, 1e-9))
    read = f"{format_bytes(result.read)} read in {format_duration(result.seconds)} ({rate}/s)"
    lines = [
        f"{result.folder}: {_format_verdict(result, headers_only=headers_only)}",
        f"{result.kind} checkpoint{f', {result.topology}' if result.topology else ''}",
        f"{pluralize(len(result.files), 'file')}, {pluralize(sum(file.records for file in result.files), 'record')}, "
        f"{format_bytes(result.nbytes)}; {'only headers were read' if headers_only else read}",
    ]
    if result.fingerprint.get("digest"):
        lines.append(f"source: {result.fingerprint['digest']}")
    if result.others:
        lines.append(f"{pluralize(len(result.others), 'other file')} not looked into")
    faults = fold_findings(result.faults)
    return [*lines, *(f"{'FAULT' if fault.is_fault else 'warning'} [{fault.kind}] {fault.text}" for fault in faults)]


def _format_verdict(result: Verification, *, headers_only: bool) -> str:
    """Return the verdict: the number of faults, or the extent of compared checksums."""
    warnings = sum(not fault.is_fault for fault in result.faults)
    if not result.whole:
        text = pluralize(len(result.faults) - warnings, "fault")
    elif headers_only:
        text = "complete by names, sizes and headers; checksums were not compared"
    elif not any(file.checked for file in result.files):
        text = "complete by names and sizes; no checksums to compare"
    elif result.unchecked:
        text = f"complete; {format_bytes(result.unchecked)} have no checksums to compare, the rest matches"
    else:
        text = "complete, all checksums match"
    return f"{text} ({pluralize(warnings, 'warning')})" if warnings else text
