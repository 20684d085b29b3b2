"""Loads between 40 pairs of topologies match `recorded.json.gz` in each read, each copied byte and each loaded value.

The record depends on no class of the loader: it names files, byte ranges and destinations. A commit that changes plans
on purpose rewrites it with `UPDATE_RECORDED=1 pytest tests/load/test_recorded.py` and explains the change.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import CopyItem
from deepspeed_ucp.model.storage import ITEMSIZE
from deepspeed_ucp.plan.locate import locate
from tests.load import test_reshard_atomic as atomic
from tests.support.cases import AWKWARD, KINDS, pair_id
from tests.support.covering import few, params
from tests.support.expertmodels import FUSED, NATIVES
from tests.support.ranks import run_ranks
from tests.support.reshard import FakeTarget, Loaded, Options, make_targets, open_for, plan, prepare_rank
from tests.support.reshard3d import PIPELINE, PIPELINES, PLAIN, PLAINS, draw_state, expect, load_all, make_config
from tests.support.swapped import MODEL as SWAPPED
from tests.support.swapped import SwappedTarget
from tests.synth import Model, Topology, random_state, write_checkpoint

RECORD = Path(__file__).with_name("recorded.json.gz")
Found = tuple[AtomicIndex, list[Loaded]]
Run = tuple[str, str, int, int, int, str]
"""Record, buffer, first byte, first element, number of bytes, dtype in the file."""


@dataclass(frozen=True)
class Pair:
    kind: str
    source: Topology
    target: Topology
    load: Callable[[Topology, Topology, Path], Found]

    @property
    def name(self) -> str:
        return f"{self.kind}: {pair_id((self.source, self.target))}"


def load_flat(source: Topology, target: Topology, folder: Path) -> Found:
    path = write_checkpoint(folder, AWKWARD, random_state(AWKWARD, 7, precision=source.precision), source)
    return load_all(path, make_targets(AWKWARD, target), Options().config)


def load_3d(model: Model, *, converted: bool = False) -> Callable[[Topology, Topology, Path], Found]:
    def load(source: Topology, target: Topology, folder: Path) -> Found:
        held, config = draw_state(model, source), Options().config if converted else make_config(model)
        path = atomic.convert_run(held, folder)[1] if converted else held.write(folder)
        return load_all(path, expect(held, target).make_targets(), config)

    return load


def load_swapped(source: Topology, target: Topology, folder: Path) -> Found:
    path = write_checkpoint(folder / "tag", SWAPPED, random_state(SWAPPED, 0, precision=source.precision), source)
    targets = [SwappedTarget(folder / "swap", target, rank) for rank in range(target.dp)]
    index = open_for(path, targets[0])

    def prepare(rank: int, comm: Any) -> Loaded:
        loaded = prepare_rank(index, targets[rank], comm)
        plan(loaded, Options())
        return loaded

    return index, run_ranks(target.dp, prepare)


def list_pairs() -> Iterator[Pair]:
    for source, target in zip(KINDS * 2, [*KINDS[3:], *KINDS[:3], *KINDS[6:], *KINDS[:6]], strict=True):
        yield Pair("ZeRO", source, target, load_flat)
    for source, target in zip(PIPELINES, [*PIPELINES[2:], *PIPELINES[:2]], strict=True):
        yield Pair("pipeline", source, target, load_3d(PIPELINE))
    for source, target in zip(PLAINS, [*PLAINS[3:], *PLAINS[:3]], strict=True):
        yield Pair("tensor parallel", source, target, load_3d(PLAIN))
    for model, kind in ((NATIVES, "experts"), (FUSED, "AutoEP")):
        yield Pair(kind, Topology(1, 4, "bf16", ep=(2,)), Topology(2, 2, ep=(1,)), load_3d(model))
    yield Pair("experts", Topology(1, 4, tp=2, ep=(2,)), Topology(0, 4, ep=(4,)), load_3d(NATIVES))
    yield Pair("NVMe", Topology(1, 3), Topology(3, 2), load_swapped)
    source, target = Topology(1, 2, "bf16", tp=2, pp=2), Topology(0, 1, tp=3)
    yield Pair("converted", source, target, load_3d(atomic.PIPELINE, converted=True))
    yield Pair("converted", Topology(2, 2, "bf16", tp=4), Topology(3, 3, "bf16"), load_3d(atomic.PLAIN, converted=True))


PAIRS = {pair.name: pair for pair in list_pairs()}


# -- description of a load --------------------------------------------------------------------------------------------


def describe(index: AtomicIndex, ranks: Sequence[Loaded]) -> dict[str, list[list[str]]]:
    return {
        "reads": [sorted(list_reads(index, rank)) for rank in ranks],
        "copies": [sorted(list_copies(index, rank)) for rank in ranks],
        "values": [list_values(rank.target) for rank in ranks],
    }


def name_records(index: AtomicIndex) -> list[str]:
    """Name each record by its file and its index among the file's records, because torch may change offsets."""
    records, names = index.records, dict[int, str]()
    seen = Counter[int]()
    for file, _, number in sorted(zip(records.files, records.offsets, range(len(records)), strict=True)):
        names[number] = f"{os.path.basename(index.files[file].path)} {seen[file]}"
        seen[file] += 1
    return [names[number] for number in range(len(records))]


