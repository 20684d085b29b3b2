"""A conversion from beginning to end: settle, stage, write, verify, commit.

The output is staged aside, its manifest is written last, and it is renamed into place when every byte of the source has
been held against the checksum that training wrote. An attempt that was stopped is gone on with.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ..atoms import AtomicIndex
from ..comm import Comm
from ..errors import CheckpointError, UnsupportedError, shorten
from ..io.checksum import Checked, combine_crc32, crc32
from ..io.disk import check_space, write_atomically
from ..io.staging import MANIFEST, Staging, write_latest
from ..patterns import RuleSet
from ..patterns.recorded import read_pattern
from ..plan.conversion import Batch, Range, plan_conversion
from ..plan.limits import describe_irregular, refuse_unreadable
from ..sources.atomic.manifest import (
    AtomRecord,
    Manifest,
    digest_view,
    find_unplain,
    fingerprint,
    make_manifest,
    read_manifest,
)
from ..stream.progress import WorkOptions, divide_window
from ..stream.reader import AtomReader
from ..stream.report import OutputReport
from ..stream.samples import check_samples
from ..stream.wholes import Wholes, settle_wholes
from ..version import __version__
from .execute import Outcome, OutputFile, Written, close_file, is_intact, run_batches
from .outputs import (
    CONVERSION,
    check_paths,
    find_formless,
    list_files,
    list_outputs,
    list_steps,
    make_folders,
    write_file,
)
from .states import StateFile, write_states

logger = logging.getLogger("deepspeed_ucp")

FORMAT = 1
"""Of the bytes that a conversion writes; a staging folder of another one is thrown away."""


HALT = ".ucp-halt"
"""File in the staging folder by which a node that has failed stops the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(WorkOptions):
    """How to convert.

    Attributes:
        verify: hold every byte of the source against its CRC32.
        overwrite: convert anew and replace whatever atomic checkpoint is at the destination.
        refresh: replace one of ours that is of something else; one of the same thing is taken as it is.
        latest: let ``latest_universal`` beside the destination name it.
    """

    verify: bool = True
    overwrite: bool = False
    refresh: bool = False
    latest: bool = True


@dataclass(slots=True)
class _Conversion:
    """One conversion under way."""

    index: AtomicIndex
    comm: Comm
    options: ConvertOptions
    staging: Staging
    report: OutputReport
    wholes: Wholes
    files: list[OutputFile]
    steps: dict[str, tuple[bytes, int]]
    identity: dict[str, Any]
    entries: list[dict[str, Any]] = field(default_factory=list)
    replace: bool = False

    def replaces(self, manifest: Manifest | None) -> bool:
        """Note, and tell, whether what is at the destination is to be replaced; ``manifest`` is its own."""
        self.replace = self.options.overwrite or (self.options.refresh and manifest is not None)
        return self.replace


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
    """Write a checkpoint's atoms as an atomic checkpoint; collective.

    Args:
        index: the checkpoint.
        source: its folder.
        destination: folder to be made.
        rules: how tensor parallelism cuts parameters, by the user.
        live: the same by a live engine.

    Raises:
        UcpError: the same on every rank; the source is untouched and the destination as it was.
    """
    report = OutputReport(format="atomic", source=source, destination=destination, nodes=comm.size)
    with report.timed(), ExitStack() as stack:
        with report.phase("plan"):
            work = comm.run(lambda: _plan(index, comm, options, report, rules, live))
            if comm.rank == 0:
                _warn_losses(index, work.wholes)
        report.reused, work.entries = comm.once(lambda: _begin(work, stack))
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
    if text := describe_irregular(index):
        raise UnsupportedError(f"{text} The weights alone can be had with `ds_ucp export`.")
    wholes = settle_wholes(index, rules, live=live)
    staging = Staging(report.destination, report.source, CONVERSION)
    files, steps = list_files(wholes), list_steps(index)
    check_paths([*(file.path for file in files), *steps])
    identity = _identify(index, wholes, options) if comm.rank == 0 else {}
    return _Conversion(index, comm, options, staging, report, wholes, files, steps, identity)


def _warn_losses(index: AtomicIndex, wholes: Wholes) -> None:
    if wholes.unused:
        logger.warning("patterns: rules that match no parameter: %s", shorten(wholes.unused))
    if formless := find_formless(wholes):
        logger.warning(
            "DeepSpeed's own load_universal cannot cut %s as they are cut; at tensor-parallel degrees above 1 load "
            "this checkpoint with deepspeed_ucp",
            shorten(formless),
        )
    if unplain := find_unplain(index):
        logger.warning("hyper-parameters that are objects are not kept: %s", shorten(unplain))


def _identify(index: AtomicIndex, wholes: Wholes, options: ConvertOptions) -> dict[str, Any]:
    """What decides the output's bytes, and whether what was read has been checked."""
    patterns = {name: repr(pattern) for name, pattern in sorted(wholes.patterns.items())}
    return {
        "format": FORMAT,
        "package": __version__,
        "fingerprint": fingerprint(index),
        "view": digest_view(index),
        "patterns": crc32(repr(patterns).encode()),
        "verify": options.verify,
    }


