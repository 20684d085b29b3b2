"""Findings about a checkpoint: faults, warnings and notes."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ..errors import (
    CheckpointError,
    ChecksumError,
    MismatchError,
    OutOfReachError,
    UcpError,
    UnsupportedError,
    fold_names,
    shorten,
)
from ..io.interface import explain_failure
from ..torchsave.objects import describe

FAULT, WARNING, NOTE = "fault", "warning", "note"
"""Severities: the checkpoint cannot be loaded; it can, with a risk; information."""

COPY = 'Copy the missing files here, name a place that has it ("also", --also), or load another tag.'
"""Remedy for missing files. A load adds ``fallback`` where that option applies."""

REPORT = "Update deepspeed_ucp, or report this message with the version of the library that wrote the file."
"""Remedy for a value that no known writer saves."""

_LONGEST = 200  # maximum characters of another error's text
_MOST = 16  # maximum number of findings in one error

_NUMBER = re.compile(r"\d+")

_ERRORS: dict[str, type[UcpError]] = {
    "read": OutOfReachError,
    "unsupported": UnsupportedError,
    "unnamed": MismatchError,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, a warning or a note about a checkpoint.

    Attributes:
        kind: of a file: ``header`` (unreadable, damaged, renamed), ``crc``, ``read``, ``missing``, ``foreign`` (of
            another step, run or world size), ``inconsistent`` (elements missing or covered twice, contradictions),
            ``seal`` (not the sealed file), ``extra``, ``leftover`` (of an earlier save, or a copy of another rank; not
            loaded), ``times`` (written at another time).
            Of the whole: ``unsupported``, ``latest``, ``unnamed`` (stage 0: optimizer states without parameter names),
            ``unsettled``, ``irregular``, ``unreadable``, ``checksums``, ``dropped``, ``rules``,
            ``unsaved`` (state that DeepSpeed saves nowhere).
        file: relative path; empty for the whole folder.
        text: the expected and found values, and the remedy.
        severity: ``fault``, ``warning`` or ``note``.
        names: affected atoms, parameters or files.
        rules: unsettled: suggested rules.
        cause: kind of a more specific finding that may cause this one.
    """

    kind: str
    file: str
    text: str
    severity: str = FAULT
    names: tuple[str, ...] = ()
    rules: tuple[dict[str, Any], ...] = ()
    cause: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether the checkpoint cannot be loaded because of this finding."""
        return self.severity == FAULT


def from_error(folder: str, error: UcpError) -> list[Finding]:
    """Convert an error to findings: those that it carries, else one per line of text."""
    if error.findings:
        return list(error.findings)
    kinds = (kind for kind, error_class in _ERRORS.items() if isinstance(error, error_class))
    kind = next(kinds, error.kind or "inconsistent")
    file = os.path.relpath(error.path, folder) if error.path.startswith(f"{folder}{os.sep}") else ""
    return [Finding(kind, file, text) for line in error.args for text in line.splitlines()]


def from_failure(kind: str, file: str, error: UcpError) -> Finding:
    """Convert a file's error to a fault of ``kind``, or ``read`` if out of reach."""
    kind, cause = "read" if isinstance(error, OutOfReachError) else kind, "crc" * isinstance(error, ChecksumError)
    return Finding(kind, file, str(error), cause=cause)


def make_error(findings: Iterable[Finding]) -> UcpError | None:
    """Combine faults to one error, OutOfReachError if a file is; None without faults."""
    faults = [finding for finding in findings if finding.severity == FAULT]
    if not faults:
        return None
    texts = list(dict.fromkeys(finding.text for finding in fold_findings(faults)))
    more = [f"… and {len(texts) - _MOST} more faults."] if len(texts) > _MOST else []
    kind = "read" if any(fault.kind == "read" for fault in faults) else faults[0].kind
    return _ERRORS.get(kind, CheckpointError)(*texts[:_MOST], *more, findings=faults)


def fold_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that differ only in the numbers in file names; list the ranges."""
    groups: dict[Hashable, list[Finding]] = {}
    for finding in findings:
        template = _NUMBER.sub("#", finding.text) if finding.file else finding.text
        groups.setdefault((finding.kind, finding.severity, finding.file != "", template), []).append(finding)
    return [_merge_group(group) for group in groups.values()]


def _merge_group(group: Sequence[Finding]) -> Finding:
    first, *others = group
    names = tuple(dict.fromkeys(finding.file for finding in group))
    if len(names) == 1:
        return first
    is_same = len({finding.text.replace(finding.file, "") for finding in group}) == 1
    listed = names if is_same else [finding.file for finding in others]
    ranges = shorten(name for name, _ in fold_names(((name, name) for name in listed), key=lambda _: None))
    if is_same:
        text = first.text.replace(first.file, f"{ranges} ({len(names)} files)", 1)
    else:
        text = f"{first.text} Likewise {ranges} ({len(listed)} more files)."
    return replace(first, text=text, names=names)


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Remove duplicates and sort by severity, then by file."""
    order = (FAULT, WARNING, NOTE)
    unique = {(finding.kind, finding.file, finding.text): finding for finding in findings}
    return tuple(sorted(unique.values(), key=lambda f: (order.index(f.severity), f.file, f.kind, f.text)))


@contextmanager
def explain_form(path: str, field: str = "", value: Any = None) -> Iterator[None]:
    """Convert unexpected exceptions of the block to UnsupportedError about the file.

    UcpErrors pass, an OSError becomes a read error. The message quotes ``value`` of ``field``, a key in the file.
    """
    try:
        yield
    except UcpError:
        raise
    except OSError as error:
        raise explain_failure(path, "read", error) from error
    except (Exception, MemoryError) as error:  # an unexpected value can upset each reader in its own way
        subject = f"its {field} is {describe(value)}, a form" if field else "its contents have a form"
        text = f"{type(error).__name__}: {error}"[:_LONGEST]
        raise UnsupportedError(f"{subject} that is not supported ({text}). {REPORT}", path=path) from error
