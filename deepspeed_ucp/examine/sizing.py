"""Estimates memory and disk of a model, and the best interval between saves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..model.index import AtomicIndex
from ..model.storage import COPY, ITEMSIZE, MASTER, MODULE
from .degrees import Degrees


def estimate_run(params: int, degrees: Degrees, states: int) -> dict[str, int]:
    """Estimate memory and disk of a dense model with fp32 ``states`` per parameter.

    Returns:
        Bytes of one rank, without padding, activations and communication buffers: ``weights`` (0 if the masters are the
        weights), ``gradients``, ``masters``, ``states`` and ``total``. ``restored``: bytes of masters and optimizer
        states of all ranks. ``checkpoint``, ``files``: bytes and files of one save.
    """
    width = ITEMSIZE[degrees.precision]
    is_bare, is_cut = not degrees.traits.has_copies, degrees.traits.is_cut
    lanes = degrees.tp * degrees.pp
    per_lane = -(-params // lanes)
    partition = -(-per_lane // degrees.shards) if is_cut else per_lane
    sizes = {
        "weights": 0 if is_bare else width * (partition if degrees.zero == 3 else per_lane),
        "gradients": width * (partition if degrees.zero >= 2 else per_lane),
        "masters": 4 * partition,
        "states": 4 * states * partition,
    }
    restored = 4 * (1 + states) * params
    return {
        **sizes,
        "total": sum(sizes.values()),
        "restored": restored,
        "checkpoint": restored + (0 if is_bare or degrees.zero == 3 else width * params),
        "files": (degrees.world if degrees.zero == 3 else lanes) + (degrees.world if is_cut else 0),
    }


def count_state(index: AtomicIndex, degrees: Degrees) -> tuple[int, int]:
    """Return the bytes of masters and states, and of 16-bit copies and other tensors."""
    atoms = index.atoms.items()
    states = sum(atom.nbytes for key, atom in atoms if key.state not in (COPY, MODULE))
    others = sum(atom.nbytes for key, atom in atoms if key.state == MODULE)
    masters = sum(atom.numel for key, atom in atoms if key.state == MASTER)
    has_copies = degrees.traits.has_copies and degrees.zero < 3
    return states, others + (ITEMSIZE[degrees.precision] * masters if has_copies else 0)


def measure_save(states: int, weights: int, degrees: Degrees, per_node: int) -> tuple[int, int]:
    """Return the bytes of a save on the node with most, and the number of nodes."""
    world, tp = degrees.world, degrees.tp
    cut, whole = (states, weights) if degrees.traits.is_cut else (0, states + weights)
    if degrees.zero == 3:
        cut, whole = states + weights, 0
    nodes = [range(first, min(first + per_node, world)) for first in range(0, world, per_node)]
    # The first data-parallel ranks write unpartitioned tensors.
    writers = [sum(rank // tp % degrees.shards == 0 for rank in node) for node in nodes]
    sizes = (
        cut * len(ranks) // world + whole * n // (tp * degrees.pp) for ranks, n in zip(nodes, writers, strict=True)
    )
    return max(sizes), len(nodes)


@dataclass(frozen=True, slots=True)
class SaveWay:
    """A way to save, judged for one kind of failure; times in seconds.

    Attributes:
        leaves: newest save that such a failure leaves.
        stall: time for which a save stops training.
        safe: time from the begin of a save until it survives such a failure.
        restart: time from a failure until training continues.
        least: shortest interval at which storage and neighbour can follow.
    """

    saves: str
    leaves: str
    stall: float
    safe: float
    restart: float
    least: float = 0.0


def judge_interval(way: SaveWay, seconds: float, mtbf: float) -> tuple[float, float]:
    """Return gain and loss of a save every ``seconds`` of training (Poisson failures).

    Of X seconds between two failures the k-th safe save takes ``restart + k · seconds + (k - 1) · stall + safe``. X is
    exponential: the sum over k of the probabilities that X is longer is a geometric series. If a save is safe as soon
    as training continues, this is Daly's complete model.

    Returns:
        The share of all time that trains and is not repeated; and the mean seconds that a failure costs: repeated work
        and saves, and the restart.
    """
    first = way.restart + seconds + way.safe
    trains = seconds / mtbf * math.exp(-first / mtbf) / -math.expm1(-(seconds + way.stall) / mtbf)
    return trains, mtbf * (1 - trains * (1 + way.stall / seconds))


def choose_interval(way: SaveWay, mtbf: float) -> float:
    """Choose the training time (s) between two saves that costs least.

    It depends on the stall alone: a save that is safe later costs the same at every interval. It is Daly's higher-order
    interval (Daly 2006, equation 37).
    """
    if way.stall >= 2 * mtbf:
        return max(mtbf, way.least)
    part = way.stall / (2 * mtbf)
    interval = math.sqrt(2 * way.stall * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - way.stall
    return max(interval, way.least)


def list_ways(
    total: int,
    node: int,
    *,
    memory: float,
    write: float,
    read: float,
    network: float | None,
    stall: float | None,
    restart: float,
) -> list[SaveWay]:
    """List the ways to save: DeepSpeed's own, and to memory for each kind of failure.

    Args:
        total, node: bytes of a save, of all nodes and of the node that writes most.
        memory: bytes per second that a node copies into its memory.
        write, read: bytes per second of the storage, for all nodes together.
        network: bytes per second of a node in each direction; None: unlimited, and no neighbour has copies.
        stall: measured stall in seconds; None: the time of the copy into memory.
        restart: seconds of a restart without its load.
    """
    copied, sent = node / memory, node / network if network else 0.0
    written, loaded = max(total / write, sent), max(total / read, sent)
    stall = copied if stall is None else stall
    in_memory = max(stall, copied)
    least = max(written, sent, in_memory) - stall
    local = SaveWay("to memory", "the node's memory", stall, in_memory, restart + copied, least)
    neighbour = replace(local, leaves="a neighbour's memory", safe=in_memory + sent, restart=local.restart + sent)
    stored = replace(local, leaves="the storage", safe=in_memory + written, restart=restart + loaded)
    deepspeed = SaveWay("DeepSpeed's own", "the storage", written, written, restart + loaded)
    return [deepspeed, stored, *([neighbour] if network else []), local]
