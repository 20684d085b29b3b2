"""What can still be told of a checkpoint that does not open: each file by itself, and what is wrong with it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..errors import UcpError
from .figures import count_of, format_bytes, format_table
from .survey import VERSION

if TYPE_CHECKING:
    from ..sources.open import FolderReport

_MANY = 40
"""With more files, those that are whole are only counted."""


def examine_folder(report: FolderReport, error: UcpError | None) -> dict[str, Any]:
    """Every state file with its size and what its header tells, and all faults, as data for JSON.

    Args:
        report: of the folder.
        error: why the checkpoint as a whole does not open.
    """
    from ..sources.files import is_state_file, list_sizes

    folder, sizes = report.folder, list_sizes(report.folder)
    told: dict[str, list[str]] = {}
    for finding in report.findings:
        if not finding.warning:
            told.setdefault(finding.file, []).append(finding.text)
    files = [
        {"name": name, "size": size, **_read_facts(folder, name), "faults": told.pop(name, [])}
        for name, size in sorted(sizes.items())
        if size >= 0 and is_state_file(name)
    ]
    missing = {f.file for f in report.findings if f.kind == "missing" and f.file and not f.warning}
    return {
        "inspect": VERSION,
        "folder": folder,
        "error": str(error),
        "kind": type(error).__name__,
        "files": files,
        "missing": [{"name": name, "text": text} for name in sorted(missing) for text in told.pop(name, [])],
        "faults": [text for name, texts in told.items() for text in texts if name or text != str(error)],
    }


def _read_facts(folder: str, name: str) -> dict[str, Any]:
    """What one readable header tells: ``holds`` in words, ``step``, ``optimizer`` kind."""
    from ..sources.reading import read_file

    try:
        header = read_file(folder, name)
    except UcpError:
        return {"holds": None}
    if header.layer is not None:
        return {"holds": f"{count_of(len(header.layer), 'tensor')} of a pipeline's layer"}
    optim = header.optim or (header.model.optim if header.model else None)
    parts = []
    if header.model:
        tensors = count_of(len(header.model.module or {}), "tensor")
        parts.append(f"{tensors} of the model" if header.model.module else "model states")
    if optim:
        parts.append(f"ZeRO-{optim.stage} optimizer states ({optim.kind})" if optim.stage else "optimizer states")
    step = header.model.counters.get("global_steps") if header.model else _find_step(optim)
    return {"holds": ", ".join(parts), "step": step}


def _find_step(optim: Any) -> Any:
    steps = {holder.scalars["step"] for holder in optim.holders if "step" in holder.scalars} if optim else set()
    return max(steps) if steps else None


def write_damage(data: dict[str, Any]) -> list[str]:
    """The report's text: first what fails, then all files."""
    folder = data["folder"]
    faults = [text for file in data["files"] for text in file["faults"]]
    faults += [each["text"] for each in data["missing"]] + data["faults"]
    lines = [folder, "  does not open; what its files tell one by one:", ""]
    rows, whole = [], 0
    for file in data["files"]:
        step = "" if file.get("step") is None else f"step {file['step']:g}"
        bad = bool(file["faults"]) or file["holds"] is None
        whole += not bad
        if bad or len(data["files"]) <= _MANY:
            state = "FAULT" if bad else "ok"
            rows.append((file["name"], format_bytes(file["size"]), state, file["holds"] or "not readable", step))
    rows += [(each["name"], "", "MISSING", "", "") for each in data["missing"]]
    lines += [f"  {line}" for line in format_table(rows, right=(1,))]
    lines += [f"  … and {count_of(whole, 'file')} ok (--json lists them)"] * (len(data["files"]) > _MANY)
    faults = [text.removeprefix(f"{folder}{os.sep}") for text in dict.fromkeys(faults)]
    if faults:
        lines += ["", "faults", *(f"  {text}" for text in faults)]
    return lines
