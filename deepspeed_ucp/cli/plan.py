"""``ds_ucp plan``: what a resume at another topology would read, exchange and need, without an engine."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .common import add_checkpoint_options, add_command, open_index, read_rules
from .figures import format_bytes, format_count, format_duration, format_table
from .printing import FAULT, OK, emit

if TYPE_CHECKING:
    from ..atoms import AtomicIndex
    from ..forecast.dryrun import DryRun
    from ..forecast.estimate import Bandwidths, LoadTotals, RankFigures, Times

_EXAMPLES = """
ds_ucp plan checkpoints/ --target "dp=3,tp=2,pp=1,zero=3"
ds_ucp plan checkpoints/ --target "dp=384,zero=3" --read-gbs 273 --net-gbs 25
ds_ucp plan checkpoints/ --target "tp=8,pp=48" --nodes 96 --ranks-per-node 8 --patterns megatron-gpt --json
"""
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
_PLAIN = ("requests", "files", "rounds")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "plan",
        help="what a resume at another topology would read and need",
        description="A dry run from the headers alone: is the resume possible, who would load, and what every rank "
        "would read, exchange and need. Exit code 0: possible, 1: not possible, 2: an error.",
        examples=_EXAMPLES,
    )
    add_checkpoint_options(parser)
    target = parser.add_argument_group("target")
    target.add_argument(
        "--target",
        required=True,
        metavar="DEGREES",
        help="topology to plan for: a list of dp, tp, pp, sp, zero, precision (fp32, bf16, fp16), wrapper, sub_group; "
        "degrees that are left out are 1, the rest as in the checkpoint",
    )
    target.add_argument("--nodes", type=_positive, metavar="N", help="nodes; with --ranks-per-node dp may be left out")
    target.add_argument("--ranks-per-node", type=_positive, metavar="N", help="ranks per node")
    target.add_argument(
        "--train-batch-size", type=_positive, metavar="N", help="a train_batch_size in place of the saved ds_config's"
    )
    target.add_argument(
        "--window-mb", type=_positive, default=256, metavar="MB", help="window_mb of the load (default: 256)"
    )
    speed = parser.add_argument_group("bandwidths, in GB/s of 10^9 bytes")
    speed.add_argument("--read-gbs", type=_speed, metavar="GBS", help="what the storage gives all ranks together")
    speed.add_argument("--rank-gbs", type=_speed, metavar="GBS", help="what it gives one rank at most")
    speed.add_argument("--net-gbs", type=_speed, metavar="GBS", help="what a rank sends or receives")
    extent = parser.add_argument_group("extent")
    extent.add_argument("--all", action="store_true", help="tell of each rank that was planned")
    how = extent.add_mutually_exclusive_group()
    how.add_argument("--exact", action="store_true", help="plan every rank, however long it takes")
    how.add_argument(
        "--sample",
        type=_positive,
        metavar="N",
        help="plan N ranks (default: all where that takes seconds, else 3 to 5)",
    )


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"a positive integer is needed, found {text!r}")
    return value


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"GB/s above 0 are needed, found {text!r}")
    return value


def run(options: argparse.Namespace) -> int:
    """Plan, print, and tell by the exit code whether the resume is possible."""
    from ..config import UniversalConfig
    from ..forecast.dryrun import dry_run

    speeds = _read_speeds(options)
    window = _read_window(options)
    index = open_index(options)
    degrees = _read_degrees(options, index)
    found = dry_run(
        index,
        degrees,
        read_rules(options),
        config=UniversalConfig(window_mb=window),
        train_batch=options.train_batch_size,
        exact=True if options.exact else False if options.sample else None,
        samples=options.sample,
    )
    times = _tell_times(found, speeds)
    emit(options, _to_data(index, found, speeds, times), _to_text(index, found, speeds, times, every=options.all))
    return OK if found.possible else FAULT


def _read_speeds(options: argparse.Namespace) -> Bandwidths | None:
    from ..forecast.estimate import Bandwidths

    if options.read_gbs is None:
        if options.rank_gbs is not None or options.net_gbs is not None:
            raise ConfigError("--rank-gbs and --net-gbs count beside the storage's bandwidth: give --read-gbs too.")
        return None
    return Bandwidths(options.read_gbs, options.rank_gbs, options.net_gbs)


def _read_window(options: argparse.Namespace) -> int:
    if options.window_mb < 16:
        raise ConfigError(f"--window-mb is at least 16, found {options.window_mb}.")
    return int(options.window_mb)


def _read_degrees(options: argparse.Namespace, index: AtomicIndex) -> Any:
    from ..forecast.degrees import parse_degrees
    from ..forecast.dryrun import read_saved_config

    if (options.nodes is None) != (options.ranks_per_node is None):
        raise ConfigError("--nodes and --ranks-per-node go together.")
    world = None if options.nodes is None else options.nodes * options.ranks_per_node
    zero = read_saved_config(index).get("zero_optimization")
    size = zero.get("sub_group_size") if isinstance(zero, dict) else None
    sub_group = int(size) if isinstance(size, (int, float)) and size >= 1 else None
    return parse_degrees(options.target, index.run.topology, world=world, sub_group=sub_group)


def _tell_times(found: DryRun, speeds: Bandwidths | None) -> Times | None:
    from ..forecast.estimate import tell_times

    if speeds is None or found.totals is None or not found.ranks:
        return None
    return tell_times(found.totals, found.ranks, found.degrees.world, speeds)


def _to_data(index: AtomicIndex, found: DryRun, speeds: Bandwidths | None, times: Times | None) -> dict[str, Any]:
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
        "batch": asdict(found.batch),
        "assumed": found.assumed,
        "patterns": found.origin,
        "exact": found.exact,
        "totals": None if found.totals is None else {**asdict(found.totals), "ratio": found.totals.ratio},
        "per_rank": {key: spread(found.ranks, key) for key in MEASURED} if found.ranks else {},
        "ranks": [asdict(rank) for rank in found.ranks],
        "bandwidths": None if speeds is None else asdict(speeds),
        "seconds": None if times is None else asdict(times),
    }


def _to_text(
    index: AtomicIndex, found: DryRun, speeds: Bandwidths | None, times: Times | None, *, every: bool
) -> list[str]:
    lines = [f"from   {index.run.topology.describe()}", f"to     {found.degrees.describe()}"]
    lines.append(f"loads  {_tell_loader(found)}")
    if found.batch.train is not None:
        lines.append(f"batch  {_tell_batch(found)}")
    if found.obstacles:
        lines += ["", "NOT POSSIBLE:"] + [f"  - {text}" for text in found.obstacles]
    if found.totals is not None:
        lines += ["", *_tell_totals(found, found.totals)]
        lines += ["", *_tell_ranks(found, every=every)]
    if times is not None and speeds is not None:
        lines += ["", *_tell_seconds(found, speeds, times)]
    if found.assumed and found.totals is not None:
        lines += ["", "assumed", *(f"  - {text}" for text in found.assumed)]
    return lines


def _tell_loader(found: DryRun) -> str:
    if not found.differences:
        return "DeepSpeed's own load: the topology is the checkpoint's"
    return f"{found.loader}: {'; '.join(found.differences)}"


def _tell_batch(found: DryRun) -> str:
    batch = found.batch
    told = f"train_batch_size {batch.train} on {found.degrees.dp} data-parallel ranks"
    if not batch.fits:
        return f"{told}: does not fit"
    return f"{told}: {batch.text}" if batch.text else f"{told}: fits"


def _tell_totals(found: DryRun, totals: LoadTotals) -> list[str]:
    about = "" if found.exact else "about "
    rows = [
        ["checkpoint", _both(totals.checkpoint), f"{format_count(totals.files)} files"],
        [
            "state to restore",
            _both(totals.state),
            "masters, optimizer states, buffers; 16-bit copies are made from them",
        ],
        ["read from storage", _both(totals.read), f"{totals.ratio:.4f} × state, each byte once"],
        ["held afterwards", _both(totals.needed), "by all ranks together"],
        ["exchanged", about + _both(totals.exchanged), "between ranks"],
    ]
    if totals.replicas:
        rows.append(["read to compare", _both(totals.replicas), "replicas, on top"])
    rows.append(["headers", str(totals.headers), "per rank at most"])
    return format_table(rows)


def _both(nbytes: int) -> str:
    """Binary units as elsewhere, and decimal ones, which bandwidths are told in."""
    if nbytes < 1_000_000_000:
        return format_bytes(nbytes)
    return f"{format_bytes(nbytes)} ({format_count(nbytes)}B)"


def _tell_ranks(found: DryRun, *, every: bool) -> list[str]:
    from ..forecast.estimate import MEASURED, spread

    world = found.degrees.world
    title = f"each of {world} ranks" if found.exact else f"{len(found.ranks)} of {world} ranks, exactly"
    rows = [[_TITLES[key], *(_format(key, each) for each in spread(found.ranks, key).values())] for key in MEASURED]
    lines = format_table(rows, [title, "least", "mean", "most"], right=(1, 2, 3))
    if not found.exact:
        told = ", ".join(str(rank.rank) for rank in found.ranks)
        mean = found.totals.read / world if found.totals else 0
        lines.append(f"Planned exactly: ranks {told}; their rounds and memory are estimates. Totals of bytes read and")
        lines.append(f"held are exact for all ranks: {format_bytes(mean)} read per rank on average.")
    if every:
        lines += ["", *_list_ranks(found.ranks)]
    return lines


def _list_ranks(ranks: list[RankFigures]) -> list[str]:
    header = ["rank", "stage", "dp", "tp", *_TITLES.values()]
    rows = [
        [str(r.rank), str(r.stage), str(r.dp_rank), str(r.tp_rank), *(_format(k, getattr(r, k)) for k in _TITLES)]
        for r in ranks
    ]
    return format_table(rows, header, right=range(len(header)))


def _format(key: str, value: float) -> str:
    return format_count(value) if key in _PLAIN else format_bytes(value)


def _tell_seconds(found: DryRun, speeds: Bandwidths, times: Times) -> list[str]:
    rows = [
        ["the whole checkpoint once", _seconds(times.checkpoint), "every byte of every file"],
        ["what the resume reads", _seconds(times.aggregate), "all ranks together"],
        ["the rank that reads most", _seconds(times.slowest), "at an equal share of the bandwidth"],
    ]
    if speeds.rank is not None:
        rows[-1][-1] += f", at most {speeds.rank:g} GB/s"
    if times.exchange is not None:
        rows.append(["exchange", _seconds(times.exchange), f"at {speeds.net:g} GB/s per rank"])
    rows.append(["resume", _seconds(times.load), "reading" if times.exchange is None else "reading and exchange"])
    return [f"at {speeds.read:g} GB/s", *(f"  {line}" for line in format_table(rows, right=(1,)))]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if 10 <= seconds < 120 else format_duration(seconds)
