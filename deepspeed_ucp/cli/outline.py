"""``ds_ucp plan`` without a checkpoint: what a run of so many parameters needs of memory, disk and time."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .bandwidths import format_seconds, positive, read_bandwidths, speed, tell_both, tell_seconds
from .printing import FAULT, OK, emit, format_bytes, format_count, format_table

if TYPE_CHECKING:
    from ..forecast.degrees import Degrees
    from ..forecast.outline import Outline

OUTLINE = ("params", "stage", "ranks", "precision", "optimizer", "write_gbs")
"""Options of a plan without a checkpoint."""

_OTHERS = (
    *("also", "patterns", "groups", "storage_option", "nodes", "ranks_per_node", "train_batch_size", "all", "exact"),
    "sample",
)
"""Those of a plan with one alone."""

_OPTIMIZERS = ("adam", "adamw", "lion", "momentum", "adagrad", "sgd")
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def add_outline_options(group: Any) -> None:
    """The options, in a group of a parser."""
    group.add_argument("--params", type=_size, metavar="N", help="parameters of the model: 70e9, 175B")
    group.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage (default: 1)")
    group.add_argument("--ranks", type=positive, metavar="N", help="ranks; --target may name more degrees, as tp=8")
    group.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="of the model (default: bf16)")
    group.add_argument("--optimizer", choices=_OPTIMIZERS, help="default: adam")
    text = "what the storage takes of all ranks together, in GB/s: for the seconds of a save"
    group.add_argument("--write-gbs", type=speed, metavar="GBS", help=text)


def _size(text: str) -> int:
    scale = _SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        value = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1e18:
        raise argparse.ArgumentTypeError(f"a number such as 70e9 or 175B is needed, found {text!r}")
    return round(value)


def refuse_options(options: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Options that mean nothing here are not passed over.

    Raises:
        ConfigError: some are given.
    """
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, False, [])]
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}; leave it out.")


def run_outline(options: argparse.Namespace) -> int:
    """Tell what a run needs; 1 where DeepSpeed does not run it.

    Raises:
        ConfigError: options that are missing, or that mean nothing here.
    """
    from ..forecast.estimate import GIGA, tell_times
    from ..forecast.outline import ASSUMED, EXCHANGE, outline_run

    if options.params is None or options.ranks is None:
        raise ConfigError("Name a checkpoint with --target; or, for a plan without one, give --params and --ranks.")
    refuse_options(options, _OTHERS, "a plan without a checkpoint has nothing to use it for")
    speeds, degrees, optimizer = read_bandwidths(options), _read_degrees(options), options.optimizer or "adam"
    found = outline_run(options.params, degrees, optimizer, options.window_mb << 20)
    times = tell_times(found.totals, [found.rank], degrees.world, speeds) if speeds else None
    save = found.totals.checkpoint / (options.write_gbs * GIGA) if options.write_gbs else None
    lines = _write(options, degrees, found, optimizer)
    if speeds and times:
        lines += ["", *tell_seconds(speeds, times)]
    if save is not None:
        lines += ["", f"a save at {options.write_gbs:g} GB/s takes {format_seconds(save)}"]
    assumed = [*ASSUMED, *([EXCHANGE] if speeds and speeds.net else [])]
    data = {
        "possible": not degrees.refused,
        "obstacles": degrees.refused,
        "target": degrees.describe(),
        "params": options.params,
        "optimizer": optimizer,
        "memory": {**asdict(found.memory), "total": found.memory.total},
        "totals": found.totals,
        "bandwidths": speeds,
        "seconds": {**(asdict(times) if times else {}), "save": save},
        "assumed": assumed,
    }
    emit(options, data, [*lines, "", "assumed", *(f"  - {text}" for text in assumed)])
    return FAULT if degrees.refused else OK


def _read_degrees(options: argparse.Namespace) -> Degrees:
    from ..forecast.degrees import parse_degrees
    from ..topology import Topology

    asked = [part.partition("=")[0].strip() for part in (options.target or "").split(",")]
    if twice := {"zero", "precision"} & set(asked):
        raise ConfigError(
            f"--target: without a checkpoint {', '.join(sorted(twice))} are told by --stage, --precision."
        )
    if unknown := {"ep", "experts", "max_group", "data_first"} & set(asked):
        raise ConfigError(f"--target: {', '.join(sorted(unknown))} can be planned with a checkpoint alone.")
    stage, precision = options.stage if options.stage is not None else 1, options.precision or "bf16"
    text = ",".join(filter(None, (options.target, f"zero={stage},precision={precision}")))
    return parse_degrees(text, Topology(stage, "", precision), world=options.ranks)


def _write(options: argparse.Namespace, degrees: Degrees, found: Outline, optimizer: str) -> list[str]:
    memory, totals = found.memory, found.totals
    load = f"at most {format_bytes(found.rank.peak)}"
    rows = [
        [
            "weights",
            format_bytes(memory.weights),
            degrees.precision if memory.weights else "the masters are the weights",
        ],
        ["gradients", format_bytes(memory.gradients), ""],
        ["masters", format_bytes(memory.masters), "float32"],
        ["optimizer states", format_bytes(memory.states), optimizer],
        ["each rank", format_bytes(memory.total), f"of {degrees.world}; a load takes {load} on top"],
        ["checkpoint", tell_both(totals.checkpoint), f"{totals.files} files"],
        ["state to restore", tell_both(totals.state), "each byte is read once"],
    ]
    head = [f"to     {degrees.describe()}", f"model  {format_count(options.params)} parameters".rstrip(), ""]
    refused = [*(f"  - {text}" for text in degrees.refused)]
    return [*head, *(["NOT POSSIBLE:", *refused, ""] if refused else []), *format_table(rows, right=(1,))]
