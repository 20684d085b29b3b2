"""Random states through a save: a world goes on with its own, and a rank that the saved world lacked gets a new one.

A generator's states differ along some axes of the world (pipeline stage, tensor-parallel rank, data-parallel rank) and
are alike along the others: a script that seeds every rank alike has one state, Megatron's tensor-parallel trackers one
per stage and tensor-parallel rank. A save tells which, so that a rank of another world finds the state of the rank that
stood where it stands now. Where none stood, its state is derived from the seed, the step and its place: every resume of
a checkpoint derives the same, and no two ranks that were to differ are given one.
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
from .engine_state import RANDOM_STATES, Carried, carry
from .errors import CheckpointError
from .targets import Place, find_place
from .targets.coverage import find_data_sampler

logger = logging.getLogger("deepspeed_ucp")

Coords = tuple[int, int, int]
"""Pipeline stage, tensor-parallel rank, data-parallel rank."""

State = tuple[Any, ...]
"""What a generator goes on from: bytes and numbers."""

_VERSION = 1
_TRACKER = "tracker:"
_SAMPLER = "data_sampler"
_EVERY_AXIS, _MODEL_AXES = (0, 1, 2), (0, 1)


@dataclass(frozen=True, slots=True)
class Generator:
    """A generator of random numbers of this process.

    Attributes:
        read: its state.
        write: go on from a state; raises what a state of another form makes it raise.
        seed: start anew.
    """

    read: Callable[[], State]
    write: Callable[..., None]
    seed: Callable[[int], None]


def list_generators(engine: Any = None) -> dict[str, Generator]:
    """All generators of this process by name: Python's, numpy's and torch's global ones, the accelerator's, those of
    DeepSpeed's activation checkpointing, which draw apart on tensor-parallel ranks, and that of an engine's curriculum
    sampler, from which the first rank draws for all."""
    found = {
        "python": Generator(
            lambda: pack_python(random.getstate()),
            lambda version, words, gauss: random.setstate((version, tuple(_read_words(words).tolist()), gauss)),
            random.seed,
        ),
        "numpy": Generator(  # the global generator is what scripts use
            lambda: pack_numpy(np.random.get_state(legacy=True)),  # type: ignore[arg-type]  # noqa: NPY002
            lambda kind, words, *rest: np.random.set_state((kind, _read_words(words), *rest)),  # noqa: NPY002
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
        found["accelerator"] = Generator(
            lambda: pack_torch(device.get_rng_state()),
            lambda data: device.set_rng_state(_unpack(data)),
            device.manual_seed,
        )
    sampler = find_data_sampler(engine)
    if sampler is not None:
        found[_SAMPLER] = _draw_with(sampler.np_rng.bit_generator)
    return found | {f"{_TRACKER}{name}": _track(name) for name in get_cuda_rng_tracker().get_states()}


def follow(engine: Any) -> None:
    """Save and restore the random states of all ranks with every ``save_checkpoint`` and ``load_checkpoint``; to be
    called on every rank."""
    carry(engine, RANDOM_STATES, Carried(partial(capture, engine), partial(_restore_and_log, engine)))


def _restore_and_log(engine: Any, saved: Mapping[str, Any]) -> None:
    rank, derived = connect().rank, restore(engine, saved)
    if derived:
        logger.info("random states derived, not saved ones, on rank %d: %s", rank, ", ".join(derived))
    trackers = {name for name in saved["axes"] if name.startswith(_TRACKER)}
    lost = sorted(trackers.difference(list_generators()))
    if lost and rank == 0:
        logger.warning(
            "random states of %s were saved, and there are no such generators: seed them (model_parallel_cuda_manual_"
            "seed) before load_checkpoint, or what they draw is not what it was",
            ", ".join(lost),
        )
    if _SAMPLER in derived and rank == 0:
        logger.warning(
            "the random states were saved without that of the curriculum sampler: it draws other samples than the "
            "saved run would have, the same at every resume"
        )


def capture(engine: Any) -> dict[str, Any]:
    """The random states of all ranks, for a client state; collective.

    Returns:
        Plain data. In the file of a model-parallel rank that its first data-parallel rank writes: the states of all
        data-parallel ranks (some 10 KB each); in the file that a rank writes for itself (ZeRO 3): its own.
    """
    comm, place = connect(), find_place(engine)
    at, own = find_coords(place), {name: each.read() for name, each in list_generators(engine).items()}
    digests = {name: digest(state) for name, state in own.items()}
    trackers = {name: state for name, state in own.items() if name.startswith(_TRACKER) and not place.dp_rank}
    told = comm.gather((at, digests, trackers))
    axes = {name: find_axes({coords: digests.get(name) for coords, digests, _ in told}) for name in own}
    held = [*_gather_first(engine, (at, own)), *((coords, states) for coords, _, states in told)]
    seed: int = comm.broadcast(torch.initial_seed())
    return make_record(held, axes, seed, int(engine.global_steps))


def make_record(
    held: Sequence[tuple[Coords, Mapping[str, State]]], axes: Mapping[str, tuple[int, ...]], seed: int | str, step: int
) -> dict[str, Any]:
    """What a file holds: by generator the axes along which it differs, and the states that are known there."""
    states = {
        name: {project(coords, kept): states[name] for coords, states in held if name in states}
        for name, kept in axes.items()
    }
    return {"version": _VERSION, "seed": seed, "step": step, "axes": dict(axes), "states": states}


def restore(engine: Any, saved: Mapping[str, Any]) -> list[str]:
    """Let this rank's generators go on from a save.

    Args:
        saved: as :func:`capture` gave it, of this rank's file or of the first rank's.

    Returns:
        The generators that got a derived state, because no rank stood where this one stands.

    Raises:
        CheckpointError: it is of another form.
    """
    if not isinstance(saved, Mapping) or saved.get("version") != _VERSION:
        raise CheckpointError("The saved random states are of no form that this release knows.")
    return take(saved, find_place(engine), list_generators(engine))


def take(saved: Mapping[str, Any], place: Place, generators: Mapping[str, Generator]) -> list[str]:
    """Let some of this rank's generators go on from what :func:`make_record` made.

    Returns:
        Those that got a derived state.

    Raises:
        CheckpointError: a state is of another form.
    """
    derived = []
    for name, generator in generators.items():
        try:
            state = find_state(saved, name, place)
            if isinstance(state, int):
                generator.seed(state)
                derived.append(name)
            else:
                generator.write(*state)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"The saved random state of {name} cannot be taken: {error!r}.") from error
    return derived


def find_state(saved: Mapping[str, Any], name: str, place: Place) -> State | int:
    """The state that a generator goes on from, or the seed that it begins with where the saved world had no such place.

    A seed has 32 bits (torch takes no more on the CPU), and is another one at each place of a world.
    """
    kept = saved["axes"].get(name, _MODEL_AXES if name.startswith(_TRACKER) else _EVERY_AXIS)
    stage, tensor, data = coords = project(find_coords(place), kept)
    state = saved["states"].get(name, {}).get(coords)
    if state is not None:
        return tuple(state)
    told = hashlib.sha256(f"{saved['seed']} {saved['step']} {name}".encode()).digest()
    return (int.from_bytes(told[:4], "big") + (stage * place.tp + tensor) * place.dp + data) % (1 << 32)


def find_axes(states: Mapping[Coords, Any]) -> tuple[int, ...]:
    """The axes of the world along which something differs, from what every place of the world has of it."""

    def differs(axis: int) -> bool:
        first: dict[Coords, Any] = {}
        others = tuple(other for other in _EVERY_AXIS if other != axis)
        return any(first.setdefault(project(coords, others), state) != state for coords, state in states.items())

    return tuple(axis for axis in _EVERY_AXIS if differs(axis))


def project(coords: Coords, axes: tuple[int, ...]) -> Coords:
    """A place with the axes that do not matter left out; the first of all places that are alike."""
    stage, tensor, data = (at if axis in axes else 0 for axis, at in enumerate(coords))
    return stage, tensor, data


def find_coords(place: Place) -> Coords:
    """Where a rank stands along the axes."""
    return place.pp_rank, place.tp_rank, place.dp_rank


def _gather_first(engine: Any, own: tuple[Coords, dict[str, State]]) -> list[tuple[Coords, dict[str, State]]]:
    """What the data-parallel ranks of one model-parallel rank have; on the first of them all, else one's own."""
    group = engine.seq_data_parallel_group
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [own]
    first = dist.get_global_rank(group, 0) if group is not None else 0
    found: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank() == first else None
    dist.gather_object(own, found, dst=first, group=group)
    return [own] if found is None else found