def _begin(work: _Conversion, stack: ExitStack) -> tuple[bool, list[dict[str, Any]]]:
    """Lock the destination; whether it is there already, else the journals of an earlier attempt; rank 0 alone.

    Args:
        stack: what ends the lock, and clears up after an error.
    """
    stack.enter_context(work.staging.lock())
    if _reuse(work):
        work.staging.discard()  # of an attempt to overwrite it that was stopped
        return True, []
    entries = work.staging.begin(work.identity)
    stack.enter_context(work.staging.attempt())
    return False, entries


def _reuse(work: _Conversion) -> bool:
    """Whether the destination is the same conversion, complete; rank 0 alone.

    Raises:
        CheckpointError: it is something else.
    """
    staging, options = work.staging, work.options
    manifest = None if options.overwrite else _read_own(staging.destination)
    if manifest is not None:
        fault = _find_fault(staging.destination, manifest, work)
        if not fault:
            if options.latest:
                write_latest(staging.parent, staging.name)
            return True
        logger.warning("%s: is not reused: %s", staging.destination, fault)
    staging.check_destination(work.replaces(manifest))
    return False


def _read_own(folder: str) -> Manifest | None:
    """The destination's manifest; None where it has none, or none that can be read."""
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        logger.warning("not reused: %s", error)
        return None


def _find_fault(folder: str, manifest: Manifest, work: _Conversion) -> str:
    """Why an existing output does not do; empty where it does."""
    if (manifest.fingerprint, manifest.view) != (work.identity["fingerprint"], work.identity["view"]):
        return "it was made of something else"
    if work.options.verify and not manifest.verified:
        return "it was made without verifying the source"
    expected = {file.path: file.whole.shape for file in work.files}
    united = {name: read_pattern(told["pattern"]) for name, told in manifest.patterns.items()}
    if united != work.wholes.patterns or expected != {record.file: record.shape for record in manifest.atoms}:
        return "it was united by other patterns"
    sizes = {file.path: file.image.size for file in work.files}
    sizes.update((state.name, state.size) for state in manifest.states)
    for path, size in sizes.items():
        try:
            if os.stat(os.path.join(folder, path)).st_size != size:
                return f"{path} has another size"
        except OSError as error:
            return f"{path}: {error.strerror}"
    return ""


def _convert(work: _Conversion) -> None:
    comm, report = work.comm, work.report
    done, kept = _take_up(work)
    outcome = _write(work, done)
    written = [w for part in comm.gather([*outcome.written, *kept.written]) for w in part]
    with report.phase("verify"):
        if work.options.verify:
            outcome.checks.add(kept.checks.read)
            report.bytes_read += outcome.checks.verify(work.index, comm, threads=report.workers)
            check_samples(work.index, [whole.atom for whole in work.wholes.atoms.values()], comm)
    _finish(work, sorted(written))
    report.bytes_read = sum(comm.gather(report.bytes_read))
    report.tensors, report.state_bytes = len(work.files), work.wholes.nbytes


def _take_up(work: _Conversion) -> tuple[list[Range], Outcome]:
    """What an earlier attempt wrote and is still there, to the bit; each rank looks at a part of it; collective.

    Returns:
        the ranges that are done, on every rank; and this rank's part of them.
    """
    with work.report.phase("resume"):
        kept = work.comm.run(lambda: _find_intact(work))
    done = sorted({each.range for part in work.comm.gather(kept.written) for each in part})
    work.report.resumed_bytes = sum(each.numel * work.files[each.output].whole.itemsize for each in done)
    return done, kept


def _find_intact(work: _Conversion) -> Outcome:
    numbers = {file.path: number for number, file in enumerate(work.files)}
    kept = Outcome()
    for entry in work.entries[work.comm.rank :: work.comm.size]:
        ranges = [Written(Range(numbers[path], start, numel), crc) for path, start, numel, crc in entry["ranges"]]
        if all(is_intact(work.files[each.range.output], each, work.staging.folder) for each in ranges):
            kept.add(ranges, [Checked(*row) for row in entry["checks"]])
    return kept


def _write(work: _Conversion, done: Sequence[Range]) -> Outcome:
    """Read and write this node's batches; collective."""
    comm, report = work.comm, work.report
    report.workers, most = divide_window(work.options.workers, work.options.window)
    comm.once(lambda: _prepare_folder(work))
    comm.run(lambda: _check_folder(work.staging.folder))
    plan = plan_conversion(list_outputs(work.files), comm.size, most=most, done=done)
    with report.phase("write"):
        outcome = comm.run(lambda: _write_share(work, plan.nodes[comm.rank], plan.shares[comm.rank]))
    report.bytes_read = outcome.checks.nbytes
    return outcome


