"""torchrun whose agents survive each other: what ``ds_ucp torchrun`` puts in the place of torch's own rendezvous.

With torch's own the agents that are left after a loss start their workers on the store of the round before, whose
addresses are those of dead processes, until no restarts are left; workers of a killed agent train on; a hanging rank is
nobody's fault; and every step of a restart waits for a fixed time. Here agents tell each other (:mod:`.gathering`), and
workers hold a line to their agent (:mod:`deepspeed_ucp.heartbeat`): they end with it, and silence on those lines, or
the end of one of them, ends all workers at once.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from torch.distributed import HashStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import Worker
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher import api as launcher

from ...errors import ConfigError, UcpError
from ...heartbeat import VARIABLE
from ...warm.nursery import Nursery, choose_nursery
from ..blame import describe_first_failure, examine_hang, find_broken, find_first_failure
from ..log import Log, make_log
from ..pace import Pace
from ..policy import Attempt, RestartLimits, decide
from ..preflight.asking import Preflight, ask_here
from ..preflight.judging import UnfitError, merge
from ..processes import kill_descendants
from ..watch import UNHEARD, Patience, Watch, find_silence
from .endpoint import Addresses, Endpoint, SharedFile
from .gathering import Gathering, JobEnded, Round
from .leader import Limits
from .lines import hold_port, split_address

BACKEND = "deepspeed_ucp"

_REPLACED = ("static", "c10d", BACKEND)
"""Torch's rendezvous that ours stands in for; the first one is torchrun's default."""

DEFAULTS: Mapping[str, float | str] = {
    "keep_alive_interval": 3.0, "keep_alive_max_attempt": 4, "last_call_timeout": 10.0, "join_timeout": 600.0,
    "start": 1800.0, "hang": 600.0, "events": "", "steps": "", "is_host": "",
}  # fmt: skip
"""What ``--rdzv-conf`` takes."""

_TORCHS = ("timeout", "rank", "read_timeout", "close_timeout", "heartbeat_timeout", "store_type", "use_libuv")
"""Keys of torch's rendezvous, which has to do with its stores: they change nothing here."""

RESTARTS = 100
"""Where torchrun is not told how many there may be; none is its own default."""

_OPENING = 2.0
"""Seconds in which a head that comes back is told of the job that went on without it."""

_PREPARE = 60.0
"""Seconds that a template may take."""

_LOOK_EVERY, _TELL_EVERY, _LAST_WORDS = 0.1, 1.0, 1.0

_created: list[GuardedRendezvous] = []
"""That of this agent, which torch has made for it."""


def run(words: Sequence[str]) -> None:
    """Run torchrun's command line.

    Raises:
        ChildFailedError: the workers failed for good.
        UcpError: they failed three times at one step, or the agents do not come together.
    """
    launcher.LocalElasticAgent = GatheredAgent  # type: ignore[misc]
    args = choose_arguments(words)
    folder = args.preflight_dir if args.preflight else None
    rendezvous_handler_registry.register(BACKEND, partial(_create, warm=not args.no_warm, folder=folder))
    try:
        record(torchrun.run)(args)
    except SignalException:  # torch's launcher leaves its rendezvous as it is: others may come
        for each in _created:
            each.leave()
        raise


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
    _, most = torchrun.parse_min_max_nnodes(args.nnodes)
    if not args.rdzv_endpoint and most > 1 and not args.standalone:
        args.rdzv_endpoint = f"{args.master_addr}:{args.master_port or 29500}"  # as for its static rendezvous
    if args.standalone or not args.rdzv_endpoint:
        args.rdzv_endpoint, args.rdzv_id, args.standalone = "localhost:0", str(uuid.uuid4()), False
    args.rdzv_backend = BACKEND
    return args


