"""Agents that gather: rounds, losses, newcomers, and who may go on behind a cut network; threads of one process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.errors import ConfigError, UcpError
from deepspeed_ucp.supervise.agents import endpoint, gathering
from deepspeed_ucp.supervise.agents.endpoint import Addresses, Endpoint, SharedFile
from deepspeed_ucp.supervise.agents.gathering import Gathering, JobEnded, Round
from deepspeed_ucp.supervise.agents.leader import Leader, Limits, Past, Seat
from deepspeed_ucp.supervise.agents.lines import Line
from tests.supervise.standins import find_port, wait_until

QUICK = {"every": 0.4, "times": 1000, "last_call": 600.0, "join": 600.0}
"""A machine with much to do is nobody's silence, and who comes late is waited for: longer than a test may take."""

MISSED = 30
"""Signs of life that may be missing where silence is the matter: twelve seconds. Such cases go side by side."""


class Agent:
    """An agent whose workers are nothing: it waits for a round whenever it is told to."""

    def __init__(self, endpoint: Endpoint, least: int, most: int, **limits: float) -> None:
        self.gathering = Gathering(endpoint, Limits(least, most, **{**QUICK, **limits}), "job")  # type: ignore[arg-type]
        self.rounds = list[Round]()
        self.asked = 0
        self.error: Exception | None = None

    def join(self) -> Agent:
        """Wait for a round, in a thread."""
        self.asked += 1
        threading.Thread(target=self._join, daemon=True).start()
        return self

    def _join(self) -> None:
        try:
            self.rounds.append(self.gathering.join())
        except (UcpError, JobEnded) as error:
            self.gathering.close()
            self.error = error

    def wait(self, count: int) -> Round:
        """Its round number ``count``, as it counts them."""
        wait_until(lambda: len(self.rounds) >= count or self.error)
        assert self.error is None
        return self.rounds[count - 1]

    def die(self) -> None:
        """End as a process does that is killed: all connections end at once, and nothing is said."""
        self.gathering._release()


Make = Callable[..., Agent]


@pytest.fixture
def made() -> Iterator[list[Agent]]:
    agents: list[Agent] = []
    yield agents
    for each in agents:
        each.die()


ENDPOINTS = ["address", "file"]


def make_at(kind: str, made: list[Agent], folder: Path) -> Make:
    """What makes agents of one job."""
    address, path = f"localhost:{find_port()}", folder / f"endpoint-{len(made)}"

    def build(least: int = 1, most: int = 2, **limits: float) -> Agent:
        endpoint: Endpoint = (
            Addresses(address) if kind == "address" else SharedFile(str(path), "job", silence=30, host="127.0.0.1")
        )
        made.append(agent := Agent(endpoint, least, most, **limits))
        return agent

    return build


@pytest.fixture(params=ENDPOINTS)
def make(request: pytest.FixtureRequest, made: list[Agent], tmp_path: Path) -> Make:
    return make_at(request.param, made, tmp_path)


def start(make: Make, count: int, **limits: float) -> list[Agent]:
    """Agents in a first round, in the order of their ranks."""
    agents = [make(most=count, **limits).join() for _ in range(count)]
    return sorted(agents, key=lambda each: each.wait(1).rank)


def go_on(agents: list[Agent]) -> list[Round]:
    """All of them into the next round."""
    for each in agents:
        each.join()
    return [each.wait(each.asked) for each in agents]


def is_ready(leader: Leader, agent: Agent) -> bool:
    member = leader.members.get(agent.gathering.name)
    return member is not None and member.ready_since is not None


