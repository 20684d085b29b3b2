"""How often to save, for ``ds_ucp plan --mtbf``: options and a table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, count_of
from .numbers import duration, positive, speed
from .printing import format_both, format_bytes, format_duration, format_seconds, format_table

if TYPE_CHECKING:
    from ..forecast.degrees import Degrees
    from ..forecast.interval import Interval, SaveSize, Way

OPTIONS = ("restart", "memory_gbs", "stall", "every", "against")
"""What counts with ``--mtbf`` alone."""

_NEEDED = ("read_gbs", "write_gbs", "restart")
_MEMORY_GBS, _RANKS_PER_NODE = 10.0, 8


def add_interval_options(parser: argparse.ArgumentParser) -> None:
    """``--mtbf`` and what goes with it."""
    add = parser.add_argument_group("how often to save").add_argument
    text = "mean time between failures of the whole job (8h, 30m): tell what saves cost, and the best interval"
    add("--mtbf", type=duration, metavar="TIME", help=text)
    text = "what a restart takes beside the load: from a failure to its begin, and from its end until training goes on"
    add("--restart", type=duration, metavar="TIME", help=text)
    text = f"what a node copies into its memory, in GB/s (default: {_MEMORY_GBS:g})"
    add("--memory-gbs", type=speed, metavar="GBS", help=text)
    text = "how long a save was seen to stop training, in place of the time that the copy takes"
    add("--stall", type=duration, metavar="TIME", help=text)
    add("--every", type=positive, metavar="N", help="of so many saves one goes to the storage (default: 1)")
    add("--against", type=duration, metavar="TIME", help="an interval of DeepSpeed's own saves to compare with")


def check_interval_options(options: argparse.Namespace) -> None:
    """Before anything is read.

    Raises:
        ConfigError: some are missing.
    """
    missing = [f"--{name.replace('_', '-')}" for name in _NEEDED if getattr(options, name) is None]
    if options.mtbf is not None and missing:
        raise ConfigError(f"--mtbf needs {', '.join(missing)} too: how often to save follows from them.")


def plan_interval(
    options: argparse.Namespace, degrees: Degrees, states: int, weights: int
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Compute how often to save: as data, as lines, and with the assumptions.

    Args:
        states, weights: bytes, as of :func:`~deepspeed_ucp.forecast.interval.measure_save`.
    """
    from ..forecast.estimate import GIGA
    from ..forecast.interval import ASSUMED, Tiers, choose_interval, judge_interval, list_ways, measure_save

    per_node = options.ranks_per_node or _RANKS_PER_NODE
    size = measure_save(states, weights, degrees, per_node)
    ways = list_ways(
        size,
        Tiers(
            memory=(options.memory_gbs or _MEMORY_GBS) * GIGA,
            write=options.write_gbs * GIGA,
            read=options.read_gbs * GIGA,
            network=options.net_gbs and options.net_gbs * per_node * GIGA,
            stall=options.stall,
            every=options.every or 1,
            restart=options.restart,
        ),
    )
    found = [(way, choose_interval(way, options.mtbf)) for way in ways]
    if options.against is not None:
        found.insert(0, (ways[0], judge_interval(ways[0], options.against, options.mtbf)))
    assumed = [ASSUMED]
    if options.memory_gbs is None:
        assumed.append(f"A node copies {_MEMORY_GBS:g} GB/s into and out of its memory: --memory-gbs.")
    if options.ranks_per_node is None:
        assumed.append(f"A node has {_RANKS_PER_NODE} ranks: --ranks-per-node.")
    data = {"mtbf": options.mtbf, "size": size, "ways": [{**asdict(way), "interval": each} for way, each in found]}
    return data, list(_describe(size, found, options.mtbf, copies=1 + bool(options.net_gbs))), assumed


def _describe(size: SaveSize, found: Sequence[tuple[Way, Interval]], mtbf: float, *, copies: int) -> Iterator[str]:
    yield from ("", f"saves, with a failure every {format_duration(mtbf)} on the mean")
    held = f"{format_bytes(2 * copies * size.node)} of memory for two saves" + ", a neighbour's too" * (copies > 1)
    rows = [
        ["a save", format_both(size.total), f"of {count_of(size.nodes, 'node')}"],
        ["the node with most of it", format_both(size.node), held],
    ]
    yield from (f"  {line}" for line in format_table(rows, right=(1,)))
    yield ""
    header = [
        "saves", "a failure leaves", "interval", "stall", "safe after", "that node sends", "a failure costs", "trains",
    ]  # fmt: skip
    table = [
        [
            way.saves,
            way.leaves,
            *(format_seconds(seconds) for seconds in (each.seconds, way.stall, way.safe)),
            f"{each.sends / 1e6:,.1f} MB/s",
            format_seconds(each.lost),
            f"{each.trains:.2%}",
        ]
        for way, each in found
    ]
    yield from format_table(table, header, right=range(2, len(header)))
