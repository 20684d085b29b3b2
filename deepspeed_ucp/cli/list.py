"""``ds_ucp list``: the checkpoints of a folder: which step, whether whole and sealed, how large."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from ..errors import CheckpointError, UcpError
from .common import Commands, add_command, add_store_option
from .printing import FAULT, OK, emit, format_bytes, format_table

logger = logging.getLogger("deepspeed_ucp")


def add_parser(commands: Commands) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "list",
        help="list a folder's checkpoints: step, whole, sealed, size",
        description="List the checkpoints of a folder, the newest first (by step, seal and time), and those of its "
        "subfolders, such as a trainer's checkpoint-500. Only headers are read. Exit code 0: all are whole; 1: one is "
        "not; 2: an error, or there is none.",
        examples="""
            ds_ucp list checkpoints/
            ds_ucp list trainer_output/ --json | jq -r '.checkpoints[0].folder'
            ds_ucp list s3://bucket/run
        """,
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="the folder (or URL) of all tags, or of a trainer's checkpoints"
    )
    add_store_option(parser)


def run(options: argparse.Namespace) -> int:
    """List; 1 where a checkpoint is not whole."""
    folder = options.folder.rstrip("/") or options.folder
    ages, rows, saves = {}, {}, find_saves(folder)
    named = dict(_read_names(folder))
    for path in saves:
        rows[path], ages[path] = _look_at(folder, path)
        rows[path]["named_by"] = [name for name, tag in named.items() if tag == path]
    found = [rows[path] for path in sorted(rows, key=ages.__getitem__, reverse=True)]
    emit(options, {"folder": folder, **named, "checkpoints": found}, _write(found))
    return OK if all(each["whole"] for each in found) else FAULT


def find_saves(folder: str) -> list[str]:
    """The folders of checkpoints in a folder and in its subfolders, relative to it; ``.`` where it is one itself.

    Raises:
        CheckpointError: there is none, or the folder cannot be listed.
    """
    from ..sources.files import scan_if_there
    from ..sources.latest import LOST, find_checkpoint, find_tags, is_checkpoint

    if is_checkpoint(folder):
        return ["."]
    found = find_tags(folder)
    for name, entry in sorted(scan_if_there(folder).items()):
        if entry.is_folder and name not in (LOST, *found):
            try:
                found += [os.path.join(name, tag) for tag in find_tags(os.path.join(folder, name))]
            except CheckpointError as error:
                logger.warning("%s", error)
    return found or [os.path.relpath(find_checkpoint(folder), folder)]  # raises, and tells what the folder looks like


def _read_names(folder: str) -> Iterator[tuple[str, str | None]]:
    from ..sources.latest import LATEST, UNIVERSAL, read_tag

    for name in (LATEST, UNIVERSAL):
        try:
            yield name, os.path.normpath(read_tag(os.path.join(folder, name)))
        except FileNotFoundError:
            yield name, None
        except CheckpointError as error:
            logger.warning("%s", error)
            yield name, None


def _look_at(folder: str, path: str) -> tuple[dict[str, Any], tuple[int, bool, float]]:
    """What is told of a checkpoint, and its age."""
    from ..comm import Comm
    from ..io.store import list_tree
    from ..sources.naming import Naming
    from ..sources.older import find_age
    from ..sources.open import survey_checkpoint

    where = folder if path == "." else os.path.join(folder, path)
    topology: str | None = None
    fault: UcpError | str | None = None
    try:
        report = survey_checkpoint(where, Comm(), Naming(groups="module"))
        topology, fault = report.index.run.topology.describe() if report.index else None, report.fault
    except UcpError as error:
        fault = error
    fault = fault or _find_cut_short(os.path.dirname(where))
    age = find_age([where])
    sizes = [entry.size for entry in list_tree(where).values() if not entry.is_folder]
    row = {
        "tag": path,
        "folder": where,
        "step": None if age.step < 0 else age.step,
        "whole": not fault,
        "sealed": age.sealed,
        "bytes": sum(sizes),
        "files": len(sizes),
        "written": datetime.fromtimestamp(age.time).astimezone().isoformat(timespec="seconds") if age.time else None,
        "topology": topology,
        "fault": str(fault).removeprefix(where).lstrip("/: ") if fault else None,
    }
    return row, age


def _find_cut_short(folder: str) -> str:
    """What tells that Hugging Face's Trainer has not come to the end of a save; empty where nothing does."""
    from ..sources.files import scan_if_there

    names = scan_if_there(folder).keys()
    begun = any(name == "scheduler.pt" or name.startswith("rng_state") for name in names)
    is_cut = begun and "trainer_state.json" not in names
    return f"{folder}/trainer_state.json: missing, which a trainer's save writes last" if is_cut else ""


def _write(found: list[dict[str, Any]]) -> list[str]:
    def word(value: bool) -> str:
        return "yes" if value else "no"

    rows = [
        [
            *(each["tag"], "?" if each["step"] is None else each["step"], word(each["whole"]), word(each["sealed"])),
            *(format_bytes(each["bytes"]), (each["written"] or "?")[:16].replace("T", " "), each["topology"] or "?"),
            ", ".join(each["named_by"]),
        ]
        for each in found
    ]
    lines = format_table(rows, ["tag", "step", "whole", "sealed", "size", "written", "topology", ""], right=(1, 4))
    faults = [(each["tag"], *each["fault"].split("\n")) for each in found if each["fault"]]
    lines += [""] if faults else []
    lines += [f"{tag}: {first}{f' (and {len(more)} more)' if more else ''}" for tag, first, *more in faults]
    return lines
