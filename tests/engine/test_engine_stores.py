"""Real engines that load from `s3://`, in another topology and in the same one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines.cases import Case
from tests.support.engines.ranks import Load, differences, load_each

pytest.importorskip("moto")

from deepspeed_ucp.testing import WorldPool
from tests.stores.server import BUCKET, fail_first, serve_bucket
from tests.support.memory import put_folder

SMALL = {"model": "plain", "scheduler": True}
SOURCE = Case(1, 3)


def test_an_engine_loads_from_a_store(sources: Any, ucp_worlds: WorldPool) -> None:
    """Into a trained engine, too; the server fails sometimes."""
    folder = sources.get(SOURCE, **SMALL).folder
    loads = [Load(f"s3://{BUCKET}/run"), Load(f"s3://{BUCKET}/run/", before=1)]
    with serve_bucket() as server:
        put_folder(folder, f"s3://{BUCKET}/run")
        with server.failing(fail_first(1, "503", having="optim")):
            for case in (Case(3, 2), SOURCE):
                target = case.on(storage_options=server.options)
                ranks = ucp_worlds.get(target.dp).run(load_each, target.training(**SMALL), loads)
                for local in (local for each in ranks for local in each):
                    assert local.direct and str(local.path).startswith(f"s3://{BUCKET}/run/")
                    assert differences(folder, local.state) == []
