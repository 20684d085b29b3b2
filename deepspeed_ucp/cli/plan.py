"""``ds_ucp plan``: checks a resume, sizes a model, and chooses a save interval."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, pluralize
from . import common
from .printing import FAULT, OK, emit, format_both, format_bytes, format_count, format_duration, format_table

if TYPE_CHECKING:
    from ..examine.degrees import Degrees

GIGA = 1_000_000_000
MEMORY = 10 * GIGA
"""Bytes per second that a node copies into its memory."""

OPTIMIZERS = {"adam": 2, "adamw": 2, "lion": 1, "momentum": 1, "adagrad": 1, "sgd": 0}
"""Number of element-wise fp32 states per parameter."""

_NEEDS = {
    "checkpoint": ("train-batch-size", "patterns", "groups", "also"),
    "params": ("optimizer",),
    "mtbf": ("restart", "net-gbs", "stall", "ranks-per-node"),
    **dict.fromkeys(("restart", "read-gbs", "write-gbs"), ("mtbf",)),
}
"""Option → options that need it."""

_SUFFIXES = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_parse_count = common.make_quantity_type(_SUFFIXES, "a number such as 70e9 or 175B", whole=True)
_parse_ranks = common.make_quantity_type({"": 1}, "a positive integer", whole=True)
_parse_speed = common.make_quantity_type({"": GIGA}, "a speed in GB/s")
_parse_time = common.make_quantity_type({"D": 86400, "H": 3600, "M": 60, "S": 1}, "a time such as 8h, 30m or 1h30m")


def add_parser(commands: common.Commands) -> None:
    """Add the parser of the command."""
    parser = common.add_command(
        commands,
        "plan",
        description="Check, from the headers and with the checks of a load, whether a checkpoint can be resumed at "
        "another topology, and how many bytes each rank reads. With --params: memory and disk of a model without a "
        "checkpoint. With --mtbf: how often to save. Exit code 0: possible; 1: not possible; 2: an error.",
        examples="""
            ds_ucp plan checkpoints/ --target "dp=3,tp=2,pp=1,zero=3"
            ds_ucp plan checkpoints/ --target "tp=8,pp=48" --ranks 768 --patterns megatron-gpt --json
            ds_ucp plan --params 175B --target "tp=8,pp=16,zero=1" --ranks 1024 --optimizer adamw
            ds_ucp plan checkpoints/ --target dp=512 --mtbf 8h --restart 90s --read-gbs 100 --write-gbs 50
        """,
        keys="possible; source; target; degrees; obstacles; loader; differences; batch (train, micro, gas, "
        "change); patterns; state, read, read_per_rank, checkpoint (bytes); files; seconds (load, save). With "
        "--params: possible, target, degrees, obstacles, params, optimizer; weights, gradients, masters, states, total "
        "(bytes per rank); restored, checkpoint, files, seconds. With --mtbf also saves: mtbf, size (total, "
        "node, nodes), ways",
    )
    common.add_checkpoint(parser, needed=False)
    add = parser.add_argument
    text = (
        "topology: a list of dp, tp, pp, sp, ep (of experts), zero and precision (fp32, bf16, fp16). Missing degrees "
        "are 1; stage and precision are those of the checkpoint, or zero=1,precision=bf16"
    )
    add("--target", metavar="DEGREES", default="", help=text)
    add("--ranks", type=_parse_ranks, metavar="N", help="number of ranks, if --target has no dp")
    add("--train-batch-size", type=_parse_ranks, metavar="N", help="replaces the saved train_batch_size")
    add("--params", type=_parse_count, metavar="N", help="parameters of the model, without a checkpoint: 70e9, 175B")
    add("--optimizer", choices=OPTIMIZERS, help="with --params (default: adam)")
    add("--read-gbs", type=_parse_speed, metavar="GBS", help="read bandwidth of the storage, all ranks together, GB/s")
    add("--write-gbs", type=_parse_speed, metavar="GBS", help="write bandwidth of the storage, GB/s")
    add = parser.add_argument_group("how often to save (needs --restart, --read-gbs, --write-gbs)").add_argument
    add("--mtbf", type=_parse_time, metavar="TIME", help="mean time between failures of the whole job, such as 8h")
    add("--restart", type=_parse_time, metavar="TIME", help="time of a restart without its load")
    add("--net-gbs", type=_parse_speed, metavar="GBS", help="network bandwidth of a rank, for copies on a neighbour")
    add("--stall", type=_parse_time, metavar="TIME", help="measured stall of a save (default: a copy at 10 GB/s)")
    add("--ranks-per-node", type=_parse_ranks, metavar="N", help="ranks of a node (default: 8)")
    common.add_shared_options(parser, checkpoint=True, patterns=True)


def run(options: argparse.Namespace) -> int:
    """Plan and print; 1 if the resume is not possible."""
    if (options.checkpoint is None) == (options.params is None):
        raise ConfigError("Pass a checkpoint and --target, or --params and --ranks.")
    for needed, names in _NEEDS.items():
        given = [f"--{name}" for name in names if getattr(options, name.replace("-", "_"))]
        if given and getattr(options, needed.replace("-", "_")) is None:
            raise ConfigError(f"{', '.join(given)}: give {'a ' if needed == 'checkpoint' else '--'}{needed} too.")
    data, lines = _plan_model(options) if options.checkpoint is None else _plan_resume(options)
    emit(options, data, lines)
    return OK if data["possible"] else FAULT


def _plan_resume(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return the data of ``--json`` and the lines of a resume's plan."""
    from ..comm import Comm
    from ..examine.degrees import parse_degrees
    from ..examine.resume import check_resume
    from ..examine.sizing import count_state
    from ..model.topology import list_undescribed

    _, index = common.open_index(options, options.checkpoint, options.also, Comm())
    common.warn_unused_groups(options, index)
    degrees = parse_degrees(options.target, index.topology, world=options.ranks)
    check = check_resume(index, degrees, common.read_rules(options), train_batch=options.train_batch_size)
    data = {"possible": not check.obstacles, "source": index.origin, "target": degrees.describe()}
    data |= {**asdict(check), "read_per_rank": -(-check.read // degrees.world)}
    rows = [("from", index.origin), ("to", degrees.describe())]
    if more := list_undescribed(check.differences):
        rows.append(("differs", "; ".join(more)))
    if check.obstacles:
        return data, ["not possible", *(f"  - {text}" for text in check.obstacles), "", *format_table(rows)]
    if train := check.batch["train"]:
        ranks = pluralize(degrees.dp, "data-parallel rank")
        rows.append(("batch", f"train_batch_size {train} on {ranks}: {check.batch['change'] or 'fits'}"))
    rows.append(("checkpoint", f"{format_both(check.checkpoint)} in {pluralize(check.files, 'file')}"))
    if check.read:
        per_rank = format_bytes(check.read / degrees.world)
        rows.append(("reads", f"{format_both(check.read)}, each byte once; {per_rank} per rank on average"))
    verdict = f"possible: {check.loader} loads it on {pluralize(degrees.world, 'rank')}"
    lines = _add_times(options, data, degrees, *count_state(index, degrees))
    return data, [verdict, "", *format_table(rows), *lines]


def _plan_model(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from ..examine.degrees import parse_degrees
    from ..examine.sizing import estimate_run
    from ..model.topology import Topology
    from ..model.wrappers import ATOMIC

    degrees = parse_degrees(options.target, Topology(1, ATOMIC, "bfloat16"), world=options.ranks)
    experts = f"A dense model has no experts that ep={degrees.ep} could distribute." if degrees.ep > 1 else ""
    obstacles = [text for text in (degrees.obstacle, experts) if text]
    data = {"possible": not obstacles, "target": degrees.describe(), "degrees": degrees, "obstacles": obstacles}
    if obstacles:
        return data, ["not possible", *(f"  - {text}" for text in obstacles), "", f"to  {degrees.describe()}"]
    optimizer = options.optimizer or "adam"
    size = estimate_run(options.params, degrees, OPTIMIZERS[optimizer])
    data |= {"params": options.params, "optimizer": optimizer, **size}
    rows = [
        ("weights", format_bytes(size["weights"]), "" if size["weights"] else "the masters are the weights"),
        ("gradients", format_bytes(size["gradients"]), ""),
        ("masters", format_bytes(size["masters"]), "float32"),
        ("optimizer states", format_bytes(size["states"]), optimizer),
        ("each rank", format_bytes(size["total"]), "without activations and communication buffers"),
        ("checkpoint", format_both(size["checkpoint"]), pluralize(size["files"], "file")),
        ("state to restore", format_both(size["restored"]), "read once"),
    ]
    verdict = f"possible: {format_bytes(size['total'])} of memory for each rank's engine"
    target = f"{format_count(options.params)} parameters, {degrees.describe()}"
    lines = _add_times(options, data, degrees, size["restored"], size["checkpoint"] - size["restored"])
    return data, [verdict, "", target, "", *format_table(rows, right=(1,)), *lines]


def _add_times(
    options: argparse.Namespace, data: dict[str, Any], degrees: Degrees, states: int, weights: int
) -> list[str]:
    """Add times and save intervals to ``data``; return the lines about them."""
    from ..examine.sizing import choose_interval, judge_interval, list_ways, measure_save

    read, saved = data.get("read") or states, states + weights
    data["seconds"] = {
        "load": options.read_gbs and read / options.read_gbs,
        "save": options.write_gbs and saved / options.write_gbs,
    }
    times = [f"a {name} takes at least {format_duration(time)}" for name, time in data["seconds"].items() if time]
    lines = ["", "; ".join(times)] if times else []
    if not options.mtbf:
        return lines
    per_node, ways, rows = options.ranks_per_node or 8, list[dict[str, Any]](), list[tuple[str, ...]]()
    node, nodes = measure_save(states, weights, degrees, per_node)
    speeds = {"memory": MEMORY, "write": options.write_gbs, "read": options.read_gbs, "restart": options.restart}
    network = options.net_gbs and options.net_gbs * per_node
    for way in list_ways(saved, node, **speeds, network=network, stall=options.stall):
        seconds = choose_interval(way, options.mtbf)
        trains, lost = judge_interval(way, seconds, options.mtbf)
        ways.append({**asdict(way), "interval": {"seconds": seconds, "trains": trains, "lost": lost}})
        durations = map(format_duration, (seconds, way.stall, way.safe, lost))
        rows.append((way.saves, way.leaves, *durations, f"{trains:.2%}"))
    data["saves"] = {"mtbf": options.mtbf, "size": {"total": saved, "node": node, "nodes": nodes}, "ways": ways}
    header = ("saves", "a failure leaves", "interval", "stall", "safe after", "a failure costs", "trains")
    text = f"a failure every {format_duration(options.mtbf)}; {pluralize(nodes, 'node')} of {per_node} ranks"
    table = format_table(rows, header, right=range(2, len(header)))
    return [*lines, "", f"{text}, at most {format_bytes(node)} of a save each", "", *table]
