"""Save and restore the random states of all ranks, also in another topology.

The states of a generator differ along some axes (pipeline stage, tensor-parallel rank, data-parallel rank): a script
that seeds all ranks alike has one state, Megatron's trackers one per stage and tensor-parallel rank. A save records
these axes. A rank of another topology takes the state of the saved rank with the same coordinates along them. If there
was none, its state is derived from the seed, the step and its coordinates: deterministic, and unique per coordinates.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from .comm import connect
from .engine.coverage import find_data_sampler
from .engine.parallel import ParallelState, find_parallel_state
from .engine_state import RANDOM_STATES, Carried, carry
from .errors import CheckpointError

logger = logging.getLogger("deepspeed_ucp")

Coords = tuple[int, int, int]
"""Pipeline stage, tensor-parallel rank, data-parallel rank."""

State = tuple[Any, ...]
"""State of a generator: bytes and numbers."""

_VERSION = 1
_TRACKER = "tracker:"
_SAMPLER = "data_sampler"
_EVERY_AXIS, _MODEL_AXES = (0, 1, 2), (0, 1)


@dataclass(frozen=True, slots=True)
class Generator:
    """A random number generator of this process.

    Attributes:
        write: restores a state; raises an error of torch, numpy or Python if it is invalid.
    """

    read: Callable[[], State]
    write: Callable[..., None]
    seed: Callable[[int], None]


def list_generators(engine: Any = None) -> dict[str, Generator]:
    """Return all generators of this process by name.

    These are the global ones of Python, numpy, torch and the accelerator, the trackers of DeepSpeed's activation
    checkpointing (one state per tensor-parallel rank), and that of an engine's curriculum sampler (drawn on rank 0).
    """
    generators = {
        "python": Generator(
            lambda: pack_python(random.getstate()),
            lambda version, words, gauss: random.setstate(
                (version, tuple(np.frombuffer(words, np.uint32).tolist()), gauss)
            ),
            random.seed,
        ),
        "numpy": Generator(  # the legacy global generator, which scripts use
            lambda: pack_numpy(np.random.get_state(legacy=True)),  # type: ignore[arg-type]  # noqa: NPY002
            _write_numpy,
            np.random.seed,
        ),
        "torch": Generator(
            lambda: pack_torch(torch.get_rng_state()),
            lambda data: torch.set_rng_state(_unpack(data)),
            lambda seed: torch.set_rng_state(torch.Generator().manual_seed(seed).get_state()),
        ),
    }
    device = get_accelerator()
    if device.device_name() != "cpu":
        generators["accelerator"] = Generator(
            lambda: pack_torch(device.get_rng_state()),
            lambda data: device.set_rng_state(_unpack(data)),
            device.manual_seed,
        )
    sampler = find_data_sampler(engine)
    if sampler is not None:
        generators[_SAMPLER] = _wrap_bit_generator(sampler.np_rng.bit_generator)
    return generators | {f"{_TRACKER}{name}": _wrap_tracker(name) for name in get_cuda_rng_tracker().get_states()}


def follow(engine: Any) -> None:
    """Save and load random states with checkpoints; call it on every rank.

    Example:
        >>> engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        >>> rng.follow(engine)
        >>> engine.load_checkpoint("checkpoints")
    """
    carry(engine, RANDOM_STATES, Carried(partial(capture, engine), partial(restore, engine)))


def restore(engine: Any, saved: Mapping[str, Any]) -> None:
    """Restore this rank's generators, and log those with derived or missing states.

    Args:
        saved: from :func:`capture`, read from this rank's file or that of the first rank.

    Raises:
        CheckpointError: the saved states have an unknown form.
    """
    if not isinstance(saved, Mapping) or saved.get("version") != _VERSION:
        raise CheckpointError("The saved random states have an unknown form.")
    rank, parallel = connect().rank, find_parallel_state(engine)
    derived, dp = restore_generators(saved, parallel, list_generators(engine)), parallel.dp
    if derived:
        logger.info("random states derived instead of restored on rank %d: %s", rank, ", ".join(derived))
    if rank == 0 and dp > 1 and _read_degrees(saved)[2] == 1:
        log_copies(dp)
    trackers = {name for name in saved["axes"] if name.startswith(_TRACKER)}
    missing = sorted(trackers.difference(list_generators()))
    if missing and rank == 0:
        logger.warning(
            "random states of %s were saved, but this process has no such generators. Seed them "
            "(model_parallel_cuda_manual_seed) before load_checkpoint.",
            ", ".join(missing),
        )
    if _SAMPLER in derived and rank == 0:
        logger.warning(
            "the random state of the curriculum sampler was not saved: it draws other samples than the saved run would "
            "have drawn, the same ones at every resume"
        )


def log_copies(ranks: int) -> None:
    """Log that several ranks continue with the states of a single one."""
    logger.info(
        "one data-parallel rank saved the random states, with which all %d continue: they draw the same numbers. Seed "
        "them after the load if they must differ.",
        ranks,
    )


def capture(engine: Any) -> dict[str, Any]:
    """Collect all ranks' random states as plain data for a client state (collective).

    Returns:
        On the first data-parallel rank of a model-parallel rank, the states of all its data-parallel ranks (about 10 KB
        each); on the others, which write files of their own at ZeRO 3, the rank's states.
    """
    comm, parallel = connect(), find_parallel_state(engine)
    coords, states = (
        find_coords(parallel),
        {name: generator.read() for name, generator in list_generators(engine).items()},
    )
    digests = {name: digest(state) for name, state in states.items()}
    trackers = {name: state for name, state in states.items() if name.startswith(_TRACKER) and not parallel.dp_rank}
    gathered = comm.gather((coords, digests, trackers))
    axes = {name: find_axes({coords: digests.get(name) for coords, digests, _ in gathered}) for name in states}
    known = [*_gather_data_parallel(engine, (coords, states)), *((coords, states) for coords, _, states in gathered)]
    seed: int = comm.broadcast(torch.initial_seed())
    return make_record(known, axes, seed, int(engine.global_steps)) | {
        "degrees": (parallel.pp, parallel.tp, parallel.dp)
    }


def make_record(
    known: Sequence[tuple[Coords, Mapping[str, State]]], axes: Mapping[str, tuple[int, ...]], seed: int | str, step: int
) -> dict[str, Any]:
    """Make the saved form: states by generator, and the axes along which each differs."""
    states = {
        name: {project(coords, kept): states[name] for coords, states in known if name in states}
        for name, kept in axes.items()
    }
    return {"version": _VERSION, "seed": seed, "step": step, "axes": dict(axes), "states": states}


def restore_generators(
    saved: Mapping[str, Any], parallel: ParallelState, generators: Mapping[str, Generator]
) -> list[str]:
    """Restore some generators of this rank from a record of :func:`make_record`.

    Returns:
        Names of the generators with a derived state, because no saved rank had these coordinates.
    """
    derived = []
    for name, generator in generators.items():
        try:
            state = find_state(saved, name, parallel)
            if isinstance(state, int):
                generator.seed(state)
                derived.append(name)
            else:
                generator.write(*state)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"The saved random state of {name} cannot be restored: {error!r}.") from error
    return derived


def find_state(saved: Mapping[str, Any], name: str, parallel: ParallelState) -> State | int:
    """Return the state to restore of a generator, or a derived seed if none was saved.

    A seed has 32 bits (the limit of torch on the CPU), and is unique per coordinates.
    """
    is_tracker = name.startswith(_TRACKER)
    kept = saved["axes"].get(name, _MODEL_AXES if is_tracker else _EVERY_AXIS)
    if is_tracker and _read_degrees(saved)[1] == 1:  # a single state, but trackers differ along this axis
        kept = (*kept, 1)
    stage, tensor, data = coords = project(find_coords(parallel), kept)
    state = saved["states"].get(name, {}).get(coords)
    if state is not None:
        return tuple(state)
    base = hashlib.sha256(f"{saved['seed']} {saved['step']} {name}".encode()).digest()
    return (int.from_bytes(base[:4], "big") + (stage * parallel.tp + tensor) * parallel.dp + data) % (1 << 32)


def _read_degrees(saved: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the saved pipeline, tensor- and data-parallel sizes; None if unknown."""
    degrees = saved.get("degrees")
    return degrees if isinstance(degrees, tuple) and len(degrees) == 3 else (None, None, None)


