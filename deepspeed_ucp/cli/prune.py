"""``ds_ucp prune``: the old tags of a folder go, by wholeness and step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .common import Commands, add_command, add_store_option
from .printing import FAULT, OK, emit, find_rank, format_bytes, format_table, print_message

if TYPE_CHECKING:
    from ..saves.pruning import Verdict


def add_parser(commands: Commands) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "prune",
        help="remove a folder's old checkpoints, never the last whole one",
        description="Remove old checkpoints of a folder, or of a store: all but the newest whole ones by step, what "
        "`latest` names and what another one needs. One that is not whole goes only where a later one is whole; until "
        "then it may still be growing. Of a trainer's output folder whole folders go (checkpoint-500 of Hugging Face). "
        "The seal goes first, so that nothing half removed is taken for whole. Exit code 0: done; 1: one stays that "
        "somebody should look at; 2: an error.",
        examples="""
            ds_ucp prune checkpoints/ --keep 3 --dry-run
            ds_ucp prune checkpoints/ --keep 3 --keep-every 1000 --strip-optimizer
            ds_ucp prune s3://bucket/run --keep 5
        """,
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="the folder (or URL) of all tags, or of a trainer's checkpoints"
    )
    parser.add_argument("--keep", type=int, required=True, metavar="N", help="whole checkpoints that stay, the newest")
    text = "those whose step is a multiple of N stay for ever"
    parser.add_argument("--keep-every", type=int, default=0, metavar="N", help=text)
    text = "leave the weights of those that would be removed: their optimizer states go, and they are not whole then"
    parser.add_argument("--strip-optimizer", action="store_true", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print the same, and remove nothing")
    add_store_option(parser)


def run(options: argparse.Namespace) -> int:
    """Prune; 1 where something stays that somebody should look at."""
    from ..saves.pruning import PruneOptions, carry_out, plan_pruning

    if options.keep < 1 or options.keep_every < 0:
        raise ConfigError("--keep must be 1 or more, --keep-every must not be negative.")
    if find_rank():  # one process of a launch does it
        return OK
    folder = options.folder.rstrip("/") or options.folder
    found = plan_pruning(folder, PruneOptions(options.keep, options.keep_every, options.strip_optimizer))
    if not options.dry_run:
        found = carry_out(folder, found)
    elif not options.quiet:
        print_message("ds_ucp: a dry run: nothing is removed")
    rows = [_describe(each) for each in found]
    freed = sum(row["freed"] for row in rows)
    emit(options, {"folder": folder, "freed": freed, "checkpoints": rows}, _write(rows, freed))
    return FAULT if any(each.is_fault for each in found) else OK


def _describe(each: Verdict) -> dict[str, Any]:
    from .list import name_whole

    tag = each.tag
    return {
        "tag": each.name,
        "step": tag.age.step if tag and tag.age.step >= 0 else None,
        "whole": name_whole(whole=not tag.fault, weights_only=tag.weights_only) if tag else None,
        "action": each.action,
        "freed": each.nbytes,
        "why": each.why,
    }


def _write(rows: Sequence[dict[str, Any]], freed: int) -> list[str]:
    table = [
        [
            *(row["tag"], "" if row["step"] is None else row["step"], row["whole"] or "", row["action"]),
            *(format_bytes(row["freed"]) if row["freed"] else "", row["why"].split("\n")[0]),
        ]
        for row in rows
    ]
    counts = {action: sum(row["action"] == action for row in rows) for action in ("keep", "strip", "remove")}
    told = ", ".join(f"{action} {count}" for action, count in counts.items() if count)
    lines = format_table(table, ["tag", "step", "whole", "", "freed", "why"], right=(1, 4))
    return [*lines, f"{told}; {format_bytes(freed)} freed"]
