"""Two jobs that write the same tag, with their requests in every order."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.formats import find_tags, open_checkpoint
from deepspeed_ucp.formats.deepspeed.files import SEAL
from deepspeed_ucp.formats.latest import is_sealed
from deepspeed_ucp.formats.open import seal_folder
from deepspeed_ucp.io.paths import UPLOAD
from deepspeed_ucp.io.store import list_tree, read_small, write_small
from deepspeed_ucp.saves import destinations, publishing
from deepspeed_ucp.saves.memory import Job, SavePart
from deepspeed_ucp.saves.publishing import WRITTEN, is_save_file
from tests.saves.saving import TAG, find_step, make_save, replace_steps
from tests.saves.stepping import PLACE, FakeStore, Stepper, use_store
from tests.support.covering import stride
from tests.support.reshard import examples

LOST = "has published this tag"
"""Part of the message of a writer that abandons its save."""

DONE = "written"


BEGIN = publishing.begin_writing


class Bench:
    """Two writers of one tag in a fresh destination, and a reader that checks after each step.

    Attributes:
        published: names of the jobs whose save the reader found in the tag, in order.
        first: name of the job whose save the place has at the beginning, or "".
    """

    def __init__(self, saves: dict[str, SavePart], destination: str) -> None:
        self.saves, self.destination = dict(saves), destination
        self.contents = {name: self._read_memory(save) for name, save in saves.items()}
        self.published, self.known = list[str](), dict[object, str]()
        self.first = ""
        self.begun = dict[str, int]()
        self.state: Callable[[], object] = lambda: None
        self.clear: Callable[[], None] = lambda: None
        self.stop_at: Callable[[Callable[[], None]], None] = lambda _: None

    @staticmethod
    def _read_memory(save: SavePart) -> dict[str, bytes]:
        folder = Path(save.folder, save.tag)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def note_begin(self, tag: publishing.Tag) -> str:
        """Note the saves that a writer knows at its start."""
        identify = tag.identify

        def look_and_note() -> str:
            found = identify()
            self.begun[tag.save.job[-1]] = len(self.published)
            return found

        with mock.patch.object(tag, "identify", look_and_note):
            return BEGIN(tag)

    def write(self, name: str) -> str:
        """Write a job's save like its writer, and retry after a temporary error."""
        save, destination = self.saves[name], self.destination
        for _ in range(1 if save.nodes == 1 else 100):  # nodes wait for each other
            try:
                destinations.write_save(save, destination, 0.0)
                destinations.delete_coordination_files(save, destination)
                return DONE
            except Exception as error:  # noqa: BLE001 - as the writer does
                last, fault = error, destinations.find_permanent_error(save, error)
                if fault is not None:
                    return str(fault)
        raise last

    def check(self) -> None:
        """Check that the tag is missing or is one job's complete save."""
        state = self.state()
        if state is None or state not in self.known:
            self.known[state] = self.read()
        if (name := self.known[state]) and name != (self.published or [""])[-1]:
            self.published.append(name)

    def read(self) -> str:
        """Return the name of the job that saved the tag, or "" without a tag."""
        if TAG not in find_tags(self.destination):
            return ""
        index = open_checkpoint(f"{self.destination}/{TAG}", Comm())
        assert is_sealed([self.destination], TAG)
        found = {os.path.basename(file.path): read_small(file.path) for file in index.files}
        (name,) = [name for name, content in self.contents.items() if content.items() >= found.items()]
        assert {each for each in self.contents[name] if each.endswith("states.pt")} == found.keys()
        return name

    def measure(self) -> int:
        return max(self.run(lambda stepper: None).steps.values()) + 1

    def run(self, order: Callable[[Stepper], object]) -> Stepper:
        """Run two writers in an order, in an empty destination, and check how they ended."""
        self.clear()
        self.published.clear()
        self.begun.clear()
        names = [name for name in self.saves if name != "c"]
        stepper = Stepper({name: lambda name=name: self.write(name) for name in names}, self.check)
        self.stop_at(stepper.stop)
        try:
            order(stepper)
            while pending := [name for name in names if name not in stepper.ended]:
                for name in pending:
                    stepper.run(name, 300)  # it may wait for another writer
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
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SavePart]:
    """Saves of three jobs under the same tag; their files have the same names and sizes."""
    folder, made = tmp_path_factory.mktemp("memory"), dict[str, SavePart]()
    for number, name in enumerate("abc"):
        job = Job(str(folder / f"job-{name}"))
        job.own()
        for _ in range(number + 1):  # the weights differ by number
            made[name] = make_save(job, PLACE)
        job.disown()
    return made


def run_here(work: Callable[[str], object], items: Iterator[str], *_: object) -> list[object]:
    return [work(item) for item in items]


@contextmanager
def use_fake_store(saves: dict[str, SavePart], root: Path) -> Iterator[Bench]:
    """A single writer's requests to its temporary folder count only if they mark the end of a part or of the save."""
    fake, bench = FakeStore(root), Bench(saves, PLACE)

    def stop_at(stop: Callable[[], None]) -> None:
        def stop_at_shared(url: str) -> None:
            save = saves.get(threading.current_thread().name)
            is_private = save is not None and f"{UPLOAD}{save.job}-" in url and len(bench.saves) == len(saves)
            if not is_private or os.path.basename(url) == SEAL or os.path.basename(url).startswith(WRITTEN):
                stop()

        fake.stop = stop_at_shared

    bench.state, bench.clear, bench.stop_at = lambda: frozenset(fake.held.items()), fake.clear, stop_at
    with use_store(fake):
        yield bench


