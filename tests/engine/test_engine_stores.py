"""Real engines that load from `s3://`, in another topology and in the same one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import engine_ranks
import pytest
from engine_cases import Case
from engine_ranks import Load

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from deepspeed_ucp.io import remote
from deepspeed_ucp.testing import WorldPool
from tests.stores.server import BUCKET, fail_first, serve

SMALL = {"model": "plain", "scheduler": True}
SOURCE = Case(1, 3)


def test_an_engine_loads_from_a_store(sources: Any, ucp_worlds: WorldPool) -> None:
    """An engine that has trained meanwhile, too; the server fails now and then."""
    folder = Path(sources.get(SOURCE, **SMALL).folder)
    with serve() as server:
        remote.set_options(server.options)
        with suppress(FileExistsError):  # moto's buckets are the process's
            remote.connect("s3://x", writing=True)[0].mkdir(BUCKET)
        for path in (path for path in folder.rglob("*") if path.is_file()):
            remote.put_file(str(path), f"s3://{BUCKET}/run/{path.relative_to(folder)}")
        remote.set_options({})
        on = {"checkpoint": {"universal": {"storage_options": server.options}}}
        loads = [Load(f"s3://{BUCKET}/run"), Load(f"s3://{BUCKET}/run/", before=1)]
        with server.failing(fail_first(1, "503", having="optim")):
            for target in (Case(3, 2, config=on), SOURCE.but(config=on)):
                ranks = ucp_worlds.get(target.dp).run(engine_ranks.load_each, target.training(**SMALL), loads)
                for local in (local for each in ranks for local in each):
                    assert local.direct and str(local.path).startswith(f"s3://{BUCKET}/run/")
                    assert engine_ranks.differences(str(folder), local.state) == []
