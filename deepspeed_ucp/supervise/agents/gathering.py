"""One agent among those of a job: finds who leads, or leads itself, and is told of rounds, of losses and of the end.

Every agent listens. The one that leads has a connection of every other one; a connection that ends is a lost agent.
When the leading one is lost, the first of the last round's that is left leads, and the others, who know its address,
come to it. Newcomers ask at the endpoint (:mod:`.endpoint`).
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import UcpError
from ..preflight.judging import UnfitError
from .endpoint import Endpoint
from .leader import FAREWELLS, Leader, Limits, Member, Past, Seat
from .lines import Ended, Line, call, is_loopback, join_address, listen, split_address

_LANGUAGE = "ds_ucp 1"
"""Of the first line; agents of another one are strangers."""

_TICK, _ERRANDS, _CALL, _ANSWER = 0.05, 0.5, 1.0, 5.0
"""Seconds between two looks, between two errands of a leader, for a call to be taken, and to be answered."""

_STRANGERS, _GREETING = 128, 15.0
"""Connections that have not said who they are, at the most, and the seconds that each is given for it."""

_MISSED, _REFUSED, _BUSY = "missed", "refused", "busy"
"""What may come of a call beside a connection or another address: no answer, nobody there, and one that searches."""

_ELSEWHERE = "another agent leads by now"


@dataclass(frozen=True, slots=True)
class Round:
    """A round that this agent takes part in.

    Attributes:
        number: from 1 on.
        rank: of this agent.
        seats: all agents; the first one leads.
        ranks: role and number of workers of each.
        port: of the workers' store, on the first one's machine.
        lost: machines of agents that were in the last round and are not in this one.
        changed: these are other agents than those of the last round.
    """

    number: int
    rank: int
    seats: Sequence[Seat]
    ranks: Sequence[tuple[str, int]]
    port: int
    lost: Sequence[str]
    changed: bool


class JobEnded(Exception):
    """The others have done all there was to do."""


@dataclass(eq=False, slots=True)
class _Caller:
    """A connection that has come in."""

    line: Line
    host: str
    since: float
    member: Member | None = None


class Gathering:
    """One agent; two threads of its own do everything until :meth:`close`.

    Args:
        run_id: who does not say it is a stranger.
        ranks, role: of this agent's workers.
        find_port: a free port of this machine.
        host: this machine's address for the others, where it was told; else that from which it calls.

    Attributes:
        changed: is notified when any of the following changes.
        ended: why the workers of this round cannot go on; None while they can.
        recipe: from which the leader's agent makes what its workers are forked from; None where it has none.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        limits: Limits,
        run_id: str,
        *,
        ranks: int = 1,
        role: str = "default",
        find_port: Callable[[], int] = lambda: 0,
        host: str | None = None,
    ) -> None:
        self.endpoint, self.limits, self._host = endpoint, limits, host
        self._key = f"{_LANGUAGE} {json.dumps(run_id)}"
        self._ranks, self._role, self._find_port = ranks, role, find_port
        self.name, self._machine = uuid.uuid4().hex, socket.gethostname()
        self.changed = threading.Condition(threading.RLock())
        self.ended: str | None = None
        self.recipe: Mapping[str, Any] | None = None
        self._own_recipe: Mapping[str, Any] | None = None
        self._past = Past()
        self._told: Round | None = None
        self._is_ready = self._is_finished = self._is_over = self._is_leaving = False
        self._closing = threading.Event()
        self._waiting = 0
        self._closed: str | None = None
        self._broken: str | None = None
        self._unfit: str | None = None
        self._report: Mapping[str, Any] | None = None
        self._asked = 0
        self._line: Line | None = None
        self._preferred: str | None = None
        self._leader: Leader | None = None
        self._leader_address = ""
        self._callers: dict[Line, _Caller] = {}
        self._selector = selectors.DefaultSelector()
        self._servers: list[socket.socket] = []
        self._listen_at(listen(0, only_here=endpoint.only_here))
        self.port = self._servers[0].getsockname()[1]
        if (opened := endpoint.open()) is not None:
            self._listen_at(opened)
        self._threads = [
            threading.Thread(target=run, daemon=True, name=f"gathering-{name}")
            for name, run in (("server", self._serve), ("member", self._follow), ("errands", self._run_errands))
        ]
        for each in self._threads:
            each.start()

    # What the agent asks.

    def wait_for_greeting(self, seconds: float) -> bool:
        """Until a leader has been found, or some time has gone by; whether one has been."""
        with self.changed:
            return self.changed.wait_for(lambda: self._line is not None or self._closed is not None, seconds)

    def join(self, report: Mapping[str, Any] | None = None) -> Round:
        """Wait for the next round.

        Args:
            report: of this node's test, to be held against the others'.

        Raises:
            JobEnded: there is none, as all is done.
            UnfitError: this node fails against the others; they wait until it has been tested again, or has gone.
            UcpError: there is none, and why.
        """
        with self.changed:
            self._is_ready, self._told, self._broken = True, None, None
            self._report, self._unfit = report, None
            self._asked += 1
            self._say(ready=True, after=self._past.number, report=report, asked=self._asked)
            found = self.changed.wait_for(self._find_round)
            if self._unfit is not None:
                raise UnfitError(self._unfit)
            if isinstance(found, Round):
                return found
            if self._is_over:
                raise JobEnded
            raise UcpError(f"the job has no further round: {self._closed or 'this agent has been closed'}.")

    def _find_round(self) -> Round | bool:
        """The next round; True where there is none."""
        is_ended = self._closed or self._is_over or self._closing.is_set() or self._unfit
        return bool(is_ended) or self._told or False

    def count_waiting(self) -> int:
        """Agents for which the workers are to be started again."""
        with self.changed:
            return self._waiting or int(self.ended is not None and self._told is not None)

    def tell_recipe(self, recipe: Mapping[str, Any] | None) -> None:
        """What newcomers are to be told, should this agent lead."""
        with self.changed:
            if recipe != self._own_recipe:
                self._own_recipe = recipe
                self._say(**self._describe_recipe())

    def report_broken(self, reason: str) -> None:
        """This agent's workers of the round cannot go on, and so nobody's can."""
        with self.changed:
            if self._told is not None and self._broken is None:
                self._broken = reason
                self._say(broken=reason, of=self._told.number)  # others may have begun another one by now

    def finish(self) -> None:
        """This agent's workers have done their work: wait for the others'."""
        with self.changed:
            self._is_finished = True
            self._say(finished=True)
            self.changed.wait_for(lambda: self._is_over or self._closed or self._closing.is_set())

    def end_job(self, reason: str) -> None:
        """End the job on all agents; one that has done its work, and may go, ends nobody else's."""
        with self.changed:
            if self._is_over:
                return
            self._closed = self._closed or reason
            if self._leader is not None:  # at once: it may be about to go
                self._leader.close(reason)
            self._say(closed=reason)
            self.changed.notify_all()

    def close(self) -> None:
        """Leave, after :meth:`report_broken` at once for all, else so that the others' workers may save."""
        with self.changed:
            if self._broken is not None:
                self.changed.wait(2 * _TICK)  # a leader's own thread passes it on
            self._is_leaving = True
            if self._leader is not None:
                if self._leader.closed is not None:
                    self._wait_for_others()
                    self.endpoint.release()
                for caller in self._callers.values():
                    if caller.member is not None and caller.member.seat.name != self.name:
                        caller.line.send(leaving=True)
            self._say(bye=True)
        self._release()

    def _release(self) -> None:
        """End the threads and all connections."""
        self._closing.set()
        with self.changed:
            self.changed.notify_all()
        for each in self._threads:
            each.join(timeout=2 * _ANSWER)
        for line in [*self._callers, *([self._line] if self._line else [])]:
            line.close()
        for server in self._servers:
            server.close()
        self._selector.close()

    def _wait_for_others(self) -> None:
        """Until those who were told of the end have gone: they may not have read it yet."""
        until = time.monotonic() + _ANSWER
        while self._leader and set(self._leader.members) - {self.name} and time.monotonic() < until:
            self.changed.wait(_TICK)

    def _say(self, **fields: Any) -> None:
        if self._line is not None:
            self._line.send(**fields)

    # Taking part.

    def _follow(self) -> None:
        while not self._closing.is_set():
            try:
                line = self._find_leader()
                if line is not None:
                    self._listen(line)
            except Exception as error:  # noqa: BLE001 - whatever it is, the agent that waits has to be told
                self._fail(f"{type(error).__name__}: {error}")
                return

    def _fail(self, reason: str) -> None:
        with self.changed:
            self._closed = self._closed or reason
            self._end(self._closed)

    def _listen(self, line: Line) -> None:
        """Hear the leader until its connection ends."""
        with self.changed:
            self._line = line
            self._say(**self._describe_state())
            self.changed.notify_all()
        heard = said = looked = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(line, selectors.EVENT_READ)
            while not self._closing.is_set():
                is_there = bool(selector.select(_TICK))
                now = time.monotonic()
                heard += max(0.0, now - looked - 1)  # this process was stopped: that is nobody's silence
                looked = now
                with self.changed:
                    line.flush()
                    if now > said + self.limits.every:
                        line.send(alive=True)
                        said = now
                    try:
                        told = line.receive() if is_there or line.unread else []
                    except Ended:
                        how = "ended"
                        break
                    except OSError:
                        how = "silent"
                        break
                    if told:
                        heard = now
                    if how := next(filter(None, map(self._take, told)), ""):
                        break
                if now > heard + self.limits.silence:
                    how = "silent"
                    break
            else:
                how = "closing"
        self._lose_leader(line, how)

    def _lose_leader(self, line: Line, how: str) -> None:
        with self.changed:
            self._line = None
            if how == "silent":
                _turn_away(line, "away")
            line.close()
            if how == "closing" or not self._past.seats:
                return
            if how in ("dropped", "sent away"):
                self._end(_ELSEWHERE if how == "sent away" else "this agent has not been heard for too long")
                return
            leader = next((seat for seat in self._past.seats if seat.address == self._leader_address), None)
            if leader is not None and leader.name != self.name:
                (self._past.silent if how == "silent" else self._past.gone).add(leader.name)
            if how == "left":  # its workers have saved, and these may
                self._waiting = 1
            else:
                host = leader.host if leader is not None else self._leader_address
                self._end(f"the agent on {host} {'is lost' if how == 'ended' else 'answers no more'}")

    def _end(self, reason: str) -> None:
        if self._told is not None and not self._is_finished and self.ended is None:
            self.ended = reason
        self.changed.notify_all()

    def _take(self, told: Mapping[str, Any]) -> str:
        """What the leader tells; how its connection ends, where that is what it tells."""
        if "waiting" in told:
            self._waiting = int(told["waiting"])
        if told.get("end") == self._past.number:
            self._end(str(told["reason"]))
        if told.get("unfit") and told["asked"] == self._asked:  # not with a report of before
            self._is_ready, self._unfit = False, str(told["unfit"])
        if told.get("over"):
            self._is_over = True
        if told.get("closed"):
            self._closed = self._closed or str(told["closed"])
            self._end(self._closed)
        if "seats" in told:
            self._begin(told)
        if "see" in told:
            self._preferred = str(told["see"])
        self.changed.notify_all()
        ends = {"see": "sent away", "dropped": "dropped", "leaving": "left"}
        return next((how for word, how in ends.items() if word in told), "")

    def _begin(self, told: Mapping[str, Any]) -> None:
        seats = [Seat(*each) for each in told["seats"]]
        self._past = Past(int(told["round"]), seats)
        self.endpoint.follow()
        if "ranks" not in told:  # this agent takes no part
            self._say(ready=self._is_ready, after=self._past.number)  # it may have had a seat, and not been told
            return
        rank = [seat.name for seat in seats].index(self.name)
        ranks = [(str(role), int(count)) for role, count in told["ranks"]]
        self._told = Round(
            self._past.number, rank, seats, ranks, int(told["port"]), list(told["lost"]), bool(told["changed"])
        )
        self._is_ready, self.ended, self._broken, self._waiting = False, None, None, 0

    # Finding who leads.

    def _find_leader(self) -> Line | None:
        began, patience = time.monotonic(), self.limits.last_call + self.limits.silence
        while not self._closing.is_set():
            waited = time.monotonic() - began
            found = self._look_around(waited)
            if found is not None:
                return found
            if waited > patience:
                patience = float("inf")
                sys.stderr.write(f"ds_ucp torchrun: still waiting: {self._explain_lonely(waited)}.\n")
            if waited > self.limits.join:
                self._fail(self._explain_lonely(waited))
            time.sleep(_TICK)
        return None

    def _explain_lonely(self, waited: float) -> str:
        """Why this agent has found nobody."""
        where = ", ".join(self.endpoint.look()) or "the endpoint"
        seconds = f"for {waited:.0f} s"
        if self.endpoint.is_superseded():
            return f"it goes on without this agent, which has not reached {where} {seconds}. Mend the network between"
        return (
            f"nobody leads it at {where}, {seconds}. Look whether the first agent runs there, with the same --rdzv-id"
        )

    def _look_around(self, waited: float) -> Line | None:
        """Call everybody who may lead, once; lead where it is this agent's turn.

        Who leads already has lost its own connection alone: the others' are still there.
        """
        if self._leader is not None:
            return self._call_itself()
        names = [seat.name for seat in self._past.seats]
        before = self._past.seats[: names.index(self.name)] if self.name in names else self._past.seats
        listed = self.endpoint.look()
        verdicts: dict[str, str] = {}
        for address in [*filter(None, [self._preferred]), *(seat.address for seat in before), *listed]:
            found = self._try(address, verdicts)
            if found is not None:
                self._preferred = None
                return found
        self._preferred = None
        for seat in (each for each in before if each.address in verdicts):
            verdict = verdicts[seat.address]
            if verdict == _REFUSED:
                self._past.gone.add(seat.name)
            elif verdict == _MISSED and waited >= self.limits.silence:
                self._past.silent.add(seat.name)
            elif verdict != _MISSED or seat.name not in self._past.gone | self._past.silent:
                return None  # one that comes first is there, and will find out, or may have stood still for a moment
        return self._lead(waited, listed, verdicts)

    def _lead(self, waited: float, listed: Sequence[str], verdicts: Mapping[str, str]) -> Line | None:
        own = next((seat.address for seat in self._past.seats if seat.name == self.name), None)
        is_missed = any(verdicts.get(address) == _MISSED for address in listed)
        if own is not None and self.endpoint.decides and self._past.silent and waited < 2 * self.limits.every:
            return None  # the other side of a cut, which has its leader, may be the larger one
        if own is None:
            own = self.endpoint.find_own(self.port, waited, self.limits.last_call)
            if own is None or (is_missed and (waited < self.limits.silence or self.endpoint.is_beating())):
                return None
        elif self.endpoint.is_superseded():
            return None  # by another side of a cut
        with self.changed:  # who finds this agent at the endpoint at once is not told that it does not lead
            if not self.endpoint.claim(own):
                return None
            seat = Seat(self.name, own, self._machine)
            claim = partial(self._claim_again, own) if self.endpoint.decides else None
            past = Past(self._past.number, self._past.seats, set(self._past.gone), set(self._past.silent))
            self._leader_address = own
            self._leader = Leader(seat, self.limits, past, time.monotonic(), self._find_port, claim)
        return self._call_itself()

    def _call_itself(self) -> Line | None:
        found = self._call(join_address("127.0.0.1", self.port))
        return found if isinstance(found, Line) else None

    def _claim_again(self, own: str) -> bool:
        """Whether a leader that has lost sight of others may go on."""
        return not self.endpoint.is_superseded() and self.endpoint.claim(own)

    def _try(self, address: str, verdicts: dict[str, str]) -> Line | None:
        """Call an address, and where that names another one."""
        for _ in range(3):
            if address in verdicts or not address:
                return None
            found = self._call(address)
            if isinstance(found, Line):
                self._leader_address = address
                return found
            verdicts[address] = found
            if found in (_MISSED, _REFUSED, _BUSY):
                return None
            address = found
        return None

    def _call(self, address: str) -> Line | str:
        """Call an agent: a connection if it leads, else what came of it."""
        try:
            line = call(address, self._key, _CALL, **self._describe())
        except ConnectionRefusedError:
            return _REFUSED
        except OSError:
            return _MISSED
        until = time.monotonic() + _ANSWER
        try:
            while time.monotonic() < until and not self._closing.is_set():
                if said := line.receive():
                    first, *line.unread = said
                    if "welcome" in first:
                        self.recipe = first["recipe"]
                        return line
                    line.close()
                    seat = next((each for each in self._past.seats if each.address == address), None)
                    has_gone = seat is not None and seat.name != first.get("name")  # another one listens there
                    return str(first.get("see") or (_REFUSED if has_gone else _BUSY))
                line.flush()
                time.sleep(_TICK / 10)
        except Ended:
            line.close()
            return _REFUSED  # whoever is there has no part in this
        except OSError:
            pass
        _turn_away(line, "later")
        line.close()
        return _MISSED

    def _describe(self) -> dict[str, Any]:
        with self.changed:
            seats = [[seat.name, seat.address, seat.host] for seat in self._past.seats]
            who = {"hello": True, "name": self.name, "host": self._machine, "at": self._host, "port": self.port}
            what = {"ranks": self._ranks, "role": self._role, "round": self._past.number, "seats": seats}
            # It says so when it has read the answer: a round with one that has given the call up would have to end.
            return {**who, **what, **self._describe_state(), "ready": False}

    def _describe_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"ready": self._is_ready, "after": self._past.number}
        state.update(finished=self._is_finished, **self._describe_recipe())
        if self._report is not None:
            state.update(report=self._report, asked=self._asked)
        if self._told is not None and self._broken is not None:
            state.update(broken=self._broken, of=self._told.number)
        if self._closed is not None:
            state.update(closed=self._closed)
        return state

    def _describe_recipe(self) -> dict[str, Any]:
        return {"recipe": self._own_recipe} if self._leader is not None and self._own_recipe is not None else {}

    # Being called.

    def _listen_at(self, server: socket.socket) -> None:
        server.setblocking(False)
        self._servers.append(server)
        self._selector.register(server, selectors.EVENT_READ)

    def _serve(self) -> None:
        self._looked = time.monotonic()
        while not self._closing.is_set():
            events = self._selector.select(_TICK)
            with self.changed:
                try:
                    self._serve_once([key.fileobj for key, _ in events], time.monotonic())
                except Exception as error:  # noqa: BLE001 - as in the other thread
                    self._fail(f"{type(error).__name__}: {error}")
                    return

    def _serve_once(self, speaking: Sequence[Any], now: float) -> None:
        for each in speaking:
            if isinstance(each, Line):
                self._hear(self._callers.get(each), now)
            else:
                self._accept(each, now)
        self._look_after(now, stopped=max(0.0, now - self._looked - 1))
        self._looked = now

    def _look_after(self, now: float, *, stopped: float) -> None:
        """Drop who has nothing to say, and let the leader think.

        Args:
            stopped: seconds for which this process heard nobody.
        """
        strangers = [each for each in self._callers.values() if each.member is None]
        for at, caller in enumerate(strangers):
            if now > caller.since + _GREETING or len(strangers) - at > _STRANGERS:
                self._drop(caller, now, "left")
        if self._leader is None:
            return
        for caller in list(self._callers.values()):
            caller.line.flush()
            if caller.member is not None:
                caller.member.heard += stopped
                if now > caller.member.heard + self.limits.silence:
                    caller.line.send(dropped="it has said nothing for too long")
                    self._drop(caller, now, "silent")
        self._leader.tick(now)

    def _accept(self, server: socket.socket, now: float) -> None:
        with contextlib.suppress(OSError):
            connection, peer = server.accept()
            line = Line(connection, has_key=True)
            self._callers[line] = _Caller(line, peer[0], now)
            self._selector.register(line, selectors.EVENT_READ)

    def _drop(self, caller: _Caller, now: float, how: str) -> None:
        if self._callers.pop(caller.line, None) is None:
            return
        self._selector.unregister(caller.line)
        caller.line.close()
        if self._leader is not None and caller.member is not None:
            self._leader.lose(caller.member, now, how)
        self.changed.notify_all()

    def _hear(self, caller: _Caller | None, now: float) -> None:
        if caller is None:
            return
        try:
            told = caller.line.receive()
            if caller.line.key is not None and caller.line.key != self._key:
                raise Ended
            for each in told:
                if not self._answer(caller, each, now):
                    self._drop(caller, now, "left")
                    return
        except Ended:
            self._drop(caller, now, "ended")
        except OSError:
            self._drop(caller, now, "silent")
        except (KeyError, TypeError, ValueError):
            self._drop(caller, now, "left")  # a stranger's words

    def _answer(self, caller: _Caller, told: Mapping[str, Any], now: float) -> bool:
        """Answer a line; False where the connection has no further use."""
        if caller.member is not None and self._leader is not None:
            self._leader.hear(caller.member, told, now)
            return not FAREWELLS.keys() & told.keys()
        if told.get("join"):
            self._meet(str(told["join"]), int(told["round"]))
            return False
        if not told.get("hello"):
            return False
        if self._leader is None or self._is_leaving:
            see = self._leader_address if self._line is not None and not self._is_leaving else None
            caller.line.send(see=see, name=self.name)
            return False
        # Which address the others are to know: the one that it names, or the one from which it calls.
        host = told["at"] or (
            caller.host if not is_loopback(caller.host) else split_address(self._leader.own.address)[0]
        )
        address = self._leader.own.address if told["name"] == self.name else join_address(host, int(told["port"]))
        hello = {**told, "address": address}
        caller.member = self._leader.greet(hello, caller.line, str(told["host"]), now)
        return True

    def _meet(self, address: str, number: int) -> None:
        """Another leader calls: whoever has trained goes on, and the other one comes to it."""
        if self._leader is not None and self._leader.past.number < number:
            self._step_down(address)

    def _step_down(self, address: str) -> None:
        self._leader, self._preferred = None, address
        for caller in list(self._callers.values()):
            if caller.member is not None:
                caller.line.send(see=address)
                self._drop(caller, time.monotonic(), "left")

    # What a leader does beside.

    def _run_errands(self) -> None:
        try:
            self._run_errands_until_closed()
        except Exception as error:  # noqa: BLE001 - as in the other threads: without signs of life another one may lead
            self._fail(f"{type(error).__name__}: {error}")

    def _run_errands_until_closed(self) -> None:
        beaten = time.monotonic()
        while not self._closing.wait(_ERRANDS):
            with self.changed:
                if (opened := self.endpoint.open()) is not None:  # whose it was has gone
                    self._listen_at(opened)
                leader = self._leader
                if leader is None:
                    continue
                number, own = leader.past.number, leader.own.address
                missing = [] if leader.is_running else leader.list_missing()
            for address in self.endpoint.look() if number else []:
                if address != own and not self.endpoint.decides:
                    self._invite(address, own, number)
            for seat in missing:
                self._ask_after(leader, seat)
            if time.monotonic() > beaten + min(self.limits.every, 1.0):
                beaten = time.monotonic()
                if not self.endpoint.beat():
                    with self.changed:
                        self._step_down(next(iter(self.endpoint.look()), ""))

    def _invite(self, address: str, own: str, number: int) -> None:
        """Tell who has begun anew at the endpoint where the job is."""
        with contextlib.suppress(OSError):
            call(address, self._key, _CALL, join=own, round=number).close()

    def _ask_after(self, leader: Leader, seat: Seat) -> None:
        """Whether an agent that has not come yet is alive: one whose machine says no is not."""
        try:
            socket.create_connection(split_address(seat.address), _CALL).close()
        except ConnectionRefusedError:
            with self.changed:
                leader.past.gone.add(seat.name)
        except OSError:
            return


def _turn_away(line: Line, word: str) -> None:
    """Tell who does not answer, before the connection ends, that this agent has not: it may have been stopped, and hear
    this when it goes on."""
    line.send(**{word: True})
