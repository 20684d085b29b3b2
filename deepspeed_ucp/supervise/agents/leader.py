"""Who takes part in a round, decided by the agent that leads: no sockets, no threads, and the time is told.

A round is complete when every agent of the last one is either ready or lost, and there are enough; the first one waits
for more, as there is no last one that says how many will come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..preflight.judging import Report, judge

_SETTLE = 0.25
"""Seconds that a new leader gives those who waited at the one before, where there is room for them."""

FAREWELLS = {"bye": "left", "away": "silent", "later": "later"}
"""What a member says before it ends its connection, and how it is lost then: the second one goes on elsewhere, the
third one has not been answered in time, and calls again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How agents come together.

    Attributes:
        least, most: agents of a round.
        every, times: seconds between two signs of life, and how many may be missing.
        last_call: seconds that the first round waits for more agents when there are enough.
        join: seconds for enough agents to come.
        opening: seconds before the first round of an agent that may be a head that comes back: those that went on
            without it tell it so in that time.
    """

    least: int
    most: int
    every: float = 3.0
    times: int = 4
    last_call: float = 10.0
    join: float = 600.0
    opening: float = 0.0

    @property
    def silence(self) -> float:
        """Seconds after which an agent that says nothing is lost."""
        return self.every * self.times


@dataclass(frozen=True, slots=True)
class Seat:
    """An agent's place in a round: its name, unique for ever, the address at which it would lead, and its machine."""

    name: str
    address: str
    host: str = ""


class Listener(Protocol):
    """Whom a leader tells something."""

    def send(self, **fields: Any) -> None:
        """Tell it, at once or later."""


@dataclass(slots=True)
class Member:
    """An agent that is connected.

    Attributes:
        ranks, role: that it starts.
        since, heard: when it came, and when it last said something (monotonic seconds).
        ready_since: from when on it waits for a round; None: it does not.
        is_finished: its workers have done all there was to do; ``may_end``: it has been told that it may go.
        report: of the test of its node, where it had one; ``asked``: for which round it was made, as the agent counts.
    """

    seat: Seat
    line: Listener
    ranks: int
    role: str
    since: float
    heard: float
    ready_since: float | None = None
    is_finished: bool = False
    may_end: bool = False
    report: Report | None = None
    asked: int = 0


@dataclass(slots=True)
class Past:
    """What is known of the last round by whom begins to lead.

    Attributes:
        number: of the round; 0: there was none.
        seats: who took part, in the order of ranks.
        gone, silent: names of those that have ended, and that do not answer.
    """

    number: int = 0
    seats: Sequence[Seat] = ()
    gone: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(seat.name for seat in self.seats)


