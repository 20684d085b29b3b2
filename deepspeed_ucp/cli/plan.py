"""``ds_ucp plan``: what a resume at another topology would read, exchange and need, without an engine.

Without a checkpoint: what a run of so many parameters needs of memory, disk and time. Of both: how often to save.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, count_of
from .common import Commands, add_checkpoint_options, add_command, find_folders, open_index, read_rules
from .interval import OPTIONS, add_interval_options, check_interval_options, plan_interval
from .numbers import positive, size, speed
from .printing import FAULT, OK, emit, format_both, format_bytes, format_count, format_seconds, format_table

if TYPE_CHECKING:
    from ..atoms import AtomicIndex
    from ..forecast.degrees import Degrees
    from ..forecast.dryrun import DryRun
    from ..forecast.estimate import Bandwidths, LoadTotals, Times

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

OPTIMIZERS = ("adam", "adamw", "lion", "momentum", "adagrad", "sgd")
_WITHOUT = ("params", "stage", "ranks", "precision", "optimizer", "write_gbs")
"""Options of a plan without a checkpoint."""

_WITH = (
    "also", "patterns", "groups", "storage_option", "nodes", "ranks_per_node", "train_batch_size",
    "all", "exact", "sample",
)  # fmt: skip
"""Those of a plan with one alone."""

_SAVES = ("write_gbs", "ranks_per_node")
"""What either takes that tells how often to save."""


def add_parser(commands: Commands) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "plan",
        help="what a resume at another topology would read and need",
        description="A dry run from the headers alone: is the resume possible, who would load, and what every rank "
        "would read, exchange and need. Without a checkpoint (--params): memory, disk and seconds of a run. With "
        "--mtbf: how often to save. Exit code 0: possible, 1: not possible, 2: an error.",
        examples="""
            ds_ucp plan checkpoints/ --target "dp=3,tp=2,pp=1,zero=3"
            ds_ucp plan checkpoints/ --target "dp=384,zero=3" --read-gbs 273 --net-gbs 25
            ds_ucp plan checkpoints/ --target "tp=8,pp=48" --nodes 96 --ranks-per-node 8 --patterns megatron-gpt --json
            ds_ucp plan --params 70e9 --stage 3 --ranks 512 --read-gbs 100 --write-gbs 50
            ds_ucp plan --params 175B --stage 1 --ranks 1024 --target tp=8,pp=16 --optimizer adamw
            ds_ucp plan checkpoints/ --target dp=512 --mtbf 8h --restart 90s --read-gbs 100 --write-gbs 50
        """,
    )
    add_checkpoint_options(parser, needed=False)
    add = parser.add_argument_group("target").add_argument
    text = (
        "topology to plan for: a list of dp, tp, pp, sp, ep (of experts; of each layer: 2.4), zero, precision (fp32, "
        "bf16, fp16), wrapper, sub_group, max_group, data_first, experts (of a layer, "
        "where rename rules make others); degrees that are left out are 1, the rest as in the "
        "checkpoint"
    )
    add("--target", metavar="DEGREES", help=text)
    add("--nodes", type=positive, metavar="N", help="nodes; with --ranks-per-node dp may be left out")
    add("--ranks-per-node", type=positive, metavar="N", help="ranks per node")
    text = "a train_batch_size in place of the saved ds_config's"
    add("--train-batch-size", type=positive, metavar="N", help=text)
    add("--window-mb", type=positive, default=256, metavar="MB", help="window_mb of the load (default: 256)")
    add = parser.add_argument_group("without a checkpoint").add_argument
    add("--params", type=size, metavar="N", help="parameters of the model: 70e9, 175B")
    add("--stage", type=int, choices=range(4), help="ZeRO stage (default: 1)")
    add("--ranks", type=positive, metavar="N", help="ranks; --target may name more degrees, as tp=8")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="of the model (default: bf16)")
    add("--optimizer", choices=OPTIMIZERS, help="default: adam")
    text = "what the storage takes of all ranks together, in GB/s: for the seconds of a save"
    add("--write-gbs", type=speed, metavar="GBS", help=text)
    add = parser.add_argument_group("bandwidths, in GB/s of 10^9 bytes").add_argument
    add("--read-gbs", type=speed, metavar="GBS", help="what the storage gives all ranks together")
    add("--rank-gbs", type=speed, metavar="GBS", help="what it gives one rank at most")
    add("--net-gbs", type=speed, metavar="GBS", help="what a rank sends or receives")
    add_interval_options(parser)
    extent = parser.add_argument_group("extent")
    extent.add_argument("--all", action="store_true", help="tell of each rank that was planned")
    how = extent.add_mutually_exclusive_group()
    how.add_argument("--exact", action="store_true", help="plan every rank, however long it takes")
    text = "plan N ranks (default: all where that takes seconds, else 3 to 5)"
    how.add_argument("--sample", type=positive, metavar="N", help=text)


def run(options: argparse.Namespace) -> int:
    """Plan, print, and tell by the exit code whether it is possible."""
    if options.mtbf is None:
        _refuse(options, OPTIONS, "it tells how often to save, with --mtbf alone")
    check_interval_options(options)
    data, lines = _plan_run(options) if options.checkpoint is None else _plan_resume(options)
    emit(options, data, lines)
    return OK if data["possible"] else FAULT


def _refuse(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Options that mean nothing here are not passed over.

    Raises:
        ConfigError: some are given.
    """
    allowed = () if options.mtbf is None else _SAVES
    names = [name for name in names if name not in allowed and getattr(options, name) not in (None, False, [])]
    given = [f"--{name.replace('_', '-')}" for name in names]
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}; leave it out.")


