"""Pairs of kinds of engines and ways of saving: the files equal DeepSpeed's, and memory loads elsewhere."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.formats.deepspeed.files import PUBLISHED, SEAL
from deepspeed_ucp.io.paths import UPLOAD
from deepspeed_ucp.io.store import list_tree, read_small
from deepspeed_ucp.testing import WorldPool
from tests.stores.server import BUCKET, Server, serve_bucket
from tests.support.covering import params
from tests.support.engines import pairs as engine_pairs
from tests.support.engines.pairs import KINDS
from tests.support.engines.ranks import files_that_differ, on_nodes, with_options
from tests.support.engines.saves import wait_for_marks

pytest.importorskip("moto")

FACTORS = (
    tuple(KINDS),
    ("tmpfs", "disk"),
    ("alone", "copied"),
    ("folder", "s3"),
)
CHOSEN = [
    # engine, memory, copied to the next node, place
    ("zero1", "disk", "copied", "s3"),
    ("zero2", "tmpfs", "alone", "folder"),
    ("zero3", "disk", "copied", "folder"),
    ("bf16", "disk", "copied", "folder"),
    ("fp16_fused", "tmpfs", "copied", "folder"),
    ("fp16_unfused", "tmpfs", "copied", "folder"),
    ("torch", "tmpfs", "copied", "s3"),
    ("pipeline", "disk", "alone", "folder"),
    ("experts", "tmpfs", "copied", "s3"),
    ("offload", "tmpfs", "copied", "s3"),
    ("nvme", "disk", "alone", "s3"),
    ("autotp", "disk", "alone", "s3"),
    ("lora", "tmpfs", "alone", "s3"),
    ("muon", "tmpfs", "alone", "s3"),
    ("autoep", "tmpfs", "alone", "folder"),
    ("params", "disk", "copied", "s3"),
    ("none", "disk", "alone", "folder"),
]
"""Every pair of a kind or a way with another way."""
ALWAYS = [
    ("zero3", "disk", "copied", "s3"),
    ("pipeline", "tmpfs", "copied", "folder"),
    ("experts", "tmpfs", "alone", "s3"),
    ("nvme", "disk", "alone", "folder"),
]
"""Kinds whose files differ, with every pair of two ways; all others are exhaustive."""


def reverse(row: tuple[str, ...]) -> tuple[str, ...]:
    """Return the same kind with the other value of each way."""
    return row[0], *(ways[1 - ways.index(way)] for ways, way in zip(FACTORS[1:], row[1:], strict=True))


ROWS = [*CHOSEN, *map(reverse, CHOSEN)]
"""Each kind in one way and in the opposite one."""


def test_all_pairs_are_there() -> None:
    """Pairs of ways are among the rows that always run, too."""
    for first, second in combinations(range(len(FACTORS)), 2):
        pairs = set(product(FACTORS[first], FACTORS[second]))
        assert {(row[first], row[second]) for row in ROWS} == pairs
        assert {(row[first], row[second]) for row in ALWAYS} == pairs or not first
    assert [row[0] for row in CHOSEN] == list(KINDS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve_bucket() as found:
        yield found


@pytest.fixture
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Make a folder of the kind in the row."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if "tmpfs" in request.param else tmp_path) as folder:
        yield folder


@pytest.mark.parametrize(
    ("row", "memory"),
    params([(row, row) for row in ALWAYS], [(row, row) for row in ROWS], lambda row: "-".join(row[0])),
    indirect=["memory"],
)
def test_saves(row: tuple[str, ...], memory: str, server: Server, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The files equal DeepSpeed's save of the step; memory loads in another topology."""
    name, _, copies, place = row
    (source, target, _), world, swap = KINDS[name], ucp_worlds.get(2), str(tmp_path / "swap")
    saved, own = tmp_path / "saved", tmp_path / "own"
    url = f"s3://{BUCKET}/{'-'.join(row)}" if place == "s3" else str(saved)
    save = {
        "memory": "$NODE_MEMORY" if copies == "copied" else memory,
        "copies": int(copies == "copied"),
        "wait_s": 240,
    }
    options = {"save": save, "storage_options": server.options}

    def run(work: Any, *args: Any, **more: Any) -> list[Any]:
        if copies == "copied":
            return list(world.run(on_nodes, work, memory, *args, **more))
        return list(world.run(work, *args, **more))

    saved_ranks = run(with_options, options, engine_pairs.save, name, url, str(own), swap)
    wait_for_marks(url)
    if place == "s3":
        download(url, saved)
    assert [each for each in files_that_differ(own, saved) if os.path.basename(each) != SEAL] == []
    found = run(with_options, options, engine_pairs.load_elsewhere, name, url, swap)
    assert all(local.path.startswith(memory) for local in found)
    assert target.compare(source.keep(source.join(saved_ranks)), target.join(found))[1] == []


def download(url: str, folder: Path) -> None:
    """Copy a store to a folder with the files of each tag in the tag's folder."""
    for name in list_tree(url):
        path = folder / re.sub(rf"{re.escape(UPLOAD)}[^/]+/", "", name)
        if path.name == PUBLISHED:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_small(f"{url}/{name}"))
