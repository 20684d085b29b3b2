"""What a save carries beside the client's own state: random states, and where samplers stand; both ways by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .comm import connect
from .errors import CheckpointError, ConfigError, shorten

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


def carry(engine: Any, name: str, carried: Carried) -> Carried | None:
    """Save and load something with ``engine`` from now on; of one name the last.

    Returns:
        What had that name until now.
    """
    held: dict[str, Carried] = engine.__dict__.setdefault("_ucp_carried", {})
    former, held[name] = held.get(name), carried
    return former


def is_carried(engine: Any, name: str) -> bool:
    """Whether something is saved and loaded with ``engine`` under a name."""
    return name in engine.__dict__.get("_ucp_carried", {})


def collect(engine: Any, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    """A client state with everything that the engine carries; collective.

    Raises:
        ConfigError: the client uses our key.
    """
    if KEY in (client_state or {}):
        raise ConfigError(f'client_state: the key "{KEY}" is the plugin\'s own. Give it another name.')
    carried = engine.__dict__.get("_ucp_carried", {})
    held = {KEY: {name: each.save() for name, each in carried.items()}} if carried else {}
    return {**(client_state or {}), **held}


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
    comm, carried = connect(), engine.__dict__.get("_ucp_carried", {})

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
