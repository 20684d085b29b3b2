"""What can still be told of a checkpoint that does not open: each file by itself, and what is wrong with it."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

from ..errors import UcpError, count_of
from ..sources.files import is_state_file
from ..sources.findings import Finding, fold_findings, make_error
from ..sources.open import FolderReport
from ..sources.reading import read_file
from .printing import format_bytes, format_table
from .survey import VERSION

_MANY = 40
"""With more files, those that are whole are only counted."""


def examine_folder(report: FolderReport) -> tuple[UcpError | None, dict[str, Any]]:
    """Why a checkpoint as a whole does not open; every state file with its size and what its header tells, and all
    faults, as data for JSON."""
    error = make_error(report.findings)
    faults: dict[str, list[str]] = defaultdict(list)
    for finding in report.findings:
        if not finding.warning:
            faults[finding.file].append(finding.text)
    missing = sorted({f.file for f in report.findings if f.kind == "missing" and f.file and not f.warning})
    files = [
        {"name": name, "size": size, **_read_facts(report, name), "faults": faults.pop(name, [])}
        for name, size in sorted(report.files.sizes.items())
        if size >= 0 and is_state_file(name)
    ]
    return error, {
        "inspect": VERSION,
        "folder": report.folder,
        "error": str(error),
        "kind": type(error).__name__,
        "files": files,
        "missing": [{"name": name, "text": text} for name in missing for text in faults.pop(name, [])],
        "faults": [text for name, texts in faults.items() for text in texts if name or text != str(error)],
    }


def _read_facts(report: FolderReport, name: str) -> dict[str, Any]:
    """What one readable header tells: what it ``holds`` in words, and its ``step``."""
    try:
        header = report.files.read(name, lambda folder: read_file(folder, name))
    except UcpError:
        return {"holds": None}
    if header.layer is not None:
        return {"holds": f"{count_of(len(header.layer), 'tensor')} of a pipeline's layer"}
    optim = header.optim or (header.model.optim if header.model else None)
    parts, step = [], None
    if header.model:
        step = header.model.counters.get("global_steps")
        module = header.model.module
        parts.append(f"{count_of(len(module), 'tensor')} of the model" if module else "model states")
    if optim:
        parts.append(f"ZeRO-{optim.stage} optimizer states ({optim.kind})" if optim.stage else "optimizer states")
    elif optim:
        step = max((held.scalars["step"] for held in optim.tensors if "step" in held.scalars), default=None)
    return {"holds": ", ".join(parts), "step": step}


def write_damage(data: dict[str, Any]) -> list[str]:
    """The report's text: all files, then what is wrong with them."""
    folder, files, rows = data["folder"], data["files"], []
    bad = [file for file in files if file["faults"] or file["holds"] is None]
    for file in files if len(files) <= _MANY else bad:
        step = "" if file.get("step") is None else f"step {file['step']:g}"
        state = "FAULT" if file in bad else "ok"
        rows.append((file["name"], format_bytes(file["size"]), state, file["holds"] or "not readable", step))
    rows += [(each["name"], "", "MISSING", "", "") for each in data["missing"]]
    lines = [f"{folder}: does not open{'. Its files:' if rows else ''}"]
    lines += ["", *(f"  {line}" for line in format_table(rows, right=(1,)))] if rows else []
    if len(files) > _MANY:
        lines.append(f"  … and {count_of(len(files) - len(bad), 'file')} ok (--json lists them)")
    faults = [Finding("", file["name"], text) for file in files for text in file["faults"]]
    faults += [Finding("", each["name"], each["text"]) for each in data["missing"]]
    faults += [Finding("", "", text) for text in data["faults"]]
    if faults:
        shown = (fault.text.removeprefix(f"{folder}{os.sep}") for fault in fold_findings(faults))
        lines += ["", "faults", *(f"  {text}" for text in dict.fromkeys(shown))]
    return lines
