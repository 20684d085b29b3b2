"""torchrun whose agents survive each other: what ``ds_ucp torchrun`` adds to torch's own rendezvous.

With torch's own the agents that are left after a loss start their workers on the store of the round before, whose
addresses are those of dead processes, until no restarts are left; workers of a killed agent train on; a hanging rank is
nobody's fault. Here every round has a store of its own, a lost agent is missed within seconds, workers hold a line to
their agent (:mod:`deepspeed_ucp.heartbeat`) and end with it, and silence on those lines ends them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from ..errors import ConfigError, UcpError
from ..heartbeat import VARIABLE
from .blame import describe_first_failure, examine_hang, find_first_failure
from .log import Log, make_log
from .pace import Pace
from .policy import Attempt, RestartLimits, decide
from .processes import kill_descendant
from .watch import Patience, Watch, find_silence

BACKEND = "deepspeed_ucp"

_REPLACED = ("static", "c10d", BACKEND)
"""Torch's rendezvous that ours stands in for; the first one is torchrun's default."""

DEFAULTS = {"keep_alive_interval": 3, "keep_alive_max_attempt": 4, "last_call_timeout": 10}
"""Of torch's rendezvous: seconds between an agent's words, how many may be missing, and seconds that a round waits for
more agents when there are enough."""

RESTARTS = 100
"""Where torchrun is not told how many there may be; none is its own default."""

_LOOK_EVERY = 0.2

_created: list[GuardedRendezvous] = []
"""That of this agent, which torch has made for it."""


def run(words: Sequence[str]) -> None:
    """Run torchrun's command line.

    Raises:
        ChildFailedError: the workers failed for good.
        UcpError: they failed three times at one step.
    """
    # A store that the agents keep is the same in every round, and so is what dead ranks have left in it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    rendezvous_handler_registry.register(BACKEND, _create)
    record(torchrun.run)(choose_arguments(words))


def find_verdict() -> str | None:
    """What ended this agent's workers for the last time, in words; None where nothing is known."""
    return next((found for each in _created if (found := each.find_fault())), None)


def choose_arguments(words: Sequence[str]) -> Any:
    """Torchrun's arguments, with our rendezvous in the place of its own.

    Raises:
        ConfigError: they name a rendezvous of another kind.
    """
    args = _parse(words)
    if args.rdzv_backend not in _REPLACED:
        raise ConfigError(
            f"--rdzv-backend {args.rdzv_backend}: ds_ucp torchrun has a rendezvous of its own, which takes the place "
            "of c10d and static. Leave the option out, or use torchrun itself."
        )
    conf: dict[str, object] = dict(DEFAULTS)
    _, most = torchrun.parse_min_max_nnodes(args.nnodes)
    if not args.rdzv_endpoint and most > 1 and not args.standalone:
        args.rdzv_endpoint = f"{args.master_addr}:{args.master_port or 29500}"  # as for its static rendezvous
    if args.standalone or not args.rdzv_endpoint:
        args.rdzv_endpoint, args.rdzv_id, args.standalone = "localhost:0", str(uuid.uuid4()), False
    elif "/" in args.rdzv_endpoint:
        conf["store_type"] = "file"
    args.rdzv_conf = ",".join(filter(None, [*(f"{key}={value}" for key, value in conf.items()), args.rdzv_conf]))
    args.rdzv_backend = BACKEND
    return args


def _parse(words: Sequence[str]) -> Any:
    parser = torchrun.get_args_parser()
    parser.prog = "ds_ucp torchrun"
    if "PET_MAX_RESTARTS" not in os.environ:  # torchrun's own variable
        parser.set_defaults(max_restarts=RESTARTS)
    return parser.parse_args(list(words))


def _create(params: RendezvousParameters) -> RendezvousHandler:
    backend, store = create_backend(params)
    patience = Patience(start=float(params.get("start", "1800")), step=float(params.get("hang", "600")))
    files = params.get("events"), params.get("steps")
    _created.append(GuardedRendezvous(create_handler(store, backend, params), patience, *files))
    return _created[-1]


class GuardedRendezvous(RendezvousHandler):
    """A rendezvous whose workers are watched between two rounds.

    Args:
        own: torch's, which brings the agents together.
        events: a file that gets a JSON line per event.
        steps: a file that gets every step's seconds by rank (:class:`~.pace.Pace`).
    """

    def __init__(
        self, own: RendezvousHandler, patience: Patience, events: str | None, steps: str | None = None
    ) -> None:
        self.own, self.patience = own, patience
        self._log: Log = make_log(events, pid=os.getpid()) if events else lambda *_, **__: None
        self._watch, self._pace, self._attempts = Watch(), Pace(self._log, steps), list[Attempt]()
        self._world: int | None = None
        self._hang: str | None = None
        self._is_watching = threading.Event()
        threading.Thread(target=self._guard, daemon=True, name="guard").start()

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Torch's next round; before its workers start they are given a line.

        Raises:
            UcpError: the last rounds have all come to the same step, with the same agents.
        """
        self._is_watching.clear()
        ranks = self._watch.look()
        step = max((seen.step for seen in ranks if seen.step is not None), default=None)
        fault, first = self.find_fault(), find_first_failure(ranks)
        reason = None if self._world is None else fault or "agents have come or gone"
        self._log("rendezvous", step=step, reason=reason, at=None if self._hang else first and first.failed_at)
        if fault:
            sys.stderr.write(f"ds_ucp torchrun: {fault}\n")
        self._pace.begin()
        self._hang, os.environ[VARIABLE] = None, self._watch.begin()
        info = self.own.next_rendezvous()
        former, self._world = self._world, info.world_size
        if former is not None:
            self._look_back(Attempt(step, lost=former != info.world_size))
        self._log("round", agents=info.world_size, agent=info.rank)
        self._is_watching.set()
        return info

    def find_fault(self) -> str | None:
        """What has ended the workers of this agent, in words; None where nothing has that is known here."""
        return self._hang or describe_first_failure(self._watch.look())

    def _look_back(self, attempt: Attempt) -> None:
        self._attempts.append(attempt)
        decision = decide(self._attempts, RestartLimits(restarts=1 << 30))  # torchrun counts them
        if decision.pause is None:
            self._log("gave_up", reason=decision.reason)
            self.own.set_closed()
            raise UcpError(
                f"the workers are not started again: {decision.reason}. Mend what their log says, and start anew: the "
                "run goes on from its last save."
            )

    def _guard(self) -> None:
        """End the workers of this agent when they have fallen silent: torch then restarts them, here and elsewhere."""
        while True:
            time.sleep(_LOOK_EVERY)
            ranks = self._watch.look() if self._is_watching.is_set() else []
            self._pace.follow(self._watch.take_steps())
            silence = find_silence(ranks, self.patience, self._watch.heard_until)
            if silence is not None:
                self._is_watching.clear()
                hang = examine_hang(self._watch)
                self._hang = f"no rank has ended a step for {silence:.0f} s: {hang.summary}"
                self._log("hanging", seconds=round(silence, 2), ranks=[seen.rank for seen in ranks], **asdict(hang))
                for seen in ranks:
                    kill_descendant(seen.pid)

    def is_closed(self) -> bool:
        return self.own.is_closed()

    def set_closed(self) -> None:
        self.own.set_closed()

    def num_nodes_waiting(self) -> int:
        return self.own.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self.own.get_run_id()

    def shutdown(self) -> bool:
        self._is_watching.clear()
        return self.own.shutdown()
