"""Sample orders that do not depend on the number of ranks.

Step n takes the same ``total_batch`` samples in every world; each rank takes an equal, contiguous part of them. The
position of a run is therefore one number, ``engine.global_samples``, which DeepSpeed counts and saves.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from multiprocessing.context import get_spawning_popen
from types import FrameType
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from .engine_state import Carried, carry
from .errors import CheckpointError, ConfigError, MismatchError, pluralize
from .model.index import to_integer

logger = logging.getLogger("deepspeed_ucp")

Sample = TypeVar("Sample")
Ids = npt.NDArray[np.int64]

_Reader = tuple[int, int, Iterator[Sample]]
"""Shard that a lane reads, position of its next sample, iterator from there on."""

_LONG = 50
"""Number of batches that are sorted by length together."""

_POSITION = ("seed", "consumed", "epoch")
"""Keys of a saved state besides :meth:`Order.describe`."""

_RESTART = "To start the data from its beginning, follow the engine after the load."


def _digest(values: Sequence[float] | Ids | None) -> str | None:
    return None if values is None else hashlib.sha256(np.asarray(values, np.float64).tobytes()).hexdigest()[:16]


def _sort_shards(shards: Sequence[Any]) -> list[int] | None:
    """Return the numbers of the sorted shards (a moved folder keeps them), or None."""
    try:
        return sorted(range(len(shards)), key=shards.__getitem__)
    except (TypeError, ValueError):
        return None


def _find_batch_size(caller: FrameType | None) -> int | None:
    """Return the size of the batch that a ``DataLoader`` makes in a frame, or None.

    Another dataset or sampler between them may take more samples for a batch.
    """
    code, values = (caller.f_code, caller.f_locals) if caller is not None else (None, {})
    if code is BatchSampler.__iter__.__code__:
        return getattr(values.get("self"), "batch_size", None)
    if code is _IterableDatasetFetcher.fetch.__code__:
        batch = values.get("possibly_batched_index", ())
        return 1 if batch is None else len(batch) or None
    return None


def _check_rank(rank: int, world: int) -> None:
    if world < 1:
        raise ConfigError(f"world {world} is invalid: pass the number of data-parallel ranks, 1 or more.")
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world} is invalid: pass a data-parallel rank, from 0 to {world - 1}.")


def _read_number(state: Mapping[str, Any], name: str, least: int | None = None) -> int:
    """Read an integer of a saved state.

    Raises:
        CheckpointError: it is missing, no integer, or below ``least``.
    """
    number = to_integer(state.get(name))
    if isinstance(number, bool) or not isinstance(number, int) or (least is not None and number < least):
        expected = "an integer" if least is None else f"an integer from {least} on"
        raise CheckpointError(f"the saved state of the data has {name} {number!r}, expected {expected}. {_RESTART}")
    return number


def _count_samples(engine: Any) -> int:
    """Return the number of samples that an engine has counted.

    Raises:
        ConfigError: the count, a float under sequence parallelism, is no integer.
    """
    samples = to_integer(engine.global_samples)
    if not isinstance(samples, int):
        raise ConfigError(
            f"engine.global_samples is {samples}, but the data needs an integer. Set train_batch_size, "
            "train_micro_batch_size_per_gpu and gradient_accumulation_steps so that the ranks can share them."
        )
    return samples


class Order(ABC):
    """Order of the samples of all steps, and the position of this run in it.

    Attributes:
        total_batch: samples of a step, over all ranks and micro batches: ``engine.train_batch_size()``.
        rank, world: data-parallel rank, and number of these ranks.
        shuffle: False keeps the order of the dataset, or of its shards.
        seed: seed of the shuffling, which differs per epoch.
    """

    def __init__(self, size: int, total_batch: int, *, rank: int, world: int, shuffle: bool, seed: int) -> None:
        _check_rank(rank, world)
        total_batch = to_integer(total_batch)
        if not isinstance(total_batch, int) or total_batch < 1 or total_batch % world:
            raise ConfigError(
                f"a total batch of {total_batch} samples cannot be split evenly over {world} ranks: use a positive "
                f"multiple of {world}, or a number of ranks that divides it."
            )
        self.size, self.total_batch, self.rank, self.world = size, total_batch, rank, world
        self.shuffle, self.seed = shuffle, seed
        self._start, self._offset = 0, 0
        self._engine: Any = None
        self._counted = False  # an engine counts the samples, also in a copy without the engine
        self._board: torch.Tensor | None = None  # shared with worker processes: seed and consumed samples
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"{size} samples are fewer than the {total_batch} of one step: use more data or a smaller total batch."
            )

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Number of whole steps in an epoch."""

    @abstractmethod
    def arrange(self, epoch: int) -> Callable[[int], Ids]:
        """Return a function from a step of the epoch to the numbers of its samples."""

    def describe(self) -> dict[str, Any]:
        """Return plain values that, besides the seed, determine the order in every world."""
        return {"size": self.size, "total_batch": self.total_batch, "shuffle": self.shuffle}

    def _make_generator(self, epoch: int, *salt: int) -> np.random.RandomState:
        """Seed an epoch's generator, of numpy's only kind that is stable across releases."""
        return np.random.RandomState([self.seed & 0xFFFFFFFF, epoch, *salt])

    def _permute(self, count: int, epoch: int, *salt: int) -> Ids:
        """Return the numbers below ``count``, shuffled if ``shuffle`` is set."""
        return self._make_generator(epoch, *salt).permutation(count) if self.shuffle else np.arange(count)

    @property
    def consumed(self) -> int:
        """Number of all ranks' samples trained on; without an engine, iterated over."""
        return self._start if self._engine is None else _count_samples(self._engine) - self._offset

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self.consumed // self.total_batch // self.steps_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Move to the begin of an epoch, unless it is the current one or an engine counts."""
        if self._engine is None and epoch != self.epoch:
            self._start = epoch * self.steps_per_epoch * self.total_batch

    @property
    def follows(self) -> bool:
        """True if an engine counts the consumed samples."""
        return self._engine is not None

    def follow(self, engine: Any, *, name: str = "data") -> None:
        """Count samples by an engine, and save and load the position with it.

        Samples that the workers of a ``DataLoader`` have only prefetched do not count.

        Args:
            name: name in saves, unique among the orders of one engine.

        Raises:
            ConfigError: the engine has another total batch.
        """
        if engine.train_batch_size() != self.total_batch:
            raise ConfigError(
                f"the engine trains on {engine.train_batch_size()} samples a step, but total_batch is "
                f"{self.total_batch}: pass engine.train_batch_size()."
            )
        self._offset = _count_samples(engine) - self.consumed
        self._engine, self._counted = engine, True
        self._publish()
        former = carry(engine, name, Carried(self.get_state, self.set_state, self._publish))
        if former is not None and former.load != self.set_state:
            logger.warning(
                'this engine saved another order as "%s", which is not saved any more. Give each order a name: '
                "follow(engine, name=…).",
                name,
            )

    def _publish(self) -> None:
        """Write the position to the memory that persistent workers read."""
        if self._board is not None:
            self._board[:] = torch.tensor([self.seed & 0xFFFFFFFF, self.consumed])

    def get_state(self) -> dict[str, Any]:
        """Return the position and the order as plain values, equal on all ranks."""
        if self.consumed % self.total_batch and self.rank == 0:
            logger.warning(
                f"the engine has trained on {self.consumed} samples, no multiple of the {self.total_batch} of a step: "
                "a resume continues at the last whole step of the order"
            )
        position = self.seed, self.consumed, self.epoch
        return {**self.describe(), **dict(zip(_POSITION, position, strict=True))}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue a saved run, in its order and with its seed.

        Raises:
            MismatchError: this run has another order, besides the seed.
            CheckpointError: ``state`` is invalid.
        """
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"the saved state of the data is a {type(state).__name__}, expected a mapping. {_RESTART}"
            )
        described = self.describe()
        for name in dict.fromkeys((*described, *state)):  # a stream's state has more values than a sampler's
            saved, here = state.get(name), described.get(name)
            if name not in _POSITION and saved != here:
                raise MismatchError(
                    f"the saved run's data had {name} {saved}, this run's has {here}: the order of the samples cannot "
                    f"continue. Keep the saved value. {_RESTART}"
                )
        seed, self._start = _read_number(state, "seed"), _read_number(state, "consumed", 0)
        if seed != self.seed and self.rank == 0:
            logger.warning(
                "the data continues in the order of the saved seed %s, not of this run's %s", seed, self.seed
            )
        self.seed = seed
        if self._engine is not None:
            self._offset = _count_samples(self._engine) - self._start
        self._publish()

    def state_dict(self) -> dict[str, Any]:
        """Return the position for a ``StatefulDataLoader`` of torchdata, in whole steps.

        Empty if an engine counts (its saves have the position), and in a worker process, which knows only its share.
        """
        return {} if self._engine is not None or get_worker_info() is not None else self.get_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict` in any world; an empty one changes nothing.

        Raises:
            MismatchError: as :meth:`set_state`, or the state is empty and no engine counts here.
        """
        if state:
            self.set_state(state)
        elif not self._counted:
            raise MismatchError(
                "the loader's state has no position in the data: an engine counted, or it had worker processes. Call "
                "`follow(engine)` in this run too: the engine's saves have the position."
            )

    def _compare_batch_size(self, size: int | None) -> None:
        """Warn if ``size``, a ``DataLoader``'s batch size, does not fit the engine's."""
        worker = get_worker_info()
        if size is None or self._engine is None or self.rank or (worker is not None and worker.id):
            return
        micro = to_integer(self._engine.train_micro_batch_size_per_gpu())
        share = self.total_batch // self.world
        split = share // to_integer(self._engine.gradient_accumulation_steps())
        # Accelerate may split the batches of one order over all ranks; a script may split those of a whole step.
        if size not in (micro, split, share):
            logger.warning(
                f"the DataLoader makes batches of {pluralize(size, 'sample')}, but the engine counts micro batches of "
                f"{micro}: a resume continues at another sample. Set batch_size={micro}."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the engine; only worker processes get the shared memory."""
        board = self._board if get_spawning_popen() is not None else None
        return {**self.__dict__, "_start": self.consumed, "_engine": None, "_offset": 0, "_board": board}

    def __len__(self) -> int:
        """Number of this rank's samples in an epoch."""
        return self.steps_per_epoch * (self.total_batch // self.world)

    def _walk(self) -> tuple[int, Iterator[tuple[Ids, int]]]:
        """Return the epoch, and of its remaining steps this rank's samples and ``_start``."""
        # A persistent worker has a copy of the engine from when it was forked.
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
    """Indices for a ``DataLoader`` over a map-style dataset, shuffled every epoch.

    Samples at the end of an epoch that do not fill a step are dropped.

    Args:
        dataset: the dataset, or its number of samples.
        total_batch, rank, world, shuffle, seed: as in :class:`Order`.
        weights: weight of each sample; an epoch's samples are then drawn by weight, with replacement.
        lengths: length of each sample; each step then has samples of similar length.

    Raises:
        ConfigError: the ranks cannot share the total batch, there are fewer samples than that, the number of weights or
            lengths is wrong, or the weights are invalid.

    Example:
        >>> [list(ElasticSampler(8, 4, rank=rank, world=2, shuffle=False)) for rank in range(2)]
        [[0, 1, 4, 5], [2, 3, 6, 7]]
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
        if weights is not None and not (0 < np.sum(weights) < np.inf and np.min(weights) >= 0):
            raise ConfigError("weights must be finite and not negative, and at least one must be positive.")
        self._digests = {"weights": _digest(weights), "lengths": _digest(lengths)}
        self.weights = None if weights is None else np.asarray(weights, np.float64) / np.sum(weights)
        self.lengths = None if lengths is None else np.asarray(lengths)

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.total_batch

    def describe(self) -> dict[str, Any]:
        return super().describe() | self._digests

    def arrange(self, epoch: int) -> Callable[[int], Ids]:
        if self.weights is None:
            order = self._permute(self.size, epoch)
        else:
            order = self._make_generator(epoch).choice(self.size, self.size, p=self.weights).astype(np.int64)
        order = order[: self.steps_per_epoch * self.total_batch]
        if self.lengths is not None:
            order = self._sort_by_length(order, self.lengths, epoch)
        steps = order.reshape(-1, self.total_batch)
        return lambda step: steps[step]

    def _sort_by_length(self, order: Ids, lengths: Ids, epoch: int) -> Ids:
        """Make steps of samples of similar length, shuffled, with the longest step first."""
        many = _LONG * self.total_batch
        parts = [order[low : low + many] for low in range(0, len(order), many)]
        steps = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
        steps = steps.reshape(-1, self.total_batch)
        longest = int(np.argmax(lengths[steps].max(axis=1)))
        others = np.delete(np.arange(len(steps)), longest)
        return steps[[longest, *others[self._permute(len(others), epoch, 1)]]].reshape(-1)

    def __iter__(self) -> Iterator[int]:
        self._compare_batch_size(_find_batch_size(sys._getframe().f_back))
        for ids, end in self._walk()[1]:
            *others, last = ids.tolist()
            yield from others
            self._start = end
            yield last


class ElasticStream(Order, IterableDataset[Sample], Generic[Sample]):
    """Samples of shards in order, for a ``DataLoader`` with or without workers.

    The shuffled shards of an epoch form one sequence of samples, which is cut into ``lanes`` of equal length. A step
    takes equally many samples from each lane. Each lane is read sequentially, by one rank in any world.

    Args:
        shards: arguments of ``read``.
        sizes: number of samples of each shard.
        read: returns the samples of a shard from a position on.
        total_batch, rank, world, shuffle, seed: as in :class:`Order`.
        lanes: a multiple of every number of ranks that the run will use, and a divisor of ``total_batch`` (default:
            ``total_batch``).
        batch_size: batch size of the ``DataLoader``, whose workers take turns. Required for several workers.

    Raises:
        ConfigError: the numbers do not divide each other, or there are too few samples.

    Example:
        >>> read = lambda shard, first: [f"{shard}{i}" for i in range(first, 2)]
        >>> list(ElasticStream("ab", [2, 2], read, 2, rank=0, world=1, shuffle=False))
        ['a0', 'b0', 'a1', 'b1']
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
        _check_rank(rank, world)
        total_batch = to_integer(total_batch)
        self.lanes = total_batch if lanes is None else lanes
        if len(shards) != len(sizes):
            raise ConfigError(f"{len(sizes)} sizes were passed for {len(shards)} shards.")
        if self.lanes < 1 or self.lanes % world or total_batch % self.lanes:
            raise ConfigError(
                f"{self.lanes} lanes are invalid: use a multiple of {world} ranks that divides the total batch of "
                f"{total_batch}."
            )
        super().__init__(int(sum(sizes)), total_batch, rank=rank, world=world, shuffle=shuffle, seed=seed)
        self.shards, self.sizes, self.read = list(shards), np.asarray(sizes, np.int64), read
        self.batch_size = batch_size
        self._is_unfinished: bool | None = None  # None before the first iteration of a worker process

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.lanes // (self.total_batch // self.lanes)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "lanes": self.lanes,
            "sizes": _digest(self.sizes),
            "shards": _digest(_sort_shards(self.shards)),
        }

    def follow(self, engine: Any, *, name: str = "data") -> None:
        self._board = torch.zeros(2, dtype=torch.int64).share_memory_()
        super().follow(engine, name=name)

    def arrange(self, epoch: int) -> Callable[[int], Ids]:
        width = self.total_batch // self.lanes
        starts = np.arange(self.lanes, dtype=np.int64)[:, None] * (self.steps_per_epoch * width) + np.arange(width)
        return lambda step: (starts + step * width).reshape(-1)

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        at, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        batch_size = _find_batch_size(sys._getframe().f_back)
        self._compare_batch_size(batch_size)
        if worker is not None:
            self._check_worker(at, workers, batch_size)
        readers: dict[int, _Reader[Sample]] = {}
        epoch, steps = self._walk()
        order = self._permute(len(self.shards), epoch)
        ends = np.cumsum(self.sizes[order])
        width, count = self.total_batch // self.lanes, 0
        for ids, end in steps:
            shards = np.searchsorted(ends, ids, side="right")
            places = ids - (ends - self.sizes[order])[shards]
            for slot, (shard, place) in enumerate(zip(order[shards].tolist(), places.tolist(), strict=True)):
                if slot == len(ids) - 1:
                    self._start = end
                if count // (self.batch_size or 1) % workers == at:
                    yield self._read_sample(readers, slot // width, shard, place)
                count += 1
        self._is_unfinished = None if worker is None else False

    def _check_worker(self, worker: int, workers: int, batch_size: int | None) -> None:
        """Refuse a worker whose samples would have a wrong order or position."""
        if workers > 1 and self.batch_size is None:
            raise ConfigError("a DataLoader with several workers is used: pass its batch_size to ElasticStream.")
        if workers > 1 and batch_size not in (None, self.batch_size):
            raise ConfigError(
                f"a DataLoader's workers make batches of {pluralize(batch_size, 'sample')}, but ElasticStream has "
                f"batch_size={self.batch_size}: the samples would not be in order. Pass the DataLoader's batch_size."
            )
        has_ended = self._is_unfinished is False and self._is_current(worker)
        if self._counted and self._is_unfinished is not None and not has_ended:
            raise ConfigError(
                "an iteration has ended within its epoch, or a load has changed the position, so this worker does not "
                "know the position of the run. Iterate to the end of the epoch, or make the DataLoader without "
                "persistent_workers."
            )
        self._is_unfinished = True

    def _is_current(self, worker: int) -> bool:
        """Return True if a worker's position is the run's.

        A persistent worker may have prefetched a whole epoch. Worker 0 gives the first batch, so the run cannot have
        taken a step of this iteration before it is asked.
        """
        if self._board is None:
            return True
        seed, consumed = self._board.tolist()
        here = max(self._start, self.consumed)
        is_reached: bool = consumed == here if worker == 0 else consumed >= here
        return is_reached and int(seed) == self.seed & 0xFFFFFFFF

    def _read_sample(self, readers: dict[int, _Reader[Sample]], lane: int, shard: int, place: int) -> Sample:
        current, position, samples = readers.get(lane, (-1, 0, iter(())))
        if current != shard:
            position, samples = place, iter(self.read(self.shards[shard], place))
        readers[lane] = shard, place + 1, samples
        for sample in islice(samples, place - position, None):  # skips the samples of other workers
            return sample
        raise MismatchError(
            f"shard {self.shards[shard]!r} ends before its sample {place} (counted from 0), but sizes gives it "
            f"{self.sizes[shard]}. Correct sizes."
        )
