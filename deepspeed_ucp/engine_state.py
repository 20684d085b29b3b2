"""What this package keeps of one engine, and what of it a save carries beside the client's own state: random states,
and where samplers stand; both ways by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .comm import connect
from .errors import CheckpointError, ConfigError, shorten

if TYPE_CHECKING:  # it brings pydantic, which commands start without
    from .config import UniversalConfig

logger = logging.getLogger("deepspeed_ucp")

KEY = "deepspeed_ucp"
"""Key of a client state."""

RANDOM_STATES = "random_states"
"""Name under which :mod:`deepspeed_ucp.rng` is carried."""


@dataclass(frozen=True, slots=True)
class Carried:
    """Something that is saved and loaded with an engine.

    Attributes:
        save: gives plain data; called on every rank that carries it, and no collective unless all do.
        load: takes it; called on the ranks that carry it and have it saved, without collectives.
    """

    save: Callable[[], Any]
    load: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Preemption:
    """What an engine does when it is told to go.

    Attributes:
        save_dir: where it saves.
        actions: by signal the exit code with which every rank then ends; None goes on training.
        client_state: makes the client state of that save.
        requeue: Slurm's job, which is to start again; None where none is.
        raises: an error ends the ranks in the place of an exit code.
    """

    save_dir: str
    actions: Mapping[int, int | None]
    client_state: Callable[[], Mapping[str, Any]] | None
    requeue: str | None = None
    raises: bool = False


@dataclass(slots=True)
class UnsealedSave:
    """A save that is to be sealed.

    Attributes:
        local: every node has a folder of its own.
        writer: what writes its files after the save has ended; empty where they are all to be there.
        steps: that have been taken since.
    """

    folder: str
    local: bool
    writer: str = ""
    steps: int = 0


@dataclass(slots=True)
class EngineState:
    """All that this package keeps of one engine between two calls.

    Attributes:
        param_groups: the user's param groups by the names of their parameters, as they were before a wrapper flattened
            them; None where a parameter has no name in the module.
        carried: what is saved and loaded with the engine, by name.
        preemption: what it does when it is told to go; None where nothing is waited for.
        unsealed: its last save, while what is no writer of DeepSpeed's still writes it.
        broken: why it must not be used: it holds a part of a checkpoint. Empty where it does not.
        half_states: of a broken one: its optimizer's states may be a mixture, which a load of the weights alone leaves.
        accumulation: under Lightning, that of the run that began, where this run's differs.
        saver: of its saves into memory (:mod:`deepspeed_ucp.saves.saver`), from the first one on.
        snapshots: that are made of it without a script's help (:mod:`deepspeed_ucp.snapshots`); None for none.
    """

    param_groups: list[list[str]] | None = None
    carried: dict[str, Carried] = field(default_factory=dict)
    preemption: Preemption | None = None
    unsealed: UnsealedSave | None = None
    broken: str = ""
    half_states: bool = False
    accumulation: int | None = None
    saver: Any = None
    snapshots: Any = None


def find_state(engine: Any) -> EngineState:
    """What is kept of an engine: the one thing that is set on it, and ``ucp_report``, which is the user's."""
    state: EngineState = engine.__dict__.setdefault("_ucp_state", EngineState())
    return state


def list_save_folders(engine: Any) -> list[str]:
    """Folders that an engine saves to on a signal, or by itself."""
    state = find_state(engine)
    return [each.save_dir for each in (state.preemption, state.snapshots) if each is not None]


def get_config(engine: Any) -> UniversalConfig | None:
    """The plugin's options for an engine; None where it is off, and for what is no engine (yet)."""
    return getattr(getattr(engine, "_config", None), "ucp_config", None)


def carry(engine: Any, name: str, carried: Carried) -> Carried | None:
    """Save and load something with ``engine`` from now on; of one name the last.

    Returns:
        What had that name until now.
    """
    known = find_state(engine).carried
    former, known[name] = known.get(name), carried
    return former


def is_carried(engine: Any, name: str) -> bool:
    """Whether something is saved and loaded with ``engine`` under a name."""
    return name in find_state(engine).carried


def collect(engine: Any, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    """A client state with everything that the engine carries; collective.

    Raises:
        ConfigError: the client uses our key.
    """
    if KEY in (client_state or {}):
        raise ConfigError(f'client_state: the key "{KEY}" is the plugin\'s own. Give it another name.')
    saved = {name: each.save() for name, each in find_state(engine).carried.items()}
    return {**(client_state or {}), **({KEY: saved} if saved else {})}


def hand_out(engine: Any, client_state: dict[str, Any] | None, *, wanted: bool = True, together: bool = True) -> None:
    """Take what was carried out of a loaded client state, and hand it on where it is wanted; collective.

    Args:
        together: all ranks are here, and raise the same; else there is no collective, as in DeepSpeed's own load.

    Raises:
        CheckpointError: it is of no form that this release knows.
    """
    if client_state is None:
        return
    saved = client_state.pop(KEY, {})
    if not wanted:
        return
    comm, carried = connect(), find_state(engine).carried

    def load() -> list[str]:
        if not isinstance(saved, Mapping):
            raise CheckpointError(f'The client state\'s "{KEY}" is a {type(saved).__name__}, expected a dict.')
        for name, each in carried.items():
            if name in saved:
                each.load(saved[name])
        return [name for name in carried if name not in saved]

    # One collective whatever a rank has: those that read no data may carry none.
    lacking = comm.each(load) if together else [load()]
    if comm.rank:
        return
    if lost := [name.replace("_", " ") for name in saved if name not in carried]:
        logger.warning(
            "The checkpoint carries %s, which nothing in this run takes: it goes on from what this process has. What "
            "is to go on follows the engine before load_checkpoint.",
            shorten(lost),
        )
    for name in dict.fromkeys(name for names in lacking for name in names):
        ranks = [str(rank) for rank, names in enumerate(lacking) if name in names]
        logger.warning(
            "The checkpoint carries no %s%s: it goes on from what this process has.",
            name.replace("_", " "),
            f" for ranks {shorten(ranks)}" if len(ranks) < len(lacking) else "",
        )