def digest(state: State) -> str:
    """The same for equal states."""
    return hashlib.sha256(repr(state).encode()).hexdigest()


def pack_python(state: tuple[int, tuple[int, ...], float | None]) -> State:
    """What ``random.getstate`` gives, as a state."""
    version, words, gauss = state
    return version, np.array(words, np.uint32).tobytes(), gauss


def pack_numpy(state: tuple[Any, ...]) -> State:
    """What ``numpy.random.get_state`` gives, as a state."""
    kind, words, *rest = state
    return (kind, np.asarray(words, np.uint32).tobytes(), *rest)


def pack_torch(state: torch.Tensor) -> State:
    """What ``torch.get_rng_state`` and an accelerator's give, as a state."""
    return (bytes(state.cpu().numpy()),)


def _unpack(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read_words(words: bytes) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.frombuffer(words, np.uint32)


def _draw_with(source: np.random.BitGenerator) -> Generator:
    def write(state: Any) -> None:
        source.state = state

    def seed(value: int) -> None:
        write(np.random.default_rng(value).bit_generator.state)  # as the sampler makes it

    return Generator(lambda: (source.state,), write, seed)


def _track(name: str) -> Generator:
    tracker, device = get_cuda_rng_tracker(), get_accelerator()

    def write(data: bytes) -> None:
        tracker.states_[name] = _unpack(data)

    def seed(value: int) -> None:
        before = device.get_rng_state()
        device.manual_seed(value)
        tracker.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    return Generator(lambda: pack_torch(tracker.states_[name]), write, seed)