def list_reads(index: AtomicIndex, rank: Loaded) -> Iterator[str]:
    """Yield ``FILE RECORD BYTE LENGTH`` for each read."""
    names = name_records(index)
    for read in rank.reads:
        yield f"{names[read.record]} {read.offset:06} {read.nbytes}"


def list_copies(index: AtomicIndex, rank: Loaded) -> Iterator[str]:
    """Yield ``FILE RECORD BYTE LENGTH DTYPE → BUFFER ELEMENT`` for each maximal contiguous run of bytes."""
    records, names, wants = name_records(index), name_buffers(rank), rank.fill_plan.wants
    runs = []
    for item in (item for want in wants.wants for item in locate(want)):
        buffer, stored = wants.sinks[item.destination]
        for offset, element in list_runs(item, ITEMSIZE[stored]):
            runs.append((records[item.record], names[buffer], offset, element, item.run, stored))
    for name, buffer, low, element, nbytes, stored in join_runs(sorted(runs)):
        yield f"{name} {low:06} {nbytes} {stored} → {buffer} {element}"


def name_buffers(rank: Loaded) -> list[str]:
    """Name each buffer by its content, and number buffers of equal names."""
    seen, names = Counter[str](), []
    for slot in rank.fill_plan.wants.buffers:
        seen[slot] += 1
        names.append(f"{slot}[{seen[slot] - 1}]")
    return names


def list_runs(item: CopyItem, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield (byte of the record, element of the destination) of each run."""
    for number in range(item.count):
        yield item.offset + number * item.step, item.position + number * (item.stride or item.run // itemsize)


def join_runs(runs: Iterable[Run]) -> list[Run]:
    joined: list[Run] = []
    for record, buffer, low, element, nbytes, stored in runs:
        last = joined[-1] if joined else None
        end = (*last[:2], last[2] + last[4], last[3] + last[4] // ITEMSIZE[last[5]], last[5]) if last else None
        if last and (record, buffer, low, element, stored) == end:
            joined[-1] = (*last[:4], last[4] + nbytes, stored)
        else:
            joined.append((record, buffer, low, element, nbytes, stored))
    return joined


def list_values(target: FakeTarget) -> list[str]:
    """List a digest of each tensor that the rank holds; in swap files of each file."""
    if isinstance(target, SwappedTarget):
        return [f"{name} {digest(data)}" for name, data in target.look().items()]
    digests = []
    for number, flat in enumerate(target.flats):
        state = target.wrapped.state.get(flat.tensor, {}) if target.wrapped else {}
        digests.append(f"flat {number} fp32 {digest_tensor(flat.data)}")
        digests += [
            f"flat {number} {key} {digest_tensor(torch.as_tensor(value))}" for key, value in sorted(state.items())
        ]
    return digests + [f"{extra.name} {digest_tensor(extra.data)}" for extra in target.extras()]


def digest_tensor(tensor: torch.Tensor) -> str:
    return digest(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# -- the record -------------------------------------------------------------------------------------------------------


def read_record() -> dict[str, Any]:
    return json.loads(gzip.decompress(RECORD.read_bytes())) if RECORD.exists() else {}  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", params(few(list(PAIRS), len(PAIRS) // 2), PAIRS))
def test_a_load_matches_its_record(name: str, tmp_path: Path) -> None:
    pair, record = PAIRS[name], read_record()
    if pair.kind == "AutoEP":
        pytest.importorskip("deepspeed.checkpoint.autoep_affine", reason="DeepSpeed before 0.19 has no AutoEP")
    now = describe(*pair.load(pair.source, pair.target, tmp_path))
    if os.environ.get("UPDATE_RECORDED"):
        record[name] = now
        text = json.dumps({key: record[key] for key in sorted(record.keys() & PAIRS.keys())}, ensure_ascii=False)
        RECORD.write_bytes(gzip.compress(text.encode(), mtime=0))
    for kind, ranks in record[name].items():
        for rank, (old, new) in enumerate(zip(ranks, now[kind], strict=True)):
            assert new == old, f"rank {rank}, {kind}"


def test_the_record_has_all_pairs_and_no_others() -> None:
    assert read_record().keys() == PAIRS.keys() and len(PAIRS) == 40
