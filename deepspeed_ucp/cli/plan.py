"""``ds_ucp plan``: what a resume at another topology would read, exchange and need, without an engine.

Without a checkpoint: what a run of so many parameters needs.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, count_of
from .bandwidths import add_bandwidths, positive, read_bandwidths, tell_both, tell_seconds
from .common import add_checkpoint_options, add_command, add_place_option, open_index, read_rules
from .outline import OUTLINE, add_outline_options, refuse_options, run_outline
from .printing import FAULT, OK, emit, format_bytes, format_count, format_table

if TYPE_CHECKING:
    from ..atoms import AtomicIndex
    from ..forecast.degrees import Degrees
    from ..forecast.dryrun import DryRun
    from ..forecast.estimate import LoadTotals
    from .common import Commands

_TITLES = {
    "needed": "needs",
    "read": "reads",
    "requests": "read requests",
    "files": "opens files",
    "received": "receives",
    "sent": "sends",
    "rounds": "exchange rounds",
    "peak": "memory on top",
    "engine": "engine's buffers",
}
"""Figures of a rank: bytes, but for those in ``_NUMBERS``."""

_NUMBERS = ("requests", "files", "rounds")


def add_parser(commands: Commands) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "plan",
        help="what a resume at another topology would read and need",
        description="A dry run from the headers alone: is the resume possible, who would load, and what every rank "
        "would read, exchange and need. Without a checkpoint (--params): memory, disk and seconds of a run. Exit code "
        "0: possible, 1: not possible, 2: an error.",
        examples="""
            ds_ucp plan checkpoints/ --target "dp=3,tp=2,pp=1,zero=3"
            ds_ucp plan checkpoints/ --target "dp=384,zero=3" --read-gbs 273 --net-gbs 25
            ds_ucp plan checkpoints/ --target "tp=8,pp=48" --nodes 96 --ranks-per-node 8 --patterns megatron-gpt --json
            ds_ucp plan --params 70e9 --stage 3 --ranks 512 --read-gbs 100 --write-gbs 50
            ds_ucp plan --params 175B --stage 1 --ranks 1024 --target tp=8,pp=16 --optimizer adamw
        """,
    )
    add_checkpoint_options(parser, needed=False)
    add_place_option(parser)
    target = parser.add_argument_group("target")
    text = (
        "topology to plan for: a list of dp, tp, pp, sp, ep (of experts; of each layer: 2.4), zero, precision (fp32, "
        "bf16, fp16), wrapper, sub_group, max_group, data_first, experts (of a layer, "
        "where rename rules make others); degrees that are left out are 1, the rest as in the "
        "checkpoint"
    )
    target.add_argument("--target", metavar="DEGREES", help=text)
    target.add_argument("--nodes", type=positive, metavar="N", help="nodes; with --ranks-per-node dp may be left out")
    target.add_argument("--ranks-per-node", type=positive, metavar="N", help="ranks per node")
    text = "a train_batch_size in place of the saved ds_config's"
    target.add_argument("--train-batch-size", type=positive, metavar="N", help=text)
    text = "window_mb of the load (default: 256)"
    target.add_argument("--window-mb", type=positive, default=256, metavar="MB", help=text)
    add_outline_options(parser.add_argument_group("without a checkpoint"))
    add_bandwidths(parser)
    extent = parser.add_argument_group("extent")
    extent.add_argument("--all", action="store_true", help="tell of each rank that was planned")
    how = extent.add_mutually_exclusive_group()
    how.add_argument("--exact", action="store_true", help="plan every rank, however long it takes")
    text = "plan N ranks (default: all where that takes seconds, else 3 to 5)"
    how.add_argument("--sample", type=positive, metavar="N", help=text)


def run(options: argparse.Namespace) -> int:
    """Plan, print, and tell by the exit code whether the resume is possible."""
    if options.checkpoint is None:
        return run_outline(options)
    from ..comm import Comm
    from ..config import UniversalConfig
    from ..forecast.dryrun import dry_run
    from ..forecast.estimate import tell_times

    _check(options)
    speeds, times = read_bandwidths(options), None
    index = open_index(options, options.checkpoint, Comm(), also=options.also)
    found = dry_run(
        index,
        _read_degrees(options, index),
        read_rules(options),
        config=UniversalConfig(window_mb=options.window_mb),
        train_batch=options.train_batch_size,
        exact=True if options.exact else False if options.sample else None,
        samples=options.sample,
    )
    if speeds and found.totals and found.ranks:
        times = tell_times(found.totals, found.ranks, found.degrees.world, speeds)
    lines = _to_text(index, found, every=options.all)
    if speeds and times:
        lines += ["", *tell_seconds(speeds, times)]
    if found.assumed and found.totals is not None:
        lines += ["", "assumed", *(f"  - {text}" for text in found.assumed)]
    emit(options, {**_to_data(index, found), "bandwidths": speeds, "seconds": times}, lines)
    return OK if found.possible else FAULT


def _check(options: argparse.Namespace) -> None:
    refuse_options(options, OUTLINE, "a plan of a checkpoint takes what is saved")
    if options.window_mb < 16:
        raise ConfigError(f"--window-mb is at least 16, found {options.window_mb}.")
    if options.target is None:
        raise ConfigError('--target is missing: the topology to plan for, such as --target "dp=3,zero=3".')
    if (options.nodes is None) != (options.ranks_per_node is None):
        raise ConfigError("--nodes and --ranks-per-node go together.")


def _read_degrees(options: argparse.Namespace, index: AtomicIndex) -> Degrees:
    from ..experts import DATA_FIRST
    from ..forecast.degrees import parse_degrees
    from ..forecast.dryrun import read_saved_config

    world = None if options.nodes is None else options.nodes * options.ranks_per_node
    saved = read_saved_config(index)
    zero, data_first = saved.get("zero_optimization"), saved.get(DATA_FIRST) is True
    size = zero.get("sub_group_size") if isinstance(zero, dict) else None
    sub_group = int(size) if isinstance(size, (int, float)) and size >= 1 else None
    return parse_degrees(options.target, index.run.topology, world=world, sub_group=sub_group, data_first=data_first)


def _to_data(index: AtomicIndex, found: DryRun) -> dict[str, Any]:
    from ..forecast.estimate import MEASURED, spread

    degrees = {key: value for key, value in asdict(found.degrees).items() if key != "refused"}
    return {
        "possible": found.possible,
        "obstacles": found.obstacles,
        "loader": found.loader,
        "source": index.run.topology.describe(),
        "target": found.degrees.describe(),
        "degrees": {**degrees, "world": found.degrees.world},
        "differences": found.differences,
        "batch": found.batch,
        "assumed": found.assumed,
        "patterns": found.origin,
        "exact": found.exact,
        "totals": None if found.totals is None else {**asdict(found.totals), "ratio": found.totals.ratio},
        "per_rank": {key: spread(found.ranks, key) for key in MEASURED} if found.ranks else {},
        "ranks": found.ranks,
    }


def _to_text(index: AtomicIndex, found: DryRun, *, every: bool) -> list[str]:
    loader = "DeepSpeed's own load: the topology is the checkpoint's"
    if found.differences:
        loader = f"{found.loader}: {'; '.join(found.differences)}"
    lines = [f"from   {index.run.topology.describe()}", f"to     {found.degrees.describe()}", f"loads  {loader}"]
    if found.batch.train is not None:
        fits = (found.batch.text or "fits") if found.batch.fits else "does not fit"
        ranks = count_of(found.degrees.dp, "data-parallel rank")
        lines.append(f"batch  train_batch_size {found.batch.train} on {ranks}: {fits}")
    if found.obstacles:
        lines += ["", "NOT POSSIBLE:"] + [f"  - {text}" for text in found.obstacles]
    if found.totals is not None:
        lines += ["", *_tell_totals(found.totals, exact=found.exact), "", *_tell_ranks(found, found.totals)]
        if every:
            lines += ["", *_list_ranks(found)]
    return lines


def _tell_totals(totals: LoadTotals, *, exact: bool) -> list[str]:
    state = "masters, optimizer states, buffers; 16-bit copies are made from them"
    rows = [
        ["checkpoint", tell_both(totals.checkpoint), f"{format_count(totals.files)} files"],
        ["state to restore", tell_both(totals.state), state],
        ["read from storage", tell_both(totals.read), f"{totals.ratio:.4f} × state, each byte once"],
        ["held afterwards", tell_both(totals.needed), "by all ranks together"],
        ["exchanged", ("" if exact else "about ") + tell_both(totals.exchanged), "between ranks"],
    ]
    if totals.replicas:
        rows.append(["read to compare", tell_both(totals.replicas), "replicas, on top"])
    return format_table([*rows, ["headers", str(totals.headers), "per rank at most"]])


def _tell_ranks(found: DryRun, totals: LoadTotals) -> list[str]:
    from ..forecast.estimate import spread

    world = found.degrees.world
    title = f"{len(found.ranks)} of {world} ranks, exactly"
    if found.exact:
        title = f"each of {world} ranks" if world > 1 else "one rank"
    rows = [[_TITLES[key], *(_format(key, each) for each in spread(found.ranks, key).values())] for key in _TITLES]
    lines = format_table(rows, [title, "least", "mean", "most"], right=(1, 2, 3))
    if not found.exact:
        ranks = ", ".join(str(rank.rank) for rank in found.ranks)
        lines.append(f"Planned exactly: ranks {ranks}; their rounds and memory are estimates. Totals of bytes read and")
        lines.append(f"held are exact for all ranks: {format_bytes(totals.read / world)} read per rank on average.")
    return lines


def _list_ranks(found: DryRun) -> list[str]:
    header = ["rank", "stage", "dp", "tp", *_TITLES.values()]
    rows = [
        [r.rank, r.stage, r.dp_rank, r.tp_rank, *(_format(key, getattr(r, key)) for key in _TITLES)]
        for r in found.ranks
    ]
    return format_table(rows, header, right=range(len(header)))


def _format(key: str, value: float) -> str:
    return format_count(value) if key in _NUMBERS else format_bytes(value)
