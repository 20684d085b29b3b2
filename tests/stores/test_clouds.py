"""`gs://` and `abfs://`, by stand-ins of their stores: plain GETs, and the file systems where these are refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.cli import main
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.io import presign, retry, store
from deepspeed_ucp.sources.latest import find_checkpoint
from tests.stores.standins import BUCKET, Azure, Google, StandIn, serve
from tests.support.reshard import check_content, load, make_targets, open_everywhere
from tests.synth import Model, Param, State, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (30, 20)), Param("b", (20,)), Param("frozen", (5,), frozen=True)))

STORES = {"gs": ("gcsfs", Google), "abfs": ("adlfs", Azure)}


def make_options(scheme: str, url: str) -> dict[str, Any]:
    if scheme == "gs":
        return {"endpoint_url": url, "token": "anon"}
    account, key = "devstoreaccount1", base64.b64encode(b"key").decode()
    told = f"AccountName={account};AccountKey={key};BlobEndpoint={url}/{account};"
    return {"connection_string": f"DefaultEndpointsProtocol=http;{told}"}


@pytest.fixture(params=STORES)
def served(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, type[StandIn], State]]:
    """URL of a run, what serves it, and its state."""
    library, kind = STORES[request.param]
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it asks a service that is not there
    pytest.importorskip(library)
    monkeypatch.setattr(retry, "_PAUSE", 0.001)
    monkeypatch.setattr(presign, "_refused", set())
    state = random_state(MODEL, 5)
    write_checkpoint(tmp_path / "run", MODEL, state, Topology(1, 3))
    with serve(tmp_path, kind) as (url, handler):
        store.set_storage_options(make_options(request.param, url))
        yield f"{request.param}://{BUCKET}/run", handler, state
    store.set_storage_options({})


@pytest.mark.parametrize("refusing", [False, True])
def test_a_load(served: tuple[str, type[StandIn], State], refusing: bool, capsys: Any) -> None:
    url, handler, state = served
    handler.refusing = refusing
    targets = make_targets(MODEL, Topology(3, 2))
    check_content(load(open_everywhere(find_checkpoint(url), targets), targets), state)
    plain = [headers["User-Agent"].startswith("deepspeed_ucp") for *_, headers in handler.asked]
    assert set(plain) == {not refusing}
    assert main(["verify", url]) == 0
    assert "complete" in capsys.readouterr().out


def test_a_file_that_is_replaced_is_refused(served: tuple[str, type[StandIn], State], tmp_path: Path) -> None:
    folder = find_checkpoint(served[0])
    name = next(name for name in store.list_folder(folder) if "optim" in name)
    with store.open_stored(f"{folder}/{name}") as file:
        file.read([memoryview(bytearray(10))], 5)
        path = next(tmp_path.rglob(name))
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        with pytest.raises(CheckpointError, match="has changed since its header was read"):
            file.read([memoryview(bytearray(10))], 5)