def find_axes(states: Mapping[Coords, Any]) -> tuple[int, ...]:
    """Find the axes along which the states (or their digests) of all ranks differ."""

    def differs(axis: int) -> bool:
        first: dict[Coords, Any] = {}
        others = tuple(other for other in _EVERY_AXIS if other != axis)
        return any(first.setdefault(project(coords, others), state) != state for coords, state in states.items())

    return tuple(axis for axis in _EVERY_AXIS if differs(axis))


def project(coords: Coords, axes: tuple[int, ...]) -> Coords:
    """Return coordinates with those off the ``axes`` set to 0."""
    stage, tensor, data = (at if axis in axes else 0 for axis, at in enumerate(coords))
    return stage, tensor, data


def find_coords(parallel: ParallelState) -> Coords:
    """Return the coordinates of a rank."""
    return parallel.pp_rank, parallel.tp_rank, parallel.dp_rank


def _gather_data_parallel(engine: Any, part: tuple[Coords, dict[str, State]]) -> list[tuple[Coords, dict[str, State]]]:
    """Gather states on the first data-parallel rank; others return their ``part``."""
    group = engine.seq_data_parallel_group
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [part]
    first = dist.get_global_rank(group, 0) if group is not None else 0
    parts: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank() == first else None
    dist.gather_object(part, parts, dst=first, group=group)
    return [part] if parts is None else parts


