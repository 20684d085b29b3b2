"""How often to save: what a save takes, when it is safe, and the interval that loses least.

A job trains for an interval, stands still for a save, and so on. Failures come at random (Poisson), while a job starts
again too, and leave the newest save that is safe from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..atoms import COPY, ITEMSIZE, MASTER, MODULE, AtomicIndex
from .degrees import Degrees

ASSUMED = (
    "Failures come at random, at any time. Intervals are of training between saves, by Daly's form, but never so short "
    "that the storage or a neighbour falls behind. A failure costs what is done again since the newest save that it "
    "leaves, and the restart with a load of all of that."
)


@dataclass(frozen=True, slots=True)
class SaveSize:
    """Bytes of a save: of all nodes, and of the node that writes most of it."""

    total: int
    node: int
    nodes: int


def count_state(index: AtomicIndex, degrees: Degrees) -> tuple[int, int]:
    """Bytes of masters and optimizer states, and of 16-bit copies and what no optimizer owns, in a save at degrees."""
    atoms = index.stored.atoms.items()
    states = sum(atom.nbytes for key, atom in atoms if key.state not in (COPY, MODULE))
    others = sum(atom.nbytes for key, atom in atoms if key.state == MODULE)
    masters = sum(atom.numel for key, atom in atoms if key.state == MASTER)
    has_copies = degrees.traits.has_copies and degrees.zero < 3
    return states, others + (ITEMSIZE[degrees.precision] * masters if has_copies else 0)


def measure_save(states: int, weights: int, degrees: Degrees, per_node: int) -> SaveSize:
    """Spread a save over nodes as DeepSpeed does: the first data-parallel ranks write what is not partitioned.

    Args:
        states, weights: as :func:`count_state` has them.
        per_node: ranks of a node, which follow each other.
    """
    world, tp, shards = degrees.world, degrees.tp, degrees.shards
    cut, whole = (states, weights) if degrees.partitions else (0, states + weights)
    if degrees.zero == 3:
        cut, whole = states + weights, 0
    nodes = [range(first, min(first + per_node, world)) for first in range(0, world, per_node)]
    writers = [sum(rank // tp % shards == 0 for rank in node) for node in nodes]
    written = [
        cut * len(each) // world + whole * n // (tp * degrees.pp) for each, n in zip(nodes, writers, strict=True)
    ]
    return SaveSize(states + weights, max(written), len(nodes))


@dataclass(frozen=True, slots=True)
class Way:
    """A way to save, against one kind of failure; seconds.

    Attributes:
        saves: the way, in words.
        leaves: what failures of this kind leave, in words.
        stall: that training stands still for a save.
        safe: from the beginning of the save until such failures leave it.
        restart: from a failure until training goes on.
        least: training between two saves at least, that what takes them on does not fall behind.
        every: of so many saves one is to be safe from these failures.
        sent: bytes that the node with most of a save sends for it, on the mean.
    """

    saves: str
    leaves: str
    stall: float
    safe: float
    restart: float
    least: float = 0.0
    every: int = 1
    sent: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """What an interval comes to.

    Attributes:
        seconds: of training between two saves.
        sends: bytes a second that the node with most of a save sends, on the mean.
        trains: share of all time that trains and is not lost.
        stalls: share in which training stands still for saves that are not lost.
        lost: seconds that a failure costs: work that is done again, saves of it, and the restart.
    """

    seconds: float
    sends: float
    trains: float
    stalls: float
    lost: float


def find_young(stall: float, mtbf: float) -> float:
    """Young's interval, the first order (Young 1974)."""
    return math.sqrt(2 * stall * mtbf)


def find_daly(stall: float, mtbf: float) -> float:
    """Daly's interval of the higher order (Daly 2006, equation 37): training between two saves."""
    if stall >= 2 * mtbf:
        return mtbf
    part = stall / (2 * mtbf)
    return find_young(stall, mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - stall


def judge_interval(way: Way, seconds: float, mtbf: float) -> Interval:
    """What an interval comes to, exactly.

    Of X seconds between two failures the k-th safe save takes ``restart + k · work + (k - 1) · stalls + safe`` and what
    stalls before it. X is exponential: the sum over k of the chances that it is longer is a geometric series. Where a
    save is safe as soon as training goes on, that is Daly's complete model.
    """
    work, stalls = way.every * seconds, way.every * way.stall
    first = way.restart + work + stalls - way.stall + way.safe
    trains = work / mtbf * math.exp(-first / mtbf) / -math.expm1(-(work + stalls) / mtbf)
    lost = mtbf * (1 - trains * (1 + stalls / work))
    return Interval(seconds, way.sent / (seconds + way.stall), trains, trains * stalls / work, lost)


def choose_interval(way: Way, mtbf: float) -> Interval:
    """The interval that loses least, and no shorter than may be.

    Being safe later costs the same at every interval, so that Daly's form holds for the stall alone.
    """
    seconds = find_daly(way.every * way.stall, mtbf) / way.every
    return judge_interval(way, max(seconds, way.least), mtbf)


@dataclass(frozen=True, slots=True)
class Tiers:
    """Speeds in bytes a second, and seconds.

    Attributes:
        memory: what a node copies into its memory.
        write, read: what the storage takes from all nodes together, and gives them.
        network: of a node, in each direction; None has it limit nothing, and no neighbour takes copies.
        stall: measured, in place of the time that the copy takes.
        every: of so many saves one goes to the storage.
        restart: from a failure until the load begins, and from its end until training goes on.
    """

    memory: float
    write: float
    read: float
    network: float | None
    stall: float | None
    every: int
    restart: float


OWN = "DeepSpeed's own"


def list_ways(size: SaveSize, tiers: Tiers) -> list[Way]:
    """DeepSpeed's own saves, and those into memory against each kind of failure that there are speeds for."""
    has_copies = tiers.network is not None
    copied, sent = size.node / tiers.memory, size.node / tiers.network if tiers.network else 0.0
    written, read = max(size.total / tiers.write, sent), max(size.total / tiers.read, sent)
    stall = copied if tiers.stall is None else tiers.stall
    held = max(stall, copied)  # the copy may go on while training does
    memory = Way(
        "to memory", "the node's memory", stall, held, tiers.restart + copied,
        least=max(written / tiers.every, sent, held) - stall,
        sent=size.node * (1 / tiers.every + has_copies),
    )  # fmt: skip
    neighbour = replace(memory, leaves="a neighbour's memory", safe=held + sent, restart=tiers.restart + copied + sent)
    stored = replace(memory, leaves="the storage", safe=held + written, restart=tiers.restart + read, every=tiers.every)
    own = Way(OWN, "the storage", written, written, tiers.restart + read, sent=size.node)
    return [own, stored, *([neighbour] if has_copies else []), memory]