def _read_bandwidths(options: argparse.Namespace) -> Bandwidths | None:
    """What is given; None without a bandwidth of reading.

    Raises:
        ConfigError: one is given that counts beside it alone.
    """
    from ..forecast.estimate import Bandwidths

    if options.read_gbs is not None:
        return Bandwidths(options.read_gbs, options.rank_gbs, options.net_gbs)
    if options.rank_gbs is not None or options.net_gbs is not None:
        raise ConfigError("--rank-gbs and --net-gbs count beside the storage's bandwidth: give --read-gbs too.")
    return None


def _end(speeds: Bandwidths | None, times: Times | None, assumed: Sequence[str]) -> Iterator[str]:
    """The last lines of both kinds of plan: seconds, and what was assumed."""
    if speeds and times:
        most = "" if speeds.rank is None else f", at most {speeds.rank:g} GB/s"
        rows = [
            ("the whole checkpoint once", times.checkpoint, "every byte of every file"),
            ("what the resume reads", times.aggregate, "all ranks together"),
            ("the rank that reads most", times.slowest, f"at an equal share of the bandwidth{most}"),
            ("exchange", times.exchange, f"at {speeds.net or 0:g} GB/s per rank"),
            ("resume", times.load, "reading" if times.exchange is None else "reading and exchange"),
        ]
        table = [(what, format_seconds(seconds), how) for what, seconds, how in rows if seconds is not None]
        yield from ("", f"at {speeds.read:g} GB/s", *(f"  {line}" for line in format_table(table, right=(1,))))
    if assumed:
        yield from ("", "assumed", *(f"  - {text}" for text in assumed))


# -- of a checkpoint --------------------------------------------------------------------------------------------------