FOLDER_STEPS = (
    "put_file", "_identify", "_rename", "_move_others_and_delete", "list_folder", "write_small", "seal_folder", "exists"
)  # fmt: skip
"""Operations of a writer on a folder."""


@contextmanager
def use_folder(saves: dict[str, SavePart], root: Path) -> Iterator[Bench]:
    """A writer also stops while it holds the lock for which the other one waits."""
    bench, stops, held = Bench(saves, str(root / "destination")), list[Callable[[], None]](), set[str]()

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
        shutil.rmtree(bench.destination, ignore_errors=True)
        os.mkdir(bench.destination)

    bench.clear, bench.stop_at, bench.state = clear, stops.append, partial(hash_files, Path(bench.destination, TAG))
    stops.append(lambda: None)
    with replace_steps({**{name: wrap(find_step(name)) for name in FOLDER_STEPS}, "_lock_folder": lock}):
        yield bench


def hash_files(folder: Path) -> frozenset[tuple[str, int]]:
    """Return the names of a folder's files, each with a hash of its content."""
    paths = folder.iterdir() if folder.exists() else ()
    return frozenset((path.name, hash(path.read_bytes())) for path in paths)


def put_plain(bench: Bench) -> None:
    """Put files of a save directly into the tag."""
    for name, data in bench.contents["c"].items():
        write_small(f"{bench.destination}/{TAG}/{name}", data)
    seal_folder(f"{bench.destination}/{TAG}", Comm())


KINDS = ["folder", "folder, existing", "store", "store, existing", "store, plain"]


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, saves: dict[str, SavePart]) -> Iterator[Bench]:
    """A destination without the tag, or with a tag of another job or without ``ucp_published.json``."""
    kind, _, prepared = request.param.partition(", ")
    use = use_folder if kind == "folder" else use_fake_store
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root, use(saves, Path(root)) as made:
        clear, prepare = made.clear, put_plain if prepared == "plain" else lambda bench: bench.write("c")

        def clear_and_prepare() -> None:
            clear()
            if prepared:
                prepare(made)

        made.clear, made.first = clear_and_prepare, "c" if prepared else ""
        with replace_steps({"map_threads": run_here, "begin_writing": made.note_begin}):
            yield made


def test_two_writers_that_interrupt_each_other_twice_leave_one_complete_save(bench: Bench) -> None:
    """The second writer stops at each 13th operation; at each under `-m exhaustive`."""
    longest, step, outcomes = bench.measure(), stride(13), set[object]()
    for first in range(0, longest, min(step, 3) if bench.first and "://" in bench.destination else 1):
        for second in range(first % step, longest, step):

            def order(stepper: Stepper, first: int = first, second: int = second) -> None:
                stepper.run("a", first)
                stepper.run("b", second)
                stepper.run("a", 100)  # unless it waits for the lock
                stepper.run("b", 100)

            outcomes.add(tuple(bench.run(order).ended.items()))
    assert len(outcomes) >= 2
    left = [name for name in list_tree(f"{bench.destination}/{TAG}") if "/" not in name and is_save_file(name)]
    assert "://" not in bench.destination or not [name for name in left if WRITTEN not in name]


@pytest.mark.parametrize("bench", ["folder", "folder, existing", "store"], indirect=True)
def test_two_writers_of_which_one_is_killed_leave_one_complete_save(bench: Bench) -> None:
    """One is killed at each fifth operation, after some of the other's; at each operation under `-m exhaustive`."""
    longest, step = bench.measure(), stride(5)
    others = enumerate((0, longest // 4, longest // 2, longest))
    for at, other in [(at, other) for turn, other in others for at in range(turn % step, longest, step)]:

        def order(stepper: Stepper, at: int = at, other: int = other) -> None:
            if not stepper.run("b", other) and not stepper.run("a", at):
                stepper.kill("a")
            stepper.run("b", 100)

        bench.run(order)


@pytest.mark.parametrize("bench", ["folder, existing", "store"], indirect=True)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 12)), max_size=12))
@examples(60)
def test_two_writers_in_any_order_leave_one_complete_save(bench: Bench, turns: list[tuple[str, int]]) -> None:
    def order(stepper: Stepper) -> None:
        for name, steps in turns:
            stepper.run(name, steps)

    bench.run(order)


@pytest.mark.parametrize("bench", ["store"], indirect=True)
def test_two_nodes_of_a_job_and_another_job_publish_one_complete_save(
    bench: Bench, saves: dict[str, SavePart], tmp_path: Path
) -> None:
    """The nodes' files are one save, or none of it is published."""
    for node, name in enumerate(("a", "node1")):
        shutil.copytree(saves["a"].folder, tmp_path / name)
        bench.saves[name] = replace(saves["a"], folder=str(tmp_path / name), node=node, nodes=2)
        for path in (tmp_path / name / TAG).iterdir():
            if ("rank_1_" in path.name) != bool(node):
                path.unlink()
    bench.contents["node1"] = {}
    outcomes = set[str]()
    step = 6 * stride(3)
    for first, second, third in product(range(0, 48, step), range(0, 24, step), range(0, 42, step)):

        def order(stepper: Stepper, turns: tuple[int, int, int] = (first, second, third)) -> None:
            for name, steps in zip(("a", "node1", "b"), turns, strict=True):
                stepper.run(name, steps)

        ended = bench.run(order).ended
        outcomes.add(ended["a"])
        assert ended["node1"] == DONE or LOST in ended["node1"]
    assert len(outcomes) == 2
