"""Per-engine state of the plugin, and the states that saves and loads carry."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .comm import Comm, connect
from .errors import CheckpointError, ConfigError, shorten

if TYPE_CHECKING:  # it brings pydantic, which commands start without
    from .config import UniversalConfig

logger = logging.getLogger("deepspeed_ucp")

KEY = "deepspeed_ucp"
"""Key of the carried state in a client state."""

RANDOM_STATES = "random_states"
"""Name of the state that :mod:`deepspeed_ucp.rng` carries."""


@dataclass(frozen=True, slots=True)
class Carried:
    """State that is saved and loaded with an engine.

    Attributes:
        save: returns plain data. Called on every rank that carries the state; may be collective only if all ranks do.
        load: takes that data, without collectives. Called on the ranks that carry the state and have it saved.
        note_step: called after each optimizer step, without collectives.
    """

    save: Callable[[], Any]
    load: Callable[[Any], None]
    note_step: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Preemption:
    """Reaction of an engine to signals.

    Attributes:
        actions: signal → exit code of every rank after the save; None continues training.
        client_state: makes the client state of that save.
        requeue: Slurm job to requeue, or None.
        raises: end the ranks by an exception instead of an exit code.
    """

    save_dir: str
    actions: Mapping[int, int | None]
    client_state: Callable[[], Mapping[str, Any]] | None
    requeue: str | None = None
    raises: bool = False


@dataclass(slots=True)
class UnsealedSave:
    """A save without its seal.

    Attributes:
        local: each node has a separate folder.
        writer: class or function that writes the files after the save has returned; empty if all files must exist.
        steps: steps taken since the save.
    """

    folder: str
    local: bool
    writer: str = ""
    steps: int = 0


@dataclass(slots=True)
class EngineState:
    """State that this package keeps of one engine between two calls.

    Attributes:
        param_groups: parameter names of the user's param groups, before a wrapper flattened them; None if a parameter
            has no name in the module.
        carried: name → state that is saved and loaded with the engine.
        unsealed: the last save, while a writer other than DeepSpeed's still writes it.
        broken: error message if the engine holds only a part of a checkpoint and must not be used; else empty.
        half_states: a broken engine's optimizer states may be mixed; loading weights alone does not repair them.
        accumulation: under Lightning, the accumulation of the run's first launch if this launch has another one.
        loaders_restored: under Lightning, the checkpoint has the positions of stateful data loaders.
        save_size: bytes of a save on this node, estimated for saves into memory.
        saver: the :class:`~deepspeed_ucp.saves.saver.Saver` of saves into memory, after the first one.
        snapshots: the automatic :class:`~deepspeed_ucp.snapshots.Snapshots`, or None.
    """

    param_groups: list[list[str]] | None = None
    carried: dict[str, Carried] = field(default_factory=dict)
    preemption: Preemption | None = None
    unsealed: UnsealedSave | None = None
    broken: str = ""
    half_states: bool = False
    accumulation: int | None = None
    loaders_restored: bool = False
    save_size: int = 0
    saver: Any = None
    snapshots: Any = None


def find_state(engine: Any) -> EngineState:
    """Return an engine's state, kept in the engine's only attribute of this package."""
    state: EngineState = engine.__dict__.setdefault("_ucp_state", EngineState())
    return state


def get_config(engine: Any) -> UniversalConfig | None:
    """Return an engine's options; None if the plugin is off or it is no engine."""
    return getattr(getattr(engine, "_config", None), "ucp_config", None)


def carry(engine: Any, name: str, carried: Carried) -> Carried | None:
    """Save and load a state with ``engine`` from now on; return the former one."""
    known = find_state(engine).carried
    former, known[name] = known.get(name), carried
    return former


def collect(engine: Any, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add the states that the engine carries to a client state (collective).

    Raises:
        ConfigError: the client state has the plugin's key, on one rank or several; raised on all ranks.
    """

    def check() -> None:
        if KEY in (client_state or {}):
            raise ConfigError(f'client_state: the key "{KEY}" is reserved for the plugin. Use another name.')

    (connect() if get_config(engine) is not None else Comm()).run(check)  # DeepSpeed's own saves stay as they are
    saved = {name: part.save() for name, part in find_state(engine).carried.items()}
    return {**(client_state or {}), **({KEY: saved} if saved else {})}


def note_step(engine: Any) -> None:
    """Notify the carried states of an optimizer step."""
    for part in find_state(engine).carried.values():
        if part.note_step is not None:
            part.note_step()


def load_carried(engine: Any, client_state: dict[str, Any], *, wanted: bool = True, together: bool = True) -> None:
    """Remove carried states from a client state; load them if ``wanted`` (collective).

    Args:
        together: all ranks take part and raise the same error; else no collective is used, as in DeepSpeed's own load.
    """
    saved = client_state.pop(KEY, {})
    if not wanted:
        return
    comm, carried = connect(), find_state(engine).carried

    def load() -> list[str]:
        if not isinstance(saved, Mapping):
            raise CheckpointError(f'The client state\'s "{KEY}" is a {type(saved).__name__}, expected a dict.')
        for name, part in carried.items():
            if name in saved:
                part.load(saved[name])
        return [name for name in carried if name not in saved]

    # Every rank takes part: ranks without data, such as middle pipeline stages, may carry no state.
    lacking = comm.gather_results(load) if together else [load()]
    if comm.rank:
        return
    if unused := [name.replace("_", " ") for name in saved if name not in carried]:
        logger.warning(
            "The checkpoint carries %s, which this run does not load: it continues with the state of this process. To "
            "load it, call follow(engine) before load_checkpoint.",
            shorten(unused),
        )
    for name in dict.fromkeys(name for names in lacking for name in names):
        ranks = [str(rank) for rank, names in enumerate(lacking) if name in names]
        logger.warning(
            "The checkpoint carries no %s%s: this run continues with the state of this process.",
            name.replace("_", " "),
            f" for ranks {shorten(ranks)}" if len(ranks) < len(lacking) else "",
        )