def _plan_resume(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """A dry run as data and as lines.

    Raises:
        ConfigError: options that are missing, or that mean nothing here.
    """
    from ..comm import Comm
    from ..config import UniversalConfig
    from ..forecast.dryrun import dry_run
    from ..forecast.estimate import estimate_times
    from ..forecast.interval import count_state

    _refuse(options, _WITHOUT, "a plan of a checkpoint takes what is saved")
    if options.window_mb < 16:
        raise ConfigError(f"--window-mb is at least 16, found {options.window_mb}.")
    if options.target is None:
        raise ConfigError('--target is missing: the topology to plan for, such as --target "dp=3,zero=3".')
    if (options.nodes is None) != (options.ranks_per_node is None) and (options.nodes or not options.mtbf):
        raise ConfigError("--nodes and --ranks-per-node go together.")
    speeds, times = _read_bandwidths(options), None
    index = open_index(options, find_folders(options.checkpoint, options.also, Comm()), Comm())
    found = dry_run(
        index,
        _read_target(options, index),
        read_rules(options),
        config=UniversalConfig(window_mb=options.window_mb),
        train_batch=options.train_batch_size,
        exact=True if options.exact else False if options.sample else None,
        samples=options.sample,
    )
    if speeds and found.possible and found.totals and found.ranks:
        times = estimate_times(found.totals, found.ranks, found.degrees.world, speeds)
    lines = [*_describe(index, found, every=options.all), *_end(speeds, times, ())]
    assumed = found.assumed if found.possible and found.totals is not None else []
    data: dict[str, Any] = {"bandwidths": speeds, "seconds": times}
    if options.mtbf and found.possible:
        data["saves"], told, more = plan_interval(options, found.degrees, *count_state(index, found.degrees))
        lines, assumed = [*lines, *told], [*assumed, *more]
    return {**_to_data(index, found), **data, "assumed": assumed}, [*lines, *_end(None, None, assumed)]


def _read_target(options: argparse.Namespace, index: AtomicIndex) -> Degrees:
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
        "source": index.run.written,
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


def _describe(index: AtomicIndex, found: DryRun, *, every: bool) -> list[str]:
    from ..topology import list_untold

    loader = "DeepSpeed's own load: the topology is the checkpoint's"
    if found.differences:
        loader = ": ".join(filter(None, (found.loader, "; ".join(list_untold(found.differences)))))
    world = count_of(found.degrees.world, "rank")
    verdict = f"possible: {found.loader} loads it on {world}" if found.possible else "not possible"
    lines = [verdict, *([] if found.possible else _list_obstacles(found.obstacles)), ""]
    lines += [f"from   {index.run.written}", f"to     {found.degrees.describe()}", f"loads  {loader}"]
    if found.batch.train is not None:
        fits = (found.batch.text or "fits") if found.batch.fits else "does not fit"
        ranks = count_of(found.degrees.dp, "data-parallel rank")
        lines.append(f"batch  train_batch_size {found.batch.train} on {ranks}: {fits}")
    if found.possible and found.totals is not None:
        lines += ["", *_describe_totals(found.totals, exact=found.exact), "", *_describe_ranks(found, found.totals)]
        if every:
            header = ["rank", "stage", "dp", "tp", *_TITLES.values()]
            rows = [
                [r.rank, r.stage, r.dp_rank, r.tp_rank, *(_format(key, getattr(r, key)) for key in _TITLES)]
                for r in found.ranks
            ]
            lines += ["", *format_table(rows, header, right=range(len(header)))]
    return lines


def _list_obstacles(obstacles: Iterable[str]) -> Iterator[str]:
    return (f"  - {text}" for text in obstacles)


def _describe_totals(totals: LoadTotals, *, exact: bool) -> list[str]:
    state = "masters, optimizer states, buffers; 16-bit copies are made from them"
    rows = [
        ["checkpoint", format_both(totals.checkpoint), f"{format_count(totals.files)} files"],
        ["state to restore", format_both(totals.state), state],
        ["read from storage", format_both(totals.read), f"{totals.ratio:.4f} × state, each byte once"],
        ["held afterwards", format_both(totals.needed), "by all ranks together"],
        ["exchanged", ("" if exact else "about ") + format_both(totals.exchanged), "between ranks"],
    ]
    if totals.replicas:
        rows.append(["read to compare", format_both(totals.replicas), "replicas, on top"])
    return format_table([*rows, ["headers", str(totals.headers), "per rank at most"]])


def _describe_ranks(found: DryRun, totals: LoadTotals) -> list[str]:
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


def _format(key: str, value: float) -> str:
    return format_count(value) if key in _NUMBERS else format_bytes(value)


# -- without a checkpoint ---------------------------------------------------------------------------------------------


def _plan_run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """What a run needs, as data and as lines.

    Raises:
        ConfigError: options that are missing, or that mean nothing here.
    """
    from ..forecast.estimate import GIGA, estimate_times
    from ..forecast.outline import ASSUMED, EXCHANGE, outline_run

    if options.params is None or options.ranks is None:
        raise ConfigError("Name a checkpoint with --target; or, for a plan without one, give --params and --ranks.")
    _refuse(options, _WITH, "a plan without a checkpoint has nothing to use it for")
    speeds, degrees, optimizer = _read_bandwidths(options), _read_degrees(options), options.optimizer or "adam"
    found = outline_run(options.params, degrees, optimizer, options.window_mb << 20)
    memory, totals = found.memory, found.totals
    times = estimate_times(totals, [found.rank], degrees.world, speeds) if speeds else None
    save = totals.checkpoint / (options.write_gbs * GIGA) if options.write_gbs else None
    assumed = [*ASSUMED, *([EXCHANGE] if speeds and speeds.net else [])]
    data = {
        "possible": not degrees.refused,
        "obstacles": degrees.refused,
        "target": degrees.describe(),
        "params": options.params,
        "optimizer": optimizer,
        "memory": {**asdict(memory), "total": memory.total},
        "totals": totals,
        "bandwidths": speeds,
        "seconds": {**(asdict(times) if times else {}), "save": save},
        "assumed": assumed,
    }
    weights = degrees.precision if memory.weights else "the masters are the weights"
    load = f"a load takes at most {format_bytes(found.rank.peak)} on top"
    rows = [
        ["weights", format_bytes(memory.weights), weights],
        ["gradients", format_bytes(memory.gradients), ""],
        ["masters", format_bytes(memory.masters), "float32"],
        ["optimizer states", format_bytes(memory.states), optimizer],
        ["each rank", format_bytes(memory.total), f"of {degrees.world}; {load}"],
        ["checkpoint", format_both(totals.checkpoint), f"{totals.files} files"],
        ["state to restore", format_both(totals.state), "each byte is read once"],
    ]
    target = [f"to     {degrees.describe()}", f"model  {format_count(options.params)} parameters"]
    if degrees.refused:
        return data, ["not possible", *_list_obstacles(degrees.refused), "", *target]
    verdict = f"possible: {format_bytes(memory.total)} of memory for each rank's engine"
    lines = [verdict, "", *target, "", *format_table(rows, right=(1,)), *_end(speeds, times, ())]
    if save is not None:
        lines += ["", f"a save at {options.write_gbs:g} GB/s takes {format_seconds(save)}"]
    if options.mtbf:
        data["saves"], told, more = plan_interval(options, degrees, totals.state, totals.checkpoint - totals.state)
        lines += told
        assumed += more
    return data, [*lines, *_end(None, None, assumed)]


def _read_degrees(options: argparse.Namespace) -> Degrees:
    from ..forecast.degrees import parse_degrees
    from ..topology import Topology
    from ..wrappers import ATOMIC

    asked = {part.partition("=")[0].strip() for part in (options.target or "").split(",")}
    if twice := {"zero", "precision"} & asked:
        raise ConfigError(
            f"--target: without a checkpoint {', '.join(sorted(twice))} are told by --stage, --precision."
        )
    if unknown := {"ep", "experts", "max_group", "data_first"} & asked:
        raise ConfigError(f"--target: {', '.join(sorted(unknown))} can be planned with a checkpoint alone.")
    stage, precision = options.stage if options.stage is not None else 1, options.precision or "bf16"
    text = ",".join(filter(None, (options.target, f"zero={stage},precision={precision}")))
    return parse_degrees(text, Topology(stage, ATOMIC, precision), world=options.ranks)
