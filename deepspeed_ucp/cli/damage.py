"""What can still be told of a checkpoint that does not open: each file by itself, and what is wrong with it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from ..comm import Comm
from ..errors import UcpError
from .common import format_bytes, format_table
from .summary import count_of
from .survey import VERSION

_MANY = 40
"""With more files, those that are whole are only counted."""


def examine_folder(folder: str, error: UcpError) -> dict[str, Any]:
    """Every state file with its size and what its header tells, and all flaws, as data for JSON.

    Args:
        error: why the checkpoint as a whole does not open.
    """
    from ..sources.files import holds_atoms, is_state_file, list_sizes

    flaws: list[tuple[str, str]] = []
    sizes: dict[str, int] = {}
    with suppress(UcpError):
        sizes = list_sizes(folder)
        flaws = _find_flaws(folder, atomic=holds_atoms(sizes))
    told: dict[str, list[str]] = {}
    for name, text in flaws:
        told.setdefault(name, []).append(text)
    files = [
        {"name": name, "size": size, **_read_facts(folder, name), "faults": told.get(name, [])}
        for name, size in sorted(sizes.items())
        if size >= 0 and is_state_file(name)
    ]
    elsewhere = [{"name": name, "text": text} for name, text in flaws if name and name not in sizes]
    missing = [each for each in elsewhere if not os.path.exists(os.path.join(folder, each["name"]))]
    general = [text for name, text in flaws if not name and text != str(error)]
    general += [each["text"] for each in elsewhere if each not in missing]
    general += [text for name, text in flaws if name in sizes and not is_state_file(name)]
    return {
        "inspect": VERSION,
        "folder": folder,
        "error": str(error),
        "kind": type(error).__name__,
        "files": files,
        "missing": missing,
        "faults": general,
    }


def _find_flaws(folder: str, *, atomic: bool) -> list[tuple[str, str]]:
    """File (empty: the folder as a whole) and what is wrong with it; leftovers are no reason not to open."""
    if atomic:
        from ..examine.verify import verify_checkpoint

        found = verify_checkpoint(folder, Comm(), headers_only=True)
        return [(fault.file.removeprefix(f"{folder}/"), fault.text) for fault in found.faults if not fault.warning]
    from ..sources.survey import survey_folder

    return [(flaw.file, flaw.text) for flaw in survey_folder(folder, Comm()) if flaw.kind != "leftover"]


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


def write_damage(data: dict[str, Any]) -> str:
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
    lines += [f"  {line}" for line in format_table(rows, right=(1,)).splitlines()]
    lines += [f"  … and {count_of(whole, 'file')} ok (--json lists them)"] * (len(data["files"]) > _MANY)
    faults = [text.removeprefix(f"{folder}{os.sep}") for text in dict.fromkeys(faults)]
    if faults:
        lines += ["", "faults", *(f"  {text}" for text in faults)]
    return "\n".join(lines)
