"""Saves that go to an object store: whole before `latest` names them, whatever the store answers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.io.store import list_tree, read_small, write_small
from deepspeed_ucp.saves.memory import Job, Snapshot
from deepspeed_ucp.sources.files import resolve_published
from tests.saves.saving import PATIENCE, TAG, find_step, is_whole, make_save, replace_steps, write
from tests.stores.server import BUCKET, Server, fail_first, use_options


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(str(tmp_path / "memory" / "job"))
    made.own()
    return made


def list_names(url: str) -> set[str]:
    return {name.split("/")[-1] for name in list_tree(url)}


def holds(url: str, save: Snapshot) -> bool:
    """Return True if the published tag has the bytes of a save."""
    tag = resolve_published(f"{url}/{save.tag}")
    names = [os.path.relpath(name, save.tag) for name in save.list_files() if name.startswith(f"{save.tag}/")]
    return all(read_small(f"{tag}/{name}") == Path(save.folder, save.tag, name).read_bytes() for name in names)


@pytest.mark.usefixtures("server")
def test_a_save_is_uploaded(job: Job) -> None:
    url = f"s3://{BUCKET}/uploaded"
    made = make_save(job, url)
    assert write(job)
    own = {name.split("/")[-1] for name in made.list_files()}
    assert list_names(url) == own | {"ucp_seal.json", "latest", "ucp_published.json"}
    assert read_small(f"{url}/latest").decode() == TAG and is_whole(f"{url}/{TAG}")


@pytest.mark.usefixtures("server")
def test_a_tag_that_is_written_over_is_the_new_save(job: Job) -> None:
    url = f"s3://{BUCKET}/over"
    for _ in range(2):
        made = make_save(job, url)
        assert write(job)
        names = list_names(url)
    assert is_whole(f"{url}/{TAG}") and holds(url, made)
    assert list_names(url) == names and len(list_tree(url)) == len(names)  # nothing is left of the first one


@pytest.mark.parametrize("fault", ["503", "reset", "lost"])
def test_a_store_that_fails_now_and_then_gets_all(fault: str, job: Job, server: Server) -> None:
    url = f"s3://{BUCKET}/{fault}"
    make_save(job, url)
    with server.failing(fail_first(1, fault, method="PUT")):
        assert write(job)
    assert is_whole(f"{url}/{TAG}")


def test_a_store_that_is_down_is_named_by_nothing(job: Job, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    url = f"s3://{BUCKET}/down"
    make_save(job, url)
    with server.failing(lambda environ: "403" if environ["REQUEST_METHOD"] == "PUT" else None):
        assert not write(job)
    assert "not written, to be tried again" in caplog.text
    assert not any(name.startswith("down/") for name in list_tree(f"s3://{BUCKET}"))
    assert write(job) and is_whole(f"{url}/{TAG}")


STEPS = ("put_file", "remove", "write_small", "exchange_small", "seal_folder", "remove_tree", "read_small")
"""What a writer calls of a store, one after the other."""

ORIGINAL = {name: find_step(name) for name in STEPS}


@contextmanager
def before_each(act: Callable[[int, str], None]) -> Iterator[None]:
    """Call ``act`` with number and name before each step of a writer of this process, one step after the other."""
    numbers, lock = count(), threading.Lock()

    def wrap(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with lock:  # whoever is killed, or hangs, has asked for nothing that the store is still to do
                act(next(numbers), name)
                return step(*args, **options)

        return call

    with replace_steps({name: wrap(name, find_step(name)) for name in STEPS}):
        yield


def _write_until_killed(folder: str, options: dict[str, Any], at: int) -> None:
    with (
        use_options(options),
        before_each(lambda number, _: os.kill(os.getpid(), signal.SIGKILL) if number == at else None),
    ):
        write(Job(folder))


def test_killed_at_any_step(job: Job, server: Server) -> None:
    """What `latest` names is whole, and the next writer goes on."""
    processes = multiprocessing.get_context("forkserver")  # a store's client does not survive a fork
    url = f"s3://{BUCKET}/killed"
    for tag in ("before", "same"):
        make_save(job, url, tag=tag)
        assert write(job)
    at = 0
    while True:
        latest = make_save(job, url, tag="same" if at // 2 % 2 else f"new{at}").tag
        process = processes.Process(target=_write_until_killed, args=(job.folder, server.options, at))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode in (0, -signal.SIGKILL)
        killed = process.exitcode != 0
        named = read_small(f"{url}/latest").decode()
        assert is_whole(f"{url}/{named}"), at
        assert write(job) and is_whole(f"{url}/{latest}") and read_small(f"{url}/latest").decode() == latest
        if not killed:
            assert not any(".ucp-written" in name for name in list_tree(f"{url}/{latest}"))
            break
        at += 1 if os.environ.get("UCP_EXHAUSTIVE") else 2
    assert at > 8


@pytest.mark.usefixtures("server")
def test_a_writer_that_hung_does_not_mix_its_files_with_those_of_another_job(tmp_path: Path) -> None:
    """It goes on once the other, which knows nothing of it, has saved under the same tag."""
    hung, ended = list[str](), set[str]()
    for at in range(30):
        url = f"s3://{BUCKET}/hung{at}"
        job, other = (Job(str(tmp_path / f"{at}{name}" / f"job-{name}")) for name in "ab")
        job.own()
        other.own()
        made = make_save(job, url)
        make_save(other, url)
        make_save(other, url)  # the sizes are the same, the weights are not

        def act(number: int, name: str, at: int = at, other: Job = other) -> None:
            if number == at:
                hung.append(name)
                with replace_steps(ORIGINAL):
                    assert write(other)

        with before_each(act):
            assert write(job)
        lost = made.list_refused()
        theirs = other.list_saves()[-1]  # it may have replaced a save that was published before it began
        assert is_whole(f"{url}/{TAG}") and (holds(url, theirs) or (not lost and holds(url, made))), (at, hung)
        if len(hung) == at:
            break
        ended.add(f"{hung[-1]} {'has published this tag' in str(lost)}")
    assert {"put_file True", "seal_folder True", "exchange_small True", "read_small False"} <= ended


@pytest.mark.parametrize(("step", "named"), [(1, "theirs"), (9, TAG)])
@pytest.mark.usefixtures("server")
def test_latest_does_not_go_back(step: int, named: str, job: Job, tmp_path: Path) -> None:
    """To a save that was older than what another job has written meanwhile."""
    url, other = f"s3://{BUCKET}/back{step}", Job(str(tmp_path / "other" / "job"))
    other.own()
    make_save(other, url, tag="theirs", step=3)
    make_save(job, url, step=step)

    def act(_: int, name: str) -> None:
        if name == "seal_folder":
            with replace_steps(ORIGINAL):
                assert write(other)

    with before_each(act):
        assert write(job)
    assert read_small(f"{url}/latest").decode() == named and is_whole(f"{url}/{TAG}")


@pytest.mark.usefixtures("server")
def test_a_tag_that_is_saved_anew_while_it_is_uploaded(job: Job) -> None:
    url, made = f"s3://{BUCKET}/anew", list[Snapshot]()
    make_save(job, url)

    def act(number: int, _: str) -> None:
        if number == 4:
            made.append(make_save(job, url))

    with before_each(act):
        assert write(job)
    assert is_whole(f"{url}/{TAG}") and [save.number for save in job.list_saves()] == [2]
    assert holds(url, made[0])


@pytest.mark.usefixtures("server")
def test_what_others_have_in_a_tag_stays(job: Job) -> None:
    """Another tag may lie below it. Files of an earlier save, of more ranks, do not."""
    url = f"s3://{BUCKET}/others"
    write_small(f"{url}/{TAG}/arguments.json", b"{}")
    write_small(f"{url}/{TAG}/below/mp_rank_00_model_states.pt", b"another tag's")
    write_small(f"{url}/{TAG}/zero_pp_rank_9_mp_rank_00_optim_states.pt", b"of another save")
    made = make_save(job, url)
    assert write(job)
    own = {name.split("/")[-1] for name in made.list_files()}
    assert list_names(url) == own | {"ucp_seal.json", "latest", "ucp_published.json", "arguments.json"}
    assert read_small(f"{url}/{TAG}/below/mp_rank_00_model_states.pt") == b"another tag's"


@pytest.mark.usefixtures("server")
def test_a_part_of_an_earlier_save_is_none_of_this_one(job: Job, tmp_path: Path) -> None:
    """The other node has written a save under this tag that the first one gave up."""
    url, other = f"s3://{BUCKET}/parts", Job(str(tmp_path / "other" / "job"))
    other.own()
    for _ in range(2):
        make_save(job, url, nodes=2)
        assert not write(job, wait=0.2)
        assert "latest" not in list_names(url) and not is_whole(f"{url}/{TAG}")
        make_save(other, url, node=1, nodes=2)
        assert write(other)
    assert write(job)
    assert is_whole(f"{url}/{TAG}") and not any(".ucp-written" in name for name in list_tree(url))