def test_agents_that_are_all_there_begin_at_once(make: Make) -> None:
    agents = start(make, 3)  # the last call would take longer than a test may
    assert [each.wait(1).rank for each in agents] == [0, 1, 2]
    assert len({tuple(seat.name for seat in each.wait(1).seats) for each in agents}) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_a_lost_agent_is_noticed_by_its_connection(make: Make, which: int) -> None:
    agents = start(make, 3)
    lost = agents.pop(which)
    lost.die()
    wait_until(lambda: all(each.gathering.ended for each in agents))
    rounds = go_on(agents)  # after a hundred seconds of silence it would not be in time
    assert sorted(each.rank for each in rounds) == [0, 1]
    assert all(each.changed and len(each.lost) == 1 for each in rounds)
    newcomer = make(most=3, opening=2.0).join()  # finds whoever leads by now
    wait_until(lambda: all(each.gathering.count_waiting() == 1 for each in agents))
    assert len(go_on(agents)[0].seats) == len(newcomer.wait(1).seats) == 3


def test_a_spare_waits_until_it_is_needed(make: Make) -> None:
    agents = start(make, 2)
    spare = make(most=2, opening=2.0).join()
    wait_until(lambda: spare.gathering._line)
    patient = spare.gathering.limits
    spare.gathering.limits = dataclasses.replace(patient, join=0.0)  # it has found who leads
    time.sleep(0.5)
    assert [each.gathering.count_waiting() for each in agents] == [0, 0] and not spare.rounds and not spare.error
    spare.gathering.limits = patient
    agents.pop(0).die()
    wait_until(lambda: agents[0].gathering.ended)
    wait_until(lambda: (leader := agents[0].gathering._leader) and is_ready(leader, spare))
    assert len(go_on(agents)[0].seats) == len(spare.wait(1).seats) == 2


def test_workers_that_cannot_go_on_end_everywhere_and_the_same_agents_begin_again(make: Make) -> None:
    agents = start(make, 2)
    agents[1].gathering.report_broken("rank 3 has gone")
    wait_until(lambda: all(each.gathering.ended == "rank 3 has gone" for each in agents))
    rounds = go_on(agents)
    assert [each.rank for each in rounds] == [0, 1] and not any(each.changed for each in rounds)
    assert [each.gathering.ended for each in agents] == [None, None]


@pytest.mark.parametrize("which", [0, 1])
def test_an_agent_that_is_told_to_go_lets_the_others_save(make: Make, which: int) -> None:
    agents = start(make, 2)
    agents[which].gathering.close()
    left = [agents[1 - which]]
    wait_until(lambda: left[0].gathering.count_waiting() == 1)
    assert left[0].gathering.ended is None
    assert len(go_on(left)[0].seats) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_an_agent_whose_workers_are_done_waits_for_the_others(make: Make, which: int) -> None:
    agents = start(make, 2)
    spare = make(most=2).join()
    wait_until(lambda: spare.gathering._line)
    done = threading.Event()
    first, last = agents[which].gathering, agents[1 - which].gathering
    threading.Thread(target=lambda: (first.finish(), first.close(), done.set()), daemon=True).start()
    assert not done.wait(0.3)
    assert last.ended is None and last.count_waiting() == 0
    last.finish()
    last.close()
    wait_until(done.is_set)
    wait_until(lambda: spare.error)
    assert isinstance(spare.error, JobEnded)


@pytest.mark.parametrize("which", [0, 1])
def test_an_agent_that_is_done_leaves_those_that_have_to_begin_again(make: Make, which: int) -> None:
    agents = start(make, 2)
    done, left = agents[which].gathering, agents[1 - which]
    ending = threading.Thread(target=done.finish, daemon=True)
    ending.start()
    left.gathering.report_broken("rank 1 has gone")
    wait_until(lambda: not ending.is_alive())
    done.end_job("which it has not")
    done.close()
    assert len(go_on([left])[0].seats) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_a_job_that_is_given_up_ends_for_all(make: Make, which: int) -> None:
    agents = start(make, 2)
    left = agents[1 - which]
    ended = agents[which].gathering
    ended.end_job("it failed thrice")
    closing = threading.Thread(target=ended.close, daemon=True)
    closing.start()
    wait_until(lambda: left.gathering.ended)
    left.join()
    wait_until(lambda: left.error)
    assert "it failed thrice" in str(left.error)
    wait_until(lambda: not closing.is_alive())