def _parse(words: Sequence[str]) -> Any:
    parser = torchrun.get_args_parser()
    parser.prog = "ds_ucp torchrun"
    if "PET_MAX_RESTARTS" not in os.environ:  # torchrun's own variable
        parser.set_defaults(max_restarts=RESTARTS)
    text = "let every worker import everything itself, also after a restart"
    parser.add_argument("--no-warm", action="store_true", help=text)
    parser.add_argument("--preflight", action="store_true", help="test this node before each round")
    parser.add_argument("--preflight-dir", default="", metavar="DIR", help="the folder whose disk is tested")
    return parser.parse_args(list(words))


def _create(params: RendezvousParameters, *, warm: bool, folder: str | None) -> RendezvousHandler:
    _created.append(GuardedRendezvous(params, warm=warm, folder=folder))
    return _created[-1]


class GatheredAgent(LocalElasticAgent):
    """Torch's agent, which asks our rendezvous instead of a store for its workers' ranks, and before it ends."""

    def __init__(self, spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(spec, *args, **kwargs)
        self._gathered: GuardedRendezvous = spec.rdzv_handler
        self._gathered.begin(self)

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: Any) -> list[Worker]:
        return self._gathered.assign_ranks(spec.role)

    def _exit_barrier(self) -> None:
        self._gathered.gathering.finish()

    def list_pids(self) -> list[int]:
        """Of its workers, those that have ended among them."""
        return list(self._pcontext.pids().values()) if self._pcontext is not None else []


