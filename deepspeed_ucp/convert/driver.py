"""A conversion: plan, write to a temporary folder, verify the source, commit.

The manifest is written last. The temporary folder is renamed after every byte of the source has been compared with the
checksum that training wrote.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from ..comm import Comm
from ..errors import CheckpointError, StorageError, UnsupportedError, shorten
from ..formats.deepspeed.seal import OF_CONVERSIONS, Seal, SealedFile
from ..formats.universal.index import (
    Fingerprint,
    Manifest,
    dump_index,
    find_faults,
    find_unplain,
    name_atom_file,
    read_manifest,
)
from ..io.disk import check_space, create_file, explain_full, write_atomically
from ..io.memory import Scratch
from ..io.read import Checked, combine_crc32, crc32
from ..io.staging import MANIFEST, Staging
from ..io.upload import open_staging
from ..model.index import AtomicIndex
from ..plan.conversion import Batch, Output, Range, plan_conversion
from ..plan.derive import fuse
from ..plan.settling import describe_irregular, refuse_stateless, refuse_unreadable
from ..stream.duplicates import check_samples
from ..stream.full_tensors import FullTensors, WorkOptions, assemble_full_tensors, stream
from ..stream.reader import AtomReader, refuse_scattered, verify_reads
from ..stream.report import OutputReport
from ..tensor_parallel.recorded import read_pattern
from ..tensor_parallel.rules import RuleSet
from ..version import __version__
from .identity import identify
from .outputs import CONVERSION, OutputFile, check_paths, find_uncuttable, list_files, list_steps
from .states import find_dropped_client, write_states

logger = logging.getLogger("deepspeed_ucp")

HALT = ".ucp-halt"
"""File in the temporary folder by which a failed node stops the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(WorkOptions):
    """Options of a conversion.

    Attributes:
        verify: compare every byte of the source with its CRC32.
        overwrite: convert again and replace any atomic checkpoint at the destination.
        refresh: replace an atomic checkpoint that was made from another source; reuse one from the same source.
        latest: write the destination's name to ``latest_universal``.
    """

    verify: bool = True
    overwrite: bool = False
    refresh: bool = False
    latest: bool = True


@dataclass(frozen=True, slots=True, order=True)
class Written:
    """A range that was written, and the CRC32 of its bytes."""

    range: Range
    crc: int


@dataclass(slots=True)
class _Conversion:
    """State of a running conversion."""

    index: AtomicIndex
    comm: Comm
    options: ConvertOptions
    staging: Staging
    report: OutputReport
    full: FullTensors
    files: list[OutputFile]
    steps: dict[str, tuple[bytes, int]]
    identity: tuple[Fingerprint, str] | None
    replace: bool = False


def default_destination(folder: str) -> str:
    """Return the default destination of a conversion, ``FOLDER_universal``."""
    return f"{folder.rstrip('/')}_universal"


def convert_index(
    index: AtomicIndex,
    source: str,
    destination: str,
    comm: Comm,
    options: ConvertOptions,
    *,
    rules: Sequence[RuleSet] = (),
    live: Sequence[RuleSet] = (),
) -> OutputReport:
    """Write a checkpoint's atoms as an atomic checkpoint (collective).

    Args:
        rules: the user's rules for how tensor parallelism cuts parameters.
        live: such rules from a live engine.

    Raises:
        UcpError: the same on all ranks; source and destination are unchanged.
    """
    report = OutputReport(format="atomic", source=source, destination=destination, nodes=comm.size)
    with report.timed(), ExitStack() as stack:
        with report.phase("plan"):
            work = comm.run(lambda: _plan(index, comm, options, report, rules, live))
            comm.once(lambda: _warn_losses(index, work.full))
        comm.run(lambda: stack.enter_context(work.staging.scratch()))
        report.reused = comm.once(lambda: _begin(work, stack))
        if not report.reused:
            _convert(work)
    return report


def _plan(
    index: AtomicIndex,
    comm: Comm,
    options: ConvertOptions,
    report: OutputReport,
    rules: Sequence[RuleSet],
    live: Sequence[RuleSet],
) -> _Conversion:
    refuse_unreadable(index)
    refuse_stateless(index)
    refuse_scattered(index, "every node of a conversion reads its part of each")
    if text := describe_irregular(index):
        raise UnsupportedError(f"{text} The weights alone can be had with `ds_ucp export`.")
    index = fuse(index)  # as upstream's loader knows them
    full = assemble_full_tensors(index, rules, live=live)
    staging = open_staging(report.destination, report.source, CONVERSION)
    files, steps = list_files(full, index.fused), list_steps(index)
    check_paths([*(file.path for file in files), *steps])
    identity = identify(index) if comm.rank == 0 else None
    return _Conversion(index, comm, options, staging, report, full, files, steps, identity)