def test_too_few_say_so(make: Make) -> None:
    agent = make(least=2, most=3).join()
    wait_until(lambda: agent.gathering._line and agent.gathering._leader)
    leader: Any = agent.gathering._leader
    leader.limits = dataclasses.replace(leader.limits, join=0.4)
    wait_until(lambda: agent.error)
    assert "1 agents came" in str(agent.error) and "--nnodes MIN:MAX" in str(agent.error)


class Cut:
    """A network that loses everything between two sides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, one: list[Agent], other: list[Agent]) -> None:
        self.sides = [[each.gathering for each in side] for side in (one, other)]
        self.ports = [
            {str(server.getsockname()[1]) for each in side for server in each._servers} for side in self.sides
        ]
        receive, flush, former = Line.receive, Line.flush, gathering.call

        def call(address: str, key: str, timeout: float, **fields: Any) -> Line:
            here = [fields.get("name", fields.get("join")) in self._list_names(side) for side in self.sides]
            if any(is_in and address.rpartition(":")[2] in self.ports[1 - at] for at, is_in in enumerate(here)):
                raise TimeoutError
            return former(address, key, timeout, **fields)

        monkeypatch.setattr(Line, "receive", lambda line: [] if self._crosses(line) else receive(line))
        monkeypatch.setattr(Line, "flush", lambda line: None if self._crosses(line) else flush(line))
        monkeypatch.setattr(gathering, "call", call)

    @staticmethod
    def _list_names(side: list[Gathering]) -> set[str]:
        return {name for each in side for name in (each.name, f"localhost:{each.port}", f"127.0.0.1:{each.port}")}

    def _crosses(self, line: Line) -> bool:
        """Whether its ends belong to both sides: who called has it as its own, who was called knows its member."""
        for at, side in enumerate(self.sides):
            other = {each.name for each in self.sides[1 - at]}
            for each in side:
                caller = each._callers.get(line)
                if caller is not None and caller.member is not None and caller.member.seat.name in other:
                    return True
                if each._line is line and each._leader_address.rpartition(":")[2] in self.ports[1 - at]:
                    return True
        return False


def test_one_side_of_a_cut_goes_on(
    made: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    jobs = []
    for kind, (one, other) in itertools.product(ENDPOINTS, [(1, 2), (2, 1), (1, 1)]):
        agents = start(make_at(kind, made, tmp_path), one + other, times=MISSED)
        jobs.append((kind, agents[:one], agents[one:]))
    for _, one, other in jobs:
        Cut(monkeypatch, one, other)
    wait_until(lambda: all(each.gathering.ended for each in made))
    for each in made:
        each.join()
    for kind, *sides in jobs:
        wait_until(lambda: any(all(len(each.rounds) == 2 for each in side) for side in sides))  # noqa: B023
        if kind == "address":
            wait_until(lambda: any(all(each.error for each in side) for side in sides))  # noqa: B023
    time.sleep(1.5)
    for kind, one, other in jobs:
        with subtests.test(f"{len(one)} and {len(other)} at an endpoint that is an {kind}"):
            winner, loser = (one, other) if len(one[0].rounds) == 2 else (other, one)
            assert {len(each.rounds[-1].seats) for each in winner} == {len(winner)} and len(winner) >= len(loser)
            assert [each.gathering.ended for each in winner] == [None] * len(winner)
            assert all(len(each.rounds) == 1 for each in loser)
            if kind == "address":
                assert all("behind a cut network" in str(each.error) for each in loser)


def test_a_leader_that_was_stopped_does_not_take_others_for_dead(
    made: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """Who has turned away from it is alive, and may be training."""
    monkeypatch.setattr(gathering, "_ANSWER", 1.0)
    cases = list(itertools.product(ENDPOINTS, [False, True]))  # the others have asked for a round, or not
    jobs = [start(make_at(kind, made, tmp_path), 3, times=MISSED) for kind, _ in cases]
    with contextlib.ExitStack() as stopped:
        for head, *_ in jobs:
            stopped.enter_context(head.gathering.changed)  # nothing of it can do anything
        for (_, is_asked), (_, *others) in zip(cases, jobs, strict=True):
            wait_until(lambda: all(each.gathering.ended for each in others))  # noqa: B023
            wait_until(lambda: all(each.gathering._line is not None for each in others))  # noqa: B023 - another leader
            if is_asked:
                assert len(go_on(others)[0].seats) == 2
    for head, *_ in jobs:
        wait_until(lambda: head.gathering.ended)  # noqa: B023
        head.join()
    time.sleep(1.0)
    for (kind, is_asked), (head, *others) in zip(cases, jobs, strict=True):
        with subtests.test(f"{kind}, {'asked' if is_asked else 'not asked'}"):
            assert len(head.rounds) == 1
            if not is_asked:
                assert len(go_on(others)[0].seats) >= 2
                wait_until(lambda: head.error or len(head.rounds) == 2)  # noqa: B023
            assert not head.error or "behind a cut network" in str(head.error)


def test_who_stands_still_for_a_moment_when_the_leader_is_lost_is_waited_for(
    made: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the agents that come after it take it for lost, and end: they are the smaller side. Nor is one that has
    taken the endpoint's address meanwhile the leader that was there."""
    monkeypatch.setattr(gathering, "_ANSWER", 1.0)
    head, still, last = start(make_at("address", made, tmp_path), 3)
    turned_away, former = threading.Event(), gathering._turn_away
    monkeypatch.setattr(gathering, "_turn_away", lambda *given: (former(*given), turned_away.set()))
    with still.gathering.changed:
        head.die()
        assert turned_away.wait(120)
        wait_until(lambda: len(last.gathering._servers) == 2)  # it has the address that was the first one's
    assert [len(each.seats) for each in go_on([still, last])] == [2, 2]


