"""Two jobs that write the same tag: their requests are carried out in every order."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.formats import find_tags, open_checkpoint
from deepspeed_ucp.formats.latest import is_sealed
from deepspeed_ucp.formats.open import seal_folder
from deepspeed_ucp.io.store import list_tree, read_small, write_small
from deepspeed_ucp.saves import places, publishing
from deepspeed_ucp.saves.memory import Job, Snapshot
from deepspeed_ucp.saves.removing import is_saved
from tests.saves.saving import TAG, find_step, make_save, replace_steps
from tests.saves.stepping import PLACE, FakeStore, Stepper, use_store

LOST = "has published this tag"
"""Part of the message of a writer that gives up."""

DONE = "written"


BEGIN = publishing.begin_writing


class Bench:
    """Two writers of one tag in a fresh place, and a reader that looks after each step.

    Args:
        saves: of two jobs, and of a third one.
        place: folder or URL of the tags.

    Attributes:
        published: names of the jobs whose save was seen as the tag's, in order.
        first: name of the job whose save is there at the beginning; empty for none.
    """

    def __init__(self, saves: dict[str, Snapshot], place: str) -> None:
        self.saves, self.place = saves, place
        self.contents = {name: self._read_memory(save) for name, save in saves.items()}
        self.published, self.known = list[str](), dict[object, str]()
        self.first = ""
        self.begun, self.reported = dict[str, int](), dict[str, int]()
        self.state: Callable[[], object] = lambda: None
        self.clear: Callable[[], None] = lambda: None
        self.stop_at: Callable[[Callable[[], None]], None] = lambda _: None

    @staticmethod
    def _read_memory(save: Snapshot) -> dict[str, bytes]:
        folder = Path(save.folder, save.tag)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def note_begin(self, tag: publishing.Tag) -> str:
        """Note which saves a writer knows of when it begins."""
        identify = tag.identify

        def look_and_note() -> str:
            found = identify()
            self.begun[tag.save.job[-1]] = len(self.published)
            return found

        with mock.patch.object(tag, "identify", look_and_note):
            return BEGIN(tag)

    def write(self, name: str) -> str:
        """Write a job's save as its writer does, with another attempt after an error that may pass."""
        save = self.saves[name]
        place = replace(save.places[0], folder=self.place)
        for _ in range(1 if save.nodes == 1 else 100):  # nodes wait for each other
            try:
                places.write_save(save, place, 0.0)
                self.reported[name] = len(self.published)
                places.end_save(save, place)
                return DONE
            except Exception as error:  # noqa: BLE001 - as the writer does
                last, fault = error, places.find_fault(save, error)
                if fault is not None:
                    return str(fault)
        raise last

    def check(self) -> None:
        """The tag is either not there or one job's complete save."""
        state = self.state()
        if state is None or state not in self.known:
            self.known[state] = self.read()
        if (name := self.known[state]) and name != (self.published or [""])[-1]:
            self.published.append(name)

    def read(self) -> str:
        """Return the name of the job whose save the tag is; empty if there is no tag."""
        if TAG not in find_tags(self.place):
            return ""
        index = open_checkpoint(f"{self.place}/{TAG}", Comm())
        assert is_sealed([self.place], TAG)
        found = {os.path.basename(file.path): read_small(file.path) for file in index.stored.files}
        (name,) = [name for name, content in self.contents.items() if content.items() >= found.items()]
        assert {each for each in self.contents[name] if each.endswith("states.pt")} == found.keys()
        return name

    def measure(self) -> int:
        """Return the number of operations of a writer, and one more."""
        return max(self.run(lambda stepper: None).steps.values()) + 1

    def run(self, order: Callable[[Stepper], object]) -> Stepper:
        """Run two writers in an order, in an empty place, and check how they ended."""
        self.clear()
        self.published.clear()
        self.begun.clear()
        self.reported.clear()
        names = [name for name in self.saves if name != "c"]
        stepper = Stepper({name: lambda name=name: self.write(name) for name in names}, self.check)
        self.stop_at(stepper.stop)
        try:
            order(stepper)
            while pending := [name for name in names if name not in stepper.ended]:
                for name in pending:
                    stepper.run(name, 300)  # it may wait for another one
        finally:
            stepper.close()
            self.stop_at(lambda: None)
        assert not self.first or self.published[0] == self.first
        self.check_ends(stepper.ended)
        return stepper

    def check_ends(self, ended: dict[str, str]) -> None:
        assert all(how in (DONE, "killed") or LOST in how for how in ended.values()), ended
        if "killed" not in ended.values():
            assert DONE in ended.values(), ended
        for name, how in ended.items():
            if LOST in how:
                assert self.published[-1:] != [name]
        current = self.published[-1] if self.published else ""
        for name in (name for name, how in ended.items() if how == DONE and name in self.published):
            after = self.published[self.published.index(name) + 1 :]
            assert current == name or all(self.begun[other] > self.published.index(name) for other in after), ended
        assert current or "killed" in ended.values()
        assert all(name in self.published for name, how in ended.items() if how == DONE and not self.saves[name].node)
        if "killed" in ended.values():
            self.begun.clear()
            assert self.write("c") == DONE and self.read() == "c"


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Snapshot]:
    """Saves of three jobs under the same tag; their files have the same names and sizes."""
    folder, made = tmp_path_factory.mktemp("memory"), dict[str, Snapshot]()
    for number, name in enumerate("abc"):
        job = Job(str(folder / f"job-{name}"))
        job.own()
        for _ in range(number + 1):  # the weights differ by number
            made[name] = make_save(job, PLACE)
        job.disown()
    return made


