"""``ds_ucp list``: the checkpoints of a folder: which step, whether whole and sealed, how large."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .common import Commands, add_command, add_store_option
from .printing import FAULT, OK, emit, format_bytes, format_table

if TYPE_CHECKING:
    from ..examine.tags import TagReport

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
    from ..examine.tags import find_saves, look_at_tag

    folder = options.folder.rstrip("/") or options.folder
    saves = [look_at_tag(folder, path) for path in find_saves(folder)]
    named = dict(read_names(folder))
    found = [_describe(save, named) for save in sorted(saves, key=lambda save: save.age, reverse=True)]
    emit(options, {"folder": folder, **named, "checkpoints": found}, _write(found))
    return OK if all(each["whole"] or each["weights_only"] for each in found) else FAULT


def read_names(folder: str) -> Iterator[tuple[str, str | None]]:
    """By name of a file that names a tag the tag; None where it is not there, or cannot be followed."""
    from ..sources.latest import LATEST, UNIVERSAL, read_tag

    for name in (LATEST, UNIVERSAL):
        try:
            yield name, os.path.normpath(read_tag(os.path.join(folder, name)))
        except FileNotFoundError:
            yield name, None
        except CheckpointError as error:
            logger.warning("%s", error)
            yield name, None


def _describe(save: TagReport, named: Mapping[str, str | None]) -> dict[str, Any]:
    """What is told of a checkpoint."""
    age = save.age
    return {
        "tag": save.path,
        "folder": save.folder,
        "step": None if age.step < 0 else age.step,
        "whole": not save.fault,
        "weights_only": save.weights_only,
        "sealed": age.sealed,
        "bytes": sum(entry.size for entry in save.files.values()),
        "files": len(save.files),
        "written": datetime.fromtimestamp(age.time).astimezone().isoformat(timespec="seconds") if age.time else None,
        "topology": save.topology,
        "fault": save.describe_fault(),
        "named_by": [name for name, tag in named.items() if tag == save.path],
    }


def name_whole(*, whole: bool, weights_only: bool) -> str:
    """Whether a checkpoint is whole, in a word."""
    return "weights" if weights_only else "yes" if whole else "no"


def _write(found: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            *(each["tag"], "?" if each["step"] is None else each["step"]),
            *(name_whole(whole=each["whole"], weights_only=each["weights_only"]), "yes" if each["sealed"] else "no"),
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
