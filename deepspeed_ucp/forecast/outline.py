"""A plan without a checkpoint: memory, disk and seconds of a run of so many parameters, by arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..atoms import ITEMSIZE
from .degrees import Degrees
from .estimate import LoadTotals, RankFigures

OPTIMIZERS = {"adam": 2, "adamw": 2, "lion": 1, "momentum": 1, "adagrad": 1, "sgd": 0}
"""Element-wise states of fp32 that each optimizer keeps per parameter."""

ASSUMED = (
    "Activations, buffers of communication and what ZeRO 3 gathers for a moment are not counted.",
    "All parameters are trained, in one form of parallelism; experts and offload are not told apart.",
    "Tensor- and pipeline-parallel ranks hold equal parts; padding is not counted.",
    "Gradients are counted in the model's precision, whole up to ZeRO 1.",
)
EXCHANGE = "A rank is sent all that it needs: the most that another topology may take."


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        weights: what the model computes with; none where the masters are that.
        gradients: of the weights.
        masters: fp32.
        states: of the optimizer.
    """

    weights: int
    gradients: int
    masters: int
    states: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.masters + self.states


@dataclass(frozen=True, slots=True)
class Outline:
    """What a run of so many parameters needs.

    Attributes:
        memory: of each rank.
        totals: of a save, and of its load into another topology.
        rank: one rank's part of that load; requests and files are not known.
    """

    memory: Memory
    totals: LoadTotals
    rank: RankFigures


def outline_run(params: int, degrees: Degrees, optimizer: str, window: int) -> Outline:
    """What a run needs.

    Args:
        params: elements of the whole model.
        degrees: of the run.
        optimizer: one of :data:`OPTIMIZERS`.
        window: bytes of the load's window.
    """
    states = 4 * OPTIMIZERS[optimizer]
    width, is_bare = ITEMSIZE[degrees.precision], not degrees.traits.has_copies
    held = -(-params // (degrees.tp * degrees.pp))
    partition = -(-held // degrees.shards) if degrees.partitions else held
    memory = Memory(
        weights=0 if is_bare else width * (partition if degrees.zero == 3 else held),
        gradients=width * (partition if degrees.zero >= 2 else held),
        masters=4 * partition,
        states=states * partition,
    )
    state, needed = (4 + states) * params, (4 + states) * partition
    world, lanes = degrees.world, degrees.tp * degrees.pp
    files = (world if degrees.zero == 3 else lanes) + (world if degrees.partitions else 0)
    saved = state + (0 if is_bare or degrees.zero == 3 else width * params)
    read, received = -(-state // world), needed if world > 1 else 0
    totals = LoadTotals(saved, files, state, state, needed * world, received * world, 0, -(-files // world))
    rank = RankFigures(0, 0, 0, 0, needed, read, 0, 0, received, read, 0, window, memory.total)
    return Outline(memory, totals, rank)
