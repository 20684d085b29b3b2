"""What looking at a checkpoint has found: one kind of finding for opening, verifying and inspecting."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Sequence
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

FAULT, WARNING, NOTE = "fault", "warning", "note"
"""Severities: it cannot be loaded; it can, but a user should know before; something to know."""

COPY = 'Copy what is missing here, name a place that has it ("also", --also), or load another tag.'
"""Remedy for missing files. A load adds ``fallback`` where that option applies."""

_TOLD = 16
"""Findings that one error tells."""

_NUMBER = re.compile(r"\d+")

_ERRORS: dict[str, type[UcpError]] = {
    "read": OutOfReachError,
    "unsupported": UnsupportedError,
    "unnamed": MismatchError,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a checkpoint, odd, or to be decided.

    Attributes:
        kind: of a file: ``header`` (unreadable, damaged, renamed), ``crc``, ``read``, ``missing``, ``foreign`` (of
            another step, run or world size), ``inconsistent`` (elements missing or covered twice, contradictions),
            ``manifest``, ``seal``, ``extra``, ``leftover`` (of an earlier save, or another rank's copy; not loaded),
            ``times`` (written at another time).
            Of the whole: ``unsupported``, ``latest``, ``unnamed`` (stage 0: nothing tells whose optimizer states are
            whose), ``unsettled``, ``irregular``, ``unreadable``, ``checksums``, ``dropped``, ``rules``,
            ``unsaved`` (state that DeepSpeed saves nowhere).
        file: name in the folder; empty where it is the folder's.
        text: what was expected, what was found, what to do.
        severity: ``fault``, ``warning`` or ``note``.
        names: the atoms, parameters or files that it is about.
        rules: unsettled: rules to be checked and pasted, one for all names that it matches.
        cause: kind of the finding that it comes from and that tells more, if its file has one.
    """

    kind: str
    file: str
    text: str
    severity: str = FAULT
    names: tuple[str, ...] = ()
    rules: tuple[dict[str, Any], ...] = ()
    cause: str = ""

    @property
    def warning(self) -> bool:
        """It does not keep the checkpoint from being loaded."""
        return self.severity != FAULT


def from_error(folder: str, error: UcpError) -> list[Finding]:
    """What an error tells of a folder: the findings that it was made of, else one a line, of its path and kind."""
    if error.findings:
        return list(error.findings)
    kind = next((kind for kind, each in _ERRORS.items() if isinstance(error, each)), error.kind or "inconsistent")
    file = os.path.relpath(error.path, folder) if error.path.startswith(f"{folder}{os.sep}") else ""
    return [Finding(kind, file, text) for line in error.args for text in line.splitlines()]


def from_failure(kind: str, file: str, error: UcpError) -> Finding:
    """What a file's error tells: of that kind, unless it is no fault of the file."""
    kind, cause = "read" if isinstance(error, OutOfReachError) else kind, "crc" * isinstance(error, ChecksumError)
    return Finding(kind, file, str(error), cause=cause)


def make_error(findings: Iterable[Finding]) -> UcpError | None:
    """The error that tells all faults, of the first one's kind, or out of reach where one is; None without any."""
    faults = [finding for finding in findings if finding.severity == FAULT]
    if not faults:
        return None
    texts = list(dict.fromkeys(finding.text for finding in fold_findings(faults)))
    more = [f"… and {len(texts) - _TOLD} more faults."] if len(texts) > _TOLD else []
    kind = "read" if any(each.kind == "read" for each in faults) else faults[0].kind
    return _ERRORS.get(kind, CheckpointError)(*texts[:_TOLD], *more, findings=faults)


def fold_findings(findings: Iterable[Finding]) -> list[Finding]:
    """One finding of those that say the same of several files, whose names it tells with ranges of numbers."""
    groups: dict[Hashable, list[Finding]] = {}
    for each in findings:
        said = _NUMBER.sub("#", each.text) if each.file else each.text
        groups.setdefault((each.kind, each.severity, each.file != "", said), []).append(each)
    return [_fold(group) for group in groups.values()]


def _fold(group: Sequence[Finding]) -> Finding:
    first, *others = group
    names = tuple(dict.fromkeys(each.file for each in group))
    if len(names) == 1:
        return first
    is_same = len({each.text.replace(each.file, "") for each in group}) == 1
    told = names if is_same else [each.file for each in others]
    ranges = shorten(name for name, _ in fold_names(((name, name) for name in told), same=lambda _: None))
    if is_same:
        text = first.text.replace(first.file, f"{ranges} ({len(names)} files)", 1)
    else:
        text = f"{first.text} The like is true of {ranges} ({len(told)} more files)."
    return replace(first, text=text, names=names)


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each finding once: faults in front, then by file."""
    order = (FAULT, WARNING, NOTE)
    unique = {(each.kind, each.file, each.text): each for each in findings}
    return tuple(sorted(unique.values(), key=lambda f: (order.index(f.severity), f.file, f.kind, f.text)))