class Leader:
    """Brings agents together.

    Args:
        own: its own agent's seat, which is the first one of every round.
        find_port: a free port of this machine, for the workers' store.
        claim: says whether this side may go on after others have fallen silent, where something decides that; None:
            the majority does.
    """

    def __init__(
        self,
        own: Seat,
        limits: Limits,
        past: Past,
        now: float,
        find_port: Callable[[], int],
        claim: Callable[[], bool] | None = None,
    ) -> None:
        self.own, self.limits, self.past = own, limits, past
        self.members: dict[str, Member] = {}
        self.recipe: Any = None
        self.closed: str | None = None
        self._find_port, self._claim = find_port, claim
        self._since = self._opened = self._said = now
        self._missing_until = now + limits.silence
        self._enough_since: float | None = None
        self._running, self._graceful = False, True
        self._waiting = 0
        self._claim_after: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether a round's workers run."""
        return self._running

    def greet(self, hello: Mapping[str, Any], line: Listener, host: str, now: float) -> Member:
        """A new connection's first words.

        Args:
            host: from where it called.
        """
        seat = Seat(str(hello["name"]), str(hello["address"]), host)
        former = self.members.get(seat.name)
        member = Member(seat, line, int(hello["ranks"]), str(hello["role"]), now, now)
        if former is not None:
            former.line.send(dropped="another connection has come in its place")
        self.members[seat.name] = member
        self.past.gone.discard(seat.name)
        self.past.silent.discard(seat.name)
        if int(hello["round"]) > self.past.number and not self._running:  # of a job that has lost its leader
            seats = [Seat(*each) for each in hello["seats"]]
            self.past = Past(int(hello["round"]), seats)
            self._missing_until = now + self.limits.silence
            known = [each for each in self.members.values() if each is not member]
            self._tell(known, seats=self._list_seats(), round=self.past.number)  # they may not have been told either
        line.send(welcome=self.own.name, recipe=self.recipe)
        if not self._has_seat(member) or int(hello["round"]) < self.past.number:
            line.send(seats=self._list_seats(), round=self.past.number)
        if self.closed is not None:
            line.send(closed=self.closed)
        self.hear(member, hello, now)
        return member

    def hear(self, member: Member, told: Mapping[str, Any], now: float) -> None:
        """What a member tells."""
        member.heard = now
        if "recipe" in told and member.seat.name == self.own.name:
            self.recipe = told["recipe"]
        if told.get("broken") is not None and told.get("of") == self.past.number:
            self._break(f"{told['broken']}")
        if told.get("finished"):
            member.is_finished, member.ready_since = True, None
        if told.get("report") is not None:
            member.report, member.asked = Report.parse(told["report"]), int(told["asked"])
        if told.get("ready") and member.ready_since is None:
            has_seat = self._has_seat(member)
            if not has_seat or told["after"] == self.past.number:  # else it has been told of a round meanwhile
                member.ready_since = now
            if has_seat and member.ready_since is not None:
                self._stop(now)
        if told.get("closed") is not None:
            self.close(str(told["closed"]))
        for word in FAREWELLS.keys() & told.keys():
            self.lose(member, now, FAREWELLS[word])

    def lose(self, member: Member, now: float, how: str) -> None:
        """A member has gone.

        Args:
            how: ``left`` by its own will, ``ended`` with its process, ``silent``: nobody knows, or ``later``: it is
                missing until it calls again.
        """
        name = member.seat.name
        if self.members.get(name) is not member:
            return
        del self.members[name]
        if how != "later":
            (self.past.silent if how == "silent" else self.past.gone).add(name)
        if not self._has_seat(member):
            return
        if self._running and how != "left" and not member.is_finished:
            said = "answers no more" if how in ("silent", "later") else "is lost"
            self._break(f"the agent on {member.seat.host} {said}")
        if not member.is_finished:
            self._stop(now)

    def close(self, reason: str) -> None:
        """End the job for all."""
        if self.closed is None:
            self.closed = reason
            self._tell(self.members.values(), closed=reason)

    def list_missing(self) -> list[Seat]:
        """Agents of the last round of which nothing is known."""
        known = {*self.members, *self.past.gone, *self.past.silent}
        return [seat for seat in self.past.seats if seat.name not in known]

    def tick(self, now: float) -> None:
        """Do what the time has come for."""
        if now > self._said + self.limits.every:
            self._said = now
            self._tell(self.members.values(), alive=True)
        if self.closed is not None:
            return
        self._let_finished_go()
        if not self._running:
            self._gather(now)
        self._tell_waiting(now)

    def _let_finished_go(self) -> None:
        """Agents that have done their work wait for the others of the round, as long as these work."""
        taking_part = [each for each in self.members.values() if self._has_seat(each)]
        finished = [each for each in taking_part if each.is_finished]
        is_over = bool(finished) and len(finished) == len(taking_part)
        if is_over or not self._running:
            self._tell([each for each in finished if not each.may_end], over=True)
            for each in finished:
                each.may_end = True
        if is_over:
            outside = [each for each in self.members.values() if not self._has_seat(each)]
            self._tell(outside, over=True)
            self.closed = "the job has ended"

    def _list_seats(self) -> list[list[str]]:
        return [[seat.name, seat.address, seat.host] for seat in self.past.seats]

    def _has_seat(self, member: Member) -> bool:
        return member.seat.name in self.past.names

    def _break(self, reason: str) -> None:
        """The workers of the round cannot go on."""
        if self._running:
            self._running = False
            taking_part = [each for each in self.members.values() if self._has_seat(each)]
            self._tell(taking_part, end=self.past.number, reason=reason)

    def _stop(self, now: float) -> None:
        """The round is over, with its workers or before they are."""
        self._running, self._since = False, now

    def _tell(self, members: Iterable[Member], **fields: Any) -> None:
        for each in list(members):
            each.line.send(**fields)

    def _tell_waiting(self, now: float) -> None:
        """Tell for how many agents the workers are to be started again: all that may come soon come at once."""
        here = [each for each in self.members.values() if self._has_seat(each)]
        outside = [each for each in self.members.values() if not self._has_seat(each)]
        ready = [each.ready_since for each in outside if each.ready_since is not None]
        seats = self.limits.most - len(here)
        count = min(len(ready), seats)
        may_come = len(ready) < min(len(outside), seats)
        is_ending = any(each.is_finished for each in here)
        if self._running and count and (is_ending or (may_come and now < min(ready) + self.limits.last_call)):
            count = 0
        if not self._running and self.past.number:
            count += 1  # of the round's own
        if count != self._waiting:
            self._waiting = count
            self._tell(here, waiting=count)

    def _gather(self, now: float) -> None:
        """Begin the next round if everybody is here."""
        here = [self.members[seat.name] for seat in self.past.seats if seat.name in self.members]
        here = [each for each in here if not each.is_finished]
        own = self.members.get(self.own.name)
        if own is None or own.ready_since is None or any(each.ready_since is None for each in here):
            return
        if self.list_missing() and now < self._missing_until:
            return
        if not self._may_go_on(now):
            return
        come = [each for each in self.members.values() if each not in here and each.ready_since is not None]
        chosen = sorted([*here, *come], key=lambda each: each is not own)[: self.limits.most]
        if len(chosen) < self.limits.least:
            self._enough_since = None
            if now > self._since + self.limits.join:
                self.close(
                    f"{len(chosen)} agents came in {self.limits.join:.0f} s, and {self.limits.least} are needed. Start "
                    "the missing ones, or let fewer be enough: --nnodes MIN:MAX"
                )
            return
        if self.past.number == 0 and not self._is_time(len(chosen), now):
            return
        if len(chosen) < self.limits.most and now < self._opened + _SETTLE:
            return
        if not self._send_back(chosen):
            self._begin(chosen)

    def _send_back(self, chosen: Sequence[Member]) -> bool:
        """Whether the nodes of some fail against those of the others: these test them again, or leave."""
        reports = {each.seat.name: each.report for each in chosen if each.report is not None}
        faults = judge(reports, {each.seat.name: each.ranks for each in chosen}).faults
        for each in chosen:
            if found := faults.get(each.seat.name):
                each.ready_since = None
                each.line.send(unfit="; ".join(found), asked=each.asked)
        return bool(faults)

    def _is_time(self, count: int, now: float) -> bool:
        """Whether the first round may begin."""
        self._enough_since = now if self._enough_since is None else self._enough_since
        if now < self._opened + self.limits.opening:
            return False
        preparing = [each for each in self.members.values() if each.ready_since is None]
        if any(now < each.since + self.limits.join for each in preparing) and count < self.limits.most:
            return False
        return count == self.limits.most or now >= self._enough_since + self.limits.last_call

    def _may_go_on(self, now: float) -> bool:
        """Whether nobody else may be going on: agents that have fallen silent may be alive behind a cut."""
        voters = [seat.name for seat in self.past.seats if seat.name not in self.past.gone]
        left = [name for name in voters if name in self.members]
        if len(left) == len(voters):
            return True
        is_major = 2 * len(left) > len(voters) or (2 * len(left) == len(voters) and voters[0] in self.members)
        if self._claim is not None:
            if self._claim_after is None:  # the larger side is to be the first, one that needs a new leader the second
                self._claim_after = now + (0 if is_major else 4 * self.limits.every)
            may = now >= self._claim_after and self._claim()
            if may:  # whoever else is left is told so by what decides
                self.past.gone |= set(voters) - set(left)
            return may
        if not is_major:
            hosts = ", ".join(seat.host for seat in self.past.seats if seat.name in set(voters) - set(left))
            self.close(
                f"{len(left)} of {len(voters)} agents are left here; those on {hosts} answer no more, and may be "
                "training on behind a cut network: two jobs would write into the same folder. Start these agents again "
                "when the others have ended. With an --rdzv-endpoint that is a file of a shared folder one side goes on"
            )
        return is_major

    def _begin(self, chosen: Sequence[Member]) -> None:
        seats = [each.seat for each in chosen]
        changed = {seat.name for seat in seats} != {seat.name for seat in self.past.seats}
        lost = [seat.host for seat in self.past.seats if seat.name not in self.members]
        former, self._claim_after = self.past.number, None
        self.past = Past(former + 1, seats)
        self._running, self._waiting, self._enough_since = True, 0, None
        port = self._find_port()
        table = self._list_seats()
        self._tell((each for each in self.members.values() if each not in chosen), round=self.past.number, seats=table)
        ranks = [[each.role, each.ranks] for each in chosen]
        for each in chosen:
            each.ready_since = None
            each.line.send(
                round=self.past.number, seats=table, ranks=ranks, port=port, lost=lost, changed=bool(former) and changed
            )