class GuardedRendezvous(RendezvousHandler):
    """Brings agents together, and watches the workers between two rounds.

    Args:
        params: torch's.
        warm: workers are forked from a process that has imported what they need (:mod:`deepspeed_ucp.warm`).
        folder: this node is tested before each round, and this is the folder whose disk is (empty: that of temporary
            files); None: it is not.

    Raises:
        ConfigError: ``--rdzv-conf`` has an unknown key, or a value that is none.
    """

    def __init__(self, params: RendezvousParameters, *, warm: bool = False, folder: str | None = None) -> None:
        self._params, self._conf = params, _read_conf(params.config)
        events = str(self._conf["events"])
        self._log: Log = make_log(events, pid=os.getpid()) if events else lambda *_, **__: None
        self._patience = Patience(start=float(self._conf["start"]), step=float(self._conf["hang"]))
        self._watch, self._attempts = Watch(), list[Attempt]()
        self._pace = Pace(self._log, str(self._conf["steps"]) or None)
        self._round: Round | None = None
        self._trouble: str | None = None
        self._told_unheard = False
        self._agent: GatheredAgent | None = None
        self._preflight = None if folder is None else Preflight(ask_here, "127.0.0.1", folder, self._log)
        self._has_left, self._held = False, hold_port()
        self._is_watching, self._looking = threading.Event(), threading.RLock()
        self._nursery: Nursery | None = choose_nursery(self._log) if warm else None

    def begin(self, agent: GatheredAgent) -> None:
        """Look for the other agents.

        Raises:
            ConfigError: the endpoint is none.
        """
        self._agent, spec, conf, params = agent, agent.get_worker_group().spec, self._conf, self._params
        limits = Limits(
            params.min_nodes, params.max_nodes, float(conf["keep_alive_interval"]), int(conf["keep_alive_max_attempt"]),
            last_call=float(conf["last_call_timeout"]), join=float(conf["join_timeout"]),
            opening=0.0 if params.max_nodes == 1 or "/" in params.endpoint else _OPENING,
        )  # fmt: skip
        self.gathering = Gathering(
            self._make_endpoint(limits), limits, params.run_id,
            ranks=spec.local_world_size, role=spec.role, find_port=self._find_port, host=params.local_addr,
        )  # fmt: skip
        threading.Thread(target=self._guard, daemon=True, name="guard").start()
        if self._nursery is not None:
            os.environ.update(self._nursery.environment())

    def _find_port(self) -> int:
        """For the store of a round's workers, who take seconds until they listen: it is held to the next round."""
        former, self._held = self._held, hold_port()
        former.close()
        return int(self._held.getsockname()[1])

    def _prepare(self) -> None:
        """Do what takes long before this agent takes part: as a newcomer, while the others train on.

        What is being made already is waited for: importing everything once more would take as long.
        """
        began = time.monotonic()
        if self._nursery is None:
            return
        if self._round is None and self.gathering.wait_for_greeting(_PREPARE) and self.gathering.recipe is not None:
            self._nursery.learn(dict(self.gathering.recipe))
        elif self._nursery.is_ready:
            return
        is_ready = self._nursery.wait_ready(_PREPARE)
        if time.monotonic() > began + _LOOK_EVERY:
            self._log("prepared", seconds=round(time.monotonic() - began, 2), warm=is_ready)

    def _make_endpoint(self, limits: Limits) -> Endpoint:
        given = self._params.endpoint
        if "/" in given:
            return SharedFile(given, self._params.run_id, limits.silence, self._params.local_addr)
        told = str(self._conf["is_host"]).lower()
        return Addresses(given, is_host=None if not told else told in ("1", "true", "yes"))

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """The next round; before its workers start they are given a line.

        Raises:
            UcpError: the last rounds have all come to the same step with the same agents, or there is no further round,
                or this node fails its test.
            SystemExit: the others have done all there was to do.
        """
        self._watch.wait_for_end(_LAST_WORDS)  # torch has ended the workers, and may be ahead of what they said
        with self._looking:  # what the guard has found, and whom it ends, is of this round
            if self._is_watching.is_set():  # torch may have seen a worker's end first
                self._look()
            self._is_watching.clear()
        ranks = self._watch.look()
        step = max((seen.step for seen in ranks if seen.step is not None), default=None)
        fault, first = self.find_fault(), find_first_failure(ranks)
        unknown = "agents have come or gone" if ranks else "agents have come or gone, or silent workers failed"
        reason = None if self._round is None else fault or unknown
        self._log("rendezvous", step=step, reason=reason, at=None if self._trouble else first and first.failed_at)
        if fault:
            sys.stderr.write(f"ds_ucp torchrun: {fault}\n")
        elif reason and not (ranks or self._told_unheard):
            self._told_unheard = True
            sys.stderr.write(f"ds_ucp torchrun: {UNHEARD}\n")
        self._pace.begin()
        self._prepare()
        os.environ[VARIABLE] = self._watch.begin()
        try:
            found = self._join()
        except JobEnded:
            self._log("too_late")
            raise SystemExit(0) from None
        except UnfitError as error:
            self._log("unfit", reason=str(error))
            self.leave()
            advice = "The others go on without it; `ds_ucp preflight` tests it again"
            raise UcpError(f"this node fails its test: {error}. {advice}.") from None
        former, self._round, self._trouble = self._round, found, None
        if former is not None:
            self._look_back(Attempt(step, lost=found.changed))
        self._log("round", agents=len(found.seats), agent=found.rank, lost=found.lost)
        self._is_watching.set()
        host, _ = split_address(found.seats[0].address)
        return RendezvousInfo(HashStore(), found.rank, len(found.seats), RendezvousStoreInfo(host, found.port))

    def _join(self) -> Round:
        """The next round, for which this node is tested where it is to be; twice where it fails against the others.

        Raises:
            JobEnded, UcpError: as of :meth:`Gathering.join`.
        """
        if self._preflight is None:
            return self.gathering.join()
        report = self._preflight.test_here()
        try:
            return self.gathering.join(asdict(report))
        except UnfitError:
            return self.gathering.join(asdict(merge(report, self._preflight.test_here())))

    def assign_ranks(self, role: str) -> list[Worker]:
        """This agent's workers in the round."""
        if self._round is None:
            raise RuntimeError("there has been no round")
        ranks, own = self._round.ranks, self._round.rank
        before = sum(count for _, count in ranks[:own])
        alike = [count if each == role else 0 for each, count in ranks]
        return [
            Worker(at, before + at, sum(alike[:own]) + at, sum(count for _, count in ranks), sum(alike))
            for at in range(ranks[own][1])
        ]

    def find_fault(self) -> str | None:
        """What has ended the workers of this agent, in words; None where nothing has that is known here."""
        return self._trouble or describe_first_failure(self._watch.look())

    def _look_back(self, attempt: Attempt) -> None:
        self._attempts.append(attempt)
        decision = decide(self._attempts, RestartLimits(restarts=1 << 30))  # torchrun counts them
        if decision.pause is None:
            self._log("gave_up", reason=decision.reason)
            self.gathering.end_job(decision.reason)
            raise UcpError(
                f"the workers are not started again: {decision.reason}. Mend what their log says, and start anew: the "
                "run goes on from its last save."
            )

    def _guard(self) -> None:
        """End this agent's workers when they cannot go on, as long as there are any: torch then restarts them."""
        told = time.monotonic()
        while True:
            with self.gathering.changed:
                self.gathering.changed.wait(_LOOK_EVERY)
            if self._nursery is not None and time.monotonic() > told + _TELL_EVERY:
                told = time.monotonic()
                self.gathering.tell_recipe(self._nursery.recipe())
            self._pace.follow(self._watch.take_steps())
            with self._looking:
                if self._is_watching.is_set() and self._look() is not None:
                    self._end_workers()

    def _look(self) -> str | None:
        """Why the workers of the round cannot go on, which is told once; None while they can."""
        with self._looking:
            if self._trouble is None:
                self._trouble = self._find_trouble()
            return self._trouble

    def _end_workers(self) -> None:
        ranks = [seen for seen in self._watch.look() if seen.is_open]
        for seen in ranks:
            seen.was_told = True
        kill_descendants({seen.pid for seen in ranks}.union(self._agent.list_pids() if self._agent else ()))

    def _find_trouble(self) -> str | None:
        """Why the workers of the round cannot go on; the other agents are told."""
        if (told := self.gathering.ended) is not None:
            self._log("ended", reason=told)
            return told
        ranks = self._watch.look()
        silence = find_silence(ranks, self._patience, self._watch.heard_until)
        if silence is not None:
            hang = examine_hang(self._watch)
            reason = f"no rank has ended a step for {silence:.0f} s: {hang.summary}"
            self._log("hanging", seconds=round(silence, 2), ranks=[seen.rank for seen in ranks], **asdict(hang))
        elif find_broken(ranks) is not None:
            reason = str(describe_first_failure(ranks))
            self._log("ended", reason=reason)
        else:
            return None
        self.gathering.report_broken(reason)
        return reason

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        self.gathering.end_job("an agent has closed it")

    def num_nodes_waiting(self) -> int:
        return self.gathering.count_waiting()

    def get_run_id(self) -> str:
        return self._params.run_id

    def leave(self) -> None:
        """Leave the others to themselves, after this agent's workers have ended."""
        self._has_left = True
        time.sleep(2 * _LOOK_EVERY)  # the guard tells where they have not ended as they should
        self._close()

    def _close(self) -> None:
        self._is_watching.clear()
        self.gathering.close()
        self._held.close()
        if self._nursery is not None:
            self._nursery.close()

    def shutdown(self) -> bool:
        """Leave, when all is done, or has failed for good: then it ends for all."""
        if self._has_left:
            return True
        self.gathering.end_job("the workers of an agent have failed for good")
        self._close()
        return True


def _read_conf(given: Mapping[str, Any]) -> dict[str, Any]:
    """``--rdzv-conf`` with our defaults.

    Raises:
        ConfigError: a key is unknown, or a number is none.
    """
    conf: dict[str, Any] = {**DEFAULTS, **{key: value for key, value in given.items() if key not in _TORCHS}}
    for key, value in conf.items():
        if key not in DEFAULTS:
            raise ConfigError(f"--rdzv-conf {key}={value}: not known. These are: {', '.join(DEFAULTS)}.")
        if not isinstance(DEFAULTS[key], str):
            try:
                conf[key] = float(value)
            except ValueError:
                raise ConfigError(f"--rdzv-conf {key}={value}: expected a number of seconds.") from None
    return conf