def _warn_losses(index: AtomicIndex, full: FullTensors) -> None:
    if full.unused:
        logger.warning("patterns: rules that match no parameter: %s", shorten(full.unused))
    if uncuttable := find_uncuttable(full):
        logger.warning(
            "DeepSpeed's own load_universal cannot cut %s as they are cut; at tensor-parallel degrees above 1 load "
            "this checkpoint with deepspeed_ucp",
            shorten(uncuttable),
        )
    if unplain := find_unplain(index):
        logger.warning("hyper-parameters that are objects are not kept: %s", shorten(unplain))
    if client := find_dropped_client(index):
        logger.info("client states of data-parallel ranks other than the first are not kept: %s", shorten(client, 3))


def _begin(work: _Conversion, stack: ExitStack) -> bool:
    """Lock the destination and create the temporary folder (rank 0 only).

    Returns:
        True if the destination is this conversion already.

    Args:
        stack: releases the lock, and removes the temporary folder after an error.
    """
    stack.enter_context(work.staging.lock())
    if _reuse(work):
        work.staging.discard()  # an interrupted run with `overwrite` may have left it
        return True
    work.staging.begin()
    stack.enter_context(work.staging.discard_on_error())
    return False


def _reuse(work: _Conversion) -> bool:
    """Return True if the destination is the same complete conversion (rank 0 only).

    Then point ``latest_universal`` at it, else raise if the destination must not be replaced.
    """
    staging, options = work.staging, work.options
    manifest = None
    if not options.overwrite:
        try:
            manifest = read_manifest(staging.destination)
        except (CheckpointError, UnsupportedError) as error:
            logger.warning("not reused: %s", error)
    if manifest is not None:
        fault = _find_fault(staging.destination, manifest, work)
        if not fault:
            if options.latest:
                staging.write_latest(staging.name)
            return True
        logger.warning("%s: is not reused: %s", staging.destination, fault)
    work.replace = options.overwrite or (options.refresh and manifest is not None)
    staging.check_destination(work.replace)
    return False


def _find_fault(folder: str, manifest: Manifest, work: _Conversion) -> str:
    """Return why an existing output cannot be reused, or an empty string."""
    if (manifest.fingerprint, manifest.view) != work.identity:
        return "it was made from another checkpoint"
    if work.options.verify and not manifest.verified:
        return "it was made without verifying the source"
    expected = {file.path: file.atom.shape for file in work.files}
    patterns = {name: read_pattern(record["pattern"]) for name, record in manifest.patterns.items()}
    if patterns != work.full.patterns or expected != {name_atom_file(atom.key): atom.shape for atom in manifest.atoms}:
        return "it was assembled by other patterns"
    return next((fault.text for fault in find_faults(folder, manifest.seal)), "")


def _convert(work: _Conversion) -> None:
    """Write all files, verify the source, and publish the output (collective)."""
    comm, report = work.comm, work.report
    checks = list[Checked]()
    fresh = _write(work, checks)
    written = sorted(item for part in comm.gather(fresh) for item in part)
    nbytes = sum(check.nbytes for check in checks)
    with report.phase("verify"):
        if work.options.verify:
            nbytes += verify_reads(checks, work.index, comm, threads=report.workers)
            check_samples(work.index, [tensor.atom.key for tensor in work.full.tensors.values()], comm)
    with report.phase("finish"):
        crcs = comm.run(lambda: _close_files(work, written))
        states, nbytes_written = comm.once(lambda: _write_states(work))
    with report.phase("sync"):
        comm.run(work.staging.sync)
    with report.phase("commit"):
        report.bytes_written = nbytes_written + comm.once(lambda: _commit(work, crcs, states))
    report.bytes_read = sum(comm.gather(nbytes))
    report.tensors, report.state_bytes = len(work.files), sum(file.atom.nbytes for file in work.files)


def _write(work: _Conversion, checks: list[Checked]) -> list[Written]:
    """Write this node's part, and append the checks of its reads (collective)."""
    comm, report = work.comm, work.report
    report.workers, most = work.options.split_window(report.source)
    if work.staging.is_remote:
        comm.run(lambda: _prepare_folder(work))
    else:
        comm.once(lambda: _prepare_folder(work))
        comm.run(lambda: _check_shared(work.staging.folder))
    outputs = [Output(file.atom.numel, file.atom.itemsize, file.atom.place) for file in work.files]
    plan = plan_conversion(outputs, comm.size, most=most, whole=work.staging.is_remote)
    with report.phase("write"):
        return comm.run(lambda: write_share(work, plan[comm.rank], checks))


def _prepare_folder(work: _Conversion) -> None:
    folder, sizes = work.staging.folder, sorted(file.image.size for file in work.files)
    check_space(folder, sum(sizes[-work.report.workers :] if work.staging.is_remote else sizes))
    for parent in sorted({os.path.dirname(path) for path in [*(file.path for file in work.files), *work.steps]}):
        with explain_full(folder):
            os.makedirs(os.path.join(folder, parent), exist_ok=True)


def _check_shared(folder: str) -> None:
    """Raise StorageError if this node does not see the output folder of rank 0."""
    if not os.path.isdir(folder):
        raise StorageError(
            "is not here; rank 0 has made it. Every node needs the same destination: name a folder on a "
            "shared file system.",
            path=folder,
        )


