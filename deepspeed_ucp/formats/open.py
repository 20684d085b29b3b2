"""Open a checkpoint folder: files → headers → findings and an AtomicIndex."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..comm import Comm
from ..errors import CheckpointError, MismatchError, UcpError, UnsupportedError, raise_first, shorten
from ..extensions.registry import SaveExtension
from ..io.paths import find_tag_folder, normalize
from ..model.index import AtomicIndex, SavedJob
from .deepspeed.files import find_foreign_format, holds_atoms, holds_optimizer
from .deepspeed.gather import ReadResults, find_step_mismatch, gather_save, identify_save, skip_faulty
from .deepspeed.headers import FileHeader
from .deepspeed.index import build_index
from .deepspeed.module import rename_keys
from .deepspeed.naming import Naming
from .deepspeed.reading import read_file
from .deepspeed.save import Save
from .findings import WARNING, Finding, fold_findings, from_error, make_error, sort_findings
from .foreign.formats import survey_foreign
from .foreign.names import TRAINER_STATE
from .locations import FileTable, find_files, list_by_host, list_files, sum_file
from .universal.universal import survey_atomic

if TYPE_CHECKING:  # pydantic takes long to import
    from .universal.index import Manifest

logger = logging.getLogger("deepspeed_ucp")

_EARLIER = "files of an earlier save, which DeepSpeed's own load would read as part of this one"


@dataclass(frozen=True, slots=True)
class FolderReport:
    """The headers of a checkpoint's folder.

    Attributes:
        files: all files, also in further places.
        index: the atomic view; None if faults prevent it.
        findings: faults, equal on all ranks; warnings and notes, on rank 0.
        manifest: of an atomic checkpoint, if it has one.
    """

    files: FileTable
    atomic: bool
    index: AtomicIndex | None
    findings: tuple[Finding, ...]
    manifest: Manifest | None = None
    extensions: Sequence[SaveExtension] = ()

    @property
    def folder(self) -> str:
        return self.files.folder

    @property
    def fault(self) -> UcpError | None:
        """The faults of the files that prevent a load, as one error; None without any."""
        return make_error(finding for finding in self.findings if finding.kind not in ("unnamed", "unsupported"))

    def require(self) -> AtomicIndex:
        """Return the index of a checkpoint without faults; raise all faults as one error."""
        raise_first([make_error(self.findings)])
        if self.index is None:
            raise UcpError(f"{self.folder}: was not read.")
        return self.index

    def log_warnings(self, *, weights_only: bool = False) -> None:
        """Log the warnings; for weights alone, without those about unsaved state."""
        skipped = ("unsaved",) if weights_only else ()
        warnings = [finding for finding in self.findings if finding.severity == WARNING and finding.kind not in skipped]
        if earlier := _list_stale_files(warnings):
            logger.warning("%s: ignoring files of an earlier save: %s", self.folder, shorten(earlier))
        for finding in fold_findings(warnings):
            if finding.kind != "leftover":
                logger.warning("%s", finding.text)


def open_checkpoint(folder: str, comm: Comm, naming: Naming | None = None, *, also: Sequence[str] = ()) -> AtomicIndex:
    """Read the headers of a checkpoint, each on one rank, as an index (collective).

    Atomic checkpoints (with an index, or of DeepSpeed's ``ds_to_universal``) are opened too.

    Args:
        comm: the loading ranks. If they see different files, the union is the checkpoint.
        naming: names of the parameters of a stage-0 source, and whether only weights are loaded.
        also: the tag's folder in further places; files in the first place take precedence.

    Raises:
        CheckpointError: missing, damaged, foreign or differing files; the same error on every rank.
        UnsupportedError: the kind of checkpoint is not supported.
        MismatchError: at stage 0, the param groups differ from the live ones.
    """
    report = survey_checkpoint(folder, comm, naming, also=also)
    index = comm.run(report.require)
    if comm.rank == 0:
        report.log_warnings(weights_only=naming is not None and naming.weights_only)
    return index


def survey_checkpoint(
    folder: str, comm: Comm, naming: Naming | None = None, *, also: Sequence[str] = ()
) -> FolderReport:
    """Read the headers of a checkpoint's files and collect all findings (collective).

    Arguments as of :func:`open_checkpoint`. Only errors of the listing are raised, and ConfigError for groups of an
    invalid form.
    """
    return survey_files(find_files([folder, *also], comm), comm, naming)


def survey_files(where: FileTable, comm: Comm, naming: Naming | None = None) -> FolderReport:
    """Read the headers of listed files and collect all findings (collective)."""
    atomic, foreign, manifest = holds_atoms(where.entries), find_foreign_format(where.entries), None
    extensions: list[SaveExtension] = []
    try:
        if atomic:
            index, findings, manifest = survey_atomic(where, comm)
        elif foreign is not None:
            index, findings = survey_foreign(where, comm, foreign)
        else:
            index, findings, extensions = _survey_normal(where, comm, naming or Naming())
    except (CheckpointError, UnsupportedError) as error:
        index, findings = None, from_error(where.folder, error)
    return FolderReport(where, atomic, index, sort_findings(findings), manifest, extensions)


def read_saved_job(folder: str, also: Sequence[str] = ()) -> SavedJob:
    """Read the saved job from a model-states file or a foreign checkpoint's headers.

    ``also``: the same folder in further places.
    """
    where = find_files([folder, *also], Comm())
    entries = where.entries
    if not holds_atoms(entries) and find_foreign_format(entries) is not None:
        index = survey_files(where, Comm()).require()
        return replace(index.job, weights_alone=index.is_weights_alone)
    save = Save.of(where)
    if holds_atoms(entries):
        name = save.name("model" if save.names["model"] else "model_zero3", 0, 0)
        first = [where.read(name, lambda folder: read_file(folder, name))]
    else:
        error = make_error(identify_save(save, ReadResults(where, Comm())))
        if error is not None and not save.first:
            raise error
        first = save.first
    model = first[0].require_model()
    return SavedJob.read({**model.counters, **model.batch})


def lacks_states(folder: str) -> bool:
    """Return True for a local, readable stage-0 save without optimizer states."""
    try:
        if any(map(holds_optimizer, os.listdir(folder))):
            return False
        return read_file(folder, "mp_rank_00_model_states.pt").require_model().optim is None
    except (UcpError, OSError):
        return False


def seal_folder(folder: str, comm: Comm, *, local: bool = False) -> None:
    """Write or replace the seal of a finished save (collective).

    Args:
        local: every node has its own folder, and gets the seal.

    Raises:
        UcpError: the files have faults, so that no seal is written; or the seal cannot be written.
    """
    from .deepspeed.seal import write_seal

    where = find_files([folder], comm) if local else list_files(folder, comm)
    save, findings = gather_save(where, comm)

    def require_headers() -> list[FileHeader]:
        raise_first([make_error(findings)])
        return save.headers if save else []

    headers = comm.run(require_headers)
    swaps = {header.name: header.size for header in headers if header.swap}
    crcs = where.share(list(swaps), lambda name: sum_file(where.path(name), swaps[name]), comm)
    sums = dict(zip(swaps, crcs, strict=True))
    sealed = [replace(header, crc=sums.get(header.name, header.crc)) for header in headers]
    if where.access.is_partial:
        hosts = list_by_host(where)
        comm.run(lambda: write_seal(where.folder, sealed, hosts) if where.is_first else None)
    else:
        comm.once(lambda: write_seal(where.folder, sealed))


def _list_stale_files(findings: Iterable[Finding]) -> list[str]:
    """Return the files of an earlier save, without redundant copies of this one's."""
    return [finding.file for finding in findings if finding.kind == "leftover" and not finding.names]


def _survey_normal(
    where: FileTable, comm: Comm, naming: Naming
) -> tuple[AtomicIndex | None, list[Finding], list[SaveExtension]]:
    """Return a DeepSpeed save's index, findings and active extensions (collective)."""
    save, findings = gather_save(where, comm)
    if naming.weights_only and make_error(findings) is not None and not where.access.is_partial:
        save, findings = _gather_weights_only(where, comm) or (save, findings)
    extensions = save.extensions if save else []
    for extension in extensions:
        findings += skip_faulty(extension.verify_save(save, comm), findings)
    if save is None or make_error(findings) is not None:
        return None, findings, extensions
    rename_keys(save, naming.keys)
    index, more = _build(save, naming)
    if index is not None and any(name.endswith("model_states.pt") for name in _list_stale_files(findings)):
        index = replace(index, unnoticed=(*index.unnoticed, _EARLIER))
    if comm.rank == 0:
        state = os.path.join(os.path.dirname(normalize(find_tag_folder(where.folder))), TRAINER_STATE)
        findings += find_step_mismatch(state, save.model(0).counters.get("global_steps"))
    return index, [*findings, *more, *find_unsaved(save)], extensions


def _gather_weights_only(where: FileTable, comm: Comm) -> tuple[Save, list[Finding]] | None:
    """Gather a save without optimizer files; None if it has other faults (collective)."""
    if not any(map(holds_optimizer, where.entries)):
        return None
    save, findings = gather_save(where.choose(lambda name: not holds_optimizer(name)), comm)
    if save is None or make_error(findings) is not None:
        return None
    text = f"{where.folder}: ignoring its incomplete or damaged optimizer states, since only weights are loaded."
    return save, [*findings, Finding("missing", "", text, WARNING)]


def _build(save: Save, naming: Naming) -> tuple[AtomicIndex | None, list[Finding]]:
    """Build the index without unnamed optimizer states; return faults as findings."""
    folder, unnamed = save.folder, list[Finding]()
    try:
        try:
            return build_index(save, naming), []
        except MismatchError as error:
            unnamed = [] if naming.weights_only and naming.groups is None else from_error(folder, error)
            return build_index(save, replace(naming, optimizer=False)), unnamed
    except (CheckpointError, UnsupportedError, MismatchError) as error:
        return None, [*unnamed, *from_error(folder, error)]


def find_unsaved(save: Save) -> list[Finding]:
    """Warn of state that DeepSpeed does not save, by the ds_config."""
    autocast = save.main.config.get("torch_autocast") or {}
    halves = ("fp16", "float16", "half", "torch.float16")  # all that DeepSpeed takes for it (runtime/config.py)
    if not autocast.get("enabled") or autocast.get("dtype") not in halves:
        return []
    text = (
        f"{save.path(save.main)}: was saved under torch_autocast in fp16, whose GradScaler DeepSpeed does not save. A "
        "run that scales its loss starts with the scale that it is configured with."
    )
    return [Finding("unsaved", save.main.name, text, WARNING)]
