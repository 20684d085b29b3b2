"""Writers that are killed at any call: ``latest`` always names a complete save, and the next attempt completes it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.convert.conversions import read_bytes
from tests.saves.nodes import Nodes
from tests.saves.saving import SCRIPT, TAG, Run, begin, make_parts, replace_steps
from tests.saves.stepping import PLACE, FakeStore, use_store
from tests.support.covering import stride
from tests.support.crash import CALLS, Calls, list_calls, run_dying


@dataclass
class Case:
    """One attempt of a writer to kill, and the checks after the kill and after the next attempt.

    Attributes:
        calls: functions before whose calls it is killed, at every call of number ``step``.
    """

    work: Callable[[], object]
    check_killed: Callable[[], object]
    check_ended: Callable[[], object]
    calls: Calls = CALLS
    step: int = field(default_factory=lambda: stride(5))


def overwrite(run: Run) -> Case:

    def check_killed() -> None:
        assert run.is_whole(run.latest)

    def check_ended() -> None:
        assert run.is_whole() and run.latest == TAG
        assert run.list_names() == {TAG, "latest", SCRIPT}

    run.write_save()
    run.save()
    return Case(run.write, check_killed, check_ended, step=stride(7))


def write_to_folder(folder: Path, _: ExitStack) -> Case:
    return overwrite(Run(folder))


def use_fake_store(folder: Path, stack: ExitStack) -> FakeStore:
    fake = FakeStore(folder / "store")
    os.makedirs(fake.root)
    stack.enter_context(use_store(fake))
    stack.enter_context(replace_steps({"map_threads": lambda work, items, _: [work(each) for each in items]}))
    return fake


def write_to_store(folder: Path, stack: ExitStack) -> Case:
    fake = use_fake_store(folder, stack)
    return replace(overwrite(Run(folder, PLACE)), calls=[(fake, "stop")], step=stride(5))


def prune(run: Run) -> Case:

    def check_ended() -> None:
        run.write_save(tag="c", keep=1)
        assert run.list_names() == {"c", "latest", SCRIPT} and run.is_whole("c")

    run.write_save(tag="a", keep=1)
    run.save(tag="b", keep=1)
    return Case(run.write, lambda: None, check_ended, step=stride(3))


def prune_store(folder: Path, stack: ExitStack) -> Case:
    fake = use_fake_store(folder, stack)
    return replace(prune(Run(folder, PLACE)), calls=[(fake, "stop")])


def write_part(folder: Path, killed: int) -> Case:
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

    return Case(work, lambda: None, check_ended)


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

    return Case(lambda: nodes.copy(save), check_killed, check_ended)


CASES: dict[str, Callable[[Path, ExitStack], Case]] = {
    "folder": write_to_folder,
    "store": write_to_store,
    "prune folder": lambda folder, _: prune(Run(folder)),
    "prune store": prune_store,
    "first node": lambda folder, _: write_part(folder, 0),
    "second node": lambda folder, _: write_part(folder, 1),
    "copy": copy_to_node,
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.mark.parametrize("kind", CASES)
def test_a_writer_killed_at_any_call_leaves_a_complete_save(kind: str, stack: ExitStack) -> None:
    above = Path(stack.enter_context(TemporaryDirectory(dir="/dev/shm")))
    folder, kept = above / "here", above / "kept"
    case = CASES[kind](folder, stack)
    shutil.copytree(folder, kept)

    calls = len(list_calls(case.work, case.calls))
    assert calls > 8
    for at in range(0, calls, case.step):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        assert run_dying(case.work, at, calls=case.calls), at
        case.check_killed()
        case.work()
        case.check_ended()