def run_here(work: Callable[[str], object], items: Iterator[str], *_: object) -> list[object]:
    return [work(item) for item in items]


@pytest.fixture(scope="module")
def store(saves: dict[str, Snapshot], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    fake, bench = FakeStore(tmp_path_factory.mktemp("store")), Bench(saves, PLACE)
    bench.state, bench.clear = lambda: frozenset(fake.held.items()), fake.clear
    bench.stop_at = lambda stop: setattr(fake, "stop", stop)

    seams = {"map_threads": run_here, "begin_writing": bench.note_begin}
    with use_store(fake), replace_steps(seams), mock.patch.object(publishing.time, "time", return_value=0):
        yield bench


FOLDER_STEPS = (
    "put_file", "_identify", "_rename", "_move_others_and_delete", "list_folder", "write_small", "seal_folder", "exists"
)  # fmt: skip
"""Operations of a writer on a folder."""


@pytest.fixture
def folder(saves: dict[str, Snapshot], tmp_path: Path) -> Iterator[Bench]:
    bench, stops, held = Bench(saves, str(tmp_path / "place")), list[Callable[[], None]](), set[str]()

    def stop() -> None:
        stops[-1]()

    def wrap(step: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            stop()
            return step(*args, **options)

        return call

    @contextmanager
    def lock(_: str) -> Iterator[None]:
        stop()
        while held:
            stop()
        held.add(threading.current_thread().name)
        try:
            yield
        finally:
            held.clear()

    def clear() -> None:
        shutil.rmtree(bench.place, ignore_errors=True)
        os.mkdir(bench.place)

    bench.clear, bench.stop_at = clear, stops.append
    seams = {name: wrap(find_step(name)) for name in FOLDER_STEPS}
    seams |= {"map_threads": run_here, "begin_writing": bench.note_begin, "_lock_folder": lock}
    stops.append(lambda: None)
    with replace_steps(seams):
        yield bench


@contextmanager
def use_existing(bench: Bench, prepare: Callable[[], object]) -> Iterator[None]:
    """Let each run begin with a tag that ``prepare`` has written."""
    clear = bench.clear

    def clear_and_prepare() -> None:
        clear()
        prepare()

    with mock.patch.multiple(bench, clear=clear_and_prepare, first="c"):
        yield


@pytest.fixture(params=[False, True], ids=["empty", "existing"])
def any_folder(request: pytest.FixtureRequest, folder: Bench) -> Iterator[Bench]:
    """A folder without the tag, and one that has it."""
    with use_existing(folder, lambda: folder.write("c")) if request.param else nullcontext():
        yield folder


def test_orders_in_a_folder(any_folder: Bench) -> None:
    """Each writer is stopped at each operation; also while it holds the lock, on which the other one waits."""
    folder, outcomes = any_folder, set[tuple[str, ...]]()
    longest = folder.measure()
    for first in range(longest):
        for second in range(first % 3, longest, 3):
            ended = folder.run(lambda stepper, first=first, second=second: interrupt(stepper, first, second)).ended
            outcomes.add(tuple(ended.values()))
    assert len(outcomes) >= 2
    assert os.listdir(folder.place).count(TAG) == 1


def interrupt(stepper: Stepper, first: int, second: int) -> None:
    """Run one writer for some operations, the other one for some, and the first one to its end."""
    stepper.run("a", first)
    stepper.run("b", second)
    stepper.run("a", 100)  # unless it waits for the lock
    stepper.run("b", 100)


def kill_at(bench: Bench, others: Callable[[int], Iterable[int]]) -> None:
    """Kill one writer at each of its operations, after the other one has come to some operations."""
    longest = bench.measure()
    for at, other in product(range(longest), others(longest)):

        def order(stepper: Stepper, at: int = at, other: int = other) -> None:
            if not stepper.run("b", other) and not stepper.run("a", at):
                stepper.kill("a")
            stepper.run("b", 100)

        bench.run(order)


def test_a_writer_that_is_killed_in_a_folder(any_folder: Bench) -> None:
    kill_at(any_folder, lambda longest: (0, longest // 2, longest))


def test_a_writer_that_is_killed_in_a_store(store: Bench) -> None:
    kill_at(store, lambda longest: (0, 8, 20, longest))


def test_orders_with_two_interruptions_in_a_store(store: Bench) -> None:
    """The first one at each request, the second one at each third request (``UCP_EXHAUSTIVE``: at each)."""
    longest, step, outcomes = store.measure(), 1 if os.environ.get("UCP_EXHAUSTIVE") else 3, set[object]()
    for first in range(longest):
        for second in range(first % step, longest, step):

            def order(stepper: Stepper, first: int = first, second: int = second) -> None:
                stepper.run("a", first)
                stepper.run("b", second)
                stepper.run("a")
                stepper.run("b")

            outcomes.add(tuple(store.run(order).ended.items()))
    assert len(outcomes) >= 2


def put_plain(bench: Bench) -> None:
    """Put files of a save into the tag, as earlier releases did."""
    for name, data in bench.contents["c"].items():
        write_small(f"{bench.place}/{TAG}/{name}", data)
    seal_folder(f"{bench.place}/{TAG}", Comm())


@pytest.mark.parametrize("prepare", [put_plain, lambda store: store.write("c")], ids=["plain", "published"])
def test_an_existing_tag_stays_until_it_is_replaced(prepare: Callable[[Bench], object], store: Bench) -> None:
    with use_existing(store, lambda: prepare(store)):
        longest = store.measure()
        for first, second in product(range(0, longest, 3), range(1, longest, 3)):
            store.run(lambda stepper, first=first, second=second: (stepper.run("a", first), stepper.run("b", second)))
    left = [name for name in list_tree(f"{PLACE}/{TAG}") if "/" not in name and is_saved(name)]
    assert not [name for name in left if "written" not in name]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 12)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_any_order_in_a_store(store: Bench, turns: list[tuple[str, int]]) -> None:
    def order(stepper: Stepper) -> None:
        for name, steps in turns:
            stepper.run(name, steps)

    store.run(order)


def test_two_nodes_of_a_job_and_another_job(store: Bench, tmp_path: Path) -> None:
    """The nodes' files are one save, or none of it is published."""
    nodes = dict[str, Snapshot]()
    for node, name in enumerate(("a", "node1")):
        shutil.copytree(store.saves["a"].folder, tmp_path / name)
        nodes[name] = replace(store.saves["a"], folder=str(tmp_path / name), node=node, nodes=2)
        for path in (tmp_path / name / TAG).iterdir():
            if ("rank_1_" in path.name) != bool(node):
                path.unlink()
    bench = Bench({**nodes, "b": store.saves["b"], "c": store.saves["c"]}, PLACE)
    bench.contents = {**store.contents, "node1": {}}
    bench.state, bench.clear, bench.stop_at = store.state, store.clear, store.stop_at
    bench.begun, bench.published = store.begun, store.published
    outcomes = set[str]()
    for first, second, third in product(range(0, 48, 6), range(0, 24, 6), range(0, 42, 6)):

        def order(stepper: Stepper, turns: tuple[int, int, int] = (first, second, third)) -> None:
            for name, steps in zip(("a", "node1", "b"), turns, strict=True):
                stepper.run(name, steps)

        ended = bench.run(order).ended
        outcomes.add(ended["a"])
        assert ended["node1"] == DONE or LOST in ended["node1"]
    assert len(outcomes) == 2
