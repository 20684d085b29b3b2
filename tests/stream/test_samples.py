"""Samples of masters and copies that each rank compares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import MASTER, Atoms
from deepspeed_ucp.stream import duplicates
from deepspeed_ucp.stream.duplicates import Pair
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model(tuple(Param(f"w{number}", (7, 5)) for number in range(24)))


def list_pairs(index: AtomicIndex, monkeypatch: pytest.MonkeyPatch, rank: int = 0, size: int = 1) -> list[Pair]:
    """List the masters and copies that a rank compares."""
    found: list[Pair] = []
    comm = mock.Mock(rank=rank, size=size, run=lambda work: work())
    monkeypatch.setattr(duplicates, "compare_pairs", lambda _, pairs, *others: found.extend(pairs))
    duplicates.check_samples(index, index.atoms, comm)
    return found


def test_each_rank_creates_only_the_atoms_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0, precision="bf16"), Topology(1, 6, "bf16"))
    index = open_checkpoint(str(folder), Comm())
    whole, compared, make = list_pairs(index, monkeypatch), list[Pair](), Atoms.__getitem__
    for rank in range(4):
        with mock.patch.object(Atoms, "__getitem__", autospec=True, side_effect=make) as made:
            pairs = list_pairs(index, monkeypatch, rank, 4)
        assert {key.param for (_, key), _ in made.call_args_list} == {here.atom.param for here, _ in pairs}
        assert len({here.atom.param for here, _ in pairs}) < len(MODEL.params) / 2
        parted = [part for each, _ in pairs for part in each.atom.shards[0].find(MASTER, each.start, each.end)]
        assert len({index.records.files[part.record] for part in parted}) == (2 if rank < 2 else 1)
        assert all(here.atom.state == MASTER and replace(here, atom=there.atom) == there for here, there in pairs)
        compared += pairs
    assert sorted(map(str, compared)) == sorted(map(str, whole))
