"""Real engines that load from `s3://`, in another topology and in the same one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.cases import Case
from tests.support.engines.ranks import Load, differences, load_each

pytest.importorskip("moto")

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.torchsave.torchfile import list_records
from tests.stores.server import BUCKET, Server, fail_first, serve_bucket
from tests.support.memory import put_folder

SMALL = {"model": "plain", "scheduler": True}
SOURCE = Case(1, 3)


@contextmanager
def store(folder: Path) -> Iterator[Server]:
    """A server that has the folder as `run`."""
    with serve_bucket() as server:
        put_folder(folder, f"s3://{BUCKET}/run")
        yield server


def spoil(folder: Path) -> None:
    """Remove a file, and damage another one where its directory does not show it."""
    first, second, *_ = sorted(folder.rglob("*optim_states.pt"))
    first.unlink()
    record = max(list_records(str(second)).records, key=lambda record: record.nbytes)
    with second.open("r+b") as stream:
        stream.seek(record.offset)
        data = bytes(byte ^ 1 for byte in stream.read(record.nbytes))
        stream.seek(record.offset)
        stream.write(data)


@pytest.mark.exhaustive
def test_what_is_missing_or_damaged_is_taken_from_another_place(
    sources: Any, ucp_worlds: WorldPool, tmp_path: Path
) -> None:
    """A folder and a store, each for the other; both have a file less and a damaged one."""
    folder = Path(sources.get(SOURCE, **SMALL).folder)
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    spoil(half)
    with store(folder) as server:
        put_folder(half, f"s3://{BUCKET}/half")
        target, run = Case(3, 2), f"s3://{BUCKET}/run"
        for first, other in ((str(half), run), (f"s3://{BUCKET}/half", str(folder))):
            case = target.on(storage_options=server.options, also=[other])
            for (local,) in ucp_worlds.get(case.dp).run(load_each, case.training(**SMALL), [Load(first)]):
                assert local.direct
                assert differences(folder, local.state) == []


def test_an_engine_loads_from_a_store(sources: Any, ucp_worlds: WorldPool) -> None:
    """An engine that has trained meanwhile, too; the server fails now and then."""
    folder = Path(sources.get(SOURCE, **SMALL).folder)
    with store(folder) as server:
        loads = [Load(f"s3://{BUCKET}/run"), Load(f"s3://{BUCKET}/run/", before=1)]
        with server.failing(fail_first(1, "503", having="optim")):
            for case in (Case(3, 2), SOURCE):
                target = case.on(storage_options=server.options)
                ranks = ucp_worlds.get(target.dp).run(load_each, target.training(**SMALL), loads)
                for local in (local for each in ranks for local in each):
                    assert local.direct and str(local.path).startswith(f"s3://{BUCKET}/run/")
                    assert differences(folder, local.state) == []
