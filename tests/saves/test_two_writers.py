"""Two jobs that write the same tag, with their requests in every order."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
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
from deepspeed_ucp.io.store import list_tree, put_file, read_small
from deepspeed_ucp.saves import destinations, publishing
from deepspeed_ucp.saves.memory import Job, SavePart
from deepspeed_ucp.saves.publishing import WRITTEN, is_save_file
from tests.saves.saving import MODULES, PLACE, REQUESTS, TAG, KilledError, find_calls, make_save
from tests.support.covering import stride
from tests.support.crash import Calls, intercept
from tests.support.memory import clear_memory
from tests.support.reshard import examples

LOST = "has published this tag"
"""Part of the message of a writer that abandons its save."""

DONE = "written"


BEGIN = publishing.begin_writing

FOLDER_STEPS = find_calls(
    "put_file", "_identify", "_rename", "_move_others_and_delete", "list_folder", "write_small", "seal_folder", "exists"
)
"""Operations of a writer on a folder."""


Work = Callable[[], str]
"""A writer. It returns how it ended."""


class Stepper:
    """Threads that run one at a time, from one request to the next, with a check after each.

    Attributes:
        ended: by name how a thread ended, in the order of the ends.
        steps: by name the requests that a thread has begun.
    """

    def __init__(self, works: Mapping[str, Work], check: Callable[[], None]) -> None:
        self.ended, self.steps, self._check = dict[str, str](), dict.fromkeys(works, 0), check
        self._killed, self._errors = set[str](), list[BaseException]()
        self._turns = {name: threading.Semaphore(0) for name in works}
        self._back = threading.Semaphore(0)
        self._threads = {
            name: threading.Thread(target=self._run, args=(name, work), name=name, daemon=True)
            for name, work in works.items()
        }

    def _run(self, name: str, work: Work) -> None:
        self._turns[name].acquire()
        try:
            self.ended[name] = work()
        except KilledError:
            self.ended[name] = "killed"
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.ended[name] = repr(error)
            self._errors.append(error)
        self._back.release()

    def stop(self) -> None:
        """Wait for the next turn if this is one of the threads; called before each request."""
        name = threading.current_thread().name
        if self._threads.get(name) is not threading.current_thread():
            return
        if name not in self._killed:
            self.steps[name] += 1
            self._back.release()
            self._turns[name].acquire()
        if name in self._killed:
            raise KilledError

    def kill(self, name: str) -> None:
        """End a thread at its next request."""
        self._killed.add(name)
        self.run(name)

    def run(self, name: str, most: int | None = None) -> bool:
        """Let a thread run to its end, or for some requests; return True if it has ended."""
        thread = self._threads[name]
        if thread.ident is None:
            thread.start()
        while name not in self.ended and most != 0:
            self._turns[name].release()
            self._back.acquire()
            if self._errors:
                raise self._errors[0]
            self._check()
            most = None if most is None else most - 1
        return name in self.ended

    def close(self) -> None:
        """End all threads."""
        for name, thread in self._threads.items():
            if thread.ident is not None and name not in self.ended:
                self.kill(name)


class Bench:
    """Two writers of one tag in a fresh destination, and a reader that checks after each step.

    Attributes:
        first: name of the job whose save the destination has at the beginning: none, "c" by its writer, or "plain",
            the files of "c" without ``ucp_published.json``.
        published: names of the jobs whose save the reader found in the tag, in order.
        begun: by writer the number of published saves when it began.
        stop: called before each operation or request of a writer.
    """

    def __init__(self, saves: dict[str, SavePart], destination: str, first: str) -> None:
        self.saves, self.destination, self.first = dict(saves), destination, first
        self.contents = {
            name: {path.name: path.read_bytes() for path in Path(save.folder, save.tag).iterdir()}
            for name, save in saves.items()
        }
        self.published, self.begun = list[str](), dict[str, int]()
        self.stop: Callable[[], None] = lambda: None
        self._known, self._hashes = dict[object, str](), dict[tuple[str, str], int]()

    def clear(self) -> None:
        """Empty the destination, and write the first save to it."""
        clear_memory()
        shutil.rmtree(self.destination, ignore_errors=True)
        if "://" not in self.destination:
            os.mkdir(self.destination)
        self.published.clear()
        self.begun.clear()
        self._hashes.clear()  # versions are numbered anew
        if self.first == "c":
            self.write("c")
        elif self.first == "plain":
            for name in self.contents["c"]:
                put_file(f"{self.destination}/{TAG}/{name}", os.path.join(self.saves["c"].folder, TAG, name))
            seal_folder(f"{self.destination}/{TAG}", Comm())

    def hash_files(self) -> frozenset[tuple[str, int]]:
        """Return the names of the tag's files, each with a hash of its content."""
        tag, found = f"{self.destination}/{TAG}", set[tuple[str, int]]()
        with suppress(FileNotFoundError, NotADirectoryError):
            for name, entry in list_tree(tag).items():
                version = name, entry.version
                if not entry.version or version not in self._hashes:
                    self._hashes[version] = hash(read_small(f"{tag}/{name}"))
                found.add((name, self._hashes[version]))
        return frozenset(found)

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
        for _ in range(100):
            try:
                destinations.write_save(save, destination, 0.0)
                destinations.delete_coordination_files(save, destination)
                return DONE
            except Exception as error:  # as the writer does
                last, fault = error, destinations.find_permanent_error(save, error)
                if fault is not None:
                    return str(fault)
                if save.nodes == 1 and "write it again" not in str(error):  # nodes wait for each other
                    raise
        raise last

    def check(self) -> None:
        """Check that the tag is missing or is one job's complete save."""
        state = self.hash_files()
        if state not in self._known:
            self._known[state] = self.read()
        if (name := self._known[state]) and name != (self.published or [""])[-1]:
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
        names = [name for name in self.saves if name != "c"]
        stepper = Stepper({name: lambda name=name: self.write(name) for name in names}, self.check)
        self.stop = stepper.stop
        try:
            order(stepper)
            while pending := [name for name in names if name not in stepper.ended]:
                for name in pending:
                    stepper.run(name, 300)  # it may wait for another writer
        finally:
            stepper.close()
            self.stop = lambda: None
        assert not self.first or self.published[0] == "c"
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
        job.create()
        for _ in range(number + 1):  # the weights differ by number
            made[name] = make_save(job, PLACE)
        job.unlock()
    return made


