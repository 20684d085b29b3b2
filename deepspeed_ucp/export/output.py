"""The folder of an export: staged, synced and renamed; keeps foreign files."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ..comm import Comm
from ..errors import UnsupportedError, shorten
from ..formats.deepspeed.ownfiles import read_state_tree
from ..formats.deepspeed.reading import select_extra_states
from ..formats.foreign.names import ADAPTER_STEM, MODEL_FOLDER, OPTIMIZER_FOLDER, TRAINERS, WEIGHTS_INDEX
from ..io.disk import check_space
from ..io.read import Checked
from ..io.staging import OutputKind, Staging
from ..io.store import is_folder, list_folder, list_tree
from ..io.upload import open_staging
from ..model.storage import MASTER
from ..stream.duplicates import check_samples, find_diverged
from ..stream.reader import verify_reads
from ..stream.report import OutputReport
from .tensors import ExportOptions, Selection, Tensor

logger = logging.getLogger("deepspeed_ucp")

_EXPORTED = re.compile(
    r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json|\.metadata|__\d+_\d+\.distcp"
    rf"|adapter_model\.safetensors|{MODEL_FOLDER}|{OPTIMIZER_FOLDER}"
)

TEMPLATES = "additional_chat_templates"
"""Folder of further chat templates (transformers/utils/hub.py, ``CHAT_TEMPLATE_DIR``)."""

BESIDE = re.compile(
    r"[\w.-]*config\.json|(special_tokens_map|added_tokens|chat_template|normalizer)\.json|token(izer|ization)[\w.-]*"
    r"|([\w-]+[_-])?vocab(-[\w-]+)?\.(json|txt)|merges\.txt|[\w.-]+\.(model|jinja|tiktoken|spm|codes|tokenizer|py)"
    rf"|(tekken|emoji|byte_maps|word_shape|word_pronunciation)\.json|dict\.txt|{TEMPLATES}"
)
"""Further files that Hugging Face's libraries load with the weights, including a model's code, and a folder."""


EXPORT = OutputKind(
    name="an export",
    maker="export",
    is_output=lambda folder: is_folder(folder) and any(map(_EXPORTED.fullmatch, list_folder(folder))),
    parts=re.compile(rf"{_EXPORTED.pattern}|{TRAINERS.pattern}|\.metadata\.tmp"),
    kept=BESIDE,
    last=(
        *(f"{ADAPTER_STEM}.safetensors", "model.safetensors", WEIGHTS_INDEX, ".metadata"),
        *(f"{OPTIMIZER_FOLDER}/.metadata", f"{MODEL_FOLDER}/.metadata"),
    ),
)


@dataclass(frozen=True, slots=True)
class Export:
    """A running export: its contents, ranks, options, output folder and report."""

    selection: Selection
    comm: Comm
    options: ExportOptions
    folder: str
    report: OutputReport

    def verify(self, tensors: Iterable[Tensor], checks: Sequence[Checked], again: int = 0) -> None:
        """Compare bytes read with checksums, and masters with their copies (collective).

        Logs tensors with too large values for the written type. The report counts ``again``, bytes read twice.
        """
        index, nbytes = self.selection.index, again + sum(check.nbytes for check in checks)
        nbytes += verify_reads(checks, index, self.comm, threads=self.report.workers)
        check_samples(index, [tensor.full.atom.key for tensor in tensors], self.comm)
        gathered = self.comm.gather((nbytes, self.selection.overflowed))
        self.report.bytes_read = sum(nbytes for nbytes, _ in gathered)
        if (overflowed := sorted(set().union(*(names for _, names in gathered)))) and self.comm.rank == 0:
            logger.warning(
                "values too large for %s are written as infinite, or as its largest (--dtype chooses another type): %s",
                *("/".join(self.report.dtypes), shorten(overflowed)),
            )


@contextmanager
def stage_export(
    format: str,
    destination: str,
    selection: Selection,
    options: ExportOptions,
    comm: Comm,
    *,
    tensors: int,
    nbytes: int,
) -> Iterator[Export]:
    """Create an output folder that becomes the destination after success (collective)."""
    index = selection.index
    comm.once(lambda: _warn_losses(selection))
    report = OutputReport(
        format=format,
        source=os.path.dirname(index.state_file),
        destination=destination,
        tensors=tensors,
        parameters=sum(weight.numel for weight in selection.weights if weight.full.name not in index.buffers),
        dtypes=tuple(sorted({weight.dtype for weight in selection.weights})),
        nodes=comm.size,
    )
    staging = comm.run(lambda: _open_staging(destination, report.source, comm))
    with report.timed(), ExitStack() as stack, staging.scratch():
        comm.once(lambda: _begin(staging, nbytes, options.overwrite, stack))
        yield Export(selection, comm, options, staging.folder, report)
        report.files = comm.once(
            lambda: {name: entry.size for name, entry in sorted(list_tree(staging.folder).items())}
        )
        comm.run(staging.sync)
        comm.once(lambda: staging.commit(overwrite=options.overwrite))
    report.bytes_written = sum(report.files.values())


def _open_staging(destination: str, source: str, comm: Comm) -> Staging:
    staging = open_staging(destination, source, EXPORT)
    if staging.is_remote and comm.size > 1:
        raise UnsupportedError(
            "all nodes write an export's files together, which an object store does not support. Export on one node, "
            "or to a shared file system, and copy the export.",
            path=destination,
        )
    return staging


def _begin(staging: Staging, nbytes: int, overwrite: bool, stack: ExitStack) -> None:
    """Lock the destination and create the staging folder; ``stack`` releases both."""
    stack.enter_context(staging.lock())
    staging.check_destination(overwrite)
    staging.begin()
    stack.enter_context(staging.discard_on_error())
    check_space(staging.folder, nbytes)


def _warn_losses(selection: Selection) -> None:
    """Warn of data that an export cannot hold or that the source lacks."""
    index = selection.index
    if index.dropped:
        logger.warning("%s: %s", index.state_file, index.dropped)
    if extra := select_extra_states(read_state_tree(index)):
        logger.warning("%s: extra states of modules are not written: %s", index.state_file, shorten(extra))
    if parted := find_diverged(index, sorted(index.instances), index.instances, Comm()):
        logger.warning(
            "held by several pipeline stages with different values; the first stage's are written: %s",
            shorten(parted),
        )
    if not any(key.state == MASTER for key in index.atoms) and index.topology.precision != "float32":
        is_unnamed = not (index.stateless or index.foreign)
        names = "; if the optimizer was given model.parameters() at stage 0, --groups module names its fp32 weights"
        logger.warning(
            "this checkpoint has no fp32 weights%s, so the model's own %s are written%s",
            *(" with names" if is_unnamed else "", index.topology.precision, names if is_unnamed else ""),
        )
    if rounded := [w.names[0] for w in selection.weights if (w.full.dtype, w.dtype) == ("float64", "float32")]:
        logger.warning("float64 is rounded to float32 (--dtype stored keeps it): %s", shorten(rounded))
    padded = [weight for weight in selection.weights if weight.shape != weight.full.shape]
    if cut := [f"{weight.names[0]} ({weight.shape[0]} of {weight.full.shape[0]} rows)" for weight in padded]:
        logger.info("padding of a vocabulary is not written (--keep-padding writes it): %s", shorten(cut))
    if selection.unused:
        logger.warning("rules and prefixes that match no parameter: %s", shorten(selection.unused))
    if selection.resizes:
        logger.warning("patterns: resize rules are for loads; the saved shapes are written")
