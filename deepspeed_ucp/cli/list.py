"""``ds_ucp list``: lists a folder's checkpoints on storage and in memory."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import CheckpointError, UcpError, pluralize
from . import common
from .printing import FAULT, OK, emit, format_bytes, format_table

if TYPE_CHECKING:
    from ..saves.search import HeldSave

logger = logging.getLogger("deepspeed_ucp")

STORAGE, MEMORY = "storage", "memory"

Row: TypeAlias = dict[str, Any]


def add_parser(commands: common.Commands) -> None:
    """Add the parser of the command."""
    parser = common.add_command(
        commands,
        "list",
        description="List the checkpoints of a folder and of its subfolders (such as a trainer's checkpoint-500), on "
        "storage and in this node's memory, and mark the one that a resume takes. The newest is first (by step, seal "
        "and time). Only headers are read. Exit code 0: all are complete; 1: one is not; 2: an error, or none.",
        examples="""
            ds_ucp list checkpoints/
            ds_ucp list trainer_output/ --json | jq -r '.checkpoints[0].folder'
            ds_ucp list s3://bucket/run
            ds_ucp list /dev/shm/deepspeed_ucp-1000
        """,
        keys="folder; latest, latest_universal (the tags in these files, or null); checkpoints, each with tag, "
        "folder, step, whole (null for a part of a save), weights_only, sealed, bytes, files, written, "
        "topology, fault, named_by (which of the two files names it), place (storage or memory), resume (true "
        "if a resume takes it) and, in memory, memory (host, save_dir, tag, nodes, parts, pending, running)",
    )
    text = (
        "the folder (or URL) of all tags, or of a trainer's checkpoints; or a user's folder in memory "
        "(deepspeed_ucp-UID), for all saves there"
    )
    parser.add_argument("folder", metavar="FOLDER", help=text)
    text = 'folder of saves in memory, as in "save": {"memory": DIR} (default: /dev/shm)'
    parser.add_argument("--memory", metavar="DIR", default="/dev/shm", help=text)
    common.add_shared_options(parser)


def run(options: argparse.Namespace) -> int:
    """List; 1 if a checkpoint is not complete."""
    from ..formats.latest import LATEST, UNIVERSAL
    from ..saves.search import is_root

    folder = options.folder.rstrip("/") or options.folder
    if is_root(folder):
        named, rows = {}, _list_in_memory(folder, None)
        if not rows:
            raise CheckpointError("no saves are in this folder of memory.", path=folder)
        resumed = "each folder's own resume is marked"
    else:
        rows = _list_in_memory(options.memory, folder)
        stored = _list_stored(folder, required=not rows)
        named = {name: _read_name(folder, name) for name in (LATEST, UNIVERSAL)}
        resumed = _mark_resumed(folder, rows, stored)
        rows += stored
    rows.sort(key=lambda row: row.pop("age"), reverse=True)
    for row in rows:
        row["named_by"] = [name for name, tag in named.items() if (row["place"], row["tag"]) == (STORAGE, tag)]
    emit(options, {"folder": folder, **named, "checkpoints": rows}, _format_report(rows, resumed))
    return OK if all(map(_is_usable, rows)) else FAULT


def _is_usable(row: Row) -> bool:
    """Return False if the checkpoint is known to lack more than optimizer states."""
    return row["whole"] is not False or row["weights_only"]


def _list_stored(folder: str, *, required: bool) -> list[Row]:
    """List the checkpoints on storage; raise an error if a required one is missing."""
    from ..examine.tags import describe_tag, find_saves

    try:
        saves = [describe_tag(folder, path) for path in find_saves(folder)]
    except CheckpointError:
        if required:
            raise
        return []
    return [{**save, "place": STORAGE, "memory": None, "resume": False} for save in saves]


def _list_in_memory(memory: str, folder: str | None) -> list[Row]:
    """List this node's saves of ``folder`` in memory; all in ``memory`` if it is None."""
    from ..saves.search import find_existing_root, list_in_memory

    try:
        root = memory if folder is None else find_existing_root(memory)
        saves = list_in_memory(root, folder) if root is not None else []
    except (UcpError, OSError) as error:
        logger.warning("saves in memory are not listed: %s", error)
        return []
    return [data for save in saves if (data := _describe_in_memory(save, folder)) is not None]


