"""Opens a checkpoint folder: decides what it is, reads each header once over all ranks, builds the AtomicIndex."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..atoms import AtomicIndex
from ..comm import Comm
from ..errors import CheckpointError, UcpError, UnsupportedError, shorten
from .atomic import survey_atomic
from .files import Entry, compare_listings, holds_atoms, list_entries
from .findings import WARNING, Finding, from_error, make_error, sort_findings
from .naming import GroupNames, NamedGroups
from .normal import Naming, read_save, survey_normal

logger = logging.getLogger("deepspeed_ucp")


@dataclass(frozen=True, slots=True)
class FolderReport:
    """A checkpoint's folder as its headers tell.

    Attributes:
        folder: which.
        atomic: it is an atomic checkpoint.
        index: the atomic view; with faults only as far as it can be had.
        findings: all that is wrong or odd, the same on every rank.
    """

    folder: str
    atomic: bool
    index: AtomicIndex | None
    findings: tuple[Finding, ...]

    def require(self) -> AtomicIndex:
        """The index of a checkpoint without faults.

        Raises:
            UcpError: telling all faults.
        """
        error = make_error(self.findings)
        if error is not None:
            raise error
        if self.index is None:
            raise UcpError(f"{self.folder}: was not read.")
        return self.index


def open_checkpoint(
    folder: str,
    comm: Comm,
    live_groups: GroupNames | None = None,
    live_hyper: Sequence[Mapping[str, Any]] = (),
    *,
    groups: NamedGroups | None = None,
    weights_only: bool = False,
) -> AtomicIndex:
    """Read the headers of a checkpoint folder (each file by one rank) into the atomic view; collective.

    An atomic checkpoint (with a manifest, or as DeepSpeed's ``ds_to_universal`` writes it) is opened as well.

    Args:
        folder: the tag's folder.
        comm: the ranks that load.
        live_groups: param groups of the live optimizer, which name the parameters of a stage-0 source.
        live_hyper: their hyper-parameters, which tell whether they are in the saved order.
        groups: what a stage-0 source's optimizer was given, without a live engine: ``"module"`` for
            ``model.parameters()`` in one group, or the names of each group's parameters in order.
        weights_only: the optimizer's states are not wanted, so that a stage-0 source needs no naming.

    Raises:
        CheckpointError: missing, damaged, foreign or differing files; the same error on every rank.
        UnsupportedError: a kind of checkpoint that is not covered.
        MismatchError: stage 0 with other param groups than the live ones.
    """
    report = survey_checkpoint(folder, comm, Naming(live_groups, live_hyper, groups, weights_only=weights_only))
    index = comm.run(report.require)
    if comm.rank == 0:
        _tell_warnings(report)
    return index


def survey_checkpoint(folder: str, comm: Comm, naming: Naming | None = None) -> FolderReport:
    """Look at the headers of a checkpoint's files, and find everything that is wrong with them; collective.

    Args:
        folder: the tag's folder.
        comm: the ranks that share the files.
        naming: what names the parameters of a stage-0 source.

    Raises:
        CheckpointError: the folder cannot be listed, or the ranks see different ones.
        ConfigError: the groups are of another form.
    """
    entries = _list_everywhere(folder, comm)
    atomic = holds_atoms(entries)
    try:
        if atomic:
            index, findings = survey_atomic(folder, comm, entries)
        else:
            index, findings = survey_normal(folder, comm, entries, naming or Naming())
    except (CheckpointError, UnsupportedError) as error:
        index, findings = None, from_error(folder, error)
    return FolderReport(folder, atomic, index, sort_findings(findings))


def seal_folder(folder: str, comm: Comm) -> None:
    """Write the seal of a save that has come to its end, in place of an older one; collective.

    Raises:
        CheckpointError: the files are damaged or do not belong together; there is no seal then.
        UnsupportedError: a kind of checkpoint that is not covered.
        StorageError: the seal cannot be written.
    """
    from .seal import write_seal

    save = read_save(folder, comm, sealed=False)

    def work() -> None:
        error = make_error(save.findings)
        if error is not None:
            raise error
        write_seal(folder, save.headers)

    comm.once(work)


def _list_everywhere(folder: str, comm: Comm) -> dict[str, Entry]:
    """Every rank lists the folder. Digests are compared first: whole listings of thousands of ranks are long."""
    entries = comm.run(lambda: list_entries(folder))
    sizes = {name: entry.size for name, entry in entries.items()}
    digest = hashlib.sha256(repr(sorted(sizes.items())).encode()).digest()
    if len(set(comm.gather(digest))) > 1:
        listings = comm.gather(sizes)
        comm.run(lambda: compare_listings(folder, listings))
    return entries


def _tell_warnings(report: FolderReport) -> None:
    warnings = [finding for finding in report.findings if finding.severity == WARNING]
    left = [finding.file for finding in warnings if finding.kind == "leftover"]
    if left:
        logger.warning("%s: ignoring files of an earlier save: %s", report.folder, shorten(left))
    for finding in warnings:
        if finding.kind != "leftover":
            logger.warning("%s", finding.text)