def test_a_leader_that_does_not_hear_itself_in_time_still_has_those_who_have_come(
    made: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, own, other = start(make_at("address", made, tmp_path), 3)
    call, missed = Gathering._call, iter("12")

    def miss(self: Gathering, address: str) -> Line | str:
        if self is own.gathering and self._leader is not None and next(missed, None):
            wait_until(lambda: other.gathering._line is not None)
            return "missed"
        return call(self, address)

    monkeypatch.setattr(Gathering, "_call", miss)
    head.die()
    wait_until(lambda: own.gathering.ended and other.gathering.ended)
    assert [len(each.seats) for each in go_on([own, other])] == [2, 2]


def test_a_call_that_is_given_up_brings_nobody_into_a_round(made: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """The round would have to end at once."""
    monkeypatch.setattr(gathering, "_ANSWER", 1.0)
    address, turned_away = f"localhost:{find_port()}", threading.Event()
    greet, former = Leader.greet, gathering._turn_away

    def greet_late(leader: Leader, hello: Any, *given: Any) -> Any:
        if hello["name"] == other.gathering.name:
            turned_away.wait(120)
        return greet(leader, hello, *given)

    monkeypatch.setattr(
        gathering, "_turn_away", lambda line, word: (former(line, word), line.close(), turned_away.set())
    )
    monkeypatch.setattr(Leader, "greet", greet_late)
    made.append(other := Agent(Addresses(address, is_host=False), 1, 2).join())  # ready before there is a leader
    made.append(head := Agent(Addresses(address), 1, 2).join())
    assert len(head.wait(1).seats) == len(other.wait(1).seats) == 2
    assert [each.gathering.ended for each in made] == [None, None]


def test_who_has_no_part_in_a_round_ends_none(made: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers, of the round before, are found to hang when it has been told that the others have gone on."""
    (agent,) = start(make_at("address", made, Path()), 1)
    gathering, said = agent.gathering, list[dict[str, Any]]()
    with gathering.changed:
        monkeypatch.setattr(gathering, "_say", lambda **told: said.append(told))
        gathering._begin({"round": 2, "seats": [["another", "127.0.0.1:1", "there"]]})
        gathering.report_broken("they hang")
        state = gathering._describe_state()
    assert [told["of"] for told in (*said, state) if "broken" in told] == [1, 1]


def test_a_head_that_comes_back_finds_the_job_that_went_on_without_it(made: list[Agent]) -> None:
    address = f"localhost:{find_port()}"
    head = Agent(Addresses(address), 1, 2).join()
    made.append(head)
    other = Agent(Addresses(address, is_host=False), 1, 2).join()  # as on another machine
    made.append(other)
    assert [len(each.wait(1).seats) for each in (head, other)] == [2, 2]
    head.die()
    wait_until(lambda: other.gathering.ended)
    assert len(go_on([other])[0].seats) == 1
    back = Agent(Addresses(address), 1, 2, opening=2.0).join()
    made.append(back)
    wait_until(lambda: other.gathering.count_waiting() == 1)
    assert go_on([other])[0].number == back.wait(1).number == 3


def test_strangers_take_no_part(make: Make) -> None:
    agent = make(most=1).join()
    agent.wait(1)
    for words in (b"GET / HTTP/1.1\r\n\r\n", b'ds_ucp 1 "other"\n{"hello": true}\n', b'ds_ucp 1 "job"\n[1]\n'):
        with socket.create_connection(("127.0.0.1", agent.gathering.port), 120) as stranger:
            stranger.sendall(words)
            assert stranger.recv(100) == b""
    assert agent.gathering.ended is None


def test_endpoints_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        Addresses("head")
    with pytest.raises(ConfigError, match="cannot be written"):
        SharedFile(str(tmp_path / "none" / "x"), "job", 1.0)
    (tmp_path / "train.py").write_text("print()")
    with pytest.raises(ConfigError, match="holds something else"):
        SharedFile(str(tmp_path / "train.py"), "job", 1.0)


def test_a_shared_file_that_is_lost_is_made_anew_and_one_that_is_spoilt_ends_nothing(
    made: list[Agent], tmp_path: Path
) -> None:
    """Newcomers find who leads by it; and nobody leads twice."""
    path = tmp_path / "endpoint"

    def make() -> Agent:
        made.append(
            Agent(SharedFile(str(path), "job", silence=30, host="127.0.0.1"), 1, 2, opening=0.3, last_call=0.3).join()
        )
        return made[-1]

    first = make()
    assert first.wait(1)
    path.write_text("{]")
    time.sleep(1.0)
    path.unlink()
    wait_until(lambda: path.exists() and f"127.0.0.1:{first.gathering.port}" in path.read_text())
    second = make()
    wait_until(lambda: first.gathering.count_waiting() == 1)
    assert first.gathering.ended is None and not second.rounds
    assert len(go_on([first])[0].seats) == len(second.wait(1).seats) == 2


def test_who_finds_a_leader_that_has_just_claimed_the_file_comes_to_it(
    made: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would claim it as well, and two jobs begin where the last call is short."""
    make, claim = make_at("file", made, tmp_path), SharedFile.claim

    has_called, second = threading.Event(), list[Agent]()
    former = gathering.call

    def call(address: str, *given: Any, **fields: Any) -> Line:
        line = former(address, *given, **fields)
        has_called.set()  # the second one has: there is nobody whom the first one could call
        return line

    def take_long(endpoint: SharedFile, address: str) -> bool:
        is_claimed = claim(endpoint, address)
        if not second:
            second.append(make().join())
            has_called.wait(120)
            time.sleep(0.5)  # for an answer, which there is not to be yet
        return is_claimed

    monkeypatch.setattr(gathering, "call", call)
    monkeypatch.setattr(SharedFile, "claim", take_long)
    first = make().join()
    assert len(first.wait(1).seats) == 2
    assert json.loads((tmp_path / "endpoint-0").read_text())["job"][0] == 1


def test_a_machine_without_ipv4_tells_its_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loopback would be every other machine's own."""

    class Probe(contextlib.nullcontext[Any]):
        def __init__(self, family: int, _: int) -> None:
            super().__init__(self)
            self.family = family

        def connect(self, _: Any) -> None:
            if self.family == socket.AF_INET:
                raise OSError("no route")

        def getsockname(self) -> Any:
            return ("2001:db8::7", 9, 0, 0)

    monkeypatch.setattr(socket, "socket", Probe)
    assert endpoint.find_machine_address() == "2001:db8::7"


def test_the_loopback_of_ipv6_brings_agents_together_also_when_the_first_is_lost(made: list[Agent]) -> None:
    """Else each of those that are left finds nobody at the others' addresses, and leads."""
    address = f"[::1]:{find_port()}"
    made += [Agent(Addresses(address), 1, 3).join() for _ in range(3)]
    first, *others = sorted(made, key=lambda each: each.wait(1).rank)
    assert len(first.wait(1).seats) == 3
    first.die()
    wait_until(lambda: all(each.gathering.ended for each in others))
    assert [len(each.seats) for each in go_on(others)] == [2, 2]


def test_an_agent_that_cannot_do_its_errands_ends_its_workers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would hear that it leads, and another one may."""
    agent = make(most=1).join()
    agent.wait(1)
    monkeypatch.setattr(agent.gathering.endpoint, "beat", lambda: 1 / 0)
    wait_until(lambda: agent.gathering.ended)
    agent.join()
    wait_until(lambda: agent.error)
    assert "ZeroDivisionError" in str(agent.error)


def test_two_jobs_at_one_address_say_so_long_before_they_give_up(
    made: list[Agent], capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{find_port()}"
    made.append(Agent(Addresses(address), 1, 1).join())
    made[0].wait(1)
    other = Gathering(Addresses(address), Limits(1, 1, every=0.4, times=5, last_call=0.3, join=60), "other")
    try:
        wait_until(lambda: f"still waiting: nobody leads it at {address}" in capsys.readouterr().err)
        assert not other.wait_for_greeting(0) and made[0].gathering.ended is None
    finally:
        other._release()


class Told(list[dict[str, Any]]):
    """What a member is told."""

    def send(self, **fields: Any) -> None:
        self.append(fields)


HELLO = {"address": "x:1", "ranks": 2, "role": "default", "round": 0, "seats": [], "after": 0}


def test_fewer_wait_for_a_last_call_in_the_first_round_alone() -> None:
    leader = Leader(Seat("a", "a:1"), Limits(1, 3, last_call=10), Past(), 0.0, lambda: 7)
    told = {name: Told() for name in "ab"}
    head = leader.greet({**HELLO, "name": "a", "ready": True}, told["a"], "a", 0.0)
    for now in (0.0, 1.0, 9.9):
        leader.tick(now)
    assert not any("ranks" in each for each in told["a"])
    leader.tick(10.1)
    assert told["a"][-1]["round"] == 1 and not told["a"][-1]["changed"]
    leader.greet({**HELLO, "name": "b", "ready": True}, told["b"], "b", 20.0)
    leader.tick(20.0)
    assert told["a"][-1] == {"waiting": 1}
    leader.hear(head, {"ready": True, "after": 1}, 20.1)
    leader.tick(20.1)
    assert len(told["a"][-1]["seats"]) == len(told["b"][-1]["seats"]) == 2 and told["a"][-1]["changed"]


def test_a_new_leader_gives_a_spare_of_the_lost_one_a_moment_to_come() -> None:
    past = Past(1, [Seat("x", "x:1"), Seat("a", "a:1")], {"x"})
    leader = Leader(Seat("a", "a:1"), Limits(1, 2), past, 10.0, lambda: 7)
    told = {name: Told() for name in "as"}
    leader.greet({**HELLO, "name": "a", "round": 1, "after": 1, "ready": True}, told["a"], "a", 10.0)
    leader.tick(10.1)
    leader.greet({**HELLO, "name": "s", "ready": True}, told["s"], "s", 10.2)
    leader.tick(10.2)
    assert len(told["a"][-1]["seats"]) == len(told["s"][-1]["seats"]) == 2


def test_who_has_a_seat_in_a_round_of_which_it_was_not_told_comes_to_the_next_one() -> None:
    """Its connection was lost before: it says that it is ready as one that knows of none."""
    leader = Leader(Seat("a", "a:1"), Limits(1, 2), Past(), 0.0, lambda: 7)
    told = {name: Told() for name in "ab"}
    head, lost = (leader.greet({**HELLO, "name": n, "ready": True}, told[n], n, 0.0) for n in "ab")
    leader.tick(0.1)
    leader.lose(lost, 0.2, "ended")
    told["b"].clear()
    back = leader.greet({**HELLO, "name": "b"}, told["b"], "b", 0.3)
    assert [told["b"][-1][word] for word in ("round", "seats")] == [1, [["a", "x:1", "a"], ["b", "x:1", "b"]]]
    for member in (head, back):
        leader.hear(member, {"ready": True, "after": 1}, 0.4)
    leader.tick(0.5)
    assert told["a"][-1]["round"] == told["b"][-1]["round"] == 2 and "ranks" in told["b"][-1]


def test_a_new_leader_that_was_not_told_of_the_last_round_hears_of_it_by_those_who_were() -> None:
    """The one before was lost while it told them; who has come before, itself among them, says that it is so later."""
    seats = [["x", "x:1", ""], ["a", "a:1", ""], ["b", "b:1", ""]]
    leader = Leader(Seat("a", "a:1"), Limits(1, 3), Past(1, [Seat(*each) for each in seats], {"x"}), 0.0, lambda: 7)
    told = {name: Told() for name in "ab"}
    own = leader.greet({**HELLO, "name": "a", "round": 1, "after": 1}, told["a"], "a", 0.0)
    other = leader.greet({**HELLO, "name": "b", "round": 2, "seats": seats}, told["b"], "b", 0.1)
    assert told["a"][-1] == {"round": 2, "seats": seats} and "seats" not in told["b"][-1]
    leader.hear(own, {"ready": True, "after": 1}, 0.2)  # said before it heard
    for member in (own, other):
        leader.hear(member, {"ready": True, "after": 2}, 0.3)
    leader.past.gone.add("x")
    leader.tick(0.5)
    assert told["a"][-1]["round"] == told["b"][-1]["round"] == 3 and "ranks" in told["a"][-1]


def test_who_has_given_up_a_call_to_a_new_leader_is_waited_for_as_one_that_has_not_come() -> None:
    """It calls again; but not for ever, as its network may lose all that it is told."""
    past = Past(1, [Seat("x", "x:1"), Seat("a", "a:1"), Seat("b", "b:1")], {"x"})
    leader = Leader(Seat("a", "a:1"), Limits(1, 3, every=1, times=10), past, 0.0, lambda: 7)
    told = {name: Told() for name in "ab"}
    leader.greet({**HELLO, "name": "a", "round": 1, "after": 1, "ready": True}, told["a"], "a", 0.0)
    for now in (1.0, 4.0):
        member = leader.greet({**HELLO, "name": "b", "round": 1}, told["b"], "b", now)
        leader.hear(member, {"later": True}, now)
        leader.tick(now + 2.0)
    assert "ranks" not in told["a"][-1] and [seat.name for seat in leader.list_missing()] == ["b"]
    leader.tick(10.1)
    assert len(told["a"][-1]["seats"]) == 1


def test_newcomers_that_prepare_themselves_come_together() -> None:
    """Workers are not started again for one newcomer where another one will be ready soon."""
    leader = Leader(Seat("a", "a:1"), Limits(1, 3, last_call=10), Past(), 0.0, lambda: 7)
    told = {name: Told() for name in "abc"}
    leader.greet({**HELLO, "name": "a", "ready": True}, told["a"], "a", 0.0)
    leader.tick(20.0)
    leader.tick(31.0)
    assert told["a"][-1]["port"] == 7 and told["a"][-1]["ranks"] == [["default", 2]]
    members = {n: leader.greet({**HELLO, "name": n}, told[n], n, 40.0) for n in "bc"}
    leader.hear(members["b"], {"ready": True, "after": 0}, 41.0)
    leader.tick(42.0)
    assert "waiting" not in told["a"][-1]
    leader.hear(members["c"], {"ready": True, "after": 0}, 43.0)
    leader.tick(43.0)
    assert told["a"][-1] == {"waiting": 2}