def _prepare_folder(work: _Conversion) -> None:
    folder = work.staging.folder
    check_space(folder, sum(file.image.size for file in work.files))
    make_folders(folder, [*(file.path for file in work.files), *work.steps])
    with suppress(FileNotFoundError):
        os.unlink(work.staging.path(HALT))  # of an earlier attempt


def _check_folder(folder: str) -> None:
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"{folder}: is not here; rank 0 has made it. Every node needs the same destination: name a folder on a "
            "shared file system."
        )


def _write_share(work: _Conversion, batches: Sequence[Batch], nbytes: int) -> Outcome:
    """This node's batches."""
    comm, halt = work.comm, work.staging.path(HALT)
    with (
        _tell_others(halt),
        AtomReader(work.index, checksum=work.options.verify) as reader,
        work.staging.journal(comm.rank) as journal,
        work.options.bar(nbytes) as progress,
    ):
        return run_batches(
            batches,
            work.files,
            work.staging.folder,
            reader,
            journal,
            workers=work.report.workers,
            progress=progress,
            halted=lambda: comm.size > 1 and os.path.exists(halt),
        )


@contextmanager
def _tell_others(halt: str) -> Iterator[None]:
    """Let the other nodes stop as soon as this one fails, not when they have written their share."""
    try:
        yield
    except Exception:
        with suppress(OSError), open(halt, "wb"):
            pass
        raise


def _finish(work: _Conversion, written: Sequence[Written]) -> None:
    """Close files, write what is small, and commit; collective."""
    comm, report = work.comm, work.report
    with report.phase("finish"):
        crcs = comm.run(lambda: _close_files(work, written))
        states = comm.once(lambda: write_states(work.index, work.staging.folder))
    with report.phase("sync"):
        comm.run(work.staging.sync)
    with report.phase("commit"):
        report.bytes_written = comm.once(lambda: _commit(work, crcs, states))


def _close_files(work: _Conversion, written: Sequence[Written]) -> dict[int, int]:
    """Write this rank's share of what surrounds files of several ranges, and of small files; each file's CRC32."""
    comm, folder = work.comm, work.staging.folder
    crcs = join_ranges(written, work.files)
    split = {each.range.output for each in written if each.range.numel < work.files[each.range.output].whole.numel}
    for number in sorted(split)[comm.rank :: comm.size]:
        close_file(work.files[number], crcs[number], folder)
    for path in sorted(work.steps)[comm.rank :: comm.size]:
        write_file(folder, path, work.steps[path][0])
    return crcs


def _commit(work: _Conversion, crcs: dict[int, int], states: list[StateFile]) -> int:
    """Write the manifest and let the output appear; its bytes."""
    staging = work.staging
    records = list(_list_records(work, crcs))
    patterns, origin = work.wholes.patterns, work.wholes.origin
    states = [*states, *(StateFile(path, len(data), crc) for path, (data, crc) in sorted(work.steps.items()))]
    manifest = make_manifest(work.index, records, patterns, origin, states, verified=work.options.verify)
    text = manifest.to_json().encode()
    write_atomically(staging.path(MANIFEST), text)
    sizes = [file.image.size for file in work.files]
    inodes = {os.stat(staging.path(state.name)).st_ino: state.size for state in states}  # hard links once
    staging.commit(staging.name if work.options.latest else None, overwrite=work.replace)
    return sum(sizes) + sum(inodes.values()) + len(text)


def _list_records(work: _Conversion, crcs: dict[int, int]) -> Iterable[AtomRecord]:
    for number, file in enumerate(work.files):
        whole = file.whole
        pattern = work.wholes.patterns.get(whole.name)
        yield AtomRecord(
            name=whole.name,
            state=whole.state,
            instance=whole.atom.instance,
            dtype=whole.dtype,
            shape=whole.shape,
            vocab=pattern.vocab if pattern is not None else None,
            file=file.path,
            offset=file.image.data_offset,
            nbytes=whole.nbytes,
            crc=crcs[number],
            size=file.image.size,
        )


def join_ranges(written: Iterable[Written], files: Sequence[OutputFile]) -> dict[int, int]:
    """Each output's CRC32 from those of its ranges.

    Raises:
        CheckpointError: ranges are missing.
    """
    sums: dict[int, tuple[int, int]] = {}
    # The longest of those that begin at one place first: attempts may have cut an output in different ways.
    for each in sorted(written, key=lambda w: (w.range.output, w.range.start, -w.range.numel)):
        end, crc = sums.get(each.range.output, (0, 0))
        if each.range.start < end:
            continue
        nbytes = each.range.numel * files[each.range.output].whole.itemsize
        joined = combine_crc32(crc, each.crc, nbytes) if end else each.crc
        sums[each.range.output] = (end + each.range.numel if each.range.start == end else -1, joined)
    lacking = [file.path for number, file in enumerate(files) if sums.get(number, (-1, 0))[0] != file.whole.numel]
    if lacking:
        raise CheckpointError(f"not written as a whole: {shorten(lacking)}.")
    return {number: crc for number, (_, crc) in sums.items()}
