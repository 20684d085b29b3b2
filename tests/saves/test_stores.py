"""Saves that go to an object store: whole before `latest` names them, whatever the store answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from deepspeed_ucp.io import remote, retry
from deepspeed_ucp.io.store import list_tree, read_small, write_small
from deepspeed_ucp.saves.memory import Job
from tests.saves.saving import TAG, is_whole, make_save, write
from tests.stores.server import BUCKET, Server, fail_first, serve

pytest.importorskip("s3fs", reason="the store of these tests is S3")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as found:
        remote.set_options(found.options)
        with suppress(FileExistsError):
            remote.connect("s3://x", writing=True)[0].mkdir(BUCKET)
        yield found
    remote.set_options({})


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_PAUSE", 0.001)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(str(tmp_path / "memory" / "job"))
    made.own()
    return made


def list_names(url: str) -> set[str]:
    return {name.split("/")[-1] for name in list_tree(url)}


@pytest.mark.usefixtures("server")
def test_a_save_is_uploaded(job: Job) -> None:
    url = f"s3://{BUCKET}/uploaded"
    made = make_save(job, url)
    assert write(job)
    own = {name.split("/")[-1] for name in made.list_files()}
    assert list_names(url) == own | {"ucp_seal.json", "latest"}
    assert read_small(f"{url}/latest").decode() == TAG and is_whole(f"{url}/{TAG}")


@pytest.mark.usefixtures("server")
def test_a_tag_that_is_written_over_is_the_new_save(job: Job) -> None:
    url = f"s3://{BUCKET}/over"
    for _ in range(2):
        made = make_save(job, url)
        assert write(job)
    assert is_whole(f"{url}/{TAG}")
    for name in made.list_files():
        assert read_small(f"{url}/{name}") == Path(made.folder, name).read_bytes()


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


@pytest.mark.usefixtures("server")
def test_what_others_have_in_a_tag_stays(job: Job) -> None:
    """Files of an earlier save, of more ranks, do not."""
    url = f"s3://{BUCKET}/others"
    write_small(f"{url}/{TAG}/arguments.json", b"{}")
    write_small(f"{url}/{TAG}/zero_pp_rank_9_mp_rank_00_optim_states.pt", b"of another save")
    made = make_save(job, url)
    assert write(job)
    own = {name.split("/")[-1] for name in made.list_files()}
    assert list_names(url) == own | {"ucp_seal.json", "latest", "arguments.json"}


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
    assert is_whole(f"{url}/{TAG}") and not any(name.startswith(".ucp") for name in list_names(url))