def digest(state: State) -> str:
    """Return a SHA-256 digest, equal for equal states."""
    return hashlib.sha256(repr(state).encode()).hexdigest()


def pack_python(state: tuple[int, tuple[int, ...], float | None]) -> State:
    """Convert the result of ``random.getstate``."""
    version, words, gauss = state
    return version, np.array(words, np.uint32).tobytes(), gauss


def pack_numpy(state: tuple[Any, ...]) -> State:
    """Convert the result of ``numpy.random.get_state``."""
    kind, words, *rest = state
    return (kind, np.asarray(words, np.uint32).tobytes(), *rest)


def pack_torch(state: torch.Tensor) -> State:
    """Convert the result of ``torch.get_rng_state``, or of an accelerator."""
    return (bytes(state.cpu().numpy()),)


def _unpack(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _write_numpy(kind: str, words: bytes, position: int, *rest: Any) -> None:
    if not 0 <= position <= len(words) // 4:  # numpy would read behind the words
        raise ValueError(f"position {position}")
    np.random.set_state((kind, np.frombuffer(words, np.uint32), position, *rest))  # noqa: NPY002


def _wrap_bit_generator(source: np.random.BitGenerator) -> Generator:
    def write(state: Any) -> None:
        source.state = state

    def seed(value: int) -> None:
        write(np.random.default_rng(value).bit_generator.state)  # the sampler's kind of generator

    return Generator(lambda: (source.state,), write, seed)


def _wrap_tracker(name: str) -> Generator:
    tracker, device = get_cuda_rng_tracker(), get_accelerator()

    def write(data: bytes) -> None:
        tracker.states_[name] = _unpack(data)

    def seed(value: int) -> None:
        before = device.get_rng_state()
        device.manual_seed(value)
        tracker.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    return Generator(lambda: pack_torch(tracker.states_[name]), write, seed)