def write_share(work: _Conversion, batches: Sequence[Batch], checks: list[Checked]) -> list[Written]:
    """Write this node's part of a conversion and return the ranges that were written.

    Args:
        batches: each worker needs about twice the memory of the largest.
        checks: receives the checksums of all reads.

    Raises:
        UcpError: the first worker's error; other workers and nodes stop after their current batch.
    """
    files, staging, halt = work.files, work.staging, work.staging.path(HALT)
    ranges_by_file: dict[int, list[Written]] = defaultdict(list)
    lock = threading.Lock()

    def consume(batch: Batch, sides: Sequence[list[memoryview]], checked: list[Checked], scratch: Scratch) -> None:
        for span, data in zip(batch.ranges, sides[0], strict=True):
            file, crc = files[span.output], crc32(data)
            file.write(staging.folder, span.start, data, crc)
            with lock:
                ranges = ranges_by_file[span.output]
                ranges.append(Written(span, crc))
                is_whole = staging.is_remote and sum(part.range.numel for part in ranges) == file.atom.numel
            if is_whole:  # to keep few files in the temporary folder
                if len(ranges) > 1:
                    file.close(staging.folder, join_ranges(ranges, files, [span.output])[span.output])
                staging.put(file.path)
        checks.extend(checked)

    def is_halted() -> bool:
        return work.comm.size > 1 and os.path.exists(halt)

    try:
        with AtomReader(work.index, checksum=work.options.verify) as reader:
            source = (reader, [file.atom for file in files])
            threads, bar = work.report.workers, work.options.bar
            stream([source], batches, consume, threads=threads, bar=bar, halted=is_halted)
    except Exception:
        with suppress(OSError), open(halt, "wb"):
            pass
        raise
    return [written for ranges in ranges_by_file.values() for written in ranges]


def _close_files(work: _Conversion, written: Sequence[Written]) -> dict[int, int]:
    """Write frames of divided files, and this rank's small files; return all CRC32s."""
    comm, folder = work.comm, work.staging.folder
    crcs = join_ranges(written, work.files)
    split = {item.range.output for item in written if item.range.numel < work.files[item.range.output].atom.numel}
    for number in () if work.staging.is_remote else sorted(split)[comm.rank :: comm.size]:
        work.files[number].close(folder, crcs[number])
    for path in sorted(work.steps)[comm.rank :: comm.size]:
        create_file(os.path.join(folder, path), work.steps[path][0])
    return crcs


def _write_states(work: _Conversion) -> tuple[dict[str, SealedFile], int]:
    """Write the state files; return all files without atoms, and their bytes."""
    states = write_states(work.index, work.staging.folder)
    inodes = {os.stat(work.staging.path(name)).st_ino: state.size for name, state in states.items()}
    steps = {path: SealedFile(size=len(data), crc=crc) for path, (data, crc) in work.steps.items()}
    return states | steps, sum(inodes.values()) + sum(step.size for step in steps.values())


def _commit(work: _Conversion, crcs: Mapping[int, int], states: Mapping[str, SealedFile]) -> int:
    """Write the manifest and publish the output; return bytes of manifest and atoms."""
    staging, full = work.staging, work.full
    atoms = [file.seal_atom(crcs[number]) for number, file in enumerate(work.files)]
    files = {**states, **{file.path: file.seal(crcs[number]) for number, file in enumerate(work.files)}}
    fingerprint, view = work.identity or identify(work.index)
    identity = {"fingerprint": fingerprint, "view": view, "verified": work.options.verify}
    index = dump_index(work.index, atoms, full.patterns, full.origin, identity)
    text = Seal(version=OF_CONVERSIONS, package=__version__, files=files, index=index).dump()
    write_atomically(staging.path(MANIFEST), text)
    staging.commit(staging.name if work.options.latest else None, overwrite=work.replace)
    return sum(file.image.size for file in work.files) + len(text)


def join_ranges(
    written: Iterable[Written], files: Sequence[OutputFile], numbers: Iterable[int] | None = None
) -> dict[int, int]:
    """Combine each output's CRC32s of ranges; raise if one of ``numbers`` has gaps."""
    by_output: dict[int, tuple[int, int]] = {}  # end of the joined ranges, or -1 after a gap; their CRC32
    for item in sorted(written):
        end, crc = by_output.get(item.range.output, (0, 0))
        nbytes = item.range.numel * files[item.range.output].atom.itemsize
        joined = combine_crc32(crc, item.crc, nbytes) if end else item.crc
        by_output[item.range.output] = (end + item.range.numel if item.range.start == end else -1, joined)
    wanted = range(len(files)) if numbers is None else numbers
    lacking = [files[output].path for output in wanted if by_output.get(output, (-1, 0))[0] != files[output].atom.numel]
    if lacking:
        raise CheckpointError(f"not written as a whole: {shorten(lacking)}.")
    return {number: crc for number, (_, crc) in by_output.items()}