def run_here(work: Callable[[str], object], items: Iterable[str], *_: object) -> list[object]:
    return [work(item) for item in items]


@contextmanager
def stop_at(bench: Bench, calls: Calls) -> Iterator[None]:
    """Stop before each call; for the lock of a folder as long as another writer holds it.

    A single writer's requests to its temporary folder count only if they mark the end of a part or of the save.
    """
    held = set[str]()

    def stop(_: int, __: str, arguments: tuple[object, ...]) -> None:
        save, url = bench.saves.get(threading.current_thread().name), str(arguments[1:2])
        is_private = save is not None and f"{UPLOAD}{save.job}-" in url and len(bench.saves) == 3
        if calls is not REQUESTS or not is_private or SEAL in url or WRITTEN in url:
            bench.stop()

    @contextmanager
    def lock(_: str) -> Iterator[None]:
        bench.stop()
        while held:
            bench.stop()
        held.add(threading.current_thread().name)
        try:
            yield
        finally:
            held.clear()

    with intercept(stop, calls), mock.patch.object(publishing, "_lock_folder", lock):
        yield


KINDS = ["folder", "folder, c", "store", "store, c", "store, plain"]


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, saves: dict[str, SavePart]) -> Iterator[Bench]:
    """A destination without the tag, or with a tag of another job."""
    kind, _, first = request.param.partition(", ")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root, pytest.MonkeyPatch.context() as patch:
        made = Bench(saves, PLACE if kind == "store" else f"{root}/destination", first)
        patch.setattr(destinations, "begin_writing", made.note_begin)
        for module in MODULES:
            patch.setattr(module, "map_threads", run_here)
        with stop_at(made, REQUESTS if kind == "store" else FOLDER_STEPS):
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


@pytest.mark.parametrize("bench", ["folder", "folder, c", "store"], indirect=True)
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


@pytest.mark.parametrize("bench", ["folder, c", "store"], indirect=True)
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
