"""Samples in one order whatever the world: what a step trains on depends on the step alone, not on the ranks.

A step takes ``total_batch`` samples, the *slots* of the step. A rank has as many of them as the others, one behind the
other, and cuts them into micro batches as it likes. So at a constant total batch the samples of a step are the same for
every number of ranks, micro batch and gradient accumulation, and where a run stands in its data is one number: the
samples that it has trained on. DeepSpeed counts these (``engine.global_samples``) and saves them.

:class:`ElasticSampler` orders a dataset that has an index; :class:`ElasticStream` reads shards from front to back.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from .atoms import to_integer
from .engine_state import Carried, carry
from .errors import CheckpointError, ConfigError, MismatchError

logger = logging.getLogger("deepspeed_ucp")

Sample = TypeVar("Sample")
Ids = npt.NDArray[np.int64]

_Reader = tuple[int, int, Iterator[Sample]]
"""The shard that a lane reads, its next sample, and those from there on."""

_LONG = 50
"""Batches that are sorted by length together."""


def _digest(values: Sequence[float] | Ids | None) -> str | None:
    """The same for equal numbers."""
    return None if values is None else hashlib.sha256(np.asarray(values, np.float64).tobytes()).hexdigest()[:16]


def _can_draw(weights: Sequence[float]) -> bool:
    total = np.sum(weights)
    return bool(np.isfinite(total) and total > 0 and np.min(weights) >= 0)


def _check_place(rank: int, world: int) -> None:
    if world < 1:
        raise ConfigError(f"a world of {world} ranks: give the number of data-parallel ranks, 1 or more.")
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world} ranks: give a data-parallel rank, from 0 to {world - 1}.")


def _read_number(state: Mapping[str, Any], name: str, least: int | None = None) -> int:
    """A whole number of a saved state.

    Raises:
        CheckpointError: there is none, or one below ``least``.
    """
    found = to_integer(state.get(name))
    if isinstance(found, bool) or not isinstance(found, int) or (least is not None and found < least):
        wanted = "a whole number" if least is None else f"a whole number from {least} on"
        raise CheckpointError(
            f"the saved state of the data has {name} {found!r}, {wanted} is expected. Begin the data anew: follow the "
            "engine after the load."
        )
    return found


def _count_samples(engine: Any) -> int:
    """Return the engine's count of samples, which sequence parallelism makes a float.

    Raises:
        ConfigError: it is a fraction.
    """
    found = to_integer(engine.global_samples)
    if not isinstance(found, int):
        raise ConfigError(
            f"engine.global_samples is {found}, and the data needs a whole number: give train_batch_size, "
            "train_micro_batch_size_per_gpu and gradient_accumulation_steps that the ranks can share."
        )
    return found


class Order(ABC):
    """Which samples every step takes, and where this run stands.

    Attributes:
        size: samples.
        total_batch: samples of a step, over all ranks and micro batches.
        rank, world: this rank among those that read other samples than the others (the data-parallel ones).
        shuffle: False keeps the order that the dataset, or its shards, have.
        seed: of the shuffling; every epoch has an order of its own.
    """

    def __init__(self, size: int, total_batch: int, *, rank: int, world: int, shuffle: bool, seed: int) -> None:
        _check_place(rank, world)
        total_batch = to_integer(total_batch)
        if not isinstance(total_batch, int) or total_batch < 1 or total_batch % world:
            raise ConfigError(
                f"a total batch of {total_batch} samples cannot be dealt to {world} ranks alike: take a positive "
                f"multiple of {world}, or a number of ranks that divides it."
            )
        self.size, self.total_batch, self.rank, self.world = size, total_batch, rank, world
        self.shuffle, self.seed = shuffle, seed
        self._start, self._offset = 0, 0
        self._engine: Any = None
        self._counted = False  # by an engine, also where that stays behind
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"{size} samples are fewer than the {total_batch} of one step: take more data or a smaller total batch."
            )

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; each takes all its samples from that epoch."""

    @abstractmethod
    def arrange(self, epoch: int) -> Callable[[int], Ids]:
        """An epoch's order: by step of the epoch the samples of its slots."""

    def describe(self) -> dict[str, Any]:
        """What makes the order, but for the seed: plain values, the same in every world."""
        return {"size": self.size, "total_batch": self.total_batch, "shuffle": self.shuffle}

    def _draw_with(self, epoch: int, *more: int) -> np.random.RandomState:
        """Draws an epoch's order: of numpy's generators this one alone draws the same in every release."""
        return np.random.RandomState([self.seed & 0xFFFFFFFF, epoch, *more])

    def _permute(self, count: int, epoch: int, *more: int) -> Ids:
        """Numbers up to a count, shuffled where that is wanted."""
        return self._draw_with(epoch, *more).permutation(count) if self.shuffle else np.arange(count)

    @property
    def consumed(self) -> int:
        """Samples that all ranks together have trained on; of an order that follows no engine, those up to where the
        next iteration begins."""
        return self._start if self._engine is None else _count_samples(self._engine) - self._offset

    @property
    def epoch(self) -> int:
        """The epoch in which the next step is."""
        return self.consumed // self.total_batch // self.steps_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch than the one in which the run stands; of that one nothing is taken back.

        An order that follows an engine knows its epoch itself, and this does nothing.
        """
        if self._engine is None and epoch != self.epoch:
            self._start = epoch * self.steps_per_epoch * self.total_batch

    @property
    def follows(self) -> bool:
        """Whether this order goes on where an engine stands."""
        return self._engine is not None

    def follow(self, engine: Any, *, name: str = "data") -> None:
        """Take the number of consumed samples from an engine, and be saved and loaded with it.

        What a ``DataLoader``'s workers have fetched ahead does not count then.

        Args:
            name: under which it is saved; of several orders that follow one engine each needs its own.

        Raises:
            ConfigError: the engine's total batch is another one.
        """
        if engine.train_batch_size() != self.total_batch:
            raise ConfigError(
                f"the engine trains on {engine.train_batch_size()} samples a step, the data is ordered for "
                f"{self.total_batch}: give it engine.train_batch_size()."
            )
        self._offset = _count_samples(engine) - self.consumed
        self._engine, self._counted = engine, True
        former = carry(engine, name, Carried(self.get_state, self.set_state))
        if former is not None and former.load != self.set_state:
            logger.warning(
                'another order takes the place of that which followed this engine as "%s", which is saved no more. Of '
                "several each needs a name: follow(engine, name=…).",
                name,
            )

    def get_state(self) -> dict[str, Any]:
        """Where the run stands, and in which order: plain values, the same on every rank."""
        if self.consumed % self.total_batch and self.rank == 0:
            logger.warning(
                f"the engine has trained on {self.consumed} samples, no multiple of the {self.total_batch} of a step: "
                "its steps are not those of the data's order, in which a resume goes on with whole steps"
            )
        return {**self.describe(), "seed": self.seed, "consumed": self.consumed, "epoch": self.epoch}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on where a run stood, in its order (its seed is taken).

        Raises:
            MismatchError: something else than the seed makes another order of this run's.
            CheckpointError: it is no state of an order.
        """
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"the saved state of the data is a {type(state).__name__}, a mapping is expected. Begin the data anew: "
                "follow the engine after the load."
            )
        for name, here in self.describe().items():
            if state.get(name) != here:
                raise MismatchError(
                    f"the saved run's data had {name} {state.get(name)}, here it is {here}: the order of its samples "
                    "cannot go on. Keep it, or begin the data anew: follow the engine after the load."
                )
        self.seed, self._start = _read_number(state, "seed"), _read_number(state, "consumed", 0)
        if self._engine is not None:
            self._offset = _count_samples(self._engine) - self._start

    def state_dict(self) -> dict[str, Any]:
        """For a loader that keeps its place (torchdata's ``StatefulDataLoader``): the whole steps that it has given.

        Nothing where an engine counts, whose saves have the place, and in a worker process, which knows its own turns
        alone.
        """
        return {} if self._engine is not None or get_worker_info() is not None else self.get_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave, in any world; nothing changes where an engine counts.

        Raises:
            MismatchError: as :meth:`set_state`, or the place is in an engine's saves, or in none.
        """
        if state:
            self.set_state(state)
        elif not self._counted:
            raise MismatchError(
                "the loader's state has no place in the data: an engine counted for it, or it had worker processes. "
                "Let this run follow its engine as well, `follow(engine)`, whose saves have the place."
            )

    def __getstate__(self) -> dict[str, Any]:
        """For a worker process: an engine stays where it is."""
        return {**self.__dict__, "_start": self.consumed, "_engine": None, "_offset": 0}

    def __len__(self) -> int:
        """This rank's samples of a whole epoch."""
        return self.steps_per_epoch * (self.total_batch // self.world)

    def _walk(self) -> tuple[int, Iterator[tuple[Ids, int]]]:
        """The epoch in which the run stands, and this rank's samples by step from there to the epoch's end, each with
        what ``_start`` is as soon as the step's last sample is given."""
        # In a worker that lives on, the engine is a copy of what it was when the worker began.
        forked = self._engine is not None and get_worker_info() is not None
        begin = max(self._start, self.consumed) if forked else self.consumed
        epoch, first = divmod(begin // self.total_batch, self.steps_per_epoch)
        return epoch, self._list_steps(epoch, first, counting=forked or self._engine is None)

    def _list_steps(self, epoch: int, first: int, *, counting: bool) -> Iterator[tuple[Ids, int]]:
        pick, share = self.arrange(epoch), self.total_batch // self.world
        for step in range(first, self.steps_per_epoch):
            end = (epoch * self.steps_per_epoch + step + 1) * self.total_batch
            yield pick(step)[self.rank * share : (self.rank + 1) * share], end if counting else self._start


class ElasticSampler(Order, Sampler[int]):
    """Indices for a :class:`torch.utils.data.DataLoader` over a dataset with an index, shuffled anew every epoch.

    The last samples of an epoch that do not make up a whole step are left out.

    Args:
        dataset: or its number of samples.
        total_batch: samples of a step, over all ranks: ``engine.train_batch_size()``.
        rank, world: this data-parallel rank, and how many there are.
        shuffle: False takes the samples in their order.
        seed: of the shuffling.
        weights: of every sample; an epoch's samples are then drawn by weight, with replacement.
        lengths: of every sample; samples of about the same length come in one step.

    Raises:
        ConfigError: a total batch that the ranks cannot share, fewer samples than that, weights or lengths that are
            not as many as the samples, or weights that nothing can be drawn by.
    """

    def __init__(
        self,
        dataset: int | Any,
        total_batch: int,
        *,
        rank: int,
        world: int,
        shuffle: bool = True,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        size = dataset if isinstance(dataset, int) else len(dataset)
        super().__init__(size, total_batch, rank=rank, world=world, shuffle=shuffle, seed=seed)
        for given in (weights, lengths):
            if given is not None and len(given) != self.size:
                raise ConfigError(f"weights or lengths of {len(given)} samples were given for {self.size}.")
        if weights is not None and not _can_draw(weights):
            raise ConfigError("weights have to be finite, none below 0, and some above.")
        self._digests = {"weights": _digest(weights), "lengths": _digest(lengths)}
        self.weights = None if weights is None else np.asarray(weights, np.float64) / np.sum(weights)
        self.lengths = None if lengths is None else np.asarray(lengths)

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.total_batch

    def describe(self) -> dict[str, Any]:
        return super().describe() | self._digests

    def arrange(self, epoch: int) -> Callable[[int], Ids]:
        order = self._draw(epoch)[: self.steps_per_epoch * self.total_batch]
        if self.lengths is not None:
            order = self._group(order, self.lengths, epoch)
        steps = order.reshape(-1, self.total_batch)
        return lambda step: steps[step]

    def _draw(self, epoch: int) -> Ids:
        if self.weights is not None:
            return self._draw_with(epoch).choice(self.size, self.size, p=self.weights).astype(np.int64)
        return self._permute(self.size, epoch)

    def _group(self, order: Ids, lengths: Ids, epoch: int) -> Ids:
        """Sort each run of some steps by length, then let the steps come in a random order, the longest first: where
        memory is short it is short at once."""
        many = _LONG * self.total_batch
        parts = [order[low : low + many] for low in range(0, len(order), many)]
        steps = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
        steps = steps.reshape(-1, self.total_batch)
        longest = int(np.argmax(lengths[steps].max(axis=1)))
        others = np.delete(np.arange(len(steps)), longest)
        return steps[[longest, *others[self._permute(len(others), epoch, 1)]]].reshape(-1)

    def __iter__(self) -> Iterator[int]:
        for ids, end in self._walk()[1]:
            *others, last = ids.tolist()
            yield from others
            self._start = end
            yield last


class ElasticStream(Order, IterableDataset[Sample], Generic[Sample]):
    """Samples of shards that are read from front to back, for a ``DataLoader`` with or without worker processes.

    An epoch's shards, shuffled, make up one row of samples, which is cut into ``lanes`` of the same length; a step
    takes as many samples from each. A lane is read by one rank in any world, from front to back.

    Args:
        shards: what ``read`` takes.
        sizes: samples of each shard.
        read: gives a shard's samples from one of them on.
        total_batch: samples of a step, over all ranks.
        rank, world: this data-parallel rank, and how many there are.
        lanes: a multiple of every number of ranks that the run is to have, and a divisor of ``total_batch``; by default
            ``total_batch``.
        batch_size: samples of a micro batch, as the ``DataLoader`` has it; its workers take turns by these. One that
            has several needs it.
        shuffle: give every epoch its own order of the shards.
        seed: of that order.

    Raises:
        ConfigError: numbers that do not divide each other, or too few samples.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        sizes: Sequence[int],
        read: Callable[[Any, int], Iterable[Sample]],
        total_batch: int,
        *,
        rank: int,
        world: int,
        lanes: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        _check_place(rank, world)
        total_batch = to_integer(total_batch)
        self.lanes = total_batch if lanes is None else lanes
        if len(shards) != len(sizes):
            raise ConfigError(f"{len(sizes)} sizes were given for {len(shards)} shards.")
        if self.lanes < 1 or self.lanes % world or total_batch % self.lanes:
            raise ConfigError(
                f"{self.lanes} lanes: {world} ranks have to divide them, and they the total batch of {total_batch}."
            )
        super().__init__(int(sum(sizes)), total_batch, rank=rank, world=world, shuffle=shuffle, seed=seed)
        self.shards, self.sizes, self.read = list(shards), np.asarray(sizes, np.int64), read
        self.batch_size = batch_size

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.lanes // (self.total_batch // self.lanes)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"lanes": self.lanes, "sizes": _digest(self.sizes)}

    def arrange(self, epoch: int) -> Callable[[int], Ids]:
        wide = self.total_batch // self.lanes
        starts = np.arange(self.lanes, dtype=np.int64)[:, None] * (self.steps_per_epoch * wide) + np.arange(wide)
        return lambda step: (starts + step * wide).reshape(-1)

    def positions(self) -> dict[int, int]:
        """By shard how many of its samples this epoch has consumed."""
        epoch, step = divmod(self.consumed // self.total_batch, self.steps_per_epoch)
        order, ends = self._order_shards(epoch)
        wide = self.total_batch // self.lanes
        low = np.arange(self.lanes, dtype=np.int64)[:, None] * (self.steps_per_epoch * wide)
        held = np.minimum(ends, low + step * wide) - np.maximum(ends - self.sizes[order], low)
        return dict(zip(order.tolist(), np.maximum(held, 0).sum(axis=0).tolist(), strict=True))

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        at, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if workers > 1 and self.batch_size is None:
            raise ConfigError("an ElasticStream whose DataLoader has several workers needs its batch_size.")
        readers: dict[int, _Reader[Sample]] = {}
        epoch, steps = self._walk()
        order, ends = self._order_shards(epoch)
        wide, count = self.total_batch // self.lanes, 0
        for ids, end in steps:
            found = np.searchsorted(ends, ids, side="right")
            places = ids - (ends - self.sizes[order])[found]
            for slot, (shard, place) in enumerate(zip(order[found].tolist(), places.tolist(), strict=True)):
                if slot == len(ids) - 1:
                    self._start = end
                if count // (self.batch_size or 1) % workers == at:
                    yield self._take(readers, slot // wide, shard, place)
                count += 1

    def _take(self, readers: dict[int, _Reader[Sample]], lane: int, shard: int, place: int) -> Sample:
        held, follows, samples = readers.get(lane, (-1, 0, iter(())))
        if held != shard:
            follows, samples = place, iter(self.read(self.shards[shard], place))
        readers[lane] = shard, place + 1, samples
        for sample in islice(samples, place - follows, None):  # before it is what other workers take
            return sample
        raise MismatchError(
            f"shard {self.shards[shard]!r} ends before its sample {place}, counted from 0: by sizes it has "
            f"{self.sizes[shard]}."
        )

    def _order_shards(self, epoch: int) -> tuple[Ids, Ids]:
        """An epoch's shards, and where in the row of its samples each ends."""
        order = self._permute(len(self.shards), epoch)
        return order, np.cumsum(self.sizes[order])
