"""Writers that are killed at any call: ``latest`` always names a complete save, and the next attempt completes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.convert.conversions import read_bytes
from tests.saves.saving import PLACE, REQUESTS, SCRIPT, TAG, KilledError, Nodes, Run, begin, make_parts
from tests.support.covering import stride
from tests.support.crash import intercept, run_dying
from tests.support.memory import clear_memory


@dataclass
class Case:
    """One attempt of a writer to kill, and the checks after the kill and after the next attempt."""

    work: Callable[[], object]
    check_ended: Callable[[], object]
    check_killed: Callable[[], object] = lambda: None


def overwrite(folder: Path, _: ExitStack, destination: str = "") -> Case:
    run = Run(folder, destination)

    def check_killed() -> None:
        assert run.is_whole(run.latest)

    def check_ended() -> None:
        assert run.is_whole() and run.latest == TAG
        assert run.list_names() == {TAG, "latest", SCRIPT}

    run.write_save()
    run.save()
    return Case(run.write, check_ended, check_killed)


def prune(folder: Path, _: ExitStack, destination: str = "") -> Case:
    run = Run(folder, destination)

    def check_ended() -> None:
        run.write_save(tag="c", keep=1)
        assert run.list_names() == {"c", "latest", SCRIPT} and run.is_whole("c")

    run.write_save(tag="a", keep=1)
    run.save(tag="b", keep=1)
    return Case(run.write, check_ended)


def write_part(folder: Path, _: ExitStack, killed: int) -> Case:
    """Write one node's part of a save. The other part exists unless its node waits for the first node."""
    nodes = make_parts(folder)
    begin(nodes[0].job.list_saves()[0])
    if killed == 0:
        assert nodes[1].write()

    def check_ended() -> None:
        assert nodes[0].write(wait=0.5) and nodes[0].is_whole()
        assert nodes[0].list_names() == {TAG, "latest"}

    def work() -> None:
        assert nodes[killed].write(wait=0.5)

    return Case(work, check_ended)


def copy_to_node(folder: Path, stack: ExitStack) -> Case:
    """Copy a part to another node's memory. Both ends are killed."""
    nodes = Nodes(folder)
    stack.callback(nodes.close)
    first = nodes.save(0, tag="first")
    nodes.copy(first)
    nodes.jobs[1].note("copying", {"safe": 1, "current": 2})
    save = nodes.save(0)

    def check_killed() -> None:
        numbers = nodes.list_copies(1)
        assert 1 in numbers and (2 in numbers or not save.read("copied"))

    def check_ended() -> None:
        for made in (first, save):
            (copy,) = [each for each in nodes.jobs[1].list_copies() if each.number == made.number]
            assert read_bytes(Path(copy.folder) / made.tag) == read_bytes(Path(made.folder) / made.tag)

    return Case(lambda: nodes.copy(save), check_ended, check_killed)


def kill_at_request(work: Callable[[], object], at: int, folder: Path) -> bool:
    """Run ``work``, whose threads all end at a store's request number ``at``. Return False if it ended before.

    After that ``work`` changes no file below ``folder``, as if SIGKILL had ended it.
    """
    left = list[dict[str, bytes]]()

    def act(number: int, *_: object) -> None:
        if number >= at:
            left.append(read_bytes(folder))
            raise KilledError

    with suppress(KilledError), intercept(act, REQUESTS):
        work()
        return False
    assert read_bytes(folder) == left[0]
    return True


CASES: dict[str, tuple[Callable[[Path, ExitStack], Case], int]] = {
    "folder": (overwrite, 7),
    "store": (partial(overwrite, destination=PLACE), 5),
    "prune folder": (prune, 3),
    "prune store": (partial(prune, destination=PLACE), 5),
    "first node": (partial(write_part, killed=0), 5),
    "second node": (partial(write_part, killed=1), 5),
    "copy": (copy_to_node, 5),
}
"""Kind → case, and the step of the sweep over its calls."""


@pytest.mark.parametrize("kind", CASES)
def test_a_writer_killed_at_any_call_leaves_a_complete_save(kind: str) -> None:
    make, step = CASES[kind]
    for at in count(0, stride(step)):
        clear_memory()
        with TemporaryDirectory(dir="/dev/shm") as folder, ExitStack() as stack:
            case = make(Path(folder), stack)
            kill = partial(kill_at_request, folder=Path(folder)) if "store" in kind else run_dying
            is_killed = kill(case.work, at)
            case.check_killed()
            case.work()
            case.check_ended()
        if not is_killed:
            break
    assert at > 8
