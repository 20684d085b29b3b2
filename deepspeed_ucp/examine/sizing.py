"""Estimate memory and disk of a model without files, and the best interval between saves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..model import COPY, ITEMSIZE, MASTER, MODULE, AtomicIndex
from .degrees import Degrees

OPTIMIZERS = {"adam": 2, "adamw": 2, "lion": 1, "momentum": 1, "adagrad": 1, "sgd": 0}
"""Number of element-wise fp32 states per parameter."""


@dataclass(frozen=True, slots=True)
class RunSize:
    """Bytes that a run needs.

    Attributes:
        weights, gradients, masters, states: of one rank; no weights if the masters are the weights.
        total: of one rank.
        restored: masters and optimizer states of all ranks, which a load restores.
        checkpoint, files: of one save.
    """

    weights: int
    gradients: int
    masters: int
    states: int
    total: int
    restored: int
    checkpoint: int
    files: int


def estimate_run(params: int, degrees: Degrees, optimizer: str) -> RunSize:
    """Estimate memory and disk of a dense model, without padding, activations and communication buffers.

    Args:
        params: parameters of the whole model, all of them trained.
        optimizer: a key of :data:`OPTIMIZERS`.
    """
    states, width = 4 * OPTIMIZERS[optimizer], ITEMSIZE[degrees.precision]
    is_bare, is_cut = not degrees.traits.has_copies, degrees.traits.is_cut
    lanes = degrees.tp * degrees.pp
    per_lane = -(-params // lanes)
    partition = -(-per_lane // degrees.shards) if is_cut else per_lane
    restored = (4 + states) * params
    weights = 0 if is_bare else width * (partition if degrees.zero == 3 else per_lane)
    gradients = width * (partition if degrees.zero >= 2 else per_lane)
    total = weights + gradients + (4 + states) * partition
    checkpoint = restored + (0 if is_bare or degrees.zero == 3 else width * params)
    files = (degrees.world if degrees.zero == 3 else lanes) + (degrees.world if is_cut else 0)
    return RunSize(weights, gradients, 4 * partition, states * partition, total, restored, checkpoint, files)


def count_state(index: AtomicIndex, degrees: Degrees) -> tuple[int, int]:
    """Bytes of a save of this model at degrees: masters and optimizer states; and 16-bit copies and other tensors."""
    atoms = index.atoms.items()
    states = sum(atom.nbytes for key, atom in atoms if key.state not in (COPY, MODULE))
    others = sum(atom.nbytes for key, atom in atoms if key.state == MODULE)
    masters = sum(atom.numel for key, atom in atoms if key.state == MASTER)
    has_copies = degrees.traits.has_copies and degrees.zero < 3
    return states, others + (ITEMSIZE[degrees.precision] * masters if has_copies else 0)


@dataclass(frozen=True, slots=True)
class SaveSize:
    """Bytes of a save: of all nodes, and of the node that writes most of it."""

    total: int
    node: int
    nodes: int


def measure_save(states: int, weights: int, degrees: Degrees, per_node: int) -> SaveSize:
    """Distribute a save over nodes as DeepSpeed does: the first data-parallel ranks write what is not partitioned.

    Args:
        states, weights: as returned by :func:`count_state`.
        per_node: consecutive ranks of a node.
    """
    world, tp = degrees.world, degrees.tp
    cut, whole = (states, weights) if degrees.traits.is_cut else (0, states + weights)
    if degrees.zero == 3:
        cut, whole = states + weights, 0
    nodes = [range(first, min(first + per_node, world)) for first in range(0, world, per_node)]
    writers = [sum(rank // tp % degrees.shards == 0 for rank in node) for node in nodes]
    sizes = (
        cut * len(states) // world + whole * n // (tp * degrees.pp) for states, n in zip(nodes, writers, strict=True)
    )
    return SaveSize(states + weights, max(sizes), len(nodes))


@dataclass(frozen=True, slots=True)
class SaveWay:
    """A way to save, and one kind of failure; times in seconds.

    Attributes:
        saves: name of the way.
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


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval between saves and its cost.

    Attributes:
        seconds: training time between two saves.
        trains: share of all time that trains and is not repeated.
        lost: mean seconds that a failure costs: repeated work and saves, and the restart.
    """

    seconds: float
    trains: float
    lost: float


def find_daly(stall: float, mtbf: float) -> float:
    """Daly's higher-order interval (Daly 2006, equation 37): training time between two saves."""
    if stall >= 2 * mtbf:
        return mtbf
    part = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - stall


def judge_interval(way: SaveWay, seconds: float, mtbf: float) -> Interval:
    """Compute the exact cost of an interval, for failures at random (Poisson).

    Of X seconds between two failures the k-th safe save takes ``restart + k · seconds + (k - 1) · stall + safe``. X is
    exponential: the sum over k of the probabilities that X is longer is a geometric series. If a save is safe as soon
    as training continues, this is Daly's complete model.
    """
    first = way.restart + seconds + way.safe
    trains = seconds / mtbf * math.exp(-first / mtbf) / -math.expm1(-(seconds + way.stall) / mtbf)
    return Interval(seconds, trains, mtbf * (1 - trains * (1 + way.stall / seconds)))


def choose_interval(way: SaveWay, mtbf: float) -> Interval:
    """Choose the interval with the least loss that storage and neighbour can follow.

    It depends on the stall alone: a save that is safe later costs the same at every interval.
    """
    return judge_interval(way, max(find_daly(way.stall, mtbf), way.least), mtbf)


@dataclass(frozen=True, slots=True)
class SaveSpeeds:
    """Speeds in bytes per second, and times in seconds.

    Attributes:
        memory: copies of a node into its memory.
        write, read: the storage, for all nodes together.
        network: a node in each direction; None: unlimited, and no neighbour has copies.
        stall: measured stall; None: the time of the copy into memory.
        restart: time of a restart without its load.
    """

    memory: float
    write: float
    read: float
    network: float | None
    stall: float | None
    restart: float


def list_ways(size: SaveSize, speeds: SaveSpeeds) -> list[SaveWay]:
    """DeepSpeed's own saves, and saves to memory against each kind of failure."""
    copied, sent = size.node / speeds.memory, size.node / speeds.network if speeds.network else 0.0
    written, read = max(size.total / speeds.write, sent), max(size.total / speeds.read, sent)
    stall = copied if speeds.stall is None else speeds.stall
    in_memory = max(stall, copied)
    least = max(written, sent, in_memory) - stall
    memory = SaveWay("to memory", "the node's memory", stall, in_memory, speeds.restart + copied, least)
    neighbour = replace(memory, leaves="a neighbour's memory", safe=in_memory + sent, restart=memory.restart + sent)
    stored = replace(memory, leaves="the storage", safe=in_memory + written, restart=speeds.restart + read)
    deepspeed = SaveWay("DeepSpeed's own", "the storage", written, written, speeds.restart + read)
    return [deepspeed, stored, *([neighbour] if speeds.network else []), memory]