def _describe_in_memory(save: HeldSave, folder: str | None) -> Row | None:
    """Describe a save in memory; None if its job has removed it meanwhile."""
    from ..examine.tags import describe_tag
    from ..saves.memory import locate

    first, *others = save.parts
    try:
        data = describe_tag(first.folder, first.tag, [os.path.join(other.folder, other.tag) for other in others])
    except (UcpError, OSError):
        if first.is_recorded():
            raise
        return None
    data |= {"age": data["age"]._replace(step=first.step), "step": first.step}
    if not save.is_complete:
        data |= {"whole": None, "fault": None}  # other nodes have the rest
    path = first.tag if folder is None else os.path.relpath(os.path.join(save.load_dir, first.tag), locate(folder))
    memory = {
        "host": socket.gethostname(),
        "save_dir": first.save_dir,
        "tag": first.tag,
        "nodes": first.nodes,
        "parts": [part.node for part in save.parts],
        "pending": first.list_pending(),
        "running": save.is_running,
    }
    return {**data, "tag": path, "place": MEMORY, "memory": memory, "resume": save.is_taken}


def _mark_resumed(folder: str, in_memory: Sequence[Row], stored: Sequence[Row]) -> str:
    """Mark the checkpoint that a resume loads (``resume``); return a text about it."""
    from ..comm import Comm
    from ..load.tags import find_tag

    for row in in_memory:
        row["resume"] &= row["tag"] in (".", row["memory"]["tag"])  # not one of a subfolder
    taken = next((row for row in in_memory if row["resume"]), None)
    if taken is None:
        try:
            tag = find_tag(folder, None, Comm())
        except CheckpointError as error:
            return f"a resume fails: {error}"
        tags = {row["tag"]: row for row in stored}
        taken = None if tag is None else tags.get(os.path.normpath(tag), tags.get("."))
        if taken is None:
            return "no checkpoint is named: a resume needs the folder of one"
        taken["resume"] = True
    doubt = "" if _is_usable(taken) else ", which is not complete"
    name = "this folder" if taken["tag"] == "." else taken["tag"]
    return f"a resume takes {name} from {taken['place']}{doubt}"


def _read_name(folder: str, name: str) -> str | None:
    """Return the tag that a file such as ``latest`` names; None if missing or invalid."""
    from ..formats.latest import read_tag

    try:
        return os.path.normpath(read_tag(os.path.join(folder, name)))
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        logger.warning("%s", error)
        return None


def _format_report(rows: Sequence[Row], resumed: str) -> list[str]:
    broken = sum(not _is_usable(row) for row in rows)
    verdict = f"{pluralize(len(rows), 'checkpoint')}, {f'{broken} not complete' if broken else 'all complete'}"
    cells = []
    for row in rows:
        whole = {None: "part", True: "yes", False: "no"}[row["whole"]]
        cells.append(
            (
                row["tag"],
                "?" if row["step"] is None else row["step"],
                "weights" if row["weights_only"] and row["whole"] is not None else whole,
                "yes" if row["sealed"] else "no",
                format_bytes(row["bytes"]),
                (row["written"] or "?")[:16].replace("T", " "),
                row["topology"] or "?",
                row["place"],
                ", ".join([*row["named_by"], *["resume"] * row["resume"]]),
            )
        )
    header = ("tag", "step", "complete", "sealed", "size", "written", "topology", "place", "")
    lines = [f"{verdict}; {resumed}", "", *format_table(cells, header, right=(1, 4))]
    faults = [(row["tag"], *row["fault"].split("\n")) for row in rows if row["fault"]]
    notes = [f"{tag}: {first}{f' (and {len(more)} more)' if more else ''}" for tag, first, *more in faults]
    notes += [f"{row['tag']}: {_format_memory(row)}" for row in rows if row["memory"]]
    return [*lines, *([""] if notes else []), *notes]


def _format_memory(row: Row) -> str:
    memory = row["memory"]
    text = f"in {row['folder']} on {memory['host']}, for {memory['save_dir']}"
    if memory["nodes"] > 1:
        numbers = ", ".join(map(str, memory["parts"]))
        text += f"; files of node {numbers} of {memory['nodes']} (0 to {memory['nodes'] - 1})"
        if len(memory["parts"]) < memory["nodes"]:
            text += ", a resume takes it if the other nodes have the rest"
    if memory["pending"]:
        text += f"; not written yet to {', '.join(memory['pending'])}"
    return text + ("; its job is running, a resume takes it when that has ended" if memory["running"] else "")
