"""Engines of every kind × ways of saving, each pair of them: the files are DeepSpeed's own, and load as such."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.io.paths import UPLOAD
from deepspeed_ucp.io.store import list_tree, read_small
from deepspeed_ucp.sources.files import BASE, FROZEN, PUBLISHED, SEAL, name_base_file
from deepspeed_ucp.testing import WorldPool
from tests.stores.server import BUCKET, Server, serve_bucket
from tests.support.covering import params
from tests.support.engines import pairs as engine_pairs
from tests.support.engines import saves as engine_saves
from tests.support.engines.pairs import KINDS
from tests.support.engines.ranks import files_that_differ, is_same
from tests.support.engines.saves import wait_for_marks

pytest.importorskip("s3fs", reason="one of the places is S3")
pytest.importorskip("moto")

FACTORS = (
    tuple(KINDS),
    ("at-once", "overlap"),
    ("tmpfs", "disk"),
    ("alone", "copied"),
    ("folder", "s3"),
    ("all", "once"),
)
ROWS = [
    # engine, copy, memory, in a neighbour's memory too, place, frozen parameters
    ("zero1", "at-once", "disk", "copied", "s3", "once"),
    ("zero1", "overlap", "tmpfs", "alone", "folder", "all"),
    ("zero2", "at-once", "tmpfs", "alone", "folder", "all"),
    ("zero2", "overlap", "disk", "copied", "s3", "once"),
    ("zero3", "overlap", "disk", "copied", "folder", "all"),
    ("zero3", "at-once", "tmpfs", "alone", "s3", "once"),
    ("bf16", "at-once", "disk", "copied", "folder", "all"),
    ("bf16", "overlap", "tmpfs", "alone", "s3", "once"),
    ("fp16_fused", "at-once", "tmpfs", "copied", "folder", "once"),
    ("fp16_fused", "overlap", "disk", "alone", "s3", "all"),
    ("fp16_unfused", "overlap", "tmpfs", "copied", "folder", "once"),
    ("fp16_unfused", "at-once", "disk", "alone", "s3", "all"),
    ("torch", "overlap", "tmpfs", "copied", "s3", "all"),
    ("torch", "at-once", "disk", "alone", "folder", "once"),
    ("pipeline", "overlap", "disk", "alone", "folder", "once"),
    ("pipeline", "at-once", "tmpfs", "copied", "s3", "all"),
    ("experts", "at-once", "tmpfs", "copied", "s3", "once"),
    ("experts", "overlap", "disk", "alone", "folder", "all"),
    ("offload", "overlap", "tmpfs", "copied", "s3", "once"),
    ("offload", "at-once", "disk", "alone", "folder", "all"),
    ("nvme", "at-once", "disk", "alone", "s3", "once"),
    ("nvme", "overlap", "tmpfs", "copied", "folder", "all"),
    ("autotp", "overlap", "disk", "alone", "s3", "once"),
    ("autotp", "at-once", "tmpfs", "copied", "folder", "all"),
    ("lora", "overlap", "tmpfs", "alone", "s3", "all"),
    ("lora", "at-once", "disk", "copied", "folder", "once"),
    ("muon", "at-once", "tmpfs", "alone", "s3", "all"),
    ("muon", "overlap", "disk", "copied", "folder", "once"),
    ("autoep", "at-once", "tmpfs", "alone", "folder", "once"),
    ("autoep", "overlap", "disk", "copied", "s3", "all"),
    ("params", "at-once", "disk", "copied", "s3", "all"),
    ("params", "overlap", "tmpfs", "alone", "folder", "once"),
    ("none", "overlap", "disk", "alone", "folder", "all"),
    ("none", "at-once", "tmpfs", "copied", "s3", "once"),
]
"""Each kind in one way and in the opposite one: all pairs, and all combinations of ways but few."""

CHOSEN = ROWS[::2]
"""One for each kind; the others are exhaustive."""


def test_all_pairs_are_there() -> None:
    """Those of ways among what is always run, too."""
    for first, second in combinations(range(len(FACTORS)), 2):
        pairs = set(product(FACTORS[first], FACTORS[second]))
        assert {(row[first], row[second]) for row in ROWS} == pairs
        assert {(row[first], row[second]) for row in CHOSEN} == pairs or not first
    assert [row[0] for row in CHOSEN] == list(KINDS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve_bucket() as found:
        yield found


@pytest.fixture
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder of the kind that the row asks for."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if "tmpfs" in request.param else tmp_path) as folder:
        yield folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("row", "memory"),
    params([(row, row) for row in CHOSEN], [(row, row) for row in ROWS], lambda row: "-".join(row[0])),
    indirect=["memory"],
)
def test_saves(row: tuple[str, ...], memory: str, server: Server, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """As DeepSpeed's own save of the step; from memory in another topology. What has its frozen parameters elsewhere
    DeepSpeed loads without the plugin: all else it has written itself, to the bit."""
    name, copy, _, copies, place, frozen = row
    kind, world, swap = KINDS[name], ucp_worlds.get(2), str(tmp_path / "swap")
    saved, own = tmp_path / "saved", tmp_path / "own"
    url = f"s3://{BUCKET}/{'-'.join(row)}" if place == "s3" else str(saved)
    save = {
        "memory": "$NODE_MEMORY" if copies == "copied" else memory,
        "overlap": copy == "overlap",
        "copies": int(copies == "copied"),
        "frozen": "once" if frozen == "once" else "always",
        "wait_s": 60,
    }
    options = {"save": save, "storage_options": server.options}

    def run(work: Any, *args: Any, **more: Any) -> list[Any]:
        if copies == "copied":
            return list(world.run(engine_saves.on_nodes, work, memory, *args, **more))
        return list(world.run(work, *args, **more))

    is_split = frozen == "once" and kind.frozen
    states = run(engine_saves.with_options, options, engine_pairs.save, name, url, str(own), swap, is_split=is_split)
    for counts in zip(*(counts for _, counts in states), strict=True):  # by save; at stage 0 one rank writes all
        assert [at_once for at_once, _ in counts] == [0, 0]
        assert any(later for _, later in counts) == (copy == "overlap" and kind.leaves)
    held = [each[-1] for each, _ in states]
    wait_for_marks(url)
    if place == "s3":
        download(url, saved)
    check_files(saved, own, is_split=is_split)

    if is_split and not kind.needs_all:
        found = world.run(engine_pairs.load_plainly, name, str(saved), swap)
        expected = held
        if not kind.is_exact:  # of its own save it brings back as much
            expected = world.run(engine_pairs.load_plainly, name, str(own), swap)
        for want, got in zip(expected, found, strict=True):
            assert engine_pairs.differ_on_rank(want, got) == []

    found = run(engine_saves.with_options, options, engine_pairs.load_elsewhere, name, url, swap)
    assert all(path.startswith(memory) for path, _ in found)
    assert kind.differ(held, [each for _, each in found]) == []


def download(url: str, folder: Path) -> None:
    """Copy a store to a folder in which each tag holds its files itself."""
    for name in list_tree(url):
        path = folder / re.sub(rf"{re.escape(UPLOAD)}[^/]+/", "", name)
        if path.name == PUBLISHED:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_small(f"{url}/{name}"))


def check_files(saved: Path, own: Path, *, is_split: bool) -> None:
    """Tensor by tensor.

    Args:
        is_split: frozen parameters are beside the tags.
    """
    differing = {name for name in files_that_differ(str(own), str(saved)) if os.path.basename(name) != SEAL}
    if not is_split:
        assert differing == set()
        return
    (base,) = saved.glob(f"{BASE}*")
    bare = Path(f"{own}-trained")
    differing = {name for name in files_that_differ(str(bare), str(saved)) if not name.startswith(BASE)}
    more = {
        name for name in map(os.path.basename, differing) if "_expert_" not in name
    }  # of experts it leaves none out
    assert more == {SEAL, FROZEN}
    for path in own.rglob("*_states.pt"):
        rest, whole = (torch.load(each, weights_only=False) for each in (saved / path.relative_to(own), path))
        part = base / name_base_file(path.name)
        frozen = torch.load(part, weights_only=False) if part.exists() else {}
        assert is_same(*(sort(each) for each in (complete(rest, frozen), whole))), path.name


def complete(rest: dict[str, Any], frozen: dict[str, Any]) -> dict[str, Any]:
    """A file's content with what its base has."""
    if "module" not in frozen:
        return {**rest, **frozen}
    parts = {key: {**(rest[key] or {}), **frozen[key]} or None for key in frozen.keys() & rest.keys()}
    if shapes := parts.get("frozen_param_shapes"):  # below ZeRO 3 the module's are among the fragments as well
        copies = {name: tensor for name, tensor in parts["module"].items() if name in shapes}
        parts["frozen_param_fragments"] = {**copies, **(parts["frozen_param_fragments"] or {})}
    return {**rest, **parts}


def sort(content: dict[str, Any]) -> dict[str, Any]:
    """Without the order of parameters."""
    ordered = {key: dict(sorted(held.items())) if isinstance(held, dict) else held for key, held in content.items()}
    return dict(sorted(ordered.items()))
